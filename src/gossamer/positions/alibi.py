"""Attention with linear biases (ALiBi)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.positions.base import Positions, check_ids, relative_ids

__all__ = ["AlibiPositions", "alibi_slopes"]


def alibi_slopes(num_heads: int) -> Tensor:
    """Return one slope for each head, `(H,)`, in the order of the authors' code.

    For a power of two, slope h is `2 ** (-8 h / H)`, h = 1..H. Otherwise the slopes of the largest
    power of two P below H, then every other slope of 2P.

    Args:
        num_heads: Range: >= 1.

    Raises:
        ConfigError: If `num_heads` is out of its range.

    Example:
        >>> alibi_slopes(6).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    check_range(num_heads, "num_heads", low=1, integer=True)
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    extra = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return torch.tensor((slopes + extra)[:num_heads], dtype=torch.float32)


class AlibiPositions(Positions):
    r"""A fixed bias that falls linearly with distance, one slope for each head.

    $$b_{h,i,j} = -m_h\,(p_i - p_j)$$

    Nothing is learned. A pair that contains id 0 gets bias 0.

    Args:
        num_heads: Attention heads, any number. Range: >= 1.
        bidirectional: Use `|p_i - p_j|`; otherwise keys after the query get 0. Default false.

    Shape:
        - ids: `(B, T)` or `(1, T)`; output of `bias`: `(B or 1, H, T, S)`, float32.

    Example:
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> AlibiPositions(1).bias(ids, ids, q_index=ids - 1)[0, 0, 2].tolist()
        [-0.0078125, -0.00390625, -0.0]

    Source: Press et al., *Train Short, Test Long*, ICLR 2022, section 3, and the authors' code for
        head counts that are no power of two.
    Deviations: none
    """

    slopes: Tensor

    def __init__(self, num_heads: int, *, bidirectional: bool = False) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.register_buffer("slopes", alibi_slopes(num_heads), persistent=False)

    def bias(self, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor) -> Tensor:
        """Return the negative scaled distance."""
        check_ids(q_ids, 1)
        distance, placed = relative_ids(q_ids, k_ids)
        distance = distance.abs() if self.bidirectional else distance.clamp(min=0)
        distance = (distance * placed).float()
        return -self.slopes.float()[None, :, None, None] * distance.unsqueeze(1)

    def extra_repr(self) -> str:
        """Show the options."""
        return f"num_heads={len(self.slopes)}, bidirectional={self.bidirectional}"
