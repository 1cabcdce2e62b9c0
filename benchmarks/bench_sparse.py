"""Attention along patterns on the CPU: fetched keys, the pattern as a mask, and full attention.

One sequence, 2 heads of width 32, one thread. The window's plan and mask are made before the
clock starts; the time to make them, block indices and the check of a pattern are printed apart.
Run: python benchmarks/bench_sparse.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from _timing import medians, show
from torch import Tensor
from torch.nn import functional as F

from gossamer.attention import AttentionPattern, check_patterns, pattern_attention
from gossamer.attention._gather_plan import plan_gather

torch.set_num_threads(1)

WINDOW = 128
FORWARD = (4096, 8192, 16384)
STEP = (4096, 8192)


def heads(length: int, *, gradient: bool) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, length, 32, requires_grad=gradient) for _ in range(3)]


def routes(pattern: AttentionPattern, *, gradient: bool) -> dict[str, Callable[[], object]]:
    parts = heads(pattern.length, gradient=gradient)
    mask = pattern.mask()
    forward: dict[str, Callable[[], Tensor]] = {
        "fetched keys": lambda: pattern_attention(*parts, pattern, engine="gather"),
        "pattern as a mask": lambda: F.scaled_dot_product_attention(*parts, attn_mask=mask),
        "full attention": lambda: F.scaled_dot_product_attention(*parts),
    }
    if not gradient:
        return dict(forward)
    return {name: lambda run=run: run().sum().backward() for name, run in forward.items()}


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    check_patterns([AttentionPattern.sliding(600, 1)])  # compiles
    for lengths, gradient in ((FORWARD, False), (STEP, True)):
        for length in lengths:
            pattern = AttentionPattern.sliding(length, WINDOW)
            what = "pass and gradient" if gradient else "pass"
            times = medians(routes(pattern, gradient=gradient), repeats=3)
            show(f"{what}, window of {WINDOW}, {length} tokens", times, "full attention")
    print()
    for length in FORWARD:
        pattern = AttentionPattern.sliding(length, WINDOW)
        plan = seconds(lambda pattern=pattern: plan_gather(pattern, torch.device("cpu")))
        blocks = seconds(pattern.block_mask)
        check = seconds(lambda pattern=pattern: check_patterns([pattern]))
        print(f"{length} tokens: plan {plan:.2f} s, block mask {blocks:.2f} s, check {check:.1f} s")


if __name__ == "__main__":
    main()
