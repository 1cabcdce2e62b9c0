"""Transformer layers, and the plain-value options they are built from."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from gossamer.attention import (
    CrossAttention,
    LinformerAttention,
    MultiHeadAttention,
    ShawAttention,
    SourceKeys,
    SparkAttention,
    SparseAttention,
    TopKAttention,
)
from gossamer.checks import check_choice, check_given, check_keys, check_table
from gossamer.errors import ConfigError
from gossamer.layers import ACTIVATIONS, FeedForward, GatedFeedForward, Residual, SparkFeedForward

__all__ = [
    "CrossBlock",
    "TransformerBlock",
    "build_attention",
    "build_feed_forward",
    "named_options",
]

Options = str | dict[str, Any]

_ATTENTION: dict[str, type[MultiHeadAttention]] = {
    "multi_head": MultiHeadAttention,
    "linformer": LinformerAttention,
    "shaw": ShawAttention,
    "spark": SparkAttention,
    "sparse": SparseAttention,
    "top_k": TopKAttention,
}
_FEED_FORWARD: dict[str, type[nn.Module]] = {"gated": GatedFeedForward, "spark": SparkFeedForward}


def named_options(value: Options, what: str) -> tuple[str, dict[str, Any]]:
    """Split `"name"` or `{"name": ..., option: ...}` into name and options.

    Example:
        >>> named_options({"name": "fire", "share": True}, "positions")
        ('fire', {'share': True})
    """
    if isinstance(value, str):
        return value, {}
    check_table(value, what)
    check_given(value, "name", what)
    if not isinstance(value["name"], str):
        raise ConfigError(f"the name in {what} must be text; got {value['name']!r}. Change it.")
    return value["name"], {key: option for key, option in value.items() if key != "name"}


def build_feed_forward(value: Options, dim: int) -> nn.Module:
    """Build a feed-forward block from a name or a dict of plain values.

    Args:
        value: An activation (`"gelu"`: a plain block with it), `"gated"`, `"spark"`, or a dict such
            as `{"name": "gated", "activation": "gelu", "hidden_dim": 256}` with options of the
            class; `hidden_dim` defaults to 4 times `dim`.
        dim: Model width.

    Example:
        >>> build_feed_forward({"name": "gated", "hidden_dim": 16}, 8)
        GatedFeedForward(
          (gate): Linear(in_features=8, out_features=16, bias=False)
          (up): Linear(in_features=8, out_features=16, bias=False)
          (down): Linear(in_features=16, out_features=8, bias=False)
        )
    """
    name, options = named_options(value, "feed_forward")
    check_choice(name, (*ACTIVATIONS, *_FEED_FORWARD), "feed_forward")
    kind = _FEED_FORWARD.get(name)
    if kind is None:
        check_keys(options, ("hidden_dim", "bias"), "feed_forward")
        return FeedForward(dim, options.pop("hidden_dim", 4 * dim), activation=name, **options)
    check_keys(options, list(inspect.signature(kind).parameters)[1:], "feed_forward")
    return kind(dim, options.pop("hidden_dim", 4 * dim), **options)


def build_attention(
    value: Options | None, dim: int, num_heads: int, *, layer: int = 0
) -> MultiHeadAttention:
    """Build an attention layer from a name or a dict of plain values.

    Args:
        value: `None`, a name (`"multi_head"`, `"linformer"`, `"shaw"`, `"spark"`, `"sparse"`,
            `"top_k"`), or a dict of the class's options such as `{"num_kv_heads": 2}` or `{"name":
            "shaw", "max_distance": 16}`; without a name it is `"multi_head"`.
        dim: Model width.
        num_heads: Attention heads.
        layer: Number of the layer in its model, from 0, for a class that asks for it.

    Example:
        >>> build_attention({"name": "shaw", "max_distance": 2}, 8, 2).key_table.shape
        torch.Size([5, 4])
    """
    if isinstance(value, dict) and "name" not in value:
        value = {"name": "multi_head", **value}
    name, options = named_options("multi_head" if value is None else value, "attention")
    check_choice(name, _ATTENTION, "attention")
    parameters = list(inspect.signature(_ATTENTION[name]).parameters.values())[2:]
    check_keys(options, [p.name for p in parameters if p.name != "layer"], "attention")
    if any(p.name == "layer" for p in parameters):
        options["layer"] = layer
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty:
            check_given(options, parameter.name, f"attention {name!r}")
    return _ATTENTION[name](dim, num_heads, **options)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each inside a residual connection.

    Args:
        dim: Model width.
        num_heads: Attention heads.
        feed_forward: As in `build_feed_forward`.
        attention: As in `build_attention`.
        norm: `"pre"`, `"post"`, `"pre_post"`, or a dict such as
            `{"name": "pre", "kind": "layer", "eps": 1e-5}`.
        layer: Number of the layer in its model, from 0; some kinds of attention differ by it.
        dropout: On the output of attention and feed-forward, in training. Range: 0 to 1. Default 0.

    Shape:
        - x and output: `(B, T, dim)`.

    Example:
        >>> import torch
        >>> TransformerBlock(8, 2)(torch.zeros(1, 3, 8), causal=True).shape
        torch.Size([1, 3, 8])

    Source: Vaswani et al. 2017, figure 1.
    Deviations: none
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        feed_forward: Options = "gelu",
        attention: Options | None = None,
        norm: Options = "pre",
        layer: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        style, norm_options = named_options(norm, "norm")
        check_keys(norm_options, ("kind", "eps"), "norm")
        norm_options["dropout"] = dropout
        self.attention = build_attention(attention, dim, num_heads, layer=layer)
        self.feed_forward = build_feed_forward(feed_forward, dim)
        self.around_attention = Residual(dim, style, **norm_options)
        self.around_feed_forward = Residual(dim, style, **norm_options)

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Apply the layer; mask and options are those of `MultiHeadAttention.forward`."""
        x = self.around_attention(x, lambda y: self.attention(y, mask, **options))
        return self.around_feed_forward(x, self.feed_forward)  # type: ignore[no-any-return]


class CrossBlock(TransformerBlock):
    """A layer that also attends to a source, between attention and feed-forward.

    Args:
        dim: Model width.
        num_heads: Attention heads, to itself and to the source.
        feed_forward: As in `TransformerBlock`.
        attention: To itself, as in `TransformerBlock`; the one to the source is plain.
        norm: As in `TransformerBlock`.
        layer: As in `TransformerBlock`.
        dropout: As in `TransformerBlock`, on the attention to the source too.

    Shape:
        - x and output: `(B, T, dim)`.

    Example:
        >>> import torch
        >>> block = CrossBlock(8, 2)
        >>> source = block.cross_attention.read(torch.zeros(1, 5, 8))
        >>> block(torch.zeros(1, 3, 8), source=source, causal=True).shape
        torch.Size([1, 3, 8])

    Source: Vaswani et al. 2017, figure 1, right.
    Deviations: none
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        feed_forward: Options = "gelu",
        attention: Options | None = None,
        norm: Options = "pre",
        layer: int = 0,
        dropout: float = 0.0,
    ) -> None:
        options: dict[str, Any] = {"norm": norm, "layer": layer, "dropout": dropout}
        super().__init__(dim, num_heads, feed_forward=feed_forward, attention=attention, **options)
        style, norm_options = named_options(norm, "norm")
        self.cross_attention = CrossAttention(dim, num_heads)
        self.around_cross_attention = Residual(dim, style, dropout=dropout, **norm_options)

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, *, source: SourceKeys, **options: Any
    ) -> Tensor:
        """Apply the layer; `source` is what `cross_attention.read` gave."""
        x = self.around_attention(x, lambda y: self.attention(y, mask, **options))
        x = self.around_cross_attention(x, lambda y: self.cross_attention(y, source))
        return self.around_feed_forward(x, self.feed_forward)  # type: ignore[no-any-return]
