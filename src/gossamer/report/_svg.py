"""The look of every figure, and SVG text that takes the colour of the page it is put into."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "DASHES",
    "HATCHES",
    "INK",
    "MARKERS",
    "WIDTH",
    "finish",
    "look",
    "prefix_ids",
]

WIDTH = 5.8  # inches: at a phone's 360 pixels the text is still 10 pixels high
INK = "#010203"  # drawn in this colour, written as currentColor

# Okabe and Ito's palette; its black is the ink, its orange and sky blue are darkened and its yellow
# is left out, so that each has a contrast of at least 3 on white and on near-black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", INK, "#b07a00", "#3a94c8")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1, 1.4)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (8, 2, 1, 2, 1, 2)),
)
HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++")

# Changes stay inside of elements: what a label says is never touched.
_TAG = re.compile(r"<[^<>]+>")

_FONTS = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": False,
    "axes.labelcolor": INK,
    "axes.labelsize": 12,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "gossamer",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
_OWN = (
    "axes",
    "errorbar",
    "figure",
    "font",
    "grid",
    "hatch",
    "legend",
    "lines",
    "patch",
    "path",
    "savefig",
)


@contextmanager
def look() -> Iterator[None]:
    """Draw in the house style whatever the user's own settings are; those come back after."""
    settings: dict[Any, Any] = {
        key: value
        for key, value in matplotlib.rcParamsDefault.items()
        if key.split(".")[0] in (*_OWN, "svg", "text", "xtick", "ytick")
    }
    settings |= _STYLE
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # The reader's browser draws the text and has more letters than the font measured with here.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def prefix_ids(svg: str, prefix: str) -> str:
    """Put a prefix before every id and every reference to one, so that figures can share a page."""

    def renamed(element: re.Match[str]) -> str:
        text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", element[0])
        return re.sub(r'(labelledby=")(\S+) (\S+)"', rf'\g<1>{prefix}-\2 {prefix}-\3"', text)

    return _TAG.sub(renamed, svg)


def _head(title: str, alt: str) -> str:
    # :root is the drawing only where it stands alone or in an <img>; inlined, the page rules.
    return (
        '<title id="title">' + escape(title) + '</title><desc id="desc">' + escape(alt) + "</desc>"
        "<style>svg:root{color-scheme:light dark;color:#1c2127}"
        "@media (prefers-color-scheme:dark){svg:root{color:#e6e9ed}}</style>"
    )


def _written(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None}
    )
    return buffer.getvalue().decode()


def _restyled(element: re.Match[str]) -> str:
    text = element[0].replace(INK, "currentColor")
    return re.sub(r"font-family: [^;\"]+", f"font-family: {_FONTS}", text)


def finish(figure: Figure, name: str, title: str, alt: str) -> str:
    """Turn a drawn figure into SVG text: page's colour and fonts, title, description, own ids."""
    svg = _written(figure)
    svg = svg[svg.index("<svg") :]
    # A rule for every element would reach other drawings of the page; inheritance does the same.
    svg = re.sub(r"<defs>\s*<style[^>]*>\*\{[^}]*\}</style>\s*</defs>\s*", "", svg, count=1)
    svg = _TAG.sub(_restyled, svg)
    lines = "stroke-linejoin: round; stroke-linecap: butt"
    root = f'role="img" aria-labelledby="title desc" style="{lines}"'
    end = svg.index(">")
    svg = f"{svg[:4]} {root}{svg[4 : end + 1]}\n{_head(title, alt)}{svg[end + 1 :]}"
    return prefix_ids(svg, name)
