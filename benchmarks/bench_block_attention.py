"""One attention layer over a prompt of many documents: full causal attention and block attention.

8 heads of size 128, blocks of 160 tokens, float32, inference, one thread. Full attention is left
out beyond 100 documents. FlexAttention is compiled first, which takes some 10 s.
Run: python benchmarks/bench_block_attention.py [DOCUMENTS ...]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from gossamer.attention import BlockLayout, block_attention

torch.set_num_threads(1)

HEADS, HEAD_DIM, TOKENS = 8, 128, 160
FULL = "full causal SDPA"


def runs_of(documents: int) -> dict[str, Callable[[], torch.Tensor]]:
    layout = BlockLayout([TOKENS] * (documents + 2))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, layout.num_tokens, HEAD_DIM) for _ in range(3))
    names = {"three calls": "sdpa", "merge": "merge", "FlexAttention": "flex"}
    runs = {
        name: partial(block_attention, q, k, v, layout, engine=engine)
        for name, engine in names.items()
    }
    if documents <= 100:
        runs[FULL] = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    return runs


@torch.no_grad()
def main() -> None:
    print(f"{'documents':>10}  {'':20}{'seconds':>9}{'full / it':>11}{'first call':>12}")
    for documents in [int(word) for word in sys.argv[1:]] or [20, 50, 100, 200]:
        runs = runs_of(documents)
        times: dict[str, list[float]] = {name: [] for name in runs}
        first = {}
        for repeat in range(4):
            for name, run in runs.items():
                if name == FULL and (repeat < 1 or (documents >= 100 and repeat != 2)):
                    continue  # 20 s a pass at 100 documents: once, between the others
                begin = time.perf_counter()
                run()
                seconds = time.perf_counter() - begin
                if repeat == 0:
                    first[name] = seconds
                else:
                    times[name].append(seconds)
        middle = {name: statistics.median(values) for name, values in times.items()}
        for name, seconds in middle.items():
            ratio = f"{middle[FULL] / seconds:.1f}" if FULL in middle else "-"
            start = f"{first[name]:.1f}" if name in first else "-"
            print(f"{documents:10}  {name:20}{seconds:9.2f}{ratio:>11}{start:>12}", flush=True)


if __name__ == "__main__":
    main()
