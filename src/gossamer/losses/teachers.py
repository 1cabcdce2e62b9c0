"""Divergences from a teacher, row by row: all classes, or the teacher's top k and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import DtypeError, ShapeError

__all__ = ["TopKLogits", "coarse_divergence", "divergence"]


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


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the divergence of the student from the teacher in each row, both at a temperature."""
    values: Tensor = _Divergence.apply(student, teacher, temperature)  # type: ignore[no-untyped-call]
    return values


class _Divergence(torch.autograd.Function):
    """KL of softmax(teacher / T) from softmax(student / T), with its gradient (p - q) / T.

    In the form of a cross-entropy with soft targets: one exponential for each number, where
    log-probabilities of both would take two.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        work = teacher / temperature  # one scratch, so that fresh memory is asked for seldom
        q = work.softmax(1)
        p = torch.div(student, temperature, out=work).softmax(1)
        ctx.save_for_backward(student, teacher)
        ctx.temperature = temperature
        # log sum exp of a row, from its largest entry before and after the softmax
        log_a = teacher.amax(1) / temperature - q.amax(1).log()
        log_b = student.amax(1) / temperature - p.amax(1).log()
        gaps = torch.sub(teacher, student, out=work).mul_(q)
        values = gaps.sum(1) / temperature - log_a + log_b
        ctx.difference = p.sub_(q) if ctx.needs_input_grad[0] else None
        if not bool(values.isfinite().all()):  # classes with a logit of -inf
            a, b = teacher / temperature, student / temperature
            gaps = q * (a.log_softmax(1) - b.log_softmax(1))
            values = torch.where(q != 0, gaps, 0.0).sum(1)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        student, teacher = ctx.saved_tensors
        # given away, since it is scaled in place; a second pass makes it again
        difference, ctx.difference = ctx.difference, None
        if difference is None or torch.is_grad_enabled():
            p, q = (student / ctx.temperature).softmax(1), (teacher / ctx.temperature).softmax(1)
            return (p - q) * (grad / ctx.temperature)[:, None], None, None
        return difference.mul_((grad / ctx.temperature)[:, None]), None, None


def coarse_divergence(
    student: Tensor, values: Tensor, indices: Tensor, rest: Tensor, temperature: float
) -> Tensor:
    """Return the divergence of each row where all classes but the teacher's top k are one."""
    b = student / temperature
    log_p, log_q = b.gather(1, indices), values / temperature
    if indices.shape[1] < student.shape[1]:
        others = b.scatter(1, indices, -float("inf")).logsumexp(1)
        log_p = torch.cat((log_p, others[:, None]), 1)
        log_q = torch.cat((log_q, rest[:, None]), 1)
    log_p = log_p - b.logsumexp(1, keepdim=True)
    log_q = log_q.log_softmax(1)
    q = log_q.exp()
    return torch.where(q != 0, q * (log_q - log_p), 0.0).sum(1)
