"""The training loss of a copy of a model as a function of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from gossamer.errors import DataError, ShapeError
from gossamer.measures._batches import Batches, call_for_logits, check_classes
from gossamer.measures.folding import fold_batchnorm

__all__ = ["Loss", "Objective", "folded_with"]

Loss = Callable[[Any, Tensor], Tensor]
"""From outputs and labels of a batch to its mean loss."""


class Objective:
    """Loss and error over all data, for weights near those of the model.

    Args:
        model: A copy, in float64 and evaluation mode; its weights are overwritten and put back.
        batches: The data.
        loss: Mean over a batch; `None` for cross-entropy, which checks labels too.
    """

    def __init__(self, model: nn.Module, batches: Batches, loss: Loss | None = None) -> None:
        self.model = model
        self.batches = batches
        self.loss = loss
        self.weights = list(model.parameters())
        self.start = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def at(self, offsets: Sequence[Tensor] | None = None) -> tuple[float, float]:
        """Return loss and error, the latter NaN without classes, at start + offsets.

        Raises:
            DataError: If the loss is not finite.
        """
        self._move(offsets)
        total = wrong = 0.0
        for x, y in self.batches:
            out = call_for_logits(self.model, x)
            total += float(self._mean(out, y)) * len(x)
            wrong += float((out.argmax(1) != y).sum()) if self.loss is None else math.nan
        self._move(None)
        count = self.batches.num_examples
        return self._finite(total / count), wrong / count

    def gradient(self, offsets: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
        """Return the loss at start + offsets, and its gradient there."""
        self._move(offsets)
        for weight in self.weights:
            weight.requires_grad_()
            weight.grad = None
        total = 0.0
        with torch.enable_grad():
            for x, y in self.batches:
                part = self._mean(call_for_logits(self.model, x), y) * (
                    len(x) / self.batches.num_examples
                )
                part.backward()  # type: ignore[no-untyped-call]
                total += float(part.detach())
        found = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]
        for weight in self.weights:
            weight.requires_grad_(False)
            weight.grad = None
        self._move(None)
        return self._finite(total), found

    def _mean(self, out: Any, y: Tensor) -> Tensor:
        if self.loss is not None:
            return self.loss(out, y)
        check_classes(out, y)
        return F.cross_entropy(out, y.long())

    @torch.no_grad()
    def _move(self, offsets: Sequence[Tensor] | None) -> None:
        # from the kept start each time: sums and differences would leave rounding errors
        for index, weight in enumerate(self.weights):
            if offsets is None:
                weight.copy_(self.start[index])
            else:
                torch.add(self.start[index], offsets[index], out=weight)

    def _finite(self, value: float) -> float:
        if not math.isfinite(value):
            raise DataError(
                f"the training loss must be finite; got {value} on the data of loader. Check the "
                "model's outputs, or perturb it less."
            )
        return value


@torch.no_grad()
def folded_with(copy: nn.Module, batches: Batches) -> nn.Module:
    """Return a copy with BatchNorm folded, having compared their outputs on the first batch.

    Raises:
        ShapeError: If folding changed the outputs.
    """
    if not any(isinstance(module, _BatchNorm) for module in copy.modules()):
        return copy
    folded = fold_batchnorm(copy)
    x = next(iter(batches))[0][:8]
    one, two = call_for_logits(copy, x), call_for_logits(folded, x)
    gap = float((one - two).abs().max())
    if gap > 1e-5 * float(one.abs().max()):
        raise ShapeError(
            "BatchNorm must act on the output units of the layer before it; got outputs that "
            f"differ by {gap:.2g} after folding. Put it on the axis of the layer's units."
        )
    return folded
