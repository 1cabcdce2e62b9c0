"""What a run folder holds, read and checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gossamer.checks import check_choice
from gossamer.errors import ConfigError, DataError
from gossamer.files import read_json

from ._schema import build
from .tables import read_table

__all__ = [
    "Arm",
    "Claim",
    "Column",
    "FigureSpec",
    "ListSpec",
    "Page",
    "Run",
    "Side",
    "Summary",
    "Term",
    "read_run",
]

_REPEAT = "Repair the file, or repeat the run with --resume, which writes it again."


@dataclass(frozen=True)
class Side:
    """One side of a claim: an arm with its statistic over seeds, or the fixed bar."""

    name: str
    value: float | None = None
    statistic: str = ""
    values: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Claim:
    """One claim with what was measured for it."""

    text: str
    verdict: str
    ours: Side
    baseline: Side
    metric: str = ""
    unit: str = ""
    difference: float | None = None
    interval: tuple[float | None, float | None] = (None, None)
    rule: str = ""
    better: str = "higher"
    bar: float | None = None
    needed: float | None = None
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """The file `summary.json`; a run that claims nothing names its command in place of a recipe."""

    recipe: str = ""
    command: str = ""
    verdict: str = ""
    claims: tuple[Claim, ...] = ()
    table: tuple[Mapping[str, Any], ...] = ()
    scale: str = ""
    seeds: tuple[Any, ...] = ()
    seconds: float | None = None
    version: str = ""


@dataclass(frozen=True)
class Column:
    """How a column of results is called on the page."""

    name: str
    label: str = ""
    unit: str = ""
    in_domain: bool = False


@dataclass(frozen=True)
class Arm:
    """How a method is called on the page."""

    name: str
    title: str = ""
    role: str = ""


@dataclass(frozen=True)
class FigureSpec:
    """A figure as a recipe declares it."""

    STRICT: ClassVar[bool] = True

    kind: str
    name: str
    x: str
    y: str
    title: str = ""
    alt: str = ""
    note: str = ""
    group: str | None = None
    value: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    shade: tuple[float, float] | None = None
    box: tuple[tuple[float, float], tuple[float, float]] | None = None
    x_label: str | None = None
    y_label: str | None = None
    log_x: bool = False
    log_y: bool = False
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ListSpec:
    """A table of rows as they are: which ones, and which of their columns."""

    STRICT: ClassVar[bool] = True

    name: str
    title: str
    columns: tuple[Column, ...]
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Term:
    """A word of the page and what it means."""

    STRICT: ClassVar[bool] = True

    term: str
    text: str


@dataclass(frozen=True)
class Page:
    """The file `page.json`: the words around the numbers."""

    title: str
    what: str = ""
    paper: str = ""
    columns: tuple[Column, ...] = ()
    arms: tuple[Arm, ...] = ()
    figures: tuple[FigureSpec, ...] = ()
    lists: tuple[ListSpec, ...] = ()
    deviations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    terms: tuple[Term, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Run:
    """All files of a run folder that a page is made of."""

    folder: Path
    summary: Summary
    page: Page
    rows: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, Any]

    @property
    def is_recipe(self) -> bool:
        """Whether methods are compared and claims judged; other runs only measure something."""
        return bool(self.summary.recipe)

    def arm_title(self, name: str) -> str:
        """The name a reader sees for an arm."""
        return next((arm.title for arm in self.page.arms if arm.name == name and arm.title), name)

    def column(self, name: str) -> Column:
        """The description of a column of results; one made from its name if there is none."""
        known = next((column for column in self.page.columns if column.name == name), Column(name))
        label = known.label or name.replace("_", " ")
        return Column(name, label, known.unit, known.in_domain)


def _check(value: str, choices: Sequence[str], what: str, place: str) -> None:
    try:
        check_choice(value, choices, what)
    except ConfigError as error:
        raise DataError(f"{place}: {error} Correct this entry.") from None


def _check_summary(summary: Summary, path: Path) -> None:
    verdicts = ("held", "not held", "undecided")
    if summary.claims or summary.verdict:
        _check(summary.verdict, verdicts, "verdict", str(path))
    for index, claim in enumerate(summary.claims):
        place = f"{path}, claims[{index}]"
        _check(claim.verdict, verdicts, "verdict", place)
        _check(claim.better, ("higher", "lower"), "direction 'better'", place)
    for index, row in enumerate(summary.table):
        if "arm" not in row:
            raise DataError(
                f"{path}, table[{index}] has no 'arm', the name of its method. {_REPEAT}"
            )


def read_summary(folder: Path) -> Summary:
    """Read `summary.json`; its presence is what makes a folder a run folder."""
    path = folder / "summary.json"
    if not path.exists():
        raise DataError(
            f"{folder} is not a run folder: it holds no summary.json. "
            "Name the folder that `gossamer reproduce` or `train` printed at its end."
        )
    data = read_json(path, _REPEAT)
    needed = ("table",) if "command" in data else ("recipe", "verdict", "claims", "table")
    for key in needed:
        if key not in data:
            raise DataError(f"{path} has no {key!r}, which is needed. {_REPEAT}")
    summary = build(Summary, data, str(path))
    _check_summary(summary, path)
    return summary


def _check_figures(figures: Sequence[FigureSpec], path: Path) -> None:
    seen: set[str] = set()
    for index, spec in enumerate(figures):
        place = f"{path}, figures[{index}]"
        _check(spec.kind, ("bars", "curve", "heatmap"), "kind of figure", place)
        # The name becomes a file name and the prefix of ids.
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", spec.name) or spec.name in seen:
            raise DataError(
                f"{place}: the name must be lower-case letters, digits, - and _, start with a "
                f"letter and be used once; got {spec.name!r}. Rename the figure."
            )
        if spec.kind == "heatmap" and spec.value is None:
            raise DataError(
                f"{place}: a heatmap needs the key 'value', the column to colour by. Add it."
            )
        seen.add(spec.name)


def read_page(folder: Path) -> Page:
    """Read `page.json`."""
    path = folder / "page.json"
    page = build(Page, read_json(path, _REPEAT), str(path))
    _check_figures(page.figures, path)
    return page


def read_run(folder: Path) -> Run:
    """Read all files of a run folder; only `environment.json` may be missing."""
    summary, page = read_summary(folder), read_page(folder)
    environment, rows = folder / "environment.json", folder / "rows.csv"
    if not rows.exists():
        raise DataError(f"{rows} does not exist; the figures are drawn from it. {_REPEAT}")
    return Run(
        folder=folder,
        summary=summary,
        page=page,
        rows=tuple(read_table(rows)),
        environment=read_json(environment, _REPEAT) if environment.exists() else {},
    )
