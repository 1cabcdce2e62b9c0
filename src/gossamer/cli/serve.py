"""`gossamer serve`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gossamer._version import __version__
from gossamer.cli._common import COMMON, Common, print_json, set_threads

__all__ = ["listening", "run"]

_INTERRUPTED = 130
_LOCAL = ("127.0.0.1", "::1", "localhost")
_BACKLOG = 2048
_GRACE = 5  # seconds for a connection to close, beyond --timeout


def run(
    *,
    model: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    index: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_batch: int = 32,
    timeout: float = 30.0,
    max_document_tokens: int | None = None,
    max_waiting: int = 256,
    common: Common = COMMON,
) -> int:
    """Serve models over HTTP: POST /rerank, /embed and /search, GET /health and /docs.

    Prints the address when it is ready. SIGTERM or Ctrl+C end it when the requests that came in are
    answered. There is no authentication: put a proxy before it to let others in.

    Example: gossamer serve --model packaged:minilm --index data/nfcorpus --port 8000

    Args:
        model: Folder of an encoder of texts or of a causal language model, or packaged:minilm,
            packaged:smollm2. Give it twice for an encoder and a ranker.
        index: Folder of DenseIndex, which needs the encoder that made it; or a BEIR or MS MARCO
            folder, here or in GOSSAMER_DATA, whose documents are searched by BM25.
        host: Address to listen on.
        port: 0 for any that is free.
        max_batch: Most texts that are encoded at once.
        timeout: Seconds until a request is given up.
        max_document_tokens: Tokens that are read of a document; default what the model says.
        max_waiting: Most requests in the queue; more are told to come back.
    """
    from gossamer.checks import check_range
    from gossamer.errors import ConfigError
    from gossamer.retrieval import ServerLimits, create_app

    _need_uvicorn()
    check_range(port, "--port", low=0, high=65535, integer=True)
    if not model and index is None:
        raise ConfigError(
            "serve needs --model, --index or both; got neither. Name a folder, or packaged:minilm."
        )
    if max_document_tokens is not None:
        check_range(max_document_tokens, "--max-document-tokens", low=1, integer=True)
    set_threads(common)
    limits = ServerLimits(max_waiting=max_waiting)
    with listening(host, port) as listener:  # a taken port is told before a model is loaded
        roles = _roles(model, index, common, max_document_tokens)
        app = create_app(**roles, max_batch=max_batch, timeout=timeout, limits=limits)
        if host not in _LOCAL and not common.quiet:
            print(f"note: {host} may be open to other machines, and nobody is asked for a "
                  "password", file=sys.stderr)  # fmt: skip
        return _serve(app, listener, timeout, common)


def _need_uvicorn() -> None:
    from gossamer.errors import MissingDependencyError

    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise MissingDependencyError("uvicorn", "serve") from None


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens.

    Raises:
        ConfigError: If the address is taken, or not of this machine.
    """
    from gossamer.errors import ConfigError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) only where a socket says that it is TCP; otherwise the
    # body of an answer waits 40 ms for the receipt of its head
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host and --port must be an address of this machine that is free; got {host} {port} "
            f"({error.strerror or error}). Choose another, or --port 0 for any."
        ) from None
    with listener:
        yield listener


def _roles(
    names: Sequence[str], index: Path | None, common: Common, max_document_tokens: int | None
) -> dict[str, Any]:
    from gossamer.cli._models import check_pair, load_model, open_index
    from gossamer.errors import ConfigError

    roles: dict[str, Any] = {"index": open_index(index)} if index is not None else {}
    for name in names:
        role, loaded = load_model(
            name, device=common.device, max_document_tokens=max_document_tokens
        )
        if role in roles:
            raise ConfigError(
                f"--model may name one encoder and one ranker; {name} is another {role}. Leave one "
                "out."
            )
        roles[role] = loaded
    check_pair(roles.get("encoder"), roles.get("index"))
    return roles


def _serve(app: Any, listener: socket.socket, timeout: float, common: Common) -> int:
    """Answer requests until a signal comes; return the code to exit with."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            _say_ready(listener, common)

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=int(timeout) + _GRACE,
    )
    server = Server(config)
    caught: list[int] = []

    def stop(number: int, _: object) -> None:
        caught.append(number)
        server.should_exit = True

    # uvicorn raises a signal again when it has shut down: these handlers are there to take it
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        with _access_log(quiet=common.quiet):
            server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return _INTERRUPTED if signal.SIGINT in caught else 0


def _say_ready(listener: socket.socket, common: Common) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if common.json:
        print_json({"command": "serve", "version": __version__, "url": url})
    else:
        print(f"listening on {url}")
    sys.stdout.flush()


@contextmanager
def _access_log(*, quiet: bool) -> Iterator[None]:
    """Write a line for each request to standard error; with `quiet` only faults."""
    logger = logging.getLogger("gossamer.server")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
