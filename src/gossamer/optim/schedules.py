"""Multipliers of the learning rate, and other weights, as plain functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gossamer.checks import check_range
from gossamer.errors import ConfigError

__all__ = ["step_decay", "switch_at", "warmup_cosine", "warmup_linear"]


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
    return _warmed(num_steps, warmup, floor, lambda share: 0.5 * (1 + math.cos(math.pi * share)))


def warmup_linear(
    num_steps: int, *, warmup: float = 0.05, floor: float = 0.0
) -> Callable[[int], float]:
    r"""Linear warm-up to 1, then a straight line down to `floor`.

    Args:
        num_steps: Steps in all. Range: >= 1.
        warmup: Share of the steps that warm up. Range: 0 to 1. Default 0.05.
        floor: Multiplier at the end. Range: 0 to 1. Default 0.

    Returns:
        A function from the 0-based step to the multiplier.

    Raises:
        ConfigError: If a number is out of its range.

    Example:
        >>> schedule = warmup_linear(100, warmup=0.1)
        >>> schedule(4), schedule(10), schedule(55), schedule(100)
        (0.5, 1.0, 0.5, 0.0)

    Source: Devlin et al., *BERT*, NAACL 2019, section A.2.
    Deviations: none
    """
    return _warmed(num_steps, warmup, floor, lambda share: 1 - share)


def _warmed(
    num_steps: int, warmup: float, floor: float, fall: Callable[[float], float]
) -> Callable[[int], float]:
    """Return a schedule that rises to 1, then falls to `floor` as `fall` does from 1 to 0."""
    check_range(num_steps, "num_steps", low=1, integer=True)
    check_range(warmup, "warmup", low=0.0, high=1.0)
    check_range(floor, "floor", low=0.0, high=1.0)
    rising = int(num_steps * warmup)

    def multiplier(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        share = min(1.0, (step - rising) / max(1, num_steps - rising))
        return floor + (1 - floor) * fall(share)

    return multiplier


def step_decay(milestones: Sequence[int], *, factor: float = 0.1) -> Callable[[int], float]:
    r"""Multiply by `factor` at each milestone.

    Args:
        milestones: Steps at which the rate falls, rising. Unit: steps. Range: >= 0.
        factor: At each of them. Range: > 0 to 1. Default 0.1.

    Returns:
        A function from the 0-based step to the multiplier.

    Raises:
        ConfigError: If a number is out of its range, or the milestones do not rise.

    Example:
        >>> schedule = step_decay((600, 900))
        >>> [round(schedule(step), 4) for step in (0, 599, 600, 900)]
        [1.0, 1.0, 0.1, 0.01]

    Source: Li et al., *Robust Training of Neural Networks Using Scale Invariant Architectures*,
        ICML 2022, section 6: a tenth at 60 % and 90 % of the steps.
    Deviations: none
    """
    check_range(factor, "factor", low=0.0, high=1.0, open_low=True)
    steps = list(milestones)
    for step in steps:
        check_range(step, "milestones", low=0, integer=True)
    if steps != sorted(steps):
        raise ConfigError(f"milestones must rise; got {steps}. Sort them.")
    return lambda step: float(factor ** sum(step >= milestone for milestone in steps))


def switch_at(step: int, before: float, after: float) -> Callable[[int], float]:
    """One value before a step, another from it on.

    As `alpha` of `gossamer.losses.DistillationLoss` it switches between teacher and labels.

    Args:
        step: The first with the second value. Unit: steps. Range: >= 0.
        before: Value of the steps 0 to `step` - 1.
        after: Value of the later ones.

    Returns:
        A function from the 0-based step to the value.

    Raises:
        ConfigError: If a number is out of its range.

    Example:
        >>> alpha = switch_at(1000, 1.0, 0.0)
        >>> alpha(999), alpha(1000)
        (1.0, 0.0)

    Source: Nagarajan et al., *On student-teacher deviations in distillation*, NeurIPS 2023: loss
        switching.
    Deviations: none
    """
    check_range(step, "step", low=0, integer=True)
    check_range(before, "before")
    check_range(after, "after")
    return lambda now: before if now < step else after
