"""Soft top-k: its sum, its limits, its gradient, and the loss on it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.losses import SoftTopKLoss, soft_top_k
from gossamer.losses.soft_top_k import log_soft_top_k


def reference(x: np.ndarray, k: float, alpha: float) -> np.ndarray:
    def sum_at(t: float) -> float:
        return float(expit(alpha * (x + t)).sum() - k)

    t = brentq(sum_at, -1e3, 1e3, xtol=1e-13)
    return np.asarray(expit(alpha * (x + t)))


@pytest.mark.parametrize("k", [1, 3, 7.5, 19])
@pytest.mark.parametrize("alpha", [0.5, 2.0, 20.0])
def test_against_a_root_finder(k: float, alpha: float) -> None:
    x = torch.randn(4, 20, dtype=torch.float64) * 3
    u = soft_top_k(x, k, alpha=alpha)
    for row, got in zip(x.numpy(), u.numpy(), strict=True):
        np.testing.assert_allclose(got, reference(row, k, alpha), atol=1e-9)
    torch.testing.assert_close(u.sum(1), torch.full((4,), float(k)).double(), atol=1e-9, rtol=0)


def test_equal_scores_even_very_many() -> None:
    for count in (7, 1_000_000):
        for value in (0.0, 300.0, -300.0):
            u = soft_top_k(torch.full((1, count), value), 5)
            torch.testing.assert_close(u, torch.full((1, count), 5 / count), atol=0, rtol=1e-4)
    x = torch.zeros(1, 400_000)
    x[0, 3] = 40.0
    u = soft_top_k(x, 5)
    assert abs(float(u.double().sum()) - 5) < 1e-3
    assert float(u[0, 3]) > 0.999


def test_hard_limit_shift_and_one_k_for_each_row() -> None:
    x = torch.randn(3, 12, dtype=torch.float64)
    hard = soft_top_k(x, 4, alpha=5e4)
    top = torch.zeros_like(x).scatter_(1, x.topk(4, dim=1).indices, 1.0)
    torch.testing.assert_close(hard, top, atol=1e-3, rtol=0)
    torch.testing.assert_close(soft_top_k(x + 77.0, 4), soft_top_k(x, 4), atol=1e-9, rtol=0)
    each = soft_top_k(x, torch.tensor([1, 2, 11]))
    for n, k in enumerate((1, 2, 11)):
        torch.testing.assert_close(each[n : n + 1], soft_top_k(x[n : n + 1], k))


def test_hidden_labels_take_no_part() -> None:
    x = torch.randn(2, 9, dtype=torch.float64)
    hidden = x.clone()
    hidden[:, [2, 5]] = -math.inf
    kept = [n for n in range(9) if n not in (2, 5)]
    u = soft_top_k(hidden, 3)
    torch.testing.assert_close(u[:, kept], soft_top_k(x[:, kept], 3))
    assert not u[:, [2, 5]].any()


@pytest.mark.parametrize("alpha", [0.7, 2.0])
def test_gradients(alpha: float) -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([1.0, 2.5, 7.0])
    assert torch.autograd.gradcheck(lambda x: soft_top_k(x, k, alpha=alpha), (x,))
    assert torch.autograd.gradcheck(lambda x: log_soft_top_k(x, k, alpha=alpha), (x,))
    jacobian = torch.autograd.functional.jacobian(lambda x: soft_top_k(x[None], 2)[0], x[0])
    torch.testing.assert_close(jacobian.sum(1), torch.zeros(8).double(), atol=1e-10, rtol=0)
    torch.testing.assert_close(jacobian.sum(0), torch.zeros(8).double(), atol=1e-10, rtol=0)


def test_saturated_rows_have_finite_gradients() -> None:
    x = torch.tensor([[1e4, 1e4, -1e4, -1e4]], requires_grad=True)
    log_soft_top_k(x, 2, alpha=2.0).clamp(min=-1e6).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_the_loss_is_its_formula() -> None:
    x = torch.randn(4, 10, dtype=torch.float64)
    labels = [[0], [1, 2], [3, 4, 5], [9, 0]]
    for k, ks in (
        (4, [4] * 4),
        ("positives", [1, 2, 3, 2]),
        (torch.tensor([3, 2, 5, 4]), [3, 2, 5, 4]),
    ):
        got = SoftTopKLoss(k, temperature=0.5, reduction="none")(x, labels)  # type: ignore[arg-type]
        for row, own, count, value in zip(x.numpy(), labels, ks, got, strict=True):
            u = reference(row / 0.5, count, 2.0)
            assert math.isclose(float(value), -np.log(u[own]).mean(), rel_tol=1e-8)


def test_more_relevant_labels_than_places() -> None:
    """Of 3 relevant labels 2 are drawn and the third is left out of the row."""
    x = torch.randn(1, 8, dtype=torch.float64)
    torch.manual_seed(0)
    loss = SoftTopKLoss(2, temperature=1.0)
    values = {round(float(loss(x, [[0, 3, 6]])), 8) for _ in range(60)}
    expected = set()
    for left_out in (0, 3, 6):
        kept = [n for n in range(8) if n != left_out]
        u = reference(x[0, kept].numpy(), 2, 2.0)
        own = [kept.index(n) for n in (0, 3, 6) if n != left_out]
        expected.add(round(float(-np.log(u[own]).mean()), 8))
    assert values == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 0}, ConfigError, "above 0 and below the number of labels; got 0"),
        ({"k": 4}, ConfigError, "got 4 to 4 with 4 labels"),
        ({"k": torch.tensor([1, 2, 3])}, ShapeError, "one for each of 2 rows"),
        ({"k": 1, "alpha": 0.0}, ConfigError, "alpha"),
        ({"k": 1, "num_steps": 0}, ConfigError, "num_steps"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        soft_top_k(torch.zeros(2, 4), **arguments)


def test_bad_options_and_scores() -> None:
    with pytest.raises(DataError, match="NaN"):
        soft_top_k(torch.tensor([[math.nan, 0.0]]), 1)
    for options in ({"k": 0}, {"k": "all"}, {"alpha": -1.0}, {"temperature": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            SoftTopKLoss(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="below the number of labels"):
        SoftTopKLoss(5)(torch.zeros(1, 4), [[0]])
