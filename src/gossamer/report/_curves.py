"""Curves: one line per group, a band over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gossamer.errors import DataError

from ._chart import (
    Chart,
    canvas,
    group_name,
    legend,
    name_axes,
    paper_lines,
    seal,
    set_ticks,
    set_values,
)
from ._data import Row, Spread, numeric, ordered, summarise
from ._numbers import show
from ._svg import COLOURS, DASHES, INK, MARKERS, look

__all__ = ["draw_curves"]

Points = Mapping[float, Spread]


def _lines(rows: Sequence[Row], chart: Chart) -> dict[str, Points]:
    places = summarise(rows, (chart.group or "", chart.x), chart.y)
    lines: dict[str, dict[float, Spread]] = {}
    for (group, x), spread in places.items():
        place = numeric(x, chart.x)
        if place is None:
            raise DataError(
                f"column {chart.x!r} must hold a number in each row with a {chart.y!r}; got {x!r}."
            )
        lines.setdefault(group_name(group), {})[place] = spread
    return {group: dict(sorted(points.items())) for group, points in lines.items()}


def _seeds(points: Points) -> str:
    counts = sorted({spread.seeds for spread in points.values()})
    return f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]}–{counts[-1]}"


def _line(axes: Axes, points: Points, style: int, band: bool) -> Line2D:
    colour, x = COLOURS[style % len(COLOURS)], list(points)
    if band:
        low, high = [s.low for s in points.values()], [s.high for s in points.values()]
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    # The first line is solid and wide and lies below, so that it shows through those that cover it.
    (line,) = axes.plot(
        x, [s.middle for s in points.values()], color=colour, linestyle=DASHES[style % len(DASHES)],
        linewidth=2.6 if style == 0 else 1.8, marker=MARKERS[style % len(MARKERS)],
        markersize=6.5 if style == 0 else 5, zorder=2 + style / 100,
    )  # fmt: skip
    return line


def _describe(lines: Mapping[str, Points], chart: Chart) -> str:
    ends = [
        f"{group}: {show(points[first].middle)} at {first:g} "
        f"and {show(points[last].middle)} at {last:g}"
        for group, points in lines.items()
        for first, last in [(min(points), max(points))]
    ]
    return f"Lines of {chart.y} over {chart.x}, one per {chart.group}. " + "; ".join(ends) + "."


def _shade(axes: Axes, chart: Chart) -> list[tuple[Any, str]]:
    if chart.shade is None:
        return []
    axes.axvspan(*chart.shade, color=INK, alpha=0.09, linewidth=0, zorder=0.5)
    return [(Patch(color=INK, alpha=0.13, linewidth=0), "trained range")]


def draw_curves(rows: Sequence[Row], chart: Chart) -> str:
    """Draw curves and return them as SVG text."""
    lines = _lines(rows, chart)
    points = [point for line in lines.values() for point in line]
    spreads = [spread for line in lines.values() for spread in line.values()]
    with look():
        figure, axes = canvas(chart, 2.75)
        if chart.log_x:
            axes.set_xscale("log", nonpositive="clip")
        entries: list[tuple[Any, str]] = []
        for group, line in lines.items():
            style = chart.place(group, list(lines))
            drawn = _line(axes, line, style, chart.band == "minmax")
            entries.append((drawn, f"{group} ({_seeds(line)})" if chart.counted else group))
        entries += _shade(axes, chart)
        entries += paper_lines(axes, chart.paper)
        set_values(axes, chart, [v for s in spreads for v in (s.low, s.high)])
        set_ticks(axes.xaxis, ordered(points), log=chart.log_x)
        name_axes(figure, axes, chart.x_label or chart.x, chart.y_label or chart.y)
        legend(figure, entries)
        return seal(figure, chart, _describe(lines, chart))
