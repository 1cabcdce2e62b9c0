"""What a ranker needs before it ranks: model and tokenizer, the layer to read, checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError, MissingDependencyError
from gossamer.files import read_json
from gossamer.models import model_folder
from gossamer.retrieval._ranker_model import check_servable, num_layers, unwrapped
from gossamer.retrieval._ranking_prompt import RankingTemplate

__all__ = ["cache_settings", "layer_of", "load_ranker"]

# config.json may keep the layer that a model was trained to be read at under this name
_LAYER_KEY, _LAYER_SHARE = "block_rank_layer", 0.62
_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLED = 64  # values of each parameter


def load_ranker(
    folder_or_model: str | os.PathLike[str] | Any,
    *,
    dtype: str | None = None,
    device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """Return a causal language model in evaluation mode, and its tokenizer.

    Args:
        folder_or_model: A folder, `packaged:NAME`, or a model whose config names its folder.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`. Default float32 on a CPU, elsewhere that
            of the file.
        device: Where it goes. Default the CPU, or where the model is.

    Raises:
        DataError: If the folder does not hold them.
        UnsupportedError: If the model is none to rank with.
        MissingDependencyError: If transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise MissingDependencyError("transformers", "hf") from None
    if dtype is not None:
        check_choice(dtype, _DTYPES, "dtype")
    if isinstance(folder_or_model, torch.nn.Module):
        model: Any = folder_or_model
        tokenizer = _loaded(AutoTokenizer, _existing(model.config.name_or_path))
        if dtype is not None:
            model = model.to(getattr(torch, dtype))
    else:
        folder = _existing(folder_or_model)
        tokenizer = _loaded(AutoTokenizer, folder)
        check_servable(_Named(_loaded(AutoConfig, folder), folder))
        on_cpu = device is None or torch.device(device).type == "cpu"
        chosen = dtype or ("float32" if on_cpu else "auto")
        model = _loaded(AutoModelForCausalLM, folder, dtype=chosen)
    return (model if device is None else model.to(device)).eval(), tokenizer


def _existing(named: str | os.PathLike[str]) -> Path:
    folder = model_folder(named)
    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder} must hold a causal language model of transformers with config.json; it does "
            "not. Give the folder of a model on this machine, or packaged:smollm2."
        )
    config = read_json(folder / "config.json", "Copy all files of the model.")
    if "model_type" not in config:
        raise DataError(
            f"{folder} must hold a causal language model of transformers; got "
            f"{config.get('model', 'a config.json without model_type')!r}. Give another folder, or "
            "packaged:smollm2; a retriever searches: gossamer retrieve DATA --model FOLDER."
        )
    return folder


def _loaded(kind: Any, folder: Path, **options: Any) -> Any:
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise DataError(
            f"{folder} must hold a causal language model and its tokenizer; got: {first} Copy all "
            "files of the model."
        ) from None


def layer_of(model: Any, layer: int | str) -> int:
    """Return the layer to read.

    Raises:
        ConfigError: If the model has no such layer.
    """
    count = num_layers(model)
    if layer == "auto":
        trained = getattr(unwrapped(model).config, _LAYER_KEY, None)
        layer = min(round(_LAYER_SHARE * count), count - 1) if trained is None else int(trained)
    if isinstance(layer, str):
        raise ConfigError(f"layer must be a number from 0 or 'auto'; got {layer!r}. Change it.")
    check_range(layer, "layer", low=0, high=count - 1, integer=True)
    return layer


def cache_settings(model: Any, template: RankingTemplate, layer: int) -> dict[str, Any]:
    """Return what the cached states of documents depend on, as plain values."""
    frame = [template.instruction_tokens(), template.document_tokens(["a b"], [10])[0]]
    return {
        "model": _weights_digest(model),
        "layer": layer,
        "prompt": hashlib.blake2b(repr(frame).encode(), digest_size=8).hexdigest(),
        "max_document_length": template.max_document_length,
    }


class _Named:
    """A configuration that stands for its model, before that is loaded."""

    def __init__(self, config: Any, folder: Path) -> None:
        config.name_or_path = str(folder)
        self.config = config


def _weights_digest(model: Any) -> str:
    """Return a checksum of some of each parameter's values."""
    made = hashlib.blake2b(digest_size=8)
    for name, parameter in unwrapped(model).base_model.named_parameters():
        step = max(1, parameter.numel() // _SAMPLED)
        some = parameter.detach().flatten()[::step].float().cpu()
        made.update(f"{name} {tuple(parameter.shape)}".encode())
        made.update(some.numpy().tobytes())
    return made.hexdigest()
