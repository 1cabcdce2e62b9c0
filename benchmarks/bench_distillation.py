"""Time of the distillation loss, forward and backward pass, against cross-entropy and the KL form.

Sizes: 4096 rows of 1000 classes, 512 rows of 32000. The soft-target form is the framework's
cross-entropy with probabilities as labels, which has the same gradient as the KL form; the last row
is the usual loop of trainers, KL by `F.kl_div` beside cross-entropy with the labels.
Run: python benchmarks/bench_distillation.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _timing import medians, show
from torch import Tensor
from torch.nn import functional as F

from gossamer.losses import DistillationLoss, TopKLogits

torch.set_num_threads(1)
TAU = 4.0

Step = Callable[[], object]


def kl_form(logits: Tensor, teacher: Tensor) -> Tensor:
    log_p, log_q = (logits / TAU).log_softmax(1), (teacher / TAU).log_softmax(1)
    return TAU**2 * F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")


def soft_form(logits: Tensor, teacher: Tensor) -> Tensor:
    return TAU**2 * F.cross_entropy(logits / TAU, (teacher / TAU).softmax(1))


def steps(rows: int, classes: int) -> dict[str, Step]:
    torch.manual_seed(0)
    logits = torch.randn(rows, classes, requires_grad=True)
    teacher = torch.randn(rows, classes)
    labels = torch.randint(classes, (rows,))
    top = TopKLogits.of(teacher, 64, temperature=TAU)
    term = DistillationLoss(temperature=TAU, alpha=1.0)
    both = DistillationLoss(temperature=TAU, alpha=0.9)

    def usual() -> Tensor:
        return 0.9 * kl_form(logits, teacher) + 0.1 * F.cross_entropy(logits, labels)

    losses: dict[str, Callable[[], Tensor]] = {
        "cross-entropy": lambda: F.cross_entropy(logits, labels),
        "framework, KL form": lambda: kl_form(logits, teacher),
        "framework, soft targets": lambda: soft_form(logits, teacher),
        "teacher's term": lambda: term(logits, teacher),
        "teacher's term, top 64": lambda: term(logits, top),
        "both terms": lambda: both(logits, teacher, labels),
        "framework, both terms": usual,
    }

    def step_of(loss: Callable[[], Tensor]) -> Step:
        def step() -> None:
            logits.grad = None
            loss().backward()

        return step

    return {name: step_of(loss) for name, loss in losses.items()}


def main() -> None:
    for rows, classes in ((4096, 1000), (512, 32000)):
        show(f"{rows} x {classes}", medians(steps(rows, classes), repeats=7), "cross-entropy")


if __name__ == "__main__":
    main()
