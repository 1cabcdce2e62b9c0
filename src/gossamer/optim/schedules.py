"""Multipliers of the learning rate as plain functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from gossamer.checks import check_range

__all__ = ["warmup_cosine"]


def warmup_cosine(
    num_steps: int, *, warmup: float = 0.05, floor: float = 0.1
) -> Callable[[int], float]:
    r"""Linear warm-up to 1, then a cosine down to `floor`.

    Args:
        num_steps: Steps in all. Range: >= 1.
        warmup: Share of the steps that warm up. Range: 0 to 1. Default 0.05.
        floor: Multiplier at the end. Range: 0 to 1. Default 0.1.

    Returns:
        A function from the 0-based step to the multiplier.

    Raises:
        ConfigError: If a number is out of its range.

    Example:
        >>> schedule = warmup_cosine(100, warmup=0.1)
        >>> schedule(4), schedule(9), round(schedule(100), 6)
        (0.5, 1.0, 0.1)

    Source: Loshchilov & Hutter, *SGDR*, ICLR 2017, eq. 5 with one period; warm-up as usual.
    Deviations: none
    """
    check_range(num_steps, "num_steps", low=1, integer=True)
    check_range(warmup, "warmup", low=0.0, high=1.0)
    check_range(floor, "floor", low=0.0, high=1.0)
    rising = int(num_steps * warmup)

    def multiplier(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        share = min(1.0, (step - rising) / max(1, num_steps - rising))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    return multiplier
