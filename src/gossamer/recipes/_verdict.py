"""From numbers to verdicts: statistics over seeds, intervals, rules."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gossamer.recipes._base import Claim

__all__ = ["judge", "t_interval", "worst"]

_ORDER = ("held", "undecided", "not held")
_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
}

Values = Mapping[int, float]
"""One value for each seed."""


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % t-interval of the mean; unbounded (NaN) for fewer than two values.

    Example:
        >>> low, high = t_interval([1.0, 2.0, 3.0])
        >>> round(low, 3), round(high, 3)
        (-0.484, 4.484)
    """
    if len(values) < 2 or any(math.isnan(value) for value in values):
        return math.nan, math.nan
    from scipy.special import stdtrit

    mean = statistics.fmean(values)
    half = (
        float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    )
    return mean - half, mean + half


def judge(claim: Claim, results: Mapping[str, Values]) -> dict[str, Any]:
    """Return the entry of `summary.json` for one claim.

    Args:
        claim: What is claimed.
        results: For each arm, the claim's metric by seed.
    """
    values = results[claim.ours]
    sign = 1.0 if claim.better == "higher" else -1.0
    ours = _side(claim.ours, claim.statistic, values)
    if claim.rule == "paired":
        name = _best(claim, results)
        seeds = sorted(set(values) & set(results[name]))
        gains = [sign * (values[s] - results[name][s]) for s in seeds]
        baseline = _side(name, claim.statistic, results[name])
        difference = _STATISTICS[claim.statistic](gains) if gains else math.nan
    else:
        gains = [sign * (value - claim.bar) for value in values.values()]
        baseline = {"name": "bar", "value": claim.bar}
        difference = sign * (ours["value"] - claim.bar)
    interval = t_interval(gains)
    return {
        "text": claim.text,
        "metric": claim.metric,
        "unit": claim.unit,
        "ours": ours,
        "baseline": baseline,
        "difference": difference,
        "interval": list(interval),
        "rule": claim.rule,
        "better": claim.better,
        "bar": claim.bar,
        "needed": claim.needed,
        "paper": dict(claim.paper),
        "verdict": _verdict(claim, gains, difference, interval),
    }


def worst(verdicts: Sequence[str]) -> str:
    """Return the worst verdict, which is the recipe's.

    Example:
        >>> worst(["held", "undecided"])
        'undecided'
    """
    return max(verdicts, key=_ORDER.index)


def _verdict(
    claim: Claim, gains: Sequence[float], difference: float, interval: tuple[float, float]
) -> str:
    if any(math.isnan(gain) for gain in gains) or not gains:
        return "not held"
    if claim.rule == "seeds":
        return "held" if sum(gain >= 0 for gain in gains) >= (claim.needed or 0) else "not held"
    if claim.rule == "bar":
        return "held" if difference >= 0 else "not held"
    if interval[0] > claim.bar:
        return "held"
    return "not held" if interval[1] < claim.bar else "undecided"


def _best(claim: Claim, results: Mapping[str, Values]) -> str:
    means = {name: statistics.fmean(results[name].values()) for name in claim.baselines}
    # a baseline that gave no number is never the best one, unless none gave any
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)} or means
    return (max if claim.better == "higher" else min)(means, key=lambda name: means[name])


def _side(name: str, statistic: str, values: Values) -> dict[str, Any]:
    ordered = [values[seed] for seed in sorted(values)]
    return {
        "name": name,
        "statistic": statistic,
        "value": _STATISTICS[statistic](ordered),
        "values": ordered,
    }
