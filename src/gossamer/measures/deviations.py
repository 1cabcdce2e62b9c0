"""Where a student deviates from its teacher, and whether it exaggerates; knows NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_range
from gossamer.measures._outputs import class_labels, logits_of, row_flags, same_rows

__all__ = ["Deviation", "DeviationReport", "deviation_report"]

Array = NDArray[np.float64]
BINS, LEAST = 10, 20
_CHUNK_NUMBERS = 2**20


@dataclass(frozen=True)
class Deviation:
    """How one run deviates from the teacher on some examples.

    Args:
        run: `"student"` or `"control"`.
        examples: `"all"`, `"flipped"` or `"clean"`.
        of: Whose log-odds are compared: `"predicted"`, the class that the teacher predicts, or
            `"true"`, that of the label.
        num_examples: How many.
        slope: Least-squares slope of the run's log-odds on the teacher's. Noise in the teacher's
            pulls it below 1. NaN if the teacher's are all equal.
        slope_interval: Percentile interval of the slope, 95 %, from the bootstrap.
        deming_slope: Orthogonal slope, which noise of equal size in both leaves at 1.
        low_confidence_underfit: Share of the quarter with the teacher's lowest log-odds whose own
            are below the teacher's.
        agreement: Share of examples with the teacher's class on top.
        kl: Mean divergence of the run from the teacher. Unit: nats.
        total_variation: Mean of half the sum of absolute differences of probabilities.
        deciles: By the teacher's log-odds, in equal counts: `teacher` and `mean`, mean log-odds of
            the teacher and of the run; `gap`, mean of run less teacher, with its 95 % interval
            `low` to `high`; `count`.
        class_slopes: Slope of each class that the teacher predicts (or that is true) 20 times or
            more, with log-odds that differ.

    Example:
        >>> report = deviation_report(3 * np.eye(2), 4 * np.eye(2))
        >>> report.student.num_examples
        2
    """

    run: str
    examples: str
    of: str
    num_examples: int
    slope: float
    slope_interval: tuple[float, float]
    deming_slope: float
    low_confidence_underfit: float
    agreement: float
    kl: float
    total_variation: float
    deciles: tuple[Mapping[str, float], ...]
    class_slopes: Mapping[int, float]

    def row(self) -> dict[str, Any]:
        """Return the figures as one plain row, without deciles and classes."""
        values = {k: v for k, v in vars(self).items() if k not in ("deciles", "class_slopes")}
        low, high = values.pop("slope_interval")
        return values | {"slope_low": low, "slope_high": high}


@dataclass(frozen=True)
class DeviationReport:
    """How a student deviates from its teacher, and beside it how a control run does.

    Exaggeration is a slope above 1 *and above that of the control*: two runs without any teacher
    deviate from each other too. The share of under-fitted examples alone says little; label
    smoothing, which flattens all log-odds, has the highest.

    Args:
        student: On all examples, log-odds of the class that the teacher predicts.
        others: The same for the control, for true classes, for flipped and clean examples.
        accuracy: By run, where labels were given.

    Example:
        >>> report = deviation_report(3 * np.eye(2), 4 * np.eye(2))
        >>> report.slope, report.agreement
        (nan, 1.0)
    """

    student: Deviation
    others: tuple[Deviation, ...] = ()
    accuracy: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def control(self) -> Deviation | None:
        """The control as the student: all examples, predicted class; `None` if none was given."""
        return self.find("control")

    @property
    def slope(self) -> float:
        """Least-squares slope of the student."""
        return self.student.slope

    @property
    def deming_slope(self) -> float:
        """Orthogonal slope of the student."""
        return self.student.deming_slope

    @property
    def low_confidence_underfit(self) -> float:
        """Share of the teacher's least certain quarter that the student under-fits."""
        return self.student.low_confidence_underfit

    @property
    def deciles(self) -> tuple[Mapping[str, float], ...]:
        """Deciles of the student."""
        return self.student.deciles

    @property
    def agreement(self) -> float:
        """Share of examples on which student and teacher agree."""
        return self.student.agreement

    def find(self, run: str, examples: str = "all", of: str = "predicted") -> Deviation | None:
        """Return one part, or `None`."""
        wanted = (run, examples, of)
        parts = (self.student, *self.others)
        return next((p for p in parts if (p.run, p.examples, p.of) == wanted), None)

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each run, kind of examples and kind of class."""
        return [part.row() for part in (self.student, *self.others)]

    def decile_rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each bin of each part."""
        return [
            {"run": p.run, "examples": p.examples, "of": p.of, "decile": number + 1, **values}
            for p in (self.student, *self.others)
            for number, values in enumerate(p.deciles)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)


