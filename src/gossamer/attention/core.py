"""Softmax attention: the function, the layer around it, and the cache for decoding."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gossamer.attention.bias import PositionBias
from gossamer.attention.cache import LayerCache
from gossamer.checks import check_choice, check_range, check_shape
from gossamer.errors import ConfigError, DtypeError, ShapeError
from gossamer.positions import Positions

__all__ = ["MultiHeadAttention", "attend"]

# Attention weights, B x H x queries x S, of one block of queries: 16 MiB in float32.
BLOCK_SIZE = 2**22


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | PositionBias | None = None,
    scale: float | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    r"""Softmax attention with bias and masks; a query that sees nothing gives 0, never NaN.

    $$\mathrm{softmax}(s\,q k^\top + b)\,v$$

    A thin layer over PyTorch's scaled-dot-product attention, which picks the fastest kernel.
    With fewer key heads than query heads, each key head serves a group of query heads. A bias that
    would be too large is given as a `PositionBias`: then attention goes over blocks of queries,
    each with its own rows of bias and mask, and makes them again for the gradient.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: Boolean, True = takes part. Default all.
        bias: Added to the logits, a tensor or a `PositionBias`; may need gradients. Default none.
        scale: Factor s on `q k^T`. Default `1 / sqrt(D)`.
        causal: Query i sees keys up to i + S - T: the last query sees all. Default false.
        dropout: Share of the weights set to 0. Range: 0 to 1. Default 0.

    Shape:
        - q: `(B, H, T, D)`; k: `(B, H_kv, S, D)`; v: `(B, H_kv, S, D_v)`, H a multiple of H_kv.
        - mask: broadcasts to `(B, H, T, S)`; bias: `(1 or B, 1 or H, T, S)`.
        - output: `(B, H, T, D_v)`.

    Raises:
        ShapeError: If heads, keys or values do not fit.

    Example:
        >>> q = torch.randn(1, 2, 3, 4)
        >>> attend(q, q, q, torch.zeros(3, 3, dtype=torch.bool)).abs().sum().item()
        0.0

    Source: Vaswani et al., *Attention Is All You Need*, NeurIPS 2017, eq. 1.
    Deviations: rows that see nothing give 0 with zero gradient.
    """
    check_heads(q, k, v)
    if isinstance(bias, PositionBias):
        return _attend_by_blocks(q, k, v, mask, bias, scale=scale, causal=causal, dropout=dropout)
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    if causal and mask is None and bias is None and q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, scale=scale
        )
    if causal and q.shape[2] > 1:
        triangle = causal_mask(q.shape[2], k.shape[2], device=q.device)
        mask = triangle if mask is None else mask & triangle
    seen = None
    if mask is not None:
        check_mask(mask)
        seen = mask.any(-1, keepdim=True)
        mask = (
            mask | ~seen
        )  # a row of -inf would be NaN in some kernels; such rows are zeroed below
    if bias is not None:
        bias = bias.to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out if seen is None else torch.where(seen, out, 0.0)


def _attend_by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: PositionBias,
    *,
    scale: float | None,
    causal: bool,
    dropout: float,
) -> Tensor:
    """Attend with a few queries at a time, so that no array has T x S numbers."""
    batch, heads, length, _ = q.shape
    num_keys = k.shape[2]
    step = max(1, BLOCK_SIZE // max(1, batch * heads * num_keys))
    learned = bias.learned() if torch.is_grad_enabled() else None

    def block(q: Tensor, k: Tensor, v: Tensor, begin: int, end: int, visible: int) -> Tensor:
        part = mask
        if mask is not None:
            part = mask[..., :visible] if mask.shape[-1] > 1 else mask
            part = part[..., begin:end, :] if mask.dim() > 1 and mask.shape[-2] > 1 else part
        rows = bias.rows(begin, end, visible, learned=learned)
        return attend(q, k, v, part, bias=rows, scale=scale, causal=causal, dropout=dropout)

    parts = []
    for begin in range(0, length, step):
        end = min(begin + step, length)
        # the last query of a block sees this many keys, so the block is causal in its own right
        visible = num_keys - length + end if causal else num_keys
        if visible <= 0:
            parts.append(q.new_zeros(batch, heads, end - begin, v.shape[-1]))
            continue
        inputs = (q[:, :, begin:end], k[:, :, :visible], v[:, :, :visible], begin, end, visible)
        if learned is not None:
            keep = dropout > 0.0
            out = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=keep)
        else:
            out = block(*inputs)
        parts.append(out)
    return torch.cat(parts, dim=2)


def causal_mask(num_queries: int, num_keys: int, *, device: torch.device | None = None) -> Tensor:
    """Return the boolean `(T, S)` mask in which the last query sees every key.

    Example:
        >>> causal_mask(2, 3).tolist()
        [[True, True, False], [True, True, True]]
    """
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(
        num_keys - num_queries
    )


def check_mask(mask: Tensor) -> None:
    """Check that a mask is boolean.

    Raises:
        DtypeError: If it is not.
    """
    if mask.dtype != torch.bool:
        raise DtypeError(
            f"mask must be boolean, True = takes part; got {mask.dtype}. Use mask.bool()."
        )


def check_heads(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Check the shapes of queries, keys and values against each other.

    Raises:
        ShapeError: If heads, keys or values do not fit.
    """
    for name, x in (("q", q), ("k", k), ("v", k if v is None else v)):
        if x.dim() != 4:
            raise ShapeError(
                f"{name} must have the shape (batch, heads, length, head_dim); got "
                f"{tuple(x.shape)}. "
                f"Split the heads of {name} and move them before the length."
            )
    if v is not None:
        check_shape(v, (q.shape[0], k.shape[1], k.shape[2], None), "v")
    check_shape(k, (q.shape[0], None, None, q.shape[3]), "k")
    if q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"the heads of q must be a multiple of those of k and v; got {q.shape[1]} and "
            f"{k.shape[1]}. "
            "Change num_heads or num_kv_heads."
        )


