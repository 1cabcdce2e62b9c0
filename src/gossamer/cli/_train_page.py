"""What the page of a training run is made of: its numbers as rows, and the words around them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer._version import __version__
from gossamer.files import write_json

if TYPE_CHECKING:
    from gossamer.train import TrainJob

__all__ = [
    "Measure",
    "axes_of",
    "loss_figure",
    "measure_of",
    "read_losses",
    "summary_of",
    "table_of",
    "write_inputs",
]

# columns of a cell that are no coordinate of it
_MEASURED = ("exact_match", "token_accuracy", "cross_entropy", "bleu", "num_samples", "rows")
# in a chain or a text the next symbol is not determined, so that the loss is what counts
_BY_LOSS = ("markov", "masked_text", "text")


@dataclass(frozen=True)
class Measure:
    """What a page shows of each cell.

    Args:
        column: Its key in a cell.
        title: Its name.
        unit: Its unit, `""` for a share.
    """

    column: str
    title: str
    unit: str = ""


def measure_of(task: str, cell: Mapping[str, Any]) -> Measure:
    """Return what counts in a task of that name, which gave a cell."""
    if "bleu" in cell:
        return Measure("bleu", "BLEU", "of 100")
    if task in _BY_LOSS:
        return Measure("cross_entropy", "cross-entropy", "nats a token")
    return Measure("exact_match", "exact match")


def axes_of(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the coordinates that differ over the cells; the first if none does."""
    names = [key for key in cells[0] if key not in _MEASURED]
    return [key for key in names if len({cell[key] for cell in cells}) > 1] or names[:1]


def table_of(cells: Sequence[dict[str, Any]], measure: Measure) -> list[dict[str, Any]]:
    """Return the table: one row, one column for each cell of the grid."""
    row: dict[str, Any] = {"arm": "model", "role": "ours", "seeds": 1}
    for number, cell in enumerate(cells):
        row[f"cell_{number}_here"] = cell[measure.column]
    return [{**row, "note": ""}]


def summary_of(
    job: TrainJob, cells: list[dict[str, Any]], table: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Return what `summary.json` of every training run holds."""
    return {
        "command": "train",
        "version": __version__,
        "seconds": round(seconds, 1),
        "seed": job.seed,
        "files": ["model.safetensors", "config.json", "config.toml", "metrics.jsonl"],
        "cells": cells,
        "table": table,
    }


def write_inputs(
    folder: Path, summary: dict[str, Any], measure: Measure, *, title: str, command: Sequence[str]
) -> None:
    """Write `rows.csv` and `page.json`, from which `write_page` draws the page."""
    from gossamer.report import write_table

    cells = summary["cells"]
    rows = [{"kind": "length", "arm": "model", "seed": summary["seed"], **cell} for cell in cells]
    rows += [
        {"kind": "loss", "arm": "model", "seed": summary["seed"], **entry}
        for entry in read_losses(folder)
    ]
    write_table(rows, folder / "rows.csv")
    axes = axes_of(cells)
    columns = [
        {
            "name": f"cell_{number}",
            "label": ", ".join(f"{key} {cell[key]}" for key in axes),
            "unit": measure.unit or measure.title,
            "in_domain": cell["part"] == "held out" if "part" in cell else number == 0,
        }
        for number, cell in enumerate(cells)
    ]
    write_json(
        folder / "page.json",
        {
            "title": title,
            "what": _what(cells[0]),
            "columns": columns,
            "arms": [{"name": "model", "title": "This model", "role": "ours"}],
            "figures": [
                *([] if _no_axis(cells, axes) else [_measured(cells, axes, measure)]),
                loss_figure("loss (nats a token)"),
            ],
            "command": shlex.join(["gossamer", *command]),
        },
    )


_WHAT = (
    "A model was trained, then measured inside and beyond its trained length. The last step is "
    "kept: nothing was chosen by looking at test lengths."
)
_FILE = (
    " A column holds the rows whose queries have at most that many characters, and more than in "
    "the column before. Rows held out come from the file that was trained on, and were not trained "
    "on themselves."
)


_PAIRS = (
    "A model was trained on pairs of texts, then measured on sources that were held out, against "
    "all their targets: BLEU over the whole, of the words as the task splits them, for greedy "
    "decoding. The last step is kept."
)


def _what(cell: Mapping[str, Any]) -> str:
    if "bleu" in cell:
        return _PAIRS
    return _WHAT + (_FILE if "part" in cell else "")


def read_losses(folder: Path) -> list[dict[str, Any]]:
    """Return what the training logged, one entry for each line of `metrics.jsonl`."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def loss_figure(label: str) -> dict[str, Any]:
    """Return the figure of the training loss over the rows of kind `loss`."""
    return {
        "kind": "curve",
        "name": "loss",
        "title": "Training loss",
        "alt": "Loss against the optimiser step.",
        "where": {"kind": "loss"},
        "x": "step",
        "y": "loss",
        "y_label": label,
    }


def _no_axis(cells: Sequence[dict[str, Any]], axes: Sequence[str]) -> bool:
    """Whether the grid has no number to draw over, as for pairs: held-out rows are one cell."""
    return "bleu" in cells[0] or not isinstance(cells[0][axes[0]], int | float)


def _measured(cells: Sequence[dict[str, Any]], axes: Sequence[str], measure: Measure) -> Any:
    """Return the figure of the grid: a curve over one axis, a heat map over two that cross."""
    name = measure.column.replace("_", "-")
    title = f"{measure.title.capitalize()} beyond the trained length"
    label = f"{measure.title} ({measure.unit})" if measure.unit else measure.title
    figure = {"name": name, "title": title, "where": {"kind": "length"}, "x": axes[0]}
    numbers = [axis for axis in axes if isinstance(cells[0][axis], int | float)]
    if len(numbers) == 2 and len({cell[axes[0]] for cell in cells}) < len(cells):
        alt = f"{measure.title.capitalize()} over {numbers[0]} and {numbers[1]}."
        return {**figure, "kind": "heatmap", "alt": alt, "y": numbers[1], "value": measure.column}
    alt = f"{measure.title.capitalize()} against {axes[0]}."
    return {**figure, "kind": "curve", "alt": alt, "y": measure.column, "y_label": label}
