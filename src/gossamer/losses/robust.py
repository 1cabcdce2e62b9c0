"""Losses that wrong labels pull less: baselines that know nothing of the noise."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gossamer.checks import check_range
from gossamer.losses._classes import ClassLoss, pick

__all__ = ["GeneralizedCrossEntropyLoss", "SymmetricCrossEntropyLoss"]

_LOG_ZERO = -4.0


class GeneralizedCrossEntropyLoss(ClassLoss):
    r"""Between cross-entropy (q to 0) and the mean absolute error (q = 1).

    $$\ell(y, f) = \frac{1 - p_y^q}{q}, \qquad p = \mathrm{softmax}(f)$$

    A row that contradicts the model pulls with a factor p_y^q; nothing of the noise need be known.

    Args:
        q: Range: > 0 to 1. Default 0.7, the paper's.
        weight: One number >= 0 for each class; a row weighs as much as its label. Default none.
        ignore_index: Rows with this label count nowhere. Default -100.
        reduction: `"mean"`, `"sum"` or `"none"`. Default `"mean"`.

    Shape:
        - logits, labels, output: as in `LabelSmoothingLoss`; soft labels give the mean loss over
          their labels.

    Raises:
        As `LabelSmoothingLoss`.

    Example:
        >>> import torch
        >>> loss = GeneralizedCrossEntropyLoss(q=1.0)
        >>> round(float(loss(torch.zeros(1, 4), torch.tensor([2]))), 4)
        0.75

    Source: Zhang and Sabuncu, *Generalized Cross Entropy Loss for Training Deep Neural Networks
        with Noisy Labels*, NeurIPS 2018, eq. 6.
    Deviations: without the truncation of section 3.3.
    """

    def __init__(
        self,
        q: float = 0.7,
        *,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        check_range(q, "q", low=0.0, high=1.0, open_low=True)
        self.q = q

    def of_rows(self, log_p: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row."""
        if labels.dim() == 1:
            return -(self.q * pick(log_p, labels)).expm1() / self.q
        return -pick((self.q * log_p).expm1(), labels) / self.q

    def extra_repr(self) -> str:
        """Show the options."""
        return f"q={self.q:g}, {super().extra_repr()}"


class SymmetricCrossEntropyLoss(ClassLoss):
    r"""Cross-entropy plus the cross-entropy with model and label exchanged.

    $$\ell(y, f) = -\alpha \log p_y - \beta \sum_j p_j \log t_j, \qquad \log 0 := -4$$

    t is the label as a distribution. For a class y the second term is `4 (1 - p_y)`, a multiple of
    the mean absolute error, which noise that is the same for all classes does not mislead.

    Args:
        alpha: Of the cross-entropy. Range: >= 0. Default 0.1, the paper's for 10 classes.
        beta: Of the reverse term. Range: >= 0. Default 1.0.
        weight: One number >= 0 for each class; a row weighs as much as its label. Default none.
        ignore_index: Rows with this label count nowhere. Default -100.
        reduction: `"mean"`, `"sum"` or `"none"`. Default `"mean"`.

    Shape:
        - logits, labels, output: as in `LabelSmoothingLoss`.

    Raises:
        As `LabelSmoothingLoss`.

    Example:
        >>> import torch
        >>> loss = SymmetricCrossEntropyLoss(alpha=0.0)
        >>> round(float(loss(torch.zeros(1, 4), torch.tensor([2]))), 4)
        3.0

    Source: Wang et al., *Symmetric Cross Entropy for Robust Learning with Noisy Labels*, ICCV 2019,
        section 3.
    Deviations: log 0 is -4, as the paper sets it (the authors' code clips labels at 1e-4, whose
        logarithm is -9.2).
    """

    def __init__(
        self,
        alpha: float = 0.1,
        beta: float = 1.0,
        *,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(weight, ignore_index, reduction)
        check_range(alpha, "alpha", low=0.0)
        check_range(beta, "beta", low=0.0)
        self.alpha = alpha
        self.beta = beta

    def of_rows(self, log_p: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row."""
        own = pick(log_p, labels)
        if labels.dim() == 1:
            reverse = _LOG_ZERO * own.expm1()
        else:
            reverse = -(log_p.exp() * labels.to(log_p.dtype).log().clamp(min=_LOG_ZERO)).sum(1)
        return self.beta * reverse - (self.alpha * own if self.alpha else 0.0)

    def extra_repr(self) -> str:
        """Show the options."""
        return f"alpha={self.alpha:g}, beta={self.beta:g}, {super().extra_repr()}"
