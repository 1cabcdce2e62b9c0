"""The same facts as the page, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ._drawing import Drawn
from ._grid import Grid, results_grid
from ._run import Run
from ._words import SYMBOLS, about, found, how_to_read, view_claim

__all__ = ["bullets", "grid_markdown", "plain", "run_markdown", "table_markdown"]


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return " ".join(re.sub(r"([\\|*`\[\]])", r"\\\1", text).replace("<", "&lt;").split())


def table_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are escaped already."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def grid_markdown(grid: Grid) -> str:
    """A table of results; our rows are bold."""
    heads, rows = [plain(str(head)) for head in grid.heads], []
    noted = any(line.note for line in grid.lines)
    for line in grid.lines:
        title = f"**{plain(line.title)}**" if line.ours else plain(line.title)
        note = [plain(line.note)] if noted else []
        rows.append([title, *(plain(str(cell)) for cell in line.cells), *note])
    return table_markdown([*heads, "Note"] if noted else heads, rows)


def bullets(texts: Sequence[str]) -> str:
    """A list, or the word that it is empty."""
    return "".join(f"- {plain(text)}\n" for text in texts) or "None are recorded.\n"


def _claims(run: Run) -> str:
    rows = []
    for view in (view_claim(claim, run) for claim in run.summary.claims):
        cells = [
            view.text,
            f"{view.here} ({view.here_note})",
            f"{view.against} ({view.against_words()})",
            f"{view.difference} ({view.difference_note})"
            if view.difference_note
            else view.difference,
            "; ".join(view.paper) or "–",
            f"{SYMBOLS[view.verdict]} {view.verdict}",
        ]
        rows.append([plain(cell) for cell in cells])
    return table_markdown(
        ["Claim", "Here", "Compared with", "Difference", "Paper", "Verdict"], rows
    )


def _figures(drawn: Sequence[Drawn]) -> list[str]:
    return [
        f"### {plain(one.title)}\n\n![{plain(one.alt)}](figures/{one.name}.svg)\n\n"
        f"{plain(one.note)}\n"
        for one in drawn
    ]


def _fenced(command: str) -> str:
    # A fence longer than any run of backticks inside cannot be closed by the command.
    longest = max((len(run) for run in re.findall("`+", command)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{command}\n{fence}\n"


def _terms(run: Run) -> str:
    return "".join(f"- **{term}:** {text}\n" for term, text in how_to_read(run))


def run_markdown(run: Run, drawn: Sequence[Drawn], lists: str = "") -> str:
    """The report of a run; `lists` is the section of its declared tables."""
    page, verdict = run.page, run.summary.verdict
    parts = [
        f"# {plain(page.title)}\n",
        f"**{SYMBOLS[verdict]} {verdict.capitalize()}.** {found(run.summary.claims)}\n"
        if verdict
        else "",
        f"{plain(page.what)}\n" if page.what else "",
        f"Paper: {plain(page.paper)}\n" if page.paper else "",
        f"{plain(' · '.join(about(run)))}\n",
        f"## Claims\n\n{_claims(run)}" if run.summary.claims else "",
        "## Figures\n" if drawn else "",
        *_figures(drawn),
        lists,
        f"## Results\n\n{grid_markdown(results_grid(run))}",
        f"## How to read this\n\n{_terms(run)}" if how_to_read(run) else "",
        f"## Deviations from the paper\n\n{bullets(page.deviations)}" if page.paper else "",
        f"## Notes\n\n{bullets(page.notes)}" if page.notes else "",
        f"## Repeat it\n\n{_fenced(page.command)}" if page.command else "",
    ]
    return "\n".join(part for part in parts if part)
