"""A server of models over HTTP: reranking, vectors, search."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from gossamer.checks import check_range
from gossamer.errors import MissingDependencyError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from gossamer.retrieval._roles import EncoderLike, IndexLike, RankerLike

__all__ = ["ServerLimits", "create_app"]


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes at most.

    Args:
        max_waiting: Requests in the queue; one more gets status 503. Range: >= 1. Default 256.
        max_documents: Documents, texts or results of a request. Range: >= 1. Default 1000.
        max_body_bytes: Size of a request; a larger one gets status 413 and is not read on. Unit:
            bytes. Range: >= 1. Default 16 MiB.

    Raises:
        ConfigError: If a number is out of its range.

    Example:
        >>> ServerLimits(max_documents=100).max_waiting
        256
    """

    max_waiting: int = 256
    max_documents: int = 1000
    max_body_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        """Check the numbers."""
        for field in fields(self):
            check_range(getattr(self, field.name), field.name, low=1, integer=True)


def create_app(
    *,
    ranker: RankerLike | None = None,
    encoder: EncoderLike | None = None,
    index: IndexLike | None = None,
    max_batch: int = 32,
    timeout: float = 30.0,
    limits: ServerLimits | None = None,
) -> Starlette:
    """Return an ASGI application with `/rerank`, `/embed`, `/search`, `/health` and `/docs`.

    All work of the models is done in one thread. Texts of requests that wait meanwhile are encoded
    together, up to `max_batch`, so that throughput rises under load while a single request waits
    for nothing. A request is answered in `timeout`, or with status 504. There is no authentication.

    Args:
        ranker: Answers `/rerank`, one request after another, such as a `BlockRanker`; any object
            whose `rank(query, documents)` returns `order` (places, best first), `scores` in that
            order and `num_cut`.
        encoder: Answers `/embed`, and `/rerank` where there is no ranker, by inner products; such
            as a `DualEncoder`.
        index: Answers `/search`: a `DenseIndex` made with the encoder, or a `BM25Index`.
        max_batch: Most texts that are encoded at once. Range: >= 1. Default 32.
        timeout: Unit: seconds. Range: > 0. Default 30.
        limits: Most requests that wait, documents of a request and bytes. Default
            `ServerLimits()`.

    Raises:
        MissingDependencyError: Without starlette (extra `serve`).
        ConfigError: If an option is out of its range, nothing is given, or an object lacks a
            method of its role.
        ShapeError: If encoder and index differ in width.

    Example:
        >>> from gossamer.retrieval import BM25Index
        >>> app = create_app(index=BM25Index({"d1": "red wings", "d2": "boats"}))
        >>> [route.path for route in app.routes][:4]
        ['/rerank', '/embed', '/search', '/health']

    Source: the request and answer of the rerank services of Cohere and Jina, and of the embeddings
        of OpenAI.
    Deviations: unknown fields of a request are errors; `meta` and `usage` hold counts of this
        server.
    """
    check_range(timeout, "timeout", low=0.0, open_low=True)
    try:
        import starlette  # noqa: F401
    except ImportError:
        raise MissingDependencyError("starlette", "serve") from None
    from gossamer.retrieval._roles import Roles
    from gossamer.retrieval._routes import build_app

    roles = Roles(ranker, encoder, index, max_batch)
    return build_app(roles, limits or ServerLimits(), timeout)
