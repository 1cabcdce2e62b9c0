"""The neighbours of each target, as a table to look into, keep and draw from."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_range
from gossamer.errors import DataError
from gossamer.files import replacing
from gossamer.retrieval._streams import PathLike

__all__ = ["NeighborTable", "fingerprint_of"]


@dataclass(frozen=True, eq=False)
class NeighborTable:
    """Real sentences near each target, with their scores and texts; `mine_neighbors` makes it.

    Args:
        targets: The texts that have neighbours.
        corpus: The texts that are neighbours.
        indices: Places in `corpus`, `(n, k)` int32, best first; -1 for none.
        bleu: Sentence BLEU against the target, `(n, k)` float32; 0 for none.
        cosine: Of the two embeddings, `(n, k)` float32; 0 for none.
        settings: How it was mined.
        fingerprint: Of targets, corpus and settings.

    Raises:
        DataError: If shapes do not fit or an index is out of range.

    Example:
        >>> from gossamer.retrieval import mine_neighbors
        >>> texts = ["the dog ran home", "the dog ran off", "rain fell on the hills"]
        >>> table = mine_neighbors(texts, num_neighbors=1, num_retrieved=2, min_bleu=0.3)
        >>> print(table.show(0))
        target 0: the dog ran home
          bleu  cosine  neighbour
         0.658   0.571  1: the dog ran off
        >>> table.sample([0, 2]).tolist()
        [1, -1]
    """

    targets: tuple[str, ...]
    corpus: tuple[str, ...]
    indices: NDArray[np.int32]
    bleu: NDArray[np.float32]
    cosine: NDArray[np.float32]
    settings: Mapping[str, Any]
    fingerprint: str

    def __post_init__(self) -> None:
        shape = self.indices.shape
        fits = len(shape) == 2 and shape[0] == len(self.targets) and shape[1] > 0
        if not (fits and self.bleu.shape == shape and self.cosine.shape == shape):
            raise DataError(
                f"indices, bleu and cosine must have the shape (n, k), k >= 1, with n = "
                f"{len(self.targets)} targets; got {shape}, {self.bleu.shape}, "
                f"{self.cosine.shape}. Mine the neighbours again."
            )
        low, high = int(self.indices.min(initial=-1)), int(self.indices.max(initial=-1))
        if low < -1 or high >= len(self.corpus):
            raise DataError(
                f"indices must be places in a corpus of {len(self.corpus)} texts, or -1; got "
                f"{low} to {high}. Mine the neighbours again."
            )

    def __len__(self) -> int:
        """Return the number of targets."""
        return len(self.targets)

    def texts(self, row: int) -> list[str]:
        """Return the neighbours of a target, best first.

        Raises:
            DataError: If there is no such target.
        """
        (at,) = self._rows([row])
        return [self.corpus[index] for index in self.indices[at] if index >= 0]

    def show(self, row: int) -> str:
        """Return a target with its neighbours and their scores, as lines to print.

        Raises:
            DataError: If there is no such target.
        """
        (at,) = self._rows([row])
        lines = [f"target {at}: {self.targets[at]}"]
        found = self.indices[at] >= 0
        if not found.any():
            return f"{lines[0]}\n  no neighbour"
        lines.append(f"{'bleu':>6}{'cosine':>8}  neighbour")
        for index, bleu, cosine in zip(
            self.indices[at][found], self.bleu[at][found], self.cosine[at][found], strict=True
        ):
            lines.append(f"{bleu:6.3f}{cosine:8.3f}  {index}: {self.corpus[index]}")
        return "\n".join(lines)

    def sample(
        self,
        rows: Iterable[int],
        *,
        epoch: int = 0,
        random_state: int = 0,
        temperature: float = math.inf,
        chance: float = 1.0,
    ) -> NDArray[np.int32]:
        """Draw one neighbour of each target; the draw depends on seed, epoch and row alone.

        Args:
            rows: Numbers of targets.
            epoch: Each has draws of its own. Range: >= 0. Default 0.
            random_state: The seed. Range: >= 0. Default 0.
            temperature: Chances are in proportion to exp(BLEU / temperature); infinity draws
                evenly. Unit: BLEU. Range: > 0. Default infinity.
            chance: That a row has a draw at all: with the alpha of the loss, rows are drawn for
                training on the neighbour *instead of* the target. Range: 0 to 1. Default 1.

        Returns:
            Places in `corpus`, int32; -1 where a row has no neighbour or no draw.

        Raises:
            DataError: If there is no such target.
            ConfigError: If an option is out of its range.
        """
        check_range(epoch, "epoch", low=0, integer=True)
        check_range(random_state, "random_state", low=0, integer=True)
        check_range(chance, "chance", low=0.0, high=1.0)
        if temperature != math.inf:
            check_range(temperature, "temperature", low=0.0, open_low=True)
        at = np.array(self._rows(rows), dtype=np.int64)
        indices, scores = self.indices[at], self.bleu[at].astype(np.float64)
        there = indices >= 0
        best = np.where(there, scores, -np.inf).max(axis=1, initial=-np.inf, keepdims=True)
        best = np.where(np.isfinite(best), best, 0.0)
        # the larger exponents are those of absent neighbours, which count nothing
        weights = np.where(there, np.exp(np.minimum(scores - best, 0.0) / temperature), 0.0)
        edges = np.cumsum(weights, axis=1)
        drawn, picked = _uniform(random_state, epoch, at)
        chosen = there.any(axis=1) & (drawn < chance)
        within = np.minimum(picked * edges[:, -1], np.nextafter(edges[:, -1], 0.0))
        place = np.argmax(edges > within[:, None], axis=1)
        own = indices[np.arange(len(at)), place]
        return np.where(chosen, own, np.int32(-1)).astype(np.int32)

    def check_data(self, targets: Sequence[str], corpus: Sequence[str] | None = None) -> None:
        """Check that the table was mined from these texts.

        Args:
            targets: The targets of the training data, in order.
            corpus: The corpus; not looked at by default.

        Raises:
            DataError: If it was not; the message names the first row that differs.
        """
        for name, mine, theirs in (
            ("targets", self.targets, targets),
            ("corpus", self.corpus, self.corpus if corpus is None else corpus),
        ):
            pairs = enumerate(zip(mine, theirs, strict=False))
            row = next((row for row, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
            if row < max(len(mine), len(theirs)):
                raise DataError(
                    f"the neighbours (fingerprint {self.fingerprint}) must have been mined from "
                    f"these {name}; got {len(theirs)} texts for {len(mine)}, different from row "
                    f"{row} on. Mine them again, or give the texts in the same order."
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of the whole table as plain values."""
        found = self.indices >= 0
        return {
            "num_targets": len(self.targets),
            "num_corpus": len(self.corpus),
            "share_without": float((~found.any(axis=1)).mean()),
            "mean_neighbors": float(found.sum(axis=1).mean()),
            "mean_bleu": _mean(self.bleu, found),
            "mean_cosine": _mean(self.cosine, found),
            "fingerprint": self.fingerprint,
            "settings": dict(self.settings),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each rank: share of targets that have it, mean BLEU and cosine."""
        found = self.indices >= 0
        return [
            {
                "rank": rank + 1,
                "share": float(found[:, rank].mean()),
                "mean_bleu": _mean(self.bleu[:, rank], found[:, rank]),
                "mean_cosine": _mean(self.cosine[:, rank], found[:, rank]),
            }
            for rank in range(self.indices.shape[1])
        ]

    def save(self, path: PathLike) -> None:
        """Write the table with its texts to one `.npz` file, whole or not at all."""
        arrays: dict[str, Any] = {
            "indices": self.indices,
            "bleu": self.bleu,
            "cosine": self.cosine,
            "fingerprint": np.array(self.fingerprint),
            "settings": np.array(json.dumps(dict(self.settings))),
            **_packed("targets", self.targets),
            **({} if self.corpus == self.targets else _packed("corpus", self.corpus)),
        }
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(
        cls,
        path: PathLike,
        *,
        targets: Sequence[str] | None = None,
        corpus: Sequence[str] | None = None,
    ) -> NeighborTable:
        """Read a table; with `targets` or `corpus`, check that it was mined from them.

        Raises:
            DataError: If the file is missing or no such table, or was mined from other texts.
        """
        if not Path(path).is_file():
            raise DataError(f"{path} does not exist. Mine neighbours and save them there.")
        try:
            with np.load(path, allow_pickle=False) as file:
                texts = _unpacked("targets", file)
                table = cls(
                    targets=texts,
                    corpus=_unpacked("corpus", file) if "corpus_bytes" in file else texts,
                    indices=file["indices"].astype(np.int32, casting="safe"),
                    bleu=file["bleu"].astype(np.float32, casting="safe"),
                    cosine=file["cosine"].astype(np.float32, casting="safe"),
                    settings=json.loads(str(file["settings"])),
                    fingerprint=str(file["fingerprint"]),
                )
        except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{path} must be a table of neighbours, written by NeighborTable.save; got "
                f"{error}. Mine the neighbours again."
            ) from None
        found = fingerprint_of(table.targets, table.corpus, table.settings)
        if found != table.fingerprint:
            raise DataError(
                f"{path} must hold texts and settings of the fingerprint {table.fingerprint}; got "
                f"{found}. The file was changed: mine the neighbours again."
            )
        table.check_data(table.targets if targets is None else targets, corpus)
        return table

    def _rows(self, rows: Iterable[int]) -> list[int]:
        found = [operator.index(row) for row in rows]
        bad = next((row for row in found if not 0 <= row < len(self)), None)
        if bad is not None:
            raise DataError(
                f"row must lie in 0 to {len(self) - 1}, the targets of the table; got {bad}. "
                "Number the training pairs as the targets were given."
            )
        return found


def fingerprint_of(
    targets: Sequence[str], corpus: Sequence[str], settings: Mapping[str, Any]
) -> str:
    """Return a hash of texts, in their order, and settings."""
    made = hashlib.blake2b(json.dumps(dict(settings), sort_keys=True).encode(), digest_size=16)
    for texts in (targets, corpus):
        made.update(str(len(texts)).encode() + b"\0")
        for text in texts:
            made.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return made.hexdigest()


def _uniform(
    random_state: int, epoch: int, rows: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return two numbers in [0, 1) for each row, from seed, epoch and row by SplitMix64."""
    state = np.zeros(len(rows), dtype=np.uint64)
    for value in (random_state % 2**64, epoch % 2**64):
        state = _mixed(state ^ np.uint64(value))
    state = _mixed(state ^ rows.astype(np.uint64))
    first, second = (_mixed(state + np.uint64(step)) for step in (1, 2))
    return (first >> np.uint64(11)) / 2**53, (second >> np.uint64(11)) / 2**53


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the next output of SplitMix64 (Steele et al., OOPSLA 2014) for each state."""
    x = state + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mean(values: NDArray[np.float32], found: NDArray[np.bool_]) -> float:
    """Return the mean over what there is, NaN if there is nothing."""
    return float(values[found].mean(dtype=np.float64)) if found.any() else math.nan


def _packed(name: str, texts: Sequence[str]) -> dict[str, NDArray[Any]]:
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    return {
        f"{name}_bytes": np.frombuffer(b"".join(raw), dtype=np.uint8),
        f"{name}_ends": np.cumsum([len(text) for text in raw], dtype=np.int64),
    }


def _unpacked(name: str, file: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
    raw, ends = file[f"{name}_bytes"].tobytes(), file[f"{name}_ends"].tolist()
    return tuple(
        raw[begin:end].decode("utf-8", "surrogatepass")
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    )
