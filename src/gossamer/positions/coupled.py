"""Coupled relative bias: a learned scalar for each clipped difference of coupled ids."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from gossamer.checks import check_choice, check_range
from gossamer.positions._gather import take
from gossamer.positions.base import Positions, check_ids

__all__ = ["CoupledRelativePositions"]


class CoupledRelativePositions(Positions):
    r"""Learned attention bias from differences of coupled ids, with a length scale.

    $$\lambda_i \left(\frac{q_i \cdot k_j}{\sqrt{D}}
      + g \sum_l B_l[h, \mathrm{bucket}(\mathrm{id}_{j,l} - \mathrm{id}_{i,l})]\right),
      \qquad \lambda_i = \frac{\log(i + 2)}{\log L_0}$$

    A difference is clipped to `-window .. window`; three more buckets stand for (query without
    position), (key without position) and (both). Only differences enter, so there is no largest
    length, no random start and no table: a few dozen numbers. `gain` is a re-scaled parameter,
    that is a larger effective learning rate for the bias; with 1 in place of 10 the method fails
    at twice the trained length. The scale sharpens attention with length; without it exactness
    ends at about six times the trained length. Its default reads the query's own index, so that a
    cache or padding cannot change it.

    Args:
        num_heads: Attention heads.
        levels: Ids for each token. Default 1.
        window: Largest difference that is told apart, W. Range: >= 1. Default 3.
        gain: Factor on the bias. Range: > 0. Default 10.
        length_scale: `"query"` (by the query's index, exact under a cache), `"sequence"` (by the
            number of tokens, at least 2; not exact under a cache) or `"none"`.
        base_length: Length at which the scale is 1. Unit: tokens. Range: >= 2. Default 32.

    Shape:
        - ids: `(B, T)` or `(B, T, levels)`; output of `bias`: `(B, H, T, S)`.

    Raises:
        ConfigError: If an option is out of its range.

    Example:
        >>> ids = torch.tensor([[0, 2, 1, 2]])
        >>> index = torch.arange(4)[None]
        >>> CoupledRelativePositions(num_heads=2).bias(ids, ids, q_index=index).shape
        torch.Size([1, 2, 4, 4])

    Source: the unused relative variant in the public code of Cho et al., NeurIPS 2024; three extra
        buckets and sum over levels: our measurements.
    Deviations: `gain`, the length scale and the buckets for id 0 are ours.
    """

    coupled = True
    per_layer = True

    def __init__(
        self,
        num_heads: int,
        *,
        levels: int = 1,
        window: int = 3,
        gain: float = 10.0,
        length_scale: str = "query",
        base_length: int = 32,
    ) -> None:
        super().__init__()
        check_range(num_heads, "num_heads", low=1, integer=True)
        check_range(levels, "levels", low=1, integer=True)
        check_range(window, "window", low=1, integer=True)
        check_range(gain, "gain", low=0.0, open_low=True)
        check_range(base_length, "base_length", low=2)
        check_choice(length_scale, ("query", "sequence", "none"), "length_scale")
        self.levels = levels
        self.window = window
        self.gain = gain
        self.length_scale = length_scale
        self.base_length = base_length
        self.cacheable = length_scale != "sequence"
        self.table = nn.Parameter(torch.randn(levels, 2 * window + 4, num_heads) * 0.02)

    def rotate(
        self, q: Tensor, k: Tensor, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scale the queries, which scales the content part of their logits."""
        scale = self._scale(q_index)
        return (q if scale is None else q * scale[:, None, :, None].to(q.dtype)), k

    def bias(self, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor) -> Tensor:
        """Return the scaled bias, summed over levels."""
        check_ids(q_ids, self.levels)
        q_levels = q_ids.unsqueeze(-1) if self.levels == 1 else q_ids
        k_levels = k_ids.unsqueeze(-1) if self.levels == 1 else k_ids
        parts = (
            take(self.table[n].T, self._buckets(q_levels[..., n], k_levels[..., n]))
            for n in range(self.levels)
        )
        out = self.gain * functools.reduce(torch.add, parts)  # (B, H, T, S)
        scale = self._scale(q_index)
        return out if scale is None else out * scale[:, None, :, None]

    def _buckets(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        w = self.window
        buckets = (k_ids.unsqueeze(1) - q_ids.unsqueeze(2)).clamp(-w, w) + w
        q_none = (q_ids == 0).unsqueeze(2)
        k_none = (k_ids == 0).unsqueeze(1)
        buckets = torch.where(q_none & ~k_none, 2 * w + 1, buckets)
        buckets = torch.where(k_none & ~q_none, 2 * w + 2, buckets)
        return torch.where(q_none & k_none, 2 * w + 3, buckets)

    def _scale(self, q_index: Tensor) -> Tensor | None:
        if self.length_scale == "none":
            return None
        if self.length_scale == "query":
            return torch.log(q_index.float() + 2.0) / math.log(self.base_length)
        # padding is not counted; log(1) = 0 would erase every logit of a one-token sequence
        length = (q_index.amax(1, keepdim=True) + 1).clamp(min=2).expand_as(q_index)
        return torch.log(length.float()) / math.log(self.base_length)

    def extra_repr(self) -> str:
        """Show the options."""
        return (
            f"levels={self.levels}, window={self.window}, gain={self.gain}, "
            f"length_scale={self.length_scale!r}, base_length={self.base_length}"
        )
