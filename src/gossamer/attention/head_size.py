"""What a head can express: the rank of its logits and weights, and the size that is enough."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.attention.core import check_heads, check_mask
from gossamer.checks import check_finite, check_range, check_shape
from gossamer.errors import DataError, ShapeError

__all__ = [
    "AttentionRankReport",
    "HeadSizeReport",
    "attention_rank",
    "min_head_dim",
    "realize_attention",
]


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


@dataclass(frozen=True)
class HeadSizeReport:
    """The least head size for a length, and what it costs in one attention layer.

    Args:
        length: Unit: tokens.
        head_dim: Least size with which every attention pattern over `length` tokens is within
            reach: `length`.
        generic_head_dim: Size that is enough for almost every pattern, one less.
        standard_head_dim: `dim / num_heads`, rounded down.
        enough: Whether the standard size is at least `head_dim`.
        reachable: Whether `dim` is at least `length`, without which no head size is enough for
            every input.
        parameters: Of the four projections with `head_dim`, biases left out.
        standard_parameters: The same with the standard size.
        flops: Of one pass over one sequence with `head_dim`, two for each multiplication.
        standard_flops: The same with the standard size.

    All but the first three are `None` where `dim` or `num_heads` was not given.

    Example:
        >>> min_head_dim(128).to_dict()["generic_head_dim"]
        127
    """

    length: int
    head_dim: int
    generic_head_dim: int
    standard_head_dim: int | None = None
    enough: bool | None = None
    reachable: bool | None = None
    parameters: int | None = None
    standard_parameters: int | None = None
    flops: int | None = None
    standard_flops: int | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures as one plain row."""
        return [self.to_dict()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dict(vars(self))


def min_head_dim(
    length: int, *, dim: int | None = None, num_heads: int | None = None
) -> HeadSizeReport:
    """Return the least head size for sequences of a typical length, with its cost.

    With the usual head size, `dim / num_heads`, more heads mean logits of lower rank in each; once
    that falls below the length, some attention patterns are out of reach. This is about what one
    head can express exactly, on one sequence: it does not say that quality must fall.

    Args:
        length: Typical length, for example that of training. Unit: tokens. Range: >= 1.
        dim: Model width. Range: >= 1. Default unknown: no costs.
        num_heads: Attention heads. Range: >= 1. Default unknown: no costs.

    Raises:
        ConfigError: If a size is out of its range.

    Example:
        >>> report = min_head_dim(128, dim=512, num_heads=16)
        >>> report.head_dim, report.standard_head_dim, report.enough
        (128, 32, False)
        >>> report.parameters / report.standard_parameters
        4.0

    Source: Bhojanapalli et al., *Low-Rank Bottleneck in Multi-head Attention Models*, ICML 2020,
        theorem 1 and section 3.
    Deviations: the size of one less for almost every pattern is an observation of this library.
    """
    check_range(length, "length", low=1, integer=True)
    for name, size in (("dim", dim), ("num_heads", num_heads)):
        if size is not None:
            check_range(size, name, low=1, integer=True)
    least = length, length, max(1, length - 1)
    if dim is None or num_heads is None:
        return HeadSizeReport(*least)
    standard = max(1, dim // num_heads)

    def parameters(head_dim: int) -> int:
        return 4 * dim * num_heads * head_dim

    def flops(head_dim: int) -> int:
        return 2 * length * parameters(head_dim) + 4 * length**2 * num_heads * head_dim

    return HeadSizeReport(
        *least,
        standard,
        standard >= length,
        dim >= length,
        parameters(length),
        parameters(standard),
        flops(length),
        flops(standard),
    )


@torch.no_grad()
def realize_attention(x: Tensor, target: Tensor, head_dim: int) -> tuple[Tensor, Tensor, float]:
    r"""Return query and key weights of one head whose attention on one sequence is a given one.

    $$\mathrm{softmax}\big((W_k X)^\top (W_q X) / \sqrt{d_p}\big) = P \qquad
      W_k = X^+, \quad W_q = \sqrt{d_p}\, \log(P)\, X^+$$

    With `head_dim` of at least T and linearly independent tokens this is exact. Below, logits are
    the best approximation of their rank: each column of log P is first shifted to mean 0, which
    softmax does not see and which takes one from its rank, so that T - 1 is exact too. Tokens
    stand in columns, as in the paper: for weights as `attend` makes them, whose rows are queries,
    pass the transposes of both.

    Args:
        x: Tokens in columns.
        target: P; column t holds the weights of query t over the keys. Range: > 0, columns sum
            to 1.
        head_dim: Size of the head, d_p. Range: >= 1.

    Shape:
        - x: `(M, T)`; target: `(T, T)`.
        - output: query and key weights, `(head_dim, M)`, float64; and the residual, the largest
          difference between the softmax they give and the target.

    Raises:
        ConfigError: If `head_dim` is out of its range.
        ShapeError: If the shapes do not fit.
        DataError: If the target has zeros or its columns do not sum to 1, or values are not finite.

    Warns:
        UserWarning: If the tokens are linearly dependent; then only the residual says how near the
            result is.

    Example:
        >>> x, target = torch.randn(6, 4), torch.randn(4, 4).softmax(0)
        >>> to_q, to_k, residual = realize_attention(x, target, 4)
        >>> residual < 1e-6
        True

    Source: Bhojanapalli et al. 2020, theorem 1 and its proof.
    Deviations: sizes below T, which the theorem does not treat, get the best logits of their rank.
    """
    check_range(head_dim, "head_dim", low=1, integer=True)
    check_shape(x, (None, None), "x")
    check_shape(target, (x.shape[1], x.shape[1]), "target")
    check_finite(x, "x")
    check_finite(target, "target")
    x, target = x.double(), target.double()
    _check_columns(target)
    length = x.shape[1]
    if int(torch.linalg.matrix_rank(x)) < length:
        warnings.warn(
            f"x should hold {length} linearly independent tokens; got fewer (rank below T: more "
            "tokens than dimensions, or repeated ones). The result is the nearest in least squares "
            "of the logits; see the residual.",
            stacklevel=2,
        )
    logits, inverse = target.log(), torch.linalg.pinv(x)  # (T, T), (T, M)
    if head_dim >= length:
        keys, queries = torch.eye(length, dtype=x.dtype, device=x.device), logits
    else:
        left, values, right = torch.linalg.svd(logits - logits.mean(0))
        root = values.sqrt()[:head_dim, None]
        keys, queries = root * left.mT[:head_dim], root * right[:head_dim]
    padding = (0, 0, 0, head_dim - len(keys))
    to_k = torch.nn.functional.pad(keys @ inverse, padding)
    to_q = torch.nn.functional.pad(math.sqrt(head_dim) * queries @ inverse, padding)
    found = ((to_k @ x).mT @ (to_q @ x) / math.sqrt(head_dim)).softmax(0)
    return to_q, to_k, float((found - target).abs().max())


def _check_columns(target: Tensor) -> None:
    least, sums = float(target.min()), target.sum(0)
    if least <= 0:
        raise DataError(
            f"target must be greater than 0, since its logarithm is taken; got {least:g}. Clip it: "
            "target.clamp(min=1e-6), then divide by target.sum(0)."
        )
    worst = float((sums - 1).abs().max())
    if worst > 1e-5:
        raise DataError(
            f"target must have columns that sum to 1, one for each query; got one that is off by "
            f"{worst:g}. Divide by target.sum(0), or pass the transpose if its rows sum to 1."
        )
