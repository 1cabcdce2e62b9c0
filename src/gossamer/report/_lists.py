"""Tables that a page declares: rows of `rows.csv` as they are, the first of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.errors import DataError

from ._drawing import filtered
from ._html import Html, section, tag
from ._markdown import plain, table_markdown
from ._numbers import DASH, decimals, is_number, show
from ._run import ListSpec, Run
from ._sections import pairs_table

__all__ = ["Listed", "list_rows", "lists_html", "lists_markdown"]

_MOST = 50


@dataclass(frozen=True)
class Listed:
    """A table as words: title, heads, rows and what to know about it."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def list_rows(spec: ListSpec, run: Run) -> Listed:
    """Return the rows that a declared table shows; each column has one number of decimals.

    Raises:
        DataError: If no row agrees with its filter, or none has a column.
    """
    rows = filtered(run.rows, spec.where)
    shown = rows[:_MOST]
    columns = []
    for column in spec.columns:
        if not any(column.name in row for row in rows):
            raise DataError(
                f"list {spec.name!r} needs the column {column.name!r} in rows.csv; got none. "
                "Correct the entry in page.json."
            )
        values = [row.get(column.name, "") for row in shown]
        numbers = [v for v in values if isinstance(v, float) and math.isfinite(v)]
        # one number of decimals where the values are of one size
        places = decimals(numbers) if numbers and _alike(numbers) else None
        texts = (_text(v, places) for v in values)
        columns.append(tuple(texts))
    heads = (f"{c.label or c.name}{f' ({c.unit})' if c.unit else ''}" for c in spec.columns)
    more = f"The first {_MOST} of {len(rows)}; all are in rows.csv." if len(rows) > _MOST else ""
    return Listed(spec.title, tuple(heads), tuple(zip(*columns, strict=True)), more)


def _text(value: Any, places: int | None) -> str:
    if value in ("", None) or (isinstance(value, float) and not math.isfinite(value)):
        return DASH
    return show(value, places if isinstance(value, float) else None) if is_number(value) else value


def _alike(numbers: Sequence[float]) -> bool:
    sizes = [abs(v) for v in numbers if v]
    return not sizes or max(sizes) < 100 * min(sizes)


def lists_html(listed: list[Listed]) -> Html | None:
    """Return the section of all declared tables."""
    if not listed:
        return None
    parts = []
    for one in listed:
        parts.append(pairs_table(one.heads, one.rows, one.title))
        if one.note:
            parts.append(tag("p", one.note, class_="soft"))
    return section("lists", "Lists", *parts)


def lists_markdown(listed: list[Listed]) -> str:
    """Return the same in Markdown."""
    parts = []
    for one in listed:
        rows = [[plain(cell) for cell in row] for row in one.rows]
        table = table_markdown([plain(head) for head in one.heads], rows)
        parts.append(f"### {plain(one.title)}\n\n{table}" + (f"\n{one.note}\n" if one.note else ""))
    return "## Lists\n\n" + "\n".join(parts) if parts else ""
