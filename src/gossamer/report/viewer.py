"""The attention viewer: one page that works offline, with the weights inside."""

from __future__ import annotations

import base64
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.checks import check_choice
from gossamer.errors import ConfigError, DataError
from gossamer.files import without_nan, write_text

from ._html import Html, document, each, join, packaged, scroll, section, tag

if TYPE_CHECKING:
    from gossamer.attention import AttentionMaps, LayerMaps

__all__ = ["check_size", "write_attention_page"]

# largest page in bytes; browsers open it within seconds
_LIMIT = 20_000_000
_SHOWN = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_MEASURES = ("entropy", "sparsity", "distance")


def write_attention_page(maps: AttentionMaps, path: str | Path) -> Path:
    """Write attention maps as one page: all heads, one head in detail, token lines, measures.

    The page holds its style, its script and the weights (as half-precision numbers, 3 digits), and
    loads nothing. Texts of tokens are shown, never read as markup.

    Args:
        maps: Of one sample, from `gossamer.attention.capture_attention`.
        path: The `.html` file to write.

    Returns:
        The path of the file.

    Raises:
        ConfigError: If the file does not end in `.html`, the maps are of several samples, or the
            page would be larger than 20 MB.
        DataError: If the number of tokens is not that of the maps.

    Example:
        >>> import tempfile, torch
        >>> from gossamer.attention import MultiHeadAttention, capture_attention
        >>> maps = capture_attention(MultiHeadAttention(16, 4), torch.randn(1, 5, 16))
        >>> write_attention_page(maps, f"{tempfile.mkdtemp()}/attention.html").name
        'attention.html'

    Source: views as in Vig, *A Multiscale Visualization of Attention*, ACL 2019.
    Deviations: none
    """
    target = Path(path)
    check_choice(target.suffix, (".html",), "ending of a page's file")
    check_size(maps)
    tokens = {name: _texts(maps, name) for name in ("input", "output")}
    data = {
        "tokens": {name: [_visible(text) for text in texts] for name, texts in tokens.items()},
        "stacks": _stacks(maps),
    }
    page = document(
        "Attention of " + _visible(maps.about.get("model", "a model")),
        _opening(maps),
        *_views(maps),
        _table(maps),
        _glossary(maps),
        _data(data),
        style=packaged("_viewer.css"),
        script=packaged("_viewer.js"),
    )
    write_text(target, page)
    return target


def check_size(maps: AttentionMaps) -> None:
    """Check that maps fit on a page.

    Raises:
        ConfigError: If they are of several samples, or too many.
    """
    samples = {len(layer.weights) for layer in maps.layers}
    if samples != {1}:
        raise ConfigError(
            f"maps must be of one sample; got {max(samples)}. Choose one: maps.sample(0)."
        )
    size = sum(layer.weights.size for layer in maps.layers) * 8 // 3  # two bytes, as base64
    if size > _LIMIT:
        raise ConfigError(
            f"the page must be at most {_LIMIT // 10**6} MB; got {size / 1e6:.0f} MB of weights "
            f"from {len(maps.layers)} layers. Keep fewer layers (--layers 0,1) or view a shorter "
            "text."
        )


def _texts(maps: AttentionMaps, name: str) -> list[str]:
    """Return the labels of a sequence, numbers where there are none."""
    lengths = {layer.weights.shape[2] for layer in maps.layers if layer.queries == name}
    lengths |= {layer.weights.shape[3] for layer in maps.layers if layer.keys == name}
    given = maps.tokens.get(name)
    if given is None:
        return [str(place) for place in range(max(lengths, default=0))]
    if lengths - {len(given)}:
        raise DataError(
            f"tokens[{name!r}] must hold one text for each place of the maps, "
            f"{', '.join(map(str, sorted(lengths)))}; got {len(given)}. Give all of them."
        )
    return list(given)


def _visible(text: str) -> str:
    """Return a text in which spaces, line ends and characters without a shape can be seen."""
    if not text:
        return "∅"
    return "".join(
        _SHOWN.get(c, f"\\u{ord(c):04x}" if unicodedata.category(c)[0] == "C" else c) for c in text
    )


def _stacks(maps: AttentionMaps) -> list[dict[str, Any]]:
    names = dict.fromkeys(layer.stack for layer in maps.layers)
    return [_stack([layer for layer in maps.layers if layer.stack == name]) for name in names]


