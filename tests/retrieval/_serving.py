"""Ways to ask the server: in the process without a socket, or over loopback."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import uvicorn

from gossamer.cli.serve import listening


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.body) == {"error"}
        assert set(self.body["error"]) == {"type", "message", "param"}
        found: dict[str, Any] = self.body["error"]
        return found


async def call(
    app: Any,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    chunks: Sequence[bytes] | None = None,
    content_type: str | None = "application/json",
) -> Answer:
    """Ask an application without a socket; `body` is bytes, or what becomes JSON."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    parts = [raw] if chunks is None else list(chunks)
    headers = [] if content_type is None else [(b"content-type", content_type.encode())]
    if chunks is None:
        headers.append((b"content-length", str(len(raw)).encode()))
    scope = {
        "type": "http",
        "method": method or ("GET" if body is None and chunks is None else "POST"),
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()  # a body that never ends
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts) or part == b"..."}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    is_json = found.get("content-type") == "application/json"
    return Answer(sent[0]["status"], found, json.loads(content) if is_json else content.decode())


def ask(app: Any, path: str, body: Any = None, **more: Any) -> Answer:
    """Ask once."""
    return asyncio.run(call(app, path, body, **more))


@contextmanager
def served(app: Any) -> Iterator[int]:
    """Serve an application on loopback in a thread; yields the port."""
    config = uvicorn.Config(app, log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield port
        finally:
            server.should_exit = True
            thread.join()


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.005)


def post(port: int, path: str, body: Any, *, method: str = "POST") -> Answer:
    """Ask over loopback, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, raw, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), json.loads(response.read()))
    finally:
        connection.close()


async def post_all(port: int, requests: Sequence[tuple[str, Any]]) -> list[Answer]:
    """Ask all at once, each on a connection of its own that is open before the first is sent."""
    streams = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in requests))

    async def one(path: str, body: Any, reader: Any, writer: Any) -> Answer:
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(raw)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + raw)
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        return Answer(int(head.split()[1]), {}, json.loads(content))

    pairs = zip(requests, streams, strict=True)
    return await asyncio.gather(*(one(*request, *stream) for request, stream in pairs))


class Letters:
    """An encoder of counts of letters; it can be made to wait, to fail, to give NaN."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.running = threading.Event()
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode(texts, 1.0)

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode(texts, 2.0)

    def _encode(self, texts: Sequence[str], scale: float) -> np.ndarray:
        self.running.set()
        assert self.gate.wait(20)
        self.batches.append(list(texts))
        self.threads.add(threading.get_ident())
        if "fault" in texts:
            raise KeyError("a secret text")
        rows = [[scale * text.count(letter) for letter in "abcdefgh"] for text in texts]
        vectors = np.array(rows, dtype=np.float64)
        vectors[[text == "nan" for text in texts]] = np.nan
        return vectors


class Ranker:
    """Orders documents by their length; the longest first."""

    max_document_length = 5

    def rank(self, query: str, documents: Sequence[str], top_k: int | None = None) -> Any:
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))[:top_k]
        scores = [float(len(documents[i])) for i in order]
        if query == "nan":
            scores[0] = float("nan")
        cut = sum(len(document) > 5 for document in documents)
        return SimpleNamespace(ids=[str(i) for i in order], order=order, scores=scores, num_cut=cut)
