"""What a head can express: the rank of its logits and of its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.attention.core import check_heads, check_mask
from gossamer.checks import check_range
from gossamer.errors import ShapeError

__all__ = ["AttentionRankReport", "attention_rank"]


@dataclass(frozen=True)
class AttentionRankReport:
    """Ranks for each sample and head.

    Args:
        logit_rank: Numerical rank of the logits, integers.
        logit_effective_rank: Effective rank of the logits.
        weight_rank: Numerical rank of the softmax weights, integers.
        weight_effective_rank: Effective rank of the softmax weights.

    Shape:
        - every field: `(B, H)`.
    """

    logit_rank: Tensor
    logit_effective_rank: Tensor
    weight_rank: Tensor
    weight_effective_rank: Tensor

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each sample and head."""
        fields = self.to_dict()
        batch, heads = self.logit_rank.shape
        return [
            {"sample": b, "head": h, **{name: value[b][h] for name, value in fields.items()}}
            for b in range(batch)
            for h in range(heads)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain lists, one list of heads for each sample."""
        return {name: value.tolist() for name, value in vars(self).items()}


@torch.no_grad()
def attention_rank(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    tol: float = 1e-3,
) -> AttentionRankReport:
    r"""Measure the rank of attention logits $q k^\top / \sqrt{D} + b$ and of their softmax.

    The content part alone has rank D at most, the head size; a bias of rank r, such as that of
    `DietAbsolutePositions`, lifts the bound to D + r. The numerical rank counts the singular
    values above `tol` times the largest. The effective rank is `exp` of the entropy of the
    singular values divided by their sum. Everything is computed in float64, at the cost of a
    singular value decomposition for each head.

    Args:
        q: Queries.
        k: Keys; with fewer heads than queries, each serves a group.
        mask: Boolean, True = takes part. The weights are those of masked attention. The logits are
            taken before the mask, but without the queries that see nothing and the keys that
            nobody sees, so that padding adds no rank. Default all.
        bias: Added to the logits. Default none.
        tol: Share of the largest singular value that still counts. Range: > 0, < 1.

    Shape:
        - q: `(B, H, T, D)`; k: `(B, H_kv, S, D)`, H a multiple of H_kv.
        - mask: broadcasts to `(B, H, T, S)`; bias: `(1 or B, 1 or H, T, S)`.

    Raises:
        ShapeError: If heads, keys, mask or bias do not fit.
        DtypeError: If the mask is not boolean.
        ConfigError: If `tol` is out of its range.

    Example:
        >>> q, k = torch.randn(2, 1, 1, 32, 4).unbind()
        >>> attention_rank(q, k).logit_rank.tolist()
        [[4]]

    Source: Chen et al., *A Simple and Effective Positional Encoding for Transformers*, EMNLP 2021,
        section 3.2; effective rank: Roy and Vetterli, EUSIPCO 2007.
    Deviations: none
    """
    check_range(tol, "tol", low=0.0, high=1.0, open_low=True)
    check_heads(q, k)
    q, k = q.double(), k.double()
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + _fitting(bias, logits, "bias").double()
    weights = logits
    if mask is not None:
        check_mask(mask)
        mask = _fitting(mask, logits, "mask").expand_as(logits)
        seen = mask.any(-1, keepdim=True)
        weights = weights.masked_fill(~mask & seen, -math.inf)
        logits = logits * seen * mask.any(-2, keepdim=True)
        weights = weights.softmax(-1) * seen
    else:
        weights = weights.softmax(-1)
    return AttentionRankReport(*_ranks(logits, tol), *_ranks(weights, tol))


def _ranks(matrix: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    values = torch.linalg.svdvals(matrix)
    largest = values[..., :1]
    rank = ((values > tol * largest) & (values > 0)).sum(-1)
    share = values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    effective = torch.special.entr(share).sum(-1).exp() * (largest[..., 0] > 0)
    return rank, effective


def _fitting(value: Tensor, logits: Tensor, name: str) -> Tensor:
    sizes = zip(reversed(value.shape), reversed(logits.shape), strict=False)
    if value.dim() > 4 or any(own not in (1, size) for own, size in sizes):
        raise ShapeError(
            f"{name} must broadcast to the logits, (B, H, T, S) = {tuple(logits.shape)}; got "
            f"{tuple(value.shape)}. Check the lengths of queries and keys against {name}."
        )
    return value
