"""The attention maps of a folder: a run of `gossamer train`, or a model of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gossamer.attention import AttentionMaps, capture_attention
from gossamer.errors import DataError, MissingDependencyError, UnsupportedError
from gossamer.files import read_json

__all__ = ["read_maps"]

# most tokens that an encoder-decoder model writes
_MOST_TOKENS = 32
# what config.json says of a model to which add_positions gave its positions by name
_POSITIONS = "gossamer_positions"


def read_maps(
    folder: Path, text: str, *, layers: list[int] | None, device: torch.device
) -> AttentionMaps:
    """Run the model of a folder on a text and return its attention maps with tokens.

    Raises:
        DataError: If the folder holds no such model, or the text is empty or cannot be read.
        UnsupportedError: If the model cannot be shown.
        MissingDependencyError: If the folder needs transformers and it is not installed.
    """
    if not text:
        raise DataError("--text must hold at least one character; got ''. Write a text.")
    if (folder / "config.toml").exists():
        return _of_run(folder, text, layers, device)
    if not folder.is_dir():
        raise DataError(
            f"expected a run folder of `gossamer train` or a folder of transformers; {folder} is "
            "no folder. Check the path."
        )
    config = read_json(
        folder / "config.json", "Give a run folder of `gossamer train` or one of transformers."
    )
    if not config.get("architectures"):
        raise DataError(
            f"{folder / 'config.json'} must name its class under 'architectures', as "
            f"save_pretrained of transformers writes; got {', '.join(config) or 'nothing'}. Give a "
            "run folder of `gossamer train`, or call capture_attention from Python."
        )
    return _of_transformers(folder, config, text, layers, device)


# --- runs of gossamer train ---


def _of_run(
    folder: Path, text: str, layers: list[int] | None, device: torch.device
) -> AttentionMaps:
    from gossamer.errors import UnsupportedError
    from gossamer.models import Encoder, Seq2Seq
    from gossamer.train import load_run

    model, task = load_run(folder)
    if isinstance(model, Seq2Seq):
        raise UnsupportedError(
            f"view shows models of one sequence; {folder} holds an encoder-decoder. Give a run of "
            "a decoder or an encoder."
        )
    model.to(device)
    prompt, ids = (part.to(device) for part in task.prompt(text))
    vocab = task.vocab
    if isinstance(model, Encoder):
        tokens = torch.full(ids.shape[:1], task.pad, device=device)
        tokens[: len(prompt)] = prompt
        blank = tokens == task.pad
        with torch.no_grad():
            best = model(tokens[None], ids[None])[0].argmax(-1)
        produced = best[blank]
        # a blank is shown with what the model puts there
        labels = [
            f"?{vocab[int(b)]}" if is_blank else vocab[int(t)]
            for t, b, is_blank in zip(tokens, best, blank, strict=True)
        ]
    else:
        room = len(ids) - len(prompt)
        produced = model.generate(prompt[None], ids[None], max_new_tokens=room, eos=task.eos)[0]
        # the last token is said and never read
        tokens = torch.cat((prompt, produced[:-1]))
        ids = ids[: len(tokens)]
        labels = [vocab[int(token)] for token in tokens]
    inputs = {"tokens": tokens[None], "position_ids": ids[None]}
    maps = capture_attention(model, inputs, layers=layers)
    about = {
        "model": f"{type(model).__name__} in {folder}",
        "query": text,
        "answer": task.decode(produced.cpu()) or "(nothing)",
    }
    return dataclasses.replace(maps, tokens={"input": labels}, about=about)


# --- models of transformers ---


def _of_transformers(
    folder: Path,
    config: dict[str, Any],
    text: str,
    layers: list[int] | None,
    device: torch.device,
) -> AttentionMaps:
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError("transformers", "hf") from None
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name = config["architectures"][0]
    tokenizer = _tokenizer(transformers, folder)
    model = _model(transformers, folder, name, added=_POSITIONS in config)
    model.to(device).eval()
    given = tokenizer(text, return_tensors="pt").to(device)
    inputs: dict[str, Any] = {"input_ids": given["input_ids"]}
    if "token_type_ids" in given and config.get("type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = given["token_type_ids"]
    if not inputs["input_ids"].numel():
        raise DataError(f"--text must hold at least one token; got {text!r}. Write a text.")
    _check_length(tokenizer, model.config, inputs["input_ids"].shape[1])
    tokens = {"input": _labels(tokenizer, inputs["input_ids"][0])}
    about = {"model": f"{name} in {folder}", "text": text}
    if model.config.is_encoder_decoder:
        written = _write(model, inputs, name)
        inputs["decoder_input_ids"] = written
        tokens["output"] = _labels(tokenizer, written[0])
        about["written"] = tokenizer.decode(written[0], skip_special_tokens=True) or "(nothing)"
    maps = capture_attention(model, inputs, layers=layers)
    return dataclasses.replace(maps, tokens=tokens, about=about)


def _tokenizer(transformers: Any, folder: Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} must hold the model's tokenizer; it cannot be loaded "
            f"({_first_line(error)}). Save it there: tokenizer.save_pretrained({str(folder)!r})."
        ) from None


def _model(transformers: Any, folder: Path, name: str, *, added: bool) -> Any:
    model_class = getattr(transformers, str(name), None)
    if model_class is None:
        raise UnsupportedError(
            f"the class of {folder / 'config.json'} must be one of transformers "
            f"{transformers.__version__}; got {name!r}. Call capture_attention from Python."
        )
    if added:
        from gossamer.models import load_with_positions

        return load_with_positions(model_class, folder)
    try:
        model, info = model_class.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"{folder} must hold a model of transformers with its weights as safetensors; it "
            f"cannot be loaded ({_first_line(error)}). Copy all files that save_pretrained wrote."
        ) from None
    lost = [key for key in info["unexpected_keys"] if "positions." in key]
    if lost:
        raise UnsupportedError(
            f"{folder} must keep its added positions in config.json; got the weights {lost[0]} of "
            "an encoding that was given as a module. Load it with load_with_positions and call "
            "capture_attention from Python."
        )
    if info["missing_keys"]:
        raise DataError(
            f"{folder} must hold all weights of a {name}; missing: "
            f"{sorted(info['missing_keys'])[0]}. Name under 'architectures' the class that was "
            "saved."
        )
    return model


def _check_length(tokenizer: Any, config: Any, length: int) -> None:
    most = getattr(config, "max_position_embeddings", None) or length
    most = min(most, tokenizer.model_max_length)
    if length > most:
        raise DataError(
            f"--text must be at most {most} tokens long, as the model allows; got {length}. "
            "Shorten it."
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _write(model: Any, inputs: dict[str, Any], name: str) -> Tensor:
    """Return what an encoder-decoder model writes, its start token first."""
    if not model.can_generate():
        raise UnsupportedError(
            "an encoder-decoder model must be able to write, so that its decoder has something to "
            f"read; got {name}. Save it with its head, or call capture_attention from Python."
        )
    written: Tensor = model.generate(
        **inputs, max_new_tokens=_MOST_TOKENS, do_sample=False, num_beams=1
    )
    return written


def _labels(tokenizer: Any, ids: Tensor) -> list[str]:
    """Return the text of each token; the piece of the vocabulary where it is no text alone."""
    pieces: list[str] = tokenizer.convert_ids_to_tokens(ids.tolist())
    labels = []
    for number, piece in zip(ids.tolist(), pieces, strict=True):
        text = tokenizer.decode([number])
        if piece.startswith(("Ġ", "▁")) and not text.startswith(" "):
            text = " " + text  # a decoder drops the space before the first word
        labels.append(piece if not text.strip() or "\ufffd" in text else text)
    return labels
