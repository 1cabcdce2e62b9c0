"""Corrections for labels that go wrong by a known transition matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.losses._classes import ClassLoss, pick
from gossamer.losses.smoothing import check_size, smear_evenly, smear_rows
from gossamer.losses.transition import SymmetricNoise, check_transition

__all__ = ["BackwardCorrectionLoss", "ForwardCorrectionLoss"]

_SMALL_SUM = 1e-30  # far above the least float32
_LARGEST_CONDITION = 1e8  # beyond it the inverse has no digit in float32


class ForwardCorrectionLoss(ClassLoss):
    r"""Cross-entropy of the noisy labels with what the model's probabilities make of them.

    $$\ell(y, f) = -\log (T^\top p)_y = -\log \sum_i p_i T_{iy}, \qquad p = \mathrm{softmax}(f)$$

    The model itself learns the clean classes. Bounded below, keeps confidences right, and is the
    correction to try first; an alpha above that of the noise often helps. Computed from
    log-probabilities in float32 or better, chunk by chunk of rows. For `SymmetricNoise` it costs as
    much as cross-entropy, whatever the number of classes; for a matrix, a gathered column for each
    row.

    Args:
        transition: T, entry (i, j) the chance of label j for true class i; or a `SymmetricNoise`.
        weight: One number >= 0 for each class; a row weighs as much as its label. Default none.
        ignore_index: Rows with this label count nowhere. Default -100.
        reduction: `"mean"`, divided by the weight of the rows, `"sum"` or `"none"`. Default
            `"mean"`. If no row counts, the mean is 0.
        max_classes: Most classes for which a dense matrix is taken; raise it if you mean it.
            Default 5000.

    Shape:
        - transition: `(C, C)`; logits, labels, output: as in `LabelSmoothingLoss`. Soft labels give
          the mean loss over their labels; with a dense matrix they cost a product of `(N, C)` and
          `(C, C)` in float64.

    Raises:
        As `LabelSmoothingLoss`; DataError too if T is no transition matrix, ConfigError if it is
        larger than `max_classes`.

    Example:
        >>> loss = ForwardCorrectionLoss(SymmetricNoise.from_alpha(3, 0.1))
        >>> round(float(loss(torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0]))), 6)
        0.232249

    Source: Patrini et al., *Making Deep Neural Networks Robust to Label Noise*, CVPR 2017,
        theorem 2; beside smoothing: Lukasik et al., ICML 2020.
    Deviations: none
    """

    def __init__(
        self,
        transition: Any,
        *,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        max_classes: int = 5000,
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        self.noise = transition if isinstance(transition, SymmetricNoise) else None
        if isinstance(transition, SymmetricNoise):
            self.set_classes(transition.num_classes)
        else:
            matrix = check_size(check_transition(transition), max_classes)
            self.add_matrix("transition", matrix)
            self._exact["columns"] = matrix.T.contiguous()
            self._exact["log_columns"] = self._exact["columns"].log()

    def of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row from probabilities, where none is too small for that."""
        if self.noise is None and labels.dim() == 1:
            seen = (logits.softmax(1) * self.constant("columns", logits)[labels]).sum(1)
            if bool((seen > _SMALL_SUM).all()):
                return -seen.log()
        return super().of_logits(logits, labels)

    def of_rows(self, log_p: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row."""
        if self.noise is not None:
            return _forward_evenly(log_p, labels, self.noise)
        if labels.dim() == 1:
            return -(log_p + self.constant("log_columns", log_p)[labels]).logsumexp(1)
        # in float64 no probability that matters becomes 0
        matrix = self.constant("transition", log_p.double())
        return -pick((log_p.double().exp() @ matrix).log().to(log_p.dtype), labels)

    def extra_repr(self) -> str:
        """Show the options."""
        return f"num_classes={self.num_classes}, {super().extra_repr()}"


def _forward_evenly(log_p: Tensor, labels: Tensor, noise: SymmetricNoise) -> Tensor:
    alpha, count = noise.alpha, noise.num_classes
    if alpha == 0:
        return -pick(log_p, labels)
    own = log_p if labels.dim() == 2 else pick(log_p, labels)
    kept = math.log(1 - alpha) if alpha < 1 else -math.inf
    mixed = torch.logaddexp(own + kept, own.new_tensor(math.log(alpha / count)))
    return -pick(mixed, labels) if labels.dim() == 2 else -mixed


class BackwardCorrectionLoss(ClassLoss):
    r"""The loss whose mean over the noise is the cross-entropy of the true class.

    $$\ell(y, f) = \sum_j (T^{-1})_{yj}\,\ell_j, \qquad
      \sum_y T_{iy}\,\ell(y, f) = \ell_i \quad\text{for every } f$$

    Unbiased, but unbounded below: a network that can fit each row drives it to minus infinity, and
    does worse than plain cross-entropy. For `SymmetricNoise` in closed form.

    Args:
        transition: T, entry (i, j) the chance of label j for true class i; or a `SymmetricNoise`.
        weight: As in `ForwardCorrectionLoss`. Default none.
        ignore_index: As in `ForwardCorrectionLoss`. Default -100.
        reduction: As in `ForwardCorrectionLoss`. Default `"mean"`.
        max_classes: As in `ForwardCorrectionLoss`. Default 5000.

    Shape:
        - transition: `(C, C)`; logits, labels, output: as in `LabelSmoothingLoss`; classes with a
          logit of -inf as in `SmearedLoss`.

    Raises:
        As `ForwardCorrectionLoss`; ConfigError too if T cannot be inverted: alpha = 1, or a
        condition number above 1e8.

    Example:
        >>> loss = BackwardCorrectionLoss(SymmetricNoise.from_alpha(3, 0.1))
        >>> round(float(loss(torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0]))), 6)
        -0.015339

    Source: Natarajan et al., *Learning with Noisy Labels*, NeurIPS 2013; Patrini et al., CVPR 2017,
        theorem 1.
    Deviations: none
    """

    def __init__(
        self,
        transition: Any,
        *,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        max_classes: int = 5000,
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        self.noise = transition if isinstance(transition, SymmetricNoise) else None
        if isinstance(transition, SymmetricNoise):
            # the singular values of T are 1 and 1 - alpha
            _check_condition(1 / max(1 - transition.alpha, 1e-300))
            self.set_classes(transition.num_classes)
        else:
            matrix = check_size(check_transition(transition), max_classes)
            _check_condition(float(torch.linalg.cond(matrix)))
            self.add_matrix("inverse", torch.linalg.inv(matrix))

    def of_rows(self, log_p: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row."""
        if self.noise is not None:
            alpha = self.noise.alpha
            return smear_evenly(log_p, labels, 1 / (1 - alpha), -alpha / (1 - alpha))
        return smear_rows(log_p, labels, self.constant("inverse", log_p))

    def extra_repr(self) -> str:
        """Show the options."""
        return f"num_classes={self.num_classes}, {super().extra_repr()}"


def _check_condition(number: float) -> None:
    if not number <= _LARGEST_CONDITION:
        raise ConfigError(
            f"transition must be invertible, with a condition number <= {_LARGEST_CONDITION:g}; "
            f"got {number:.3g}. Use ForwardCorrectionLoss, which needs no inverse."
        )
