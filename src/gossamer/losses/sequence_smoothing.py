"""Smoothing over whole sentences: a part of the loss of a target goes to its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_range
from gossamer.errors import DataError, DtypeError, ShapeError

__all__ = ["SequenceSmoothingLoss"]

_IGNORED = -100


class SequenceSmoothingLoss(nn.Module):
    r"""Loss of a target and of real sentences near it, for sequence-to-sequence training.

    $$\ell = \frac{1}{\sum_b |y_b|} \sum_b |y_b| \left(
      (1 - \alpha_b)\, \overline{\mathrm{NLL}}(y_b)
      + \frac{\alpha_b}{|R_b|} \sum_{r \in R_b} \overline{\mathrm{NLL}}(r) \right)$$

    $\overline{\mathrm{NLL}}$ is the mean over the tokens of one sequence under teacher forcing, so
    that long neighbours weigh no more than short ones; $|y_b|$ counts the tokens of the target.
    $\alpha_b$ is alpha where the pair has neighbours and 0 where it has none: such a pair keeps its
    plain loss and changes that of no other. With `alpha=0` this is the cross-entropy of
    `torch.nn.functional` over the tokens of the batch, to the last bit if `token_alpha=0`. The sum
    over pairs has one divisor, so that micro-batches add up exactly: give `num_tokens`.
    `loss.alpha` may be changed between steps. Computed in float32 or better.

    Args:
        alpha: Share of the neighbours. Range: 0 to 1. Default 0.1.
        sample: One neighbour of each pair is given, drawn anew in each step: an unbiased estimate
            that costs one more decoder pass. Otherwise all of them. Default true.
        token_alpha: Share of each label that is spread evenly over the vocabulary, in both parts.
            Range: 0 to 1. Default 0.

    Shape:
        - logits: `(B, T, V)`, floating; labels: `(B, T)`, integers, -100 where nothing counts.
        - neighbor_logits: `(B, T', V)`, or `(B, k, T', V)` for `sample=False`; from the same
          encoder output.
        - neighbor_labels: `(B, T')`, or `(B, k, T')`; -100 or -1 where nothing counts, in the whole
          row for a neighbour that is not there. `None` for both: no pair has a neighbour.
        - num_tokens: the labels that count in all micro-batches of a step; default those here.
        - output: scalar, float32 or float64.

    Raises:
        ConfigError: If an option is out of its range.
        ShapeError: If shapes do not fit each other or `sample`.
        DtypeError: If logits are not floating, or labels not integers.
        DataError: If a label is no token of the vocabulary, or the loss is NaN.

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0]], [[2.0, 0.0]]])
        >>> labels, neighbors = torch.tensor([[0], [0]]), torch.tensor([[1], [-100]])
        >>> loss = SequenceSmoothingLoss(alpha=0.5)
        >>> round(float(loss(logits, labels, logits, neighbors)), 6)  # .1269 + 2 * .5 / 2
        0.626928

    Source: Lukasik et al., *Semantic Label Smoothing for Sequence to Sequence Problems*, EMNLP
        2020, the smoothed objective over related sequences.
    Deviations: the paper's normalisation by length is unconfirmed; here each sequence counts by
        its mean over tokens. Its alpha is unconfirmed.
    """

    def __init__(
        self, *, alpha: float = 0.1, sample: bool = True, token_alpha: float = 0.0
    ) -> None:
        super().__init__()
        check_range(alpha, "alpha", low=0.0, high=1.0)
        check_range(token_alpha, "token_alpha", low=0.0, high=1.0)
        self.alpha = alpha
        self.sample = sample
        self.token_alpha = token_alpha

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        neighbor_logits: Tensor | None,
        neighbor_labels: Tensor | None,
        *,
        num_tokens: int | Tensor | None = None,
    ) -> Tensor:
        """Return the loss."""
        check_range(self.alpha, "alpha", low=0.0, high=1.0)
        _check(logits, labels, 2, "logits", "labels")
        counts = (labels != _IGNORED).sum(1)
        divisor = counts.sum() if num_tokens is None else num_tokens
        with torch.autocast(logits.device.type, enabled=False):
            if self.alpha == 0 or neighbor_logits is None or neighbor_labels is None:
                _check_both(neighbor_logits, neighbor_labels)
                total = self._weighed(logits, labels, torch.ones_like(counts))
            else:
                total = self._mixed(logits, labels, counts, neighbor_logits, neighbor_labels)
            loss = total / max(1, int(divisor))
        if bool(loss.isnan()):
            raise DataError(
                "logits must hold no NaN and no +inf where labels count; got such values. Lower "
                "the learning rate, or look at the mask."
            )
        return loss

    def _mixed(
        self,
        logits: Tensor,
        labels: Tensor,
        counts: Tensor,
        neighbor_logits: Tensor,
        neighbor_labels: Tensor,
    ) -> Tensor:
        """Return the sum over the tokens of targets and neighbours, weighed."""
        axes = 2 if self.sample else 3
        _check(neighbor_logits, neighbor_labels, axes, "neighbor_logits", "neighbor_labels")
        if len(neighbor_labels) != len(labels) or neighbor_logits.shape[-1] != logits.shape[-1]:
            raise ShapeError(
                f"neighbor_logits must have the pairs and the vocabulary of logits, "
                f"({logits.shape[0]}, ..., {logits.shape[-1]}); got "
                f"{tuple(neighbor_logits.shape)}. Run the decoder on the same batch."
            )
        rows = neighbor_labels.reshape(len(labels), -1, neighbor_labels.shape[-1])  # (B, k, T')
        rows = rows.masked_fill(rows == -1, _IGNORED)
        sizes = (rows != _IGNORED).sum(2)  # (B, k)
        some = sizes > 0
        dtype = _wide(logits)  # not float64 at all times: some devices lack it
        shares = self.alpha * some.any(1).to(dtype)
        own = self._weighed(logits, labels, 1 - shares)
        # a neighbour weighs as the tokens of its target do, whatever its own length
        found = sizes.clamp(min=1) * some.sum(1, keepdim=True).clamp(min=1)
        weights = torch.where(some, self.alpha * counts[:, None].to(dtype) / found, 0.0)
        flat = neighbor_logits.reshape(-1, *neighbor_logits.shape[-2:])
        return own + self._weighed(flat, rows.flatten(0, 1), weights.flatten())

    def _weighed(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the losses of all tokens, each times the weight of its sequence."""
        scores = logits.flatten(0, 1)
        scores = scores.to(_wide(scores))
        counted = weights[(labels != _IGNORED).any(1)].to(scores.dtype)
        even = len(counted) > 0 and bool((counted == counted[0]).all()) and bool(counted[0] > 0)
        reduction = "sum" if even else "none"
        values = F.cross_entropy(
            scores,
            labels.flatten(),
            ignore_index=_IGNORED,
            reduction=reduction,
            label_smoothing=self.token_alpha,
        )
        if even:  # one product, and the same bits as the plain loss
            return values * counted[0]
        each = weights.to(scores.dtype)[:, None].expand_as(labels).flatten()
        return torch.where(each > 0, each * values, 0.0).sum()

    def extra_repr(self) -> str:
        """Show the options."""
        return f"alpha={self.alpha:g}, sample={self.sample}, token_alpha={self.token_alpha:g}"


