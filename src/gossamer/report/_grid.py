"""The table of results as words: the same heads and cells for HTML and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._numbers import as_given, decimals, duration, is_number, show
from ._run import Run

__all__ = ["Cell", "Grid", "Head", "Line", "read_cell", "results", "results_grid", "row_title"]

_FIXED = ("arm", "variant", "role", "seeds", "seconds_here", "note")


@dataclass(frozen=True)
class Head:
    """Head of a column: its name, below it unit and origin; equal names share one head."""

    title: str
    note: str = ""
    trained: bool = False

    @property
    def name(self) -> str:
        """The name with its mark."""
        return f"{self.title} (trained)" if self.trained else self.title

    def __str__(self) -> str:
        return f"{self.name}, {self.note}" if self.note else self.name


@dataclass(frozen=True)
class Cell:
    """A value and, below it, its spread."""

    text: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.note}".strip()


@dataclass(frozen=True)
class Line:
    """One method's row."""

    title: str
    note: str
    ours: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """Heads and rows; the first head belongs to the titles of the rows."""

    heads: tuple[Head, ...]
    lines: tuple[Line, ...]


def _columns(table: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in table for column in row))


def results(run: Run) -> list[str]:
    """Names of the results in the table, in its order: what `_here` and `_paper` end."""
    columns = [c for c in _columns(run.summary.table) if c not in _FIXED]
    stems = [c.removesuffix(end) for c in columns for end in ("_here", "_paper") if c.endswith(end)]
    ends = {f"{name}_{end}" for name in stems for end in ("low", "high")}
    return [name for name in dict.fromkeys(stems) if name not in ends]


def _numbers(table: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[float]:
    return [row[name] for row in table for name in names if is_number(row.get(name))]


def read_cell(row: Mapping[str, Any], name: str, places: int | None) -> Cell:
    """One result of a row with its spread; a single seed and equal seeds have none."""
    value, low, high = (row.get(f"{name}{end}_here") for end in ("", "_low", "_high"))
    if row.get("seeds") == 1 or low is None or high is None or low == high:
        return Cell(show(value, places))
    if not all(is_number(v) for v in (value, low, high)):
        return Cell(show(value, places))
    join = " to " if low < 0 or high < 0 else "–"
    return Cell(show(value, places), f"({show(low, places)}{join}{show(high, places)})")


def _result(run: Run, name: str) -> list[tuple[Head, list[Cell]]]:
    table, column = run.summary.table, run.column(name)
    places = decimals(_numbers(table, [f"{name}{end}_here" for end in ("", "_low", "_high")]))
    unit = f"{column.unit}, " if column.unit else ""
    made: list[tuple[Head, list[Cell]]] = []
    if any(f"{name}_here" in row for row in table):
        # only a recipe has a paper to tell "here" from
        here = Head(column.label, f"{unit}here" if run.is_recipe else column.unit, column.in_domain)
        made.append((here, [read_cell(row, name, places) for row in table]))
    if _numbers(table, [f"{name}_paper"]):
        paper = Head(column.label, f"{unit}paper", column.in_domain)
        made.append((paper, [Cell(as_given(row.get(f"{name}_paper"))) for row in table]))
    return made


def row_title(run: Run, row: Mapping[str, Any]) -> str:
    """What a reader calls a row: the method, whether it is ours, and the condition."""
    title = run.arm_title(str(row["arm"]))
    if run.is_recipe and row.get("role") == "ours" and "ours" not in title:
        title = f"{title} (ours)"
    return f"{title}, {row['variant']}" if row.get("variant") else title


def _line(run: Run, row: Mapping[str, Any], cells: Sequence[Cell]) -> Line:
    title, ours = row_title(run, row), row.get("role") == "ours"
    return Line(title, str(row.get("note") or ""), ours, tuple(cells))


def results_grid(run: Run) -> Grid:
    """Make the table of a run."""
    table, columns = run.summary.table, _columns(run.summary.table)
    made: list[tuple[Head, list[Cell]]] = []
    if "seeds" in columns and run.is_recipe:
        made.append((Head("Seeds"), [Cell(show(row.get("seeds"), 0)) for row in table]))
    for name in results(run):
        made += _result(run, name)
    if "seconds_here" in columns:
        times = [Cell(duration(row.get("seconds_here"))) for row in table]
        made.append((Head("Time per seed", "here"), times))
    lines = tuple(_line(run, row, [cells[i] for _, cells in made]) for i, row in enumerate(table))
    first = "Method" if run.is_recipe else "What"
    return Grid((Head(first), *(head for head, _ in made)), lines)
