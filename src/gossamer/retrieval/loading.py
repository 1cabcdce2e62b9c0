"""From the name of a model to a dual encoder, and from texts to an index of their vectors."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError
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
        ConfigError: If the pooling is none of mean and cls.

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
    return DualEncoder(TextEncoder(folder, **_sentence_options(folder))).eval()


def _sentence_options(folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {}
    length, pooling = folder / "sentence_bert_config.json", folder / "1_Pooling" / "config.json"
    if length.is_file():
        options["max_length"] = read_json(length).get("max_seq_length") or 128
    if pooling.is_file():
        modes = [
            key.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens")
            for key, value in read_json(pooling).items()
            if key.startswith("pooling_mode_") and value is True
        ]
        if modes not in (["mean"], ["cls"]):
            raise ConfigError(
                f"pooling in {pooling} must be mean or cls; got {', '.join(modes) or 'none'}. Use "
                "another model."
            )
        options["pooling"] = modes[0]
    return options


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
        ConfigError: If the index holds vectors of another model, or a number is out of range.
        DataError: If the index holds documents that are not among the texts.

    Example:
        >>> import tempfile
        >>> from gossamer.models import BagEncoder
        >>> model, folder = DualEncoder(BagEncoder(8)), tempfile.mkdtemp()
        >>> index_texts(model, {"a": "red"}, folder)
        DenseIndex(...: 1 vectors of 8 float32)
        >>> len(index_texts(model, {"a": "red", "b": "blue"}, folder))
        2

    Source: one vector for each text, in the order of arrival.
    Deviations: a text that changed under its id is not encoded again.
    """
    check_range(batch_size, "batch_size", low=1, integer=True)
    index = DenseIndex(folder)
    lost = next((known for known in index.ids if known not in texts), None)
    if lost is not None:
        raise DataError(
            f"the index in {folder} must hold documents of this collection; got {lost!r}, which is "
            "not in it. Give another --index, or delete the folder."
        )
    about = {"model": name, "weights": checksum_of(model), "normalized": model.normalize}
    if len(index) and index.about.get("weights") != about["weights"]:
        raise ConfigError(
            f"the index in {folder} must hold vectors of this model; got those of "
            f"{index.about.get('model') or 'another'}. Give another --index, or delete the folder."
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
            index.add(part, _joined(vectors), about=about)
    return index


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
