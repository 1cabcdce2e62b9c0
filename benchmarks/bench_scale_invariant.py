"""Scale-invariant attention and norm against the plain ones, and the optimiser against its peers.

Attention: forward and backward of the whole layer. Optimiser: one step on 12 matrices of 1024.
Run: python benchmarks/bench_scale_invariant.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _timing import medians, show
from torch import nn

from gossamer.attention import MultiHeadAttention
from gossamer.layers import ExactNorm, ScaleInvariantAttention
from gossamer.optim import ScaleInvariantSGD

torch.set_num_threads(1)

Run = Callable[[], object]


def passes(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Run:
    return lambda: function(x).sum().backward()


def attention_runs(shape: tuple[int, int], *, causal: bool) -> dict[str, Run]:
    x = torch.randn(*shape, 128, requires_grad=True)
    plain = MultiHeadAttention(128, 4)
    return {
        "softmax": passes(lambda y: plain(y, causal=causal), x),
        "normalised ReLU": passes(ScaleInvariantAttention(128, 4, causal=causal), x),
    }


def step_runs() -> dict[str, Run]:
    def made(build: Callable[[list[nn.Parameter]], Run]) -> Run:
        weights = [nn.Parameter(0.02 * torch.randn(1024, 1024)) for _ in range(12)]
        for weight in weights:
            weight.grad = 1e-3 * torch.randn_like(weight)
        return build(weights)

    def clipped(weights: list[nn.Parameter]) -> Run:
        step = torch.optim.SGD(weights, 1e-3, weight_decay=0.01).step

        def run() -> None:
            nn.utils.clip_grad_norm_(weights, 1.0)
            step()

        return run

    return {
        "SGD with decay": made(lambda w: torch.optim.SGD(w, 1e-3, weight_decay=0.01).step),
        "the same, fused": made(
            lambda w: torch.optim.SGD(w, 1e-3, weight_decay=0.01, fused=True).step
        ),
        "SGD without decay": made(lambda w: torch.optim.SGD(w, 1e-3).step),
        "SGD, decay, norm clipped": made(clipped),
        "ScaleInvariantSGD": made(lambda w: ScaleInvariantSGD(w, 1e-3, weight_decay=0.01).step),
        "AdamW": made(lambda w: torch.optim.AdamW(w, 1e-3).step),
        "AdamW, fused": made(lambda w: torch.optim.AdamW(w, 1e-3, fused=True).step),
    }


def main() -> None:
    for causal in (True, False):
        for shape in ((4, 256), (1, 1024)):
            what = "causal" if causal else "full"
            title = f"attention, forward and backward, {shape[0]} x {shape[1]} tokens, {what}"
            show(title, medians(attention_runs(shape, causal=causal), repeats=9), "softmax")
    x = torch.randn(32, 128, 256, requires_grad=True)
    runs = {"LayerNorm": passes(nn.LayerNorm(256), x), "ExactNorm": passes(ExactNorm(256), x)}
    show("norm, forward and backward, 4096 x 256", medians(runs, repeats=9), "LayerNorm")
    show("optimiser step, 12.6 million weights", medians(step_runs(), repeats=9), "SGD with decay")


if __name__ == "__main__":
    main()