def _wide(logits: Tensor) -> torch.dtype:
    """Return the dtype of the computation."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _check(logits: Tensor, labels: Tensor, axes: int, name: str, of: str) -> None:
    letters = "(B, T, V)" if axes == 2 else "(B, k, T, V)"
    if logits.dim() != axes + 1:
        hint = "Give one row of logits for each token."
        if name == "neighbor_logits":
            takes = "one neighbour" if axes == 2 else "all neighbours"
            hint = f"sample={axes == 2} takes {takes} of each pair."
        raise ShapeError(f"{name} must have the shape {letters}; got {tuple(logits.shape)}. {hint}")
    if labels.shape != logits.shape[:-1]:
        raise ShapeError(
            f"{of} must have the shape of {name} without the axis of the vocabulary, "
            f"{tuple(logits.shape[:-1])}; got {tuple(labels.shape)}. Nothing is shifted here: "
            "logits[:, t] is for labels[:, t]."
        )
    if not logits.is_floating_point():
        raise DtypeError(f"{name} must be floating point; got {logits.dtype}. Use .float().")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DtypeError(f"{of} must be token ids; got {labels.dtype}. Use .long().")
    outside = (labels >= logits.shape[-1]) | ((labels < 0) & (labels != _IGNORED))
    if name == "neighbor_logits":
        outside &= labels != -1
    if bool(outside.any()):
        raise DataError(
            f"{of} must lie in 0 to {logits.shape[-1] - 1}, or be -100; got "
            f"{int(labels[outside][0])}. The tokenizer may not be that of the model."
        )


def _check_both(neighbor_logits: Tensor | None, neighbor_labels: Tensor | None) -> None:
    if (neighbor_logits is None) != (neighbor_labels is None):
        missing = "neighbor_logits" if neighbor_logits is None else "neighbor_labels"
        raise ShapeError(
            f"neighbor_logits and neighbor_labels must be given together; got no {missing}. Give "
            "both, or None for both."
        )
