"""From the name of a model to a dual encoder, and from texts to an index of their vectors."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.files import read_json
from gossamer.models import DualEncoder, TextEncoder, model_folder
from gossamer.progress import progress
from gossamer.retrieval.dense import DenseIndex

__all__ = ["checksum_of", "index_texts", "load_retriever"]

_SHARD = 4096  # texts that an interruption costs at most


def load_retriever(model: str | os.PathLike[str]) -> DualEncoder:
    """Load a dual encoder by the name that a user gives.

    Args:
        model: A folder that `gossamer train-retriever` or `DualEncoder.save_pretrained` wrote, a
            folder with an encoder of transformers, or `packaged:minilm`. Pooling and length of a
            folder of sentence-transformers are read; without them, mean pooling and 128 tokens.

    Raises:
        DataError: If the folder holds no such model.
        MissingDependencyError: Without transformers (extra `hf`), for an encoder of it.
        UnsupportedError: If it pools otherwise, has further layers, or asks for prompts.

    Example:
        >>> import tempfile
        >>> from gossamer.models import BagEncoder
        >>> folder = tempfile.mkdtemp()
        >>> DualEncoder(BagEncoder(8)).save_pretrained(folder)
        >>> load_retriever(folder)(["a"], ["b", "c"]).shape
        torch.Size([1, 2])

    Source: the folder layout of sentence-transformers, for pooling and length.
    Deviations: none
    """
    folder = model_folder(model)
    config = read_json(
        folder / "config.json",
        "Give a run of `gossamer train-retriever`, a folder of transformers or packaged:minilm.",
    )
    if config.get("model") == "DualEncoder":
        return DualEncoder.from_pretrained(folder)
    if "model_type" not in config:
        raise DataError(
            f"{folder} must hold a dual encoder or an encoder of transformers; got "
            f"{config.get('model', 'neither')!r}. Train one: gossamer train-retriever DATA."
        )
    if str((config.get("architectures") or [""])[0]).endswith("ForCausalLM"):
        raise UnsupportedError(
            f"{folder} must hold an encoder of texts; got a causal language model. Use it to rank: "
            "gossamer rank DATA --run run.trec --model FOLDER."
        )
    options = _sentence_options(folder) if (folder / "modules.json").is_file() else {}
    return DualEncoder(TextEncoder(folder, **options)).eval()


def _sentence_options(folder: Path) -> dict[str, Any]:
    """Return pooling and length of a folder of sentence-transformers."""
    modules = {str(m.get("type", "")).rsplit(".")[-1]: m.get("path", "") for m in _modules(folder)}
    path = folder / modules.get("Pooling", "1_Pooling") / "config.json"
    about = read_json(path, "Copy all files of the model.")
    names = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
    pooling = [
        name for name, key in names.items() if about.get(key) or about.get("pooling_mode") == name
    ]
    if set(modules) - {"Transformer", "Pooling", "Normalize"} or len(pooling) != 1:
        raise UnsupportedError(
            f"{folder} must pool the mean or the first token and have no further layers; got "
            f"{', '.join(modules)} with {about}. Make a DualEncoder of your own encoder."
        )
    prompts = folder / "config_sentence_transformers.json"
    given = (read_json(prompts).get("prompts") or {}) if prompts.is_file() else {}
    if any(given.values()):
        raise UnsupportedError(
            f"{folder} asks for a prompt before each text, which is not added here; got "
            f"{given}. Make a DualEncoder of an encoder that adds it."
        )
    lengths = folder / "sentence_bert_config.json"
    length = read_json(lengths).get("max_seq_length") if lengths.is_file() else None
    return {"pooling": pooling[0], **({"max_length": length} if length else {})}


def _modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / "modules.json"
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        return [dict(module) for module in modules]
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} must be a list of modules; got {error}. Copy all files of the model."
        ) from None


def index_texts(
    model: DualEncoder,
    texts: Mapping[str, str],
    folder: str | os.PathLike[str],
    *,
    name: str = "",
    batch_size: int = 64,
    quiet: bool = False,
) -> DenseIndex:
    """Encode the texts that an index lacks, and add them; an interrupted call is simply repeated.

    Args:
        model: Encodes documents.
        texts: Document id -> text.
        folder: Of the index; a new one is made.
        name: Of the model, for the reader of `meta.json`.
        batch_size: Texts at a time. Range: >= 1. Default 64.
        quiet: Show no progress. Default false.

    Raises:
        ConfigError: If the index holds vectors of another model, or of other settings of it, or a
            number is out of range.
        DataError: If the index holds documents that are not among the texts, or had other texts.

    Example:
        >>> import tempfile
        >>> from gossamer.models import BagEncoder
        >>> model, folder = DualEncoder(BagEncoder(8)), tempfile.mkdtemp()
        >>> index_texts(model, {"a": "red"}, folder)
        DenseIndex(...: 1 vectors of 8 float32)
        >>> len(index_texts(model, {"a": "red", "b": "blue"}, folder))
        2

    Source: one vector for each text, in the order of arrival.
    Deviations: none
    """
    check_range(batch_size, "batch_size", low=1, integer=True)
    index = DenseIndex(folder)
    lost = next((known for known in index.ids if known not in texts), None)
    if lost is not None:
        raise DataError(
            f"the index in {folder} must hold documents of this collection; got {lost!r}, which is "
            "not in it. Give another --index, or delete the folder."
        )
    for ids, checksum in index.shards():
        if checksum and checksum != _digest(texts[known] for known in ids):
            raise DataError(
                f"the index in {folder} must hold vectors of these texts; got others for some of "
                f"{ids[0]!r} to {ids[-1]!r}. Give another --index, or delete the folder."
            )
    about = {"model": name, "weights": checksum_of(model), "settings": _settings(model)}
    differ = [key for key in ("weights", "settings") if index.about.get(key) != about[key]]
    if len(index) and differ:
        raise ConfigError(
            f"the index in {folder} must hold vectors of this model; got those of "
            f"{index.about.get('model') or 'another'}, with other {' and '.join(differ)}. Give "
            "another --index, or delete the folder."
        )
    about = index.about or about
    missing = [known for known in texts if known not in index]
    with progress("encoding", len(missing), quiet=quiet or not missing) as bar:
        for start in range(0, len(missing), _SHARD):
            part = missing[start : start + _SHARD]
            vectors = []
            for begin in range(0, len(part), batch_size):
                batch = [texts[known] for known in part[begin : begin + batch_size]]
                vectors.append(model.encode_documents(batch, batch_size=batch_size))
                bar.update(start + begin + len(batch))
            checksum = _digest(texts[known] for known in part)
            index.add(part, _joined(vectors), about=about, checksum=checksum)
    return index


def _settings(model: DualEncoder) -> dict[str, Any]:
    """Return what vectors depend on beside weights: pooling, length, norm."""
    try:
        return model.describe()
    except ConfigError:  # an encoder of the user's own, known by its weights alone
        return {"normalize": model.normalize}


def _digest(texts: Iterable[str]) -> str:
    """Return a checksum of texts in their order."""
    made = hashlib.blake2b(digest_size=8)
    for text in texts:
        made.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return made.hexdigest()


def _joined(parts: list[Any]) -> Any:
    import torch

    return torch.cat(parts).float().numpy()


def checksum_of(model: DualEncoder) -> str:
    """Return what tells the vectors of one model from those of another: a CRC-32 of its weights."""
    total = 0
    for name, tensor in sorted(model.state_dict().items()):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensor.detach().cpu().float().contiguous().numpy().tobytes(), total)
    return f"{total:08x}"
