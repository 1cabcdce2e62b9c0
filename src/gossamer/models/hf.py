"""Pieces of this library inside models of Hugging Face transformers (extra `hf`)."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossamer.errors import (
    ConfigError,
    DataError,
    MissingDependencyError,
)
from gossamer.files import read_json
from gossamer.models._hf_attention import ATTENTION, LAYER, register_attention
from gossamer.models._hf_families import base_and_family, turn_off
from gossamer.models._hf_generation import positioned_class
from gossamer.models._hf_ids import keep_ids_of_new_cache, place_tokens
from gossamer.models.block import Options, named_options
from gossamer.positions import Positions, build_positions

__all__ = ["add_positions", "load_with_positions"]

Model = TypeVar("Model", bound=nn.Module)

# where config.json keeps an encoding that was given by name
_ENTRY = "gossamer_positions"


def add_positions(model: Model, positions: Positions | Options, *, share: bool = True) -> Model:
    """Give a transformers model another position encoding, in place of its own.

    The model's own positions are turned off: rotations become the identity, tables of positions
    (and of token types, when the encoding carries segments) add nothing and leave the state dict.
    The encoding's parameters become parameters of the model, so that optimisers, `.to()`,
    `state_dict` and `save_pretrained` see them. Biases, rotations and embeddings all work, with
    and without a cache, under padding, gradient checkpointing and `generate`.

    Position ids are those of this library, 1 = first and 0 = no position, with levels
    `(B, T, levels)`. Without them tokens are counted, padding left out; coupled encodings need
    them. With segments the last level is the segment number + 1; `token_type_ids` fill it in.
    `generate(..., position_ids=...)` takes ids of the prompt, which go on by 1, or a function from
    all tokens so far to their ids. What `save_pretrained` wrote is read by `load_with_positions`;
    `from_pretrained` alone would build the plain model and ignore the encoding.

    Args:
        model: A GPT-2-, Llama- (also Mistral, Qwen2, Qwen3), BERT- or RoBERTa-type model of
            transformers; changed in place.
        positions: An encoding built for the model's heads; or a name or dict of plain values as in
            `Decoder`, which `config.json` then keeps.
        share: One encoding for all layers; otherwise one each (of a given one, copies). Default
            true.

    Returns:
        The same model.

    Raises:
        MissingDependencyError: If transformers is not installed.
        UnsupportedError: If the model is of another type; the message names those that work.
        ConfigError: If the encoding does not fit the model, or it has one already.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=14, hidden_size=16, intermediate_size=32,
        ...                      num_hidden_layers=2, num_attention_heads=4)
        >>> model = add_positions(LlamaForCausalLM(config), {"name": "fire", "init_length": 16.0})
        >>> model(torch.tensor([[1, 5, 12]])).logits.shape
        torch.Size([1, 3, 14])

    Source: transformers' attention interface, version 5.
    Deviations: none
    """
    _need_transformers()
    base, family = base_and_family(model)
    config: Any = base.config
    if hasattr(base, "gossamer_family"):
        raise ConfigError(
            f"model must not have added positions yet; got one with {base.positions[0]!r}. "
            "Start from a plain model."
        )
    layers: Any = base.get_submodule(family.layers)
    count = len(layers)
    encodings, entry = _encodings(positions, config, count, share)
    _check_fit(encodings, config)
    register_attention()
    turn_off(base, family, segments=encodings[0].num_segments > 0)
    reference = next(base.parameters())
    base.positions = nn.ModuleList(encodings).to(reference.device, reference.dtype)
    for number, layer in enumerate(layers):
        setattr(layer.get_submodule(family.attention), LAYER, number)
    base.gossamer_family = family
    base.register_forward_pre_hook(place_tokens, with_kwargs=True)
    base.register_forward_hook(keep_ids_of_new_cache, with_kwargs=True)
    model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    if entry is not None:
        setattr(config, _ENTRY, entry)
    if model.can_generate():  # type: ignore[operator]
        model.__class__ = positioned_class(type(model))  # type: ignore[arg-type]
    return model


def load_with_positions(
    model_class: Any,
    folder: str | os.PathLike[str],
    positions: Positions | Options | None = None,
    *,
    share: bool = True,
) -> Any:
    """Load a model that `add_positions` changed and `save_pretrained` wrote.

    Builds the plain model from the folder's config, adds the encoding, reads the weights, and sets
    evaluation mode. Every weight must be there and used. Reads safetensors files only, and nothing
    from the network.

    Args:
        model_class: A class of transformers (`LlamaForCausalLM`, `AutoModelForCausalLM`).
        folder: What `save_pretrained` wrote.
        positions: As given to `add_positions`; not needed where that was a name or a dict.
        share: As given to `add_positions`; not needed where `positions` is not.

    Raises:
        MissingDependencyError: If transformers is not installed.
        ConfigError: If `positions` is needed.
        DataError: If a file is missing or broken, or the weights are those of another model.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=14, n_embd=16, n_layer=1, n_head=2)
        >>> model = add_positions(GPT2LMHeadModel(config), "alibi")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     again = load_with_positions(GPT2LMHeadModel, folder)
        >>> type(again.transformer.positions[0]).__name__
        'AlibiPositions'

    Source: the folder layout of transformers.
    Deviations: none
    """
    _need_transformers()
    from transformers import AutoConfig, GenerationConfig

    path = Path(folder)
    read_json(path / "config.json", "Give a folder that save_pretrained wrote.")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    entry: dict[str, Any] | None = getattr(config, _ENTRY, None)
    if positions is None:
        if entry is None:
            raise ConfigError(
                f"positions are needed, since {path / 'config.json'} does not keep them: they "
                "were given as a module; got None. Pass a module built in the same way."
            )
        positions = {key: value for key, value in entry.items() if key != "share"}
        share = entry["share"]
    build = getattr(model_class, "from_config", model_class)
    model = add_positions(build(config), positions, share=share)
    if config.dtype is not None:
        model = model.to(config.dtype)
    _load_weights(model, path)
    if (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model.eval()


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise MissingDependencyError("transformers", "hf") from None


def _encodings(
    positions: Positions | Options, config: Any, count: int, share: bool
) -> tuple[list[Positions], dict[str, Any] | None]:
    """Return the encodings, and the entry for `config.json` when they were given by name."""
    if isinstance(positions, Positions):
        copies = [copy.deepcopy(positions) for _ in range(0 if share else count - 1)]
        return [positions, *copies], None
    name, options = named_options(positions, "positions")
    share = options.pop("share", share)
    sizes = {
        "dim": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "head_dim": _head_dim(config),
    }
    built = [build_positions(name, **sizes, **options) for _ in range(1 if share else count)]
    return built, {"name": name, **options, "share": share}


def _head_dim(config: Any) -> int:
    given: int | None = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads


@torch.no_grad()
def _check_fit(encodings: list[Positions], config: Any) -> None:
    """Ask for one token, so that sizes which do not fit are found before the model is changed."""
    encoding = encodings[0]
    was_training = encoding.training
    encoding.eval()
    levels = () if encoding.levels == 1 else (encoding.levels,)
    ids = torch.ones(1, 1, *levels, dtype=torch.long)
    index = torch.zeros(1, 1, dtype=torch.long)
    bias = encoding.bias(ids, ids, q_index=index)
    added = encoding.embed(ids)
    encoding.train(was_training)
    width = None if added is None else added.shape[-1]
    found = {
        "num_heads": (None if bias is None else bias.shape[1], config.num_attention_heads),
        "head_dim": (getattr(encoding, "head_dim", None), _head_dim(config)),
        "dim": (width, config.hidden_size),
    }
    for name, (got, expected) in found.items():
        if got not in (None, expected):
            raise ConfigError(
                f"{name} of the position encoding must be that of the model, {expected}; got "
                f"{got}. Build the encoding with {expected}."
            )
    if width is not None and len(encodings) > 1:
        raise ConfigError(
            "an encoding that is added to the embeddings enters once, so share must be true; got "
            "share=False. Leave it out."
        )


def _load_weights(model: Any, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = path / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        files = set(read_json(index)["weight_map"].values())
    weights: dict[str, Tensor] = {}
    try:
        for name in sorted(files):
            weights.update(load_file(path / name))
        result = model.load_state_dict(weights, strict=False)
    except (OSError, SafetensorError, RuntimeError) as error:
        first = str(error).strip().replace("\n", " ")
        raise DataError(
            f"{path} must hold the weights that config.json describes; got: {first}. "
            "Copy all files that save_pretrained wrote."
        ) from None
    model.tie_weights()
    state = model.state_dict()
    read = {state[name].data_ptr() for name in weights if name in state}
    # tied weights are written once
    missing = [name for name in result.missing_keys if state[name].data_ptr() not in read]
    for what, names in (("missing", missing), ("not used", result.unexpected_keys)):
        if names:
            raise DataError(
                f"{path} must hold the weights of this model and encoding; {what}: "
                f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}. "
                "Pass the class and the positions that it was saved with."
            )
