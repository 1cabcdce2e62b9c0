"""Layers whose output is a power of the scale of their weights: norm, attention, encoder layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gossamer.attention.core import check_mask
from gossamer.checks import check_range, check_shape
from gossamer.errors import ConfigError

__all__ = ["ExactNorm", "ScaleInvariantAttention", "ScaleInvariantEncoderLayer"]

# Attention weights, B x H x queries x S, of one chunk of queries: 2 MiB in float32. With a causal
# mask, small chunks also skip most of the keys that are masked out.
_CHUNK_NUMBERS = 2**19


class ExactNorm(nn.Module):
    r"""Layer norm without epsilon: its output does not change with the scale of its input.

    $$\mathrm{LN}_0(x) = \frac{x - \bar x}{\sqrt{\frac1M \sum_i (x_i - \bar x)^2}}$$

    An epsilon of 1e-5 decides the result as soon as the variance is near it, which a model whose
    weights are 100 times smaller reaches at once. Here each row is first divided by its largest
    entry, so that squares neither overflow nor vanish. A row whose entries are equal, up to
    rounding, gives 0 with gradient 0. Half precision is computed in float32.

    Args:
        dim: Width M of the last axis. Range: >= 1.
        affine: A gain that starts at 1 and a shift that starts at 0. The output is then of degree 1
            in the weights, otherwise of degree 0. Default false.

    Shape:
        - x and output: `(..., M)`.

    Raises:
        ConfigError: If `dim` is out of range.
        ShapeError: If the last axis is not M wide.

    Example:
        >>> norm = ExactNorm(3)
        >>> [round(y, 4) for y in norm(1e-20 * torch.tensor([1.0, 2.0, 3.0])).tolist()]
        [-1.2247, 0.0, 1.2247]

    Source: Ba et al., *Layer Normalization*, 2016, eq. 4; without epsilon as the theory of Li et
        al., *Robust Training of Neural Networks Using Scale Invariant Architectures*, ICML 2022,
        needs it.
    Deviations: none
    """

    def __init__(self, dim: int, *, affine: bool = False) -> None:
        super().__init__()
        check_range(dim, "dim", low=1, integer=True)
        self.dim = dim
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        check_shape(x, (*x.shape[:-1], self.dim), "x")
        wide = x if x.dtype == torch.float64 else x.float()
        with torch.no_grad():
            low, high = wide.aminmax(dim=-1, keepdim=True)
            peak = torch.maximum(high, -low)
            limits = torch.finfo(wide.dtype)
            # such a row becomes 0, and so does its gradient
            peak = peak.masked_fill(high - low <= 4 * limits.eps * peak, math.inf)
        # the result does not depend on `peak`, so it needs no gradient of its own
        scaled = wide / peak
        weight, bias = (None if p is None else p.to(wide.dtype) for p in (self.weight, self.bias))
        # a variance is now 0 or far above `tiny`, which only keeps 0 / 0 away
        return F.layer_norm(scaled, (self.dim,), weight, bias, eps=limits.tiny).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the options for `repr`."""
        return f"{self.dim}, affine={self.weight is not None}"


class ScaleInvariantAttention(nn.Module):
    r"""Attention with ReLU in place of softmax, each row divided by its sum.

    $$A = N(\mathrm{ReLU}(Q K^\top)), \qquad y = A V W_O$$

    $A$ does not change when all weights are multiplied by one number; the output is of degree 2
    in the weights above the input. A row whose scores are all negative (always possible for the
    first causal token) sees nothing and gives 0, with gradient 0. Queries go in chunks that are
    computed anew for the gradient, so that memory grows with `chunk_size` times the length.

    Args:
        dim: Model width M; a multiple of `num_heads`.
        num_heads: Attention heads H. Range: >= 1.
        causal: Query i sees keys up to i. Default false.
        chunk_size: Queries at a time, or `None` for as many as make 2^19 weights in all.
            Range: >= 1. Default `None`.

    Shape:
        - x and output: `(B, T, M)`.
        - mask: broadcasts to `(B, H, T, T)`, boolean, True = takes part.

    Raises:
        ConfigError: If a size is out of range, or `dim` is no multiple of `num_heads`.
        ShapeError: If `x` is not `(B, T, M)`.
        DtypeError: If the mask is not boolean.

    Example:
        >>> layer = ScaleInvariantAttention(8, 2, causal=True)
        >>> layer(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])

    Source: Li et al., *Robust Training of Neural Networks Using Scale Invariant Architectures*,
        ICML 2022, section 4.
    Deviations: a row of which no score is positive gives 0.
    """

    def __init__(
        self, dim: int, num_heads: int, *, causal: bool = False, chunk_size: int | None = None
    ) -> None:
        super().__init__()
        check_range(num_heads, "num_heads", low=1, integer=True)
        if chunk_size is not None:
            check_range(chunk_size, "chunk_size", low=1, integer=True)
        if dim < 1 or dim % num_heads:
            raise ConfigError(
                f"dim must be a positive multiple of num_heads; got {dim} and {num_heads}. "
                "Change one of them."
            )
        self.dim = dim
        self.num_heads = num_heads
        self.causal = causal
        self.chunk_size = chunk_size
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from every token of `x` to `x`."""
        check_shape(x, (None, None, self.dim), "x")
        if mask is not None:
            check_mask(mask)
        q, k, v = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )  # (B, H, T, D)
        step = self.chunk_size or max(16, _CHUNK_NUMBERS // max(1, q[..., 0].numel()))
        out: Tensor = _ChunkedAttention.apply(q, k, v, mask, self.causal, step)  # type: ignore[no-untyped-call]
        joined: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return joined


def relu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Return normalised-ReLU attention of all queries at once, `(B, H, T, D)`: the plain form.

    Args:
        q: Queries, `(B, H, T, D)`.
        k: Keys, `(B, H, T, D)`.
        v: Values, `(B, H, T, D)`.
        mask: Broadcasts to `(B, H, T, T)`, True = takes part.
        causal: Query i sees keys up to i.

    Example:
        >>> x = torch.ones(1, 1, 2, 1)
        >>> relu_attention(x, -x, x).flatten().tolist()
        [0.0, 0.0]
    """
    weights = _weights(q, k, mask, causal, 0)
    total = weights.sum(-1, keepdim=True)
    # adding an epsilon instead would let the scale of the weights in again
    return (weights @ v) / torch.where(total > 0, total, 1.0)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, begin: int) -> Tensor:
    """Return ReLU of the scores, 0 where masked; the first query is query `begin`."""
    weights = F.relu(q @ k.mT)  # (B, H, queries, keys)
    if causal:
        weights = weights.tril(begin)
    return weights if mask is None else weights.masked_fill(~mask, 0.0)


