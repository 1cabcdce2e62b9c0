"""The shared reference of the tests on block attention, and how tokens get into slots."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gossamer.attention import BlockLayout

from ..conftest import DATA

with np.load(DATA / "block-attention" / "reference.npz") as _file:
    REFERENCE = dict(_file)


def place(x: Tensor, layout: BlockLayout) -> Tensor:
    """Put tokens `(B, H, S, D)` into the slots of a layout; padding is NaN."""
    slots = x.new_full((*x.shape[:2], layout.num_tokens, x.shape[3]), float("nan"))
    return slots.index_copy(2, layout.real().nonzero()[:, 0], x)
