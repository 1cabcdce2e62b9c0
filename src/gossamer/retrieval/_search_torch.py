"""The largest entries of each row with torch, by the same rule for ties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import DataError, ShapeError

__all__ = ["search_torch", "top_k_rows"]


def search_torch(
    queries: Tensor, shards: Sequence[Any], top_k: int, block_size: int, num_queries: int
) -> tuple[Tensor, Tensor]:
    """Return the best scores and their places, on the device of the queries."""
    double = all(_dtype(part) == torch.float64 for part in (queries, *shards))
    asked = queries.detach().to(torch.float64 if double else torch.float32)
    if not bool(asked.isfinite().all()):
        raise DataError("queries must be finite; got NaN or infinite entries. Remove them.")
    parts = [
        _best_of(part, shards, top_k, block_size)
        for part in asked.split(num_queries)  # type: ignore[no-untyped-call]
    ]
    scores, places = (torch.cat(both) for both in zip(*parts, strict=True))
    return scores, places


def _best_of(
    queries: Tensor, shards: Sequence[Any], top_k: int, block_size: int
) -> tuple[Tensor, Tensor]:
    best = queries.new_empty((len(queries), 0))
    places = torch.empty((len(queries), 0), dtype=torch.long, device=queries.device)
    for first, block in _blocks(shards, block_size):
        documents = torch.as_tensor(block).detach().to(queries.device, queries.dtype)
        scores = queries @ documents.T
        if not bool(scores.isfinite().all()):
            last = first + len(documents) - 1
            raise DataError(
                f"scores of documents {first} to {last} must be finite; got NaN or infinite "
                "entries. Remove or replace them before the call."
            )
        here, columns = top_k_rows(scores, min(top_k, scores.shape[1]))
        # the best so far come first: their places are lower, so that ties stay right
        both, rows = torch.cat([best, here], 1), torch.cat([places, columns + first], 1)
        best, kept = top_k_rows(both, min(top_k, both.shape[1]))
        places = rows.gather(1, kept)
    return best, places


def top_k_rows(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row and their columns; ties by the lower column."""
    width = scores.shape[1]
    values, columns = scores.topk(min(k + 1, width), dim=1)
    # torch picks freely among equal entries: rows where that matters are chosen again
    tied = (
        (values[:, k - 1] == values[:, k]).nonzero().flatten() if width > k else columns.new_empty(0)
    )
    values, columns = values[:, :k], columns[:, :k]
    if len(tied):
        columns[tied] = _first_of_ties(scores[tied], values[tied, -1:])
    columns = columns.sort(dim=1).values
    values = scores.gather(1, columns)
    order = values.sort(dim=1, descending=True, stable=True).indices
    return values.gather(1, order), columns.gather(1, order)


def _first_of_ties(scores: Tensor, border: Tensor) -> Tensor:
    above, level = scores > border, scores == border
    k = int((above.sum(1) + level.sum(1)).min())
    return _kept(above, level, k)


def _kept(above: Tensor, level: Tensor, k: int) -> Tensor:
    room = k - above.sum(1, keepdim=True)
    kept = above | (level & (level.cumsum(1) <= room))
    return kept.nonzero()[:, 1].reshape(len(kept), k)


def _blocks(shards: Sequence[Any], block_size: int) -> Iterable[tuple[int, Any]]:
    first = 0
    for shard in shards:
        for start in range(0, len(shard), block_size):
            yield first + start, shard[start : start + block_size]
        first += len(shard)


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, Tensor):
        return value.dtype
    return torch.float64 if str(value.dtype) == "float64" else torch.float32
