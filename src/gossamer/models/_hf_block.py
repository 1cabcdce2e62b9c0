"""Block attention inside models of Hugging Face transformers (extra `hf`)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.attention import BlockLayout, attend, block_attention
from gossamer.attention.block import signal_logits
from gossamer.checks import check_range, check_shape
from gossamer.errors import MissingDependencyError, ShapeError, UnsupportedError
from gossamer.models._hf_families import base_and_family

__all__ = ["block_signals", "register_block_attention"]

# where config.json keeps the offset that a model was trained with, and the paper's
_OFFSET, _DEFAULT_OFFSET = "block_query_offset", 8192


def register_block_attention(name: str = "gossamer_blockrank") -> str:
    """Make block attention known to transformers, as an attention implementation.

    A model that uses it, by `attn_implementation=name` when it is loaded or by
    `model.set_attn_implementation(name)`, must be called with `block_layout=layout` and
    `position_ids=layout.position_ids(offset)[None]`; without a layout it refuses to run. The
    layout stands for the attention mask. All samples of a batch share it. With a cache, tokens
    after the prompt belong to the last block.

    To read scores during a pass, hand `block_signals={layer: None}` over as well: afterwards the
    dict holds that layer's signal logits, which `gossamer.attention.block_scores` turns into
    scores and which have a gradient. `block_signals` is the function for inference.

    Args:
        name: Under which transformers knows it. Default `"gossamer_blockrank"`.

    Returns:
        The name.

    Raises:
        MissingDependencyError: If transformers is not installed.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=14, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model.set_attn_implementation(register_block_attention())
        >>> layout = BlockLayout([3, 2, 2, 1], pad_multiple=1)
        >>> tokens = torch.ones(1, 8, dtype=torch.long)
        >>> ids = layout.position_ids(64)[None]
        >>> model(tokens, position_ids=ids, block_layout=layout).logits.shape
        torch.Size([1, 8, 14])

    Source: Gupta et al., *Scalable In-context Ranking with Generative Models*, NeurIPS 2025.
    Deviations: none
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise MissingDependencyError("transformers", "hf") from None
    AttentionInterface.register(name, _attend_blocks)
    AttentionMaskInterface.register(name, _padding_mask)
    return name


@torch.no_grad()
def block_signals(
    model: nn.Module,
    input_ids: Tensor,
    layout: BlockLayout,
    *,
    layer: int,
    query_offset: int | None = None,
    early_exit: bool = True,
) -> Tensor:
    """Return one layer's signal logits for a prompt, and stop after that layer.

    Args:
        model: A GPT-2-, Llama-, Mistral-, Qwen2- or Qwen3-type model of transformers that uses
            the attention of `register_block_attention`.
        input_ids: The prompt in the slots of the layout.
        layout: Its blocks.
        layer: 0-based number of the layer. Range: 0 to layers - 1. The paper reads layer 20 of 32.
        query_offset: Position of the last block, that of training. Default
            `model.config.block_query_offset` where that is set, else 8192.
        early_exit: Leave out the layers after it; the logits are the same. Default true.

    Shape:
        - input_ids: `(B, T)`, T `layout.num_tokens`.
        - output: `(B, H, signals, tokens of documents)`, for `block_scores`.

    Raises:
        UnsupportedError: If the model is of another type or uses another attention.
        ConfigError: If there is no such layer, or positions go beyond the model's.
        ShapeError: If the prompt does not have the layout's slots.

    Example:
        >>> from gossamer.attention import block_scores
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(vocab_size=14, hidden_size=16, intermediate_size=32,
        ...     num_hidden_layers=4, num_attention_heads=2)
        >>> model = LlamaModel(config).eval()
        >>> model.set_attn_implementation(register_block_attention())
        >>> layout = BlockLayout([3, 2, 2, 1], pad_multiple=1)
        >>> tokens = torch.ones(1, 8, dtype=torch.long)
        >>> logits = block_signals(model, tokens, layout, layer=2, query_offset=64)
        >>> block_scores(logits, layout)
        tensor([[0.5000, 0.5000]])

    Source: Gupta et al., NeurIPS 2025, section 4.
    Deviations: none
    """
    base, family = base_and_family(model)
    layers = base.get_submodule(family.layers)
    check_range(layer, "layer", low=0, high=len(layers) - 1, integer=True)
    check_shape(input_ids, (None, layout.num_tokens), "input_ids")
    if query_offset is None:
        query_offset = getattr(base.config, _OFFSET, _DEFAULT_OFFSET)
    ids = layout.position_ids(
        query_offset,
        max_position=getattr(base.config, "max_position_embeddings", None),
        device=input_ids.device,
    )
    found: dict[int, Tensor | None] = {layer: None}
    part = _first_layers(base, family.layers, layer + 1) if early_exit else base
    options = {"block_layout": layout, "block_signals": found, "use_cache": False}
    part(input_ids, position_ids=ids[None].expand(len(input_ids), -1), **options)
    logits = found[layer]
    if logits is None:
        raise UnsupportedError(
            "model must use the attention that register_block_attention makes known; got "
            f"{base.config._attn_implementation!r}. Call "
            "model.set_attn_implementation(register_block_attention())."
        )
    return logits


