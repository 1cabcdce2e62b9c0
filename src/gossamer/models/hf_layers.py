"""Other feed-forward blocks and attention layers in decoders of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossamer.attention import MultiHeadAttention
from gossamer.checks import check_range
from gossamer.errors import ConfigError, UnsupportedError
from gossamer.models.transformer import Transformer
from gossamer.positions import Positions, RopePositions

__all__ = ["replace_attention", "replace_feed_forward"]

Model = TypeVar("Model", bound=nn.Module)


def replace_feed_forward(
    model: Model,
    factory: Callable[[nn.Module], nn.Module],
    *,
    layers: Iterable[int] | None = None,
) -> Model:
    """Put another feed-forward block in the place of a decoder's own, in place.

    Args:
        model: A decoder of transformers whose layers have `mlp`, such as Llama, Mistral, Qwen or
            Gemma, any module with such layers, or a model of this library.
        factory: Gets the old block, returns the new one, such as `SparkFeedForward.like`; a second
            call with `lambda block: block.pack()` gives the form for decoding.
        layers: Numbers of the layers, from 0. Default all.

    Returns:
        The same model.

    Raises:
        UnsupportedError: If no layers with `mlp` are found, or several lists of them.
        ConfigError: If a number is no layer, or the factory returns no module.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from gossamer.layers import SparkFeedForward
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, intermediate_size=32, **sizes))
        >>> type(replace_feed_forward(model, SparkFeedForward.like).model.layers[1].mlp).__name__
        'SparkFeedForward'

    Source: the library's own interface.
    Deviations: none
    """
    part = "feed_forward" if isinstance(model, Transformer) else "mlp"
    for layer in _layers(model, part, layers):
        setattr(layer, part, _made(factory, getattr(layer, part)))
    return model


def replace_attention(
    model: Model,
    factory: Callable[[nn.Module], nn.Module],
    *,
    layers: Iterable[int] | None = None,
) -> Model:
    """Put an attention layer of this library in the place of a decoder's own, in place.

    The new layer keeps keys and values in the model's own cache and reads the model's own mask and
    rotary positions; `generate` goes on working. Its weights are new: train it.

    Args:
        model: A decoder of transformers whose layers have `self_attn`, such as Llama or Gemma, with
            plain rotary positions.
        factory: Gets the old layer, returns a `MultiHeadAttention` or a class derived from it, such
            as `SparkAttention`, of the same width.
        layers: Numbers of the layers, from 0. Default all.

    Returns:
        The same model.

    Raises:
        UnsupportedError: If no layers with `self_attn` are found, or several lists of them, or the
            rotary positions are of another kind; at a call, if the model's mask is not one for each
            query, as that of `attn_implementation="sdpa"` or `"eager"` is.
        ConfigError: If a number is no layer, or the factory returns another kind of module.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from gossamer.attention import SparkAttention
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, intermediate_size=32, **sizes))
        >>> model = replace_attention(model, lambda old: SparkAttention(16, 2, k=4), layers=[0])
        >>> model(torch.ones(1, 5, dtype=torch.long)).logits.shape
        torch.Size([1, 5, 9])

    Source: the library's own interface.
    Deviations: none
    """
    for layer in _layers(model, "self_attn", layers):
        old = layer.self_attn
        new = _made(factory, old)
        if not isinstance(new, MultiHeadAttention):
            raise ConfigError(
                f"factory must return a MultiHeadAttention or a class derived from it; got "
                f"{type(new).__name__}. Return one of gossamer.attention."
            )
        layer.self_attn = _AdaptedAttention(new, old)
    return model


def _layers(model: nn.Module, part: str, numbers: Iterable[int] | None) -> list[Any]:
    base = getattr(model, "base_model", model)
    found = [
        module
        for module in base.modules()
        if isinstance(module, nn.ModuleList) and len(module) and hasattr(module[0], part)
    ]
    if not found:
        raise UnsupportedError(
            f"the model must have a list of layers with {part}, as Llama and Gemma have; got "
            f"{type(model).__name__}. Replace the blocks of this model by hand."
        )
    if len(found) > 1:
        raise UnsupportedError(
            f"the model must have one list of layers with {part}; got {len(found)}. Give the part "
            "that holds the right one, such as model.get_decoder()."
        )
    stack = found[0]
    chosen = range(len(stack)) if numbers is None else list(numbers)
    for number in chosen:
        check_range(number, "layers", low=0, high=len(stack) - 1, integer=True)
    return [stack[number] for number in chosen]


def _made(factory: Callable[[nn.Module], nn.Module], old: nn.Module) -> nn.Module:
    new = factory(old)
    if not isinstance(new, nn.Module):
        raise ConfigError(
            f"factory must return a module; got {type(new).__name__}. Return the new block."
        )
    weight = next(old.parameters(), None)
    if weight is not None:
        new.to(weight.device, weight.dtype)
    return new.train(old.training)


class _AdaptedAttention(nn.Module):
    """Speaks the calling convention of transformers around a layer of this library."""

    def __init__(self, layer: MultiHeadAttention, old: Any) -> None:
        super().__init__()
        self.layer = layer
        self.layer_idx = old.layer_idx
        self.positions = _rotary(old.config, layer.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,  # the name before transformers 5.30 or so
        **_: Any,
    ) -> tuple[Tensor, None]:
        length = hidden_states.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=hidden_states.device)[None]
        store = cache if cache is not None else past_key_values
        mask = _checked_mask(attention_mask, length)
        out = self.layer(
            hidden_states,
            mask,
            causal=mask is None,
            positions=self.positions,
            ids=position_ids + 1,
            index=position_ids,
            cache=None if store is None else _SharedCache(store, self.layer_idx),
        )
        return out, None


def _checked_mask(mask: Tensor | None, length: int) -> Tensor | None:
    """Return a model's mask as a boolean one that says what each query sees."""
    if mask is None:
        return None
    if mask.dim() != 4 or mask.shape[2] != length:
        raise UnsupportedError(
            "the mask of the model must say what each query sees, (batch, heads, queries, keys); "
            f"got {tuple(mask.shape)} for {length} queries. Load the model with "
            "attn_implementation='sdpa'."
        )
    return mask if mask.dtype == torch.bool else mask >= 0  # additive: 0 where a key takes part


class _SharedCache:
    """The model's own cache, seen as the cache of one layer."""

    def __init__(self, cache: Any, number: int) -> None:
        self.cache = cache
        self.number = number

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.cache.update(k, v, self.number)
        return k, v


def _rotary(config: Any, head_dim: int) -> Positions:
    """Return the model's own rotary positions for heads of another size."""
    options = getattr(config, "rope_parameters", None) or {}
    kind = options.get("rope_type", "default")
    if "rope_theta" not in options or kind != "default":
        raise UnsupportedError(
            "the model must have plain rotary positions, one rope_theta for all layers; got "
            f"{options or 'none'}. Choose another model or replace its attention by hand."
        )
    return RopePositions(head_dim, theta=float(options["rope_theta"]))
