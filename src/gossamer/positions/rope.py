"""Rotary position encoding (RoPE) for any integer ids."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import ConfigError
from gossamer.positions.base import Positions, check_ids

__all__ = ["RopePositions"]


class RopePositions(Positions):
    r"""Rotates pairs of query and key coordinates by angles that grow with the position.

    $$\text{angle}_k(p) = s\,p\,\theta^{-2k/D}, \qquad k = 0 \ldots D/2 - 1$$

    The logit then depends on the difference of two positions only. Coordinate `k` is paired with
    `k + D/2`, as Llama- and NeoX-type models do. Angles are float32 in a half-precision model too:
    bfloat16 cannot tell 256 from 257. Position = id - 1; id 0 ("no position") is not rotated. A
    part of a head, of even width, is rotated like a head of that width.

    Args:
        head_dim: Width D of a head. Range: even, >= 2.
        theta: Base of the frequencies. Range: > 1. Default 10000.
        scale: Factor s on the positions; 0.5 interpolates twice the length. Range: > 0. Default 1.

    Shape:
        - q, k: `(B, H, T, D)`; ids: `(B, T)` or `(1, T)`; outputs as the inputs.

    Raises:
        ConfigError: If `head_dim` is odd or an option is out of its range.

    Example:
        >>> q = torch.ones(1, 1, 2, 4); ids = torch.tensor([[1, 2]])
        >>> RopePositions(4).rotate(q, q, ids, ids, q_index=ids - 1)[0][0, 0, 0].tolist()
        [1.0, 1.0, 1.0, 1.0]

    Source: Su et al., *RoFormer*, 2021, eq. 34; position interpolation: Chen et al., 2023.
    Deviations: none
    """

    def __init__(self, head_dim: int, *, theta: float = 10000.0, scale: float = 1.0) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ConfigError(
                "head_dim must be even and >= 2, since coordinates are rotated in pairs; got "
                f"{head_dim}. "
                "Change dim, num_heads or head_dim."
            )
        check_range(theta, "theta", low=1.0, open_low=True)
        check_range(scale, "scale", low=0.0, open_low=True)
        self.head_dim = head_dim
        self.theta = theta
        self.scale = scale

    def rotate(
        self, q: Tensor, k: Tensor, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their own ids."""
        check_ids(q_ids, 1)
        width = q.shape[-1]
        q_angles = self._angles(q_ids, width)
        k_angles = q_angles if k_ids is q_ids else self._angles(k_ids, width)
        return self._turn(q, *q_angles), self._turn(k, *k_angles)

    def _angles(self, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
        positions = (ids - 1).clamp(min=0).to(torch.float32) * self.scale
        # computed here and not kept: a buffer would lose its precision in model.bfloat16()
        exponents = torch.arange(0, width, 2, device=ids.device).float() / width
        angles = positions[:, None, :, None] * self.theta**-exponents  # (B, 1, T, D/2)
        return angles.cos(), angles.sin()

    @staticmethod
    def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        """Show the options."""
        return f"head_dim={self.head_dim}, theta={self.theta:g}, scale={self.scale:g}"
