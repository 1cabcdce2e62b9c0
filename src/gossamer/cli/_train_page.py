"""What the page of a training run is made of: its numbers as rows, and the words around them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.files import write_json

__all__ = ["axes_of", "table_of", "write_inputs"]

_MEASURED = ("exact_match", "token_accuracy", "num_samples")


def axes_of(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the coordinates that differ over the cells; the first if none does."""
    names = [key for key in cells[0] if key not in _MEASURED]
    return [key for key in names if len({cell[key] for cell in cells}) > 1] or names[:1]


def table_of(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table: one row, one column for each cell of the grid."""
    row: dict[str, Any] = {"arm": "model", "role": "ours", "seeds": 1}
    for number, cell in enumerate(cells):
        row[f"cell_{number}_here"] = cell["exact_match"]
    return [{**row, "note": ""}]


def write_inputs(folder: Path, summary: dict[str, Any], title: str, command: Sequence[str]) -> None:
    """Write `rows.csv` and `page.json`, from which `write_page` draws the page."""
    from gossamer.report import write_table

    cells = summary["cells"]
    rows = [{"kind": "length", "arm": "model", "seed": summary["seed"], **cell} for cell in cells]
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        rows.append({"kind": "loss", "arm": "model", "seed": summary["seed"], **entry})
    write_table(rows, folder / "rows.csv")
    axes = axes_of(cells)
    columns = [
        {
            "name": f"cell_{number}",
            "label": ", ".join(f"{key} {cell[key]}" for key in axes),
            "unit": "exact match",
            "in_domain": number == 0,
        }
        for number, cell in enumerate(cells)
    ]
    write_json(
        folder / "page.json",
        {
            "title": title,
            "what": "A model was trained, then measured inside and beyond its trained "
            "length. The "
            "last step is kept: nothing was chosen by looking at test lengths.",
            "columns": columns,
            "arms": [{"name": "model", "title": "This model", "role": "ours"}],
            "figures": [
                {
                    "kind": "curve",
                    "name": "exact-match",
                    "title": "Exact match beyond the trained length",
                    "alt": f"Share of wholly right answers against {axes[0]}.",
                    "where": {"kind": "length"},
                    "x": axes[0],
                    "y": "exact_match",
                    "y_label": "exact match",
                },
                {
                    "kind": "curve",
                    "name": "loss",
                    "title": "Training loss",
                    "alt": "Loss against the optimiser step.",
                    "where": {"kind": "loss"},
                    "x": "step",
                    "y": "loss",
                    "y_label": "loss (nats a token)",
                },
            ],
            "command": shlex.join(["gossamer", *command]),
        },
    )
