"""Progress along the data's directions: closed forms against gradient descent, exact arithmetic."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.measures import EigenTracker, eigen_progress, matched_progress
from gossamer.measures.eigen import principal_directions

LAM = np.logspace(0, -3, 100)


def descent(x: np.ndarray, y: np.ndarray, eta: float, steps: int) -> list[np.ndarray]:
    """Return the predictions of least squares by gradient descent from zero, step by step."""
    weights, found = np.zeros(x.shape[1]), []
    for _ in range(steps + 1):
        found.append(x @ weights)
        weights = weights + eta * x.T @ (y - x @ weights)
    return found


# --- the closed form ---


def test_gradient_descent_on_two_directions() -> None:
    x, y, eta = np.diag([1.0, 0.5]), np.array([1.0, 1.0]), 0.3
    lam = np.array([1.0, 0.25])
    for step, found in enumerate(descent(x, y, eta, 50)):
        np.testing.assert_allclose(found, 1 - (1 - eta * lam) ** step, atol=1e-12)
        closed = eigen_progress(lam, [step], step_size=eta)[0]
        np.testing.assert_allclose(found, closed, atol=1e-12)


@pytest.mark.parametrize("eta", [0.5, 1.0, 1.7])
def test_teacher_and_student_by_gradient_descent(eta: float) -> None:
    random = np.random.default_rng(0)
    u, _ = np.linalg.qr(random.normal(size=(30, 12)))
    v, _ = np.linalg.qr(random.normal(size=(12, 12)))
    lam = np.logspace(0, -3, 12)
    x, y = u @ np.diag(np.sqrt(lam)) @ v.T, random.normal(size=30)
    steps = np.arange(41)
    teacher = descent(x, y, eta, 40)
    np.testing.assert_allclose(
        np.array(teacher) @ u, eigen_progress(lam, steps, step_size=eta) * (u.T @ y), atol=1e-12
    )
    student = np.array(descent(x, teacher[20], eta, 40)) @ u
    closed = eigen_progress(lam, steps, teacher_time=20, step_size=eta)
    np.testing.assert_allclose(student, closed * (u.T @ y), atol=1e-12)


def test_products_limits_and_small_numbers() -> None:
    times = np.linspace(0, 50, 7)
    teacher, student = eigen_progress(LAM, times), eigen_progress(LAM, times, teacher_time=20.0)
    np.testing.assert_allclose(student, teacher * eigen_progress(LAM, [20.0]))
    assert (teacher[0] == 0).all()
    np.testing.assert_allclose(eigen_progress(LAM, [1e9]), 1)
    np.testing.assert_allclose(eigen_progress([1e-20], [3.0]), 3e-20)
    np.testing.assert_allclose(eigen_progress([1e-20], [3], step_size=1.0), 3e-20)
    # many small steps are gradient flow
    flow = eigen_progress(LAM, [100_000], step_size=1e-4)
    np.testing.assert_allclose(flow, eigen_progress(LAM, [10.0]), rtol=1e-4)


def exact_factor(stop: int, first: int, second: int) -> Decimal:
    """Return teacher's over student's progress on `second`, matched on `first`, in 60 digits."""
    lam = [Decimal(10) ** (-3 * Decimal(k) / 99) for k in (first, second)]
    of = [1 - (-each * stop).exp() for each in lam]
    level = Decimal("0.8") * of[0]
    moments = [-(1 - share).ln() / lam[0] for share in (level, level / of[0])]
    one, two = (1 - (-lam[1] * moment).exp() for moment in moments)
    return one / (two * of[1])


@pytest.mark.parametrize(("stop", "lower", "lowest"), [(5, 4.2, 31), (20, 3.2, 22), (80, 1.4, 7.2)])
def test_matched_progress_against_exact_arithmetic(stop: int, lower: float, lowest: float) -> None:
    times = np.linspace(0, 400, 400_001)
    level = 0.8 * float(eigen_progress(LAM[30:31], [stop])[0, 0])
    teacher = eigen_progress(LAM[[30, 60, 90]], times)
    student = eigen_progress(LAM[[30, 60, 90]], times, teacher_time=stop)
    ratio = matched_progress(teacher, student, values=[level]).ratio[0]
    with localcontext() as context:
        context.prec = 60
        exact = [float(exact_factor(stop, 30, k)) for k in (60, 90)]
    np.testing.assert_allclose(1 / ratio[1:], exact, rtol=1e-4)
    assert exact == pytest.approx([lower, lowest], rel=0.04)


def test_the_ratio_falls_with_the_eigenvalue() -> None:
    times = np.linspace(0, 30, 30_001)
    for stop in (5.0, 20.0):
        teacher = eigen_progress(LAM, times)
        student = eigen_progress(LAM, times, teacher_time=stop)
        ratio = matched_progress(teacher, student).ratio
        reached = np.isfinite(ratio).all(1)
        assert reached.sum() >= 8
        assert (np.diff(ratio[reached], axis=1) < 1e-9).all()
        np.testing.assert_allclose(ratio[reached, 0], 1, atol=1e-12)
        assert (ratio[reached, 30:] < 1).all()


def test_matching_by_hand() -> None:
    teacher = np.array([[0.0, 0.0], [0.5, 0.2], [1.0, 0.6]])
    student = np.array([[0.0, 0.0], [0.8, 0.1]])
    found = matched_progress(teacher, student, values=[0.25, 0.8, 0.9])
    np.testing.assert_allclose(found.teacher[:2, 1], [0.1, 0.44])
    np.testing.assert_allclose(found.student[:2, 1], [0.03125, 0.1])
    assert np.isnan(found.student[2]).all()  # never reached
    assert found.rows()[1]["ratio"] == pytest.approx(0.3125)
    assert found.to_dict()["values"] == [0.25, 0.8, 0.9]
    late = matched_progress(teacher[1:], teacher, values=[0.25, 0.5])
    assert np.isnan(late.teacher[0]).all()  # passed before the first record
    np.testing.assert_allclose(late.ratio[1], 1)


# --- the tracker ---


@pytest.mark.parametrize("shape", [(20, 8), (8, 20)])
def test_directions_are_singular_vectors(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=shape)
    values, left, right = principal_directions(x, 5)
    u, s, v = np.linalg.svd(x)
    np.testing.assert_allclose(values, s[:5] ** 2)
    np.testing.assert_allclose(np.abs((left * u[:, :5]).sum(0)), 1)
    np.testing.assert_allclose(np.abs((right * v[:5]).sum(1)), 1)
    np.testing.assert_allclose(left.T @ x, np.sqrt(values)[:, None] * right, atol=1e-10)
    assert (right[np.arange(5), np.abs(right).argmax(1)] > 0).all()
    again = principal_directions(x[::-1], 5)[2]  # the sign does not depend on the order of rows
    np.testing.assert_allclose(again, right, atol=1e-10)


def test_tracks_gradient_descent_of_a_linear_model() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 6)) * np.logspace(0, -1, 6)
    y = random.normal(size=40)
    eta = 0.5 / np.linalg.eigvalsh(x.T @ x)[-1]
    model = nn.Linear(6, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    inputs, labels = torch.tensor(x), torch.tensor(y)[:, None]
    model.train()
    tracker = EigenTracker(model, inputs, num_directions=6, every=5)
    for step in range(31):
        tracker.update(step)
        model.zero_grad()
        (0.5 * (model(inputs) - labels).square().sum()).backward()
        with torch.no_grad():
            model.weight -= eta * model.weight.grad
    found = tracker.trajectory()
    assert found.steps.tolist() == list(range(0, 31, 5))
    closed = eigen_progress(found.eigenvalues, found.steps, step_size=eta)
    target = np.abs(tracker.left.T @ y)
    np.testing.assert_allclose(found.outputs, closed * target, atol=1e-10)
    assert found.weights is not None
    np.testing.assert_allclose(found.weights, found.outputs / np.sqrt(found.eigenvalues), atol=1e-9)
    assert model.training
    assert len(found.rows()) == 7 * 6
    assert found.to_dict()["steps"] == found.steps.tolist()


def test_networks_images_and_subsamples() -> None:
    torch.manual_seed(0)
    images = torch.randn(5003, 1, 3, 3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.Dropout(0.9), nn.Linear(4, 2))
    one, two = (EigenTracker(net, images, num_directions=4) for _ in range(2))
    for tracker in (one, two):
        tracker.update(0)
        tracker.update(50)
    np.testing.assert_array_equal(one.left, two.left)
    assert one.left.shape == (5000, 4)
    found = one.trajectory()
    np.testing.assert_allclose(found.outputs[1], 0, atol=1e-9)  # dropout is off
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    tracker = EigenTracker(conv, images[:50], num_directions=4)
    tracker.update(0)
    assert tracker.trajectory().weights is None
    assert "weight" not in tracker.trajectory().rows()[0]


def test_directions_without_energy_are_left_out() -> None:
    x = np.outer(np.ones(5), [1.0, 2.0, 3.0])
    assert EigenTracker(nn.Linear(3, 1), x, num_directions=3).eigenvalues.shape == (1,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: eigen_progress([-1.0], [1.0]), ConfigError, "eigenvalues must be finite and >= 0"),
        (lambda: eigen_progress([1.0], [-1.0]), ConfigError, "times must be"),
        (lambda: eigen_progress([[1.0]], [1.0]), ShapeError, "eigenvalues must be flat"),
        (lambda: eigen_progress([1.0], [1.0], teacher_time=-1.0), ConfigError, "teacher_time"),
        (lambda: eigen_progress([1.0], [1.5], step_size=0.1), ConfigError, "whole numbers"),
        (lambda: eigen_progress([1.0], [1], step_size=2.0), ConfigError, "diverges"),
        (lambda: eigen_progress([1.0], [1], teacher_time=1.5, step_size=1.0), ConfigError, "integ"),
        (lambda: matched_progress(np.ones((2, 2)), np.ones((2, 3))), ShapeError, "same directions"),
        (lambda: matched_progress(np.ones(2), np.ones((2, 3))), ShapeError, r"teacher must be \(S"),
        (lambda: matched_progress(np.ones((2, 2)), np.full((2, 2), np.nan)), DataError, "student"),
        (lambda: matched_progress(np.eye(2), np.eye(2), direction=2), ConfigError, "direction"),
        (lambda: EigenTracker(nn.Linear(2, 1), torch.eye(2), num_directions=3), ConfigError, "= 2"),
        (lambda: EigenTracker(nn.Linear(2, 1), torch.eye(2), every=0), ConfigError, "every"),
        (lambda: EigenTracker(nn.Linear(2, 1), torch.ones(2)), ShapeError, "data must be"),
        (lambda: EigenTracker(nn.Linear(2, 1), torch.zeros(3, 2), num_directions=1), DataError,
         "zeros alone"),
        (lambda: EigenTracker(nn.Linear(2, 1), torch.eye(2) / 0, num_directions=1), DataError,
         "data must be finite"),
    ],
)  # fmt: skip
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