class _ChunkedAttention(torch.autograd.Function):
    """`relu_attention` with a few queries at a time; weights are made again for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, step: int
    ) -> Tensor:
        out, total = torch.zeros_like(v), v.new_zeros(*v.shape[:-1], 1)
        for rows, keys, part in _chunks(q.shape[2], mask, causal, step):
            weights = _weights(q[:, :, rows], k[:, :, keys], part, causal, rows.start)
            row_sum = weights.sum(-1, keepdim=True)
            total[:, :, rows] = torch.where(row_sum > 0, row_sum, 1.0)
            out[:, :, rows] = (weights @ v[:, :, keys]) / total[:, :, rows]
        ctx.save_for_backward(q, k, v, out, total)
        ctx.mask, ctx.causal, ctx.step = mask, causal, step
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        # with y = (W v) / z and z the sum of W: dW = (dy / z) v^T - (dy / z) . y
        d_sum = grad / total
        d_total = (d_sum * out).sum(-1, keepdim=True)
        for rows, keys, part in _chunks(q.shape[2], ctx.mask, ctx.causal, ctx.step):
            weights = _weights(q[:, :, rows], k[:, :, keys], part, ctx.causal, rows.start)
            d_v[:, :, keys] += weights.mT @ d_sum[:, :, rows]
            d_scores = (d_sum[:, :, rows] @ v[:, :, keys].mT).sub_(d_total[:, :, rows])
            d_scores = torch.ops.aten.threshold_backward(d_scores, weights, 0)
            d_q[:, :, rows] = d_scores @ k[:, :, keys]
            d_k[:, :, keys] += d_scores.mT @ q[:, :, rows]
        return d_q, d_k, d_v, None, None, None


def _chunks(
    length: int, mask: Tensor | None, causal: bool, step: int
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield the queries of each chunk, the keys they may see, and their part of the mask."""
    for begin in range(0, length, step):
        rows = slice(begin, min(begin + step, length))
        keys = slice(0, rows.stop if causal else length)
        part = mask
        if mask is not None:
            part = mask[..., keys] if mask.dim() and mask.shape[-1] > 1 else mask
            part = part[..., rows, :] if mask.dim() > 1 and mask.shape[-2] > 1 else part
        yield rows, keys, part


class ScaleInvariantEncoderLayer(nn.Module):
    r"""One layer of a scale-invariant transformer: degree 2 in, degree 2 out.

    $$h \leftarrow h + \mathrm{Attn}(\mathrm{LN}_0(h)), \qquad
      h \leftarrow h + W_2\,\mathrm{ReLU}(W_1\,\mathrm{LN}_0(h) + b)$$

    Both branches start at degree 0 behind a norm and end at degree 2, so that they may be added to
    a stream of degree 2. The second map of the feed-forward block has no bias: it would be of
    degree 1.

    Args:
        dim: Model width M; a multiple of `num_heads`.
        num_heads: Attention heads.
        hidden_dim: Inner width of the feed-forward block. Range: >= 1.
        causal: A token sees only what stands before it. Default false.
        init_std: Standard deviation of the weights at the start, a normal cut at two of them.
            Range: > 0. Default 0.02, as in the paper.

    Shape:
        - x and output: `(B, T, M)`.
        - mask: broadcasts to `(B, H, T, T)`, boolean, True = takes part.

    Raises:
        ConfigError: If a size does not fit another.

    Example:
        >>> layer = ScaleInvariantEncoderLayer(8, 2, 16)
        >>> layer(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])

    Source: Li et al., *Robust Training of Neural Networks Using Scale Invariant Architectures*,
        ICML 2022, section 4.
    Deviations: no dropout.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        *,
        causal: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        check_range(hidden_dim, "hidden_dim", low=1, integer=True)
        check_range(init_std, "init_std", low=0.0, open_low=True)
        self.norm_attention = ExactNorm(dim)
        self.attention = ScaleInvariantAttention(dim, num_heads, causal=causal)
        self.norm_feed_forward = ExactNorm(dim)
        self.up = nn.Linear(dim, hidden_dim)
        self.down = nn.Linear(hidden_dim, dim, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight, std=init_std, a=-2 * init_std, b=2 * init_std)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add attention, then the feed-forward block."""
        x = x + self.attention(self.norm_attention(x), mask)
        return x + self.down(F.relu(self.up(self.norm_feed_forward(x))))  # type: ignore[no-any-return]
