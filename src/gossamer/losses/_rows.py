"""Rows of losses: drawn entries, sums over pairs, reductions."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from gossamer.losses._labels import Pairs

__all__ = ["REDUCTIONS", "draw", "draw_pairs", "options_of", "reduce_rows", "sum_pairs"]

REDUCTIONS = ("mean", "sum", "none")


def draw(mask: Tensor, count: int) -> Tensor:
    """Return a mask of at most `count` entries of each row, drawn evenly from those of `mask`."""
    order = torch.rand(mask.shape, device=mask.device).masked_fill(~mask, -1.0)
    kept = order.topk(min(count, mask.shape[1]), dim=1).indices
    return torch.zeros_like(mask).scatter_(1, kept, True) & mask


def draw_pairs(rows: Tensor, count: int) -> Tensor:
    """Return which pairs stay if at most `count` are drawn evenly from each row."""
    order = torch.rand(len(rows), device=rows.device).argsort()
    order = order[rows[order].argsort(stable=True)]  # by row, in random order inside a row
    sorted_rows = rows[order]
    first = torch.searchsorted(sorted_rows, sorted_rows)
    kept = torch.zeros_like(rows, dtype=torch.bool)
    kept[order] = torch.arange(len(rows), device=rows.device) - first < count
    return kept


def sum_pairs(values: Tensor, pairs: Pairs, rows: int) -> Tensor:
    """Return the sum over the pairs of each row."""
    return values.new_zeros(rows).index_add(0, pairs.rows, values)


def reduce_rows(loss: Tensor, rows: Tensor, reduction: str) -> Tensor:
    """Return the loss of the rows that count, reduced; the others are 0."""
    loss = torch.where(rows, loss, 0.0)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / rows.sum().clamp(min=1)


def options_of(loss: nn.Module) -> str:
    """Return the options that a loss was built with, as text: what a run's folder keeps of it."""
    found = {name: getattr(loss, name) for name in inspect.signature(type(loss)).parameters}
    plain = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in found.items()
    }
    return ", ".join(f"{name}={value!r}" for name, value in plain.items())
