"""Bars: one per place and group, lying, with the range over seeds and the value beside it."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ._chart import Chart, canvas, group_name, legend, name_axes, paper_lines, seal, set_values
from ._data import Row, Spread, ordered, summarise
from ._numbers import decimals, show
from ._svg import COLOURS, HATCHES, INK, look

__all__ = ["draw_bars"]

Bars = dict[tuple[str, str], Spread]


def _bars(rows: Sequence[Row], chart: Chart) -> tuple[Bars, list[str], list[str]]:
    keys = (chart.x, chart.group) if chart.group else (chart.x,)
    found = summarise(rows, keys, chart.y)
    places = [group_name(x) for x in ordered(key[0] for key in found)]
    groups = [group_name(g) for g in ordered(key[1] for key in found)] if chart.group else [""]
    named = {
        (group_name(k[0]), group_name(k[1]) if chart.group else ""): s for k, s in found.items()
    }
    return named, places, groups


def _bar(axes: Axes, at: float, height: float, spread: Spread, look: tuple[str, str]) -> Patch:
    bar: Patch = axes.barh(
        at, spread.middle, height * 0.92, color=look[0], hatch=look[1], edgecolor=INK, linewidth=0
    )[0]
    if spread.seeds > 1:
        reach = [[spread.middle - spread.low], [spread.high - spread.middle]]
        axes.errorbar(spread.middle, at, xerr=reach, color=INK, capsize=3, linewidth=1.2)
    return bar


def _look(chart: Chart, place: str, group: str, groups: Sequence[str]) -> tuple[str, str]:
    # Without groups a bar has its name beside it, so colour only ties it to the other figures.
    if chart.group:
        style = chart.place(group, groups)
        return COLOURS[style % len(COLOURS)], HATCHES[style % len(HATCHES)]
    return COLOURS[chart.place(place, [place]) % len(COLOURS)], ""


def _value(axes: Axes, at: float, spread: Spread, text: str) -> None:
    left = spread.middle < 0
    axes.annotate(
        text, (spread.low if left else spread.high, at), xytext=(-5 if left else 5, 0), fontsize=11,
        textcoords="offset points", va="center_baseline", ha="right" if left else "left",
    )  # fmt: skip


def _describe(bars: Bars, chart: Chart) -> str:
    texts = [f"{', '.join(filter(None, key))}: {show(s.middle)}" for key, s in bars.items()]
    return f"Bars of {chart.y} by {chart.x}. " + "; ".join(texts) + "."


def _set_axes(axes: Axes, chart: Chart, places: Sequence[str], spreads: Sequence[Spread]) -> None:
    axes.set_yticks(range(len(places)), [fill(place, 24) for place in places])
    axes.set_ylim(len(places) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    ends = [v for s in spreads for v in (s.low, s.high)]
    set_values(axes, chart, ends if chart.log_y else [0.0, *ends], which="x")
    low, high = axes.get_xlim()
    if not chart.log_y:
        # Room for the numbers beside the bars; nothing is left of a zero that all bars start at.
        axes.set_xlim(low - 0.1 * (high - low) if min(ends) < 0 else 0.0, high + 0.1 * (high - low))
        axes.axvline(0, color=INK, linewidth=0.8)
    else:
        axes.set_xlim(low, high * (high / low) ** 0.12)
    axes.spines["left"].set_visible(False)


def draw_bars(rows: Sequence[Row], chart: Chart) -> str:
    """Draw bars and return them as SVG text."""
    bars, places, groups = _bars(rows, chart)
    digits = decimals([spread.middle for spread in bars.values()])
    # a place gives room to the groups that it has
    here = {place: [g for g in groups if (place, g) in bars] for place in places}
    slots = max(map(len, here.values()))
    thick = 0.8 / slots
    with look():
        figure, axes = canvas(chart, 0.75 + max(0.34, 0.24 * slots) * len(places))
        handles: dict[str, Any] = {}
        for (place, group), spread in bars.items():
            own = here[place]
            at = places.index(place) + (own.index(group) - (len(own) - 1) / 2) * thick
            handles[group] = _bar(axes, at, thick, spread, _look(chart, place, group, groups))
            _value(axes, at, spread, show(spread.middle, digits))
        entries = [(handles[group], group) for group in groups if group]
        entries += paper_lines(axes, chart.paper, along="y")
        _set_axes(axes, chart, places, list(bars.values()))
        name_axes(figure, axes, chart.y_label or chart.y, chart.x_label or "")
        legend(figure, entries)
        return seal(figure, chart, _describe(bars, chart))
