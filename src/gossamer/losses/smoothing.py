"""Label smearing: a matrix on the losses of the classes; its uniform case is label smoothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import ConfigError
from gossamer.losses._classes import ClassLoss, pick, product
from gossamer.losses.transition import SymmetricNoise, check_square

__all__ = ["LabelSmoothingLoss", "SmearedLoss", "check_size", "smear_evenly", "smear_rows"]


class LabelSmoothingLoss(ClassLoss):
    r"""Cross-entropy with part of each label spread evenly over all classes.

    $$\ell(y, f) = (1 - \alpha)\,\ell_y + \frac{\alpha}{C} \sum_j \ell_j, \qquad
      \ell_j = -\log \mathrm{softmax}(f)_j$$

    Without class weights it is `torch.nn.CrossEntropyLoss(label_smoothing=alpha)`. Under label
    noise it acts as a shrinkage of the logits: it helps, with an alpha above that of the noise, and
    leaves confidences far too low. Computed in float32 or better, chunk by chunk of rows: nothing
    of the size of the logits is built but their gradient.

    Args:
        alpha: Share of a label that is spread, own class included. Range: 0 to 1. Default 0.1.
        weight: One number >= 0 for each class. Default none.
        weight_mode: `"sample"` weighs a row by the weight of its label; `"class"` every term by the
            weight of its own class, as the framework does, so that the smoothing of a heavy class
            can exceed the label. The mean divides by the weights of the labels (`"class"` with
            soft labels: by the number of rows, as the framework). Default `"sample"`.
        ignore_index: Rows with this label count nowhere. Default -100.
        reduction: `"mean"`, `"sum"` or `"none"`. Default `"mean"`. If no row counts, the mean is 0.

    Shape:
        - logits: `(N, C)` or `(N, C, d1, ...)`, floating; a class whose logit is -inf takes no part
          in the smoothing.
        - labels: classes `(N,)` or `(N, d1, ...)`, integers; or distributions in the shape of the
          logits, floating.
        - output: scalar, or the shape of the classes for `reduction="none"`; float32 or float64.

    Raises:
        ConfigError: If an option is out of its range.
        ShapeError: If logits, labels and weights do not fit.
        DtypeError: If logits are integers.
        DataError: If a label is outside, soft labels do not sum to 1, or a logit is NaN.

    Example:
        >>> import torch
        >>> loss = LabelSmoothingLoss(0.1)
        >>> round(float(loss(torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0]))), 6)
        0.336513

    Source: Szegedy et al., *Rethinking the Inception Architecture*, CVPR 2016; its place under
        label noise: Lukasik et al., ICML 2020, section 3.
    Deviations: weights count for a row unless `weight_mode="class"`; no rows give 0, not NaN.
    """

    def __init__(
        self,
        alpha: float = 0.1,
        *,
        weight: Any = None,
        weight_mode: str = "sample",
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(weight, ignore_index, reduction, weight_mode=weight_mode)
        check_range(alpha, "alpha", low=0.0, high=1.0)
        self.alpha = alpha

    def of_rows(self, log_p: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row."""
        weight = self.constant("weight", log_p) if self.class_weight else None
        return smear_evenly(log_p, labels, 1 - self.alpha, self.alpha, weight)

    def extra_repr(self) -> str:
        """Show the options."""
        return f"alpha={self.alpha:g}, {super().extra_repr()}"


