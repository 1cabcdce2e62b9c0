"""A user's own labelled table: a CSV file, one row a case, one column the class."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigError, DataError
from gossamer.files import read_text
from gossamer.tasks.columns import Column, encode_columns, fit_columns
from gossamer.tasks.labelled import LabelledTask
from gossamer.tasks.rows import unit_hash

__all__ = ["TableTask"]

_TEST_SHARE = 0.2
_MOST_CLASSES = 1000


class TableTask(LabelledTask):
    r"""Classes of the rows of a table.

    Numbers are scaled to mean 0 and deviation 1; a column of words becomes one column a word; an
    empty cell (or `NA`, `nan`, `null`, `?`) is the mean of its column, marked in a column of its
    own. About 20 % of the rows are kept for tests, by a hash of what is in them, so that a row
    stays on its side when others come or go, and equal rows are on one side.

    Args:
        path: CSV file in UTF-8 with the names of the columns in its first line; between cells
            commas, semicolons or tabs.
        target: Name of the column of classes. Default `"label"`.
        ignore: Names of columns that are not read, one text with `+` between them, or a list.
        facts: What was found in the rows of training, as `config` gives it; then the file is not
            read, and the task only encodes other rows.

    Raises:
        ConfigError: If there is no such column.
        DataError: If the file is missing or empty, a row has too many or too few cells, a class is
            missing, or there are fewer than two classes; the message names file and line.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "my.csv"
        >>> rows = [f"{n},{'red' if n % 3 else 'blue'},{n % 2}" for n in range(40)]
        >>> _ = path.write_text("\n".join(["size,colour,label", *rows]))
        >>> task = TableTask(path)
        >>> task.shape, task.classes
        ((3,), ('0', '1'))

    Source: the library's own.
    Deviations: none
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        target: str = "label",
        ignore: str | Sequence[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.target = str(path), target
        self.ignore = tuple(ignore.split("+") if isinstance(ignore, str) else ignore)
        if facts is not None:
            self.columns = tuple(Column.from_dict(column) for column in facts["columns"])
            self.classes = tuple(facts["classes"])
            self.lines = ()
            self.x = torch.empty(0, int(facts["width"]))
            self.labels, self.test_rows = torch.empty(0).long(), torch.empty(0).bool()
            return
        header, cells, lines = _read(self.path)
        names = self._names(header)
        labels = self._labels(header, cells, lines)
        self.classes = tuple(sorted(set(labels), key=_by_number))
        if not 2 <= len(self.classes) <= _MOST_CLASSES:
            raise DataError(
                f"{path}: column {target!r} must hold 2 to {_MOST_CLASSES} classes; got "
                f"{len(self.classes)}. Check that it is the column of classes."
            )
        numbers = {name: k for k, name in enumerate(self.classes)}
        self.labels = torch.tensor([numbers[label] for label in labels])
        kept = [header.index(name) for name in names]
        used = [[row[place] for place in kept] for row in cells]
        self.test_rows = _held_out(used, self.path)
        train = [row for row, test in zip(used, self.test_rows.tolist(), strict=True) if not test]
        self.columns = fit_columns(names, train, path=self.path)
        self.lines = lines
        self.x = torch.from_numpy(encode_columns(self.columns, used, lines))

    @property
    def config(self) -> dict[str, Any]:
        """Name and options, with what was found in the rows of training."""
        found = {
            "columns": [column.to_dict() for column in self.columns],
            "classes": list(self.classes),
            "width": self.x.shape[1],
        }
        own = {"name": "table", "path": self.path, "target": self.target, "facts": found}
        return {**own, "ignore": list(self.ignore)} if self.ignore else own

    def read(self, path: str | os.PathLike[str]) -> tuple[Tensor, list[str | None]]:
        """Return the rows of another file of the same columns, `(N, F)`, and their labels.

        Args:
            path: CSV file; its column of classes may be missing, and other columns may be there.

        Raises:
            DataError: If a column is missing, or a cell holds no number where one is due.
        """
        header, cells, lines = _read(str(path))
        missing = [column.name for column in self.columns if column.name not in header]
        if missing:
            raise DataError(
                f"{path} must have the columns that the model was trained on; got no column "
                f"{missing[0]!r}. Known: {', '.join(header)}."
            )
        kept = [header.index(column.name) for column in self.columns]
        used = [[row[place] for place in kept] for row in cells]
        place = header.index(self.target) if self.target in header else None
        labels = [None if place is None else row[place] or None for row in cells]
        return torch.from_numpy(encode_columns(self.columns, used, lines)), labels

    def _names(self, header: Sequence[str]) -> list[str]:
        for name in (self.target, *self.ignore):
            if name not in header:
                what = "target" if name == self.target else "ignore"
                raise ConfigError(
                    f"{what} must be a column of {self.path}; got {name!r}. Known: "
                    f"{', '.join(header)}. Write table:{self.path},{what}=NAME."
                )
        names = [name for name in header if name not in (self.target, *self.ignore)]
        if not names:
            raise DataError(
                f"{self.path} must have a column besides {self.target!r}; got none. Add one."
            )
        return names

    def _labels(
        self, header: Sequence[str], cells: Sequence[Sequence[str]], lines: Sequence[str]
    ) -> list[str]:
        place = header.index(self.target)
        for row, line in zip(cells, lines, strict=True):
            if not row[place]:
                raise DataError(
                    f"{line}: expected a class in column {self.target!r}; the cell is empty. Fill "
                    "it in, or remove the row."
                )
        return [row[place] for row in cells]


def _read(path: str) -> tuple[list[str], list[list[str]], tuple[str, ...]]:
    """Return names of columns, cells without surrounding blanks, and where each row stands."""
    text = read_text(path, "Give a CSV file in UTF-8 with names of columns in its first line.")
    first = text.split("\n", 1)[0]
    delimiter = max((",", ";", "\t"), key=first.count)
    # not splitlines, which also cuts where a cell holds another sign that ends a line
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    header: list[str] = []
    cells: list[list[str]] = []
    lines: list[str] = []
    for row in _parted(reader, path):
        if not any(cell.strip() for cell in row):
            continue
        values = [cell.strip() for cell in row]
        line = f"{path}, line {reader.line_num}"
        if not header:
            header = values
            _check_header(header, line)
        elif len(values) != len(header):
            raise DataError(
                f"{line}: expected {len(header)} cells as in the first line; got {len(values)}. "
                "Mend the row, and put cells that hold the separator in quotes."
            )
        else:
            cells.append(values)
            lines.append(line)
    if not cells:
        raise DataError(f"{path} must hold a line of names and rows; got no row. Add rows.")
    return header, cells, tuple(lines)


def _parted(reader: Any, path: str) -> Iterator[list[str]]:
    """Yield rows of cells.

    Raises:
        DataError: If a line cannot be parted; the message names it.
    """
    try:
        yield from reader
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: expected cells of a CSV file; got: {error}. Look "
            "for a quotation mark without its partner."
        ) from None


def _check_header(header: Sequence[str], line: str) -> None:
    twice = [name for name in header if header.count(name) > 1 or not name]
    if twice:
        raise DataError(
            f"{line}: columns must have names of their own; got {twice[0]!r} "
            f"{header.count(twice[0])} times. Rename them."
        )


def _held_out(rows: Sequence[Sequence[str]], path: str) -> Tensor:
    """Return which rows are for tests; both parts get some."""
    hashes = [unit_hash("\x1f".join(row)) for row in rows]
    low, high = min(hashes), max(hashes)
    if low == high:
        raise DataError(
            f"{path} must hold at least two different rows, one to train on and one to test; got "
            "one. Add rows."
        )
    limit = min(max(_TEST_SHARE, low), (low + high) / 2)
    return torch.tensor([value <= limit for value in hashes])


def _by_number(name: str) -> tuple[bool, float, str]:
    """Sort classes that are numbers as numbers, before the others."""
    try:
        number = float(name)
    except ValueError:
        number = math.nan
    # "nan" is a name: as a number it would stand anywhere
    return (True, 0.0, name) if math.isnan(number) else (False, number, name)
