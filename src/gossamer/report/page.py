"""One self-contained page per run, two runs side by side, and many runs in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gossamer.checks import check_choice
from gossamer.errors import DataError
from gossamer.files import write_text

from ._comparison import Comparison, comparison_html, comparison_markdown, comparison_rows
from ._drawing import draw_figure
from ._grid import results_grid
from ._html import document, section
from ._lists import list_rows, lists_html, lists_markdown
from ._markdown import run_markdown
from ._run import Run, read_run
from ._scoreboard import scoreboard_html, scoreboard_markdown, scoreboard_rows
from ._sections import claims, closing, figures, grid_table, opening, reading
from .tables import write_table

__all__ = ["write_comparison", "write_page", "write_scoreboard"]

_INPUTS = (
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "rows.csv",
    "page.json",
    "environment.json",
)


def _files(run: Run) -> list[str]:
    # What this call writes is listed whether it was there before or not: two calls, equal bytes.
    kept = [name for name in _INPUTS if (run.folder / name).exists()]
    drawn = [f"figures/{spec.name}.svg" for spec in run.page.figures]
    return ["report.md", "table.csv", *drawn, *kept]


def write_page(folder: str | Path) -> Path:
    """Write the report of a run again from its numbers: figures, table, Markdown and one HTML file.

    The page is a function of the run's files alone: calling this twice gives the same bytes. The
    HTML holds its style and its figures, runs no script and loads nothing, so it opens from a zip.

    Args:
        folder: A run folder with `summary.json`, `page.json`, `rows.csv`, and, if known,
            `environment.json`.

    Returns:
        The path of `report.html`; beside it are `report.md`, `table.csv` and `figures/*.svg`.

    Raises:
        DataError: If the folder is no run folder, or a file of it is missing or malformed; the
            message names the file and the place in it.

    Example:
        >>> import tempfile
        >>> write_page(tempfile.mkdtemp())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        gossamer.errors.DataError: ... is not a run folder: it holds no summary.json. ...
    """
    run = read_run(Path(folder))
    drawn = [draw_figure(spec, run) for spec in run.page.figures]
    for one in drawn:
        write_text(run.folder / "figures" / f"{one.name}.svg", one.svg)
    write_table(run.summary.table, run.folder / "table.csv")
    listed = [list_rows(spec, run) for spec in run.page.lists]
    write_text(run.folder / "report.md", run_markdown(run, drawn, lists_markdown(listed)))
    target = run.folder / "report.html"
    caption = "Each method, with what was measured" if run.is_recipe else "What was measured"
    table = grid_table(results_grid(run), caption)
    parts = [
        opening(run),
        claims(run),
        figures(drawn),
        lists_html(listed),
        section("results", "Results", table),
        reading(run),
    ]
    write_text(target, document(run.page.title, *parts, closing(run, _files(run))))
    return target


def write_comparison(first: str | Path, second: str | Path, out: str | Path) -> Path:
    """Write two runs side by side: verdicts, results, differences of configuration, figures.

    Figures of one name share the range of their values. A difference is second minus first.

    Args:
        first: A run folder.
        second: A run folder, of the same recipe or of another.
        out: Folder for `report.html`, `report.md` and `table.csv`.

    Returns:
        The path of `report.html`.

    Raises:
        DataError: If a folder is no run folder, or a file of it is missing or malformed.

    Example:
        >>> import tempfile
        >>> empty = tempfile.mkdtemp()
        >>> write_comparison(empty, empty, empty)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        gossamer.errors.DataError: ... is not a run folder: it holds no summary.json. ...
    """
    pair = Comparison(read_run(Path(first)), read_run(Path(second)), Path(out))
    write_table(comparison_rows(pair), pair.out / "table.csv")
    write_text(pair.out / "report.md", comparison_markdown(pair))
    target = pair.out / "report.html"
    write_text(target, comparison_html(pair))
    return target


def write_scoreboard(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write one table over many runs: claim, paper, here, baseline, verdict, minutes, by recipe.

    Args:
        folders: Run folders.
        path: The `.html` file to write; a `.csv` and a `.md` of the same name appear beside it.

    Returns:
        The path of the HTML file; its links to the runs' reports are relative.

    Raises:
        ConfigError: If the file does not end in `.html`.
        DataError: If no folder is given, or one is no run folder.

    Example:
        >>> write_scoreboard([], "scoreboard.html")
        Traceback (most recent call last):
        ...
        gossamer.errors.DataError: folders must name at least one run folder; got none. Name one.
    """
    target = Path(path)
    check_choice(target.suffix, (".html",), "ending of a scoreboard's file")
    if not folders:
        raise DataError("folders must name at least one run folder; got none. Name one.")
    rows = scoreboard_rows([Path(folder) for folder in folders], target.parent)
    write_table([row.cells() for row in rows], target.with_suffix(".csv"))
    write_text(target.with_suffix(".md"), scoreboard_markdown(rows))
    write_text(target, scoreboard_html(rows))
    return target
