"""Checks of `gossamer audit` that need numbers alone: calibration, deviations, wrong labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gossamer.cli._audit import Finding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gossamer.measures.calibration import CalibrationReport
    from gossamer.measures.deviations import Deviation
    from gossamer.tasks import LabelledTask

__all__ = [
    "ACCURACY",
    "CALIBRATION",
    "calibration",
    "calibration_note",
    "deviations",
    "labels",
    "reliability_figure",
]

ACCURACY = {"term": "Accuracy", "text": "Share of the rows that are given the label they have."}
CALIBRATION = {
    "term": "Calibration error",
    "text": "How far confidence, the probability of the predicted class, lies from the share of "
    "rows that are right: the mean over bins of confidence, each weighed by its rows. 0 is "
    "perfect, 1 the worst. Both are judged by the labels of the file, right or wrong.",
}
_DEVIATIONS = (
    {
        "term": "Log-odds",
        "text": "For each row, how sure a run is of the teacher's class: its logit against the "
        "log-sum of all others. 0 is a probability of one half.",
    },
    {
        "term": "Slope of log-odds",
        "text": "Of the run's on the teacher's, by least squares. Above 1 the run is surer than "
        "the teacher where the teacher is sure: it exaggerates. Noise in the teacher's pulls it "
        "down.",
    },
    {"term": "Orthogonal slope", "text": "The same with noise of equal size in both."},
    {
        "term": "Least sure quarter below the teacher",
        "text": "Of the rows of which the teacher is least sure, the share where the run is less "
        "sure still.",
    },
)
_LABELS = (
    {
        "term": "Suspicious rows",
        "text": "Rows in the list above: models that did not see the row are confident of another "
        "class than its label, and find that class likeliest.",
    },
    {
        "term": "Estimated wrong labels",
        "text": "Of the rows with a class the models are confident of, the share with another "
        "label. An estimate; it is too high where the models are poor.",
    },
    {
        "term": "Unseen rows given their label",
        "text": "Share of rows whose label is what models that did not see the row predict. With "
        "wrong labels it cannot reach 100 %.",
    },
)

_EPOCHS, _QUICK_EPOCHS = 60, 15
_LEAST_STEPS = 300
"""Steps of a small table, whose passes are few steps each."""
_FOLDS, _QUICK_FOLDS = 5, 3


def calibration(probabilities: Any, true: Any, *, seed: int, note: str = "") -> Finding:
    """Measure the calibration error and draw the reliability diagram.

    Args:
        probabilities: `(N, C)`.
        true: `(N,)`, labels.
        seed: Of the bootstrap.
        note: Where the rows come from.
    """
    from gossamer.measures import calibration_error, reliability_curve

    report = calibration_error(probabilities, true, random_state=seed)
    bins = reliability_curve(probabilities, true).rows()
    beyond = "beyond" if report.error > report.chance else "not beyond"
    rows: list[dict[str, Any]] = [{"kind": "bin", **one} for one in bins]
    rows += [
        {"kind": "bin", "arm": "perfect", "confidence": value, "accuracy": value}
        for value in (0.0, 1.0)
    ]
    return Finding(
        values={"accuracy": 100 * report.accuracy, "ece": report.error},
        columns=[
            {"name": "accuracy", "label": "accuracy", "unit": "%"},
            {"name": "ece", "label": "calibration error", "unit": ""},
        ],
        lines=[
            f"calibration: error {report.error:.3f} ({report.low:.3f} to {report.high:.3f}), "
            f"{beyond} what chance gives ({report.chance:.3f}); accuracy "
            f"{100 * report.accuracy:.1f} %, mean confidence {100 * report.confidence:.1f} %, "
            f"{report.num_rows} rows"
        ],
        rows=rows,
        figures=[reliability_figure()],
        arms=[{"name": "perfect", "title": "Perfectly calibrated", "role": "baseline"}],
        notes=[calibration_note(report), *([note] if note else [])],
        terms=[ACCURACY, CALIBRATION],
        details=report.to_dict(),
    )


def calibration_note(report: CalibrationReport) -> str:
    """Return the calibration error with its interval and what chance gives, as a sentence."""
    return (
        f"Calibration error on {report.num_rows} rows, with its 95 % interval: "
        f"{report.error:.3f} ({report.low:.3f} to {report.high:.3f}); a perfectly calibrated model "
        f"with these confidences stays below {report.chance:.3f} in 95 % of test sets of this size."
    )


def reliability_figure() -> dict[str, Any]:
    """Return the reliability diagram as `page.json` asks for it."""
    return {
        "kind": "curve",
        "name": "reliability",
        "title": "Reliability: accuracy against confidence",
        "alt": "Share of right rows against their mean confidence, bin by bin.",
        "note": "Each point is a bin of rows of like confidence. Below the line of perfect "
        "calibration the model is surer than it is right, above it less sure. Bins without rows "
        "have no point, and bins of few rows jump: rows.csv has the count of each.",
        "where": {"kind": "bin"},
        "group": "arm",
        "x": "confidence",
        "y": "accuracy",
        "x_label": "confidence",
        "y_label": "accuracy",
    }


def deviations(
    student: Mapping[str, NDArray[np.generic]],
    teacher: Mapping[str, NDArray[np.generic]],
    control: Mapping[str, NDArray[np.generic]] | None,
    *,
    seed: int,
) -> Finding:
    """Measure how a student deviates from its teacher, beside a control if there is one.

    Args:
        student: Arrays of its file.
        teacher: The same.
        control: The same, of a run that had no teacher; or none.
        seed: Of the bootstrap.
    """
    from gossamer.measures import deviation_report

    files = [teacher, student, *([control] if control is not None else [])]
    ids = [file["ids"] for file in files if "ids" in file]
    report = deviation_report(
        teacher["logits"],
        student["logits"],
        labels=student.get("labels", teacher.get("labels")),
        control_logits=None if control is None else control["logits"],
        ids=ids if len(ids) == len(files) else None,
        random_state=seed,
    )
    rows: list[dict[str, Any]] = []
    for arm, part in (("audited", report.student), ("control", report.control)):
        for tenth in () if part is None else part.deciles:
            own = {key: tenth[key] for key in ("teacher", "gap", "low", "high", "count")}
            rows.append({"kind": "decile", "arm": arm, "mean": tenth["mean"], **own})
    ends = [row["teacher"] for row in rows]
    rows += [
        {"kind": "decile", "arm": "equal", "teacher": value, "mean": value}
        for value in (min(ends), max(ends))
    ]
    lines, notes = [], []
    for one in (report.student, report.control):
        if one is not None:
            lines.append(
                f"deviations of the {one.run}: slope {one.slope:.3f} ({one.slope_interval[0]:.3f} "
                f"to {one.slope_interval[1]:.3f}), orthogonal slope {one.deming_slope:.3f}, "
                f"{100 * one.low_confidence_underfit:.0f} % of the teacher's least sure quarter "
                f"below it, same class in {100 * one.agreement:.1f} %"
            )
    if report.control is None:
        notes.append(
            "No control was given. Two runs without any teacher deviate from each other too, so "
            "that a slope above 1 alone shows no exaggeration: give --control FILE.npz."
        )
    return Finding(
        values=_slopes(report.student),
        table=[] if report.control is None else [{"arm": "control", **_slopes(report.control)}],
        columns=[
            {"name": "slope", "label": "slope of log-odds", "unit": ""},
            {"name": "deming_slope", "label": "orthogonal slope", "unit": ""},
            {"name": "underfit", "label": "least sure quarter below the teacher", "unit": "%"},
            {"name": "agreement", "label": "same class as the teacher", "unit": "%"},
        ],
        lines=[*lines, *notes],
        rows=rows,
        figures=[_deviation_figure()],
        arms=[
            {"name": "control", "title": "Control", "role": "baseline"},
            {"name": "equal", "title": "Equal to the teacher", "role": "baseline"},
        ],
        notes=notes,
        terms=_DEVIATIONS,
        details=report.to_dict(),
    )


def _slopes(one: Deviation) -> dict[str, float]:
    return {
        "slope": one.slope,
        "deming_slope": one.deming_slope,
        "underfit": 100 * one.low_confidence_underfit,
        "agreement": 100 * one.agreement,
    }


def _deviation_figure() -> dict[str, Any]:
    return {
        "kind": "curve",
        "name": "deviations",
        "title": "Log-odds of the teacher's class, tenth by tenth",
        "alt": "Mean log-odds of each run against the teacher's, in tenths of the rows.",
        "note": "Each point is a tenth of the rows, sorted by the teacher's log-odds. Steeper than "
        "the line of equality is exaggeration.",
        "where": {"kind": "decile"},
        "group": "arm",
        "x": "teacher",
        "y": "mean",
        "x_label": "log-odds of the teacher",
        "y_label": "log-odds of the run",
    }


def labels(
    task: LabelledTask, *, quick: bool, seed: int, tell: Callable[[int], None] | None = None
) -> Finding:
    """List the rows whose label is probably wrong, by models that did not see them.

    Args:
        task: Table or images.
        quick: Fewer folds and epochs.
        seed: Of folds and models.
        tell: Called with the number of folds done.
    """
    from gossamer.measures import find_label_errors
    from gossamer.train import TrainConfig
    from gossamer.train.labelled import out_of_fold, seeded_mlp

    folds, epochs = (_QUICK_FOLDS, _QUICK_EPOCHS) if quick else (_FOLDS, _EPOCHS)
    width = int(task.x[0].numel())
    steps = epochs * -(-len(task.x) * (folds - 1) // folds // 64)
    config = TrainConfig(steps=max(_LEAST_STEPS, steps), lr=1e-3, device="cpu", checkpoint_every=0)
    build = partial(seeded_mlp, seed, width, task.num_classes)
    p = out_of_fold(build, task.x, task.labels, config, seed=seed, folds=folds, progress=tell)
    report = find_label_errors(p, task.labels)
    classes = task.classes
    rows = [
        {
            "kind": "label",
            "where": task.lines[row["row"]],
            "given": classes[row["given"]],
            "suggested": classes[row["suggested"]],
            "score": row["score"],
        }
        for row in report.rows()
    ]
    agree = 100 * float((p.argmax(1) == task.labels).double().mean())
    share = 100 * len(rows) / report.num_rows
    columns = [("where", "where"), ("given", "label"), ("suggested", "suggested"),
               ("score", "score")]  # fmt: skip
    lists: Sequence[Mapping[str, Any]] = [
        {
            "name": "suspicious",
            "title": "Rows whose label is probably wrong, the most suspicious first",
            "where": {"kind": "label"},
            "columns": [{"name": name, "label": label} for name, label in columns],
        }
    ]
    first = [f"  {r['where']}: {r['given']} -> {r['suggested']} ({r['score']:.2f})" for r in rows]
    return Finding(
        values={"suspicious": share, "noise_rate": 100 * report.noise_rate, "unseen": agree},
        columns=[
            {"name": "suspicious", "label": "suspicious rows", "unit": "%"},
            {"name": "noise_rate", "label": "estimated wrong labels", "unit": "%"},
            {"name": "unseen", "label": "unseen rows given their label", "unit": "%"},
        ],
        lines=[
            f"labels: {len(rows)} of {report.num_rows} rows are suspicious ({share:.1f} %); about "
            f"{100 * report.noise_rate:.0f} % of the labels are estimated to be wrong; models give "
            f"{agree:.1f} % of the rows that they did not see their label",
            *first[:10],
        ],
        rows=rows,
        lists=lists if rows else (),
        notes=[
            "The score is the probability of the suggested class less that of the label, by "
            f"networks trained on the other {folds - 1} of {folds} parts. A model that cannot tell "
            "two classes apart suspects rows of both: look at rows before changing labels.",
        ],
        terms=_LABELS,
        details=report.to_dict() | {"rows": rows},
    )
