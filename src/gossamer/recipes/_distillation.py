"""What the recipe on distillation trains and works out: networks on images, and the linear case."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.errors import DataError
from gossamer.losses import DistillationLoss, LabelSmoothingLoss
from gossamer.measures import (
    Deviation,
    EigenTracker,
    EigenTrajectory,
    MatchedProgress,
    deviation_report,
    eigen_progress,
    matched_progress,
)
from gossamer.optim import step_decay
from gossamer.recipes._label_noise import CLASSES, Data, load
from gossamer.recipes._outside import outside_data

if TYPE_CHECKING:
    from gossamer.recipes.distillation_deviations import Config

__all__ = [
    "RUNS",
    "Fitted",
    "compare",
    "data_of",
    "descent_error",
    "fit",
    "linear_rows",
    "violations",
]

EIGENVALUES = 100
ROWS = 200
STOPS = (5, 20, 80)
MATCHED, LOWER = 30, 60  # directions 31 and 61
TRACKED_ROWS = 1000
RUNS = {
    "control": "control",
    "smoothing": "label smoothing .1",
    "kd_1": "temperature 1",
    "kd_4": "temperature 4",
}
"""What is compared with the teacher, the control first, with names for the page."""


@dataclass(frozen=True)
class Fitted:
    """What a network says of the rows of training and test, and how it got there."""

    train: Tensor
    test: Tensor
    path: EigenTrajectory


# --- networks ---


@cache
def data_of(config: Config, rate: float, seed: int) -> Data:
    """Return the data, all pixels together of mean 0 and deviation 1 in training.

    Digits stand in where the images of `"auto"` are not there.
    """
    name = "mnist_10k" if config.data == "auto" else config.data
    if config.data == "auto":
        try:
            outside_data(name)
        except DataError:
            warnings.warn(
                "mnist_10k is not below GOSSAMER_DATA: the recipe runs on scikit-learn's digits, "
                "on which its bars were not fixed.",
                stacklevel=2,
            )
            name = "digits"
    data = load(name, rate, seed)
    mean, deviation = data.x.mean(), data.x.std()
    return dataclasses.replace(
        data, x=(data.x - mean) / deviation, x_test=(data.x_test - mean) / deviation
    )


@cache
def fit(config: Config, rate: float, seed: int, kind: str) -> Fitted:
    """Train one network.

    Args:
        config: Of the recipe.
        rate: Of the label noise.
        seed: Of data and noise, and of the teacher's start and batches. All other networks share
            another start and other batches.
        kind: `"teacher"`, `"control"`, `"smoothing"`, or `"kd_"` with a temperature.
    """
    data = data_of(config, rate, seed)
    targets: Tensor = data.labels
    loss: nn.Module = LabelSmoothingLoss(0.0)
    if kind == "smoothing":
        loss = LabelSmoothingLoss(config.smoothing)
    elif kind.startswith("kd_"):
        targets = fit(config, rate, seed, "teacher").train
        loss = DistillationLoss(temperature=float(kind.removeprefix("kd_")), alpha=1.0)
    return _train(data, targets, loss, config, seed if kind == "teacher" else 1000 + seed)


def _train(data: Data, targets: Tensor, loss: nn.Module, config: Config, seed: int) -> Fitted:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    width = config.hidden
    network = nn.Sequential(
        nn.Linear(data.x.shape[1], width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.SGD(
        network.parameters(), config.lr, momentum=0.9, weight_decay=config.weight_decay
    )
    rate = step_decay((round(0.6 * config.epochs),))
    tracker = EigenTracker(network, data.x[:TRACKED_ROWS], num_directions=10, every=1)
    step = 0
    for epoch in range(config.epochs):
        optimizer.param_groups[0]["lr"] = config.lr * rate(epoch)
        order = torch.randperm(len(data.x), generator=generator)
        for rows in torch.split(order, config.batch_size):
            if step < config.tracked_steps:  # most of the way is gone then
                tracker.update(step)
            optimizer.zero_grad()
            loss(network(data.x[rows]), targets[rows]).backward()
            optimizer.step()
            step += 1
    tracker.update(step)
    with torch.no_grad():
        return Fitted(network(data.x), network(data.x_test), tracker.trajectory())


def compare(
    config: Config, rate: float, seed: int
) -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
    """Train all networks; return the figures of each run beside teacher and control, and rows."""
    data = data_of(config, rate, seed)
    fitted = {kind: fit(config, rate, seed, kind) for kind in ("teacher", *RUNS)}
    teacher, control = fitted["teacher"], fitted["control"]
    right = {kind: _accuracy(each, data) for kind, each in fitted.items()}
    found: dict[str, dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    for kind in RUNS:
        train = deviation_report(
            teacher.train, fitted[kind].train, num_bootstrap=config.resamples
        ).student
        test = deviation_report(teacher.test, fitted[kind].test, num_bootstrap=1).student
        found[kind] = {
            "images": float(len(data.x)),
            "accuracy": right[kind],
            "over_teacher": right[kind] - right["teacher"],
            **_three(train),
            **{f"test_{name}": value for name, value in _three(test).items()},
        }
        rows += _decile_rows(train, kind)
        if kind != "control":  # the first of the runs
            beside = found["control"]
            gains = {f"{name}_gain": found[kind][name] - beside[name] for name in _three(train)}
            found[kind] |= {"over_control": right[kind] - right["control"], **gains}
        if kind.startswith("kd_"):
            found[kind]["over_smoothing"] = right[kind] - right["smoothing"]
            paths = _matched(control, fitted[kind])
            found[kind]["eigen_ratio"] = float(np.nanmean(paths.ratio[:, 1:]))
            if kind == "kd_4":
                rows += _path_rows(paths)
    return found, rows


def _three(part: Deviation) -> dict[str, float]:
    return {
        "slope": part.slope,
        "deming": part.deming_slope,
        "underfit": part.low_confidence_underfit,
    }


def _accuracy(fitted: Fitted, data: Data) -> float:
    return 100 * float((fitted.test.argmax(1) == data.y_test).float().mean())


def _matched(control: Fitted, run: Fitted) -> MatchedProgress:
    """Compare paths of the outputs where they have come equally far along the first direction.

    Both are shares of where the control ended.
    """
    ends = control.path.outputs[-1]
    return matched_progress(control.path.outputs / ends, run.path.outputs / ends)


def _decile_rows(part: Deviation, run: str) -> list[dict[str, Any]]:
    """Return a row for each decile of a run, and with the control's those of the teacher."""
    rows: list[dict[str, Any]] = []
    for number, values in enumerate(part.deciles, 1):
        place = {"what": "deciles", "decile": number}
        if run == "control":
            rows.append({**place, "run": "teacher", "log_odds": values["teacher"]})
        gap = {name: values[name] for name in ("gap", "low", "high")}
        rows.append({**place, "run": RUNS[run], "log_odds": values["mean"], **gap})
    return rows


