"""Does a student exaggerate its teacher's confidence, beyond what two runs without one differ?

The bars were fixed before the run on record, after a trial on the same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        data: `"auto"`: `mnist_10k` below `GOSSAMER_DATA`, or digits, which come with scikit-learn,
            where it is absent; or the name of one of them.
        rate: Chance that a training label becomes another class.
        smoothing: Alpha of label smoothing.
        hidden: Width of the two hidden layers.
        epochs: Of training; the rate falls to a tenth at 60 %.
        batch_size: Rows for each step.
        lr: Of SGD with momentum 0.9.
        weight_decay: Of SGD.
        tracked_steps: First steps at which progress along the data's directions is measured.
        resamples: Of the bootstrap, for the intervals of the deciles.
    """

    data: str = "auto"
    rate: float = 0.2
    smoothing: float = 0.1
    hidden: int = 256
    epochs: int = 20
    batch_size: int = 64
    lr: float = 0.05
    weight_decay: float = 5e-4
    tracked_steps: int = 100
    resamples: int = 1000


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Train a teacher and all that is compared with it; or work out the linear case."""
    from gossamer.recipes import _distillation as parts

    if arm == "linear":
        factors, rows = parts.linear_rows()
        found = {"descent_error": parts.descent_error(seed), **parts.violations(), **factors}
        return Outcome(found, rows)
    every, rows = parts.compare(config, config.rate if arm == "noisy" else 0.0, seed)
    found = every.pop("kd_4")
    return Outcome(found, rows, {parts.RUNS[kind]: values for kind, values in every.items()})


def _claim(
    text: str, metric: str, unit: str, ours: str, better: Any, bar: float, statistic: str = "mean"
) -> Claim:
    return Claim(
        text=text,
        metric=metric,
        unit=unit,
        ours=ours,
        better=better,
        rule="bar",
        bar=bar,
        statistic=statistic,
    )


RECIPE = Recipe(
    name="distillation-deviations",
    method="distillation-deviations",
    title="Distillation: the student exaggerates its teacher's confidence on noisy training data",
    what=(
        "A network learns from noisy labels; a student of the same size learns from the network's "
        "outputs alone. Slopes are those of the student's log-odds on the teacher's, for the class "
        "that the teacher predicts. The control is a second network that learns from the labels: "
        "two runs without any teacher differ too, and nothing is claimed that the control shows as "
        "well. Rows without another name are the student at temperature 4. The linear case is "
        "worked out and checked beside it. Test data, and distillation against label smoothing, "
        "are printed without a verdict."
    ),
    claims=(
        _claim(
            "In the linear case, at equal progress on the first direction, the student is behind "
            "on all 99 lower ones, for teachers stopped at 5, 20 and 80",
            "violations",
            "violations",
            "linear",
            "lower",
            0.0,
            "max",
        ),
        _claim(
            "Gradient descent equals the closed form to 1e-8",
            "descent_error",
            "",
            "linear",
            "lower",
            1e-8,
            "max",
        ),
        _claim(
            "With 20 % noise, temperature 4, training data: slope .15 or more above the control's",
            "slope_gain",
            "",
            "noisy",
            "higher",
            0.15,
        ),
        _claim(
            "The same: orthogonal slope above the control's",
            "deming_gain",
            "",
            "noisy",
            "higher",
            0.0,
        ),
        _claim(
            "The same: share of the teacher's least certain quarter that is under-fitted .15 or "
            "more above the control's",
            "underfit_gain",
            "",
            "noisy",
            "higher",
            0.15,
        ),
        _claim(
            "The same: test accuracy a point or more above the teacher's",
            "over_teacher",
            "points",
            "noisy",
            "higher",
            1.0,
        ),
        _claim(
            "The same: test accuracy above the control's",
            "over_control",
            "points",
            "noisy",
            "higher",
            0.0,
        ),
    ),
    arms=(
        Arm("noisy", "20 % wrong labels", "ours", cost=5.0),
        Arm("clean", "true labels", "baseline", cost=5.0),
        Arm("linear", "linear case", "ours", cost=1.0),
    ),
    scales={"small": Config()},
    run=run,
    columns=(
        Column("images", "Training images", ""),
        Column("accuracy", "Test accuracy", "%", in_domain=True),
        Column("over_teacher", "Over teacher", "points"),
        Column("over_control", "Over control", "points"),
        Column("over_smoothing", "Over label smoothing", "points"),
        Column("slope", "Slope, training", ""),
        Column("slope_gain", "Above control", ""),
        Column("deming", "Orthogonal slope, training", ""),
        Column("deming_gain", "Above control", ""),
        Column("underfit", "Under-fitted quarter, training", ""),
        Column("underfit_gain", "Above control", ""),
        Column("test_slope", "Slope, test", ""),
        Column("test_deming", "Orthogonal slope, test", ""),
        Column("test_underfit", "Under-fitted quarter, test", ""),
        Column("eigen_ratio", "Progress on lower directions, over control", ""),
        Column("violations", "Directions where the student is not behind", ""),
        Column("violations_all", "The same, over all pairs", ""),
        Column("descent_error", "Descent from closed form", ""),
        *(Column(f"factor_{t}", f"Teacher's lead, stopped at {t}", "times") for t in (5, 20, 80)),
    ),
    figures=(
        Figure(
            "curve",
            "log-odds-by-decile",
            "Confidence by decile of the teacher's, training data",
            "Mean log-odds of the class that the teacher predicts, for deciles of the teacher's "
            "own; one line for the teacher and for each run. A steeper line exaggerates.",
            "decile",
            "log_odds",
            {
                "where": {"what": "deciles", "arm": "noisy"},
                "group": "run",
                "x_label": "decile of the teacher's log-odds",
                "y_label": "log-odds, nats",
            },
        ),
        Figure(
            "curve",
            "gap-by-decile",
            "Student less teacher",
            "Mean difference of log-odds by decile, with the range over seeds; the control beside "
            "the students. Below 0 on the left and above on the right is exaggeration.",
            "decile",
            "gap",
            {
                "where": {"what": "deciles", "arm": "noisy"},
                "group": "run",
                "x_label": "decile of the teacher's log-odds",
                "y_label": "difference, nats",
            },
        ),
        Figure(
            "curve",
            "paths-linear",
            "Linear case: a lower direction against an upper one",
            "Progress along direction 61 against progress along direction 31, for the teacher and "
            "students of teachers stopped at three times. Students lie below.",
            "upper",
            "lower",
            {
                "where": {"what": "linear"},
                "group": "run",
                "x_label": "progress on direction 31",
                "y_label": "progress on direction 61",
            },
        ),
        Figure(
            "curve",
            "paths-network",
            "Networks: lower directions against the first",
            "Mean distance of the outputs along directions 2 to 10 of the data, against that along "
            "the first, both over the control's last; control and student at temperature 4.",
            "first",
            "others",
            {
                "where": {"what": "paths", "arm": "noisy"},
                "group": "run",
                "x_label": "progress on direction 1",
                "y_label": "progress on 2 to 10, mean",
            },
        ),
    ),
    budget={"small": 4},
)
