"""Calibration: definitions written out, known errors, what chance gives, temperatures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from scipy.stats import binomtest

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.measures import calibration_error, fit_temperature, reliability_curve


def two_classes(confidence: np.ndarray) -> np.ndarray:
    return np.stack([confidence, 1 - confidence], 1)


def drawn(seed: int, size: int = 500, gap: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return rows whose accuracy is their confidence less a gap."""
    random = np.random.default_rng(seed)
    confidence = random.choice([0.62, 0.75, 0.85, 0.95], size=size)
    return two_classes(confidence), np.where(random.random(size) < confidence - gap, 0, 1)


def test_error_is_the_definition_written_as_loops() -> None:
    random = np.random.default_rng(3)
    p, y = softmax(2 * random.standard_normal((300, 5)), 1), random.integers(0, 5, 300)
    total, largest = 0.0, 0.0
    for b in range(10):
        inside = [i for i in range(300) if b / 10 <= max(p[i]) < (b + 1) / 10]
        if inside:
            accuracy = np.mean([np.argmax(p[i]) == y[i] for i in inside])
            gap = abs(accuracy - np.mean([max(p[i]) for i in inside]))
            total, largest = total + len(inside) / 300 * gap, max(largest, gap)
    report = calibration_error(p, y, num_bins=10)
    assert report.error == pytest.approx(total, abs=1e-12)
    assert report.max_error == pytest.approx(largest, abs=1e-12)
    assert report.num_rows == 300
    assert report.rows() == [report.to_dict()]


def test_interval_covers_the_true_error_and_chance_the_calibrated_model() -> None:
    covered = beyond = 0
    for seed in range(100):
        p, y = drawn(seed, gap=0.1)
        report = calibration_error(p, y, num_bootstrap=200, random_state=seed)
        covered += report.low <= 0.1 <= report.high
        fair = calibration_error(*drawn(1000 + seed), num_bootstrap=200, random_state=seed)
        beyond += fair.error > fair.chance
    # 95 and 5 are meant; both bounds are below the 0.1 % tails of the binomial law
    assert covered >= 85
    assert beyond <= 13


def test_certainty_in_the_last_bin_and_same_seed_same_interval() -> None:
    p = np.eye(3)[[0, 1, 2, 0]]
    report = calibration_error(p, [0, 1, 2, 1])
    assert report.error == pytest.approx(0.25)
    assert report == calibration_error(torch.tensor(p), torch.tensor([0, 1, 2, 1]))
    assert reliability_curve(p, [0, 1, 2, 1]).rows()[0]["begin"] == pytest.approx(14 / 15)


def test_curve_has_the_means_of_its_bins_and_wilson_intervals() -> None:
    p, y = drawn(5)
    curve = reliability_curve(p, y, num_bins=20)
    assert [row["count"] for row in curve.rows()] == curve.count.tolist()
    assert curve.count.sum() == 500
    for row, confidence in zip(curve.rows(), (0.62, 0.75, 0.85, 0.95), strict=True):
        inside = np.isclose(p[:, 0], confidence)
        right = int((y[inside] == 0).sum())
        assert row["confidence"] == pytest.approx(confidence)
        assert row["accuracy"] == pytest.approx(right / inside.sum())
        reference = binomtest(right, int(inside.sum())).proportion_ci(method="wilson")
        assert (row["low"], row["high"]) == pytest.approx(tuple(reference))
    assert curve.to_dict() == {"bins": curve.rows()}


def test_temperature_is_the_minimum_of_the_cross_entropy() -> None:
    random = np.random.default_rng(0)
    z = 3 * random.standard_normal((400, 6))
    y = np.array([random.choice(6, p=q) for q in softmax(z / 2.5, 1)])
    rows = np.arange(400)
    reference = minimize_scalar(
        lambda t: -log_softmax(z / t, 1)[rows, y].mean(),
        bounds=(0.1, 20),
        method="bounded",
        options={"xatol": 1e-9},
    )
    found = fit_temperature(torch.tensor(z, requires_grad=True), y)
    assert found == pytest.approx(reference.x, rel=1e-5)
    # it undoes a scale, and adding a constant to a row changes nothing
    assert fit_temperature(7 * z + random.standard_normal((400, 1)), y) == pytest.approx(7 * found)


def test_temperature_with_classes_that_are_not_allowed() -> None:
    z = np.log([[0.9, 0.1]] * 10)
    masked = np.concatenate([z, np.full((10, 1), -np.inf)], 1)
    y = [0] * 8 + [1] * 2
    assert fit_temperature(masked, y) == pytest.approx(fit_temperature(z, y))
    with pytest.raises(DataError, match="row 3"):
        fit_temperature(masked, [0, 1, 0, 2, 0, 0, 0, 0, 0, 1])


def test_temperature_says_when_there_is_no_best_one() -> None:
    z = np.array([[2.0, 0.0], [0.0, 2.0]])
    with pytest.warns(UserWarning, match="largest logit"):
        assert fit_temperature(z, [0, 1]) == pytest.approx(1e-3)
    with pytest.warns(UserWarning, match="follow no logits"):
        assert fit_temperature(z, [1, 0]) == pytest.approx(1e3)


@pytest.mark.parametrize(
    ("p", "y", "error", "words"),
    [
        ([[0.5, 0.5]], [0, 1], ShapeError, "one row of probabilities"),
        ([[2.0, 1.0]], [0], DataError, "softmax"),
        ([[np.nan, 1.0]], [0], DataError, "probabilities"),
        (np.empty((0, 2)), np.empty(0, int), DataError, "no rows"),
        ([[0.5, 0.5]], [2], DataError, "0 to 1"),
        ([[0.5, 0.5]], [0.0], DtypeError, "integers"),
    ],
)
def test_bad_input(p: object, y: object, error: type[Exception], words: str) -> None:
    for measure in (calibration_error, reliability_curve):
        with pytest.raises(error, match=words):
            measure(p, y)


def test_bad_numbers_and_logits() -> None:
    with pytest.raises(ConfigError, match="num_bins"):
        calibration_error([[0.5, 0.5]], [0], num_bins=0)
    with pytest.raises(ConfigError, match="num_bootstrap"):
        calibration_error([[0.5, 0.5]], [0], num_bootstrap=0)
    with pytest.raises(DataError, match="NaN"):
        fit_temperature([[np.nan, 0.0]], [0])
    with pytest.raises(ShapeError, match="logits"):
        fit_temperature([[1.0, 0.0]], [0, 1])
    with pytest.raises(ShapeError, match="N >= 1"):
        fit_temperature(np.empty((0, 2)), np.empty(0, int))
