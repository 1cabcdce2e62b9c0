"""What the three kinds of figures share: the request, scales, ticks, legend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill, wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ._numbers import as_given, show
from ._svg import DASHES, INK, WIDTH, finish

__all__ = [
    "Chart",
    "canvas",
    "group_name",
    "legend",
    "name_axes",
    "paper_lines",
    "seal",
    "set_ticks",
    "set_values",
    "unit_range",
]

Entry = tuple[Any, str]

_POINTS = 330.0  # width of the axes, in points, once labels took their part


@dataclass(frozen=True)
class Chart:
    """One figure, asked for."""

    x: str
    y: str
    group: str | None = None
    value: str | None = None
    band: str | None = None
    counted: bool = True  # the legend says how many seeds
    shade: tuple[float, float] | None = None
    box: Sequence[Sequence[float]] | None = None
    title: str | None = None
    x_label: str | None = None
    y_label: str | None = None
    log_x: bool = False
    log_y: bool = False
    paper: Mapping[str, float] = field(default_factory=dict)
    alt: str | None = None
    name: str = "figure"
    heading: str | None = None
    order: Sequence[str] = ()
    limits: tuple[float, float] | None = None

    def place(self, group: str, groups: Sequence[str]) -> int:
        """Number of a group in the order that fixes colours, the same in all figures of a page."""
        return (list(self.order) if group in self.order else list(groups)).index(group)


def group_name(value: Any) -> str:
    """Name of a group in a legend."""
    return show(value, 0) if isinstance(value, int) else str(value)


def canvas(chart: Chart, height: float) -> tuple[Figure, Axes]:
    """Make an empty figure with one pair of axes, its title and its axis labels."""
    title = wrap(chart.title or "", 50)
    figure = Figure(figsize=(WIDTH, height + (0.1 + 0.2 * len(title) if title else 0.0)))
    axes = figure.add_subplot()
    if title:
        figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure, axes


def name_axes(figure: Figure, axes: Axes, across: str, up: str) -> None:
    """Name both axes, on several lines where one would leave the figure."""
    lines = wrap(across, 52)
    axes.set_xlabel("\n".join(lines))
    axes.set_ylabel(fill(up, 32))
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, len(lines) - 1))


def seal(figure: Figure, chart: Chart, described: str) -> str:
    """Write the figure as SVG; its description is the one asked for, or one made from the data."""
    heading = chart.heading or chart.title or f"{chart.value or chart.y} by {chart.x}"
    return finish(figure, chart.name, heading, chart.alt or described)


def _tick_text(value: float, _: object = None) -> str:
    if float(value).is_integer() and abs(value) < 1e7:
        text = f"{value:,.0f}"
        return text.replace("-", "−")
    return as_given(float(f"{value:.4g}"))


def _thinned(values: Sequence[float], log: bool, span: tuple[float, float]) -> list[float]:
    # Both ends are kept, and between them each value whose label touches none already placed.
    def place(value: float) -> float:
        low, high, v = (math.log10(u) for u in (*span, value)) if log else (*span, value)
        return _POINTS * (v - low) / (high - low) if high > low else 0.0

    kept: list[float] = []
    for value in dict.fromkeys([values[0], values[-1], *values]):
        room = 3.4 * len(_tick_text(value)) + 3
        if all(abs(place(value) - place(k)) > room + 3.4 * len(_tick_text(k)) for k in kept):
            kept.append(value)
    return sorted(kept)


def set_ticks(axis: Axis, values: Sequence[float], *, log: bool) -> None:
    """Put ticks at the data's own values when these are few and short, else at round ones."""
    axis.set_major_formatter(FuncFormatter(_tick_text))
    axis.set_minor_locator(NullLocator())
    places = [v for v in values if v > 0 or not log]
    short = all(float(f"{v:.3g}") == v or float(v).is_integer() for v in places)
    if 0 < len(places) <= 12 and short:
        low, high = axis.get_view_interval()
        axis.set_major_locator(FixedLocator(_thinned(places, log, (low, high))))
    else:
        axis.set_major_locator(LogLocator(numticks=7) if log else MaxNLocator(7))


def unit_range(values: Sequence[float]) -> tuple[float, float] | None:
    """The range 0 to 1 for shares of a whole that fill it or hardly differ, else `None`."""
    low, high = min(values), max(values)
    return (0.0, 1.0) if low >= 0 and high <= 1 and not 0.02 < high - low < 0.3 else None


def set_values(axes: Axes, chart: Chart, values: Sequence[float], which: str = "y") -> None:
    """Set the axis of values; shares show all of 0 to 1, so that a small change looks small."""
    axis: Axis = getattr(axes, f"{which}axis")
    values = [*values, *(chart.limits or ()), *chart.paper.values()]
    if chart.log_y:
        getattr(axes, f"set_{which}scale")("log", nonpositive="clip")
        axis.set_major_locator(LogLocator(numticks=7))
        positive = [v for v in values if v > 0] or [1.0]
        getattr(axes, f"set_{which}lim")(min(positive) / 1.4, max(positive) * 1.4)
    else:
        axis.set_major_locator(MaxNLocator(6))
        low, high = unit_range(values) or (min(values), max(values))
        margin = 0.04 * (high - low) or 0.04 * abs(high) or 0.04
        getattr(axes, f"set_{which}lim")(low - margin, high + margin)
    axis.set_major_formatter(FuncFormatter(_tick_text))
    axis.set_minor_locator(NullLocator())
    axes.grid(axis="x" if which == "x" else "y")


def paper_lines(axes: Axes, paper: Mapping[str, float], *, along: str = "x") -> list[Entry]:
    """Draw the paper's values as thin broken lines across the figure."""
    draw = axes.axhline if along == "x" else axes.axvline
    style: dict[str, Any] = {"color": INK, "alpha": 0.75, "linewidth": 1.1, "zorder": 1.5}
    return [
        (draw(value, linestyle=DASHES[1 + i % 4], **style), f"paper: {label} ({as_given(value)})")
        for i, (label, value) in enumerate(paper.items())
    ]


def legend(figure: Figure, entries: Sequence[Entry]) -> None:
    """Put the legend below the axes, outside of the data, in as many columns as its names allow."""
    if not entries:
        return
    # Matplotlib drops names that start with an underscore; a zero-width space keeps them.
    texts = [f"\u200b{label}" if label.startswith("_") else label for _, label in entries]
    labels = [fill(text, 50) for text in texts]
    lines = [label.splitlines() or [""] for label in labels]
    widest = max(len(line) for label in lines for line in label) * 6.5 + 42
    columns = max(1, min(len(entries), int(WIDTH * 72 / widest)))
    figure.legend(
        [handle for handle, _ in entries], labels, loc="outside lower left", ncols=columns,
        handlelength=2.6, columnspacing=1.4, borderpad=0.1,
    )  # fmt: skip
    rows = math.ceil(sum(map(len, lines)) / columns)
    figure.set_figheight(figure.get_figheight() + 0.22 * rows)
