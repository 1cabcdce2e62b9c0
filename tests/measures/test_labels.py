"""Wrong labels: counted by hand, found again when the true probabilities are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm

from gossamer.errors import DataError, ShapeError
from gossamer.measures import find_label_errors


def posterior(seed: int, size: int = 4000, rate: float = 0.2) -> tuple[np.ndarray, ...]:
    """Return the true probability of the noisy label of two normal classes, labels and flips."""
    random = np.random.default_rng(seed)
    true = random.integers(0, 2, size)
    x = random.standard_normal(size) + 3.0 * true
    flipped = random.random(size) < rate
    q = norm.pdf(x, 3.0) / (norm.pdf(x, 3.0) + norm.pdf(x))
    noisy = (1 - rate) * q + rate * (1 - q)
    return np.stack([1 - noisy, noisy], 1), np.where(flipped, 1 - true, true), flipped


def test_rows_are_those_that_loops_find() -> None:
    random = np.random.default_rng(0)
    p = random.dirichlet([0.6] * 4, 200)
    y = random.integers(0, 4, 200)
    bar = [np.mean([p[i, k] for i in range(200) if y[i] == k]) for k in range(4)]
    found, sure, other = {}, 0, 0
    for i in range(200):
        classes = [k for k in range(4) if p[i, k] >= bar[k]]
        if classes:
            best = max(classes, key=lambda k: p[i, k])
            sure, other = sure + 1, other + (best != y[i])
            if best != y[i] and p[i, best] > p[i, y[i]] and np.argmax(p[i]) != y[i]:
                found[i] = best
    report = find_label_errors(p, y)
    rows = report.rows()
    assert {row["row"]: row["suggested"] for row in rows} == found
    assert report.noise_rate == pytest.approx(other / sure)
    scores = [row["score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert all(
        row["score"] == pytest.approx(p[row["row"], row["suggested"]] - p[row["row"], row["given"]])
        for row in rows
    )
    assert report.to_dict()["num_suspicious"] == len(rows)


def test_flipped_labels_are_found_and_their_share_is_estimated() -> None:
    p, y, flipped = posterior(1)
    report = find_label_errors(torch.tensor(p), torch.tensor(y))
    right = flipped[report.indices]
    # the best rule, the larger of the two known probabilities, has these two shares
    best = p.argmax(1) != y
    assert right.mean() >= flipped[best].mean()
    assert right.sum() / flipped.sum() > 0.75
    assert abs(report.noise_rate - flipped.mean()) < 0.03
    # the first of the list are wrong more often than the last
    half = len(right) // 2
    assert right[:half].mean() > right[half:].mean()


def test_clean_and_separable_labels_are_not_suspicious() -> None:
    y = np.arange(30) % 3
    report = find_label_errors(0.8 * np.eye(3)[y] + 0.2 / 3, y)
    assert report.rows() == []
    assert report.noise_rate == 0.0


def test_bad_input() -> None:
    with pytest.raises(DataError, match="two classes"):
        find_label_errors([[0.5, 0.5], [0.4, 0.6]], [1, 1])
    with pytest.raises(ShapeError, match="one row of probabilities"):
        find_label_errors([[0.5, 0.5]], [0, 1])
    with pytest.raises(DataError, match="softmax"):
        find_label_errors([[3.0, -1.0], [0.0, 1.0]], [0, 1])
