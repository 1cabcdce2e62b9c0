"""Soft top-k: a membership for each label that sums to k, and the loss on it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, ShapeError
from gossamer.losses._labels import check_rows, check_scores, label_matrix, label_pairs, scaled
from gossamer.losses._rows import REDUCTIONS, draw, draw_pairs, reduce_rows, sum_pairs
from gossamer.losses._statistics import Plan, Shift
from gossamer.losses.streamed import StreamedLoss

__all__ = ["SoftTopKLoss", "soft_top_k"]


def soft_top_k(
    scores: Tensor, k: int | float | Tensor, *, alpha: float = 2.0, num_steps: int = 32
) -> Tensor:
    r"""Return how far each label belongs to the top k of its row: numbers in (0, 1) with sum k.

    $$u_l = \mathrm{sigmoid}(\alpha (x_l + t)), \qquad t \text{ such that } \sum_l u_l = k$$

    The shift t is found by bisection between bounds that hold for any row, and two Newton steps;
    the gradient is that of the exact solution. Scores of -inf take no part.

    Args:
        scores: x.
        k: Sum of a row; a tensor gives one for each row. Range: above 0, below the labels of a row.
        alpha: Steepness; large makes it hard. Range: > 0. Default 2.
        num_steps: Bisection steps. Range: >= 1. Default 32.

    Shape:
        - scores and output: `(B, L)`; k: number or `(B,)`.

    Raises:
        ConfigError: If k, alpha or num_steps are out of their range.
        ShapeError: If scores are no matrix or k does not fit.
        DataError: If a score is NaN.

    Example:
        >>> soft_top_k(torch.zeros(1, 4), 1)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])

    Source: Gupta et al., *Dual-Encoders for Extreme Multi-Label Classification*, ICLR 2024,
        section 3.3 and appendix.
    Deviations: the bounds are `logit(k/L)/alpha - max` and `- min`, which hold for any number of
        labels (official code: 10/alpha beyond largest and smallest score, too little above 110,000
        equal labels for k = 5).
    """
    out: Tensor = _SoftTopK.apply(*_prepared(scores, k, alpha, num_steps), alpha)  # type: ignore[no-untyped-call]
    return out


def log_soft_top_k(
    scores: Tensor, k: int | float | Tensor, *, alpha: float, num_steps: int = 32
) -> Tensor:
    """Return the logarithm of `soft_top_k`, exact where that is too small for a float."""
    out: Tensor = _LogSoftTopK.apply(*_prepared(scores, k, alpha, num_steps), alpha)  # type: ignore[no-untyped-call]
    return out


def _prepared(
    scores: Tensor, k: int | float | Tensor, alpha: float, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Return checked scores, and the shift of each row, `(B, 1)`."""
    check_range(alpha, "alpha", low=0.0, open_low=True)
    check_range(num_steps, "num_steps", low=1, integer=True)
    x = check_scores(scores)
    wanted = wanted_of_rows(k, len(x)).to(x.device, x.dtype).expand(len(x))[:, None]
    count = x.isfinite().sum(1, keepdim=True)
    if bool(((wanted <= 0) | (wanted >= count)).any()):
        raise ConfigError(
            f"k must be above 0 and below the number of labels; got {float(wanted.min()):g} to "
            f"{float(wanted.max()):g} with {int(count.min())} labels. Change k."
        )
    return x, _shift(x.detach(), wanted, count, alpha, num_steps)


def wanted_of_rows(k: int | float | Tensor, rows: int) -> Tensor:
    """Return k as a number or with one for each row."""
    wanted = torch.as_tensor(k)
    if wanted.shape not in ((), (rows,)):
        raise ShapeError(
            f"k must be a number or one for each of {rows} rows; got the shape "
            f"{tuple(wanted.shape)}. Change k."
        )
    return wanted


@torch.no_grad()
def _shift(x: Tensor, k: Tensor, count: Tensor, alpha: float, num_steps: int) -> Tensor:
    level = torch.logit(k.double() / count).to(x.dtype) / alpha
    low = level - x.amax(1, keepdim=True)
    high = level - x.masked_fill(~x.isfinite(), math.inf).amin(1, keepdim=True)
    for _ in range(num_steps):
        middle = (low + high) / 2
        above = torch.sigmoid(alpha * (x + middle)).sum(1, keepdim=True) > k
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    t = (low + high) / 2
    for _ in range(2):
        u = torch.sigmoid(alpha * (x + t))
        slope = (alpha * u * (1 - u)).sum(1, keepdim=True)
        step = (u.sum(1, keepdim=True) - k) / slope.clamp(min=torch.finfo(x.dtype).tiny)
        t = (t - step).clamp(low, high)
    return t


