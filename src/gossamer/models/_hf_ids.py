"""Position ids on their way through a model of transformers, and in its cache."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.attention import position_bias
from gossamer.checks import check_shape
from gossamer.errors import ConfigError, DataError, ShapeError, UnsupportedError
from gossamer.models._hf_attention import ATTENTION, STATE, PositionState
from gossamer.models.transformer import shared_rows
from gossamer.positions import Positions, check_ids

__all__ = ["keep_ids_of_new_cache", "place_tokens"]

# transformers renamed the keyword within version 5
_CACHE_NAMES = ("cache", "past_key_values")


def place_tokens(
    base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: turn ids, mask and cache into the state that the layers read.

    Position ids are those of this library: 1 = first, 0 = no position, `(B or 1, T)` or with
    levels `(B or 1, T, levels)`, of the new tokens only. Without them tokens are counted, padding
    left out. The model itself gets no ids: its own positions are off, and it would take coupled
    ids for several sequences packed into one.
    """
    names = list(inspect.signature(base.forward).parameters)
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    _check_call(base, kwargs)
    encodings = cast("list[Positions]", list(base.positions))  # type: ignore[arg-type]
    rows, length, device = _size(kwargs)
    cache = _dynamic(_cache_of(kwargs))
    past = 0 if cache is None else cache.get_seq_length()
    kept = _kept(cache, past, len(_layers(base)))
    if past and not all(p.cacheable for p in encodings):
        raise UnsupportedError(
            "cached decoding needs a position encoding that ignores the final length; got "
            "length_scale='sequence'. Use length_scale='query' or use_cache=False."
        )
    real, index = _index(kwargs.get("attention_mask"), length, past, kept, device)
    ids = _ids(kwargs, encodings[0], real, index, (rows, length))
    k_ids = ids if kept is None else torch.cat((kept[0], ids.expand(rows, *ids.shape[1:])), 1)
    if cache is not None:
        _keep(cache, ids, index, rows, len(_layers(base)))
    k_ids, index = shared_rows(k_ids), shared_rows(index)
    q_ids = k_ids[:, past:]
    if encodings[0].per_sample:
        q_ids = q_ids.expand(rows, *q_ids.shape[1:])
    _embed(base, kwargs, encodings[0].embed(q_ids))
    heads = base.config.num_attention_heads  # type: ignore[union-attr]
    biases = [
        position_bias(p, q_ids, k_ids, q_index=index, num_heads=heads)  # type: ignore[arg-type]
        for p in encodings
    ]
    kwargs[STATE] = PositionState(encodings, biases, q_ids, k_ids, index)
    if base.gossamer_family.looks_up_ids:  # type: ignore[union-attr]
        # any valid row of a table that adds nothing; without ids the model would make its own,
        # up to the end of its table only
        kwargs["position_ids"] = torch.zeros(1, length, dtype=torch.long, device=ids.device)
    return (), kwargs


