"""The part of a language model that ranks: its first layers, with an attention of our own.

What is used is a shallow copy that shares all parameters, so that the caller's model keeps its
attention, its configuration and its layers whatever happens during a call.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import MissingDependencyError, UnsupportedError

__all__ = [
    "check_servable",
    "check_window",
    "first_layers",
    "num_layers",
    "registered",
    "resting",
    "unwrapped",
]

# the models of transformers whose layers call their attention in the one way that is used here
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_KINDS = ("gpt2", *_LLAMA_LIKE)
_ALIBI = ("bloom", "mpt", "falcon", "jina_bert")
_ENCODERS = (
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert",
    "mpnet", "nomic_bert", "roberta", "xlm-roberta",
)  # fmt: skip


def unwrapped(model: Any) -> Any:
    """Return the model of transformers inside an adapter of peft, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_servable(model: Any) -> None:
    """Check that a model is a causal decoder whose positions can be given.

    Raises:
        UnsupportedError: If it is none; the message names the model, its type and what works.
    """
    if isinstance(model, (str, os.PathLike)):
        raise UnsupportedError(
            f"model must be a loaded language model; got the name {str(model)!r}. Load it with "
            "AutoModelForCausalLM, or rank with BlockRanker.from_pretrained(FOLDER)."
        )
    config = getattr(unwrapped(model), "config", None)
    kind = getattr(config, "model_type", None)
    if kind in _KINDS:
        check_window(model)
        return
    why = f"got the type {kind!r}"
    if kind in _ENCODERS or getattr(config, "is_encoder_decoder", False):
        why = f"got the type {kind!r}, an encoder that sees both sides"
    elif kind in _ALIBI:
        why = f"got the type {kind!r}, whose ALiBi distances follow the order of tokens"
    raise UnsupportedError(
        f"model {_name(model)} must be a causal decoder of transformers, one of "
        f"{', '.join(_KINDS)}; {why}. Use for example SmolLM2, Qwen3 or Mistral 0.3; encoders rank "
        "as a DualEncoder."
    )


def check_window(model: Any) -> None:
    """Check that no layer sees a sliding window alone.

    Raises:
        UnsupportedError: If one does.
    """
    config = unwrapped(model).config
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ()
    active = getattr(config, "use_sliding_window", True) or "sliding_attention" in types
    positions = getattr(config, "max_position_embeddings", None)
    if window is None or not active or (positions is not None and window >= positions):
        return
    raise UnsupportedError(
        f"model {_name(model)} must let its last block see every document; got sliding_window = "
        f"{window}. Use a model without one, such as Mistral 0.3, or load it with "
        "sliding_window=None."
    )


def num_layers(model: Any) -> int:
    """Return how many layers a model has."""
    return len(_layers(unwrapped(model).base_model))


def first_layers(model: Any, count: int, attention: str, *, read: bool) -> Any:
    """Return a model of the first layers that shares its parameters, without head and last norm.

    Args:
        model: The whole one.
        count: How many layers.
        attention: Name of the attention that they use.
        read: Whether the last of them is only there for its queries and keys.

    Raises:
        UnsupportedError: If a layer's forward was replaced, which would go round the attention.
    """
    base = unwrapped(model).base_model
    config = copy.copy(base.config)
    config._attn_implementation = attention
    layers = [_with_attention(layer, config) for layer in _layers(base)[:count]]
    if read and hasattr(layers[-1], "input_layernorm"):
        layers[-1] = _Reading(layers[-1])
    part = _shallow(base)
    part.config = config
    path, norm = ("layers", "norm") if hasattr(base, "layers") else ("h", "ln_f")
    part._modules.update({path: nn.ModuleList(layers), norm: nn.Identity()})
    part._modules[path].training = base.training
    return part


class _Reading(nn.Module):
    """A layer of which queries and keys are wanted alone: without its feed-forward network."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.attention_type = getattr(layer, "attention_type", "full_attention")

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        states = self.layer.input_layernorm(hidden_states)
        self.layer.self_attn(hidden_states=states, **options)
        return hidden_states


def registered(name: str, function: Any) -> str:
    """Make an attention function known to transformers, with a mask function, and return its name.

    Raises:
        MissingDependencyError: If transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise MissingDependencyError("transformers", "hf") from None
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _no_mask)
    return check_registered(name)


def check_registered(name: str) -> str:
    """Check that an attention has a mask function too: without one masks are lost in silence.

    Raises:
        UnsupportedError: If it has none.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise UnsupportedError(
            f"the attention {name!r} must be registered with its mask function, or transformers "
            "drops masks without a word; got none. Register both, by register_block_attention()."
        )
    return name


@contextmanager
def resting(model: Any) -> Iterator[None]:
    """Turn dropout off and gradients too, and leave the model in the mode in which it came."""
    trained = model.training
    if trained:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if trained:
            model.train()


def _no_mask(*, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    return attention_mask


def _layers(base: Any) -> Any:
    return base.layers if hasattr(base, "layers") else base.h


def _shallow(module: Any) -> Any:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _with_attention(layer: Any, config: Any) -> Any:
    """Return a layer whose attention reads another configuration."""
    name = "self_attn" if "self_attn" in layer._modules else "attn"
    twin = _shallow(layer)
    attention = copy.copy(layer._modules[name])
    if "forward" in vars(twin) or "forward" in vars(attention):
        raise UnsupportedError(
            f"layers must run their own forward; that of {type(layer).__name__} was replaced, as "
            "hooks of device_map do. Load the model without them, on one device."
        )
    attention.config = config
    twin._modules[name] = attention
    return twin


def _name(model: Any) -> str:
    config = getattr(unwrapped(model), "config", None)
    return getattr(config, "name_or_path", "") or type(model).__name__