def _path_rows(paths: MatchedProgress) -> list[dict[str, Any]]:
    """Return the mean progress along the other directions, by progress along the first."""
    return [
        {"what": "paths", "run": run, "first": float(value), "others": float(row[1:].mean())}
        for run, table in (("control", paths.teacher), (RUNS["kd_4"], paths.student))
        for value, row in zip(paths.values, table, strict=True)
    ]


# --- the linear case ---


def linear_eigenvalues() -> NDArray[np.float64]:
    """Return 100 eigenvalues from 1 to 0.001."""
    return np.logspace(0, -3, EIGENVALUES)


def violations(levels: tuple[float, ...] = (0.1, 0.5, 0.9)) -> dict[str, float]:
    """Count where a student is not behind its teacher on a lower direction, in exact arithmetic.

    Both have the same progress on the upper direction: a share, from `levels`, of what the teacher
    reached. In 60 digits, since near the top the student is behind by 1e-33 only.

    Returns:
        `violations`, with the first direction as the upper one; `violations_all`, with every one.
    """
    counts = {"violations": 0, "violations_all": 0}
    with localcontext() as context:
        context.prec = 60
        lam = [Decimal(10) ** (-3 * Decimal(k) / (EIGENVALUES - 1)) for k in range(EIGENVALUES)]
        for stop in STOPS:
            reached = [1 - (-each * stop).exp() for each in lam]
            for upper in range(EIGENVALUES - 1):
                for level in levels:
                    progress = Decimal(str(level)) * reached[upper]
                    early = -(1 - progress).ln() / lam[upper]
                    late = -(1 - Decimal(str(level))).ln() / lam[upper]
                    wrong = sum(
                        (1 - (-lam[k] * late).exp()) * reached[k] >= 1 - (-lam[k] * early).exp()
                        for k in range(upper + 1, EIGENVALUES)
                    )
                    counts["violations_all"] += wrong
                    counts["violations"] += wrong if upper == 0 else 0
    return {name: float(count) for name, count in counts.items()}


def descent_error(seed: int, steps: int = 200) -> float:
    """Return the largest gap between gradient descent and its closed form, teacher and student."""
    random = np.random.default_rng(seed)
    lam = linear_eigenvalues()
    u, _ = np.linalg.qr(random.normal(size=(ROWS, EIGENVALUES)))
    v, _ = np.linalg.qr(random.normal(size=(EIGENVALUES, EIGENVALUES)))
    x, y = (u * np.sqrt(lam)) @ v.T, random.normal(size=ROWS)
    counts = np.arange(steps + 1)
    labels = u.T @ y
    teacher = _descent(x, y, steps)
    worst = np.abs(teacher @ u - eigen_progress(lam, counts, step_size=1.0) * labels).max()
    for stop in STOPS:
        student = _descent(x, teacher[stop], steps) @ u
        closed = eigen_progress(lam, counts, teacher_time=stop, step_size=1.0) * labels
        worst = max(worst, np.abs(student - closed).max())
    return float(worst)


def _descent(x: NDArray[Any], y: NDArray[Any], steps: int) -> NDArray[np.float64]:
    """Return predictions after each step of gradient descent from zero, step size 1."""
    weights, found = np.zeros(x.shape[1]), []
    for _ in range(steps + 1):
        found.append(x @ weights)
        weights = weights + x.T @ (y - x @ weights)
    return np.stack(found)


def linear_rows() -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return how far the teacher leads on direction 61 where both match on 31, and the paths."""
    lam = linear_eigenvalues()
    times = np.linspace(0, 300, 30_001)
    teacher = eigen_progress(lam, times)
    factors, rows = {}, []
    values = np.arange(1, 20) / 20
    for stop in STOPS:
        student = eigen_progress(lam, times, teacher_time=stop)
        level = 0.8 * float(eigen_progress(lam[MATCHED : MATCHED + 1], [stop])[0, 0])
        at = matched_progress(teacher, student, direction=MATCHED, values=[level])
        factors[f"factor_{stop}"] = 1 / float(at.ratio[0, LOWER])
        path = matched_progress(teacher, student, direction=MATCHED, values=values.tolist())
        runs = {f"student of time {stop}": path.student}
        if stop == STOPS[0]:
            runs = {"teacher": path.teacher, **runs}
        rows += [
            {"what": "linear", "run": run, "upper": float(value), "lower": float(row[LOWER])}
            for run, table in runs.items()
            for value, row in zip(values, table, strict=True)
        ]
    return factors, rows
