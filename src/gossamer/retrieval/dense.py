"""Exact search of vectors in blocks, and an index of vectors on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_choice, check_finite, check_range
from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.files import read_json, replacing, write_json
from gossamer.retrieval._search_arrays import search_arrays
from gossamer.retrieval._streams import PathLike
from gossamer.retrieval._tables import Run

__all__ = ["DenseIndex", "search_top_k"]

ENGINES = ("auto", "numpy", "torch", "faiss")
_QUERIES = 1024  # at once


def search_top_k(
    queries: Any, documents: Any, top_k: int, *, block_size: int = 4096, engine: str = "auto"
) -> tuple[Any, Any]:
    r"""Return the `top_k` largest inner products of each query with the documents, exactly.

    Documents are read in blocks, so that a memory-mapped array larger than memory will do; only
    the best so far and one block of scores are held. Equal scores: the lower index first. For
    cosine similarity give vectors of length 1.

    Args:
        queries: Vectors, floating.
        documents: Vectors, floating; also float16 or memory-mapped.
        top_k: How many; cut to the number of documents. Range: >= 1.
        block_size: Documents at once. Range: >= 1. Default 4096.
        engine: What computes: `"numpy"`, `"torch"` or `"faiss"` (extra `retrieval`); the result is
            the same but for rounding. `"auto"` is torch if queries or documents are tensors, on
            the device of the queries, else NumPy. Default `"auto"`.

    Shape:
        - queries: `(Q, M)`.
        - documents: `(N, M)`.
        - scores, indices: `(Q, min(top_k, N))`, best first; float32, or float64 if both inputs
          are.

    Returns:
        Scores and indices of the documents: tensors where the queries are a tensor, else arrays.

    Raises:
        ConfigError: If an option is out of its range.
        ShapeError: If shapes do not fit, or there is no document.
        DataError: If queries, or a score, are not finite.
        MissingDependencyError: For `engine="faiss"` without faiss.

    Example:
        >>> scores, indices = search_top_k([[1.0, 0.0]], [[0.5, 9.0], [2.0, 0.0], [0.0, 1.0]], 2)
        >>> indices.tolist(), scores.tolist()
        ([[1, 0]], [[2.0, 0.5]])

    Source: exact maximum inner product search, the definition.
    Deviations: none
    """
    found = documents if _is_tensor(documents) else np.asanyarray(documents)
    _check_vectors(found, None, "documents")
    check_range(block_size, "block_size", low=1, integer=True)
    return _search(queries, [found], top_k, block_size, engine)


class DenseIndex:
    """Vectors with ids in a folder that grows: `emb-00000.npy`, ..., `ids.txt`, `meta.json`.

    Each `add` writes one shard. `meta.json` is written last and says what counts: an
    interrupted `add` leaves the index as it was, and what it left behind is written over. A job
    that encodes texts goes on where it stopped by leaving out those whose id is `in` the index.
    Shards are memory-mapped; nothing is unpickled. One process may write at a time.

    Args:
        folder: Of the index; an empty or new one is an empty index.

    Raises:
        DataError: If files of the folder are missing or do not fit `meta.json`.

    Example:
        >>> import tempfile
        >>> index = DenseIndex(tempfile.mkdtemp())
        >>> index.add(["d1", "d2"], [[1.0, 0.0], [0.0, 1.0]], about={"model": "toy"})
        >>> DenseIndex(index.folder).search({"q": [0.25, 1.0]}, 1)
        {'q': {'d2': 1.0}}

    Source: memory-mapped NumPy files, one row for each id.
    Deviations: none
    """

    def __init__(self, folder: PathLike) -> None:
        self.folder = Path(folder)
        self.ids: list[str] = []
        self.about: dict[str, Any] = {}
        self.dim = 0
        self.dtype = "float32"
        self.checksums: list[str] = []
        self._shards: list[NDArray[Any]] = []
        self._ids_bytes = 0
        if (self.folder / "meta.json").exists():
            self._open()
        self._known = set(self.ids)

    def __len__(self) -> int:
        """Return the number of vectors."""
        return len(self.ids)

    def __contains__(self, name: object) -> bool:
        """Return whether an id is in the index."""
        return name in self._known

    def __repr__(self) -> str:
        return f"DenseIndex({str(self.folder)!r}: {len(self)} vectors of {self.dim} {self.dtype})"

    def add(
        self,
        ids: Sequence[str],
        vectors: Any,
        *,
        about: Mapping[str, Any] | None = None,
        checksum: str = "",
    ) -> None:
        """Append vectors as one shard; it is on disk, or not at all, when this returns.

        Args:
            ids: Their ids, one line of text each, new to the index.
            vectors: Finite, `(N, M)`, kept as float16 if they are, else as float32; all shards
                of an index alike.
            about: What the vectors are: model, pooling, whether normalised. Plain values; must be
                the same in each call that gives it.
            checksum: Of the texts, kept with the shard. Default none.

        Raises:
            ShapeError: If the number of ids or the width does not fit.
            DataError: If an id is known, empty or has a line end, or a vector is not finite.
            ConfigError: If `about` or the precision differs from what the index holds.
        """
        if isinstance(ids, str):
            raise DataError("ids must be a list of texts; got str. Put a single id in a list.")
        rows = np.asarray(vectors)
        _check_vectors(rows, self.dim or None, "vectors")
        rows = rows if rows.dtype == np.float16 else rows.astype(np.float32)
        if len(rows) != len(ids):
            raise ShapeError(f"vectors must have one row for each of {len(ids)} ids; got "
                             f"{len(rows)}. Give both for the same texts.")  # fmt: skip
        check_finite(rows, "vectors")
        self._check_new(ids)
        self._check_same(about, str(rows.dtype))
        text = "".join(f"{name}\n" for name in ids).encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(len(self._shards))
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, rows, allow_pickle=False)
        with (self.folder / "ids.txt").open("r+b" if self._ids_bytes else "wb") as file:
            file.truncate(self._ids_bytes)
            file.seek(self._ids_bytes)
            file.write(text)
        shards = [*self._shards, np.load(path, mmap_mode="r", allow_pickle=False)]
        known = self.about if about is None else dict(about)
        meta = {
            "dim": rows.shape[1],
            "dtype": str(rows.dtype),
            "shards": [len(shard) for shard in shards],
            "checksums": [*self.checksums, checksum],
            "ids_bytes": self._ids_bytes + len(text),
            "about": known,
        }
        write_json(self.folder / "meta.json", meta)
        # nothing here changes before the files are whole, so that a failed call can be repeated
        self.dim, self.dtype, self.about = rows.shape[1], str(rows.dtype), known
        self._shards, self._ids_bytes = shards, self._ids_bytes + len(text)
        self.checksums = [*self.checksums, checksum]
        self.ids += ids
        self._known |= set(ids)

    def shards(self) -> Iterator[tuple[list[str], str]]:
        """Yield the ids of each shard and the checksum that it was added with."""
        begin = 0
        for shard, checksum in zip(self._shards, self.checksums, strict=True):
            yield self.ids[begin : begin + len(shard)], checksum
            begin += len(shard)

    def search(
        self,
        queries: Mapping[str, Any],
        top_k: int,
        *,
        block_size: int = 4096,
        engine: str = "auto",
    ) -> Run:
        """Return the documents with the largest inner products, for each query.

        Args:
            queries: Query id -> vector, `(M,)`.
            top_k: Most documents for a query. Range: >= 1.
            block_size: Documents at once. Range: >= 1. Default 4096.
            engine: As in `search_top_k`. Default `"auto"`.

        Raises:
            ConfigError: If an option is out of its range.
            ShapeError: If a vector has another width.
            DataError: If the index is empty, or a query is not finite.
        """
        check_range(block_size, "block_size", low=1, integer=True)
        if not self._shards:
            raise DataError(f"{self.folder} must hold vectors to search; it is empty. Add some.")
        if not queries:
            return {}
        asked = np.stack([np.asarray(vector) for vector in queries.values()])
        scores, indices = _search(asked, self._shards, top_k, block_size, engine)
        return {
            query: {self.ids[i]: float(score) for i, score in zip(places, row, strict=True)}
            for query, row, places in zip(queries, scores, indices, strict=True)
        }

    def _open(self) -> None:
        path = self.folder / "meta.json"
        meta = read_json(path)
        try:
            self.dim, self.dtype = int(meta["dim"]), str(meta["dtype"])
            sizes, self._ids_bytes = list(meta["shards"]), int(meta["ids_bytes"])
            self.about = dict(meta["about"])
            self.checksums = [str(one) for one in meta.get("checksums", [""] * len(sizes))]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path} must have dim, dtype, shards, ids_bytes and about; got {error!r}. Build "
                "the index again."
            ) from None
        self._shards = [self._load(number, rows) for number, rows in enumerate(sizes)]
        ids = self.folder / "ids.txt"
        raw = ids.read_bytes()[: self._ids_bytes] if ids.exists() else b""
        self.ids = raw.decode(errors="replace").split("\n")[:-1]
        if len(self.ids) != sum(sizes) or len(raw) != self._ids_bytes:
            raise DataError(
                f"{ids} must hold the {sum(sizes)} ids that meta.json counts; got "
                f"{len(self.ids)}. Build the index again."
            )

    def _load(self, number: int, rows: int) -> NDArray[Any]:
        path = self._path(number)
        try:
            shard: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} must be a NumPy file of numbers; got {error}. Build the index again."
            ) from None
        if shard.shape != (rows, self.dim) or str(shard.dtype) != self.dtype:
            raise DataError(
                f"{path} must hold {rows} x {self.dim} {self.dtype} as meta.json says; got "
                f"{shard.shape} {shard.dtype}. Build the index again."
            )
        return shard

    def _path(self, number: int) -> Path:
        return self.folder / f"emb-{number:05}.npy"

    def _check_new(self, ids: Sequence[str]) -> None:
        seen: set[str] = set()
        for name in ids:
            if not isinstance(name, str) or name.splitlines() != [name]:
                raise DataError(
                    f"ids must be texts of one line; got {name!r}. Change or convert the id."
                )
            if name in self._known or name in seen:
                raise DataError(
                    f"ids must be new to the index and different; got {name!r} again. Leave it "
                    "out, or build another index."
                )
            seen.add(name)

    def _check_same(self, about: Mapping[str, Any] | None, dtype: str) -> None:
        if about is not None and json.loads(json.dumps(dict(about))) != dict(about):
            raise ConfigError(f"about must be plain values; got {about!r}. Use text and numbers.")
        if not self._shards:
            return
        if dtype != self.dtype:
            raise ConfigError(
                f"vectors must be {self.dtype} as those of the index; got {dtype}. Convert them."
            )
        if about is not None and dict(about) != self.about:
            raise ConfigError(
                f"about must say what the index says, {self.about}; got {dict(about)}. Vectors of "
                "different models do not mix: build another index."
            )


def _search(
    queries: Any, shards: Sequence[Any], top_k: int, block_size: int, engine: str
) -> tuple[Any, Any]:
    check_range(top_k, "top_k", low=1, integer=True)
    check_choice(engine, ENGINES, "engine")
    tensor = _is_tensor(queries)
    if engine == "auto":
        engine = "torch" if tensor or any(map(_is_tensor, shards)) else "numpy"
    asked: Any = queries if tensor else np.asarray(queries)
    _check_vectors(asked, shards[0].shape[1], "queries")
    if engine == "torch":
        from gossamer.retrieval._search_torch import search_torch

        found = search_torch(asked, shards, top_k, block_size, _QUERIES)
        return found if tensor else (found[0].cpu().numpy(), found[1].cpu().numpy())
    arrays = [shard.detach().cpu().numpy() if _is_tensor(shard) else shard for shard in shards]
    rows = asked.detach().cpu().numpy() if tensor else asked
    scores, indices = search_arrays(rows, arrays, top_k, block_size, engine, _QUERIES)
    if not tensor:
        return scores, indices
    import torch

    return torch.from_numpy(scores).to(asked.device), torch.from_numpy(indices).to(asked.device)


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor; torch is not loaded to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _check_vectors(vectors: Any, width: int | None, name: str) -> None:
    if vectors.ndim != 2 or 0 in vectors.shape or (width or vectors.shape[1]) != vectors.shape[1]:
        raise ShapeError(
            f"{name} must be vectors, (at least 1, {width or 'any width'}); got "
            f"{tuple(vectors.shape)}. "
            "Give one row for each."
        )
    real = not vectors.is_complex() if _is_tensor(vectors) else vectors.dtype.kind in "fiu"
    if not real:
        raise DataError(f"{name} must be real numbers; got {vectors.dtype}. Convert them.")
