"""Exact match of a model over a grid of lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.checks import check_range
from gossamer.models import Decoder, Encoder
from gossamer.tasks import Batch, GridCell, Task
from gossamer.train.losses import answer_logits

__all__ = ["GridResult", "evaluate_task"]

_TOKENS_AT_ONCE = 16384


@dataclass(frozen=True)
class GridResult:
    """Exact match in every cell of a grid.

    Args:
        cells: One dict for each cell: its coordinates, `exact_match` (share of samples whose whole
            answer is right, 0 to 1), `token_accuracy` and `cross_entropy` (nats for each token),
            both given the true tokens before, and `num_samples`.
    """

    cells: tuple[dict[str, Any], ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return the cells as plain rows."""
        return [dict(cell) for cell in self.cells]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {"cells": self.rows()}


def evaluate_task(
    model: Decoder | Encoder,
    task: Task,
    grid: Mapping[str, Any] | Iterable[GridCell],
    *,
    num_samples: int = 500,
    answer_only: bool = False,
    generator: torch.Generator | None = None,
) -> GridResult:
    """Measure how often a model's whole answer is right, cell by cell.

    An answer whose every token is right when the true tokens before it are given is the answer
    that greedy decoding produces, so one forward pass serves; `answer_only` decodes instead, since
    with a scratchpad the final answer alone has no such short cut. A bidirectional model fills in
    all places of the answer at once.

    Args:
        model: Set to evaluation mode meanwhile.
        task: What it was trained on.
        grid: Axes for `task.grid`, such as `{"digits": [10, 20]}`, or cells.
        num_samples: Samples in each cell. Range: >= 1. Default 500.
        answer_only: Compare the decoded answer alone, of a decoder. Default false.
        generator: Draws the samples; default one with seed 0.

    Raises:
        ConfigError: If the grid needs ids beyond the task's `max_position`.
        DataError: If it needs ids beyond the model's own table.

    Example:
        >>> from gossamer.tasks import AdditionTask
        >>> task = AdditionTask((1, 3))
        >>> result = evaluate_task(Decoder(14, 16, 1, 2), task, {"digits": [3]}, num_samples=5)
        >>> result.rows()[0]["digits"]
        3

    Source: Cho et al., NeurIPS 2024, section 5: exact match of answer and end token.
    Deviations: none
    """
    check_range(num_samples, "num_samples", low=1, integer=True)
    cells = task.grid(**grid) if isinstance(grid, Mapping) else list(grid)
    generator = generator or torch.Generator().manual_seed(0)
    was_training = model.training
    model.eval()
    try:
        rows = [_evaluate_cell(model, cell, num_samples, answer_only, generator) for cell in cells]
    finally:
        model.train(was_training)
    return GridResult(tuple(rows))


@torch.no_grad()
def _evaluate_cell(
    model: Any, cell: GridCell, num_samples: int, answer_only: bool, generator: torch.Generator
) -> dict[str, Any]:
    batch = cell.task.sample(num_samples, generator=generator, split="test").to(model.device)
    size = max(1, _TOKENS_AT_ONCE // batch.tokens.shape[1])
    exact = right = total = 0
    loss = 0.0
    # a scale by the final length is another one at each step of decoding
    short_cut = not model.causal or model.cacheable
    for part in _parts(batch, size):
        logits, targets, wanted = answer_logits(model, part)
        correct = logits.argmax(-1) == targets
        loss += float(F.cross_entropy(logits[wanted], targets[wanted], reduction="sum"))
        right += int((correct & wanted).sum())
        total += int(wanted.sum())
        whole = (correct | ~wanted).all(1) & short_cut
        if (answer_only or not short_cut) and model.causal and not bool(whole.all()):
            # what is right token by token is what decoding gives; only the others are decoded
            whole[~whole] = _decoded_right(model, cell.task, _rows(part, ~whole))
        exact += int(whole.sum())
    return {
        **cell.coordinates,
        "exact_match": exact / num_samples,
        "token_accuracy": right / total,
        "cross_entropy": loss / total,
        "num_samples": num_samples,
    }


def _parts(batch: Batch, size: int) -> Iterable[Batch]:
    for begin in range(0, len(batch), size):
        yield _rows(batch, slice(begin, begin + size))


def _rows(batch: Batch, rows: slice | Tensor) -> Batch:
    return Batch(batch.tokens[rows], batch.position_ids[rows], batch.loss_mask[rows])


def _decoded_right(model: Decoder, task: Task, batch: Batch) -> Tensor:
    begins = batch.loss_mask.int().argmax(1)
    right = torch.zeros_like(begins, dtype=torch.bool)
    for begin in sorted(set(begins.tolist())):
        rows = begins == begin
        tokens, ids = batch.tokens[rows], batch.position_ids[rows]
        new = tokens.shape[1] - begin
        produced = model.generate(tokens[:, :begin], ids, max_new_tokens=new, eos=task.eos)
        pairs = zip(produced, tokens[:, begin:], strict=True)
        same = [task.decode(p) == task.decode(t) for p, t in pairs]
        right[rows] = torch.tensor(same, device=right.device)
    return right