def deviation_report(
    teacher_logits: Any,
    student_logits: Any,
    *,
    labels: Any = None,
    control_logits: Any = None,
    flipped: Any = None,
    ids: Sequence[Any] | None = None,
    num_bootstrap: int = 1000,
    random_state: int = 0,
) -> DeviationReport:
    r"""Compare a student's confidence with its teacher's, example by example.

    For every example the class j on top of the teacher, and of both the log-odds of its probability

    $$\phi(p_j) = \log \frac{p_j}{1 - p_j} = x_j - \log \sum_{k \ne j} \exp x_k,$$

    from the logits, hence finite however sure a model is. A student that is less sure where the
    teacher is unsure, and more sure where it is sure, has a slope above 1. Works from saved arrays;
    no model is needed. Give a control: a second run with other random numbers that saw no teacher.

    Args:
        teacher_logits: Of the teacher, on the data that is looked at: training and test data give
            different answers and belong in two reports.
        student_logits: Of the student, the same rows.
        labels: True classes; adds accuracy, and log-odds of the true class.
        control_logits: Of a run without teacher, the same rows.
        flipped: True where a training label is known to be wrong; adds flipped and clean examples
            apart, if there are some of both.
        ids: For each of the arrays given (teacher, student, control if any) the ids of its rows,
            checked to be the same in the same order.
        num_bootstrap: Resamples of the examples, for the intervals. Range: >= 1. Default 1000.
        random_state: Of the resamples. Default 0.

    Shape:
        - logits: `(N, C)`, N >= 1, C >= 2; arrays or tensors, any floating dtype.
        - labels: `(N,)`, classes 0 to C - 1; flipped: `(N,)`, boolean.

    Raises:
        ShapeError: If shapes, numbers of classes or of rows differ.
        DataError: If a logit is not finite, a label is outside, or ids differ.
        ConfigError: If the number of resamples is out of its range.

    Example:
        >>> teacher = np.random.default_rng(0).normal(size=(100, 2))
        >>> report = deviation_report(teacher, 2 * teacher)
        >>> round(report.slope, 6), round(report.deming_slope, 6)
        (2.0, 2.0)

    Source: Nagarajan et al., *On student-teacher deviations in distillation*, NeurIPS 2023,
        sections 3 and 4: the plot of log-odds and its slope.
    Deviations: log-odds are exact (authors: clipped probabilities); the orthogonal slope, the
        intervals and the control are additions of this library. At most 10 bins by the teacher's
        log-odds, fewer if one would hold fewer than 20 examples; ties in the order of the rows.
    """
    check_range(num_bootstrap, "num_bootstrap", low=1, integer=True)
    teacher = logits_of(teacher_logits, "teacher_logits")
    runs = {"student": logits_of(student_logits, "student_logits", like=teacher)}
    if control_logits is not None:
        runs["control"] = logits_of(control_logits, "control_logits", like=teacher)
    same_rows(ids, ("teacher", *runs), len(teacher))
    classes = {"predicted": teacher.argmax(1)}
    accuracy = {}
    if labels is not None:
        classes["true"] = class_labels(labels, teacher.shape)
        for name, logits in {"teacher": teacher, **runs}.items():
            accuracy[name] = float((logits.argmax(1) == classes["true"]).mean())
    groups = {"all": np.ones(len(teacher), dtype=bool)}
    if flipped is not None:
        wrong = row_flags(flipped, "flipped", len(teacher))
        if wrong.any() and not wrong.all():
            groups |= {"flipped": wrong, "clean": ~wrong}
    parts = []
    for of, columns in classes.items():
        x = log_odds(teacher, columns)
        for run, logits in runs.items():
            y = log_odds(logits, columns)
            fidelity = _fidelity(teacher, logits)
            for examples, kept in groups.items():
                pair = _Pair(x[kept], y[kept], columns[kept])
                numbers = np.random.default_rng(random_state), num_bootstrap
                same: dict[str, Any] = {
                    name: float(values[kept].mean()) for name, values in fidelity.items()
                }
                parts.append(Deviation(run, examples, of, **pair.figures(*numbers), **same))
    return DeviationReport(parts[0], tuple(parts[1:]), accuracy)


def log_odds(logits: Any, columns: NDArray[Any]) -> Array:
    """Return the log-odds of one class in each row, `(N,)`."""
    found = np.empty(len(logits))
    for rows in _chunks(logits):
        part = logits[rows].astype(np.float64)
        place = np.arange(len(part)), columns[rows]
        own = part[place]
        part[place] = -np.inf
        most = part.max(1)
        found[rows] = own - most - np.log(np.exp(part - most[:, None]).sum(1))
    return found


