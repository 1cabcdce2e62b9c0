"""Rows of numbers with one class each: what a table and a folder of images have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.checks import check_choice, check_range

__all__ = ["LabelledBatch", "LabelledStream", "LabelledTask"]


@dataclass(frozen=True)
class LabelledBatch:
    """Rows with their classes.

    Args:
        x: `(B, ...)`, floats.
        labels: `(B,)`, integers, or `(B, C)`, distributions.
    """

    x: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> LabelledBatch:
        """Move the batch to a device."""
        return LabelledBatch(self.x.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class LabelledStream:
    """Batches by number, pass after pass, each pass in a random order of its own.

    Batch n depends on the seed and n alone, so that a resumed run goes on at any step. The last
    batch of a pass holds what is left.

    Args:
        x: `(N, ...)`.
        labels: `(N,)` or `(N, C)`.
        batch_size: Rows for each batch. Range: >= 1.
        seed: Any integer >= 0.

    Example:
        >>> stream = LabelledStream(torch.arange(5.0), torch.zeros(5), 2, seed=0)
        >>> sorted(torch.cat([stream.batch(n).x for n in range(3)]).tolist())
        [0.0, 1.0, 2.0, 3.0, 4.0]
    """

    x: Tensor
    labels: Tensor
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        check_range(self.batch_size, "batch_size", low=1, integer=True)
        check_range(self.seed, "seed", low=0, integer=True)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one pass."""
        return -(-len(self.x) // self.batch_size)

    def batch(self, number: int) -> LabelledBatch:
        """Return batch `number`, from 0."""
        epoch, place = divmod(number, self.steps_per_epoch)
        order = self._order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        return LabelledBatch(self.x[order], self.labels[order])

    def _order(self, epoch: int) -> Tensor:
        kept = self.__dict__.get("_kept")
        if kept is None or kept[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            kept = epoch, torch.from_numpy(random.permutation(len(self.x)))
            self.__dict__["_kept"] = kept
        order: Tensor = kept[1]
        return order


class LabelledTask(ABC):
    """Base of tasks on rows of numbers that have one class each.

    Attributes:
        classes: Name of each class, sorted.
        x: `(N, ...)`, floats, as a model takes them.
        labels: `(N,)`, integers.
        test_rows: `(N,)`, boolean: rows kept for tests.
        lines: Where each row stands, for messages and lists of suspicious rows.
    """

    classes: tuple[str, ...]
    x: Tensor
    labels: Tensor
    test_rows: Tensor
    lines: tuple[str, ...]

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Name and options from which `build_labelled_task` makes the task again.

        Its `facts` say what was found: `classes`, and for a table how columns become numbers.
        """

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row."""
        return tuple(self.x.shape[1:])

    def rows(self, split: str = "train") -> LabelledBatch:
        """Return all rows of a part, `"train"` or `"test"`."""
        check_choice(split, ("train", "test"), "split")
        chosen = self.test_rows if split == "test" else ~self.test_rows
        return LabelledBatch(self.x[chosen], self.labels[chosen])

    def stream(self, batch_size: int, *, seed: int, split: str = "train") -> LabelledStream:
        """Return an endless stream of batches."""
        rows = self.rows(split)
        return LabelledStream(rows.x, rows.labels, batch_size, seed)
