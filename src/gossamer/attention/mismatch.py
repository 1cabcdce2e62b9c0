"""How far the log-probabilities of one model in two precisions lie apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.checks import check_shape
from gossamer.errors import DataError, DtypeError, UnsupportedError
from gossamer.measures.variance import call_model, evaluating

__all__ = ["MismatchMonitor", "MismatchReport"]


@dataclass(frozen=True)
class MismatchReport:
    """How far the log-probabilities of two precisions lie apart.

    Args:
        mean_gap: Mean of log-probability in low precision minus that in full. Unit: nats.
        mean_abs_gap: Mean of its size. Unit: nats.
        max_abs_gap: Largest size. Unit: nats.
        divergence: Mean Kullback-Leibler divergence of low from full precision. Unit: nats.
        num_tokens: Places measured.

    Example:
        >>> MismatchReport(-0.001, 0.002, 0.05, 1e-5, 640).to_dict()["num_tokens"]
        640
    """

    mean_gap: float
    mean_abs_gap: float
    max_abs_gap: float
    divergence: float
    num_tokens: int

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures as one plain row."""
        return [self.to_dict()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dict(vars(self))


class MismatchMonitor:
    r"""Compares the log-probabilities of a model with those of its copy in another precision.

    The gap between what is trained and what is served; in reinforcement learning, between the model
    that samples and the one that learns. Each check copies the model as it is then, so memory for a
    second one is needed while it runs; nothing is hooked, and the model is left as it was.

    Args:
        model: Returns logits `(..., V)`, or something with `logits`.
        dtype: Of the copy, for example `torch.bfloat16`.

    Raises:
        DtypeError: If `dtype` is not floating.

    Example:
        >>> monitor = MismatchMonitor(nn.Linear(8, 5), dtype=torch.bfloat16)
        >>> monitor.check(torch.randn(100, 8)).max_abs_gap < 0.1
        True

    Source: Qiu and Yao 2025, on how far low precision parts from full; the measure is usual in
        reinforcement learning for language models.
    Deviations: the paper compares losses of two runs, not two precisions of one model.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point or dtype.itemsize == 1:
            raise DtypeError(
                "dtype must be a floating dtype of 16 bits or more that layers compute in; got "
                f"{dtype}. Use torch.bfloat16 or torch.float16."
            )
        self.model = model
        self.dtype = dtype
        self.reports: list[MismatchReport] = []

    @torch.no_grad()
    def check(self, batch: Any, labels: Tensor | None = None) -> MismatchReport:
        """Measure on one batch, and add the report to `reports`.

        Args:
            batch: What the model is called with: a tensor, keywords, a batch of a task, or a tuple.
            labels: Class whose log-probability counts at each place, `(...)`, -100 for places that
                are left out. Default the most probable class in full precision, everywhere.

        Raises:
            UnsupportedError: If the model returns no logits.
            ShapeError: If the labels do not fit the logits.
            DataError: If no place is left, or log-probabilities are not finite.
        """
        with evaluating(self.model):
            full = _log_probabilities(self.model, batch)
            low_model = _lowered(copy.deepcopy(self.model), self.dtype)
            low = _log_probabilities(low_model, _cast(batch, self.dtype))
        labels = full.argmax(-1) if labels is None else labels.to(full.device)
        check_shape(labels, full.shape[:-1], "labels")
        used = labels != -100
        full, low, labels = full[used], low[used], labels[used]
        if not len(labels):
            raise DataError("labels must keep at least one place; all are -100. Give some others.")
        gaps = (low - full).gather(-1, labels[:, None])
        if not torch.isfinite(gaps).all():
            raise DataError(
                f"log-probabilities must be finite; got NaN or infinity in {self.dtype} or in full "
                "precision. Look for overflow, for example in float16, or choose another dtype."
            )
        divergence = (full.exp() * (full - low)).nan_to_num(0.0).sum(-1).mean()
        report = MismatchReport(
            float(gaps.mean()),
            float(gaps.abs().mean()),
            float(gaps.abs().max()),
            float(divergence),
            len(labels),
        )
        self.reports.append(report)
        return report


def _lowered(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast what a checkpoint holds; frequencies of positions and the like stay as they are."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    return model


def _log_probabilities(model: nn.Module, batch: Any) -> Tensor:
    out = call_model(model, batch)
    logits = getattr(out, "logits", out)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise UnsupportedError(
            "the model must return logits, a floating tensor, or something with `logits`; got "
            f"{type(out).__name__} from {type(model).__name__}. Wrap the model."
        )
    return logits.double().log_softmax(-1)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {name: _cast(value, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple | list) and not hasattr(batch, "tokens"):
        return type(batch)(_cast(value, dtype) for value in batch)
    return batch
