"""Deviations of a student against formulas in float64, SciPy, and cases known by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.measures import deviation_report
from gossamer.measures.deviations import least_squares, log_odds, orthogonal


def example(rows: int = 240, classes: int = 4, seed: int = 0) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)
    teacher = 3 * random.normal(size=(rows, classes))
    student = 1.3 * teacher + random.normal(size=(rows, classes))
    control = teacher + 2 * random.normal(size=(rows, classes))
    return teacher, student, control, random.integers(classes, size=rows)


# --- values ---


def test_a_student_equal_to_its_teacher() -> None:
    teacher = example()[0]
    report = deviation_report(teacher, teacher, num_bootstrap=20)
    assert report.slope == pytest.approx(1, abs=1e-12)
    assert report.deming_slope == pytest.approx(1, abs=1e-12)
    assert report.agreement == 1
    assert report.student.kl == report.student.total_variation == 0
    assert report.low_confidence_underfit == 0
    assert all(d["gap"] == d["low"] == d["high"] == 0 for d in report.deciles)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_scaled_logits_of_two_classes_have_the_factor_as_slope(factor: float) -> None:
    teacher = example(classes=2)[0]
    report = deviation_report(teacher, factor * teacher, num_bootstrap=20)
    for slope in (report.slope, report.deming_slope, *report.student.class_slopes.values()):
        assert slope == pytest.approx(factor, abs=1e-12)
    assert report.student.slope_interval == pytest.approx((factor, factor))
    # the teacher's class has log-odds above 0, so that the factor moves all to one side
    assert report.low_confidence_underfit == (1.0 if factor < 1 else 0.0)


def test_log_odds_equal_the_logit_of_probabilities_and_stay_finite() -> None:
    teacher = example()[0]
    columns = teacher.argmax(1)
    p = np.exp(teacher)[np.arange(len(teacher)), columns] / np.exp(teacher).sum(1)
    np.testing.assert_allclose(log_odds(teacher, columns), np.log(p / (1 - p)), atol=1e-10)
    far = np.array([[500.0, 0.0, 0.0], [-500.0, 0.0, 0.0]], dtype=np.float32)
    expected = [500 - np.log(2), -500 - np.log(2)]
    np.testing.assert_allclose(log_odds(far, np.array([0, 0])), expected, rtol=1e-15)
    report = deviation_report(far, 2 * far, num_bootstrap=5)
    assert np.isfinite(report.slope)


def test_slopes_against_scipy_and_the_principal_axis() -> None:
    teacher, student, *_ = example()
    columns = teacher.argmax(1)
    x, y = log_odds(teacher, columns), log_odds(student, columns)
    report = deviation_report(teacher, student)
    assert report.slope == pytest.approx(stats.linregress(x, y).slope)
    points = np.stack((x - x.mean(), y - y.mean()))
    axis = np.linalg.eigh(points @ points.T)[1][:, -1]
    assert report.deming_slope == pytest.approx(axis[1] / axis[0])
    error = stats.linregress(x, y).stderr
    low, high = report.student.slope_interval
    assert low < report.slope < high
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.25)
    lowest = np.argsort(x)[:60]
    assert report.low_confidence_underfit == pytest.approx((y[lowest] < x[lowest]).mean())
    for label, slope in report.student.class_slopes.items():
        mine = columns == label
        assert slope == pytest.approx(np.polyfit(x[mine], y[mine], 1)[0])
    assert set(report.student.class_slopes) == {0, 1, 2, 3}


def test_noise_of_both_runs_dilutes_one_slope_and_not_the_other() -> None:
    random = np.random.default_rng(0)
    signal = random.normal(size=4000)
    x, y = (2 * signal + random.normal(size=4000) for _ in range(2))
    # variances 4 of the signal and 1 of the noise: slope 4/5
    pair = (float(x.var()), float(y.var()), float(np.cov(x, y, bias=True)[0, 1]))
    assert least_squares(pair) == pytest.approx(0.8, abs=0.03)
    assert orthogonal(pair) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("slope", [1e-12, 1e-7, 0.1, 3.0, 1e7])
def test_the_orthogonal_slope_keeps_its_digits(slope: float) -> None:
    for sign in (1, -1):
        assert orthogonal((1.0, slope**2, sign * slope)) == pytest.approx(sign * slope, rel=1e-12)


def test_fidelity_against_scipy() -> None:
    teacher, student, *_ = example(50)
    q, p = (np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in (teacher, student))
    report = deviation_report(teacher, student, num_bootstrap=5).student
    assert report.kl == pytest.approx(stats.entropy(q, p, axis=1).mean())
    assert report.total_variation == pytest.approx(np.abs(q - p).sum(1).mean() / 2)
    assert report.agreement == pytest.approx((q.argmax(1) == p.argmax(1)).mean())


# --- bins ---


def test_deciles_have_equal_counts_and_honest_intervals() -> None:
    teacher, student, *_ = example(405)
    report = deviation_report(teacher, student)
    columns = teacher.argmax(1)
    x, y = log_odds(teacher, columns), log_odds(student, columns)
    assert [d["count"] for d in report.deciles] == [41] * 5 + [40] * 5
    for rows, d in zip(np.array_split(np.argsort(x), 10), report.deciles, strict=True):
        gap = y[rows] - x[rows]
        assert d["teacher"] == pytest.approx(x[rows].mean())
        assert d["mean"] == pytest.approx(y[rows].mean())
        assert d["gap"] == pytest.approx(gap.mean())
        error = gap.std() / np.sqrt(len(gap))
        assert d["high"] - d["low"] == pytest.approx(2 * 1.96 * error, rel=0.2)
        assert d["low"] < d["gap"] < d["high"]


@pytest.mark.parametrize(("rows", "bins"), [(240, 10), (199, 9), (59, 2), (39, 1), (5, 1), (1, 1)])
def test_a_bin_has_twenty_examples(rows: int, bins: int) -> None:
    teacher, student, *_ = example(rows)
    report = deviation_report(teacher, student, num_bootstrap=5)
    assert len(report.deciles) == bins
    assert sum(d["count"] for d in report.deciles) == rows


def test_ties_keep_the_order_of_the_rows() -> None:
    teacher = np.tile([2.0, 0.0], (40, 1))
    student = teacher.copy()
    student[:20, 0] = 4.0
    report = deviation_report(teacher, student, num_bootstrap=5)
    assert [d["gap"] for d in report.deciles] == [2.0, 0.0]
    assert np.isnan(report.slope)
    assert not report.student.class_slopes


# --- parts ---


def test_every_part_is_the_report_of_its_own() -> None:
    teacher, student, control, labels = example()
    flipped = np.arange(240) % 3 == 0
    whole = deviation_report(
        teacher, student, labels=labels, control_logits=control, flipped=flipped, num_bootstrap=50
    )
    assert len(whole.rows()) == 2 * 2 * 3
    alone = deviation_report(teacher, control, num_bootstrap=50).student
    assert whole.control is not None
    assert {**whole.control.row(), "run": "student"} == alone.row()
    assert whole.control.deciles == alone.deciles
    for name, rows in (("flipped", flipped), ("clean", ~flipped)):
        part = deviation_report(teacher[rows], student[rows], num_bootstrap=50).student
        found = whole.find("student", name)
        assert found is not None
        for key, value in part.row().items():
            if key != "examples":
                assert found.row()[key] == (
                    value if isinstance(value, str) else pytest.approx(value)
                )
    assert whole.accuracy["teacher"] == pytest.approx((teacher.argmax(1) == labels).mean())
    assert set(whole.accuracy) == {"teacher", "student", "control"}
    rows_of_bins = whole.decile_rows()
    assert len(rows_of_bins) == sum(len(p.deciles) for p in (whole.student, *whole.others))
    assert {row["run"] for row in rows_of_bins} == {"student", "control"}
    first = rows_of_bins[0]
    assert first["gap"] == pytest.approx(first["mean"] - first["teacher"])
    assert json.loads(json.dumps(whole.to_dict()))["student"]["examples"] == "all"


def test_log_odds_of_the_true_class() -> None:
    teacher, student, _, labels = example()
    report = deviation_report(teacher, student, labels=labels, num_bootstrap=5)
    found = report.find("student", of="true")
    assert found is not None
    x, y = log_odds(teacher, labels), log_odds(student, labels)
    assert found.slope == pytest.approx(stats.linregress(x, y).slope)
    assert report.find("control") is None
    assert report.control is None


# --- invariances ---


def test_constants_on_rows_and_the_order_of_rows_change_nothing() -> None:
    teacher, student, *_ = example()
    shift = np.linspace(-50, 50, 240)[:, None]
    order = np.random.default_rng(1).permutation(240)
    first = deviation_report(teacher, student, num_bootstrap=5)
    for other in (
        deviation_report(teacher + shift, student - shift, num_bootstrap=5),
        deviation_report(teacher[order], student[order], num_bootstrap=5),
    ):
        for name in ("slope", "deming_slope", "low_confidence_underfit", "agreement"):
            assert getattr(other, name) == pytest.approx(getattr(first, name))


def test_tensors_half_precision_and_seeds() -> None:
    teacher, student, *_ = example()
    first = deviation_report(teacher, student, num_bootstrap=20)
    np.random.seed(3)  # noqa: NPY002
    again = deviation_report(torch.tensor(teacher), torch.tensor(student), num_bootstrap=20)
    assert again == first
    other = deviation_report(teacher, student, num_bootstrap=20, random_state=1)
    assert other.slope == first.slope
    assert other.student.slope_interval != first.student.slope_interval
    half = deviation_report(
        torch.tensor(teacher).bfloat16(), student.astype(np.float16), num_bootstrap=5
    )
    assert half.slope == pytest.approx(first.slope, abs=0.02)


# --- bad input ---


def test_probabilities_are_warned_of() -> None:
    teacher, student, *_ = example()
    p = np.exp(student) / np.exp(student).sum(1, keepdims=True)
    with pytest.warns(UserWarning, match="student_logits look like probabilities") as seen:
        deviation_report(teacher, p, num_bootstrap=5)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="teacher_logits look like"):
        deviation_report(p, student, num_bootstrap=5)
    deviation_report(teacher, np.log(p), num_bootstrap=5)


IDS = np.arange(240)
SWAPPED = np.r_[1, 0, IDS[2:]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t, s, y: deviation_report(t, s[:, :3]), ShapeError, "the same classes"),
        (lambda t, s, y: deviation_report(t, s[:9]), ShapeError, "the same rows"),
        (lambda t, s, y: deviation_report(t, s, control_logits=s[:9]), ShapeError, "^control"),
        (lambda t, s, y: deviation_report(t[0], s[0]), ShapeError, r"must be \(N, C\)"),
        (lambda t, s, y: deviation_report(t[:0], s[:0]), ShapeError, "a row or more"),
        (lambda t, s, y: deviation_report(t[:, :1], s[:, :1]), ShapeError, "2 classes"),
        (lambda t, s, y: deviation_report(t.astype(int), s), DtypeError, "teacher_logits"),
        (lambda t, s, y: deviation_report(t, s * np.nan), DataError, "student_logits must be fin"),
        (lambda t, s, y: deviation_report(t, s, labels=y[:5]), ShapeError, "labels must have one"),
        (lambda t, s, y: deviation_report(t, s, labels=y + 4), DataError, "0 to 3"),
        (lambda t, s, y: deviation_report(t, s, labels=1.0 * y), DtypeError, "labels must be int"),
        (lambda t, s, y: deviation_report(t, s, flipped=y), DtypeError, "flipped must be boolean"),
        (lambda t, s, y: deviation_report(t, s, flipped=y[:5] > 1), ShapeError, "flipped must be"),
        (lambda t, s, y: deviation_report(t, s, num_bootstrap=0), ConfigError, "num_bootstrap"),
        (lambda t, s, y: deviation_report(t, s, ids=(IDS,)), ShapeError, "for each of teacher, st"),
        (lambda t, s, y: deviation_report(t, s, ids=(IDS, IDS[1:])), ShapeError, "ids of the stud"),
        (lambda t, s, y: deviation_report(t, s, ids=(IDS, SWAPPED)), DataError, "0 has the id 1"),
    ],
)  # fmt: skip
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    teacher, student, _, labels = example()
    with pytest.raises(error, match=message):
        call(teacher, student, labels)


def test_right_ids_pass() -> None:
    teacher, student, control, _ = example()
    ids = [f"row-{i}" for i in range(240)]
    report = deviation_report(
        teacher, student, control_logits=control, ids=(ids, ids, ids), num_bootstrap=5
    )
    assert report.control is not None
