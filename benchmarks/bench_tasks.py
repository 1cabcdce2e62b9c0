"""Samples a second of task generation, against a plain Python loop over the same format.

Run: python benchmarks/bench_tasks.py
"""

from __future__ import annotations

import random

import torch
from _timing import medians

from gossamer.tasks import AdditionTask

torch.set_num_threads(1)


def plain_python(count: int) -> list[str]:
    """Make the same sums as text, one by one."""
    rows = []
    for _ in range(count):
        a, b = (random.randrange(10 ** random.randint(1, 10)) for _ in range(2))
        n = max(len(str(a)), len(str(b)))
        rows.append(f"${a:0{n}d}+{b:0{n}d}={str(a + b)[::-1]:0<{n + 1}s}$")
    return rows


def main() -> None:
    task = AdditionTask((1, 10), carry_chains=0.3)
    print(f"{'samples a second':28}{'batch':>8}{'python':>12}{'gossamer':>12}{'ratio':>8}")
    for size in (64, 256, 1024):
        stream = task.stream(size, seed=0)
        seconds = medians(
            {
                "python": lambda size=size: plain_python(size),
                "gossamer": lambda stream=stream: stream.batch(3),
            },
            repeats=31,
        )
        python, ours = size / seconds["python"], size / seconds["gossamer"]
        print(
            f"{'addition, 1-10 digits':28}{size:8}{python:12,.0f}{ours:12,.0f}{ours / python:8.1f}"
        )


if __name__ == "__main__":
    main()
