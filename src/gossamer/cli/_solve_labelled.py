"""`gossamer solve` with a classifier: the class of each row of a table, or of each image."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli._common import Common

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["classify", "is_labelled_run"]


def is_labelled_run(folder: Path) -> bool:
    """Whether a folder is a run on a table or on images; false for what is no run at all."""
    from gossamer.cli._train_labelled import is_labelled
    from gossamer.files import read_toml

    if not (folder / "config.toml").is_file():
        return False
    task = read_toml(folder / "config.toml").get("task")
    return isinstance(task, Mapping) and is_labelled(task.get("name"))


def classify(folder: Path, file: str, *, check: bool, common: Common) -> int:
    """Print the class of each row; exit code 1 if there are labels and one differs.

    Args:
        folder: The run.
        file: A table, or images.
        check: Compare with the labels of the file, if it has them.
        common: Options of every command.
    """
    from gossamer.errors import ConfigError
    from gossamer.files import write_text
    from gossamer.train.labelled import load_labelled_run, predict_rows

    if file == "-":
        raise ConfigError(
            "a classifier needs a file of rows; got none. Run: gossamer solve RUN FILE.csv"
        )
    model, table = load_labelled_run(folder, device=common.device)
    classes = table["facts"]["classes"]
    x, labels, places = _read(table, file)
    p = predict_rows(model, x)
    best = p.argmax(1).tolist()
    rows: list[dict[str, Any]] = []
    for number, (place, label) in enumerate(zip(best, labels, strict=True)):
        row = {"row": number + 1, "answer": classes[place], "probability": float(p[number, place])}
        if places is not None:
            row["where"] = places[number]
        if check and label is not None:
            row["correct"] = label == classes[place]
        rows.append(row)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    for row, line in zip(rows, lines, strict=True):
        print(line if common.json else row["answer"])
    if common.out is not None:
        write_text(common.out / "answers.jsonl", "".join(line + "\n" for line in lines))
    checked = [row["correct"] for row in rows if "correct" in row]
    if checked and not common.quiet:
        right = f"{sum(checked)} of {len(checked)} ({100 * sum(checked) / len(checked):.1f} %)"
        print(f"{right} are the labels of the file", file=sys.stderr)
    return 0 if all(checked) else 1


def _read(
    table: Mapping[str, Any], file: str
) -> tuple[Tensor, Sequence[str | None], Sequence[str] | None]:
    """Return rows as the model takes them, their labels if there are some, and where images lie."""
    import torch

    from gossamer.tasks import TableTask, read_flat_images, read_images

    if table["name"] == "table":
        known = {key: table[key] for key in ("path", "target", "facts")}
        return *TableTask(**known).read(file), None
    inside = list(Path(file).iterdir()) if Path(file).is_dir() else []
    if inside and not any(part.is_dir() or "idx" in part.name for part in inside):
        images, places = read_flat_images(file)
        return torch.from_numpy(images), [None] * len(images), places
    images, labels, names, places = read_images(file)
    return torch.from_numpy(images), [names[label] for label in labels.tolist()], places
