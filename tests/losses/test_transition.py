"""Transition matrices, noise put into labels, and estimates of the matrix from predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.losses import SymmetricNoise, estimate_transition, inject_noise, pair_noise

UNEVEN = np.array([[0.8, 0.2, 0.0], [0.1, 0.9, 0.0], [0.0, 0.3, 0.7]])


def test_symmetric_noise_spreads_the_rate_over_the_other_classes() -> None:
    noise = SymmetricNoise(10, 0.2)
    matrix = noise.matrix()
    expected = np.full((10, 10), 0.2 / 9)
    np.fill_diagonal(expected, 0.8)
    np.testing.assert_allclose(matrix.numpy(), expected, atol=1e-15)
    assert noise.alpha == pytest.approx(0.2 * 10 / 9)
    assert SymmetricNoise.from_alpha(10, noise.alpha).rate == pytest.approx(0.2)
    full = SymmetricNoise(3, 2 / 3)
    np.testing.assert_allclose(full.matrix().numpy(), np.full((3, 3), 1 / 3), atol=1e-12)
    assert SymmetricNoise.from_alpha(7, 1.0).alpha <= 1


def test_pair_noise_moves_to_the_next_class() -> None:
    expected = [[0.7, 0.3, 0.0], [0.0, 0.7, 0.3], [0.3, 0.0, 0.7]]
    np.testing.assert_allclose(pair_noise(3, 0.3).numpy(), expected)


@pytest.mark.parametrize("transition", [UNEVEN, pair_noise(3, 0.3), SymmetricNoise(3, 0.4)])
def test_drawn_labels_follow_the_matrix(transition: Any) -> None:
    count = 100_000
    labels = np.random.default_rng(1).integers(0, 3, count)
    noisy, flipped = inject_noise(labels, transition, random_state=0)
    matrix = transition.matrix() if isinstance(transition, SymmetricNoise) else transition
    for i, row in enumerate(np.asarray(matrix)):
        mine = noisy[labels == i]
        share = np.bincount(mine, minlength=3) / len(mine)
        sigma = np.sqrt(row * (1 - row) / len(mine))
        assert (np.abs(share - row) <= 3 * sigma + 1e-12).all()
    assert (flipped == (noisy != labels)).all()


def test_a_seed_decides_and_kinds_are_kept() -> None:
    labels = torch.arange(12).reshape(3, 4) % 3
    one, flipped = inject_noise(labels, UNEVEN, random_state=3)
    two, _ = inject_noise(labels.numpy(), UNEVEN, random_state=3)
    other, _ = inject_noise(labels, UNEVEN, random_state=np.random.default_rng(3))
    assert isinstance(one, torch.Tensor)
    assert one.dtype == labels.dtype
    assert one.shape == labels.shape
    assert flipped.dtype == torch.bool
    assert (one.numpy() == two).all()
    assert torch.equal(one, other)
    same, none = inject_noise([0, 1], np.eye(2))
    assert same.tolist() == [0, 1]
    assert not none.any()


def noisy_predictions(count: int = 6000) -> tuple[np.ndarray, np.ndarray]:
    """Draw true classes, noisy labels, and what a calibrated model says of the noisy labels."""
    generator = np.random.default_rng(0)
    true = generator.integers(0, 3, count)
    certainty = generator.uniform(0.9, 1.0, count)[:, None]
    posterior = certainty * np.eye(3)[true] + (1 - certainty) / 3
    noisy, _ = inject_noise(true, UNEVEN, random_state=1)
    return posterior @ UNEVEN, noisy


# counting is biased where classes differ in how sure their rows are
@pytest.mark.parametrize(("method", "tolerance"), [("anchor", 0.06), ("confident", 0.12)])
def test_the_matrix_is_found_from_calibrated_predictions(method: str, tolerance: float) -> None:
    p, labels = noisy_predictions()
    found = estimate_transition(p, labels, method=method)
    np.testing.assert_allclose(found.sum(1).numpy(), 1.0, atol=1e-12)
    assert np.abs(found.numpy() - UNEVEN).max() < tolerance
    same = estimate_transition(torch.from_numpy(p), torch.from_numpy(labels), method=method)
    assert torch.equal(found, same)


def test_anchor_takes_the_row_at_the_percentile() -> None:
    first = np.linspace(0.0, 1.0, 101)
    p = np.stack([first, 1 - first], 1)
    labels = (first < 0.5).astype(int)
    assert estimate_transition(p, labels)[0].tolist() == pytest.approx([0.97, 0.03])
    assert estimate_transition(p, labels, percentile=100)[0].tolist() == [1.0, 0.0]


def test_confident_counts_by_hand() -> None:
    # thresholds: class 0 (.9 + .7 + .2) / 3 = .6, class 1 (.8 + .9) / 2 = .85
    p = np.array([[0.9, 0.1], [0.7, 0.3], [0.1, 0.9], [0.2, 0.8], [0.1, 0.9]])
    p[2] = [0.2, 0.8]
    labels = np.array([0, 0, 0, 1, 1])
    # label 0: two sure of 0, none of 1; label 1: one sure of 1 -> nothing is wrong
    found = estimate_transition(p, labels, method="confident")
    assert found.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    p[2] = [0.02, 0.98]
    # thresholds .54 and .85: labels 0 give two of class 0 and one of class 1, labels 1 one of
    # class 1, scaled to two labels: true 0 -> (2, 0), true 1 -> (1, 2)
    found = estimate_transition(p, labels, method="confident")
    np.testing.assert_allclose(found.numpy(), [[1.0, 0.0], [1 / 3, 2 / 3]])


@pytest.mark.parametrize("method", ["anchor", "confident"])
def test_a_class_without_labels_is_named(method: str) -> None:
    p, labels = noisy_predictions(300)
    labels[labels == 2] = 1
    with pytest.raises(DataError, match=r"none of class 2 .*missing='identity'"):
        estimate_transition(p, labels, method=method)
    found = estimate_transition(p, labels, method=method, missing="identity")
    assert found[2].tolist() == [0.0, 0.0, 1.0]
    assert torch.isfinite(found).all()


def test_half_precision_and_read_only_arrays() -> None:
    p, labels = noisy_predictions(600)
    half = estimate_transition(torch.from_numpy(p).bfloat16(), torch.from_numpy(labels))
    assert (half - estimate_transition(p, labels)).abs().max() < 0.05
    fixed = UNEVEN.copy()
    fixed.flags.writeable = False
    assert len(inject_noise(labels, fixed)[0]) == 600


@pytest.mark.parametrize(
    ("matrix", "error", "message"),
    [
        (np.ones((2, 3)) / 3, ShapeError, r"square, \(C, C\); got \(2, 3\)"),
        ([[0.9, 0.2], [0.1, 0.9]], DataError, r"got 1.1 in row 0.*Entry \(i, j\)"),
        (UNEVEN.T, DataError, "transpose it"),
        ([[1.1, -0.1], [0.0, 1.0]], DataError, "negative one in row 0"),
        ([[float("nan"), 1.0], [0.0, 1.0]], DataError, "transition must be finite"),
        ("symmetric", ConfigError, "matrix or a SymmetricNoise"),
    ],
)
def test_bad_matrices(matrix: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        inject_noise([0, 1], matrix)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"rate must be >= 0 and <= 0.9"):
        SymmetricNoise(10, 0.95)
    with pytest.raises(ConfigError, match=r"alpha must be >= 0 and <= 1; got -0.1"):
        SymmetricNoise.from_alpha(10, -0.1)
    with pytest.raises(ConfigError, match="rate"):
        pair_noise(3, 1.5)
    with pytest.raises(DataError, match=r"0 to 2; got 3"):
        inject_noise([0, 3], UNEVEN)
    with pytest.raises(DataError, match=r"0 to 2; got -1"):
        inject_noise([0, -1], SymmetricNoise(3, 0.1))
    with pytest.raises(DtypeError, match="integers"):
        inject_noise([0.0, 1.0], UNEVEN)
    p, labels = noisy_predictions(30)
    with pytest.raises(ShapeError, match=r"\(30, 3\) and \(29,\)"):
        estimate_transition(p, labels[:-1])
    with pytest.raises(DataError, match=r"sum to 1; got a row with sum 2"):
        estimate_transition(2 * p, labels)
    with pytest.raises(DataError, match="finite"):
        estimate_transition(p * np.nan, labels)
    with pytest.raises(ConfigError, match="did you mean 'anchor'"):
        estimate_transition(p, labels, method="ancor")
    with pytest.raises(DtypeError, match="integers"):
        estimate_transition(p, labels.astype(float))
