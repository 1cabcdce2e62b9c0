"""The loss that teaches a layer's attention to rank the documents of a prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gossamer.checks import check_choice, check_range, check_shape
from gossamer.errors import DataError, DtypeError
from gossamer.losses._labels import check_rows, check_scores, label_matrix
from gossamer.losses._rows import REDUCTIONS, options_of, reduce_rows
from gossamer.losses.multilabel import masked_logsumexp

__all__ = ["BlockRankingLoss"]


class BlockRankingLoss(nn.Module):
    r"""Contrastive loss on the shares of attention that the documents of a prompt get.

    $$L = -\log \frac{\sum_{k \in P} e^{S_k / \tau}}{\sum_k e^{S_k / \tau}}$$

    S is what `gossamer.attention.block_scores` gives for one layer, P the relevant documents. At
    equal scores the loss is `log N`; where all documents are relevant it is 0. Since scores lie
    between 0 and 1, it cannot fall below about `log(1 + (N - 1) exp(-1 / tau))`. The gradient
    reaches queries and keys of that layer, and all layers below it.

    Args:
        temperature: tau. Range: > 0. Default 0.05, the paper's.
        reduction: `"mean"` over rows, `"sum"` or `"none"`. Default `"mean"`.

    Shape:
        - scores: `(B, N)`, each row with sum 1; relevant: `(B, N)` of 0 and 1, lists of document
          numbers, or a sparse matrix; weights above 0 count as 1.
        - mask: `(B, N)`, boolean, True = takes part; for rows with fewer documents. Default all.
        - output: scalar, or `(B,)`.

    Raises:
        ConfigError: If an option is out of its range.
        ShapeError: If scores, labels and mask do not fit.
        DtypeError: If scores are integers or the mask is not boolean.
        DataError: If a score is NaN, or a row has no relevant document among those that take part.

    Example:
        >>> loss = BlockRankingLoss()
        >>> round(float(loss(torch.full((1, 4), 0.25), [[2]])), 4)
        1.3863

    Source: Gupta et al., *Scalable In-context Ranking with Generative Models*, NeurIPS 2025,
        section 4; several relevant documents as in the official code.
    Deviations: none
    """

    def __init__(self, *, temperature: float = 0.05, reduction: str = "mean") -> None:
        super().__init__()
        check_range(temperature, "temperature", low=0.0, open_low=True)
        check_choice(reduction, REDUCTIONS, "reduction")
        self.temperature = temperature
        self.reduction = reduction

    def forward(self, scores: Tensor, relevant: Any, *, mask: Tensor | None = None) -> Tensor:
        """Return the loss."""
        logits = check_scores(scores) / self.temperature
        positive = label_matrix(relevant, (logits.shape[0], logits.shape[1]), logits.device) > 0
        every = torch.ones_like(positive) if mask is None else _checked_mask(mask, positive)
        rows = check_rows(positive.any(1), "error")
        loss = masked_logsumexp(logits, every) - masked_logsumexp(logits, positive)
        return reduce_rows(loss, rows, self.reduction)

    def extra_repr(self) -> str:
        """Show the options."""
        return options_of(self)


def _checked_mask(mask: Tensor, positive: Tensor) -> Tensor:
    check_shape(mask, tuple(positive.shape), "mask")
    if mask.dtype != torch.bool:
        raise DtypeError(
            f"mask must be boolean, True = takes part; got {mask.dtype}. Use mask.bool()."
        )
    outside = (positive & ~mask).nonzero()
    if len(outside):
        row, document = outside[0].tolist()
        raise DataError(
            f"a relevant document must take part; got document {document} of row {row}, which the "
            "mask leaves out. Mend labels or mask."
        )
    return mask
