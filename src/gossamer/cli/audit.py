"""`gossamer audit`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gossamer.cli._audit import Check, run_checks, settings_text, write_audit
from gossamer.cli._common import COMMON, Common, print_json, set_threads

if TYPE_CHECKING:
    from gossamer.tasks import LabelledTask

__all__ = ["run"]

_TABLES = (".csv", ".tsv")
_WHAT = {
    "table": "Rows with labels were looked at for labels that are probably wrong.",
    "outputs": "The saved outputs of a classifier were measured.",
    "model": "A classifier was measured on its rows; it was not changed.",
    "pattern": "A pattern of attention was checked against sufficient conditions.",
    "run": "A sequence model was measured on test samples of its task; it was not changed.",
}


def run(
    target: str,
    /,
    *,
    data: str | None = None,
    checks: str | None = None,
    quick: Annotated[bool, Parameter(negative="")] = False,
    teacher: Path | None = None,
    control: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> None:
    """Check a classifier, its saved outputs, or a table of labels, on one page.

    Example: gossamer audit my.csv,target=species

    Example: gossamer audit student.npz --teacher teacher.npz --control other.npz

    Example: gossamer audit runs/train --checks generalization

    Args:
        target: A table FILE.csv, with target=NAME and ignore=A+B after a comma, or images:DIR
            (check: labels); saved outputs FILE.npz with logits, labels and, if known, ids (checks:
            calibration, deviations); a run of gossamer train on a table or images, or my.py:build,
            a function that returns a module (checks: calibration, generalization); a run on
            sequences (checks: variance, precision, head_size, sparsity); or a pattern of attention
            FILE.npy, square and boolean (check: pattern).
        data: Rows for a model: an .npz with images and labels, a folder of images, or
            table:FILE.csv,target=NAME. A run has its own.
        checks: Names with commas between them; default all that fit.
        quick: Fewer folds, no sharpness: a first look.
        teacher: Saved outputs of the teacher, for deviations.
        control: Saved outputs of a run that had no teacher, for deviations.
        resume: Take the checks that the newest audit (or --out) has done.
    """
    from gossamer.files import begin_folder, choose_folder, newest_run

    set_threads(common)
    seed = common.seed or 0
    kind, known = _open(target, data, teacher, control, quick=quick, seed=seed, common=common)
    chosen = {name: known[name] for name in _chosen(checks, list(known), kind)}
    begun = common.out or (newest_run("runs/audit") if resume else None)
    folder = choose_folder("runs/audit", begun, resume=resume)
    words: dict[str, Any] = {"target": target, "data": data, "quick": quick, "seed": seed}
    words |= {"teacher": teacher and str(teacher), "control": control and str(control)}
    begin_folder(folder, settings_text(words), resume=resume)
    started = time.perf_counter()
    found = run_checks(chosen, folder, resume=resume, quiet=common.quiet)
    command = ["audit", target]
    for name, value in (("data", data), ("teacher", teacher), ("control", control)):
        command += [f"--{name}", str(value)] if value is not None else []
    command += ["--checks", ",".join(chosen), *(["--quick"] if quick else [])]
    command += ["--seed", str(seed)] if seed else []
    about = {"seed": seed, "seconds": time.perf_counter() - started, "target": target}
    title = f"Audit of {target}"
    page = write_audit(
        folder, found, title=title, what=_WHAT[kind], about={**about, "command": command}
    )
    if common.json:
        print_json({name: dict(one.details) for name, one in found.items()})
        return
    for one in found.values():
        print("\n".join(one.lines))
    print(f"page: {page.resolve()}")


def _chosen(checks: str | None, known: Sequence[str], kind: str) -> list[str]:
    from gossamer.checks import check_choice

    if checks is None:
        return list(known)
    names = [name.strip() for name in checks.split(",") if name.strip()]
    for name in names:
        check_choice(name, known, f"check of a {kind}")
    return names or list(known)


def _open(
    target: str,
    data: str | None,
    teacher: Path | None,
    control: Path | None,
    *,
    quick: bool,
    seed: int,
    common: Common,
) -> tuple[str, dict[str, Check]]:
    """Return what kind of target it is, and its checks by name."""
    from gossamer.cli import _audit_checks as numbers
    from gossamer.cli import _audit_sequences as sequences
    from gossamer.errors import ConfigError
    from gossamer.progress import progress

    first = target.partition(",")[0]
    table = first.endswith(_TABLES) or target.partition(":")[0] in ("table", "images")
    if (teacher or control) and not target.endswith(".npz"):
        raise ConfigError(
            f"--teacher and --control go with saved outputs FILE.npz; got {target!r}. Leave them "
            "out."
        )
    if table:
        if data is not None:
            raise ConfigError("a table has its own rows; got --data too. Leave it out.")
        task = _rows(target)

        def wrong_labels() -> Any:
            with progress("labels", 3 if quick else 5, quiet=common.quiet) as bar:
                return numbers.labels(task, quick=quick, seed=seed, tell=bar.update)

        return "table", {"labels": wrong_labels}
    if target.endswith(".npz"):
        return "outputs", _of_outputs(target, teacher, control, seed)
    folder = Path(target)
    if target.endswith(".npy") or (folder.is_dir() and sequences.is_sequence_run(folder)):
        if data is not None:
            raise ConfigError(
                f"--data gives rows to a classifier; got it with {target!r}. Leave it out."
            )
        if target.endswith(".npy"):
            return "pattern", sequences.of_pattern(folder)
        return "run", sequences.of_sequences(folder, seed=seed)
    from gossamer.cli._audit_model import generalization, open_model

    model = open_model(target, None if data is None else _rows(data), device=common.device)
    return "model", {
        "calibration": partial(_of_model, model, seed),
        "generalization": partial(generalization, model, quick=quick, seed=seed),
    }


def _of_model(model: Any, seed: int) -> Any:
    from gossamer.cli._audit_checks import calibration
    from gossamer.measures.variance import evaluating
    from gossamer.train.labelled import predict_rows

    with evaluating(model.model):
        p = predict_rows(model.model, model.test.x)
    return calibration(p, model.test.labels, seed=seed, note=model.note)


def _of_outputs(
    target: str, teacher: Path | None, control: Path | None, seed: int
) -> dict[str, Check]:
    from scipy.special import softmax

    from gossamer.cli import _audit_checks as numbers
    from gossamer.errors import ConfigError, DataError

    arrays = _arrays(Path(target))
    found: dict[str, Check] = {}
    if "labels" in arrays:
        p = softmax(arrays["logits"].astype(float), axis=-1)
        found["calibration"] = partial(numbers.calibration, p, arrays["labels"], seed=seed)
    if control is not None and teacher is None:
        raise ConfigError("--control stands beside --teacher; got it alone. Give --teacher too.")
    if teacher is not None:
        others = [_arrays(path) for path in (teacher, control) if path is not None]
        beside = others[1] if len(others) > 1 else None
        found["deviations"] = partial(numbers.deviations, arrays, others[0], beside, seed=seed)
    if not found:
        raise DataError(
            f"{target} must hold labels (for calibration), or --teacher must be given (for "
            "deviations); got neither. Save labels beside the logits."
        )
    return found


def _arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of saved outputs."""
    import zipfile

    import numpy as np

    from gossamer.errors import DataError

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} must be an .npz with logits, and labels if known; got: {error}. Write it by "
            "numpy.savez."
        ) from None
    if "logits" not in arrays:
        raise DataError(f"{path} must hold the array logits (N, C); got {sorted(arrays)}. Add it.")
    return arrays


def _rows(spec: str) -> LabelledTask:
    """Return the rows of `table:FILE.csv,...`, `images:PATH`, or of a path alone."""
    from gossamer.tasks import LABELLED_NAMES, build_labelled_task

    if spec.partition(":")[0] not in LABELLED_NAMES:
        table = spec.partition(",")[0].endswith(_TABLES)
        spec = f"{'table' if table else 'images'}:{spec}"
    return build_labelled_task(spec)
