"""Time of the losses for noisy labels, forward and backward pass, against the framework's.

Sizes: 4096 rows of 1000 classes, 512 rows of 32000. The matrix forms run at 1000 classes alone.
Run: python benchmarks/bench_label_noise.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _timing import medians, show
from torch.nn import functional as F

from gossamer.losses import (
    BackwardCorrectionLoss,
    ForwardCorrectionLoss,
    GeneralizedCrossEntropyLoss,
    LabelSmoothingLoss,
    SmearedLoss,
    SymmetricCrossEntropyLoss,
    SymmetricNoise,
)

torch.set_num_threads(1)

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def losses(classes: int) -> dict[str, Loss]:
    noise = SymmetricNoise(classes, 0.2)
    found: dict[str, Loss] = {
        "framework": F.cross_entropy,
        "framework, smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        "smoothing": LabelSmoothingLoss(0.1),
        "forward, symmetric": ForwardCorrectionLoss(noise),
        "backward, symmetric": BackwardCorrectionLoss(noise),
        "generalized": GeneralizedCrossEntropyLoss(),
        "symmetric cross-entropy": SymmetricCrossEntropyLoss(),
    }
    if classes <= 1000:
        found["forward, matrix"] = ForwardCorrectionLoss(noise.matrix())
        found["smearing, matrix"] = SmearedLoss(noise.matrix())
    return found


def step_of(loss: Loss, logits: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
    def step() -> None:
        logits.grad = None
        loss(logits, labels).backward()

    return step


def main() -> None:
    torch.manual_seed(0)
    for rows, classes in ((4096, 1000), (512, 32000)):
        logits = torch.randn(rows, classes, requires_grad=True)
        labels = torch.randint(classes, (rows,))
        steps = {name: step_of(loss, logits, labels) for name, loss in losses(classes).items()}
        show(f"{rows} x {classes}", medians(steps, repeats=7), "framework")


if __name__ == "__main__":
    main()
