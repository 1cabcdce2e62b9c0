"""Under label noise smoothing and forward correction beat cross-entropy, backward loses.

The bars were fixed before the run on record, after a trial on the same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

SMOOTHING = 0.4
FORWARD = 0.6
CLEAN = 0.1
TEACHERS = {
    "student_plain": ("cross_entropy", 0.0),
    "student_smoothing": ("smoothing", SMOOTHING),
    "student_forward": ("forward", FORWARD),
}


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        data: `"digits"`, which comes with scikit-learn, or a folder like `"mnist_10k"`.
        rate: Chance that a training label becomes another class.
        smoothing: Alphas of label smoothing; those of the claims are 0.1 and 0.4.
        forward: Alphas of forward correction beside the true one; those of the claims are 0.1 and
            0.6.
        hidden: Width of the two hidden layers.
        epochs: Of training.
        batch_size: Rows for each step.
        lr: Of Adam.
        weight_decay: Of the arm with weight decay.
        clean_share: Training rows with true labels that early stopping looks at.
        temperature: Of teacher and student.
    """

    data: str = "digits"
    rate: float = 0.2
    smoothing: tuple[float, ...] = (0.1, 0.2, 0.4, 0.6)
    forward: tuple[float, ...] = (0.6,)
    hidden: int = 256
    epochs: int = 60
    batch_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 1e-3
    clean_share: float = 0.1
    temperature: float = 1.0


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Train the networks of one arm and measure them beside cross-entropy with the same seed."""
    from gossamer.recipes._label_noise import CLASSES, fit, load, measure, student

    true_alpha = config.rate * CLASSES / (CLASSES - 1)
    data = load(config.data, config.rate, seed)
    plain = measure(fit(config, seed, "cross_entropy"), data)

    def of(kind: str, alpha: float = 0.0) -> dict[str, float]:
        return beside(measure(fit(config, seed, kind, alpha), data), plain)

    if arm in TEACHERS:
        found = beside(measure(student(config, seed, *TEACHERS[arm]), data), plain)
        first = measure(student(config, seed, "cross_entropy"), data)
        found["student_gain"] = found["accuracy"] - first["accuracy"]
        return outcome(arm, "", found)
    if arm == "cross_entropy":
        variants = {
            "weight decay": of("weight_decay"),
            "early stopping": of("early_stopping"),
        }
        return outcome(arm, "", of("cross_entropy"), variants)
    if arm == "smoothing":
        grid = {alpha: of("smoothing", alpha) for alpha in (*config.smoothing, SMOOTHING)}
        found = grid.pop(SMOOTHING) | clean(config, seed, "smoothing")
        every = {SMOOTHING: found} | grid
        above = max(v["accuracy"] for a, v in every.items() if a > true_alpha)
        below = max(v["accuracy"] for a, v in every.items() if a <= true_alpha)
        found["above_noise"] = above - below
        return outcome(arm, f"alpha {SMOOTHING:g}", found, named(grid))
    if arm == "forward":
        grid = {alpha: of("forward", alpha) for alpha in (*config.forward, true_alpha, FORWARD)}
        found = grid.pop(FORWARD) | clean(config, seed, "forward")
        variants = named(grid) | {"estimated": of("estimated")}
        return outcome(arm, f"alpha {FORWARD:g}", found, variants)
    if arm == "backward":
        return outcome(
            arm,
            f"alpha {true_alpha:.2g}",
            of("backward", true_alpha),
            named({CLEAN: of("backward", CLEAN)}),
        )
    return outcome(arm, "", of(arm))


def beside(found: dict[str, float], plain: dict[str, float]) -> dict[str, float]:
    """Add the differences to cross-entropy with the same seed."""
    return found | {
        "gain": found["accuracy"] - plain["accuracy"],
        "ece_change": found["ece"] - plain["ece"],
    }


def clean(config: Config, seed: int, kind: str) -> dict[str, float]:
    """Return how far a loss is from cross-entropy where all labels are right."""
    from gossamer.recipes._label_noise import fit, load, measure

    data = load(config.data, 0.0, seed)
    both = [
        measure(fit(config, seed, *loss, rate=0.0), data)["accuracy"]
        for loss in (("cross_entropy", 0.0), (kind, CLEAN))
    ]
    return {"clean_gap": abs(both[0] - both[1])}


def named(grid: dict[float, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return measurements by the name of their alpha, in order."""
    return {f"alpha {alpha:.2g}": grid[alpha] for alpha in sorted(grid)}