def _fidelity(teacher: Any, run: Any) -> dict[str, Array]:
    """Return agreement, divergence and total variation of each row."""
    found = {name: np.empty(len(teacher)) for name in ("agreement", "kl", "total_variation")}
    for rows in _chunks(teacher):
        log_q, log_p = _log_softmax(teacher[rows]), _log_softmax(run[rows])
        q = np.exp(log_q)
        found["agreement"][rows] = teacher[rows].argmax(1) == run[rows].argmax(1)
        found["kl"][rows] = (q * (log_q - log_p)).sum(1)
        found["total_variation"][rows] = np.abs(q - np.exp(log_p)).sum(1) / 2
    return found


def _log_softmax(logits: Any) -> Array:
    exact = logits.astype(np.float64)
    exact = exact - exact.max(1, keepdims=True)
    shifted: Array = exact - np.log(np.exp(exact).sum(1, keepdims=True))
    return shifted


def _chunks(logits: Any) -> Iterator[slice]:
    size = max(1, _CHUNK_NUMBERS // logits.shape[1])
    for begin in range(0, len(logits), size):
        yield slice(begin, begin + size)


@dataclass
class _Pair:
    """Log-odds of teacher and run on the same examples, with the class they are about."""

    x: Array
    y: Array
    columns: NDArray[Any]

    def figures(self, generator: np.random.Generator, resamples: int) -> dict[str, Any]:
        """Return slopes, shares, bins and classes."""
        order = np.argsort(self.x, kind="stable")
        lowest = order[: max(1, len(order) // 4)]
        bins = np.array_split(order, max(1, min(BINS, len(order) // LEAST)))
        return {
            "num_examples": len(self.x),
            "slope": least_squares(_moments(self.x, self.y)),
            "slope_interval": self._slope_interval(generator, resamples),
            "deming_slope": orthogonal(_moments(self.x, self.y)),
            "low_confidence_underfit": float((self.y[lowest] < self.x[lowest]).mean()),
            "deciles": tuple(self._bin(rows, generator, resamples) for rows in bins),
            "class_slopes": self._class_slopes(),
        }

    def _slope_interval(
        self, generator: np.random.Generator, resamples: int
    ) -> tuple[float, float]:
        found = []
        for _ in range(resamples):
            rows = generator.integers(len(self.x), size=len(self.x))
            found.append(least_squares(_moments(self.x[rows], self.y[rows])))
        found = [slope for slope in found if np.isfinite(slope)]
        return _percentiles(np.asarray(found)) if found else (np.nan, np.nan)

    def _bin(
        self, rows: NDArray[Any], generator: np.random.Generator, resamples: int
    ) -> dict[str, float]:
        gaps = self.y[rows] - self.x[rows]
        means = [
            gaps[generator.integers(len(gaps), size=len(gaps))].mean() for _ in range(resamples)
        ]
        low, high = _percentiles(np.asarray(means))
        return {
            "teacher": float(self.x[rows].mean()),
            "mean": float(self.y[rows].mean()),
            "gap": float(gaps.mean()),
            "low": low,
            "high": high,
            "count": len(rows),
        }

    def _class_slopes(self) -> dict[int, float]:
        found = {}
        for label, count in zip(*np.unique(self.columns, return_counts=True), strict=True):
            if count >= LEAST:
                rows = self.columns == label
                slope = least_squares(_moments(self.x[rows], self.y[rows]))
                if np.isfinite(slope):
                    found[int(label)] = slope
        return found


def _moments(x: Array, y: Array) -> tuple[float, float, float]:
    """Return variances of both and their covariance."""
    a, b = x - x.mean(), y - y.mean()
    return float(a @ a), float(b @ b), float(a @ b)


def least_squares(moments: tuple[float, float, float]) -> float:
    """Return the slope of y on x; NaN if x does not vary."""
    xx, _, xy = moments
    return xy / xx if xx > 0 else float("nan")


def orthogonal(moments: tuple[float, float, float]) -> float:
    """Return the slope of the line with least squared distances; NaN if there is none."""
    xx, yy, xy = moments
    if xy == 0:
        return 0.0 if xx > yy else float("nan")
    gap = yy - xx
    root = float(np.hypot(gap, 2 * xy))
    # one number in two forms; each loses its digits where the other has them
    return 2 * xy / (root - gap) if gap < 0 else (gap + root) / (2 * xy)


def _percentiles(values: Array) -> tuple[float, float]:
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)
