"""Heat maps: one cell per pair, with its number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from ._chart import Chart, canvas, legend, name_axes, seal, unit_range
from ._data import Row, Spread, ordered, summarise
from ._numbers import decimals, show
from ._svg import INK, WIDTH, look

__all__ = ["draw_heatmap"]

_GAP = 0.04
_SMALLEST = 5.5  # points; below this a number in a cell is a smudge

Cells = Mapping[tuple[Any, Any], Spread]


def _colour(value: float, low: float, high: float) -> tuple[float, float, float, float]:
    red, green, blue, alpha = matplotlib.colormaps["viridis"](
        (value - low) / (high - low) if high > low else 0.5
    )
    return float(red), float(green), float(blue), float(alpha)


def _text_colour(colour: Sequence[float]) -> str:
    # Relative luminance; 0.18 is where black and white text have the same contrast.
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if luminance < 0.18 else "#111111"


def _cell(
    axes: Axes,
    at: tuple[int, int],
    value: float,
    span: tuple[float, float],
    text: tuple[str, float],
) -> None:
    colour = _colour(value, *span)
    corner = (at[0] - 0.5 + _GAP, at[1] - 0.5 + _GAP)
    axes.add_patch(Rectangle(corner, 1 - 2 * _GAP, 1 - 2 * _GAP, facecolor=colour, linewidth=0))
    if text[1] >= _SMALLEST:
        axes.text(
            *at,
            text[0],
            ha="center",
            va="center_baseline",
            fontsize=text[1],
            color=_text_colour(colour),
        )


def _inside(places: Sequence[Any], bounds: Sequence[float]) -> list[int]:
    return [
        i
        for i, v in enumerate(places)
        if isinstance(v, int | float) and bounds[0] <= v <= bounds[1]
    ]


def _outline(
    axes: Axes, chart: Chart, across: Sequence[Any], up: Sequence[Any]
) -> list[tuple[Any, str]]:
    if chart.box is None:
        return []
    columns, lines = _inside(across, chart.box[0]), _inside(up, chart.box[1])
    if not columns or not lines:
        return []
    corner = (columns[0] - 0.5, lines[0] - 0.5)
    size = (columns[-1] - columns[0] + 1, lines[-1] - lines[0] + 1)
    style: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 2.4}
    axes.add_patch(Rectangle(corner, *size, **style, zorder=4, clip_on=False))
    return [(Patch(**style), "trained range")]


def _labels(places: Sequence[Any], room: float, upright: bool) -> tuple[range, list[str]]:
    # Every label, or every second, third ... where they would touch.
    names = [show(v, 0) if isinstance(v, int) else f"{v}" for v in places]
    each = 14.0 if upright else 6.6 * max(map(len, names)) + 4
    step = max(1, math.ceil(each * len(places) / room))
    return range(0, len(places), step), names[::step]


def _set_axes(
    axes: Axes, chart: Chart, across: Sequence[Any], up: Sequence[Any], height: float
) -> None:
    axes.set_xlim(-0.55, len(across) - 0.45)
    axes.set_ylim(-0.55, len(up) - 0.45)
    axes.set_xticks(*_labels(across, WIDTH * 72 - 60, upright=False))
    axes.set_yticks(*_labels(up, height * 72 - 40, upright=True))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _key(span: tuple[float, float], places: int | None) -> list[tuple[Any, str]]:
    steps = [span[0] + (span[1] - span[0]) * i / 4 for i in range(5)]
    return [(Patch(color=_colour(v, *span)), show(v, places)) for v in steps]


def _describe(cells: Cells, chart: Chart) -> str:
    best = max(cells, key=lambda place: cells[place].middle)
    worst = min(cells, key=lambda place: cells[place].middle)
    return (
        f"Map of {chart.value} over {chart.x} and {chart.y}. "
        f"Lowest {show(cells[worst].middle)} at {chart.x} {worst[0]}, {chart.y} {worst[1]}; "
        f"highest {show(cells[best].middle)} at {chart.x} {best[0]}, {chart.y} {best[1]}."
    )


def draw_heatmap(rows: Sequence[Row], chart: Chart) -> str:
    """Draw a heat map and return it as SVG text."""
    cells = summarise(rows, (chart.x, chart.y), chart.value or "")
    across, up = ordered(x for x, _ in cells), ordered(y for _, y in cells)
    middles = [spread.middle for spread in cells.values()]
    values = [*middles, *(chart.limits or ())]
    span = unit_range(values) or (min(values), max(values))
    places = decimals(middles)
    longest = max(len(show(v, places)) for v in middles)
    size = min(10.5, (WIDTH * 72 - 60) / len(across) / (longest * 0.62 + 0.5))
    with look():
        height = min(5.2, max(1.5, 0.7 + 0.36 * len(up)))
        figure, axes = canvas(chart, height)
        for (x, y), spread in cells.items():
            text = (show(spread.middle, places), size)
            _cell(axes, (across.index(x), up.index(y)), spread.middle, span, text)
        _set_axes(axes, chart, across, up, height)
        name_axes(figure, axes, chart.x_label or chart.x, chart.y_label or chart.y)
        entries = _outline(axes, chart, across, up)
        legend(figure, entries if size >= _SMALLEST else [*entries, *_key(span, places)])
        return seal(figure, chart, _describe(cells, chart))
