"""Every label by itself: the one-against-all baseline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_choice, check_range
from gossamer.losses._labels import label_matrix, scaled
from gossamer.losses._rows import REDUCTIONS, options_of, reduce_rows

__all__ = ["BinaryCrossEntropyLoss"]


class BinaryCrossEntropyLoss(nn.Module):
    r"""Logistic loss of every label by itself, mean over labels: one against all.

    $$L_i = \frac{1}{L} \sum_l \big[ \mathrm{softplus}(s_{il}) - y_{il} s_{il} \big], \qquad
      s = \mathrm{logits} / \tau + b$$

    A baseline. Nearly all labels of a row are irrelevant, so that a dual encoder first learns to
    push all scores down; a negative start of b takes that part away.

    Args:
        temperature: tau. Range: > 0. Default 0.05.
        bias: Start of b, a parameter that learns with those of the encoder; minus the logarithm
            of the labels for each relevant one is the share that is right. Default none.
        reduction: `"mean"` over rows, `"sum"` or `"none"`. Default `"mean"`.

    Shape:
        - logits: `(B, L)`; labels: as in `DecoupledSoftmaxLoss`, weights count as y; a row may have
          no relevant label; output: scalar, or `(B,)`.

    Raises:
        ConfigError: If an option is out of its range.
        ShapeError: If logits and labels do not fit.
        DataError: If a score is NaN or an index is no label.

    Example:
        >>> loss = BinaryCrossEntropyLoss(temperature=1.0)
        >>> round(float(loss(torch.tensor([[2.0, 1.0, 0.0]]), [[0, 1]])), 6)
        0.377779

    Source: the BCE baseline of Gupta et al., ICLR 2024; a learned bias as in Zhai et al., *Sigmoid
        Loss for Language Image Pre-Training*, ICCV 2023.
    Deviations: none
    """

    def __init__(
        self, *, temperature: float = 0.05, bias: float | None = None, reduction: str = "mean"
    ) -> None:
        super().__init__()
        check_range(temperature, "temperature", low=0.0, open_low=True)
        check_choice(reduction, REDUCTIONS, "reduction")
        if bias is not None:
            check_range(bias, "bias")
        self.temperature = temperature
        self.reduction = reduction
        self.bias = None if bias is None else nn.Parameter(torch.tensor(float(bias)))

    def forward(self, logits: Tensor, labels: Any) -> Tensor:
        """Return the loss."""
        scores = scaled(self, logits)
        targets = label_matrix(labels, (scores.shape[0], scores.shape[1]), scores.device)
        if self.bias is not None:
            scores = scores + self.bias
        # not BCEWithLogitsLoss, which refuses float32 targets of float64 scores
        loss = (F.softplus(scores) - targets * scores).mean(1)
        every = torch.ones_like(loss, dtype=torch.bool)
        return reduce_rows(loss, every, self.reduction)

    def extra_repr(self) -> str:
        """Show the options."""
        return options_of(self)
