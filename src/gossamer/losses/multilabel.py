"""Contrastive losses for inputs with several relevant labels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_choice, check_range
from gossamer.errors import ShapeError, UnsupportedError
from gossamer.losses._labels import check_rows, label_matrix, label_pairs, scaled
from gossamer.losses._rows import (
    REDUCTIONS,
    draw,
    draw_pairs,
    options_of,
    reduce_rows,
    sum_pairs,
)
from gossamer.losses._statistics import LogSumExp, Plan
from gossamer.losses.streamed import StreamedLoss

__all__ = [
    "CoupledSoftmaxLoss",
    "DecoupledSoftmaxLoss",
    "InBatchSoftmaxLoss",
    "SummedSoftmaxLoss",
]


class DecoupledSoftmaxLoss(StreamedLoss):
    r"""Each relevant label against all irrelevant ones, and never against another relevant one.

    $$Z_i = \log \sum_{l \notin P_i} e^{s_{il}}, \qquad
      L_i = \frac{1}{|P_i|} \sum_{j \in P_i} \mathrm{softplus}(Z_i - s_{ij}), \qquad
      s = \mathrm{logits} / \tau$$

    The plain softmax over all labels lowers a relevant label that is already likely; here the
    gradient of a relevant label is never positive. With one relevant label it is cross-entropy.

    Args:
        temperature: tau. Range: > 0. Default 0.05, for normalised embeddings.
        normalize: `"positives"` divides by the weight of the relevant labels, as the official code
            does; `"sum"` does not, as the paper prints it. Default `"positives"`.
        sample_positives: Relevant labels drawn for each row at a call; the others are left out, so
            that the mean over draws is the whole loss. Range: >= 1. Default all.
        num_negatives: Irrelevant labels drawn for each row at a call, weighted so that their sum of
            exponentials is right in the mean. Range: >= 1. Default all.
        empty: What a row without relevant label does: `"error"`, or `"skip"`: it counts nowhere.
            Default `"error"`.
        reduction: `"mean"` over rows, `"sum"` or `"none"`. Default `"mean"`.

    Shape:
        - logits: `(B, L)`, inner products of inputs and labels; labels: as in the guide, a
          `(B, L)` matrix of 0, 1 or weights, lists of indices, or a sparse matrix.
        - output: scalar, or `(B,)`.

    Raises:
        ConfigError: If an option is out of its range.
        ShapeError: If logits and labels do not fit.
        DataError: If a score is NaN, an index is no label, or a row is empty.

    Example:
        >>> loss = DecoupledSoftmaxLoss(temperature=1.0)
        >>> round(float(loss(torch.tensor([[2.0, 1.0, 0.0]]), [[0, 1]])), 6)
        0.220095

    Source: Gupta et al., *Dual-Encoders for Extreme Multi-Label Classification*, ICLR 2024, eq. 5.
    Deviations: drawn negatives are ours; masked scores are -inf (official code: -100).
    """

    def __init__(
        self,
        *,
        temperature: float = 0.05,
        normalize: str = "positives",
        sample_positives: int | None = None,
        num_negatives: int | None = None,
        empty: str = "error",
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_range(temperature, "temperature", low=0.0, open_low=True)
        check_choice(normalize, ("positives", "sum"), "normalize")
        check_choice(empty, ("error", "skip"), "empty")
        check_choice(reduction, REDUCTIONS, "reduction")
        for name, count in (
            ("sample_positives", sample_positives),
            ("num_negatives", num_negatives),
        ):
            if count is not None:
                check_range(count, name, low=1, integer=True)
        self.temperature = temperature
        self.normalize = normalize
        self.sample_positives = sample_positives
        self.num_negatives = num_negatives
        self.streams = num_negatives is None
        self.empty = empty
        self.reduction = reduction

    def forward(self, logits: Tensor, labels: Any) -> Tensor:
        """Return the loss."""
        scores = scaled(self, logits)
        if self.num_negatives is not None:
            return self._of_some(scores, labels, self.num_negatives)
        plan = self.plan(labels, (scores.shape[0], scores.shape[1]), scores)
        hidden = plan.hidden.rows, plan.hidden.columns
        shown = scores.index_put(hidden, scores.new_tensor(-math.inf))
        relevant = scores[plan.relevant.rows, plan.relevant.columns]
        return self.of_statistics(relevant, shown.logsumexp(1), plan)

    def _of_some(self, scores: Tensor, labels: Any, num_negatives: int) -> Tensor:
        """Return the loss with irrelevant labels that are drawn."""
        weights = label_matrix(labels, (scores.shape[0], scores.shape[1]), scores.device)
        relevant = weights > 0
        rows = check_rows(relevant.any(1), self.empty)
        negatives = draw(~relevant, num_negatives)
        total = (~relevant).sum(1)
        shift = (total / negatives.sum(1).clamp(min=1)).clamp(min=1).log()
        if self.sample_positives is not None:
            weights = weights * draw(relevant, self.sample_positives)
        z = masked_logsumexp(scores, negatives) + shift
        # a row whose labels are all relevant has z = -inf and costs nothing
        each = F.softplus(z[:, None] - scores) * weights
        loss = torch.where(weights > 0, each, 0.0).sum(1)
        if self.normalize == "positives":
            loss = loss / weights.sum(1).clamp(min=torch.finfo(weights.dtype).tiny)
        return reduce_rows(loss, rows, self.reduction)

    def plan(self, labels: Any, shape: tuple[int, int], like: Tensor) -> Plan:
        """Return what the loss does with a batch; see `StreamedLoss`."""
        if self.num_negatives is not None:
            raise UnsupportedError(
                f"num_negatives must be None where scores are streamed; got {self.num_negatives}. "
                "Streaming takes all negatives: leave the option out."
            )
        pairs = label_pairs(labels, shape, like.device)
        some = check_rows(sum_pairs(pairs.weights, pairs, shape[0]) > 0, self.empty)
        kept = pairs
        if self.sample_positives is not None:
            kept = pairs.where(draw_pairs(pairs.rows, self.sample_positives))
        return Plan(kept, pairs, some, LogSumExp())

    def of_statistics(self, relevant: Tensor, value: Tensor, plan: Plan) -> Tensor:
        """Return the loss; see `StreamedLoss`."""
        pairs, rows = plan.relevant, len(plan.some)
        loss = sum_pairs(F.softplus(value[pairs.rows] - relevant) * pairs.weights, pairs, rows)
        if self.normalize == "positives":
            total = sum_pairs(pairs.weights, pairs, rows)
            loss = loss / total.clamp(min=torch.finfo(total.dtype).tiny)
        return reduce_rows(loss, plan.some, self.reduction)


class _RowLoss(StreamedLoss):
    """What the two baselines share: temperature, checks, reduction."""

    def __init__(self, *, temperature: float = 0.05, reduction: str = "mean") -> None:
        super().__init__()
        check_range(temperature, "temperature", low=0.0, open_low=True)
        check_choice(reduction, REDUCTIONS, "reduction")
        self.temperature = temperature
        self.reduction = reduction

    def forward(self, logits: Tensor, labels: Any) -> Tensor:
        """Return the loss."""
        scores = scaled(self, logits)
        plan = self.plan(labels, (scores.shape[0], scores.shape[1]), scores)
        relevant = scores[plan.relevant.rows, plan.relevant.columns]
        return self.of_statistics(relevant, scores.logsumexp(1), plan)

    def plan(self, labels: Any, shape: tuple[int, int], like: Tensor) -> Plan:
        """Return what the loss does with a batch; see `StreamedLoss`."""
        pairs = label_pairs(labels, shape, like.device)
        some = check_rows(sum_pairs(pairs.weights, pairs, shape[0]) > 0, "error")
        return Plan(pairs, pairs.where(slice(0)), some, LogSumExp())


class CoupledSoftmaxLoss(_RowLoss):
    r"""Cross-entropy over all labels, mean over the relevant ones: InfoNCE, the usual baseline.

    $$L_i = -\frac{1}{|P_i|} \sum_{j \in P_i} \log \mathrm{softmax}(s_i)_j$$

    Args:
        temperature: Divides the logits. Range: > 0. Default 0.05.
        reduction: `"mean"` over rows, `"sum"` or `"none"`. Default `"mean"`.

    Shape:
        - logits: `(B, L)`; labels: as in `DecoupledSoftmaxLoss`; output: scalar, or `(B,)`.

    Raises:
        As `DecoupledSoftmaxLoss`; a row without relevant label is an error.

    Example:
        >>> loss = CoupledSoftmaxLoss(temperature=1.0)
        >>> round(float(loss(torch.tensor([[2.0, 1.0, 0.0]]), [[0, 1]])), 6)
        0.907606

    Source: van den Oord et al., *Representation Learning with Contrastive Predictive Coding*, 2018;
        with several positives as in Gupta et al., ICLR 2024, eq. 3.
    Deviations: divided by the number of relevant labels, as the decoupled loss.
    """

    def of_statistics(self, relevant: Tensor, value: Tensor, plan: Plan) -> Tensor:
        """Return the loss; see `StreamedLoss`."""
        pairs, rows = plan.relevant, len(plan.some)
        loss = sum_pairs((value[pairs.rows] - relevant) * pairs.weights, pairs, rows)
        loss = loss / sum_pairs(pairs.weights, pairs, rows)
        return reduce_rows(loss, plan.some, self.reduction)


class SummedSoftmaxLoss(_RowLoss):
    r"""Minus the logarithm of the summed probability of all relevant labels.

    $$L_i = \log \sum_l e^{s_{il}} - \log \sum_{j \in P_i} e^{s_{ij}}$$

    One relevant label with all the weight is enough to make it 0.

    Args:
        temperature: Divides the logits. Range: > 0. Default 0.05.
        reduction: `"mean"` over rows, `"sum"` or `"none"`. Default `"mean"`.

    Shape:
        - logits: `(B, L)`; labels: as in `DecoupledSoftmaxLoss`, weights count as relevant; output:
          scalar, or `(B,)`.

    Raises:
        As `DecoupledSoftmaxLoss`; a row without relevant label is an error.

    Example:
        >>> loss = SummedSoftmaxLoss(temperature=1.0)
        >>> round(float(loss(torch.tensor([[2.0, 1.0, 0.0]]), [[0, 1]])), 4)
        0.0943

    Source: the log-of-sum baseline of Gupta et al., ICLR 2024.
    Deviations: none
    """

    def of_statistics(self, relevant: Tensor, value: Tensor, plan: Plan) -> Tensor:
        """Return the loss; see `StreamedLoss`."""
        pairs, rows = plan.relevant, len(plan.some)
        top = torch.full_like(value, -math.inf)
        top = top.scatter_reduce(0, pairs.rows, relevant.detach(), "amax")
        share = sum_pairs((relevant - top[pairs.rows]).exp(), pairs, rows)
        return reduce_rows(value - top - share.log(), plan.some, self.reduction)


class InBatchSoftmaxLoss(nn.Module):
    r"""Pairs of a batch: the label of every other pair is a negative.

    Row i of the logits belongs to column i. Where another column is relevant to the row as well, it
    is a false negative: `mask_positives` leaves it out.

    Args:
        temperature: Divides the logits. Range: > 0. Default 0.05.
        mask_positives: Leave known relevant columns out of the negatives. Default true.

    Shape:
        - logits: `(B, B)`; labels: which columns are relevant to a row, as in
          `DecoupledSoftmaxLoss`, or `None` for the diagonal alone; output: scalar.

    Raises:
        ShapeError: If the logits are not square.
        DataError: If a score is NaN.

    Example:
        >>> round(float(InBatchSoftmaxLoss(temperature=1.0)(torch.eye(2))), 4)
        0.3133

    Source: Henderson et al., *Efficient Natural Language Response Suggestion*, 2017, section 4.2.
    Deviations: the mask, as in Gupta et al., ICLR 2024.
    """

    def __init__(self, *, temperature: float = 0.05, mask_positives: bool = True) -> None:
        super().__init__()
        check_range(temperature, "temperature", low=0.0, open_low=True)
        self.temperature = temperature
        self.mask_positives = mask_positives

    def forward(self, logits: Tensor, labels: Any = None) -> Tensor:
        """Return the loss."""
        scores = scaled(self, logits)
        size = len(scores)
        if scores.shape[1] != size:
            raise ShapeError(
                f"logits must be square, one column for each row's own label; got "
                f"{tuple(logits.shape)}. Score each input against the labels of the batch."
            )
        own = torch.eye(size, dtype=torch.bool, device=scores.device)
        if self.mask_positives and labels is not None:
            relevant = label_matrix(labels, (size, size), scores.device) > 0
            scores = scores.masked_fill(relevant & ~own, -math.inf)
        return F.cross_entropy(scores, torch.arange(size, device=scores.device))

    def extra_repr(self) -> str:
        """Show the options."""
        return options_of(self)


def masked_logsumexp(scores: Tensor, mask: Tensor) -> Tensor:
    """Return the log-sum-exp of the entries of each row that a mask keeps.

    A row without any gives -inf and gradient 0.
    """
    some = mask.any(1)
    # a row of -inf alone would have the gradient NaN
    safe = torch.where(mask | ~some[:, None], scores, -math.inf)
    return torch.where(some, safe.logsumexp(1), -math.inf)
