"""Characters of a text file: a language model to train on any writing."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gossamer.checks import check_choice, check_range
from gossamer.errors import DataError, UnsupportedError
from gossamer.files import read_text
from gossamer.tasks.base import EOS, Batch, Example, GridCell, Task

__all__ = ["TextTask"]

_TRAIN_SHARE = 0.9
_FIRST = 2


class TextTask(Task):
    """Character language model on a file: predict every next character.

    The first 90 % of the file are for training, the last 10 % for tests. A sample is a window of
    `length` + 1 characters from a random place: `length` tokens go in, and every token but the
    first is predicted. The alphabet is the sorted characters of the whole file. A query is text
    to go on from; there is no true answer to it.

    Args:
        path: A UTF-8 text file.
        length: Characters that go in. Unit: tokens. Range: >= 1. Default 64.

    Raises:
        ConfigError: If `length` is out of range.
        DataError: If the file is missing, empty, not UTF-8, or too short for `length`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "song.txt"
        >>> _ = path.write_text("la la li la " * 20)
        >>> task = TextTask(path, length=8)
        >>> task.sample(4, generator=torch.Generator().manual_seed(0)).tokens.shape
        torch.Size([4, 9])
        >>> task.vocab
        ('_', '$', ' ', 'a', 'i', 'l')

    Source: the library's own; split and windows as in Li et al., *FIRE*, ICLR 2024, on texts.
    Deviations: characters in place of word pieces.
    """

    def __init__(self, path: str | os.PathLike[str], *, length: int = 64) -> None:
        check_range(length, "length", low=1, integer=True)
        self.path = str(path)
        self.length = length
        text = read_text(self.path, "Give a text file in UTF-8.")
        if not text:
            raise DataError(f"{path}: expected text; the file is empty. Use another file.")
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        used = np.flatnonzero(np.bincount(points))
        alphabet = [chr(point) for point in used]
        self.vocab = ("_", "$", *alphabet)
        self._token = {character: n for n, character in enumerate(alphabet, start=_FIRST)}
        table = np.zeros(used[-1] + 1, np.int64)
        table[used] = np.arange(_FIRST, _FIRST + len(used))
        codes = torch.from_numpy(table[points])
        cut = int(_TRAIN_SHARE * len(codes))
        self._parts = {"train": codes[:cut], "test": codes[cut:]}
        self._check_length(length)

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        return {"name": "text", "path": self.path, "length": self.length}

    def sample(self, batch_size: int, *, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw windows from random places of the first 90 % or the last 10 %."""
        check_choice(split, ("train", "test"), "split")
        windows = self._parts[split].unfold(0, self.length + 1, 1)
        begins = torch.randint(0, len(windows), (batch_size,), generator=generator)
        tokens = windows[begins]
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, 0] = False
        return Batch(tokens, self._count(tokens.shape[1]).expand_as(tokens), mask)

    def encode(self, query: str) -> Tensor:
        """Return the tokens of a text to go on from."""
        for column, character in enumerate(query, start=1):
            if character not in self._token:
                raise DataError(
                    f"query must hold characters of {self.path} only; got {character!r} at column "
                    f"{column} of {query!r}. Remove it."
                )
        if not query:
            raise DataError("query must hold at least one character; got ''. Write a beginning.")
        return torch.tensor([self._token[character] for character in query])

    def position_ids(self, query: str, *, start: int | None = None) -> Tensor:
        """Return the ids of a text and its continuation, which together fill a training window.

        A query as long as a window, or longer, goes on by one character.
        """
        begin = 1 if start is None else start
        check_range(begin, "start", low=1, integer=True)
        size = max(self.length + 1, len(self.encode(query)) + 1)
        return self._count(size) + begin - 1

    def answer(self, query: str) -> str:
        """Refuse: no continuation of a text is the true one.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"a text has no true continuation; got the query {query[:20]!r}. Ask the model for "
            "one, or measure its cross-entropy with evaluate_task."
        )

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return produced tokens as text."""
        produced = [int(token) for token in tokens]
        return self.symbols(produced[: produced.index(EOS)] if EOS in produced else produced)

    def example(self, query: str, *, start: int | None = None) -> Example:
        """Return a text as one sequence in which every character but the first is scored."""
        tokens = self.encode(query)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[0] = False
        return Example(tokens, self.position_ids(query, start=start)[: len(tokens)], mask)

    def grid(  # type: ignore[override]
        self, *, length: Iterable[int] | None = None
    ) -> list[GridCell]:
        """Return one cell for each length of window, on the test part of the file.

        Args:
            length: Unit: tokens. Default 1, 2, 4, 8 and 16 times the trained length, as far as the
                test part is long enough.
        """
        room = len(self._parts["test"]) - 1
        if length is None:
            length = [n for n in (self.length * k for k in (1, 2, 4, 8, 16)) if n <= room]
        return [GridCell({"length": n}, self._of_length(n)) for n in length]

    def _of_length(self, length: int) -> Self:
        """Return the task on the same characters with windows of another length."""
        check_range(length, "length", low=1, integer=True)
        self._check_length(length)
        other = copy.copy(self)
        other.length = length
        return other

    def _check_length(self, length: int) -> None:
        train, test = len(self._parts["train"]), len(self._parts["test"])
        if length + 1 > min(train, test):
            raise DataError(
                f"{self.path} must have at least {length + 1} characters in each part for "
                f"length = {length}; got {train} for training (the first 90 %) and {test} for "
                "tests. Use a longer text or a smaller length."
            )

    @staticmethod
    def _count(size: int) -> Tensor:
        return torch.arange(1, size + 1)
