"""One training step and one cached decoding step for each position encoding, as ratios to NoPE.

Model: 1 layer, width 64, 4 heads, gated feed-forward 256; batch 64 of additions of 10 digits.
Run: python benchmarks/bench_positions.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _timing import medians, show

from gossamer.models import Decoder
from gossamer.tasks import AdditionTask
from gossamer.train import answer_loss

torch.set_num_threads(1)

ENTRIES = {
    "none": {},
    "learned": {"max_position": 448},
    "coupled": {"max_position": 42},
    "coupled_relative": {},
    "rope": {},
    "alibi": {},
    "fire": {"init_length": 16.0},
}


def decoder(name: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        14, 64, 1, 4, positions={"name": name, **ENTRIES[name]}, norm="pre_post",
        feed_forward={"name": "gated", "hidden_dim": 256},
    )  # fmt: skip


def training_step(name: str) -> Callable[[], None]:
    model = decoder(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = AdditionTask((10, 10)).stream(64, seed=0).batch(0)

    def step() -> None:
        optimizer.zero_grad()
        answer_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def decoding(name: str) -> Callable[[], object]:
    model = decoder(name).eval()
    task = AdditionTask((30, 30), max_position=42 if name == "coupled" else None)
    batch = task.stream(8, seed=0, split="test").batch(0)
    prompt = batch.tokens[:, :63]
    return lambda: model.generate(prompt, batch.position_ids, max_new_tokens=32)


def main() -> None:
    show(
        "training step, batch 64",
        medians({n: training_step(n) for n in ENTRIES}, repeats=25),
        "none",
    )
    show(
        "32 tokens decoded, batch 8", medians({n: decoding(n) for n in ENTRIES}, repeats=7), "none"
    )


if __name__ == "__main__":
    main()
