"""Measures of attention heads against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gossamer.errors import ShapeError
from gossamer.measures import head_report


def test_uniform_weights() -> None:
    n = 20
    report = head_report(np.full((3, n, n), 1 / n))
    place = np.arange(n)
    np.testing.assert_allclose(report.entropy, math.log2(n))
    np.testing.assert_allclose(report.sparsity, 1 - 18 / n)
    np.testing.assert_allclose(report.distance, np.abs(place[:, None] - place).mean())


def test_one_hot_weights() -> None:
    n = 8
    weights = np.stack([np.eye(n), np.eye(n)[::-1]])
    report = head_report(weights, np.ones((n, n), dtype=bool))
    assert report.entropy.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(report.sparsity, 1 - 1 / n)
    np.testing.assert_allclose(report.distance, [0.0, np.abs(2 * np.arange(n) - n + 1).mean()])


def test_causal_triangle() -> None:
    n = 12
    seen = np.tri(n, dtype=bool)
    weights = (seen / seen.sum(-1, keepdims=True))[None]
    counts = np.arange(1, n + 1)
    for visible in (seen, None):  # the triangle is also what the weights themselves show
        report = head_report(weights, visible)
        np.testing.assert_allclose(report.entropy, np.log2(counts).mean())
        np.testing.assert_allclose(report.distance, ((counts - 1) / 2).mean())
        needed = [math.ceil(0.9 * count - 1e-9) for count in counts]
        np.testing.assert_allclose(report.sparsity, (1 - needed / counts).mean())


def test_size_and_sign_of_rows_do_not_matter() -> None:
    weights = np.random.default_rng(0).random((2, 5, 5))
    one = head_report(weights)
    other = head_report(weights * -np.arange(1, 6)[:, None])
    for name in ("entropy", "sparsity", "distance"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name))


def test_a_batch_is_the_mean_of_its_samples_and_empty_rows_are_left_out() -> None:
    weights = np.random.default_rng(1).random((3, 2, 4, 6))
    parts = [head_report(part) for part in weights]
    whole = head_report(weights)
    np.testing.assert_allclose(whole.entropy, np.mean([p.entropy for p in parts], axis=0))
    np.testing.assert_allclose(whole.distance, np.mean([p.distance for p in parts], axis=0))
    padded = np.concatenate([weights, np.zeros_like(weights)], axis=0)
    np.testing.assert_allclose(head_report(padded).entropy, whole.entropy)


def test_the_last_query_stands_at_the_last_key() -> None:
    weights = np.zeros((1, 1, 5))
    weights[0, 0, 1] = 1.0
    assert head_report(weights).distance.tolist() == [3.0]
    row = head_report(weights, distance=False).rows()[0]
    assert row["distance"] is None


def test_a_head_without_weight_has_no_measures() -> None:
    report = head_report(np.zeros((1, 3, 3)))
    assert math.isnan(report.entropy[0])
    assert report.to_dict()["heads"][0]["head"] == 0


def test_bad_input() -> None:
    with pytest.raises(ShapeError, match=r"weights must have the shape .* got \(3, 3\)"):
        head_report(np.ones((3, 3)))
    with pytest.raises(ShapeError, match=r"visible must have the shape .*\(2, 3, 3\); got \(3, 2"):
        head_report(np.ones((2, 1, 3, 3)), np.ones((3, 2), dtype=bool))
