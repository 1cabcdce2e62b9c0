"""Sequences of many lengths in flat arrays, from which batches are gathered at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gossamer.tasks.base import PAD, Batch

__all__ = ["PackedExamples"]


class PackedExamples:
    """Sequences with ids and the place where their answers begin.

    Args:
        tokens: One list for each sequence.
        ids: One list for each sequence, of one tuple of levels for each token.
        begins: Where each answer begins.

    Example:
        >>> packed = PackedExamples([[1, 5, 1], [1, 1]], [[(0,), (1,), (0,)], [(0,), (0,)]], [1, 1])
        >>> packed.batch(torch.tensor([1, 0])).tokens.tolist()
        [[1, 1, 0], [1, 5, 1]]
    """

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        ids: Sequence[Sequence[tuple[int, ...]]],
        begins: Sequence[int],
    ) -> None:
        self.lengths = torch.tensor([len(row) for row in tokens])
        self._starts = self.lengths.cumsum(0) - self.lengths
        self._begins = torch.tensor(begins)
        self._tokens = torch.from_numpy(np.concatenate([np.asarray(r, np.int32) for r in tokens]))
        self._ids = torch.from_numpy(np.concatenate([np.asarray(row, np.int32) for row in ids]))
        forms: dict[tuple[int, bytes], int] = {}
        parts = [np.asarray(row, np.int32).tobytes() for row in ids]
        keys = zip(begins, parts, strict=True)
        self.forms = torch.tensor([forms.setdefault(key, len(forms)) for key in keys])
        """Number of the form of each sequence; equal numbers, equal ids and lengths."""

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Tensor) -> Batch:
        """Return the sequences of these numbers, padded on the right."""
        lengths, starts = self.lengths[rows], self._starts[rows]
        place = torch.arange(int(lengths.max()))
        real = place < lengths[:, None]
        index = torch.where(real, starts[:, None] + place, 0)
        tokens = torch.where(real, self._tokens[index].long(), PAD)
        ids = torch.where(real[..., None], self._ids[index].long(), 0)
        mask = real & (place >= self._begins[rows][:, None])
        return Batch(tokens, ids.squeeze(-1) if ids.shape[-1] == 1 else ids, mask)
