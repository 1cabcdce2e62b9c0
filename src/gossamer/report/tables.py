"""Tables of plain rows: CSV, which restores every number, and Markdown, which is for reading."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from gossamer.checks import check_choice
from gossamer.errors import DataError
from gossamer.files import read_text, write_text

from ._numbers import significant

__all__ = ["read_table", "write_table"]

# A leading zero marks a name ("007"), and an underscore is no digit outside of Python.
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?([0-9]+\.[0-9]*|[0-9]*\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|nan|-?inf")


def _plain(value: Any) -> Any:
    # NumPy's scalars print as "np.float64(0.5)": bring them back to Python's own.
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _csv_cell(value: Any) -> str:
    value = _plain(value)
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def _markdown_cell(value: Any) -> str:
    value = _plain(value)
    if isinstance(value, float):
        return significant(value)
    text = "" if value is None else str(value)
    text = re.sub(r"([\\|*`])", r"\\\1", text).replace("<", "&lt;")
    return " ".join(text.split())


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


class _Lines(list[str]):
    # The writer quotes the characters of its line end: with both of them, a cell of "\r" survives.
    def write(self, line: str) -> None:
        self.append(line.removesuffix("\r\n") + "\n")


def _to_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    lines = _Lines()
    writer = csv.writer(lines, lineterminator="\r\n")
    if columns:
        writer.writerow(columns)
        writer.writerows([_csv_cell(row.get(column)) for column in columns] for row in rows)
    return "".join(lines)


def _to_markdown(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    numeric = {
        c for c in columns if any(isinstance(_plain(row.get(c)), int | float) for row in rows)
    }
    lines = [
        [_markdown_cell(column) for column in columns],
        ["---:" if column in numeric else "---" for column in columns],
        *([_markdown_cell(row.get(column)) for column in columns] for row in rows),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines) if columns else ""


def write_table(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Write rows as a table; the columns are those of all rows, in the order they first occur.

    A CSV file keeps every bit of a float; a Markdown file shows three significant digits. The file
    appears under its name only when it is complete. No rows at all give an empty file.

    Args:
        rows: One mapping per row, column to value. A missing value and `None` give an empty cell.
        path: Where to write; the ending `.csv` or `.md` chooses the format.

    Raises:
        ConfigError: If the ending is neither `.csv` nor `.md`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "table.md"
        >>> write_table([{"arm": "ours", "loss": 0.12345}, {"arm": "none"}], path)
        >>> print(path.read_text(), end="")
        | arm | loss |
        | --- | ---: |
        | ours | 0.123 |
        | none |  |
    """
    target = Path(path)
    check_choice(target.suffix, (".csv", ".md"), "ending of a table's file")
    write = _to_csv if target.suffix == ".csv" else _to_markdown
    write_text(target, write(rows, _columns(rows)))


def _restore(text: str) -> str | float | int:
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _check_head(head: Sequence[str], path: Path) -> None:
    double = sorted({column for column in head if head.count(column) > 1})
    if double:
        raise DataError(
            f"{path}, line 1: every column needs a name of its own; {double[0]!r} occurs "
            f"{head.count(double[0])} times. Rename one of them."
        )


def read_table(path: str | Path) -> list[dict[str, str | float | int]]:
    """Read a CSV table with a header and bring its numbers back.

    What `write_table` wrote comes back equal: floats bit by bit, an empty cell as `""`. Text that
    looks like a number (`"12"`) comes back as the number; `"007"` and `"1_000"` stay text.

    Args:
        path: A `.csv` file in UTF-8.

    Returns:
        One dictionary per row.

    Raises:
        ConfigError: If the ending is not `.csv`.
        DataError: If the file is missing or a row has more or fewer cells than the header; the
            message names the line.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "table.csv"
        >>> write_table([{"arm": "ours", "loss": 0.1, "seed": 3}], path)
        >>> read_table(path)
        [{'arm': 'ours', 'loss': 0.1, 'seed': 3}]
    """
    source = Path(path)
    check_choice(source.suffix, (".csv",), "ending of a table's file")
    reader = csv.reader(io.StringIO(read_text(source, "Check the name."), newline=""), strict=True)
    rows: list[dict[str, str | float | int]] = []
    try:
        head = next(reader, [])
        _check_head(head, source)
        for cells in filter(None, reader):
            if len(cells) != len(head):
                raise DataError(
                    f"{source}, line {reader.line_num}: expected {len(head)} cells as in the "
                    f"header; got {len(cells)}: {','.join(cells)[:60]!r}. Repair this line."
                )
            rows.append({column: _restore(cell) for column, cell in zip(head, cells, strict=True)})
    except csv.Error as error:
        raise DataError(
            f"{source}, line {reader.line_num}: not valid CSV ({error}). Repair it."
        ) from None
    return rows
