"""Bias of every pair from a small table: evaluate once for each offset, then gather."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["bias_of_offsets", "take", "take_or_zero"]


def take(table: Tensor, index: Tensor) -> Tensor:
    """Return the column of each pair, `(H, N)` and `(B, T, S)` to `(B, H, T, S)`.

    The gradient sums many pairs into few columns. On a CPU `index_select` does that several times
    faster than an embedding; on a GPU the embedding is the one whose sums do not depend on chance.

    Example:
        >>> take(torch.tensor([[5.0, 6.0]]), torch.tensor([[[0, 1], [1, 0]]]))[0, 0].tolist()
        [[5.0, 6.0], [6.0, 5.0]]
    """
    if index.device.type == "cpu":
        flat = table.index_select(1, index.flatten())
        return flat.view(len(table), *index.shape).transpose(0, 1)
    return F.embedding(index, table.T).permute(0, 3, 1, 2)


def take_or_zero(table: Tensor, index: Tensor, placed: Tensor) -> Tensor:
    """Return the column of each pair, and 0 where `placed` is false, `(B, H, T, S)`.

    Example:
        >>> index = torch.tensor([[[1, 7]]])
        >>> take_or_zero(torch.tensor([[5.0, 6.0]]), index, index < 2).flatten().tolist()
        [6.0, 0.0]
    """
    # a column of zeros costs less than a multiplication of every pair, forward and backward
    padded = torch.cat((table, table.new_zeros(len(table), 1)), dim=1)
    return take(padded, torch.where(placed, index, table.shape[1]))


def bias_of_offsets(columns: Callable[[Tensor], Tensor], offset: Tensor, placed: Tensor) -> Tensor:
    """Return a bias that depends on the offset of a pair alone, `(B, H, T, S)`.

    Args:
        columns: Maps integer offsets `(N,)` to their biases `(H, N)`.
        offset: `(B, T, S)`, integers.
        placed: `(B, T, S)`, False where the bias is 0.

    Example:
        >>> pair = torch.tensor([[[0, -1], [1, 0]]])
        >>> bias_of_offsets(lambda n: n[None] * 10.0, pair, pair >= 0)[0, 0].tolist()
        [[0.0, 0.0], [10.0, 0.0]]
    """
    offset = torch.where(placed, offset, 0)
    # a graph cannot branch on data, and the offsets of a single query differ anyway
    if offset.numel() > offset.shape[-1] and not torch.compiler.is_compiling():
        low, high = (int(end) for end in offset.aminmax())
        if 2 * (high - low + 1) <= offset.numel():
            table = columns(torch.arange(low, high + 1, device=offset.device))
            return take_or_zero(table, offset - low, placed)
    every = columns(offset.flatten())
    return every.view(len(every), *offset.shape).transpose(0, 1) * placed.unsqueeze(1)
