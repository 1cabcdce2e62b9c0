"""Checks of `gossamer audit` on a model with its data: calibration, generalization measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli._audit import Finding

if TYPE_CHECKING:
    from torch import nn

    from gossamer.tasks import LabelledBatch, LabelledTask

__all__ = ["ModelTarget", "generalization", "open_model"]

_TITLES = {
    "l2": "l2 norm",
    "l1_path": "l1 path norm",
    "l2_path": "l2 path norm",
    "spectral": "spectral norm",
    "sharpness": "sharpness",
    "pac_bayes": "PAC-Bayes bound",
}


_TERMS = (
    {
        "term": "Norms",
        "text": "Sizes of the weights, in four ways, over the squared margin by which the training "
        "rows are told apart; natural logarithms. Larger goes with more memorising among networks "
        "of one architecture, trained on sets of one size. Undefined where 5 % of the training "
        "rows or more are given another class than their label.",
    },
    {
        "term": "Sharpness",
        "text": "How much the training loss can rise when the weights move a little, over 1 + the "
        "loss. What is found is a lower bound.",
    },
    {
        "term": "PAC-Bayes bound",
        "text": "An upper bound of the error on new rows. Above 1 it says nothing.",
    },
)


@dataclass(frozen=True)
class ModelTarget:
    """A model and the rows that it is measured on.

    Args:
        model: Gives logits.
        train: Rows that it was trained on.
        test: Rows that calibration is measured on.
        note: What is known of the rows of the test.
    """

    model: nn.Module
    train: LabelledBatch
    test: LabelledBatch
    note: str


def open_model(target: str, data: LabelledTask | None, *, device: str) -> ModelTarget:
    """Return the model of a run folder or of a function, with its rows.

    Args:
        target: Folder of `gossamer train` on a table or on images; or `module:callable`, a function
            without arguments that returns a module, the module a file `.py` or importable.
        data: The rows; for a run, default those that it was trained and tested on.
        device: Where the weights go.

    Raises:
        ConfigError: If there are no rows, or the function is not there.
        DataError: If the folder is no such run, or its rows do not fit.
    """
    from gossamer.errors import ConfigError

    folder = Path(target)
    if folder.is_dir():
        return _open_run(folder, data, device)
    if ":" not in target:
        raise ConfigError(f"{_form(target)}. Check the path.")
    if data is None:
        raise ConfigError(
            "a model of a function needs the rows it was trained on; got no --data. Give --data "
            "FILE.npz, a folder of images, or table:FILE.csv,target=NAME."
        )
    from gossamer.train import pick_device

    model = _call(target).to(pick_device(device))
    rows = _all_rows(data)
    note = (
        "All rows of --data were taken. If the model was trained on them, calibration is that of "
        "rows it has seen, which is too good."
    )
    return ModelTarget(model, rows, rows, note)


def _open_run(folder: Path, data: LabelledTask | None, device: str) -> ModelTarget:
    import torch

    from gossamer.errors import DataError
    from gossamer.tasks import LabelledBatch, TableTask, build_labelled_task
    from gossamer.train import load_labelled_run

    model, table = load_labelled_run(folder, device=device)
    own = {key: value for key, value in table.items() if key not in ("name", "facts")}
    if data is None:
        task = build_labelled_task(table["name"], **own)
        if task.config["facts"] != table["facts"]:
            raise DataError(
                f"{table['path']} must be the rows that {folder} was trained on; they were changed "
                "since then. Put them back, or give rows by --data."
            )
        test = task.rows("test")
        note = "Calibration is measured on the rows that the run held out."
        return ModelTarget(model, task.rows("train"), test, note)
    rows = _all_rows(data)
    if isinstance(data, TableTask):
        # encoded as in training, not by the columns of the other file
        known = TableTask(**{key: table[key] for key in ("path", "target", "facts")})
        x, names = known.read(data.path)
        place = {name: number for number, name in enumerate(known.classes)}
        strange = [name for name in names if name not in place]
        if strange:
            raise DataError(
                f"{data.path}: classes must be those of the run; got {strange[0]!r}. Known: "
                f"{', '.join(known.classes[:10])}."
            )
        rows = LabelledBatch(x, torch.tensor([place[str(name)] for name in names]))
    note = "All rows of --data were taken, for all checks."
    return ModelTarget(model, rows, rows, note)


def _all_rows(task: LabelledTask) -> LabelledBatch:
    from gossamer.tasks import LabelledBatch

    return LabelledBatch(task.x, task.labels)


def _form(target: str) -> str:
    return (
        "TARGET must be a run folder, a table FILE.csv, saved outputs FILE.npz, or module:callable"
        f" such as my_models.py:build; got {target!r}"
    )


def _call(target: str) -> nn.Module:
    """Return the module that `module:callable` makes."""
    import importlib
    import importlib.util

    from torch import nn

    from gossamer.errors import ConfigError

    module, _, name = target.partition(":")
    form = _form(target)
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module).stem, module)
            if spec is None or spec.loader is None or not Path(module).is_file():
                raise ConfigError(f"{form}, and there is no file {module}. Check the path.")
            found = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{form}, which cannot be imported ({error}). Check it.") from None
    build: Callable[[], Any] | None = getattr(found, name, None)
    if not callable(build):
        raise ConfigError(f"{form}, and {module} has no function {name!r}. Check its name.")
    model = build if isinstance(build, nn.Module) else build()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{target} must return a torch.nn.Module; got {type(model).__name__}. Return the model."
        )
    return model


def generalization(target: ModelTarget, *, quick: bool, seed: int) -> Finding:
    """Measure norms with margins, sharpness and the PAC-Bayes bound on the training rows.

    Args:
        target: Model and rows; the model is not changed.
        quick: Norms only.
        seed: Of the noise.
    """
    from gossamer.errors import UnsupportedError
    from gossamer.measures import generalization_report
    from gossamer.measures.generalization import MEASURES, NORMS

    rows_of = (target.train.x, target.train.labels)
    beyond: list[str] = []
    try:
        measures = NORMS if quick else None
        report = generalization_report(target.model, rows_of, measures=measures, random_state=seed)
    except UnsupportedError as error:
        others = [name for name in MEASURES if name not in NORMS]
        beyond = [f"The norms have no rule for this model: {error}"]
        report = generalization_report(target.model, rows_of, measures=others, random_state=seed)
    values = {name: _finite(value) for name, value in report.values.items()}
    rows = [{"kind": "measure", **row} for row in report.rows()]
    layers = [{**row, "kind": "layer", "type": row["kind"]} for row in report.layers]
    lists: list[Mapping[str, Any]] = [
        _list("measures", "Measures, and simple figures beside them", "measure",
              ("measure", "value", "unit", "remark"))
    ]  # fmt: skip
    if layers:
        lists.append(
            _list("layers", "Layers", "layer", ("layer", "type", "units", "frobenius", "spectral"))
        )
    words = [f"{_TITLES[k]} {'-' if v is None else f'{v:.4g}'}" for k, v in values.items()]
    reasons = _reasons(report.reasons)
    notes = [
        "Norms are natural logarithms, divided by the squared margin that all but 5 % of the "
        "training rows reach. They compare networks of one architecture with each other; alone "
        "they say little. Only the PAC-Bayes bound is an error, and it is nearly always above 1, "
        "that is vacuous.",
        *beyond,
        *reasons,
        *report.notes,
    ]
    return Finding(
        values=values,
        columns=[
            {"name": name, "label": _TITLES[name], "unit": "ln" if name in NORMS else ""}
            for name in values
        ],
        lines=[
            f"generalization, on {report.num_examples} training rows: {', '.join(words)}",
            *beyond,
            *reasons,
        ],
        rows=[*rows, *layers],
        lists=lists,
        notes=notes,
        terms=_TERMS,
        details=report.to_dict(),
    )


def _reasons(reasons: Mapping[str, str]) -> list[str]:
    """Return why measures are undefined, each reason once, and what a negative margin means."""
    named: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        named.setdefault(reason, []).append(_TITLES[name])
    said = [f"{', '.join(names)}: {reason}" for reason, names in named.items()]
    if any("margin" in reason for reason in named):
        said.append(
            "A margin that is not above 0: 5 % of the training rows or more are given another "
            "class than their label. Train longer, or correct the labels; the norms with a margin "
            "of 1 are in summary.json."
        )
    return said


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _list(name: str, title: str, kind: str, columns: tuple[str, ...]) -> dict[str, Any]:
    shown = [{"name": column, "label": column} for column in columns]
    return {"name": name, "title": title, "where": {"kind": kind}, "columns": shown}
