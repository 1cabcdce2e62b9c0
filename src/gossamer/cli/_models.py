"""What `--model` and `--index` name: an encoder, a ranker, an index."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli._common import data_folders, silence_loading
from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.files import read_json

if TYPE_CHECKING:
    import torch

    from gossamer.models import DualEncoder
    from gossamer.retrieval import BM25Index, DenseIndex

__all__ = ["check_pair", "load_model", "open_index"]

_DOCUMENTS = ("corpus.jsonl", "corpus.jsonl.gz", "collection.tsv", "collection.tsv.gz")


def load_model(
    name: str, *, device: str = "auto", max_document_tokens: int | None = None
) -> tuple[str, Any]:
    """Return what a model is, `"encoder"` or `"ranker"`, and the model.

    Args:
        name: A folder, or `packaged:NAME`.
        device: Where its weights go, as `--device` names it. Default `"auto"`.
        max_document_tokens: Tokens that are read of a text. Default what its folder says.

    Raises:
        DataError: If the folder holds no model.
        UnsupportedError: If the model is of a kind that cannot be served.
        MissingDependencyError: If the model needs transformers and it is not installed.
    """
    from gossamer.models import BagEncoder, DualEncoder, model_folder
    from gossamer.retrieval import load_retriever
    from gossamer.train import pick_device

    folder = model_folder(name)
    if not folder.is_dir():
        raise DataError(
            f"--model must be the folder of a model, or packaged:NAME; {name} is no folder. Check "
            "the path."
        )
    config = read_json(folder / "config.json", "Give the folder of a model.")
    where = pick_device(device)
    if config.get("model") == "BagEncoder":
        return "encoder", DualEncoder(BagEncoder.from_pretrained(folder).to(where))
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith("ForCausalLM"):
        silence_loading()
        return "ranker", _ranker(folder, where, max_document_tokens)
    known = architecture and not config.get("is_encoder_decoder")
    if known or config.get("model") == "DualEncoder":
        silence_loading()
        encoder = load_retriever(folder).to(where)
        if max_document_tokens is not None:
            _limit(encoder, max_document_tokens)
        return "encoder", encoder
    kind = architecture or config.get("model") or "none"
    raise UnsupportedError(
        f"{folder / 'config.json'} must describe an encoder of texts or a causal language model; "
        f"got {kind!r}. Give another folder, or build the application with create_app."
    )


def _limit(encoder: DualEncoder, max_tokens: int) -> None:
    """Let the encoders that have tokens read that many of a text."""
    from gossamer.models import TextEncoder

    for tower in (encoder.encoder, encoder.document_encoder):
        if isinstance(tower, TextEncoder):
            tower.set_max_length(max_tokens)


def _ranker(folder: Path, device: torch.device, max_tokens: int | None) -> Any:
    from gossamer.retrieval import BlockRanker

    options: dict[str, Any] = {} if max_tokens is None else {"max_document_length": max_tokens}
    return BlockRanker.from_pretrained(folder, device=device, **options)


def open_index(named: Path) -> DenseIndex | BM25Index:
    """Return the vectors of a folder, or BM25 over the documents of a BEIR or MS MARCO folder.

    Args:
        named: The folder; that of documents may lie in GOSSAMER_DATA.

    Raises:
        DataError: If the folder holds neither, or is broken.
    """
    from gossamer.retrieval import BM25Index, DenseIndex, read_texts

    for folder in data_folders(named):
        if (folder / "meta.json").is_file():
            return DenseIndex(folder)
        for name in _DOCUMENTS:
            if (folder / name).is_file():
                return BM25Index(read_texts(folder / name))
    raise DataError(
        "--index must be a folder of DenseIndex with meta.json, or one of documents with "
        f"{', '.join(_DOCUMENTS)}; {named} holds none of them. Check the path."
    )


def check_pair(encoder: Any, index: Any) -> None:
    """Check that an index says that it holds vectors of this encoder, if it says so at all.

    Raises:
        ConfigError: If it names other weights.
    """
    from gossamer.retrieval import DenseIndex
    from gossamer.retrieval.loading import checksum_of

    known = index.about.get("weights") if isinstance(index, DenseIndex) else None
    if known and encoder is not None and known != checksum_of(encoder):
        raise ConfigError(
            "--index must hold vectors of the encoder that --model names; got those of "
            f"{index.about.get('model') or 'another'}. Give that model, or make the index with "
            "this one."
        )
