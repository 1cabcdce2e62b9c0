"""Attention to a fixed number of projected keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.attention.bias import PositionBias
from gossamer.attention.cache import LayerCache
from gossamer.attention.core import MultiHeadAttention, attend
from gossamer.checks import check_range
from gossamer.errors import ShapeError, UnsupportedError
from gossamer.positions import Positions

__all__ = ["LinformerAttention"]


class LinformerAttention(MultiHeadAttention):
    r"""Bidirectional attention to P learned mixtures of the keys: cost T x P in place of T x T.

    $$\mathrm{softmax}\!\left(\frac{q\,(E K)^\top}{\sqrt D} + b\right) E V$$

    The bias has one column for each mixture: `DietAbsolutePositions` with `key_length` makes it.
    Padding is left out of the mixtures. For encoders only: a mixture holds the whole sequence, so
    there is no causal form and no cache.

    Args:
        dim: Model width M.
        num_heads: Attention heads H; a divisor of `dim`.
        length: Most tokens. Range: >= 1.
        projection_dim: Mixtures P. Range: >= 1.

    Shape:
        - x and output: `(B, T, M)`, T at most `length`.
        - mask: `(B, 1, 1, T)`, True = takes part; the same for all queries.
        - bias: `(1 or B, H, T, P)`.

    Raises:
        ShapeError: If the input is too long or the bias does not have P columns.
        UnsupportedError: If asked for causal attention, a cache, a mask that differs between
            queries, or an encoding that turns keys by their positions.

    Example:
        >>> layer = LinformerAttention(16, 4, length=64, projection_dim=8)
        >>> layer(torch.randn(1, 50, 16)).shape
        torch.Size([1, 50, 16])

    Source: Wang et al., *Linformer*, 2020, eq. 7; the bias: Chen et al., EMNLP 2021, section 3.4.
    Deviations: one matrix E for keys, values and all heads of a layer (the paper's key-value
        sharing); it starts at N(0, 1/P), as in the paper's theorem 2.
    """

    def __init__(self, dim: int, num_heads: int, *, length: int, projection_dim: int) -> None:
        super().__init__(dim, num_heads)
        check_range(length, "length", low=1, integer=True)
        check_range(projection_dim, "projection_dim", low=1, integer=True)
        self.length = length
        self.num_keys = projection_dim
        self.mixing = nn.Parameter(torch.randn(projection_dim, length) * projection_dim**-0.5)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        bias: Tensor | PositionBias | None = None,
        positions: Positions | None = None,
        ids: Tensor | None = None,
        index: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend from every token to the mixtures."""
        if causal or cache is not None:
            raise UnsupportedError(
                "Linformer attention is bidirectional, since each of its keys holds the whole "
                "sequence; got causal attention or a cache. Use it in an Encoder."
            )
        if positions is not None and type(positions).rotate is not Positions.rotate:
            raise UnsupportedError(
                "Linformer attention mixes keys of all positions, so positions must enter by "
                f"embedding or bias; got {type(positions).__name__}. Use 'learned' or "
                "'diet_absolute' with key_length."
            )
        return super().forward(x, mask, bias=bias)

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
        """Mix keys and values over the length, then attend to the mixtures."""
        length = k.shape[2]
        if length > self.length:
            raise ShapeError(
                f"x must have at most length = {self.length} tokens; got {length}. "
                "Shorten the input or build the layer with a larger length."
            )
        if isinstance(bias, Tensor) and bias.shape[-1] != self.num_keys:
            raise ShapeError(
                f"bias must have one column for each of projection_dim = {self.num_keys} keys; "
                f"got {bias.shape[-1]}. Build the encoding with key_length={self.num_keys}."
            )
        if mask is not None:
            if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != 1:
                raise UnsupportedError(
                    "Linformer attention needs a mask that is the same for all queries, "
                    f"(B, 1, 1, T); got {tuple(mask.shape)}. Pass a padding mask only."
                )
            padded = ~mask.transpose(2, 3)  # (B, 1, T, 1)
            k, v = k.masked_fill(padded, 0.0), v.masked_fill(padded, 0.0)
        mixing = self.mixing[:, :length]
        return attend(q, mixing @ k, mixing @ v, bias=bias)  # keys: (B, H, P, D)
