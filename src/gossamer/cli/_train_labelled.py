"""`gossamer train` on a table or on images: a classifier, its accuracy and its calibration."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli._audit_checks import ACCURACY, CALIBRATION, calibration_note, reliability_figure
from gossamer.cli._common import Common, print_json, set_threads
from gossamer.cli._train_page import loss_figure, read_losses, summary_of

if TYPE_CHECKING:
    from gossamer.tasks import LabelledTask
    from gossamer.train import LabelledResult, TrainJob

__all__ = ["is_labelled", "run_labelled"]

_COLUMNS = (
    ("accuracy", "accuracy", "%"),
    ("cross_entropy", "cross-entropy", "nats"),
    ("ece", "calibration error", ""),
)
_CROSS_ENTROPY = {
    "term": "Cross-entropy",
    "text": "Mean of -log of the probability of the label, in nats; lower is better. A few rows "
    "that are surely and wrongly answered make it large.",
}


def is_labelled(name: Any) -> bool:
    """Whether a task of that name has rows with one class each."""
    from gossamer.tasks import LABELLED_NAMES

    return name in LABELLED_NAMES


def run_labelled(
    job: TrainJob, *, refused: Mapping[str, Any], resume: bool, common: Common
) -> None:
    """Train, measure on the rows held out, write the page.

    Args:
        job: What to train.
        refused: Options that belong to other tasks.
        resume: Go on from the checkpoint of the folder.
        common: Options of every command.
    """
    from gossamer.environment import describe_environment
    from gossamer.errors import ConfigError
    from gossamer.files import choose_folder, write_json
    from gossamer.measures import calibration_error, reliability_curve
    from gossamer.report import write_page
    from gossamer.train import train_labelled
    from gossamer.train.labelled import check_labelled, labelled_task

    for name, value in refused.items():
        if value is not None:
            raise ConfigError(
                f"{name} belongs to tasks on sequences; got {value!r} with {job.task['name']}. "
                "Leave it out."
            )
    set_threads(common)
    task = labelled_task(job)
    check_labelled(job, task)  # a wrong option is found before a folder is made
    folder = choose_folder("runs/train", common.out, resume=resume)
    started = time.perf_counter()
    result = train_labelled(job, folder, resume=resume, quiet=common.quiet, task=task)
    calibration = calibration_error(result.probabilities, result.labels)
    cell = {**result.rows()[0], "accuracy": 100 * result.accuracy, "ece": calibration.error}
    bins = reliability_curve(result.probabilities, result.labels).rows()
    row = {f"{name}_here": cell[name] for name, _, _ in _COLUMNS}
    table = [{"arm": "model", "role": "ours", "seeds": 1, **row, "note": ""}]
    summary = summary_of(job, [cell], table, time.perf_counter() - started)
    summary["classes"] = list(task.classes)
    summary["calibration"] = calibration.to_dict()
    if result.transition is not None:
        summary["transition"] = result.transition.round(6).tolist()
        summary["files"].append("transition.npy")
    write_json(folder / "summary.json", summary)
    write_json(folder / "environment.json", describe_environment())
    _write_inputs(folder, job, task, result, bins, calibration_note(calibration))
    page = write_page(folder)
    if common.json:
        print_json(summary)
        return
    print(
        f"{cell['accuracy']:.1f} % of {result.num_samples} rows held out are given their label "
        f"({task.num_classes} classes, {len(task.rows('train'))} rows trained on)\n"
        f"calibration error {calibration.error:.3f} ({calibration.low:.3f} to "
        f"{calibration.high:.3f}; chance alone stays below {calibration.chance:.3f})"
    )
    if job.loss.get("name") in ("forward", "backward"):
        print(
            "the loss was corrected, so the model gives true classes; the rows held out have labels"
            " as wrong as the others, and both figures suffer from that"
        )
    what = "FILE.csv" if job.task["name"] == "table" else "IMAGES"
    print(f"page: {page.resolve()}\nnext: gossamer solve {shlex.quote(str(folder))} {what}")


def _write_inputs(
    folder: Path,
    job: TrainJob,
    task: LabelledTask,
    result: LabelledResult,
    bins: list[dict[str, Any]],
    note: str,
) -> None:
    """Write `rows.csv` and `page.json`, from which `write_page` draws the page."""
    from gossamer.files import write_json
    from gossamer.report import write_table

    common = {"arm": "model", "seed": job.seed}
    rows = [{"kind": "bin", **common, **one} for one in bins]
    # what a perfectly calibrated model would have
    rows += [
        {"kind": "bin", "arm": "perfect", "seed": job.seed, "confidence": v, "accuracy": v}
        for v in (0.0, 1.0)
    ]
    rows += [{"kind": "loss", **common, **entry} for entry in read_losses(folder)]
    write_table(rows, folder / "rows.csv")
    unit = {name: unit for name, _, unit in _COLUMNS}
    write_json(
        folder / "page.json",
        {
            "title": f"Classifier of {task.config['path']}",
            "what": (
                f"A classifier of {task.num_classes} classes was trained on "
                f"{len(task.rows('train'))} rows and measured on {result.num_samples} others of "
                "the same file. The last step is kept. Where labels of the file are wrong, some of "
                "those held out are too: a model that gives true classes is then right more often "
                "than the accuracy says, and its calibration error comes out too large."
            ),
            "columns": [
                {"name": name, "label": label, "unit": unit[name], "in_domain": False}
                for name, label, _ in _COLUMNS
            ],
            "arms": [
                {"name": "model", "title": "This model", "role": "ours"},
                {"name": "perfect", "title": "Perfectly calibrated", "role": "baseline"},
            ],
            "figures": [reliability_figure(), loss_figure("loss (nats a row)")],
            "notes": [note],
            "terms": [ACCURACY, _CROSS_ENTROPY, CALIBRATION],
            "command": shlex.join(["gossamer", "train", "--config", f"{folder}/config.toml"]),
        },
    )
