"""The page of a retriever's training: its loss, and what it came to on the split `test`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.cli._train_page import loss_figure
from gossamer.files import read_lines, write_json

__all__ = ["write_retriever_page"]


def write_retriever_page(
    folder: Path, summary: Mapping[str, Any], data: Path, command: Sequence[str]
) -> Path:
    """Write `rows.csv`, `page.json` and the page drawn from them."""
    from gossamer.report import write_page, write_table

    rows: list[dict[str, Any]] = [
        {"kind": "loss", "arm": "model", "seed": summary["seed"], **entry}
        for entry in read_lines(folder / "metrics.jsonl")
    ]
    measured: Mapping[str, float] = summary["test"]
    rows += [
        {"kind": "test", "arm": "model", "seed": summary["seed"], "metric": name, "value": value}
        for name, value in measured.items()
    ]
    write_table(rows, folder / "rows.csv")
    write_json(
        folder / "page.json",
        {
            "title": f"Retriever trained on {data}",
            "what": (
                f"{summary['rows']} rows, {summary['labels']} documents or labels, negatives: "
                f"{summary['negatives']}. The last step is kept: nothing was chosen by looking at "
                "test data."
            ),
            "columns": [
                {"name": name, "label": name, "unit": "share", "in_domain": False}
                for name in measured
            ],
            "arms": [{"name": "model", "title": "This model", "role": "ours"}],
            "figures": [loss_figure("loss (nats)"), *([_MEASURED] if measured else [])],
            "command": shlex.join(command),
        },
    )
    return write_page(folder)


_MEASURED = {
    "kind": "bars",
    "name": "test",
    "title": "On the split test",
    "alt": "One bar for each metric on the split test.",
    "where": {"kind": "test"},
    "x": "metric",
    "y": "value",
    "y_label": "share",
}
