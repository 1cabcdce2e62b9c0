"""The largest entries of each row with torch, by the same rule for ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import DataError
from gossamer.retrieval._search_arrays import blocks_of

__all__ = ["search_torch", "top_k_rows"]


def search_torch(
    queries: Any, shards: Sequence[Any], top_k: int, block_size: int, num_queries: int
) -> tuple[Tensor, Tensor]:
    """Return the best scores and their places, on the device of the queries."""
    double = all(_dtype(part) == torch.float64 for part in (queries, *shards))
    asked = torch.as_tensor(queries).detach().to(torch.float64 if double else torch.float32)
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
    for first, block in blocks_of(shards, block_size):
        # a copy of arrays, which may be read-only files
        tensor = block.detach() if isinstance(block, Tensor) else torch.from_numpy(np.array(block))
        documents = tensor.to(queries.device, queries.dtype)
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
    values, columns = scores.topk(min(k + 1, scores.shape[1]), dim=1)
    # torch picks freely among equal entries: rows where that matters are chosen again
    tied = (values[:, k - 1 : k] == values[:, k:]).any(1).nonzero().flatten()
    columns = columns[:, :k]
    if len(tied):
        columns[tied] = _by_rule(scores[tied], values[tied, k - 1 : k], k)
    columns = columns.sort(dim=1).values
    values, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _by_rule(scores: Tensor, border: Tensor, k: int) -> Tensor:
    """Return the columns above the border, and as many of those on it as there is room for."""
    above, level = scores > border, scores == border
    kept = above | (level & (level.cumsum(1) <= k - above.sum(1, keepdim=True)))
    return kept.nonzero()[:, 1].reshape(len(kept), k)


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, Tensor):
        return value.dtype
    return torch.float64 if str(value.dtype) == "float64" else torch.float32
