"""Kernelised decay with distance (Kerple): a logarithm or a power, learned for each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_range
from gossamer.positions._gather import bias_of_offsets
from gossamer.positions.base import Positions, check_ids, relative_ids

__all__ = ["KerpleLogPositions", "KerplePowerPositions"]

_FLOOR = 1e-6
"""Least value of a coefficient: where the free number underflows, it stays positive."""


class _KerplePositions(Positions):
    """What both kernels share: two free numbers for each head, and the distance."""

    per_layer = True

    def __init__(self, num_heads: int, *, bidirectional: bool = False) -> None:
        super().__init__()
        check_range(num_heads, "num_heads", low=1, integer=True)
        self.num_heads = num_heads
        self.bidirectional = bidirectional
        start_r1, start_r2 = self._start()
        self.raw_r1 = nn.Parameter(start_r1)
        self.raw_r2 = nn.Parameter(start_r2)

    def _start(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _columns(self, distance: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def r1(self) -> Tensor:
        """The factor of each head, `(H,)`, > 0."""
        return _FLOOR + F.softplus(_at_least_single(self.raw_r1))

    def bias(self, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor) -> Tensor:
        """Return the negative kernel of the distance."""
        check_ids(q_ids, 1)
        offset, placed = relative_ids(q_ids, k_ids)
        distance = offset.abs() if self.bidirectional else offset.clamp(min=0)
        return bias_of_offsets(self._columns, distance, placed)

    def extra_repr(self) -> str:
        """Show the options."""
        return f"num_heads={self.num_heads}, bidirectional={self.bidirectional}"


class KerpleLogPositions(_KerplePositions):
    r"""A learned bias that falls with the logarithm of the distance.

    $$b_{h,i,j} = -r_{1,h} \log(1 + r_{2,h}\,|p_i - p_j|), \qquad r_1, r_2 > 0$$

    Two numbers for each head. They are softplus of free parameters, so that no training step can
    make them negative; read them as `r1` and `r2`. It decays more slowly than ALiBi, whose slope
    is constant. Float32 at least, in a half-precision model too. A pair that contains id 0 gets
    bias 0.

    Args:
        num_heads: Attention heads. Range: >= 1.
        bidirectional: Also keys after the query decay; otherwise they get 0. Default false.

    Shape:
        - ids: `(B, T)` or `(1, T)`; output of `bias`: `(B or 1, H, T, S)`, float32.

    Raises:
        ConfigError: If `num_heads` is out of its range.

    Example:
        >>> ids = torch.arange(1, 5)[None]
        >>> kerple = KerpleLogPositions(2)
        >>> bias = kerple.bias(ids, ids, q_index=ids - 1)
        >>> bool((bias[0, :, 3, 0] < bias[0, :, 3, 2]).all())
        True

    Source: Chi et al., *KERPLE*, NeurIPS 2022, logarithmic kernel; start of the authors' code:
        r1 uniform in (0, 2), r2 in (0, 1), both at least 0.01.
    Deviations: the authors clamp the parameters to at least 0.01 in each forward pass, which stops
        their gradient there; softplus keeps them above 1e-6 and learning.
    """

    def _start(self) -> tuple[Tensor, Tensor]:
        return _softplus_inverse(_uniform(self.num_heads, 2.0)), _softplus_inverse(
            _uniform(self.num_heads, 1.0)
        )

    @property
    def r2(self) -> Tensor:
        """The scale of the distance, `(H,)`, > 0."""
        return _FLOOR + F.softplus(_at_least_single(self.raw_r2))

    def _columns(self, distance: Tensor) -> Tensor:
        r1, r2 = self.r1.unsqueeze(1), self.r2.unsqueeze(1)
        return -r1 * torch.log1p(r2 * distance.to(r2.dtype))


class KerplePowerPositions(_KerplePositions):
    r"""A learned bias that falls with a power of the distance.

    $$b_{h,i,j} = -r_{1,h}\,|p_i - p_j|^{r_{2,h}}, \qquad r_1 > 0,\; 0 < r_2 \le 2$$

    Two numbers for each head; with `r2 = 1` this is ALiBi with learned slopes. `r1` is softplus and
    `r2` twice the sigmoid of a free parameter, so that no training step can leave the range in
    which the kernel is positive definite. Float32 at least, in a half-precision model too. A pair
    that contains id 0 gets bias 0.

    Args:
        num_heads: Attention heads. Range: >= 1.
        bidirectional: Also keys after the query decay; otherwise they get 0. Default false.

    Shape:
        - ids: `(B, T)` or `(1, T)`; output of `bias`: `(B or 1, H, T, S)`, float32.

    Raises:
        ConfigError: If `num_heads` is out of its range.

    Example:
        >>> ids = torch.arange(1, 5)[None]
        >>> kerple = KerplePowerPositions(2)
        >>> bool(((kerple.r2 > 0) & (kerple.r2 <= 2)).all())
        True

    Source: Chi et al., *KERPLE*, NeurIPS 2022, power kernel; start of the authors' code: r1 uniform
        in (0, 1), r2 in (0, 2), both at least 0.01.
    Deviations: the authors clamp the parameters in each forward pass, which stops their gradient at
        the ends; softplus and sigmoid keep them inside and learning.
    """

    def _start(self) -> tuple[Tensor, Tensor]:
        r2 = _uniform(self.num_heads, 2.0)
        return _softplus_inverse(_uniform(self.num_heads, 1.0)), torch.logit(
            (r2 - _FLOOR) / (2.0 - _FLOOR)
        )

    @property
    def r2(self) -> Tensor:
        """The exponent, `(H,)`, > 0 and <= 2."""
        return _FLOOR + (2.0 - _FLOOR) * torch.sigmoid(_at_least_single(self.raw_r2))

    def _columns(self, distance: Tensor) -> Tensor:
        r1, r2 = self.r1.unsqueeze(1), self.r2.unsqueeze(1)
        return -r1 * distance.to(r2.dtype) ** r2


def _uniform(num_heads: int, high: float) -> Tensor:
    # not quite up to `high`: the inverse of the sigmoid is infinite at its end
    return (torch.rand(num_heads) * high).clamp(0.01, high - 0.01)


def _softplus_inverse(value: Tensor) -> Tensor:
    return torch.log(torch.expm1(value - _FLOOR))


def _at_least_single(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))
