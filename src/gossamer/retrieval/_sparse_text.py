"""Sparse matrices as text: the two forms of the extreme classification repository."""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_matrix

from gossamer.errors import DataError
from gossamer.retrieval._streams import (
    PathLike,
    column_of,
    line_error,
    named,
    stream_lines,
    whole_number,
)

__all__ = ["read_data", "read_matrix"]

_MOST = 2**31  # indices are kept in 32 bits
_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class _Rows:
    """Rows of a sparse matrix as they come."""

    path: PathLike
    columns: int
    indices: array[int] = field(default_factory=lambda: array("i"))
    values: array[float] = field(default_factory=lambda: array("f"))
    starts: array[int] = field(default_factory=lambda: array("q", [0]))
    unsorted: int = 0
    repeated: int = 0

    def add(self, row: list[int], values: list[float], *, binary: bool) -> None:
        """Add a row; indices out of order are sorted, repeated ones merged."""
        if any(one >= two for one, two in pairwise(row)):
            merged: dict[int, float] = {}
            for index, value in zip(row, values, strict=True):
                merged[index] = (
                    max(merged.get(index, 0.0), value) if binary else merged.get(index, 0.0) + value
                )
            self.repeated += len(merged) < len(row)
            self.unsorted += row != sorted(row)
            row = sorted(merged)
            values = [merged[index] for index in row]
        self.indices.extend(row)
        self.values.extend(values)
        self.starts.append(len(self.indices))

    def matrix(self, what: str) -> csr_matrix:
        """Return what was added, with one warning if rows had to be mended."""
        if self.unsorted or self.repeated:
            warnings.warn(
                f"{named(self.path)}: {self.unsorted} rows of {what} were not sorted and "
                f"{self.repeated} held an index twice; they are sorted and merged.",
                stacklevel=4,
            )
        shape = (len(self.starts) - 1, self.columns)
        return csr_matrix(
            (
                np.array(self.values, dtype=np.float32),
                np.array(self.indices, dtype=np.int32),
                np.array(self.starts, dtype=np.int64),
            ),
            shape=shape,
        )


def read_data(path: PathLike) -> tuple[csr_matrix, csr_matrix]:
    """Return features and labels of a file with the header `points features labels`.

    Raises:
        DataError: If header and body disagree or an entry is malformed; the message names the
            place.
    """
    body, (points, num_features, num_labels) = _body(path, "points features labels")
    features, labels = _Rows(path, num_features), _Rows(path, num_labels)
    for number, line in body:
        fields = line.split()
        first = fields[0] if fields and ":" not in fields[0] else ""
        if line[:1].isspace() and first:
            raise line_error(
                path, number, column_of(line, 0), "expected index:value after a space, which "
                f"stands for no labels; got {first!r}. Remove the space.",
            )  # fmt: skip
        names = first.split(",") if first else []
        row = [_index(path, number, line, 0, name, num_labels, "label") for name in names]
        labels.add(row, [1.0] * len(row), binary=True)
        skipped = 1 if first else 0
        pairs = [
            _pair(path, number, line, place, text, num_features, "feature")
            for place, text in enumerate(fields[skipped:], start=skipped)
        ]
        features.add([index for index, _ in pairs], [value for _, value in pairs], binary=False)
    _check_count(path, len(labels.starts) - 1, points)
    return features.matrix("features"), labels.matrix("labels")


def read_matrix(path: PathLike, *, binary: bool) -> csr_matrix:
    """Return a matrix from a file with the header `rows columns`.

    Args:
        path: Of the file.
        binary: Repeated indices are merged to the larger value, otherwise summed.

    Raises:
        DataError: If header and body disagree or an entry is malformed; the message names the
            place.
    """
    body, (rows, columns) = _body(path, "rows columns")
    matrix = _Rows(path, columns)
    for number, line in body:
        pairs = [
            _pair(path, number, line, place, text, columns, "column")
            for place, text in enumerate(line.split())
        ]
        matrix.add([index for index, _ in pairs], [value for _, value in pairs], binary=binary)
    _check_count(path, len(matrix.starts) - 1, rows)
    return matrix.matrix("the matrix")


def _body(path: PathLike, names: str) -> tuple[Iterator[tuple[int, str]], list[int]]:
    """Return the lines that the header counts, and the header."""
    lines = stream_lines(path)
    header = next(lines, (1, ""))[1]
    fields = header.split()
    sizes = [size for size in map(whole_number, fields) if size is not None and size < _MOST]
    if len(fields) != len(names.split()) or len(sizes) != len(fields):
        raise line_error(
            path, 1, 1, f"expected the header '{names}', whole numbers; got {header[:60]!r}. Add "
            "or mend the header.",
        )  # fmt: skip
    return _counted(path, lines, sizes[0]), sizes


def _counted(
    path: PathLike, lines: Iterator[tuple[int, str]], rows: int
) -> Iterator[tuple[int, str]]:
    for number, line in lines:
        if number <= rows + 1:
            yield number, line
        elif line.strip():  # blank lines after the last row are no rows
            raise line_error(
                path, number, 1, f"expected the end of the file after {rows} rows, as the header "
                f"says; got {line[:40]!r}. Mend the header.",
            )  # fmt: skip


def _check_count(path: PathLike, found: int, rows: int) -> None:
    if found < rows:
        raise DataError(
            f"{named(path)}, line 1: the header counts {rows} rows, an empty line being one; got "
            f"{found}. The file may be cut short: copy it again, or mend the header."
        )


def _pair(
    path: PathLike, number: int, line: str, place: int, text: str, limit: int, what: str
) -> tuple[int, float]:
    name, colon, amount = text.partition(":")
    index = _index(path, number, line, place, name, limit, what) if colon else 0
    try:
        value = math.nan if "_" in amount else float(amount)
    except ValueError:
        value = math.nan
    if not colon or not abs(value) <= _LARGEST:  # also false for NaN
        raise line_error(
            path, number, column_of(line, place), f"expected {what}:value with a finite value; "
            f"got {text!r}. Mend the entry.",
        )  # fmt: skip
    return index, value


def _index(
    path: PathLike, number: int, line: str, place: int, name: str, limit: int, what: str
) -> int:
    index = whole_number(name)
    if index is not None and index < limit:
        return index
    raise line_error(
        path, number, column_of(line, place), f"expected a {what} in 0..{limit - 1}, counted from "
        f"0, as the header says; got {name!r}. Mend the entry or the header.",
    )  # fmt: skip
