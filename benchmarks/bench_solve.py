"""Tokens a second of the decoding behind `solve`, with the key-value cache against without it.

Run: python benchmarks/bench_solve.py
"""

from __future__ import annotations

from functools import partial

import torch
from _timing import medians

from gossamer.models import Decoder
from gossamer.tasks import AdditionTask

torch.set_num_threads(1)


def main() -> None:
    torch.manual_seed(0)
    task = AdditionTask()
    model = Decoder(
        14, 64, 1, 4, positions="coupled_relative", norm="pre_post",
        feed_forward={"name": "gated", "hidden_dim": 256},
    ).eval()  # fmt: skip
    print(f"{'tokens a second':24}{'without':>10}{'with cache':>12}{'ratio':>8}")
    for digits in (10, 30, 100):
        for count in (1, 32):
            prompt = task.encode("9" * digits + "+1").expand(count, -1)
            ids = task.position_ids("9" * digits + "+1")[None]
            new = digits + 2
            seconds = medians(
                {
                    name: partial(
                        model.generate, prompt, ids, max_new_tokens=new, use_cache=use_cache
                    )
                    for name, use_cache in (("without", False), ("with", True))
                },
                repeats=3,
            )
            tokens = count * new
            rates = {name: tokens / value for name, value in seconds.items()}
            label = f"{digits} digits, batch {count}"
            ratio = rates["with"] / rates["without"]
            print(f"{label:24}{rates['without']:10,.0f}{rates['with']:12,.0f}{ratio:8.1f}")


if __name__ == "__main__":
    main()
