"""How recipes measure time: CPU seconds of runs that take turns on one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

__all__ = ["cpu_medians", "cpu_seconds"]


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of one call, in seconds.

    Of this process alone: wall time would count the other programs of the machine.
    """
    begin = time.process_time()
    work()
    return time.process_time() - begin


def cpu_medians(runs: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of each run on one thread.

    Args:
        runs: What to measure, by name; each is called once before.
        repeats: Turns of all runs.
    """
    import torch

    threads = torch.get_num_threads()
    times: dict[str, list[float]] = {name: [] for name in runs}
    try:
        torch.set_num_threads(1)
        for run in runs.values():
            run()
        for _ in range(repeats):
            for name, run in runs.items():
                times[name].append(cpu_seconds(run))
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(values) for name, values in times.items()}
