"""A larger head size for a trained layer or model that computes the same."""

from __future__ import annotations

import copy
import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossamer.attention.core import MultiHeadAttention
from gossamer.checks import check_range
from gossamer.errors import ConfigError, UnsupportedError
from gossamer.positions import Positions

__all__ = ["expand_heads"]

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def expand_heads(module: M, head_dim: int) -> M | MultiHeadAttention:
    r"""Return a copy with larger heads that computes the same, to train on from there.

    New coordinates of queries and columns of the output projection are 0; those of keys and values
    start as in a new layer, so that the zeros get gradients. Query weights are multiplied by
    $\sqrt{d_{new} / d_{old}}$, since the scale of the logits is $1 / \sqrt{d}$ (a layer with a
    fixed `scale` keeps it, and its queries).

    Args:
        module: A `MultiHeadAttention`; an `nn.MultiheadAttention`, which becomes a
            `MultiHeadAttention` for `(B, T, M)` with its mask True = takes part; or a model that
            holds some of the former, such as `Decoder`, whose configuration is kept in step.
        head_dim: New size of query and key heads, and of value heads unless a norm sits on them or
            they have a size of their own. Range: at least the present size.

    Raises:
        ConfigError: If `head_dim` is smaller than a present one.
        UnsupportedError: If there is no attention that is known, or positions are rotary: they
            would pair other coordinates.

    Example:
        >>> layer, x = MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
        >>> wide = expand_heads(layer, 32)
        >>> wide.head_dim, torch.allclose(wide(x), layer(x), atol=1e-6)
        (32, True)

    Source: Bhojanapalli et al., *Low-Rank Bottleneck in Multi-head Attention Models*, ICML 2020,
        section 3 (the fixed head size); growing a trained layer is an addition.
    Deviations: the paper trains the larger heads from the start.
    """
    check_range(head_dim, "head_dim", low=1, integer=True)
    if isinstance(module, nn.MultiheadAttention):
        return _expanded(_converted(module), head_dim)
    if isinstance(module, MultiHeadAttention):
        return _expanded(module, head_dim)
    made = copy.deepcopy(module)
    _check_model(made)
    grown: dict[int, MultiHeadAttention] = {}  # a layer that is used twice stays one
    for name, child in list(made.named_modules(remove_duplicate=False)):
        if isinstance(child, MultiHeadAttention):
            if id(child) not in grown:
                grown[id(child)] = _expanded(child, head_dim)
            made.set_submodule(name, grown[id(child)])
    config: Any = getattr(made, "config", None)
    if isinstance(config, dict) and "attention" in config:
        value_dim = next(iter(grown.values())).value_dim
        sizes = {"head_dim": head_dim, "value_dim": value_dim}
        config["attention"] = {**(config["attention"] or {}), **sizes}
    return made


def _expanded(old: MultiHeadAttention, head_dim: int) -> MultiHeadAttention:
    if type(old) is not MultiHeadAttention:
        raise UnsupportedError(
            "module must be a plain MultiHeadAttention, whose heads are known to be free in size; "
            f"got {type(old).__name__}. Build a new layer with the size."
        )
    if head_dim < old.head_dim:
        raise ConfigError(
            f"head_dim must be at least the present size, {old.head_dim}; got {head_dim}. A "
            "smaller one cannot compute the same: train a new layer."
        )
    norm = {nn.LayerNorm: "layer", nn.RMSNorm: "rms"}.get(type(old.out_norm), "none")
    grows = norm == "none" and old.value_dim == old.head_dim
    new = MultiHeadAttention(
        old.to_q.in_features,
        old.num_heads,
        head_dim=head_dim,
        value_dim=head_dim if grows else old.value_dim,
        num_kv_heads=old.num_kv_heads,
        bias=old.to_q.bias is not None,
        dropout=old.dropout,
        out_norm=norm,
        scale=old.scale,
    )
    gain = math.sqrt(head_dim / old.head_dim) if old.scale is None else 1.0
    nn.init.zeros_(new.to_q.weight)
    nn.init.zeros_(new.to_out.weight)
    _copy_rows(old.to_q, new.to_q, old.num_heads, gain)
    _copy_rows(old.to_k, new.to_k, old.num_kv_heads)
    _copy_rows(old.to_v, new.to_v, old.num_kv_heads)
    columns = old.to_out.weight.view(-1, old.num_heads, old.value_dim)
    new.to_out.weight.view(-1, old.num_heads, new.value_dim)[..., : old.value_dim] = columns
    if old.to_out.bias is not None:
        new.to_out.bias.copy_(old.to_out.bias)
    new.out_norm.load_state_dict(old.out_norm.state_dict())
    new.train(old.training)
    return new.to(old.to_q.weight)


def _copy_rows(old: nn.Linear, new: nn.Linear, heads: int, gain: float = 1.0) -> None:
    """Copy the rows of each head to the first rows of the new head; new biases are 0."""
    parts: list[tuple[Tensor, Tensor]] = [(old.weight, new.weight)]
    if old.bias is not None:
        nn.init.zeros_(new.bias)
        parts.append((old.bias, new.bias))
    for before, after in parts:
        width = before.shape[1:]
        rows = before.view(heads, -1, *width)
        after.view(heads, -1, *width)[:, : rows.shape[1]] = gain * rows


def _converted(old: nn.MultiheadAttention) -> MultiHeadAttention:
    if old.in_proj_weight is None or old.bias_k is not None or old.add_zero_attn:
        raise UnsupportedError(
            "module must be an nn.MultiheadAttention with equal widths of queries, keys and values "
            f"and without bias_k and add_zero_attn; got {old}. Build a MultiHeadAttention instead."
        )
    biased = old.in_proj_bias is not None
    new = MultiHeadAttention(old.embed_dim, old.num_heads, bias=biased, dropout=old.dropout)
    for index, part in enumerate((new.to_q, new.to_k, new.to_v)):
        rows = slice(index * old.embed_dim, (index + 1) * old.embed_dim)
        part.weight.copy_(old.in_proj_weight[rows])
        if biased:
            part.bias.copy_(old.in_proj_bias[rows])
    new.to_out.weight.copy_(old.out_proj.weight)
    if biased:
        new.to_out.bias.copy_(old.out_proj.bias)
    new.train(old.training)
    return new.to(old.in_proj_weight)


def _check_model(model: nn.Module) -> None:
    if not any(isinstance(m, MultiHeadAttention) for m in model.modules()):
        names = {type(m).__name__ for m in model.modules()}
        found = ", ".join(sorted(n for n in names if "ttention" in n)) or type(model).__name__
        raise UnsupportedError(
            f"module must be or hold a MultiHeadAttention of this library; got {found}. "
            "Expand an nn.MultiheadAttention by itself."
        )
    for part in model.modules():
        if isinstance(part, Positions) and type(part).rotate is not Positions.rotate:
            raise UnsupportedError(
                "module must have positions that leave queries and keys as they are; got "
                f"{type(part).__name__}, which would pair other coordinates in a larger head. "
                "Train a new model with the size."
            )
