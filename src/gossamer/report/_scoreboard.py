"""Many runs in one table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ._html import Html, document, link, scroll, tag
from ._markdown import plain, table_markdown
from ._numbers import DASH
from ._run import Claim, Run, read_page, read_summary
from ._sections import badge
from ._words import SYMBOLS, ClaimView, view_claim

__all__ = ["Score", "scoreboard_html", "scoreboard_markdown", "scoreboard_rows"]


@dataclass(frozen=True)
class Score:
    """One claim of one run; a run without claims has one row without a claim."""

    run: Run
    report: str
    claim: Claim | None
    view: ClaimView | None

    @property
    def minutes(self) -> float | None:
        """Wall time of the whole run."""
        seconds = self.run.summary.seconds
        return None if seconds is None else round(seconds / 60, 1)

    @property
    def verdict(self) -> str:
        """Verdict of the claim."""
        return self.claim.verdict if self.claim else self.run.summary.verdict

    def rank(self) -> tuple[str, str, str, str]:
        """Place in the table: by recipe, scale, folder."""
        summary, folder = self.run.summary, self.run.folder.resolve().name
        return summary.recipe, summary.scale, folder, self.report

    def cells(self) -> dict[str, Any]:
        """The row of the CSV file."""
        claim, view = self.claim, self.view
        return {
            "recipe": self.run.summary.recipe,
            "scale": self.run.summary.scale,
            "claim": claim.text if claim else None,
            "unit": claim.unit if claim else None,
            "paper": "; ".join(view.paper) if view else None,
            "here": claim.ours.value if claim else None,
            "baseline": claim.baseline.value if claim else None,
            "verdict": self.verdict,
            "minutes": self.minutes,
            "report": self.report,
        }

    def words(self) -> tuple[str, str, str, str]:
        """Claim, paper, here and comparison, to read."""
        view = self.view
        if view is None:
            return (DASH,) * 4
        return view.text, "; ".join(view.paper) or DASH, view.here, view.against

    def about(self) -> str:
        """Scale, and the folder's name where it is not the recipe's."""
        summary, folder = self.run.summary, self.run.folder.resolve().name
        parts = (summary.scale, folder if folder != summary.recipe else "")
        return " · ".join(filter(None, parts))


def _scores(folder: Path, beside: Path) -> list[Score]:
    run = Run(folder, read_summary(folder), read_page(folder), (), {})
    path = os.path.relpath(folder.resolve() / "report.html", beside.resolve())
    report = quote(Path(path).as_posix())
    made = [Score(run, report, claim, view_claim(claim, run)) for claim in run.summary.claims]
    return made or [Score(run, report, None, None)]


def scoreboard_rows(folders: Sequence[Path], beside: Path) -> list[Score]:
    """All claims of all runs, sorted by recipe, scale and folder."""
    scores = [_scores(folder, beside) for folder in folders]
    scores.sort(key=lambda run: run[0].rank())
    return [score for run in scores for score in run]


def _runs(scores: Sequence[Score]) -> list[list[Score]]:
    return [list(group) for _, group in groupby(scores, key=lambda s: s.report)]


def _found(scores: Sequence[Score]) -> str:
    verdicts = [run[0].run.summary.verdict for run in _runs(scores)]
    counts = {verdict: verdicts.count(verdict) for verdict in SYMBOLS}
    words = {"held": "held", "not held": "did not hold", "undecided": "undecided"}
    parts = [f"{count} {words[verdict]}" for verdict, count in counts.items() if count]
    return f"{len(verdicts)} run{'' if len(verdicts) == 1 else 's'}: {', '.join(parts)}."


def _note(text: str) -> Html | None:
    return tag("span", text, class_="note") if text else None


def _row(score: Score, first: bool, span: int) -> Html:
    claim, paper, here, against = score.words()
    minutes = DASH if score.minutes is None else f"{score.minutes:.1f}"
    recipe = link(score.run.summary.recipe, score.report)
    head = tag("th", recipe, _note(score.about()), scope="rowgroup", rowspan=str(span))
    return tag(
        "tr",
        head if first else None,
        tag("td", claim, class_="words"),
        tag("td", paper),
        tag("td", here),
        tag("td", against, _note(score.view.against_name if score.view else "")),
        tag("td", badge(score.verdict)),
        tag("td", minutes, rowspan=str(span)) if first else None,
    )


def scoreboard_html(scores: Sequence[Score]) -> str:
    """The page of a scoreboard."""
    heads = ("Recipe", "Claim", "Paper", "Here", "Compared with", "Verdict", "Minutes")
    bodies = (
        tag("tbody", *(_row(score, i == 0, len(run)) for i, score in enumerate(run)))
        for run in _runs(scores)
    )
    caption = "Every claim of every run, by recipe"
    table = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        *bodies,
        class_="grid board",
    )
    header = tag("header", tag("h1", "Scoreboard"), tag("p", _found(scores), class_="lead"))
    return document("Scoreboard", header, scroll(caption, table))


def scoreboard_markdown(scores: Sequence[Score]) -> str:
    """The same table in Markdown."""
    rows = []
    for score in scores:
        summary = score.run.summary
        recipe = f"[{plain(summary.recipe)}]({score.report})" + (
            f" ({summary.scale})" if summary.scale else ""
        )
        minutes = DASH if score.minutes is None else f"{score.minutes:.1f}"
        verdict = f"{SYMBOLS[score.verdict]} {score.verdict}"
        rows.append([recipe, *map(plain, score.words()), verdict, minutes])
    heads = ("Recipe", "Claim", "Paper", "Here", "Compared with", "Verdict", "Minutes")
    return f"# Scoreboard\n\n{_found(scores)}\n\n{table_markdown(heads, rows)}"
