"""Losses against a teacher, row by row: all classes, or the teacher's top k and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.checks import check_range
from gossamer.errors import DtypeError, ShapeError
from gossamer.losses._classes import chunk_numbers

__all__ = ["TopKLogits", "coarse_divergence", "soft_loss", "soft_rows"]


@dataclass(frozen=True)
class TopKLogits:
    r"""A teacher's k largest logits of each row, and what the other classes weigh together.

    The other classes are one class: with a student coarsened in the same way the divergence is
    exact, and at most that of all classes. The top k are never made to sum to 1 by themselves.

    Args:
        values: The k largest logits, as they are.
        indices: Their classes, all different in a row.
        rest: $\log \sum_j \exp(t_j / \tau)$ over the other classes j; -inf if there are none.
        temperature: The $\tau$ in `rest`, which cannot be changed afterwards. Range: > 0.
            Default 4.

    Shape:
        - values, indices: `(N, k)` or `(N, T, k)`; rest: without the last axis.

    Raises:
        ShapeError: If the shapes do not fit.
        DtypeError: If `indices` are no integers, or values are.
        ConfigError: If the temperature is not positive.

    Example:
        >>> top = TopKLogits.of(torch.tensor([[0.0, 3.0, 1.0, 0.0]]), 2, temperature=1.0)
        >>> top.indices.tolist(), round(float(top.rest), 4)
        ([[1, 2]], 0.6931)

    Source: common practice for large vocabularies; the bucket of the rest is this library's choice.
    Deviations: none
    """

    values: Tensor
    indices: Tensor
    rest: Tensor
    temperature: float = 4.0

    def __post_init__(self) -> None:
        check_range(self.temperature, "temperature", low=0.0, open_low=True)
        if self.values.shape != self.indices.shape or self.values.shape[:-1] != self.rest.shape:
            raise ShapeError(
                "values and indices must have one shape, (N, k) or (N, T, k), and rest that without"
                f" the last axis; got {tuple(self.values.shape)}, {tuple(self.indices.shape)} and "
                f"{tuple(self.rest.shape)}. Build them with TopKLogits.of(logits, k)."
            )
        if self.indices.is_floating_point() or not self.values.is_floating_point():
            raise DtypeError(
                "values must be floating point and indices integers; got "
                f"{self.values.dtype} and {self.indices.dtype}. Swap or convert them."
            )

    @classmethod
    def of(cls, logits: Tensor, k: int, *, temperature: float = 4.0) -> TopKLogits:
        """Return the top k of all logits, `(..., C)`.

        Args:
            logits: Of the teacher.
            k: How many to keep. Range: 1 to C.
            temperature: At which the student will be trained. Default 4.
        """
        check_range(k, "k", low=1, high=logits.shape[-1], integer=True)
        exact = logits.detach()
        exact = exact if exact.dtype == torch.float64 else exact.float()
        values, indices = exact.topk(k)
        others = exact.scatter(-1, indices, -float("inf"))
        return cls(values, indices, (others / temperature).logsumexp(-1), temperature)

    def __getitem__(self, rows: Any) -> TopKLogits:
        """Return some of the rows."""
        return TopKLogits(self.values[rows], self.indices[rows], self.rest[rows], self.temperature)

    def to(self, device: torch.device | str) -> TopKLogits:
        """Return the same on a device."""
        values, indices, rest = (t.to(device) for t in (self.values, self.indices, self.rest))
        return TopKLogits(values, indices, rest, self.temperature)


def soft_rows(
    student: Tensor, teacher: Tensor, labels: Tensor | None, temperature: float, alpha: float
) -> Tensor:
    """Return the loss of each row, written as its formula; `labels` if alpha is below 1."""
    log_p = (student / temperature).log_softmax(1)
    log_q = (teacher / temperature).log_softmax(1)
    q = log_q.exp()
    values = torch.where(q != 0, q * (log_q - log_p), 0.0).sum(1)
    values = alpha * temperature**2 * values
    if labels is not None:
        values = values + (1 - alpha) * F.cross_entropy(student, labels, reduction="none")
    return values


def soft_loss(
    rows: Tensor, teacher: Tensor, labels: Tensor | None, temperature: float, alpha: float
) -> Tensor:
    """Return the same, with the gradient worked out beside it."""
    values: Tensor = _SoftLoss.apply(rows, teacher, labels, temperature, alpha)  # type: ignore[no-untyped-call]
    return values


class _SoftLoss(torch.autograd.Function):
    """The loss of many rows and its gradient, a T (p - q) + (1 - a) (softmax - label), by chunks.

    In the form of a cross-entropy with soft targets: one exponential for each number and model,
    where log-probabilities would take two. Beside the gradient two scratch arrays of the size of a
    chunk are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        teacher: Tensor,
        labels: Tensor | None,
        temperature: float,
        alpha: float,
    ) -> Tensor:
        ctx.save_for_backward(rows, teacher, labels)
        ctx.temperature, ctx.alpha = temperature, alpha
        ctx.gradient = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        return _values(rows, teacher, labels, temperature, alpha, ctx.gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, teacher, labels = ctx.saved_tensors
        numbers = ctx.temperature, ctx.alpha
        if torch.is_grad_enabled():  # a second derivative is asked for
            exact = rows if rows.dtype == torch.float64 else rows.float()
            values = soft_rows(exact, teacher.to(exact.dtype), labels, *numbers)
            (found,) = torch.autograd.grad(values, rows, grad, create_graph=True)
            return found, None, None, None, None
        # given away, since it is scaled in place; a second pass makes it again
        found, ctx.gradient = ctx.gradient, None
        if found is None:
            found = torch.empty_like(rows)
            _values(rows, teacher, labels, *numbers, found)
        return found.mul_(grad[:, None]), None, None, None, None


def _values(
    rows: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    temperature: float,
    alpha: float,
    gradient: Tensor | None,
) -> Tensor:
    """Return the loss of each row; write its gradient by the logits where one is wanted."""
    exact = rows.dtype if rows.dtype in (torch.float32, torch.float64) else torch.float32
    size = min(len(rows), max(1, chunk_numbers(rows) // rows.shape[1]))
    values = torch.empty(len(rows), dtype=exact, device=rows.device)
    scratch = torch.empty((2, size, rows.shape[1]), dtype=exact, device=rows.device)
    for begin in range(0, len(rows), size):
        part = slice(begin, begin + size)
        s, t = rows[part].to(exact), teacher[part].to(exact)
        work, q = scratch[:, : len(s)]
        place = None if gradient is None else gradient[part]
        p = place if place is not None and place.dtype == exact else torch.empty_like(s)
        torch.softmax(torch.div(t, temperature, out=work), 1, out=q)
        torch.softmax(torch.div(s, temperature, out=work), 1, out=p)
        # log sum exp of a row, from its largest entry before and after the softmax
        high_s, high_t = s.amax(1), t.amax(1)
        offset = (high_s - high_t) / temperature - p.amax(1).log() + q.amax(1).log()
        gaps = torch.sub(t, s, out=work).mul_(q).sum(1) / temperature
        value = (gaps + offset).mul_(alpha * temperature**2)
        p.sub_(q).mul_(alpha * temperature)
        if labels is not None:
            own = labels[part, None]
            torch.softmax(s, 1, out=work)
            loss = high_s - work.amax(1).log() - s.gather(1, own)[:, 0]
            value.add_(loss, alpha=1 - alpha)
            p.add_(work, alpha=1 - alpha)
            p.scatter_add_(1, own, p.new_full(own.shape, alpha - 1))
        if not bool(value.isfinite().all()):  # classes with a logit of -inf
            value = soft_rows(s, t, None if labels is None else labels[part], temperature, alpha)
        values[part] = value
        if place is not None and place is not p:
            place.copy_(p)
    return values


def coarse_divergence(
    student: Tensor, values: Tensor, indices: Tensor, rest: Tensor, temperature: float
) -> Tensor:
    """Return the divergence of each row where all classes but the teacher's top k are one."""
    b = student / temperature
    log_p, log_q = b.gather(1, indices), values / temperature
    if indices.shape[1] < student.shape[1]:
        others = b.scatter(1, indices, -float("inf"))
        # of a row without others the sum is -inf, whose gradient would be NaN
        none = (others == -float("inf")).all(1)
        others = torch.where(none[:, None], 0.0, others).logsumexp(1)
        others = torch.where(none, -float("inf"), others)
        log_p = torch.cat((log_p, others[:, None]), 1)
        log_q = torch.cat((log_q, rest[:, None]), 1)
    log_p = log_p - b.logsumexp(1, keepdim=True)
    log_q = log_q.log_softmax(1)
    q = log_q.exp()
    return torch.where(q != 0, q * (log_q - log_p), 0.0).sum(1)
