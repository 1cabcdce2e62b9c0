"""The figures of a run, drawn from its rows as its page declares them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gossamer.errors import DataError, GossamerError

from ._chart import Chart
from ._data import Row, need_columns, numeric
from ._run import FigureSpec, Run
from .figures import DRAW

__all__ = ["Drawn", "draw_figure", "filtered", "value_range"]

_READING = {
    "curve": "Line: median over the n seeds. Band: from the lowest to the highest seed.",
    "heatmap": "Each cell: median over the seeds.",
    "bars": "Bar: median over the seeds. Whisker: from the lowest to the highest seed.",
}


@dataclass(frozen=True)
class Drawn:
    """A figure with the words around it."""

    name: str
    title: str
    alt: str
    note: str
    svg: str


def _matches(cell: Any, wanted: Any) -> bool:
    options = wanted if isinstance(wanted, list) else [wanted]
    return any(cell == option or str(cell) == str(option) for option in options)


def filtered(rows: Sequence[Row], where: Mapping[str, Any]) -> list[Row]:
    """Return the rows whose cells agree with a filter; an error if none does."""
    need_columns(rows, where)
    kept = [
        row for row in rows if all(_matches(row.get(c, ""), wanted) for c, wanted in where.items())
    ]
    if not kept:
        raise DataError(
            f"no row of rows.csv agrees with where = {dict(where)!r}. Correct the filter."
        )
    return kept


def _group(spec: FigureSpec) -> str | None:
    # Curves and grouped bars compare arms unless the recipe says otherwise.
    if spec.kind == "heatmap" or "arm" in (spec.x, spec.y):
        return spec.group
    return spec.group or "arm"


def _one_arm(rows: Sequence[Row], spec: FigureSpec, run: Run) -> tuple[list[Row], str]:
    """Keep one arm where the figure does not tell arms apart: a median across them is no result."""
    arms = list(dict.fromkeys(str(row["arm"]) for row in rows if "arm" in row))
    if "arm" in (spec.x, spec.y, _group(spec)) or len(arms) < 2:
        return list(rows), ""
    ours = [arm.name for arm in run.page.arms if arm.role == "ours" and arm.name in arms]
    chosen = (ours or arms)[0]
    return [row for row in rows if row["arm"] == chosen], f"Shown: {run.arm_title(chosen)}."


def _rows(spec: FigureSpec, run: Run) -> tuple[list[Row], str]:
    rows, note = _one_arm(filtered(run.rows, spec.where), spec, run)
    names = [arm.name for arm in run.page.arms]
    rank = {name: index for index, name in enumerate(names)}
    rows.sort(key=lambda row: rank.get(str(row.get("arm", "")), len(rank)))
    return [
        {**row, "arm": run.arm_title(str(row["arm"]))} if "arm" in row else row for row in rows
    ], note


def _values(rows: Sequence[Row], spec: FigureSpec) -> list[float | None]:
    column = spec.value if spec.kind == "heatmap" and spec.value else spec.y
    need_columns(rows, [column])
    return [numeric(row.get(column), column) for row in rows]


def value_range(spec: FigureSpec, run: Run) -> tuple[float, float]:
    """Lowest and highest value a figure shows, for two runs side by side on one scale."""
    with _named(spec, run):
        known = [v for v in _values(_rows(spec, run)[0], spec) if v is not None]
    return (min(known), max(known)) if known else (0.0, 1.0)


def _chart(spec: FigureSpec, run: Run, limits: tuple[float, float] | None) -> Chart:
    box: Sequence[Sequence[float]] | None = spec.box
    if spec.shade and box is None:
        box = (spec.shade, (-math.inf, math.inf))
    return Chart(
        x=spec.x, y=spec.y, group=_group(spec), value=spec.value,
        band="minmax" if run.is_recipe else None, counted=run.is_recipe, shade=spec.shade, box=box,
        x_label=spec.x_label, y_label=spec.y_label, log_x=spec.log_x, log_y=spec.log_y,
        paper=spec.paper, alt=spec.alt, name=spec.name, heading=spec.title or spec.name,
        order=[run.arm_title(arm.name) for arm in run.page.arms], limits=limits,
    )  # fmt: skip


@contextmanager
def _named(spec: FigureSpec, run: Run) -> Iterator[None]:
    try:
        yield
    except GossamerError as error:
        place = run.folder / "page.json"
        raise DataError(f"{place}, figure {spec.name!r}: {error}") from None


def _left_out(rows: Sequence[Row], spec: FigureSpec) -> str:
    missing = _values(rows, spec).count(None)
    return f"Left out: {missing} of {len(rows)} rows, without a finite value." if missing else ""


def draw_figure(spec: FigureSpec, run: Run, limits: tuple[float, float] | None = None) -> Drawn:
    """Draw one declared figure; `limits` widens its values to a range shared with another run."""
    with _named(spec, run):
        rows, shown = _rows(spec, run)
        svg = DRAW[spec.kind](rows, _chart(spec, run, limits))
        # a run that is no recipe has one seed, and nothing to take a median of
        reading = _READING[spec.kind] if run.is_recipe else ""
        note = " ".join(filter(None, (shown, reading, spec.note, _left_out(rows, spec))))
    return Drawn(spec.name, spec.title or spec.name, spec.alt or spec.title or spec.name, note, svg)
