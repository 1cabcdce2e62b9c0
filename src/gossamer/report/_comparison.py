"""Two runs side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gossamer.files import read_toml

from ._drawing import Drawn, draw_figure, value_range
from ._grid import Cell, Grid, Head, read_cell, results, results_grid, row_title
from ._html import Html, Node, document, join, link, section, tag
from ._markdown import grid_markdown, plain, table_markdown
from ._numbers import DASH, decimals, is_number, signed
from ._run import FigureSpec, Run
from ._sections import badge, figure, flatten, grid_table, pairs_table
from ._svg import prefix_ids
from ._words import SYMBOLS, about, found, view_claim

__all__ = ["Comparison", "comparison_html", "comparison_markdown", "comparison_rows"]

SIDES = ("First", "Second")


@dataclass(frozen=True)
class Comparison:
    """Two runs and the folder their comparison goes to."""

    first: Run
    second: Run
    out: Path

    @property
    def runs(self) -> tuple[Run, Run]:
        """Both runs in order."""
        return self.first, self.second

    @property
    def title(self) -> str:
        """Heading of the page."""
        recipes = list(dict.fromkeys(r.summary.recipe or r.summary.command for r in self.runs))
        return (
            f"Two runs of {recipes[0]}" if len(recipes) == 1 else f"{recipes[0]} and {recipes[1]}"
        )

    def report(self, run: Run) -> str:
        """Relative link to a run's own report."""
        path = os.path.relpath(run.folder.resolve() / "report.html", self.out.resolve())
        return quote(Path(path).as_posix())

    def shared(self) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Rows of the arms that both runs have."""
        other = {_key(row): row for row in self.second.summary.table}
        return [(row, other[_key(row)]) for row in self.first.summary.table if _key(row) in other]

    def names(self) -> list[str]:
        """Results that both runs measured."""
        here, there = ({c for row in run.summary.table for c in row} for run in self.runs)
        return [name for name in results(self.first) if f"{name}_here" in here & there]

    def lonely(self) -> list[str]:
        """What only one run has: one sentence per arm, and one if they share no result."""
        shared = {_key(row) for row, _ in self.shared()}
        none = [] if self.names() else ["The two runs have no result in common."]
        return none + [
            f"Only in the {side.lower()} run: {row_title(run, row)}"
            for side, run in zip(SIDES, self.runs, strict=True)
            for row in run.summary.table
            if _key(row) not in shared
        ]


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    """What names a row of a table: its method, and under which condition it was measured."""
    return str(row["arm"]), str(row.get("variant") or "")


def _difference(first: Any, second: Any) -> float | None:
    return second - first if is_number(first) and is_number(second) else None


def comparison_rows(pair: Comparison) -> list[dict[str, Any]]:
    """The shared arms with a pair of columns and a difference per result."""
    made = []
    for first, second in pair.shared():
        row: dict[str, Any] = {"arm": first["arm"]}
        if first.get("variant"):
            row["variant"] = first["variant"]
        for name in pair.names():
            here, there = first.get(f"{name}_here"), second.get(f"{name}_here")
            row |= {
                f"{name}_first": here,
                f"{name}_second": there,
                f"{name}_difference": _difference(here, there),
            }
        made.append(row)
    return made


def _cells(pair: Comparison, rows: tuple[Mapping[str, Any], Mapping[str, Any]]) -> list[Cell]:
    cells = []
    for name in pair.names():
        values = [row.get(f"{name}_here") for row in rows]
        difference = _difference(*values)
        places = decimals([v for v in (*values, difference) if is_number(v)])
        cells += [read_cell(row, name, places) for row in rows] + [Cell(signed(difference, places))]
    return cells


def _title(pair: Comparison, rows: tuple[Mapping[str, Any], Mapping[str, Any]]) -> str:
    """Name of a shared row; both names where the runs call it differently, as audits do."""
    titles = [row_title(run, row) for run, row in zip(pair.runs, rows, strict=True)]
    return " and ".join(dict.fromkeys(titles))


def _grid(pair: Comparison) -> Grid:
    heads = [Head("Method" if pair.first.is_recipe else "What")]
    for name in pair.names():
        column = pair.first.column(name)
        label = f"{column.label}, {column.unit}" if column.unit else column.label
        heads += [Head(label, side, column.in_domain) for side in (*SIDES, "Difference")]
    own = results_grid(pair.first).lines
    at = {_key(row): line for row, line in zip(pair.first.summary.table, own, strict=True)}
    lines = [
        replace(
            at[_key(rows[0])], title=_title(pair, rows), note="", cells=tuple(_cells(pair, rows))
        )
        for rows in pair.shared()
    ]
    return Grid(tuple(heads), tuple(lines))


def _changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    left, right = flatten(first), flatten(second)
    return [
        (key, str(left.get(key, DASH)), str(right.get(key, DASH)))
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    ]


def _config(run: Run) -> dict[str, Any]:
    path = run.folder / "config.toml"
    return read_toml(path, "Repair the file.") if path.exists() else {}


def _settings(pair: Comparison) -> list[tuple[str, list[tuple[str, str, str]]]]:
    return [
        ("Configuration", _changed(_config(pair.first), _config(pair.second))),
        ("Environment", _changed(pair.first.environment, pair.second.environment)),
    ]


def _claims(pair: Comparison) -> list[tuple[str, list[tuple[str, str] | None]]]:
    """Each claim with what each run measured and concluded; `None` where a run lacks it."""
    views = [{c.text: view_claim(c, run) for c in run.summary.claims} for run in pair.runs]
    texts = list(dict.fromkeys(text for side in views for text in side))
    return [
        (t, [(side[t].here, side[t].verdict) if t in side else None for side in views])
        for t in texts
    ]


def _draw(pair: Comparison, name: str) -> list[tuple[str, Drawn]]:
    specs: list[tuple[str, Run, FigureSpec]] = [
        (side, run, spec)
        for side, run in zip(SIDES, pair.runs, strict=True)
        for spec in run.page.figures
        if spec.name == name
    ]
    ranges = [value_range(spec, run) for _, run, spec in specs]
    limits = (min(low for low, _ in ranges), max(high for _, high in ranges))
    return [(side, draw_figure(spec, run, limits)) for side, run, spec in specs]


def _figure_names(pair: Comparison) -> list[str]:
    return list(dict.fromkeys(spec.name for run in pair.runs for spec in run.page.figures))


def _card(pair: Comparison, side: str, run: Run) -> Html:
    return tag(
        "div",
        tag("h2", f"{side}: ", link(run.folder.resolve().name, pair.report(run))),
        tag("p", badge(run.summary.verdict), " ", found(run.summary.claims))
        if run.summary.verdict
        else None,
        tag("p", " · ".join(about(run)), class_="soft"),
        class_="card",
    )


def _settings_html(pair: Comparison) -> Html:
    parts: list[Node] = []
    for heading, changed in _settings(pair):
        caption = f"{heading} of the two runs where it differs"
        content = (
            pairs_table(("Key", *SIDES), changed, caption)
            if changed
            else tag("p", "No difference.")
        )
        parts.append(section(heading.lower(), heading, content))
    return join(*parts)


def comparison_html(pair: Comparison) -> str:
    """The page of a comparison."""
    claim_rows = [
        tag(
            "tr",
            tag("th", text, scope="row"),
            *(
                tag("td", *((value[0], " ", badge(value[1])) if value else ("–",)))
                for value in values
            ),
        )
        for text, values in _claims(pair)
    ]
    claim_head = tag("tr", *(tag("th", text, scope="col") for text in ("Claim", *SIDES)))
    claim_table = tag(
        "table",
        tag("caption", "Each claim in both runs"),
        tag("thead", claim_head),
        tag("tbody", *claim_rows),
    )
    drawn = [
        figure(one, prefix_ids(one.svg, side.lower()), head=f"{one.title} ({side.lower()} run)")
        for name in _figure_names(pair)
        for side, one in _draw(pair, name)
    ]
    table = grid_table(_grid(pair), "What both runs measured; difference: second minus first")
    cards = (_card(pair, side, run) for side, run in zip(SIDES, pair.runs, strict=True))
    return document(
        pair.title,
        tag("header", tag("h1", pair.title)),
        tag("div", *cards, class_="cards"),
        section("claims", "Claims", tag("div", claim_table, class_="scroll"))
        if claim_rows
        else None,
        section("results", "Results", table, *(tag("p", text) for text in pair.lonely())),
        section("figures", "Figures", tag("div", *drawn, class_="figures")) if drawn else None,
        _settings_html(pair),
    )


def _verdict_words(run: Run) -> str:
    verdict = run.summary.verdict
    return f"{SYMBOLS[verdict]} {verdict}. {found(run.summary.claims)} " if verdict else ""


def comparison_markdown(pair: Comparison) -> str:
    """The same facts in Markdown."""
    tops = [
        f"- {side}: [{plain(run.folder.resolve().name)}]({pair.report(run)}), "
        f"{_verdict_words(run)}"
        f"{plain(' · '.join(about(run)))}\n"
        for side, run in zip(SIDES, pair.runs, strict=True)
    ]
    claims = [
        [plain(text), *(f"{plain(v[0])} {SYMBOLS[v[1]]} {v[1]}" if v else "–" for v in values)]
        for text, values in _claims(pair)
    ]
    settings = [
        f"## {heading}\n\n"
        + (
            table_markdown(("Key", *SIDES), [list(map(plain, row)) for row in rows])
            if rows
            else "No difference.\n"
        )
        for heading, rows in _settings(pair)
    ]
    return "\n".join(
        [
            f"# {plain(pair.title)}\n",
            "".join(tops),
            *([f"## Claims\n\n{table_markdown(('Claim', *SIDES), claims)}"] if claims else []),
            f"## Results\n\nDifference: second minus first.\n\n{grid_markdown(_grid(pair))}",
            *(f"{plain(text)}\n" for text in pair.lonely()),
            *settings,
        ]
    )
