"""Exact search in blocks of arrays, on NumPy or faiss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_finite
from gossamer.errors import ConfigError, MissingDependencyError
from gossamer.progress import progress
from gossamer.retrieval._top_k import top_k_columns

__all__ = ["blocks_of", "search_arrays"]

_LONG_SEARCH = 10**12  # multiplications; fewer take seconds and need no progress

Best = Callable[[NDArray[Any], NDArray[Any], int, str], tuple[NDArray[Any], NDArray[np.int64]]]


def search_arrays(
    asked: NDArray[Any],
    shards: Sequence[NDArray[Any]],
    top_k: int,
    block_size: int,
    engine: str,
    num_queries: int,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the best scores and their places; the arguments are checked."""
    check_finite(asked, "queries")
    double = all(array.dtype == np.float64 for array in (asked, *shards))
    if double and engine == "faiss":
        raise ConfigError(
            "engine must be 'numpy' or 'torch' for float64; got 'faiss', which computes in "
            "float32. Convert the vectors, or change the engine."
        )
    asked = asked.astype(np.float64 if double else np.float32, copy=False)
    best = _faiss_best() if engine == "faiss" else _best_of_block
    work = float(asked.size) * sum(len(shard) for shard in shards)
    parts = []
    with progress("search", len(asked), quiet=work < _LONG_SEARCH) as bar:
        for start in range(0, len(asked), num_queries):
            part = asked[start : start + num_queries]
            parts.append(_best_of(part, shards, top_k, block_size, best))
            bar.update(start + len(part))
    scores, indices = (np.concatenate(both) for both in zip(*parts, strict=True))
    return scores, indices


def _best_of(
    queries: NDArray[Any],
    shards: Sequence[NDArray[Any]],
    top_k: int,
    block_size: int,
    best_of_block: Best,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    best = np.empty((len(queries), 0), dtype=queries.dtype)
    places = np.empty((len(queries), 0), dtype=np.int64)
    for start, block in blocks_of(shards, block_size):
        name = f"scores of documents {start} to {start + len(block) - 1}"
        vectors = block.astype(queries.dtype, copy=False)
        here, columns = best_of_block(queries, vectors, min(top_k, len(block)), name)
        # the best so far come first: their indices are lower, so that ties stay right
        scores, rows = np.hstack([best, here]), np.hstack([places, columns + start])
        kept = top_k_columns(scores, min(top_k, scores.shape[1]))
        best = np.take_along_axis(scores, kept, axis=1)
        places = np.take_along_axis(rows, kept, axis=1)
    return best, places


def _best_of_block(
    queries: NDArray[Any], block: NDArray[Any], k: int, name: str
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    scores = queries @ block.T
    check_finite(scores, name)
    columns = top_k_columns(scores, k)
    return np.take_along_axis(scores, columns, axis=1), columns


def _faiss_best() -> Best:
    """Return the same with faiss.

    Raises:
        MissingDependencyError: If it is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise MissingDependencyError("faiss", "retrieval") from None

    def best(
        queries: NDArray[Any], block: NDArray[Any], k: int, name: str
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        check_finite(block.sum(axis=0), name)  # faiss leaves NaN out without a word
        asked, vectors = np.ascontiguousarray(queries), np.ascontiguousarray(block)
        most = min(k + 1, len(block))
        values, columns = faiss.knn(asked, vectors, most, metric=faiss.METRIC_INNER_PRODUCT)
        # faiss picks freely among equal scores: rows where that matters are chosen again
        tied = np.flatnonzero((values[:, k - 1 : k] == values[:, k:]).any(axis=1))
        values, columns = values[:, :k].copy(), columns[:, :k].copy()
        if len(tied):
            values[tied], columns[tied] = _best_of_block(asked[tied], vectors, k, name)
        order = np.lexsort((columns, -values), axis=1)
        return np.take_along_axis(values, order, axis=1), np.take_along_axis(columns, order, axis=1)

    return best


def blocks_of(shards: Sequence[Any], block_size: int) -> Iterator[tuple[int, Any]]:
    """Yield the number of the first vector and the vectors of each block."""
    first = 0
    for shard in shards:
        for start in range(0, len(shard), block_size):
            yield first + start, shard[start : start + block_size]
        first += len(shard)
