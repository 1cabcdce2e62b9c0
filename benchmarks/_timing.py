"""How the benchmarks measure: alternating runs in one process, medians, ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def medians(runs: Mapping[str, Callable[[], object]], *, repeats: int = 7) -> dict[str, float]:
    """Return the median seconds of each, run in turn so that a drifting machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # warm-up
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def show(title: str, seconds: Mapping[str, float], against: str, *, unit: str = "ms") -> None:
    """Print a table with ratios to one of the rows."""
    factor = {"ms": 1e3, "us": 1e6, "s": 1.0}[unit]
    print(f"\n{title}\n{'':28}{unit:>10}{'ratio':>9}")
    for name, value in seconds.items():
        print(f"{name:28}{value * factor:10.2f}{value / seconds[against]:9.2f}")
