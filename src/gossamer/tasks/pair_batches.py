"""Batches of sources and targets, of similar length, each a function of seed and number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import DataError
from gossamer.tasks.base import EOS, IGNORED, PAD

__all__ = ["PairBatch", "PairStream", "pad_rows"]

_POOL = 8
"""Batches whose rows are sorted by length together."""


@dataclass(frozen=True)
class PairBatch:
    """Sources and targets, padded on the right.

    Args:
        source: `(B, S)`, integers, 0 for padding.
        mask: `(B, S)`, boolean, True = a real token.
        labels: `(B, T)`, integers: target and end token, -100 for padding.
        rows: `(B,)`, integers: which pairs they are.
        epoch: How often the pairs were seen before.
    """

    source: Tensor
    mask: Tensor
    labels: Tensor
    rows: Tensor
    epoch: int = 0

    def to(self, device: torch.device | str) -> PairBatch:
        """Move the tensors to a device; `rows` index tables on the CPU and stay."""
        source, mask, labels = (t.to(device) for t in (self.source, self.mask, self.labels))
        return PairBatch(source, mask, labels, self.rows, self.epoch)

    def __len__(self) -> int:
        return len(self.source)


class PairStream:
    """Batches of pairs by number, for any number of epochs.

    Batch n is a function of the seed and n alone, so a resumed run goes on at any step. In each
    epoch every pair comes once, in a new order; rows of similar target length share a batch.

    Args:
        sources: Tokens of the sources.
        targets: Tokens of the targets, without an end token.
        batch_size: Pairs of a batch; the last one of an epoch may have fewer. Range: >= 1.
        seed: Any integer >= 0. Default 0.

    Raises:
        DataError: If there is no pair, or the numbers differ.

    Example:
        >>> stream = PairStream([[5, 6], [7]], [[8], [9, 3]], 2)
        >>> batch = stream.batch(0)
        >>> batch.labels[batch.rows.argsort()].tolist()
        [[8, 1, -100], [9, 3, 1]]

    Source: the library's own.
    Deviations: none
    """

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        batch_size: int,
        *,
        seed: int = 0,
    ) -> None:
        check_range(batch_size, "batch_size", low=1, integer=True)
        check_range(seed, "seed", low=0, integer=True)
        if not sources or len(sources) != len(targets):
            raise DataError(
                "sources and targets must hold one entry for each pair, and at least one; got "
                f"{len(sources)} and {len(targets)}. Give as many of both."
            )
        self.batch_size = batch_size
        self.seed = seed
        self.source = pad_rows(sources, PAD)
        self.labels = pad_rows([[*target, EOS] for target in targets], IGNORED)
        self._widths = np.array([len(source) for source in sources])
        self._lengths = np.array([len(target) + 1 for target in targets])
        self._order: tuple[int, list[NDArray[np.int64]]] = (-1, [])

    @property
    def batches_per_epoch(self) -> int:
        """Batches in which every pair comes once."""
        return -(-len(self.source) // self.batch_size)

    def batch(self, number: int) -> PairBatch:
        """Return batch `number`, from 0."""
        epoch, place = divmod(number, self.batches_per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, self._batches_of(epoch))
        return self.take(self._order[1][place], epoch)

    def take(self, rows: NDArray[np.int64], epoch: int = 0) -> PairBatch:
        """Return chosen pairs as a batch, no wider than its longest ones."""
        width, length = int(self._widths[rows].max()), int(self._lengths[rows].max())
        chosen = torch.from_numpy(rows)
        mask = torch.arange(width) < torch.from_numpy(self._widths[rows])[:, None]
        source = self.source[chosen, :width]
        return PairBatch(source, mask, self.labels[chosen, :length], chosen, epoch)

    def _batches_of(self, epoch: int) -> list[NDArray[np.int64]]:
        draw = np.random.default_rng((self.seed, epoch))
        order = draw.permutation(len(self.source))
        batches = []
        for begin in range(0, len(order), _POOL * self.batch_size):
            pool = order[begin : begin + _POOL * self.batch_size]
            pool = pool[np.argsort(self._lengths[pool], kind="stable")]
            cuts = range(self.batch_size, len(pool), self.batch_size)
            batches += np.split(pool, cuts)
        return [batches[number] for number in draw.permutation(len(batches))]


def pad_rows(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Return rows of numbers as one tensor `(N, longest)`, filled up on the right.

    Example:
        >>> pad_rows([[1], [2, 3]], 0).tolist()
        [[1, 0], [2, 3]]
    """
    lengths = np.array([len(row) for row in rows])
    table = np.full((len(rows), int(lengths.max())), value, np.int64)
    table[np.arange(table.shape[1]) < lengths[:, None]] = [n for row in rows for n in row]
    return torch.from_numpy(table)
