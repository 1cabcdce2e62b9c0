"""A pass in evaluation and a training step of an encoder for each position method, against NoPE.

Model: 4 layers, width 512, 8 heads, 8 sequences of 128 tokens; and with projected keys 2 of 512.
Run: python benchmarks/bench_diet.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from _timing import medians, show
from torch.nn import functional as F

from gossamer.models import Encoder

torch.set_num_threads(1)

VOCAB = 67
SHORT = {
    "none": {"positions": "none"},
    "learned, at the input": {"positions": "learned"},
    "diet_absolute, rank 64": {"positions": {"name": "diet_absolute", "rank": 64}},
    "diet_absolute, rank 128": {"positions": {"name": "diet_absolute", "rank": 128}},
    "diet_relative": {"positions": "diet_relative"},
    "t5": {"positions": "t5"},
    "shaw, 16": {"positions": "none", "attention": {"name": "shaw", "max_distance": 16}},
    "shaw, 64": {"positions": "none", "attention": {"name": "shaw", "max_distance": 64}},
}
LINFORMER = {"name": "linformer", "length": 512, "projection_dim": 64}
PROJECTED = {"name": "diet_absolute", "rank": 64, "key_length": 64}
LONG = {
    "none": {"positions": "none"},
    "diet_absolute, rank 64": {"positions": {"name": "diet_absolute", "rank": 64}},
    "linformer, none": {"positions": "none", "attention": LINFORMER},
    "linformer, diet_absolute": {"positions": PROJECTED, "attention": LINFORMER},
}


def encoders(entries: Mapping[str, dict[str, Any]], length: int) -> dict[str, Encoder]:
    torch.manual_seed(0)
    return {n: Encoder(VOCAB, 512, 4, 8, max_length=length, **e) for n, e in entries.items()}


def forward_of(model: Encoder, tokens: torch.Tensor) -> Callable[[], object]:
    model.eval()
    return torch.no_grad()(lambda: model(tokens))


def step_of(model: Encoder, tokens: torch.Tensor) -> Callable[[], object]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step


def main() -> None:
    for entries, shape in ((SHORT, (8, 128)), (LONG, (2, 512))):
        tokens = torch.randint(VOCAB, shape)
        models = encoders(entries, shape[1])
        what = f"{shape[0]} x {shape[1]} tokens"
        passes = {name: forward_of(model, tokens) for name, model in models.items()}
        show(f"pass in evaluation, {what}", medians(passes, repeats=20), "none")
        steps = {name: step_of(model, tokens) for name, model in models.items()}
        show(f"training step, {what}", medians(steps, repeats=7), "none")


if __name__ == "__main__":
    main()
