"""What the checks of `gossamer audit` give, and the page that is made of them."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.files import read_json, write_json

__all__ = ["Check", "Finding", "run_checks", "settings_text", "write_audit"]


@dataclass(frozen=True)
class Finding:
    """What one check found, as plain values.

    Args:
        values: Figures of the table, by column.
        columns: `{"name": ..., "label": ..., "unit": ...}` of each.
        lines: What the terminal shows.
        rows: Rows for figures and lists, each with its own `kind`.
        figures: As in `page.json`.
        lists: As in `page.json`.
        arms: Further arms that the figures name.
        notes: What a reader must know.
        terms: `{"term": ..., "text": ...}` of words that the page explains.
        table: Further rows of the table, of other arms; columns as in `values`.
        details: All figures, for `summary.json`.
    """

    values: Mapping[str, float | None]
    columns: Sequence[Mapping[str, str]]
    lines: Sequence[str]
    rows: Sequence[Mapping[str, Any]] = ()
    figures: Sequence[Mapping[str, Any]] = ()
    lists: Sequence[Mapping[str, Any]] = ()
    arms: Sequence[Mapping[str, str]] = ()
    notes: Sequence[str] = ()
    terms: Sequence[Mapping[str, str]] = ()
    table: Sequence[Mapping[str, Any]] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


Check = Callable[[], Finding]


def run_checks(
    checks: Mapping[str, Check], folder: Path, *, resume: bool, quiet: bool
) -> dict[str, Finding]:
    """Run each check and keep what it found, so that an interrupted audit goes on.

    Args:
        checks: By name, in order.
        folder: Run folder; each finding goes to `checks/NAME.json`.
        resume: Take what an earlier part of the run found.
        quiet: Show no progress.
    """
    from gossamer.progress import progress

    found: dict[str, Finding] = {}
    with progress("audit", len(checks), quiet=quiet) as bar:
        for number, (name, check) in enumerate(checks.items()):
            path = folder / "checks" / f"{name}.json"
            if resume and path.is_file():
                found[name] = Finding(**read_json(path))
            else:
                bar.update(number, name)
                found[name] = check()
                write_json(path, dataclasses.asdict(found[name]))
        bar.update(len(checks))
    return found


def write_audit(
    folder: Path, found: Mapping[str, Finding], *, title: str, what: str, about: Mapping[str, Any]
) -> Path:
    """Write summary, rows and page of an audit; return the path of the page.

    Args:
        folder: Run folder.
        found: What the checks gave.
        title: Of the page.
        what: First paragraph of the page.
        about: `seed`, `seconds`, `target` and `command` of the run.
    """
    from gossamer._version import __version__
    from gossamer.environment import describe_environment
    from gossamer.report import write_page, write_table

    values = {f"{k}_here": v for one in found.values() for k, v in one.values.items()}
    table = [{"arm": "audited", "role": "ours", "seeds": 1, **values, "note": ""}]
    table += [
        {"arm": row["arm"], "role": "baseline", "seeds": 1, "note": ""}
        | {f"{name}_here": row[name] for name in one.values}
        for one in found.values()
        for row in one.table
    ]
    summary = {
        "command": "audit",
        "version": __version__,
        "target": about["target"],
        "seconds": round(about["seconds"], 1),
        "seed": about["seed"],
        "checks": {name: dict(one.details) for name, one in found.items()},
        "table": table,
    }
    write_json(folder / "summary.json", summary)
    write_json(folder / "environment.json", describe_environment())
    rows = [
        {"arm": "audited", "seed": about["seed"], **row}
        for one in found.values()
        for row in one.rows
    ]
    write_table(rows or [{"kind": "none", "arm": "audited"}], folder / "rows.csv")
    arms = {arm["name"]: arm for one in found.values() for arm in one.arms}
    write_json(
        folder / "page.json",
        {
            "title": title,
            "what": what,
            "columns": [
                {**column, "in_domain": False} for one in found.values() for column in one.columns
            ],
            "arms": [
                {"name": "audited", "title": about["target"], "role": "ours"},
                *arms.values(),
            ],
            "figures": [figure for one in found.values() for figure in one.figures],
            "lists": [one_list for one in found.values() for one_list in one.lists],
            "notes": [note for one in found.values() for note in one.notes],
            "terms": [term for one in found.values() for term in one.terms],
            "command": shlex.join(["gossamer", *about["command"]]),
        },
    )
    return write_page(folder)


def settings_text(values: Mapping[str, Any]) -> str:
    """Return what decides an audit, as it stands in `config.toml`."""
    import tomli_w

    return tomli_w.dumps(json.loads(json.dumps({k: v for k, v in values.items() if v is not None})))
