"""The parts of a page as HTML, in the order a reader meets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any
from urllib.parse import quote

from ._drawing import Drawn
from ._grid import Grid, Head, Line
from ._html import Html, Node, each, join, link, scroll, section, tag
from ._run import Run, Summary
from ._words import SYMBOLS, ClaimView, about, found, how_to_read, view_claim

__all__ = [
    "badge",
    "claims",
    "closing",
    "figure",
    "figures",
    "flatten",
    "grid_table",
    "opening",
    "pairs_table",
    "reading",
]


def _kind(verdict: str) -> str:
    return f"verdict {verdict.replace(' ', '-')}"


def badge(verdict: str) -> Html:
    """A verdict as symbol and word; the colour only repeats them."""
    symbol = tag("span", SYMBOLS[verdict], class_="symbol", aria_hidden="true")
    return tag("span", symbol, verdict, class_=_kind(verdict))


def _banner(summary: Summary) -> Html:
    symbol = tag("span", SYMBOLS[summary.verdict], class_="symbol", aria_hidden="true")
    word = tag("strong", summary.verdict.capitalize())
    return tag(
        "div",
        symbol,
        tag("p", word, " ", tag("span", found(summary.claims))),
        class_=f"{_kind(summary.verdict)} banner",
        id="verdict",
    )


def opening(run: Run) -> Html:
    """Title, verdict, what the page is about."""
    page, summary = run.page, run.summary
    return tag(
        "header",
        tag("h1", page.title),
        _banner(summary) if summary.verdict else None,
        tag("p", page.what, class_="lead") if page.what else None,
        tag("p", "Paper: ", tag("cite", page.paper), class_="soft") if page.paper else None,
        tag("p", " · ".join(about(run)), class_="soft"),
    )


def _stack(strong: str, note: str) -> list[Node]:
    return [tag("span", strong, class_="value"), tag("span", note, class_="note") if note else None]


def _claim_row(view: ClaimView, paper: bool) -> Html:
    # The roles keep the table a table for screen readers where CSS turns its rows into cards.
    cells: list[tuple[str, list[Node]]] = [
        ("Here", _stack(view.here, view.here_note)),
        ("Compared with", _stack(view.against, view.against_words())),
        ("Difference", _stack(view.difference, view.difference_note)),
    ]
    if paper:
        lines = tag("ul", each("li", view.paper), class_="plain") if view.paper else None
        cells.append(("Paper", [lines or "–"]))
    cells.append(("Verdict", [badge(view.verdict)]))
    return tag(
        "tr",
        tag("th", view.text, scope="row", role="rowheader"),
        *(
            tag(
                "td",
                *nodes,
                role="cell",
                data_label=label,
                class_="none" if nodes == ["–"] else None,
            )
            for label, nodes in cells
        ),
        role="row",
    )


def claims(run: Run) -> Html | None:
    """One row per claim: here, compared with what, difference, paper, verdict."""
    views = [view_claim(claim, run) for claim in run.summary.claims]
    if not views:
        return None
    paper = any(view.paper for view in views)
    heads = [
        "Claim",
        "Here",
        "Compared with",
        "Difference",
        *(["Paper"] if paper else []),
        "Verdict",
    ]
    table = tag(
        "table",
        tag("caption", "What was claimed, what was measured, and what follows"),
        tag(
            "thead",
            tag("tr", each("th", heads, scope="col", role="columnheader"), role="row"),
            role="rowgroup",
        ),
        tag("tbody", *(_claim_row(view, paper) for view in views), role="rowgroup"),
        class_="claims",
        role="table",
    )
    return section("claims", "Claims", table)


def figure(drawn: Drawn, svg: str, *, head: str | None = None) -> Html:
    """One figure with its title above and how to read it below."""
    caption = tag("figcaption", tag("h3", head or drawn.title))
    note = tag("p", drawn.note, class_="soft") if drawn.note else None
    return tag("figure", caption, Html(svg), note)


def figures(drawn: Sequence[Drawn]) -> Html | None:
    """All figures of a run."""
    if not drawn:
        return None
    shown = (figure(one, one.svg) for one in drawn)
    return section("figures", "Figures", tag("div", *shown, class_="figures"))


def _note(text: str) -> Html | None:
    return tag("span", text, class_="note") if text else None


def _head_rows(heads: Sequence[Head]) -> Html:
    """Names above, what was measured below; neighbours of one name share a cell."""
    groups = [(name, list(group)) for name, group in groupby(heads, key=lambda head: head.name)]
    upper = [
        tag("th", name, scope="colgroup", colspan=str(len(group)))
        if len(group) > 1
        else tag("th", name, scope="col", rowspan=None if group[0].note else "2")
        for name, group in groups
    ]
    lower = [tag("th", _note(head.note), scope="col") for head in heads if head.note]
    return join(tag("tr", *upper), tag("tr", *lower))


def _line(line: Line) -> Html:
    cells = (tag("td", cell.text, _note(cell.note)) for cell in line.cells)
    title = tag("th", line.title, _note(line.note), scope="row")
    return tag("tr", title, *cells, class_="ours" if line.ours else None)


def grid_table(grid: Grid, caption: str) -> Html:
    """A table of results in a box of its own."""
    table = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", _head_rows(grid.heads)),
        tag("tbody", *(_line(line) for line in grid.lines)),
        class_="grid two",
    )
    return scroll(caption, table)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, the names joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def pairs_table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Html:
    """A plain table of words; its first column names the rows."""
    table = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", each("th", list(heads), scope="col"))),
        tag(
            "tbody",
            *(tag("tr", tag("th", row[0], scope="row"), each("td", list(row[1:]))) for row in rows),
        ),
        class_="pairs",
    )
    return scroll(caption, table)


def reading(run: Run) -> Html | None:
    """How to read the numbers; nothing where the page has no word to explain."""
    known = how_to_read(run)
    if not known:
        return None
    terms = (join(tag("dt", term), tag("dd", text)) for term, text in known)
    return section("reading", "How to read this", tag("dl", *terms))


def _texts(name: str, heading: str, texts: Sequence[str], empty: str) -> Html:
    content = tag("ul", each("li", tuple(texts))) if texts else tag("p", empty)
    return section(name, heading, content)


def _environment(run: Run) -> Html:
    flat = flatten(run.environment)
    if not flat:
        return section("environment", "Environment", tag("p", "This run has no environment.json."))
    rows = [(key, str(value)) for key, value in flat.items()]
    table = pairs_table(("What", "Value"), rows, "Machine and versions of this run")
    details = tag("details", tag("summary", "Machine and versions"), table)
    return section("environment", "Environment", details)


def closing(run: Run, files: Sequence[str]) -> Html:
    """Deviations, notes, environment, command, files."""
    page = run.page
    return join(
        _texts("deviations", "Deviations from the paper", page.deviations, "None are recorded.")
        if page.paper
        else None,
        _texts("notes", "Notes", page.notes, "") if page.notes else None,
        _environment(run),
        section("repeat", "Repeat it", tag("pre", tag("code", page.command), tabindex="0"))
        if page.command
        else None,
        section(
            "files", "Files of this run", tag("ul", *(tag("li", link(f, quote(f))) for f in files))
        ),
    )