def outcome(
    arm: str,
    head: str,
    found: dict[str, float],
    variants: dict[str, dict[str, float]] | None = None,
) -> Outcome:
    """Return what an arm gives, with one row for each network."""
    rows: list[dict[str, Any]] = [
        {"loss": f"{arm.replace('_', ' ')} {name}".strip(), **values}
        for name, values in {head: found, **(variants or {})}.items()
    ]
    return Outcome(found, rows, variants or {})


def _claim(text: str, metric: str, unit: str, ours: str, better: Any, bar: float) -> Claim:
    return Claim(
        text=text,
        metric=metric,
        unit=unit,
        ours=ours,
        better=better,
        rule="bar",
        bar=bar,
        statistic="mean",
    )


RECIPE = Recipe(
    name="label-noise",
    method="label-noise",
    title="Label noise: smoothing and forward correction help, backward correction does not",
    what=(
        "One training label in five becomes another digit; test labels stay right. A small network "
        "is trained with each loss until it fits the wrong labels too, and students learn from "
        "the probabilities of some of them. Differences are in points to cross-entropy with the "
        "same split, noise and seed, as means over seeds."
    ),
    claims=(
        _claim(
            "Smoothing .4 gains 1.5 points or more", "gain", "points", "smoothing", "higher", 1.5
        ),
        _claim("Forward .6 gains 1.5 points or more", "gain", "points", "forward", "higher", 1.5),
        _claim(
            "Backward correction with the true noise loses 3 points or more",
            "gain",
            "points",
            "backward",
            "lower",
            -3.0,
        ),
        _claim(
            "A student of the smoothed network gains 2 points or more over cross-entropy",
            "gain",
            "points",
            "student_smoothing",
            "higher",
            2.0,
        ),
        _claim(
            "A student of the smoothed network gains 2 points or more over one of cross-entropy",
            "student_gain",
            "points",
            "student_smoothing",
            "higher",
            2.0,
        ),
        _claim(
            "Smoothing is best with an alpha above that of the noise",
            "above_noise",
            "points",
            "smoothing",
            "higher",
            0.0,
        ),
        _claim(
            "On clean labels smoothing .1 is within 1 point of cross-entropy",
            "clean_gap",
            "points",
            "smoothing",
            "lower",
            1.0,
        ),
        _claim(
            "On clean labels forward .1 is within 1 point of cross-entropy",
            "clean_gap",
            "points",
            "forward",
            "lower",
            1.0,
        ),
        _claim(
            "Smoothing .4 raises the calibration error by .1 or more",
            "ece_change",
            "",
            "smoothing",
            "higher",
            0.1,
        ),
        _claim(
            "Forward .6 lowers the calibration error by .05 or more",
            "ece_change",
            "",
            "forward",
            "lower",
            -0.05,
        ),
    ),
    arms=(
        Arm("smoothing", "smoothing, alpha .4", "ours", cost=7.0),
        Arm("forward", "forward, alpha .6", "ours", cost=7.0),
        Arm("backward", "backward, true alpha", "ours", cost=3.0),
        Arm("student_smoothing", "student of smoothing", "ours", cost=5.0),
        Arm("student_forward", "student of forward", "ours", cost=5.0),
        Arm("student_plain", "student of cross-entropy", "baseline", cost=2.0),
        Arm("cross_entropy", "cross-entropy", "baseline", cost=3.0),
        Arm("generalized", "generalized cross-entropy", "baseline", cost=2.0),
        Arm("symmetric", "symmetric cross-entropy", "baseline", cost=2.0),
    ),
    scales={"small": Config(), "medium": Config(data="mnist_10k", epochs=30)},
    run=run,
    columns=(
        Column("accuracy", "Accuracy, clean test", "%", in_domain=True),
        Column("gain", "Over cross-entropy", "points"),
        Column("repaired", "Wrong labels given their true class", "%"),
        Column("ece", "Calibration error", ""),
        Column("ece_change", "Its change", ""),
        Column("confidence", "Mean confidence", ""),
        Column("student_gain", "Over student of cross-entropy", "points"),
        Column("clean_gap", "On clean labels, from cross-entropy", "points"),
        Column("above_noise", "Best alpha above the noise, over below", "points"),
    ),
    figures=(
        Figure(
            "bars",
            "accuracy",
            "Accuracy on the clean test",
            "One bar for each loss, with lowest and highest seed.",
            "loss",
            "accuracy",
            {"x_label": "loss", "y_label": "accuracy, %"},
        ),
        Figure(
            "bars",
            "calibration",
            "Calibration error on the clean test",
            "One bar for each loss: large for smoothing, small for forward correction.",
            "loss",
            "ece",
            {"x_label": "loss", "y_label": "expected calibration error"},
        ),
    ),
    budget={"small": 2, "medium": 8},
)
