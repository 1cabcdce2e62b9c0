"""Keys and values of documents on disk, to serve every query by its last block alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.checks import check_choice
from gossamer.errors import ConfigError, DataError
from gossamer.files import read_json, replacing, write_json
from gossamer.retrieval._streams import PathLike

__all__ = ["CachedDocument", "DocumentCache", "digest_of"]

_NUMPY = {"float16": "float16", "bfloat16": "uint16", "float32": "float32"}
_FORMAT = 1


def digest_of(text: str) -> str:
    """Return a short checksum of a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class CachedDocument(NamedTuple):
    """Where a document is.

    Args:
        row: Its number in the cache, which is its label in the prompt.
        shard: Number of the file.
        begin: First token in it.
        length: Tokens.
        digest: Checksum of its text.
        cut: Whether it was cut at the limit.
    """

    row: int
    shard: int
    begin: int
    length: int
    digest: str
    cut: bool


class DocumentCache:
    """A folder that grows: `states-00000.npy`, `documents-00000.jsonl`, ..., `meta.json`.

    Each `add` writes one shard: the documents' states one after the other, each as
    `(2 * layer + 1, H_kv, tokens, D)`. `meta.json` is written last and says what counts, so that
    an interrupted `add` leaves the cache as it was. Shards are memory-mapped; nothing is
    unpickled. One process may write at a time.

    Args:
        folder: Of the cache; an empty or new one is an empty cache.
        about: What the states depend on; must be that of the cache.
        dtype: `"float16"`, `"bfloat16"` or `"float32"`, for a new cache; the one that is there
            keeps its own where this is `None`. Default float16 for a new one.

    Raises:
        ConfigError: If the cache was made with another model, prompt, layer or precision.
        DataError: If files are missing or do not fit `meta.json`.
    """

    def __init__(
        self, folder: PathLike, about: Mapping[str, Any], *, dtype: str | None = None
    ) -> None:
        if dtype is not None:
            check_choice(dtype, _NUMPY, "dtype of a cache")
        self.folder = Path(folder)
        self.about = dict(about)
        self.dtype = dtype or "float16"
        self.documents: dict[str, CachedDocument] = {}
        self._shape: tuple[int, int, int] | None = None  # 2 * layer + 1, H_kv, D
        self._shards: list[NDArray[Any]] = []
        if (self.folder / "meta.json").exists():
            self._open(dtype)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.documents)

    def __contains__(self, name: object) -> bool:
        """Return whether a document's id is in the cache."""
        return name in self.documents

    def find(self, name: str, text: str) -> CachedDocument | None:
        """Return where a document is, or `None`.

        Raises:
            DataError: If the cache holds another text under this id.
        """
        found = self.documents.get(name)
        if found is not None and found.digest != digest_of(text):
            raise DataError(
                f"document {name!r} must have the text that it had when {self.folder} was made; "
                "got another one. Make the cache anew in an empty folder."
            )
        return found

    def read(self, document: CachedDocument) -> Tensor:
        """Return a document's states, `(2 * layer + 1, H_kv, tokens, D)`."""
        shape = self._shape
        if shape is None:
            raise DataError(f"{self.folder} must hold documents; it is empty. Add some.")
        layers, heads, width = shape
        size = layers * heads * width
        begin = document.begin * size
        flat = self._shards[document.shard][begin : begin + document.length * size]
        kept = torch.from_numpy(np.array(flat))
        if self.dtype == "bfloat16":
            kept = kept.view(torch.bfloat16)
        return kept.view(layers, heads, document.length, width)

    def prefix(self) -> Tensor | None:
        """Return the states of the instruction, where they are kept."""
        path = self.folder / "instruction.npy"
        return torch.from_numpy(np.load(path, allow_pickle=False)) if path.exists() else None

    def keep_prefix(self, states: Tensor) -> None:
        """Keep the states of the instruction, in float32."""
        with replacing(self.folder / "instruction.npy") as temporary, temporary.open("wb") as file:
            np.save(file, states.float().cpu().numpy())

    def add(
        self,
        names: Sequence[str],
        digests: Sequence[str],
        cut: Sequence[bool],
        states: Sequence[Tensor],
    ) -> None:
        """Append documents as one shard; it is on disk, or not at all, when this returns.

        Args:
            names: Ids, new to the cache.
            digests: Checksums of their texts.
            cut: Which of them were cut at the limit.
            states: One tensor for each, `(2 * layer + 1, H_kv, tokens, D)`.

        Raises:
            DataError: If a state is not finite in the precision of the cache.
        """
        kept = [_packed(state, self.dtype) for state in states]
        layers, heads, _, width = states[0].shape
        number = len(self._shards)
        path = self.folder / f"states-{number:05d}.npy"
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, np.concatenate(kept))
        rows = [
            {"id": name, "length": state.shape[2], "digest": digest, "cut": bool(was_cut)}
            for name, digest, was_cut, state in zip(names, digests, cut, states, strict=True)
        ]
        with replacing(self._rows_path(number)) as temporary:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            temporary.write_text(text, encoding="utf-8")
        self._shape = (layers, heads, width)
        self._enter(number, rows)
        write_json(self.folder / "meta.json", self._meta(number + 1))
        self._shards.append(_mapped(path))

    def _meta(self, num_shards: int) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "dtype": self.dtype,
            "num_shards": num_shards,
            "num_documents": len(self.documents),
            "shape": list(self._shape or ()),
            "about": self.about,
        }

    def _rows_path(self, number: int) -> Path:
        return self.folder / f"documents-{number:05d}.jsonl"

    def _enter(self, number: int, rows: Sequence[Mapping[str, Any]]) -> int:
        begin = 0
        for row in rows:
            self.documents[row["id"]] = CachedDocument(
                len(self.documents), number, begin, row["length"], row["digest"], row["cut"]
            )
            begin += row["length"]
        return begin

    def _open(self, dtype: str | None) -> None:
        meta = read_json(self.folder / "meta.json", "Make the cache anew in an empty folder.")
        about = meta.get("about")
        if meta.get("format") != _FORMAT or not isinstance(about, dict):
            raise self._broken("meta.json is of another version")
        differ = [key for key in self.about if about.get(key) != self.about[key]]
        if dtype is not None and meta.get("dtype") != dtype:
            differ.append("dtype")
        if differ:
            first = differ[0]
            mine = dtype if first == "dtype" else self.about[first]
            theirs = meta["dtype"] if first == "dtype" else about.get(first)
            raise ConfigError(
                f"the cache {self.folder} must have been made with the same model and options; "
                f"{', '.join(differ)} differ: {first} is {theirs!r} there and {mine!r} here. Use "
                "another folder."
            )
        self.dtype = meta["dtype"]
        shape = meta.get("shape") or (0, 0, 0)
        self._shape = (shape[0], shape[1], shape[2])
        size = shape[0] * shape[1] * shape[2]
        for number in range(meta["num_shards"]):
            path, rows = self.folder / f"states-{number:05d}.npy", self._rows_path(number)
            if not path.exists() or not rows.exists():
                raise self._broken(f"shard {number} is missing")
            lines = rows.read_text(encoding="utf-8").splitlines()
            tokens = self._enter(number, [json.loads(line) for line in lines])
            shard = _mapped(path)
            if shard.shape != (tokens * size,) or str(shard.dtype) != _NUMPY[self.dtype]:
                raise self._broken(f"{path.name} holds {shard.shape} {shard.dtype}")
            self._shards.append(shard)
        if len(self.documents) != meta["num_documents"]:
            raise self._broken(f"{len(self.documents)} of {meta['num_documents']} documents found")

    def _broken(self, what: str) -> DataError:
        return DataError(
            f"{self.folder} must be a whole cache of documents; {what}. Make it anew in an empty "
            "folder."
        )


def _packed(state: Tensor, dtype: str) -> NDArray[Any]:
    """Return states as they lie on disk; bfloat16, which NumPy lacks, as the bits of integers."""
    kept = state.contiguous().to(getattr(torch, dtype)).cpu()
    if not bool(torch.isfinite(kept).all()):
        raise DataError(
            f"keys and values must be finite in the cache's {dtype}; got some that are not. Use "
            "dtype 'bfloat16' or 'float32', and a model in float32."
        )
    if dtype == "bfloat16":
        kept = kept.view(torch.int16)
    return kept.flatten().numpy().view(_NUMPY[dtype])


def _mapped(path: Path) -> NDArray[Any]:
    try:
        shard: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(
            f"{path} must be a NumPy array; got {error}. Make the cache anew in an empty folder."
        ) from None
    return shard
