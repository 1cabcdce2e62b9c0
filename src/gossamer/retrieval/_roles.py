"""What the models of the server do with a batch: encode, search, rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.retrieval._batching import Kind
from gossamer.retrieval.dense import DenseIndex

__all__ = ["Encoded", "EncoderLike", "IndexLike", "Ranked", "RankerLike", "Roles"]


class RankerLike(Protocol):
    """Orders documents; its result has `order`, `scores` and `num_cut`."""

    def rank(self, query: str, documents: Sequence[Any], top_k: int | None = None) -> Any:
        """Return the order of the documents, best first, with the score of each."""


class EncoderLike(Protocol):
    """Turns texts into vectors `(n, D)`."""

    def encode_queries(self, texts: Sequence[str]) -> Any:
        """Return the vectors of queries."""

    def encode_documents(self, texts: Sequence[str]) -> Any:
        """Return the vectors of documents."""


class IndexLike(Protocol):
    """Finds documents: by the vectors of queries for `DenseIndex`, by their texts for others."""

    def search(self, queries: Mapping[str, Any], top_k: int) -> Mapping[str, Mapping[str, float]]:
        """Return document id -> score of each query, best first."""


class Encoded(NamedTuple):
    """A vector, how many tokens were read for it, and whether the text was cut."""

    vector: NDArray[np.float32]
    num_tokens: int
    cut: bool


class Ranked(NamedTuple):
    """Places of documents, best first, their scores, and how many documents were cut."""

    order: list[int]
    scores: list[float]
    num_cut: int


class Roles:
    """The models of a server, each perhaps `None`, as functions of lists.

    Args:
        ranker: Of `/rerank`.
        encoder: Of `/embed`, of `/rerank` without a ranker, and of a `DenseIndex`.
        index: Of `/search`.
        max_batch: Most texts at once. Range: >= 1.

    Raises:
        ConfigError: If there is none, or one lacks what its role needs.
        ShapeError: If the widths of encoder and index differ.
    """

    def __init__(
        self,
        ranker: RankerLike | None,
        encoder: EncoderLike | None,
        index: IndexLike | None,
        max_batch: int,
    ) -> None:
        check_range(max_batch, "max_batch", low=1, integer=True)
        _check_role(ranker, "ranker", "rank")
        _check_role(encoder, "encoder", "encode_queries", "encode_documents")
        _check_role(index, "index", "search")
        if ranker is None and encoder is None and index is None:
            raise ConfigError(
                "the server needs a ranker, an encoder or an index; got none. Give at least one."
            )
        self.ranker: Any = ranker
        self.encoder: Any = encoder
        self.index: Any = index
        self.max_batch = max_batch
        self._check_widths()

    def kinds(self) -> dict[str, Kind]:
        """Return the work that a worker can be given."""
        kinds = {"encode": Kind(self.encode, self.max_batch)} if self.encoder else {}
        if self.index:
            kinds["search"] = Kind(self.search, self.max_batch)
        if self.ranker:
            kinds["rank"] = Kind(self.rank, 1)
        return kinds

    def max_tokens(self, role: str) -> int | None:
        """Return how many tokens of a document or query are read, `None` for all."""
        if role == "rank":
            holder = getattr(self.ranker, "template", self.ranker)
            return getattr(holder, "max_document_length", None)
        return getattr(self._tower(role), "max_length", None)

    def encode(self, items: Sequence[tuple[str, str]]) -> list[Encoded]:
        """Encode pairs of what a text is, `"query"` or `"document"`, and the text."""
        found: list[Encoded] = [None] * len(items)  # type: ignore[list-item]
        for role in ("query", "document"):
            places = [i for i, (this, _) in enumerate(items) if this == role]
            if not places:
                continue
            texts = [items[i][1] for i in places]
            vectors = self._vectors(role, texts)
            lengths = self._lengths(role, texts)
            most = self.max_tokens(role)
            for i, vector, length in zip(places, vectors, lengths, strict=True):
                read = length if most is None else min(length, most)
                found[i] = Encoded(vector, read, length > read)
        return found

    def search(self, items: Sequence[tuple[str, int]]) -> list[list[tuple[str, float]]]:
        """Search pairs of a query and how many documents are wanted."""
        texts = [query for query, _ in items]
        dense = isinstance(self.index, DenseIndex)
        asked = self._vectors("query", texts) if dense else texts
        queries = {str(i): query for i, query in enumerate(asked)}
        run = self.index.search(queries, max(top_k for _, top_k in items))
        best = [list(run[str(i)].items())[:top_k] for i, (_, top_k) in enumerate(items)]
        scores = [score for pairs in best for _, score in pairs]
        _check_made(scores, "scores")
        return best

    def rank(self, items: Sequence[tuple[str, Sequence[str]]]) -> list[Ranked]:
        """Order the documents of each query."""
        ranked = []
        for query, documents in items:
            result = self.ranker.rank(query, documents)
            scores = [float(score) for score in result.scores]
            _check_made(scores, "scores")
            order = [int(place) for place in result.order]
            ranked.append(Ranked(order, scores, int(result.num_cut)))
        return ranked

    def _vectors(self, role: str, texts: Sequence[str]) -> NDArray[np.float32]:
        queries = role == "query"
        encode = self.encoder.encode_queries if queries else self.encoder.encode_documents
        made = encode(texts)
        # NumPy has no bfloat16
        vectors = np.asarray(made.float() if hasattr(made, "float") else made, dtype=np.float32)
        _check_made(vectors, "vectors")
        return vectors

    def _tower(self, role: str) -> Any:
        """Return the part that encodes texts of a role, where the encoder has such parts."""
        tower = getattr(self.encoder, "encoder", None)
        other = getattr(self.encoder, "document_encoder", None)
        return other if role == "document" and other is not None else tower

    def _lengths(self, role: str, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each whole text, 0 where there is no tokenizer."""
        tokenizer = getattr(self._tower(role), "tokenizer", None)
        if tokenizer is None:
            return [0] * len(texts)
        rows = tokenizer(list(texts), truncation=False, padding=False, verbose=False)["input_ids"]
        return [len(row) for row in rows]

    def _check_widths(self) -> None:
        if not isinstance(self.index, DenseIndex):
            return
        if self.encoder is None:
            raise ConfigError(
                f"an index of vectors needs the encoder that made them; got {self.index!r} and no "
                "encoder. Give the model too."
            )
        width = self._vectors("query", ["a"]).shape[1]
        if not len(self.index) or self.index.dim != width:
            raise ShapeError(
                f"index must hold vectors of the encoder's width, {width}; got {self.index!r}. "
                "Build it with this encoder."
            )


def _check_role(thing: Any, name: str, *methods: str) -> None:
    for method in methods:
        if thing is not None and not callable(getattr(thing, method, None)):
            raise ConfigError(
                f"{name} must have the method {method}; got {type(thing).__name__}. Give another "
                f"object as {name}."
            )


def _check_made(values: Any, what: str) -> None:
    if not np.isfinite(values).all():
        raise DataError(
            f"the model must give finite {what}; got NaN or infinity. Load it in float32 or "
            "bfloat16 instead of float16, or look for such a weight in it."
        )
