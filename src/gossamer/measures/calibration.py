"""Calibration: does a model that says 80 % have it right 80 times in 100? Knows NumPy only."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_range
from gossamer.errors import DataError, ShapeError
from gossamer.probabilities import as_numpy, check_labels, check_probabilities

__all__ = [
    "CalibrationReport",
    "ReliabilityCurve",
    "calibration_error",
    "fit_temperature",
    "reliability_curve",
]

Array = NDArray[np.float64]
_NORMAL_95 = 1.959963984540054
_INVERSE_TEMPERATURES = (1e-3, 1e3)


@dataclass(frozen=True)
class CalibrationReport:
    """How far confidence and accuracy lie apart.

    Args:
        error: Expected calibration error, the mean gap over bins by rows. Range: 0 to 1.
        low: Lower end of its 95 % interval.
        high: Upper end.
        chance: What a perfectly calibrated model with these confidences stays below in 95 % of
            test sets of this size; an error below it shows nothing.
        max_error: Largest gap of a bin that has rows.
        confidence: Mean probability of the predicted class.
        accuracy: Share of rows whose predicted class is the label.
        num_rows: Rows.

    Example:
        >>> calibration_error([[0.5, 0.5], [0.5, 0.5]], [0, 1]).error
        0.0
    """

    error: float
    low: float
    high: float
    chance: float
    max_error: float
    confidence: float
    accuracy: float
    num_rows: int

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures as one plain row."""
        return [self.to_dict()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class ReliabilityCurve:
    """Accuracy against confidence, bin by bin; empty bins are left out.

    Args:
        begin: Lower end of each bin.
        end: Upper end.
        count: Rows in it.
        confidence: Mean confidence of its rows.
        accuracy: Share of its rows that are right.
        low: Lower end of the 95 % interval of the accuracy (Wilson).
        high: Upper end.
    """

    begin: Array
    end: Array
    count: NDArray[np.int64]
    confidence: Array
    accuracy: Array
    low: Array
    high: Array

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each bin, from low confidence to high."""
        columns = {name: value.tolist() for name, value in vars(self).items()}
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the bins as plain values."""
        return {"bins": self.rows()}


def calibration_error(
    probabilities: Any,
    labels: Any,
    *,
    num_bins: int = 15,
    num_bootstrap: int = 1000,
    random_state: int | None = 0,
) -> CalibrationReport:
    r"""Measure the expected calibration error, with an interval and what chance alone gives.

    $$\mathrm{ECE} = \sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|$$

    over bins of equal width of the confidence, the probability of the predicted class. Noise makes
    every gap larger, so that the error of few rows is too high even for a perfect model. The
    interval is the reflected bootstrap, which takes that back; `chance` draws right and wrong from
    the confidences themselves.

    Args:
        probabilities: `(N, C)`, rows summing to 1.
        labels: `(N,)`, true classes.
        num_bins: Range: >= 1. Default 15.
        num_bootstrap: Draws for interval and chance. Range: >= 1. Default 1000.
        random_state: Seed of the draws. Default 0.

    Raises:
        ShapeError: If the two do not belong together.
        DataError: If a row is no distribution, or a label no class.
        ConfigError: If a number is out of range.

    Example:
        >>> sure_and_half_right = [[1.0, 0.0]] * 50
        >>> calibration_error(sure_and_half_right, [0, 1] * 25).error
        0.5

    Source: Naeini et al., *Obtaining Well Calibrated Probabilities Using Bayesian Binning*,
        AAAI 2015; Guo et al., *On Calibration of Modern Neural Networks*, ICML 2017, equation 3;
        chance: Bröcker and Smith, *Increasing the Reliability of Reliability Diagrams*, 2007.
    Deviations: a confidence on the edge of two bins is in the upper one, 1 in the last.
    """
    check_range(num_bootstrap, "num_bootstrap", low=1, integer=True)
    confidence, right, place = _binned(probabilities, labels, num_bins)
    size = len(confidence)
    random = np.random.default_rng(random_state)
    gap = confidence - right
    error = float(_error(gap, place, num_bins))
    drawn, lucky = np.empty(num_bootstrap), np.empty(num_bootstrap)
    for k in range(num_bootstrap):
        rows = random.integers(0, size, size)
        drawn[k] = _error(gap[rows], place[rows], num_bins)
        lucky[k] = _error(confidence - (random.random(size) < confidence), place, num_bins)
    above, below = np.quantile(drawn, (0.975, 0.025))
    counts = np.bincount(place, minlength=num_bins)
    sums = np.abs(np.bincount(place, gap, num_bins))
    return CalibrationReport(
        error=error,
        low=max(0.0, float(2 * error - above)),
        high=max(0.0, float(2 * error - below)),
        chance=float(np.quantile(lucky, 0.95)),
        max_error=float((sums[counts > 0] / counts[counts > 0]).max()),
        confidence=float(confidence.mean()),
        accuracy=float(right.mean()),
        num_rows=size,
    )


def reliability_curve(probabilities: Any, labels: Any, *, num_bins: int = 15) -> ReliabilityCurve:
    """Return accuracy against confidence in bins of equal width: the data of the diagram.

    Args:
        probabilities: `(N, C)`, rows summing to 1.
        labels: `(N,)`, true classes.
        num_bins: Range: >= 1. Default 15.

    Raises:
        ShapeError: If the two do not belong together.
        DataError: If a row is no distribution, or a label no class.
        ConfigError: If `num_bins` is below 1.

    Example:
        >>> curve = reliability_curve([[1.0, 0.0], [0.6, 0.4]], [0, 1], num_bins=2)
        >>> curve.rows()[0]["confidence"], curve.rows()[0]["accuracy"]
        (0.8, 0.5)

    Source: Guo et al., *On Calibration of Modern Neural Networks*, ICML 2017, section 2; interval:
        Wilson, *Probable Inference*, JASA 1927.
    Deviations: none
    """
    confidence, right, place = _binned(probabilities, labels, num_bins)
    counts = np.bincount(place, minlength=num_bins)
    used = np.flatnonzero(counts)
    n = counts[used]
    accuracy = np.bincount(place, right, num_bins)[used] / n
    z2 = _NORMAL_95**2 / n
    middle = (accuracy + z2 / 2) / (1 + z2)
    half = np.sqrt(z2 * (accuracy * (1 - accuracy) + z2 / 4)) / (1 + z2)
    return ReliabilityCurve(
        begin=used / num_bins,
        end=(used + 1) / num_bins,
        count=n,
        confidence=np.bincount(place, confidence, num_bins)[used] / n,
        accuracy=accuracy,
        low=middle - half,
        high=middle + half,
    )


def fit_temperature(logits: Any, labels: Any) -> float:
    r"""Return the temperature T whose `softmax(logits / T)` has the least cross-entropy.

    The cross-entropy is convex in 1/T, so that the sign of its slope decides. Fit it on rows that
    the model was not trained on.

    Args:
        logits: `(N, C)`; `-inf` marks a class that is not allowed.
        labels: `(N,)`, true classes.

    Returns:
        The temperature, between 0.001 and 1000; a warning says when the best one lies outside.

    Raises:
        ShapeError: If the two do not belong together.
        DataError: If a logit is NaN or `inf`, or a label no class, or one that is not allowed.

    Example:
        >>> logits = np.log([[0.9, 0.1]] * 10)
        >>> round(fit_temperature(logits, [0] * 9 + [1]), 6)
        1.0

    Source: Guo et al., *On Calibration of Modern Neural Networks*, ICML 2017, section 4.2.
    Deviations: none
    """
    from scipy.optimize import brentq

    z = np.asarray(as_numpy(logits), dtype=np.float64)
    y = as_numpy(labels)
    if z.ndim != 2 or y.shape != z.shape[:1] or len(z) == 0:
        raise ShapeError(
            f"logits must be (N, C) and labels (N,), N >= 1; got {z.shape} and {y.shape}. Give one "
            "row of logits for each label."
        )
    if np.isnan(z).any() or (z == np.inf).any():
        raise DataError("logits must hold no NaN and no inf; got some. Look for the first of them.")
    check_labels(y, z.shape[1])
    z = z - z.max(1, keepdims=True)
    chosen = z[np.arange(len(y)), y]
    if np.isinf(chosen).any():
        row = int(np.flatnonzero(np.isinf(chosen))[0])
        raise DataError(
            f"labels must be classes that logits allow; got class {y[row]} with logit -inf in row "
            f"{row}. Allow it, or leave the row out."
        )
    finite = np.where(np.isinf(z), 0.0, z)

    def slope(log_inverse: float) -> float:
        weights = np.exp(math.exp(log_inverse) * z)
        return float(((weights * finite).sum(1) / weights.sum(1) - chosen).mean())

    low, high = (math.log(bound) for bound in _INVERSE_TEMPERATURES)
    if slope(low) >= 0 or slope(high) <= 0:
        found = low if slope(low) >= 0 else high
        why = "labels follow no logits" if found == low else "every label has the largest logit"
        warnings.warn(
            f"the best temperature lies outside 0.001 to 1000 ({why}); returned is the bound. Fit "
            "it on more rows, that the model was not trained on.",
            UserWarning,
            stacklevel=2,
        )
        return math.exp(-found)
    return math.exp(-float(brentq(slope, low, high, xtol=1e-12)))


def _binned(
    probabilities: Any, labels: Any, num_bins: int
) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return confidence, right (0 or 1) and the number of the bin of each row."""
    check_range(num_bins, "num_bins", low=1, integer=True)
    p, y = check_probabilities(probabilities, labels)
    confidence = p.max(1)
    right = (p.argmax(1) == y).astype(np.float64)
    place = np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)
    return confidence, right, place


def _error(gap: Array, place: NDArray[np.int64], num_bins: int) -> float:
    return float(np.abs(np.bincount(place, gap, num_bins)).sum() / len(gap))