class MultiHeadAttention(nn.Module):
    """Projections around `attend`, with any head size and grouped keys.

    Args:
        dim: Model width M.
        num_heads: Query heads H. Range: >= 1.
        head_dim: Width D of a query or key head. Default `dim // num_heads`.
        value_dim: Width of a value head. Default `head_dim`.
        num_kv_heads: Key and value heads; a divisor of `num_heads`. Default `num_heads`.
        bias: Biases in the four projections. Default false.
        dropout: On the attention weights, in training. Range: 0 to 1. Default 0.
        out_norm: Normalisation of each head's output before the output projection: `"none"`,
            `"layer"` or `"rms"`. Default `"none"`.
        scale: Factor on the logits, `None` for `1 / sqrt(head_dim)`. With 1, the query projection
            starts smaller by `sqrt(head_dim)`, so that logits start alike but learn faster under
            Adam, as in T5. Default `None`.

    Shape:
        - x and output: `(B, T, M)`.
        - mask: broadcasts to `(B, H, T, S)`, True = takes part.

    Raises:
        ConfigError: If a size does not fit another.

    Example:
        >>> MultiHeadAttention(16, 4, num_kv_heads=2)(torch.randn(1, 5, 16), causal=True).shape
        torch.Size([1, 5, 16])

    Source: Vaswani et al. 2017, section 3.2.2; grouped keys: Ainslie et al., *GQA*, EMNLP 2023;
        `out_norm`: Li et al., *On Vanishing Variance*, 2025; `scale=1`: Raffel et al., *Exploring
        the Limits of Transfer Learning*, JMLR 2020.
    Deviations: none
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        out_norm: str = "none",
        scale: float | None = None,
    ) -> None:
        super().__init__()
        check_range(num_heads, "num_heads", low=1, integer=True)
        check_range(dropout, "dropout", low=0.0, high=1.0)
        check_choice(out_norm, ("none", "layer", "rms"), "out_norm")
        if head_dim is None and dim % num_heads:
            raise ConfigError(
                f"dim must be a multiple of num_heads when head_dim is not given; got {dim} "
                f"and {num_heads}. "
                "Give head_dim or change one of them."
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", head_dim),
            ("value_dim", value_dim),
        ):
            if size is not None:
                check_range(size, name, low=1, integer=True)
        if num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads; got {num_heads} and "
                f"{num_kv_heads}. "
                "Change one of them."
            )
        self.head_dim = head_dim or dim // num_heads
        self.value_dim = value_dim or self.head_dim
        self.dropout = dropout
        self.to_q = nn.Linear(dim, num_heads * self.head_dim, bias=bias)
        self.to_k = nn.Linear(dim, self.num_kv_heads * self.head_dim, bias=bias)
        self.to_v = nn.Linear(dim, self.num_kv_heads * self.value_dim, bias=bias)
        self.to_out = nn.Linear(num_heads * self.value_dim, dim, bias=bias)
        self.scale = scale
        if scale is not None:
            check_range(scale, "scale", low=0.0, open_low=True)
            with torch.no_grad():
                self.to_q.weight /= scale * self.head_dim**0.5
        norms = {"none": nn.Identity, "layer": nn.LayerNorm, "rms": nn.RMSNorm}
        self.out_norm = norms[out_norm](self.value_dim)

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
        """Attend from every token of `x` to `x` and to what the cache holds.

        `positions` changes queries and keys by their `ids`; `bias` is added to the logits (a model
        asks its encoding for it, so that layers which share an encoding share one bias).
        """
        q = self._split(self.to_q(x), self.num_heads)
        k = self._split(self.to_k(x), self.num_kv_heads)
        v = self._split(self.to_v(x), self.num_kv_heads)
        if positions is not None and ids is not None and index is not None:
            q, k = self.rotate(positions, q, k, ids, index)
        if cache is not None:
            k, v = cache.append(k, v)
        out = self.mix(q, k, v, mask, bias=bias, causal=causal, index=index)
        out = self.out_norm(out)
        joined: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return joined

    def rotate(
        self, positions: Positions, q: Tensor, k: Tensor, ids: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys as the encoding changes them, `(B, H, T, D)`."""
        return positions.rotate(q, k, ids, ids, q_index=index)

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
        """Return what each head sees, `(B, H, T, D_v)`: the part that a variant replaces."""
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, mask, bias=bias, scale=self.scale, causal=causal, dropout=dropout)

    @staticmethod
    def _split(x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)  # (B, H, T, D)
