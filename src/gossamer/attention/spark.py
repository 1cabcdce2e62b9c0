"""Spark attention: a slice of each head predicts which keys matter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.attention.bias import PositionBias
from gossamer.attention.core import MultiHeadAttention, causal_mask, check_mask
from gossamer.attention.top_k import check_top_k, statistical_top_k
from gossamer.checks import check_range
from gossamer.errors import ConfigError
from gossamer.positions import Positions

__all__ = ["SparkAttention"]


# Keys for each kept one from which gathering rows beats masking them (measured on a CPU).
GATHER_FROM = 8


class SparkAttention(MultiHeadAttention):
    r"""Attention in which each query reads about k keys, found from a slice of its head.

    $$\mathrm{out} = \sum_j \mathrm{softmax}\big(\mathrm{top}_k(s_1\,q_{:r} \cdot k_{j,:r})\big)_j\;
      \mathrm{softplus}(s_2\,q_{r:} \cdot k_{j,r:})\;v_j$$

    The first r coordinates of a head give the logits; `statistical_top_k` over the visible keys
    sets all but about k of them to -inf; only for the kept keys the rest of the head and the value
    are needed. The weights are not normalised again: they do not sum to 1. A query that sees at
    most k keys reads them all. A bias of positions acts on the logits of the first slice; rotary
    positions turn each slice as a head of its own.

    In evaluation on a CPU, one new token without gradients reads only the rows of the kept keys
    where these are at most an eighth of all; below that, masks are faster. A query whose scores are
    all equal reads all keys.

    Args:
        dim: Model width M.
        num_heads: Query heads H.
        head_dim: Width D of a head. Range: >= 2. Default `dim // num_heads`.
        predictor_dim: Coordinates r that predict. Range: 1 to D - 1. Default `D // 2`.
        k: Keys that a query reads: an int counts, a float is a share of the visible ones.
            Default 256.
        num_kv_heads: Key and value heads, a divisor of `num_heads`. Default `num_heads`.
        scales: Factors (s_1, s_2) of the two products. Default `1 / sqrt(r)` and `1 / sqrt(D - r)`.

    Shape:
        - x and output: `(B, T, M)`; mask: broadcasts to `(B, H, T, S)`, True = takes part.

    Raises:
        ConfigError: If a size is out of its range.

    Example:
        >>> SparkAttention(16, 2, k=4)(torch.randn(1, 9, 16), causal=True).shape
        torch.Size([1, 9, 16])

    Source: You et al., *Spark Transformer*, NeurIPS 2025, section 2.
    Deviations: the paper names no scales, these are ours; the deviation is the population's.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        predictor_dim: int | None = None,
        k: int | float = 256,
        num_kv_heads: int | None = None,
        scales: Sequence[float] | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads)
        check_range(self.head_dim, "head_dim", low=2, integer=True)
        r = self.head_dim // 2 if predictor_dim is None else predictor_dim
        check_range(r, "predictor_dim", low=1, high=self.head_dim - 1, integer=True)
        check_top_k(k)
        self.predictor_dim = r
        self.k = k
        if scales is None:
            scales = (r**-0.5, (self.head_dim - r) ** -0.5)
        if len(scales) != 2:
            raise ConfigError(f"scales must be two numbers; got {len(scales)}. Give (s_1, s_2).")
        for number in scales:
            check_range(number, "scales", low=0.0, open_low=True)
        self.scales = (float(scales[0]), float(scales[1]))

    def rotate(
        self, positions: Positions, q: Tensor, k: Tensor, ids: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Change the two slices of queries and keys each as a head of its own."""
        if type(positions).rotate is Positions.rotate:
            return q, k
        r = self.predictor_dim
        if r % 2 or self.head_dim % 2:
            raise ConfigError(
                "with rotary positions both slices of a head must be even; got "
                f"{r} and {self.head_dim - r}. Change predictor_dim or head_dim."
            )
        first = positions.rotate(q[..., :r], k[..., :r], ids, ids, q_index=index)
        rest = positions.rotate(q[..., r:], k[..., r:], ids, ids, q_index=index)
        pairs = zip(first, rest, strict=True)
        q, k = (torch.cat(pair, dim=-1) for pair in pairs)
        return q, k

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
        """Attend to the keys that the first slice picks."""
        length, num_keys = q.shape[2], k.shape[2]
        target = self.k if isinstance(self.k, float) else min(self.k, num_keys)
        few = target * (num_keys if isinstance(target, float) else 1) * GATHER_FROM <= num_keys
        inference = not self.training and not torch.is_grad_enabled()
        gathers = length == 1 and inference and few and q.device.type == "cpu"
        r, group = self.predictor_dim, q.shape[1] // k.shape[1]
        # (B, H_kv, group, T, .): the queries of a group meet their key head without copies of it
        grouped = q.view(len(q), k.shape[1], group, *q.shape[2:])
        keys = k.unsqueeze(2)
        logits = self.scales[0] * (grouped[..., :r] @ keys[..., :r].transpose(-1, -2))
        logits = logits.flatten(1, 2)
        if isinstance(bias, PositionBias):
            bias = bias.rows(0, length)
        if bias is not None:
            logits = logits + bias.to(logits.dtype)
        if mask is not None:
            check_mask(mask)
        if causal and length > 1:
            triangle = causal_mask(length, num_keys, device=q.device)
            mask = triangle if mask is None else mask & triangle
        # hard and soft thresholds give the same softmax
        kept = statistical_top_k(logits, target, mask=mask, fill=-math.inf, soft=False)
        # with equal scores nothing may exceed the threshold; a query reads its best keys at least
        best = logits if mask is None else logits.masked_fill(~mask, -math.inf)
        kept = torch.where(logits == best.amax(-1, keepdim=True), logits, kept)
        seen = kept.isfinite().any(-1, keepdim=True)
        weights = torch.where(seen, kept, 0.0).softmax(-1) * seen
        if gathers:
            return self._gather(grouped, k, v, weights)
        gains = F.softplus(self.scales[1] * (grouped[..., r:] @ keys[..., r:].transpose(-1, -2)))
        weights = (weights.view_as(gains) * gains).to(v.dtype)
        out: Tensor = weights @ v.unsqueeze(2)
        return out.flatten(1, 2)

    def _gather(self, grouped: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
        """Return the output of one query for each head, reading only rows with weight."""
        batch, heads, group = grouped.shape[:3]
        r = self.predictor_dim
        out = v.new_empty(batch, heads, group, 1, v.shape[-1])
        for b in range(batch):
            for h in range(heads):
                for g in range(group):
                    row = weights[b, h * group + g, 0]
                    found = row.nonzero().squeeze(1)
                    keys = k[b, h].index_select(0, found)[:, r:]
                    gain = F.softplus(self.scales[1] * (keys @ grouped[b, h, g, 0, r:]))
                    out[b, h, g, 0] = (row[found] * gain) @ v[b, h].index_select(0, found)
        return out.flatten(1, 2)
