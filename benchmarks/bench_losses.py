"""Losses over very many labels: memory and time, also beside sentence-transformers.

Run: python benchmarks/bench_losses.py [memory | peers]

`memory` takes some minutes: each row is a process of its own, whose peak is that of its whole life
(interpreter and torch included).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _timing import medians, show
from torch import nn
from torch.nn import functional as F

from gossamer.losses import CoupledSoftmaxLoss, DecoupledSoftmaxLoss, GradientCache

LABELS, BATCH, DIM = 1_000_000, 512, 768
PAIRS, CHUNK, WIDTH = 2048, 256, 384


def main() -> None:
    chosen = sys.argv[1:] or ["memory", "peers"]
    if chosen[0] == "case":
        print(json.dumps(CASES[chosen[1]]()))
        return
    if "memory" in chosen:
        print(f"\nbatch {BATCH}, {LABELS:,} labels, {DIM} dimensions")
        print(f"{'':44}{'peak GB':>10}{'seconds':>10}")
        for name in CASES:
            if not name.startswith("pairs"):
                report(name)
    if "peers" in chosen:
        peers()
        print(f"\nmemory that a step adds\n{'':44}{'GB':>10}{'seconds':>10}")
        for name in CASES:
            if name.startswith("pairs"):
                report(name)


def report(name: str) -> None:
    # freed blocks go back to the system, else the peak is that of the C library's heap
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, __file__, "case", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seconds, peak = json.loads(done.stdout)
    print(f"{name:44}{peak:10.2f}{seconds:10.1f}", flush=True)


def measured(step: Any) -> tuple[float, float]:
    """Return seconds of a step and the peak of the process in GB."""
    begin = time.perf_counter()
    step()
    seconds = time.perf_counter() - begin
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def relevant() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [row.unique().tolist() for row in torch.randint(LABELS, (BATCH, 5), generator=generator)]


def nothing() -> tuple[float, float]:
    return measured(lambda: None)


def table(loss: Any, dtype: torch.dtype) -> tuple[float, float]:
    """Scores against a table of label vectors that stays as it is; the gradient of the inputs."""
    keys = torch.empty(LABELS, DIM, dtype=dtype)
    for part in keys.split(10_000):  # type: ignore[no-untyped-call]
        part.copy_(F.normalize(torch.randn(len(part), DIM), dim=1))
    queries = F.normalize(torch.randn(BATCH, DIM), dim=1).requires_grad_()
    return measured(lambda: loss.streamed(queries, keys, relevant()).backward())


def encoder(loss: Any) -> tuple[float, float]:
    """Inputs and labels through one encoder that learns: 8 of 16,384 features for each text."""
    bag = nn.EmbeddingBag(16384, DIM)
    grams = torch.randint(16384, (LABELS, 8), dtype=torch.int32)
    cache = GradientCache(lambda part: F.normalize(bag(part), dim=1), loss, chunk_size=4096)
    return measured(lambda: cache.backward(grams[:BATCH], grams, relevant()))


class Tower(nn.Module):
    """An encoder in the form that sentence-transformers calls."""

    def __init__(self) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.net = nn.Sequential(up, nn.GELU(), down)

    def __getitem__(self, index: int) -> nn.Module:
        return self.net

    def forward(self, features: Any) -> Any:
        """Encode a batch, for them from a mapping to a mapping."""
        if isinstance(features, torch.Tensor):
            return F.normalize(self.net(features), dim=1)
        return {"sentence_embedding": self.net(features["input_ids"])}


def pairs() -> tuple[Tower, torch.Tensor, torch.Tensor, list[list[int]]]:
    torch.manual_seed(0)
    left, right = torch.randn(PAIRS, WIDTH), torch.randn(PAIRS, WIDTH)
    return Tower(), left, right, [[n] for n in range(PAIRS)]


def steps() -> dict[str, Any]:
    """The same batch of pairs through the same tower, forward and backward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers.sentence_transformer.losses import (
            CachedMultipleNegativesRankingLoss,
            MultipleNegativesRankingLoss,
        )
    tower, left, right, labels = pairs()
    diagonal = torch.eye(PAIRS, dtype=torch.bool)
    columns = [{"input_ids": x, "attention_mask": torch.ones(PAIRS, 1)} for x in (left, right)]
    theirs = MultipleNegativesRankingLoss(tower, scale=20.0)
    cached = CachedMultipleNegativesRankingLoss(tower, scale=20.0, mini_batch_size=CHUNK)
    cache = GradientCache(tower, DecoupledSoftmaxLoss(), chunk_size=CHUNK)
    plain = {"decoupled": DecoupledSoftmaxLoss(), "coupled": CoupledSoftmaxLoss()}

    def whole(loss: Any) -> Any:
        return lambda: loss(tower(left) @ tower(right).T, diagonal).backward()

    def streamed(loss: Any) -> Any:
        return lambda: loss.streamed(tower(left), tower(right), labels, chunk_size=1024).backward()

    return {
        "MultipleNegativesRankingLoss": lambda: theirs(columns, torch.empty(0)).backward(),
        "CoupledSoftmaxLoss": whole(plain["coupled"]),
        "DecoupledSoftmaxLoss": whole(plain["decoupled"]),
        "DecoupledSoftmaxLoss, streamed": streamed(plain["decoupled"]),
        "CachedMultipleNegatives": lambda: cached(columns, torch.empty(0)).backward(),
        "GradientCache": lambda: cache.backward(left, right, labels),
    }


def peers() -> None:
    torch.set_num_threads(1)
    runs = steps()
    show(
        f"{PAIRS} pairs, tower {WIDTH}-{4 * WIDTH}-{WIDTH}, forward and backward",
        medians(runs, repeats=2),
        "MultipleNegativesRankingLoss",
    )


def one_step(name: str) -> tuple[float, float]:
    """Return seconds, and what the step adds to the peak of the process."""
    torch.set_num_threads(1)
    step = steps()[name]
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak of the imports
    before = nothing()[1]
    seconds, peak = measured(step)
    return seconds, peak - before


CASES: dict[str, Any] = {
    "torch alone": nothing,
    "decoupled, GradientCache, encoder learns": lambda: encoder(DecoupledSoftmaxLoss()),
    "decoupled, table float32": lambda: table(DecoupledSoftmaxLoss(), torch.float32),
    "decoupled, table float16": lambda: table(DecoupledSoftmaxLoss(), torch.float16),
    **{
        f"pairs: {name}": (lambda name=name: one_step(name))
        for name in (
            "MultipleNegativesRankingLoss",
            "DecoupledSoftmaxLoss",
            "DecoupledSoftmaxLoss, streamed",
            "CachedMultipleNegatives",
            "GradientCache",
        )
    },
}


if __name__ == "__main__":
    main()
