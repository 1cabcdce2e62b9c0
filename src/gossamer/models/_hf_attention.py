"""Attention with a position encoding as an attention function of transformers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.attention import PositionBias, attend
from gossamer.errors import UnsupportedError
from gossamer.positions import Positions

__all__ = ["ATTENTION", "LAYER", "STATE", "PositionState", "register_attention"]

# the name under which transformers knows the function, of the keyword that carries the state of a
# forward pass down to it, and of the mark that a self-attention module bears
ATTENTION = "gossamer_positions"
STATE = "gossamer_state"
LAYER = "gossamer_layer"


@dataclass(frozen=True)
class PositionState:
    """The positions of one forward pass, the same for all layers.

    It travels through the layers as a keyword, so that a layer which gradient checkpointing runs
    again meets the same state, and two passes at once do not meet.

    Args:
        encodings: One for all layers, or one each.
        biases: One for each encoding; made before the layers, whose checkpoints then see the same
            tensors in both passes.
        q_ids: Ids of the new tokens, `(1 or B, T[, levels])`.
        k_ids: Ids of all tokens, those of a cache first.
        q_index: 0-based index of each new token, `(1 or B, T)`.
    """

    encodings: list[Positions]
    biases: list[Tensor | PositionBias | None]
    q_ids: Tensor
    k_ids: Tensor
    q_index: Tensor


def attend_with_positions(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as `gossamer.attention.attend` does, in the shapes of transformers."""
    bias: Tensor | PositionBias | None = None
    layer: int | None = getattr(module, LAYER, None)
    if layer is not None:  # otherwise it is cross-attention, which has no positions
        query, key, bias = _placed(_state_of(kwargs), layer, query, key)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    mask = attention_mask
    whole = mask is not None and (mask.shape[-2] > 1 or query.shape[2] == 1)
    if mask is not None and mask.dtype != torch.bool:  # the caller's own, to be added
        mask = mask.expand(-1, -1, query.shape[2], -1)
        bias = bias.rows(0, query.shape[2]) if isinstance(bias, PositionBias) else bias
        bias, mask = mask if bias is None else bias + mask, None
    out = attend(
        query,
        key,
        value,
        mask,
        bias=bias,
        scale=scaling,
        causal=is_causal and not whole,
        dropout=dropout,
    )
    return out.transpose(1, 2), None


def _state_of(kwargs: dict[str, Any]) -> PositionState:
    state = kwargs.get(STATE)
    if not isinstance(state, PositionState):
        raise UnsupportedError(
            "an attention layer with added positions must be called through its model, which "
            "hands the position ids down; got a call without them. Call the model itself."
        )
    return state


def _placed(
    state: PositionState, layer: int, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor | PositionBias | None]:
    own = layer if len(state.encodings) > 1 else 0
    # a sliding window has dropped the oldest keys
    first = state.k_ids.shape[1] - key.shape[2]
    k_ids = state.k_ids[:, first:]
    query, key = state.encodings[own].rotate(query, key, state.q_ids, k_ids, q_index=state.q_index)
    bias = state.biases[own]
    if first and isinstance(bias, Tensor):
        bias = bias[..., first:]
    elif first and isinstance(bias, PositionBias):
        bias = dataclasses.replace(bias, k_ids=k_ids)
    return query, key, bias


def _key_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    q_offset: int = 0,
    kv_offset: int = 0,
    **kwargs: Any,
) -> Tensor | None:
    """Return which keys take part, `(B, 1, 1, S)`, or the whole mask where there is more to it.

    The causal triangle is left to `attend`, which makes it by blocks of queries.
    """
    from transformers import masking_utils

    plain = mask_function is masking_utils.bidirectional_mask_function or (
        mask_function is masking_utils.causal_mask_function and q_offset + q_length == kv_length
    )
    if plain and kv_offset == 0:
        if attention_mask is None or bool(attention_mask.all()):
            return None
        if attention_mask.shape == (batch_size, kv_length):
            return attention_mask[:, None, None].bool()
    whole: Tensor = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        q_offset=q_offset,
        kv_offset=kv_offset,
        **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    return whole


def register_attention() -> None:
    """Make the function known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend_with_positions)
    AttentionMaskInterface.register(ATTENTION, _key_mask)
