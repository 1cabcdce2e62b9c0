"""Attention with learned vectors for relative positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gossamer.attention.bias import PositionBias
from gossamer.attention.core import MultiHeadAttention, causal_mask, check_mask
from gossamer.checks import check_range

__all__ = ["ShawAttention"]


class ShawAttention(MultiHeadAttention):
    r"""Attention whose keys and values depend on the clipped distance to the query.

    $$e_{ij} = \frac{q_i \cdot (k_j + a^K_{c(j - i)})}{\sqrt D}, \qquad
      z_i = \sum_j \mathrm{softmax}(e_i)_j\,(v_j + a^V_{c(j - i)}), \qquad
      c(x) = \max(-w, \min(w, x))$$

    It brings its own positions: build the model with `positions="none"`. Distances count tokens,
    padding left out. Query, key and value vectors meet the tables once for each of the 2 w + 1
    distances, not once for each pair, but the softmax weights are held in memory, which the fused
    kernels avoid: this is the slow baseline of the bias methods.

    Args:
        dim: Model width M.
        num_heads: Attention heads H; a divisor of `dim`.
        max_distance: Largest distance that is told apart, w. Range: >= 1. The paper uses 16.

    Shape:
        - x and output: `(B, T, M)`.
        - mask: broadcasts to `(B, H, T, S)`, True = takes part; bias: `(1 or B, H, T, S)`.

    Raises:
        ConfigError: If a size is out of its range.
        DtypeError: If the mask is not boolean.

    Example:
        >>> ShawAttention(16, 4, max_distance=3)(torch.randn(1, 5, 16), causal=True).shape
        torch.Size([1, 5, 16])

    Source: Shaw et al., *Self-Attention with Relative Position Representations*, NAACL 2018,
        eq. 3-5; tables shared by the heads of a layer, as in section 3.3.
    Deviations: the tables start at Xavier's uniform law; the paper does not say how.
    """

    def __init__(self, dim: int, num_heads: int, *, max_distance: int) -> None:
        super().__init__(dim, num_heads)
        check_range(max_distance, "max_distance", low=1, integer=True)
        self.max_distance = max_distance
        self.key_table = nn.Parameter(torch.zeros(2 * max_distance + 1, self.head_dim))
        self.value_table = nn.Parameter(torch.zeros(2 * max_distance + 1, self.value_dim))
        nn.init.xavier_uniform_(self.key_table)
        nn.init.xavier_uniform_(self.value_table)

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
        """Attend with the two tables in the logits and in the sum."""
        length, num_keys = q.shape[2], k.shape[2]
        buckets = self._buckets(index, length, num_keys, q.device)
        buckets = buckets.expand(*q.shape[:3], num_keys)
        logits = q @ k.transpose(-1, -2) + (q @ self.key_table.T).gather(-1, buckets)
        logits = logits / math.sqrt(self.head_dim)
        if isinstance(bias, PositionBias):
            bias = bias.rows(0, length)
        if bias is not None:
            logits = logits + bias.to(logits.dtype)
        if causal and length > 1:
            triangle = causal_mask(length, num_keys, device=q.device)
            mask = triangle if mask is None else mask & triangle
        if mask is None:
            weights = logits.softmax(-1)
        else:
            check_mask(mask)
            seen = mask.any(-1, keepdim=True)
            weights = logits.masked_fill(~mask & seen, -math.inf).softmax(-1) * seen
        near = weights.new_zeros(*weights.shape[:-1], 2 * self.max_distance + 1)
        near = near.scatter_add(-1, buckets, weights)  # weight on each distance
        return weights @ v + near @ self.value_table

    def _buckets(
        self, index: Tensor | None, length: int, num_keys: int, device: torch.device
    ) -> Tensor:
        w = self.max_distance
        if index is None or length != num_keys:
            # padding of a cache stands on the left, where it moves no distance between tokens
            places = torch.arange(num_keys, device=device)
            distance = places[None, None] - places[None, num_keys - length :, None]
        else:
            distance = index.unsqueeze(1) - index.unsqueeze(2)
        return (distance.clamp(-w, w) + w).unsqueeze(1)  # (1 or B, 1, T, S)
