"""Columns of a table as numbers: scaled where they are numbers, one 0/1 column a level else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import DataError

__all__ = ["Column", "encode_columns", "fit_columns"]

_MOST_LEVELS = 50
_MISSING = ("", "na", "nan", "null", "none", "?")


@dataclass(frozen=True)
class Column:
    """How one column becomes numbers.

    Args:
        name: As in the first line of the file.
        mean: Of a column of numbers, over the rows of training; `None` for words.
        scale: Its standard deviation, 1 where that is 0.
        levels: Words of a column of words, sorted; each becomes one column.
        gaps: Whether a column of its own marks missing numbers.
    """

    name: str
    mean: float | None = None
    scale: float = 1.0
    levels: tuple[str, ...] = ()
    gaps: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that say only what differs from the defaults."""
        if self.mean is None:
            return {"name": self.name, "levels": list(self.levels)}
        found = {"name": self.name, "mean": self.mean, "scale": self.scale}
        return {**found, "gaps": True} if self.gaps else found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Column:
        """Return the column of what `to_dict` gave."""
        return cls(**{**values, "levels": tuple(values.get("levels", ()))})


def fit_columns(
    names: Sequence[str], cells: Sequence[Sequence[str]], *, path: str
) -> tuple[Column, ...]:
    """Look at the rows of training and decide how each column becomes numbers.

    Args:
        names: Of the columns.
        cells: Rows of training, as text.
        path: Of the file, for messages.

    Raises:
        DataError: If a column of words has more than 50 levels, or none has a value.
    """
    return tuple(
        _fit(name, [row[place] for row in cells], path) for place, name in enumerate(names)
    )


def _fit(name: str, values: Sequence[str], path: str) -> Column:
    present = [value for value in values if not _is_missing(value)]
    numbers = [_number(value) for value in present]
    gaps = len(present) < len(values)
    if present and all(number is not None for number in numbers):
        array = np.array(numbers, dtype=np.float64)
        spread = float(array.std())
        return Column(name, float(array.mean()), spread if spread > 0 else 1.0, gaps=gaps)
    levels = Counter(present)
    if len(levels) > _MOST_LEVELS or not levels:
        what = f"{len(levels)} different words" if levels else "no value"
        words = [v for v, n in zip(present, numbers, strict=True) if n is None]
        example = f", such as {words[0]!r}" if words else ""
        raise DataError(
            f"{path}: column {name!r} must hold numbers, or at most {_MOST_LEVELS} different words;"
            f" got {what}{example}. Leave it out with ignore={name}, or mend its numbers."
        )
    return Column(name, levels=tuple(sorted(levels)))


def encode_columns(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], lines: Sequence[str]
) -> NDArray[np.float32]:
    """Return the rows as numbers, `(N, F)`.

    A missing number is the mean; a word that was not there in training has 0 in every level.

    Args:
        columns: What `fit_columns` gave.
        cells: Rows as text, one cell for each column.
        lines: Where each row stands, for messages.

    Raises:
        DataError: If a cell of a column of numbers holds none; the message names line and column.
    """
    parts = []
    for place, column in enumerate(columns):
        values = [row[place] for row in cells]
        parts += (
            _numbers(column, values, lines) if column.mean is not None else _words(column, values)
        )
    if not parts:
        return np.empty((len(cells), 0), np.float32)
    return np.stack(parts, 1).astype(np.float32)


def _numbers(
    column: Column, values: Sequence[str], lines: Sequence[str]
) -> list[NDArray[np.float64]]:
    mean = column.mean or 0.0
    found, missing = np.full(len(values), mean), np.zeros(len(values))
    for k, value in enumerate(values):
        number = _number(value)
        if number is not None:
            found[k] = number
        elif _is_missing(value):
            missing[k] = 1.0
        else:
            raise DataError(
                f"{lines[k]}, column {column.name!r}: expected a number as in the rows of training;"
                f" got {value!r}. Mend the cell, or leave it empty."
            )
    scaled = (found - mean) / column.scale
    return [scaled, missing] if column.gaps else [scaled]


def _words(column: Column, values: Sequence[str]) -> list[NDArray[np.float64]]:
    array = np.array(values, dtype=object)
    return [(array == level).astype(np.float64) for level in column.levels]


def _is_missing(value: str) -> bool:
    return value.lower() in _MISSING


def _number(value: str) -> float | None:
    """Return a finite number, or `None` if the text is none."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