def keep_ids_of_new_cache(
    base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Forward hook: give a cache that the model has made itself the ids of what it holds."""
    if _cache_of(kwargs) is not None:
        return
    values = output.values() if hasattr(output, "values") else output
    for value in values:
        if hasattr(value, "get_seq_length") and value.get_seq_length():
            state: PositionState = kwargs[STATE]
            rows = _size(kwargs)[0]
            cache = _dynamic(value)
            _keep(cache, state.q_ids, state.q_index, rows, len(_layers(base)))


def _check_call(base: nn.Module, kwargs: dict[str, Any]) -> None:
    config: Any = base.config
    if config._attn_implementation != ATTENTION:
        raise ConfigError(
            f"the attention implementation of a model with added positions must be {ATTENTION!r}; "
            f"got {config._attn_implementation!r}, which would leave the positions out. "
            f"Call model.set_attn_implementation({ATTENTION!r})."
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "attention weights are not kept by this attention; got output_attentions=True. "
            "Leave it out."
        )


def _size(kwargs: dict[str, Any]) -> tuple[int, int, torch.device]:
    embeds, tokens = kwargs.get("inputs_embeds"), kwargs.get("input_ids")
    if embeds is not None:
        check_shape(embeds, (None, None, None), "inputs_embeds")
        return embeds.shape[0], embeds.shape[1], embeds.device
    if tokens is None:
        raise DataError(
            "input_ids or inputs_embeds must be given; got neither. Pass the tokens as input_ids."
        )
    check_shape(tokens, (None, None), "input_ids")
    return tokens.shape[0], tokens.shape[1], tokens.device


def _index(
    mask: Any,
    length: int,
    past: int,
    kept: tuple[Tensor, Tensor] | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return which new tokens are real, and the index of each, padding not counted."""
    if isinstance(mask, Tensor) and mask.dim() == 2:
        if mask.shape[1] != past + length:
            raise ShapeError(
                f"attention_mask must cover cached and new tokens, {past} + {length}; got "
                f"{mask.shape[1]}. Pass one entry for each token so far."
            )
        real = mask.to(device).bool()
        return real[:, past:], (real.cumsum(1) - 1).clamp(min=0)[:, past:]
    steps = torch.arange(length, device=device)[None]
    start = 0 if kept is None else kept[1][:, -1:] + 1
    return torch.ones_like(steps, dtype=torch.bool), steps + start


def _ids(
    kwargs: dict[str, Any],
    encoding: Positions,
    real: Tensor,
    index: Tensor,
    size: tuple[int, int],
) -> Tensor:
    given: Tensor | None = kwargs.pop("position_ids", None)
    segments = encoding.num_segments
    if given is None:
        if encoding.coupled and not segments:
            raise DataError(
                "position_ids are needed, since this position encoding reads the ids of a task; "
                "got None. Pass position_ids (1 = first, 0 = no position), to generate as well."
            )
        ids = (index + 1) * real
    else:
        ids = given.to(index.device)
        if ids.dim() not in (2, 3) or ids.shape[1] != size[1] or ids.shape[0] not in (1, size[0]):
            raise ShapeError(
                f"position_ids must have one id for each token, (B, T) = {size} or (B, T, levels); "
                f"got {tuple(ids.shape)}. Pass the ids of these tokens only."
            )
    if segments:
        types = kwargs.pop("token_type_ids", None)
        if ids.dim() == 2:
            number = (torch.zeros_like(ids) if types is None else types) + 1
            number = number * real
            shape = (max(len(ids), len(number)), size[1])
            ids = torch.stack((ids.expand(shape), number.expand(shape)), dim=-1)
    check_ids(ids, encoding.levels)
    return shared_rows(ids)


def _embed(base: nn.Module, kwargs: dict[str, Any], added: Tensor | None) -> None:
    if added is None:
        return
    embeds = kwargs.get("inputs_embeds")
    if embeds is None:
        embeds = base.get_input_embeddings()(kwargs.pop("input_ids"))  # type: ignore[operator]
    kwargs["inputs_embeds"] = embeds + added.to(embeds.dtype)


def _layers(base: nn.Module) -> nn.ModuleList:
    return base.get_submodule(base.gossamer_family.layers)  # type: ignore[return-value,union-attr,arg-type]


def _cache_of(kwargs: dict[str, Any]) -> Any:
    return next((kwargs[name] for name in _CACHE_NAMES if kwargs.get(name) is not None), None)


def _dynamic(cache: Any) -> Any:
    """Return the part of a cache that holds self-attention, if it can hold ids as well."""
    from transformers import DynamicCache

    cache = getattr(cache, "self_attention_cache", cache)
    if cache is not None and not isinstance(cache, DynamicCache):
        raise UnsupportedError(
            "added positions need a cache that grows with the tokens, DynamicCache; got "
            f"{type(cache).__name__}. Leave cache_implementation out."
        )
    return cache


def _kept(cache: Any, past: int, num_layers: int) -> tuple[Tensor, Tensor] | None:
    """Return ids `(B, S, levels)` or `(B, S)`, and indices `(B, S)`, of what a cache holds."""
    if past == 0:
        return None
    if len(cache.layers) <= num_layers or not cache.layers[num_layers].is_initialized:
        raise DataError(
            f"the cache must have been filled by this model after add_positions; got {past} "
            "tokens without ids. Start with an empty cache."
        )
    layer = cache.layers[num_layers]
    layer.keys, layer.values = layer.keys[:, :, :past], layer.values[:, :, :past]
    ids = layer.keys[:, 0]
    return (ids[..., 0] if ids.shape[-1] == 1 else ids), layer.values[:, 0, :, 0]


def _keep(cache: Any, ids: Tensor, index: Tensor, rows: int, num_layers: int) -> None:
    """Add ids to a cache as one more layer, so that it is reordered and cut like the others."""
    from transformers.cache_utils import DynamicLayer

    while len(cache.layers) <= num_layers:
        last = len(cache.layers) == num_layers
        cache.layers.append((DynamicLayer if last else cache.layer_class_to_replicate)())
    levels = ids[..., None] if ids.dim() == 2 else ids
    shape = (rows, 1, -1, -1)
    cache.layers[num_layers].update(
        levels[:, None].expand(shape), index[:, None, :, None].expand(shape)
    )
