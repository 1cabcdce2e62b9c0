"""Attention to the keys with the largest logits, found exactly."""

from __future__ import annotations

import math

from torch import Tensor

from gossamer.attention.bias import PositionBias
from gossamer.attention.core import MultiHeadAttention, causal_mask, check_heads, check_mask
from gossamer.checks import check_range
from gossamer.errors import ShapeError

__all__ = ["TopKAttention", "top_k_attention"]


def top_k_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    num_keys: int,
    scale: float | None = None,
) -> Tensor:
    r"""Softmax attention to the `num_keys` keys with the largest logits of each query.

    $$w_{kj} \propto \exp(s\,q_k \cdot k_j)\;[\,s\,q_k \cdot k_j \ge \text{the } m\text{-th
      largest}\,]$$

    Only keys that the mask lets take part compete, so a causal mask looks at nothing ahead. Keys
    equal to the m-th largest all stay, so ties can keep more than m and the order of the keys does
    not matter. With m >= S this is plain attention. Gradients pass through the kept keys. All
    logits are computed: the cost is that of plain attention and a selection.

    Args:
        q: Queries.
        k: Keys; with fewer heads than queries, each serves a group.
        v: Values.
        mask: Boolean, True = takes part. Default all.
        num_keys: Keys that are kept, m. Range: >= 1. The paper uses 8.
        scale: Factor s. Default `1 / sqrt(D)`.

    Shape:
        - q: `(B, H, T, D)`; k: `(B, H_kv, S, D)`; v: `(B, H_kv, S, D_v)`.
        - mask: broadcasts to `(B, H, T, S)`.
        - output: `(B, H, T, D_v)`; 0 where a query sees nothing.

    Raises:
        ConfigError: If `num_keys < 1`.
        DtypeError: If the mask is not boolean.

    Example:
        >>> import torch
        >>> q = torch.eye(3)[None, None]
        >>> top_k_attention(q, q, q, num_keys=1)[0, 0].tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]

    Source: Zhao et al., *Explicit Sparse Transformer*, 2019, eq. 3-5.
    Deviations: none
    """
    check_range(num_keys, "num_keys", low=1, integer=True)
    check_heads(q, k, v)
    return _attend(q, k, v, mask, None, num_keys, scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    num_keys: int,
    scale: float | None,
) -> Tensor:
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if mask is not None:
        check_mask(mask)
        try:
            mask = mask.expand(logits.shape)
        except RuntimeError:
            raise ShapeError(
                f"mask must broadcast to the logits, (B, H, T, S) = {tuple(logits.shape)}; got "
                f"{tuple(mask.shape)}. Add axes of size 1 in front of T."
            ) from None
        logits = logits.masked_fill(~mask, -math.inf)
    least = logits.detach().topk(min(num_keys, k.shape[2]), dim=-1).values[..., -1:]
    kept = logits >= least
    if mask is not None:
        # a row that sees nothing would be NaN: it is left whole here and zeroed below
        seen = mask.any(-1, keepdim=True)
        logits = logits.masked_fill(~seen, 0.0)
        return logits.masked_fill(~kept, -math.inf).softmax(-1).mul(seen) @ v
    return logits.masked_fill(~kept, -math.inf).softmax(-1) @ v


class TopKAttention(MultiHeadAttention):
    """Projections around `top_k_attention`.

    Args:
        dim: Model width M.
        num_heads: Attention heads H.
        num_keys: Keys that each query keeps. Range: >= 1.
        head_dim: Width of a head. Default `dim // num_heads`.
        bias: Biases in the four projections. Default false.

    Shape:
        - x and output: `(B, T, M)`.
        - mask: broadcasts to `(B, H, T, S)`, True = takes part; bias: `(1 or B, H, T, S)`.

    Raises:
        ConfigError: If a size is out of its range.

    Example:
        >>> import torch
        >>> TopKAttention(16, 4, num_keys=2)(torch.randn(1, 5, 16), causal=True).shape
        torch.Size([1, 5, 16])

    Source: Zhao et al., *Explicit Sparse Transformer*, 2019, section 3.
    Deviations: none
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_keys: int,
        head_dim: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, head_dim=head_dim, bias=bias)
        check_range(num_keys, "num_keys", low=1, integer=True)
        self.num_keys = num_keys

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        bias: Tensor | PositionBias | None,
        causal: bool,
        index: Tensor | None,
    ) -> Tensor:
        """Attend to the largest logits of each query."""
        length = q.shape[2]
        if isinstance(bias, PositionBias):
            bias = bias.rows(0, length)
        if causal and length > 1:
            triangle = causal_mask(length, k.shape[2], device=q.device)
            mask = triangle if mask is None else mask & triangle
        return _attend(q, k, v, mask, bias, self.num_keys, self.scale)