class _SoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor, alpha: float) -> Tensor:
        u = torch.sigmoid(alpha * (x + t))
        ctx.save_for_backward(u)
        ctx.alpha = alpha
        return u

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (u,) = ctx.saved_tensors
        v = ctx.alpha * u * (1 - u)
        total = v.sum(1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
        moved = (grads[0] * v).sum(1, keepdim=True) / total
        return v * (grads[0] - moved), None, None


class _LogSoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor, alpha: float) -> Tensor:
        y = alpha * (x + t)
        ctx.save_for_backward(torch.sigmoid(y))
        ctx.alpha = alpha
        return F.logsigmoid(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (u,) = ctx.saved_tensors
        v = ctx.alpha * u * (1 - u)
        w = grads[0] * ctx.alpha * (1 - u)
        total = v.sum(1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
        return w - v * (w.sum(1, keepdim=True) / total), None, None


class SoftTopKLoss(StreamedLoss):
    r"""Minus the mean log membership of the relevant labels in the soft top k.

    $$L_i = -\frac{1}{|P_i|} \sum_{j \in P_i} \log u_{ij}$$

    It asks for the relevant labels among the first k and for no order among them. Where a row has
    more than k relevant labels, k of them are drawn at each call and the others left out.

    Args:
        k: A number, a tensor with one for each row, or `"positives"`: as many as a row has relevant
            labels. Default 5.
        alpha: As in `soft_top_k`. Default 2.
        temperature: Divides the logits. Range: > 0. Default 0.05.
        reduction: `"mean"` over rows, `"sum"` or `"none"`. Default `"mean"`.

    Shape:
        - logits: `(B, L)`; labels: as in `DecoupledSoftmaxLoss`, weights count as relevant.
        - output: scalar, or `(B,)`.

    Raises:
        ConfigError: If an option is out of its range, or k is not below the number of labels.
        ShapeError: If logits and labels do not fit.
        DataError: If a score is NaN or a row has no relevant label.

    Example:
        >>> loss = SoftTopKLoss(k=1, temperature=1.0)
        >>> round(float(loss(torch.zeros(1, 4), [[2]])), 4)
        1.3863

    Source: Gupta et al., ICLR 2024, section 3.3.
    Deviations: as `soft_top_k`.
    """

    def __init__(
        self,
        k: int | str | Tensor = 5,
        *,
        alpha: float = 2.0,
        temperature: float = 0.05,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_range(alpha, "alpha", low=0.0, open_low=True)
        check_range(temperature, "temperature", low=0.0, open_low=True)
        check_choice(reduction, REDUCTIONS, "reduction")
        if isinstance(k, str):
            check_choice(k, ("positives",), "k")
        elif not isinstance(k, Tensor):
            check_range(k, "k", low=1, integer=True)
        self.k = k
        self.alpha = alpha
        self.temperature = temperature
        self.reduction = reduction

    def forward(self, logits: Tensor, labels: Any) -> Tensor:
        """Return the loss."""
        scores = scaled(self, logits)
        relevant = label_matrix(labels, (scores.shape[0], scores.shape[1]), scores.device) > 0
        rows = check_rows(relevant.any(1), "error")
        k: int | str | Tensor = self.k
        if isinstance(k, str):
            k = relevant.sum(1).to(scores.dtype)
        elif isinstance(k, int) and bool((relevant.sum(1) > k).any()):
            kept = draw(relevant, k)
            scores = scores.masked_fill(relevant & ~kept, -math.inf)
            relevant = kept
        log = log_soft_top_k(scores, k, alpha=self.alpha)
        loss = -torch.where(relevant, log, 0.0).sum(1) / relevant.sum(1)
        return reduce_rows(loss, rows, self.reduction)

    def plan(self, labels: Any, shape: tuple[int, int], like: Tensor) -> Plan:
        """Return what the loss does with a batch; see `StreamedLoss`."""
        pairs = label_pairs(labels, shape, like.device)
        counts = torch.bincount(pairs.rows, minlength=shape[0])
        some = check_rows(counts > 0, "error")
        kept = torch.ones_like(pairs.rows, dtype=torch.bool)
        if isinstance(self.k, int) and bool((counts > self.k).any()):
            kept = draw_pairs(pairs.rows, self.k)
        wide = torch.promote_types(like.dtype, torch.float32)
        k = counts if isinstance(self.k, str) else wanted_of_rows(self.k, shape[0])
        shift = Shift(k.to(like.device, wide).expand(shape[0]), self.alpha)
        return Plan(pairs.where(kept), pairs.where(~kept), some, shift)

    def of_statistics(self, relevant: Tensor, value: Tensor, plan: Plan) -> Tensor:
        """Return the loss; see `StreamedLoss`."""
        pairs, rows = plan.relevant, len(plan.some)
        log = F.logsigmoid(self.alpha * (relevant + value[pairs.rows]))
        loss = -sum_pairs(log, pairs, rows) / torch.bincount(pairs.rows, minlength=rows)
        return reduce_rows(loss, plan.some, self.reduction)
