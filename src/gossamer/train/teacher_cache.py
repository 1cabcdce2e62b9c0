"""A teacher's outputs on disk: all logits, or the top k and the rest; interrupted and resumed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.checks import check_range
from gossamer.errors import DataError, ShapeError
from gossamer.files import read_json, replacing, write_json
from gossamer.losses import TopKLogits
from gossamer.measures.variance import evaluating
from gossamer.train._teaching import Given, given

__all__ = ["TeacherCache"]

DTYPES = {"logits": "float16", "values": "float16", "indices": "int32", "rest": "float32"}
_LEAST = float(torch.finfo(torch.float16).min)
_META = ("top_k", "temperature", "num_classes", "shape", "fingerprint", "num_examples")
_REMEDY = "Delete the folder to build it anew, or give another one."


class TeacherCache:
    r"""Outputs of a teacher for examples with ids, kept in a folder of plain arrays.

    Half precision, memory-mapped. Each row is shifted to a largest logit of 0, which changes no
    probability and keeps the digits near the top. A folder is complete once it holds `meta.json`,
    written last; a build that was interrupted goes on where it stopped, with the same teacher and
    the same batches in the same order.

    Args:
        path: The folder; made by `build`.
        top_k: Keep only the k largest logits of each row, and the sum of the others; about 64 for
            vocabularies. Default all.
        temperature: At which that sum is taken, the one of the loss; without `top_k` of no
            consequence. Range: > 0. Default 4.

    Raises:
        ConfigError: If a number is out of its range.
        DataError: If the folder holds a cache with other settings.

    Example:
        >>> import tempfile
        >>> teacher = nn.Linear(2, 3).eval()
        >>> cache = TeacherCache(Path(tempfile.mkdtemp()) / "teacher")
        >>> cache.build(teacher, [(torch.eye(2), None, [7, 9])]).read([9, 7]).shape
        torch.Size([2, 3])

    Source: standard practice; the top k with the rest as one class is this library's choice.
    Deviations: none
    """

    def __init__(
        self, path: str | os.PathLike[str], *, top_k: int | None = None, temperature: float = 4.0
    ) -> None:
        if top_k is not None:
            check_range(top_k, "top_k", low=1, integer=True)
        check_range(temperature, "temperature", low=0.0, open_low=True)
        self.path = Path(path)
        self.top_k = top_k
        self.temperature = float(temperature)
        self._meta: dict[str, Any] = {}
        if (self.path / "meta.json").exists():
            self._open()

    @property
    def complete(self) -> bool:
        """Whether all outputs are there."""
        return bool(self._meta)

    @property
    def num_classes(self) -> int:
        """Classes of the teacher."""
        return int(self._whole()["num_classes"])

    @property
    def targets(self) -> str:
        """What is kept, in words: `"all classes"`, or `"top k and the rest"` with the number k."""
        self._whole()
        return "all classes" if self.top_k is None else f"top {self.top_k} and the rest"

    @property
    def ids(self) -> NDArray[np.int64]:
        """Of the examples, in the order in which they came."""
        self._whole()
        found: NDArray[np.int64] = np.asarray(self._arrays["ids"])
        return found

    @property
    def fingerprint(self) -> str:
        """Of the teacher's weights."""
        return str(self._whole()["fingerprint"])

    def build(self, teacher: nn.Module, batches: Iterable[Any]) -> TeacherCache:
        """Run the teacher over all examples, in evaluation mode without gradients; return this.

        Args:
            teacher: Put back into its mode afterwards.
            batches: `(inputs, labels, ids)` or mappings with `inputs` and `ids`, each example once
                and without augmentation; labels may be `None`, ids are integers.

        Raises:
            DataError: If the folder was begun by another teacher, ids are missing, repeated or not
                those of the part that is there, or an output is NaN or +inf.
            ShapeError: If outputs of batches differ in shape.
        """
        mark = {"fingerprint": fingerprint(teacher)}
        if self.complete:
            self._check(self._meta, mark)
            return self
        self.path.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {}
        if (self.path / "partial.json").exists():
            settings = read_json(self.path / "partial.json", _REMEDY)
            self._check(settings, mark)
        done, count = self._rows_there(settings) if settings else 0, 0
        with evaluating(teacher), torch.no_grad():
            for raw in batches:
                ids = _ids(given(raw).ids)
                if count + len(ids) <= done:
                    self._check_ids(ids, count)
                else:
                    done = min(done, count)  # a batch that was broken off is made again
                    logits = _outputs(teacher, given(raw), len(ids))
                    if not settings:
                        settings = self._settings(logits) | mark
                        write_json(self.path / "partial.json", settings)
                    _check_row_shape(logits, settings)
                    self._append({**self._reduced(logits), "ids": ids}, settings, count)
                count += len(ids)
        if not count:
            raise DataError("batches must hold at least one example; got none. Add some.")
        self._finish(settings, count)
        return self

    def read(self, ids: Any) -> Tensor | TopKLogits:
        """Return the outputs of some examples: logits in float32, or the top k of them.

        Raises:
            DataError: If the cache is not complete, or an id is not in it.
        """
        self._whole()
        wanted = _ids(ids)
        known = self._arrays["ids"]
        place = np.searchsorted(known, wanted, sorter=self._order)
        rows = self._order[np.minimum(place, len(known) - 1)]
        missing = known[rows] != wanted
        if missing.any():
            raise DataError(
                f"the cache must hold the outputs of all examples asked for; {self.path} has none "
                f"for id {wanted[missing][0]}. Build it on the training data."
            )
        found = {name: torch.from_numpy(self._arrays[name][rows]) for name in self._names()}
        if self.top_k is None:
            return found["logits"].float()
        values, indices = found["values"].float(), found["indices"].long()
        return TopKLogits(values, indices, found["rest"], self.temperature)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write all as one `.npz`: `ids`, and `logits`, or `values`, `indices`, `rest`.

        Raises:
            DataError: If the cache is not complete.
        """
        self._whole()
        with replacing(path) as temporary, temporary.open("wb") as file:
            arrays: dict[str, Any] = {"temperature": self.temperature, **self._arrays}
            np.savez(file, **arrays)

    def _names(self) -> tuple[str, ...]:
        return ("logits",) if self.top_k is None else ("values", "indices", "rest")

    def _whole(self) -> dict[str, Any]:
        if not self._meta:
            raise DataError(
                f"{self.path} must hold the whole outputs of a teacher; got no meta.json. Call "
                "build(teacher, batches), which goes on where it was interrupted."
            )
        return self._meta

    def _settings(self, logits: Tensor) -> dict[str, Any]:
        check_range(self.top_k or 1, "top_k", low=1, high=logits.shape[-1], integer=True)
        return {
            "top_k": self.top_k,
            "temperature": self.temperature,
            "num_classes": logits.shape[-1],
            "shape": list(logits.shape[1:]),
        }

    def _check(self, settings: dict[str, Any], more: dict[str, Any]) -> None:
        mine = {"top_k": self.top_k, **more}
        if self.top_k is not None:
            mine["temperature"] = self.temperature
        for name, value in mine.items():
            if settings.get(name) != value:
                raise DataError(
                    f"{self.path} was begun with the {name} {settings.get(name)}; got {value}. "
                    f"{_REMEDY}"
                )

    def _row_shape(self, name: str, settings: dict[str, Any]) -> tuple[int, ...]:
        whole = tuple(settings["shape"])
        last = {"logits": whole[-1:], "values": (self.top_k,), "indices": (self.top_k,)}
        return () if name == "ids" else (*whole[:-1], *last.get(name, ()))

    def _row_bytes(self, name: str, settings: dict[str, Any]) -> int:
        return _dtype(name).itemsize * int(np.prod(self._row_shape(name, settings), dtype=int))

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.bin"

    def _rows_there(self, settings: dict[str, Any]) -> int:
        files = [(self._file(name), name) for name in (*self._names(), "ids")]
        if not all(file.exists() for file, _ in files):
            return 0
        return min(f.stat().st_size // self._row_bytes(name, settings) for f, name in files)

    def _reduced(self, logits: Tensor) -> dict[str, NDArray[Any]]:
        """Return what is kept of the logits, as arrays."""
        logits = logits.float().cpu()
        logits = logits - logits.amax(-1, keepdim=True)
        if bool(logits.isnan().any()):
            raise DataError(
                "the teacher's logits must hold no NaN and no +inf; got such values. Run the "
                "teacher in float32, or look at its inputs."
            )
        # what is too low for half precision stays a number
        low = torch.where(logits > -float("inf"), logits.clamp(min=_LEAST), logits)
        if self.top_k is None:
            return {"logits": low.half().numpy()}
        top = TopKLogits.of(low, self.top_k, temperature=self.temperature)
        return {
            "values": top.values.half().numpy(),
            "indices": top.indices.int().numpy(),
            "rest": top.rest.numpy(),
        }

    def _append(self, arrays: dict[str, NDArray[Any]], settings: dict[str, Any], at: int) -> None:
        for name, array in arrays.items():
            begin = at * self._row_bytes(name, settings)
            file = self._file(name)
            with file.open("r+b" if file.exists() else "w+b") as stream:
                stream.truncate(begin)
                stream.seek(begin)
                stream.write(np.ascontiguousarray(array, dtype=_dtype(name)).tobytes())

    def _check_ids(self, ids: NDArray[np.int64], begin: int) -> None:
        there = np.fromfile(self._file("ids"), np.int64, len(ids), offset=8 * begin)
        if (there != ids).any():
            raise DataError(
                f"{self.path} was begun with other examples, or in another order; example "
                f"{begin + int((there != ids).argmax())} differs. {_REMEDY}"
            )

    def _finish(self, settings: dict[str, Any], count: int) -> None:
        if self._rows_there(settings) > count:
            raise DataError(
                f"{self.path} was begun with more examples than the {count} that came now. "
                f"{_REMEDY}"
            )
        for name in (*self._names(), "ids"):
            with self._file(name).open("rb") as stream:
                os.fsync(stream.fileno())
        ids = np.fromfile(self._file("ids"), np.int64)
        unique, counts = np.unique(ids, return_counts=True)
        if len(unique) < len(ids):
            raise DataError(
                f"each example must come once; id {unique[counts > 1][0]} came "
                f"{counts.max()} times. Give every example its own id. {_REMEDY}"
            )
        write_json(self.path / "meta.json", settings | {"num_examples": count})
        (self.path / "partial.json").unlink()
        self._open()

    def _open(self) -> None:
        meta = read_json(self.path / "meta.json", _REMEDY)
        missing = [name for name in _META if name not in meta]
        if missing:
            raise DataError(f"{self.path}/meta.json must say {missing[0]}; it does not. {_REMEDY}")
        self._check(meta, {})
        self._meta = meta
        self._arrays = {name: self._mapped(name) for name in (*self._names(), "ids")}
        self._order = np.argsort(self._arrays["ids"], kind="stable")

    def _mapped(self, name: str) -> NDArray[Any]:
        shape = (self._meta["num_examples"], *self._row_shape(name, self._meta))
        file = self._file(name)
        size = file.stat().st_size if file.is_file() else 0
        if size != _dtype(name).itemsize * int(np.prod(shape)):
            raise DataError(f"{file} must hold {shape}; got {size} bytes. {_REMEDY}")
        return np.memmap(file, _dtype(name), "r", shape=shape)


def fingerprint(module: nn.Module) -> str:
    """Return a hash of all weights and buffers with their names."""
    found = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _outputs(teacher: nn.Module, batch: Given, count: int) -> Tensor:
    device = next(teacher.parameters(), torch.zeros(())).device
    logits = batch.to(device).logits(teacher)
    if len(logits) != count:
        raise ShapeError(
            f"a batch must have one id for each row of the logits, {len(logits)}; got {count}. "
            "Give the ids of its examples."
        )
    return logits


def _check_row_shape(logits: Tensor, settings: dict[str, Any]) -> None:
    if list(logits.shape[1:]) != settings["shape"]:
        raise ShapeError(
            f"all outputs must have the shape of the first, {settings['shape']} for each example; "
            f"got {list(logits.shape[1:])}. Pad to one length."
        )


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(DTYPES.get(name, "int64"))


def _ids(values: Any) -> NDArray[np.int64]:
    if values is None:
        raise DataError(
            "stored outputs need the ids of the examples; got a batch without. Give batches as "
            "(inputs, labels, ids), or mappings with the key ids."
        )
    found = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise DataError(
            f"ids must be integers, one for each example; got {found.dtype} {found.shape}. Number "
            "the examples."
        )
    return found.astype(np.int64)
