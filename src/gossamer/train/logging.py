"""Where a run's numbers go: by default an append-only file, no account and no network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gossamer.files import read_lines, without_nan, write_json, write_text

__all__ = ["FileLogger", "Logger", "NoLogger"]


class Logger(Protocol):
    """What the training loop and recipes call."""

    @property
    def folder(self) -> Path | None:
        """Where checkpoints go, or `None` to keep none."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record numbers of one step."""

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step`; a resumed run says it again."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Record the numbers of the whole run."""

    def close(self) -> None:
        """End the record."""


class NoLogger:
    """Keeps nothing.

    Example:
        >>> NoLogger().log(1, {"loss": 0.5})
    """

    folder: Path | None = None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Do nothing."""

    def rewind(self, step: int) -> None:
        """Do nothing."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class FileLogger:
    r"""Appends to `metrics.jsonl` in a folder, and writes `summary.json` when asked to.

    Args:
        folder: Run folder; made when missing.

    Example:
        >>> import tempfile
        >>> logger = FileLogger(tempfile.mkdtemp())
        >>> logger.log(10, {"loss": 0.5})
        >>> (logger.folder / "metrics.jsonl").read_text()
        '{"step": 10, "loss": 0.5}\n'
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder: Path = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / "metrics.jsonl"

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line; it is on disk when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(without_nan({"step": step, **values})) + "\n")

    def rewind(self, step: int) -> None:
        """Drop lines after `step`, and a line that an interruption cut short."""
        if not self._path.exists():
            return
        kept = [json.dumps(row) + "\n" for row in read_lines(self._path) if row["step"] <= step]
        write_text(self._path, "".join(kept))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_json(self.folder / "summary.json", dict(values))

    def close(self) -> None:
        """Nothing to do: every line is already on disk."""