class SmearedLoss(ClassLoss):
    r"""Cross-entropy whose labels a matrix spreads over the classes.

    $$\ell(y, f) = \sum_j M_{yj}\,\ell_j, \qquad \ell_j = -\log \mathrm{softmax}(f)_j$$

    The identity gives cross-entropy, `(1 - alpha) I + alpha/C J` label smoothing, the inverse of a
    transition matrix backward correction. Rows of M are gathered by label; no product of two
    matrices is built for labels that are classes.

    Args:
        matrix: M, or a `SymmetricNoise` for its matrix in closed form.
        weight: As in `LabelSmoothingLoss`. Default none.
        weight_mode: As in `LabelSmoothingLoss`. Default `"sample"`.
        ignore_index: As in `LabelSmoothingLoss`. Default -100.
        reduction: As in `LabelSmoothingLoss`. Default `"mean"`.
        max_classes: Most classes for which a dense matrix is taken; raise it if you mean it.
            Default 5000, whose matrix takes 100 MB in float32.

    Shape:
        - matrix: `(C, C)`; logits, labels, output: as in `LabelSmoothingLoss`. What M puts on a
          class with a logit of -inf goes evenly to the others, but for that of the label itself.

    Raises:
        As `LabelSmoothingLoss`; ShapeError too if the matrix is not square or not of C classes,
        DataError if it is not finite, ConfigError if it is larger than `max_classes`.

    Example:
        >>> import torch
        >>> loss = SmearedLoss([[0.9, 0.1], [0.2, 0.8]])
        >>> round(float(loss(torch.tensor([[1.0, -1.0]]), torch.tensor([0]))), 4)
        0.3269

    Source: Lukasik et al., *Does label smoothing mitigate label noise?*, ICML 2020, section 3.1.
    Deviations: none
    """

    def __init__(
        self,
        matrix: Any,
        *,
        weight: Any = None,
        weight_mode: str = "sample",
        ignore_index: int = -100,
        reduction: str = "mean",
        max_classes: int = 5000,
    ) -> None:
        super().__init__(weight, ignore_index, reduction, weight_mode=weight_mode)
        self.noise = matrix if isinstance(matrix, SymmetricNoise) else None
        if isinstance(matrix, SymmetricNoise):
            self.set_classes(matrix.num_classes)
        else:
            self.add_matrix("matrix", check_size(check_square(matrix, "matrix"), max_classes))

    def of_rows(self, log_p: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row."""
        weight = self.constant("weight", log_p) if self.class_weight else None
        if self.noise is not None:
            return smear_evenly(log_p, labels, 1 - self.noise.alpha, self.noise.alpha, weight)
        return smear_rows(log_p, labels, self.constant("matrix", log_p), weight)

    def extra_repr(self) -> str:
        """Show the options."""
        return f"num_classes={self.num_classes}, {super().extra_repr()}"


def smear_evenly(
    log_p: Tensor, labels: Tensor, own: float, even: float, weight: Tensor | None = None
) -> Tensor:
    """Return `own` of the label's loss and `even` of the mean loss of all allowed classes."""
    total = log_p.new_zeros(len(log_p))
    if own != 0:  # 0 of an infinite loss is 0
        total = total - own * _label_term(log_p, labels, weight)
    if even != 0:
        total = total - even * _mean(log_p, weight)
    return total


def _label_term(log_p: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return pick(log_p, labels)
    if labels.dim() == 2:
        return pick(log_p, labels * weight)
    return product(weight[labels], pick(log_p, labels))


def _mean(log_p: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean over the classes with a finite logit."""
    sums = log_p.sum(1) if weight is None else log_p @ weight
    if bool(sums.isfinite().all()):
        return sums / log_p.shape[1]
    allowed = (log_p > -float("inf")).to(log_p.dtype)
    weights = allowed if weight is None else allowed * weight
    return product(weights, log_p).sum(1) / allowed.sum(1)


def smear_rows(
    log_p: Tensor, labels: Tensor, matrix: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Return the losses of the classes, weighed by each label's row of a matrix."""
    rows = matrix[labels] if labels.dim() == 1 else labels.to(matrix.dtype) @ matrix
    values = rows * log_p if weight is None else rows * weight * log_p
    sums = -values.sum(1)
    if bool(sums.isfinite().all()):
        return sums
    own = matrix.diagonal()
    if labels.dim() == 1:
        kept = matrix.new_zeros(rows.shape)
        kept.scatter_(1, labels[:, None], own[labels][:, None])
    else:
        kept = labels.to(matrix.dtype) * own
    allowed = (log_p > -float("inf")).to(log_p.dtype)
    off = rows - kept
    moved = (off * (1 - allowed)).sum(1, keepdim=True) / allowed.sum(1, keepdim=True)
    rows = kept + allowed * (off + moved)
    return -product(rows if weight is None else rows * weight, log_p).sum(1)


def check_size(matrix: Tensor, max_classes: int) -> Tensor:
    """Return a matrix of a size that is meant.

    Raises:
        ConfigError: If it is larger than allowed.
    """
    check_range(max_classes, "max_classes", low=1, integer=True)
    if len(matrix) > max_classes:
        raise ConfigError(
            f"a dense matrix may have {max_classes} classes; got {len(matrix)}. Use "
            f"SymmetricNoise, or max_classes={len(matrix)}."
        )
    return matrix
