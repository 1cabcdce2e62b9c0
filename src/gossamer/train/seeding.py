"""One seed for every global generator."""

from __future__ import annotations

import random

import numpy as np
import torch

from gossamer.checks import check_range

__all__ = ["seed_all"]


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch.

    Args:
        seed: Range: 0 to 2**32 - 1.

    Example:
        >>> seed_all(3); first = torch.rand(1)
        >>> seed_all(3); bool(first == torch.rand(1))
        True
    """
    check_range(seed, "seed", low=0, high=2**32 - 1, integer=True)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
