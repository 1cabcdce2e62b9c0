"""One training step and one cached decoding step for each position encoding, as ratios to NoPE.

Model: 1 layer, width 64, 4 heads, gated feed-forward 256. Trained on 64 additions of 10 digits, and
on 4 texts of 512 random tokens with FIRE below and beyond its threshold.
Run: python benchmarks/bench_positions.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _timing import medians, show
from torch.nn import functional as F

from gossamer.models import Decoder
from gossamer.tasks import AdditionTask
from gossamer.train import answer_loss

torch.set_num_threads(1)

ENTRIES = {
    "none": {},
    "learned": {"max_position": 512},
    "coupled": {"max_position": 42},
    "coupled_relative": {},
    "rope": {},
    "alibi": {},
    "kerple_log": {},
    "kerple_power": {},
    "t5": {},
    "fire": {"init_length": 16.0},
    "diet_absolute": {"max_length": 512},
    "diet_relative": {"max_length": 512},
}


def decoder(name: str, **options: float) -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        14, 64, 1, 4, positions={"name": name, **ENTRIES[name], **options}, norm="pre_post",
        feed_forward={"name": "gated", "hidden_dim": 256},
    )  # fmt: skip


def step_of(model: Decoder, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def training_step(name: str) -> Callable[[], None]:
    model = decoder(name)
    batch = AdditionTask((10, 10)).stream(64, seed=0).batch(0)
    return step_of(model, lambda: answer_loss(model, batch))


def long_training_step(name: str, **options: float) -> Callable[[], None]:
    model = decoder(name, **options)
    tokens = torch.randint(14, (4, 513), generator=torch.Generator().manual_seed(0))
    ids = torch.arange(1, 513)[None]

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens[:, :-1], ids).flatten(0, 1), tokens[:, 1:].flatten())

    return step_of(model, loss)


def decoding(name: str) -> Callable[[], object]:
    model = decoder(name).eval()
    task = AdditionTask((30, 30), max_position=42 if name == "coupled" else None)
    batch = task.stream(8, seed=0, split="test").batch(0)
    prompt = batch.tokens[:, :63]
    return lambda: model.generate(prompt, batch.position_ids, max_new_tokens=32)


def main() -> None:
    short = {n: training_step(n) for n in ENTRIES}
    show("training step, batch 64", medians(short, repeats=25), "none")
    # a coupled table has no ids for a text
    long = {n: long_training_step(n) for n in ENTRIES if n != "coupled"}
    long["fire, threshold 600"] = long_training_step("fire", init_length=600.0)
    show("training step, 4 x 512 tokens", medians(long, repeats=9), "none")
    decoded = {n: decoding(n) for n in ENTRIES}
    show("32 tokens decoded, batch 8", medians(decoded, repeats=7), "none")


if __name__ == "__main__":
    main()
