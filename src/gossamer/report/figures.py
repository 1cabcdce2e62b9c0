"""Figures from plain rows, as SVG that follows the colour of the page it stands in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.checks import check_choice
from gossamer.files import write_text

from ._bars import draw_bars
from ._chart import Chart
from ._curves import draw_curves
from ._data import Row
from ._heatmap import draw_heatmap

__all__ = ["plot_bars", "plot_curves", "plot_heatmap"]


def _target(path: str | Path) -> tuple[Path, str]:
    target = Path(path)
    check_choice(target.suffix, (".svg",), "ending of a figure's file")
    return target, "".join(c if c.isalnum() or c in "-_" else "-" for c in target.stem)


def plot_curves(
    rows: Sequence[Row],
    path: str | Path,
    *,
    x: str,
    y: str,
    group: str,
    band: str | None = None,
    shade: Sequence[float] | None = None,
    title: str | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
    log_x: bool = False,
    log_y: bool = False,
    paper: Mapping[str, float] | None = None,
    alt: str | None = None,
) -> None:
    """Draw one line per group: the median over seeds of `y` at each `x`.

    Rows that agree in `group` and `x` are the seeds of one point; if a column `seed` tells them
    apart, several rows of one seed are averaged first. Lines differ in colour, marker and dashes,
    and the legend gives the number of seeds. The same rows give the same bytes.

    Args:
        rows: One mapping per measurement. Rows without a finite `y` are left out.
        path: The `.svg` file to write.
        x: Column of the horizontal axis; numbers.
        y: Column of the vertical axis; numbers.
        group: Column whose values are the lines.
        band: `"minmax"` shades the range from the lowest to the highest seed; `None` draws no band.
        shade: Two values of `x`; the range between is shaded and called "trained range".
        title: Drawn above the axes.
        x_label: Name of the horizontal axis; the column's name if `None`.
        y_label: Name of the vertical axis; the column's name if `None`.
        log_x: Logarithmic horizontal axis.
        log_y: Logarithmic vertical axis; values that are not positive fall below it.
        paper: Values printed in the paper, label to value, as broken horizontal lines.
        alt: Text alternative for readers who do not see the figure; made from the data if `None`.

    Raises:
        ConfigError: If a column does not exist, or the file does not end in `.svg`.
        DataError: If there are no rows, or a cell of `x` or `y` is no number.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "loss.svg"
        >>> rows = [{"arm": "ours", "step": t, "loss": 1 / t} for t in (1, 2, 4)]
        >>> plot_curves(rows, path, x="step", y="loss", group="arm", band="minmax")
        >>> path.read_text()[:4]
        '<svg'
    """
    target, name = _target(path)
    check_choice(band or "none", ("minmax", "none"), "band")
    chart = Chart(
        x=x, y=y, group=group, band=band, shade=(shade[0], shade[1]) if shade else None,
        title=title, x_label=x_label, y_label=y_label, log_x=log_x, log_y=log_y, paper=paper or {},
        alt=alt, name=name,
    )  # fmt: skip
    write_text(target, draw_curves(rows, chart))


def plot_heatmap(
    rows: Sequence[Row],
    path: str | Path,
    *,
    x: str,
    y: str,
    value: str,
    title: str | None = None,
    box: Sequence[Sequence[float]] | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
    alt: str | None = None,
) -> None:
    """Draw one cell per pair of `x` and `y`: the median over seeds of `value`, as its number.

    Args:
        rows: One mapping per measurement.
        path: The `.svg` file to write.
        x: Column of the horizontal axis; numbers in order of size, anything else as first seen.
        y: Column of the vertical axis, upwards.
        value: Column that gives colour and number of a cell.
        title: Drawn above the axes.
        box: `[[x_lo, x_hi], [y_lo, y_hi]]`, both ends included: the trained region, outlined.
        x_label: Name of the horizontal axis; the column's name if `None`.
        y_label: Name of the vertical axis; the column's name if `None`.
        alt: Text alternative for readers who do not see the figure; made from the data if `None`.

    Raises:
        ConfigError: If a column does not exist, or the file does not end in `.svg`.
        DataError: If there are no rows, or a cell of `value` is no number.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "map.svg"
        >>> rows = [{"a": i, "b": j, "match": i * j / 9} for i in range(4) for j in range(4)]
        >>> plot_heatmap(rows, path, x="a", y="b", value="match", box=[[0, 1], [0, 1]])
        >>> path.exists()
        True
    """
    target, name = _target(path)
    chart = Chart(
        x=x,
        y=y,
        value=value,
        title=title,
        box=box,
        x_label=x_label,
        y_label=y_label,
        alt=alt,
        name=name,
    )
    write_text(target, draw_heatmap(rows, chart))


def plot_bars(
    rows: Sequence[Row],
    path: str | Path,
    *,
    x: str,
    y: str,
    group: str | None = None,
    title: str | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
    log_y: bool = False,
    paper: Mapping[str, float] | None = None,
    alt: str | None = None,
) -> None:
    """Draw one bar per `x` (and group): the median over seeds of `y`, with lowest and highest.

    Names lie on the vertical axis, where long ones can be read; numbers lie on the horizontal one.

    Args:
        rows: One mapping per measurement.
        path: The `.svg` file to write.
        x: Column of the places; numbers in order of size, anything else as first seen.
        y: Column of the heights; numbers.
        group: Column that splits each place into bars side by side.
        title: Drawn above the axes.
        x_label: Name of the axis of places; the column's name if `None`.
        y_label: Name of the axis of values; the column's name if `None`.
        log_y: Logarithmic axis of values.
        paper: Values printed in the paper, label to value, as broken lines.
        alt: Text alternative for readers who do not see the figure; made from the data if `None`.

    Raises:
        ConfigError: If a column does not exist, or the file does not end in `.svg`.
        DataError: If there are no rows, or a cell of `y` is no number.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "bars.svg"
        >>> rows = [{"arm": "ours", "error": 0.1}, {"arm": "other", "error": 0.4}]
        >>> plot_bars(rows, path, x="arm", y="error")
        >>> path.exists()
        True
    """
    target, name = _target(path)
    chart = Chart(
        x=x, y=y, group=group, title=title, x_label=x_label, y_label=y_label, log_y=log_y,
        paper=paper or {}, alt=alt, name=name,
    )  # fmt: skip
    write_text(target, draw_bars(rows, chart))


DRAW: dict[str, Any] = {"bars": draw_bars, "curve": draw_curves, "heatmap": draw_heatmap}
