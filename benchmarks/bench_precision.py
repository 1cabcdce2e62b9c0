"""The reference of rounded attention against plain attention, and a checked training pass.

Run: python benchmarks/bench_precision.py
"""

from __future__ import annotations

import torch
from _timing import medians, show

from gossamer.attention import RoundingMonitor, attend, low_precision_attention
from gossamer.models import Decoder

torch.set_num_threads(1)


def main() -> None:
    q, k, v = torch.randn(3, 2, 8, 256, 64).unbind()
    runs = {
        "attend, float32": lambda: attend(q, k, v),
        "usual shift": lambda: low_precision_attention(q, k, v),
        "beta": lambda: low_precision_attention(q, k, v, shift="beta"),
        "beta, tiles of 64": lambda: low_precision_attention(q, k, v, shift="beta", tile=64),
    }
    show("forward, 2 x 8 heads x 256 x 64", medians(runs), "attend, float32")

    model = Decoder(64, 256, 4, 4, positions="rope")
    tokens = torch.randint(64, (4, 128))

    def step() -> None:
        model(tokens).square().mean().backward()

    def checked() -> None:
        with RoundingMonitor(model, every=1):
            step()

    runs = {"training pass": step, "checked training pass": checked}
    show("decoder, 4 layers of 256, 4 x 128 tokens", medians(runs), "training pass")


if __name__ == "__main__":
    main()