def _first_layers(base: Any, path: str, count: int) -> Any:
    """Return a model of the first layers that shares everything with the whole one."""
    part = copy.copy(base)
    part._modules = {**base._modules, path: base.get_submodule(path)[:count]}
    return part


def _attend_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    block_layout: BlockLayout | None = None,
    block_signals: dict[int, Tensor | None] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as `block_attention` does, in the shapes of transformers."""
    layout = _checked(module, block_layout, attention_mask, key, dropout, kwargs)
    added = key.shape[2] - layout.num_tokens
    layer = getattr(module, "layer_idx", None)
    if added == 0 and query.shape[2] == key.shape[2]:
        out = block_attention(query, key, value, layout, scale=scaling)
        if block_signals is not None and layer in block_signals:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            block_signals[layer] = signal_logits(query, key, layout, scale=scale)
    elif 0 < query.shape[2] <= added:  # tokens after the prompt, whose keys are in a cache
        real = layout.real(device=key.device)
        sees = torch.cat((real, real.new_ones(added)))[None, None, None]
        out = attend(query, key, value, sees, scale=scaling, causal=True)
    else:
        raise ShapeError(
            f"the prompt must have the layout's {layout.num_tokens} slots; got "
            f"{query.shape[2]} queries and {key.shape[2]} keys. Lay out the whole prompt, an "
            "answer with its last block, and pass it in one piece."
        )
    return out.transpose(1, 2).contiguous(), None


def _checked(
    module: nn.Module,
    layout: BlockLayout | None,
    mask: Tensor | None,
    key: Tensor,
    dropout: float,
    options: dict[str, Any],
) -> BlockLayout:
    """Return the layout, after a look at what block attention cannot do."""
    if layout is None:
        raise UnsupportedError(
            "a model with block attention needs the blocks of its prompt; got no block_layout. "
            "Call it with block_layout=BlockLayout(...), or set another attn_implementation."
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedError(
            "block attention needs a causal language model; got a layer that sees both "
            f"sides, {type(module).__name__}. Use a decoder such as Llama or Mistral."
        )
    window = options.get("sliding_window")
    if window is not None and window < key.shape[2]:
        raise UnsupportedError(
            f"sliding_window must not cut off what the last block sees, {key.shape[2]} tokens; got "
            f"a window of {window}. Use a model without one, or a shorter prompt."
        )
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise UnsupportedError(
                f"block attention is a plain softmax; got a model with {name}. Use another model."
            )
    if dropout > 0.0:
        raise UnsupportedError(
            f"block attention has no dropout; got attention_dropout = {dropout}. Set it to 0."
        )
    if mask is not None:
        if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != 1:
            raise UnsupportedError(
                "attention_mask must be a padding mask, (B, T), since the layout says who sees "
                f"whom; got {tuple(mask.shape)}. Leave it out."
            )
        layout.check_padding(mask[:, 0, 0, : layout.num_tokens])
    return layout


def _padding_mask(
    *, batch_size: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Return the caller's padding mask, `(B, 1, 1, S)`, or nothing where it is all ones."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    check_shape(attention_mask, (batch_size, kv_length), "attention_mask")
    return attention_mask[:, None, None].bool()
