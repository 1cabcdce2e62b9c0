"""Attention from one sequence to another whose keys and values are made once."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gossamer.attention.core import MultiHeadAttention

__all__ = ["CrossAttention", "SourceKeys"]


class SourceKeys(NamedTuple):
    """Keys and values of a source for one layer.

    Args:
        k: `(B, H_kv, S, D)`.
        v: `(B, H_kv, S, D_v)`.
        mask: `(B, 1, 1, S)`, boolean, True = takes part; `None` for all.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None

    def select(self, rows: Tensor) -> SourceKeys:
        """Return those of some samples, which may repeat."""
        mask = None if self.mask is None else self.mask[rows]
        return SourceKeys(self.k[rows], self.v[rows], mask)


class CrossAttention(MultiHeadAttention):
    """Queries of one sequence over the keys and values of another.

    `read` makes keys and values, which serve any number of calls: several targets of one source,
    or every step of decoding.

    Args:
        dim: Model width M, of both sequences.
        num_heads: Query heads H. Range: >= 1.
        head_dim: As in `MultiHeadAttention`.
        value_dim: As in `MultiHeadAttention`.
        num_kv_heads: As in `MultiHeadAttention`.
        bias: As in `MultiHeadAttention`.
        dropout: As in `MultiHeadAttention`.
        out_norm: As in `MultiHeadAttention`.
        scale: As in `MultiHeadAttention`.

    Shape:
        - x and output: `(B, T, M)`.
        - source, given to `read`: `(B, S, M)`.

    Example:
        >>> import torch
        >>> attention = CrossAttention(8, 2)
        >>> source = attention.read(torch.randn(1, 5, 8))
        >>> attention(torch.randn(1, 3, 8), source).shape
        torch.Size([1, 3, 8])

    Source: Vaswani et al. 2017, section 3.2.3, encoder-decoder attention.
    Deviations: none
    """

    def read(self, source: Tensor, mask: Tensor | None = None) -> SourceKeys:
        """Return keys and values of a source.

        Args:
            source: `(B, S, M)`.
            mask: `(B, S)`, boolean, True = takes part. Default all.
        """
        k = self._split(self.to_k(source), self.num_kv_heads)
        v = self._split(self.to_v(source), self.num_kv_heads)
        return SourceKeys(k, v, None if mask is None else mask[:, None, None, :])

    def forward(self, x: Tensor, source: SourceKeys) -> Tensor:  # type: ignore[override]
        """Attend from every token of `x` to the source."""
        q = self._split(self.to_q(x), self.num_heads)
        options = {"bias": None, "causal": False, "index": None}
        out = self.mix(q, source.k, source.v, source.mask, **options)  # type: ignore[arg-type]
        joined: Tensor = self.to_out(self.out_norm(out).transpose(1, 2).flatten(2))
        return joined