def _stack(layers: Sequence[LayerMaps]) -> dict[str, Any]:
    first = layers[0]
    return {
        "name": first.stack,
        "queries": first.queries,
        "keys": first.keys,
        "layers": [
            {
                "name": layer.name,
                "note": layer.note,
                "shape": layer.weights.shape[1:],
                "weights": base64.b64encode(_half(layer.weights)).decode(),
                "measures": [[row[key] for key in _MEASURES] for row in layer.rows()],
            }
            for layer in layers
        ],
    }


def _half(weights: Any) -> bytes:
    limit = float(np.finfo(np.float16).max)
    numbers: bytes = np.clip(weights, -limit, limit).astype("<f2").tobytes()
    return numbers


def _data(data: Mapping[str, Any]) -> Html:
    text = json.dumps(without_nan(data), separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # inside of JSON these stand in texts only
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Html(text), type="application/json", id="data")


def _opening(maps: AttentionMaps) -> Html:
    facts = [
        part
        for title, text in maps.about.items()
        for part in (tag("dt", title), tag("dd", _lines(text)))
    ]
    heads = sum(layer.weights.shape[1] for layer in maps.layers)
    size = f"{_count(heads, 'head')} in {_count(len(maps.layers), 'layer')}"
    facts += [tag("dt", "maps"), tag("dd", size)]
    return join(tag("h1", "Attention, head by head"), tag("dl", *facts, class_="about"))


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _lines(text: str) -> str:
    return "\n".join(_visible(line).replace("␣", " ") for line in text.split("\n"))


def _views(maps: AttentionMaps) -> list[Html]:
    hint = "Choose a head with the mouse, or with the arrow keys and Enter."
    overview = section(
        "overview",
        "All heads",
        tag("p", hint, class_="soft"),
        tag("div", id="choices", class_="choices"),
        scroll("All heads", tag("div", id="heads", role="group", aria_label="Heads")),
        tag("p", id="scale", class_="soft"),
    )
    moving = "Point at a cell, or use the arrow keys on the map, for its weight."
    pinning = "Point at a token for its lines; click to keep them, Escape to let go."
    detail = section(
        "detail",
        "One head",
        tag("h3", id="head", aria_live="polite"),
        tag("p", id="facts", class_="soft"),
        tag(
            "div",
            tag(
                "div",
                tag("h3", "Weights: queries down, keys across"),
                tag("p", moving, class_="soft"),
                tag("p", id="readout", class_="readout", aria_live="polite"),
                scroll("Weights of this head", tag("div", id="map")),
            ),
            tag(
                "div",
                tag("h3", "Token lines: queries left, keys right"),
                tag("p", pinning, class_="soft"),
                tag("div", id="lines"),
                class_="linepart",
            ),
            class_="parts",
        ),
        tag("noscript", tag("p", "The maps need JavaScript; the table below does not.")),
    )
    return [overview, detail]


def _table(maps: AttentionMaps) -> Html:
    heads = ("head", "entropy (bits)", "sparsity", "distance (tokens)")
    rows = [
        tag(
            "tr",
            tag("th", f"{layer.name}, head {row['head']}", scope="row"),
            each("td", [_number(row[key]) for key in _MEASURES]),
        )
        for layer in maps.layers
        for row in layer.rows()
    ]
    table = tag(
        "table",
        tag("thead", tag("tr", each("th", heads, scope="col"))),
        tag("tbody", *rows),
        class_="measures",
    )
    summary = tag("summary", f"Measures of {_count(len(rows), 'head')} as a table")
    box = tag("details", summary, scroll("Measures of all heads", table), open=_open(len(rows)))
    return section("measures", "Measures", box)


def _open(rows: int) -> str | None:
    return "" if rows <= 16 else None


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def _glossary(maps: AttentionMaps) -> Html:
    words = {
        "weight": "How much of a key's value goes into the output of a query. Colour and the "
        "opacity of lines show it; keys that a query may not see have none.",
        "entropy": "Bits of a query's weights, mean over queries: 0 when each reads one key, "
        "log2 n when it reads n keys alike.",
        "sparsity": "1 minus the share of the visible keys that hold 90 % of a query's weight, "
        "mean over queries.",
        "distance": "Mean distance in tokens between a query and what it reads. Maps from one "
        "sequence to another have none.",
    }
    if any((layer.weights < 0).any() for layer in maps.layers):
        words["negative weights"] = "They occur in this model; colour shows their size."
    parts = [part for word, text in words.items() for part in (tag("dt", word), tag("dd", text))]
    return section("words", "How to read it", tag("dl", *parts))
