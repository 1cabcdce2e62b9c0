"""Multi-label metrics: worked values, a plain computation, real sets, ties and empty rows."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.retrieval import evaluate_xmc, propensities, read_xmc

LABELS = [[1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1]]
SCORES = [[0.9, 0.1, 0.8, 0.3, 0.2], [0.1, 0.2, 0.3, 0.9, 0.8], [0.5, 0.4, 0.3, 0.2, 0.1]]
EXPECTED = {
    "P@1": 0.333333, "P@3": 0.222222, "P@5": 0.333333, "R@1": 0.166667, "R@3": 0.5, "R@5": 1.0,
    "nDCG@3": 0.371049, "nDCG@5": 0.617204, "PSP@1": 0.130075, "PSP@3": 0.327069, "PSP@5": 1.0,
}  # fmt: skip


# --- reference values ---


def test_worked_values() -> None:
    weights = propensities([50, 10, 1, 1, 0], 100)
    assert weights == pytest.approx([1.682808, 2.557432, 4.605170, 4.605170, 5.774661], abs=1e-6)
    report = evaluate_xmc(SCORES, LABELS, propensities=weights)
    assert {name: report[name] for name in EXPECTED} == pytest.approx(EXPECTED, abs=1e-6)
    assert list(report.values)[:4] == ["P@1", "P@3", "P@5", "R@1"]


def naive(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray, k: int) -> list[float]:
    """The definitions, row by row."""
    precision, recall, ndcg, gained, held = [], [], [], 0.0, 0.0
    for row, true in zip(scores, labels, strict=True):
        relevant = set(np.flatnonzero(true))
        if not relevant:
            continue
        top = sorted(range(len(row)), key=lambda label: (-row[label], label))[:k]
        hits = [rank for rank, label in enumerate(top) if label in relevant]
        precision.append(len(hits) / k)
        recall.append(len(hits) / len(relevant))
        ideal = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(relevant))))
        ndcg.append(sum(1 / math.log2(rank + 2) for rank in hits) / ideal)
        gained += sum(weights[top[rank]] for rank in hits)
        held += sum(sorted((weights[label] for label in relevant), reverse=True)[:k])
    return [float(np.mean(precision)), float(np.mean(recall)), float(np.mean(ndcg)), gained / held]


@settings(deadline=None, derandomize=True, max_examples=80)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 9))
def test_the_plain_computation_agrees(seed: int, columns: int, k: int) -> None:
    draw = np.random.default_rng(seed)
    scores = draw.integers(0, 4, (7, columns)) / 4.0
    labels = (draw.random((7, columns)) < 0.3).astype(int)
    labels[0, 0] = 1
    weights = propensities(labels.sum(axis=0), 7)
    expected = naive(scores, labels, weights, k)
    stored = csr_matrix((scores.ravel(), np.tile(np.arange(columns), 7), np.arange(8) * columns))
    for form in (scores, stored):
        report = evaluate_xmc(form, csr_matrix(labels), ks=[k], propensities=weights)
        assert list(report.values.values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "at_1", "at_3", "at_5"),
    [
        ("bibtex-xmc", 14.2, 9.0, 7.1),
        ("delicious-xmc", 39.9, 37.9, 35.2),
        ("debtags-xmc", 49.8, None, 32.7),
    ],
)
def test_popularity_on_real_sets(
    outside_data: Path, name: str, at_1: float, at_3: float | None, at_5: float
) -> None:
    counts = np.asarray(read_xmc(outside_data / name).labels.sum(axis=0)).ravel()
    truth = read_xmc(outside_data / name, split="test").labels
    report = evaluate_xmc(np.broadcast_to(counts, truth.shape), truth)
    for metric, value in (("P@1", at_1), ("P@3", at_3), ("P@5", at_5)):
        assert value is None or round(100 * report[metric], 1) == value
    if name == "delicious-xmc":
        assert report.num_without_labels == 1


@pytest.mark.slow
def test_ridge_on_a_real_set(outside_data: Path) -> None:
    train, test = (read_xmc(outside_data / "bibtex-xmc", split=s) for s in ("train", "test"))

    def normalised(features: csr_matrix) -> np.ndarray:
        dense = features.toarray()
        return dense / np.maximum(np.linalg.norm(dense, axis=1, keepdims=True), 1e-12)

    x = normalised(train.features)
    weights = np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T @ train.labels.toarray())
    report = evaluate_xmc(normalised(test.features) @ weights, test.labels)
    # the last digit depends on the solver
    found = [100 * report[f"P@{k}"] for k in (1, 3, 5)]
    assert found == pytest.approx([64.7, 40.1, 29.6], abs=0.1)


# --- limits and invariances ---


def test_ties_go_to_the_lower_label() -> None:
    report = evaluate_xmc([[0.5, 0.5, 0.5]], [[1, 0, 0]], ks=[1])
    assert report["P@1"] == 1.0
    assert evaluate_xmc([[0.5, 0.5, 0.5]], [[0, 0, 1]], ks=[1, 2])["P@2"] == 0.0


def test_rows_without_labels_are_left_out_and_counted() -> None:
    report = evaluate_xmc([*SCORES, [1, 1, 1, 1, 1]], [*LABELS, [0] * 5])
    assert report.values == evaluate_xmc(SCORES, LABELS).values
    assert (report.num_rows, report.num_without_labels) == (3, 1)


def test_only_stored_entries_are_predicted() -> None:
    predictions = csr_matrix(([0.0, -1.0], ([0, 0], [2, 1])), shape=(1, 4))
    report = evaluate_xmc(predictions, [[1, 0, 1, 0]], ks=[1, 3])
    assert (report["P@1"], report["R@3"]) == (1.0, 0.5)
    dense = [[-np.inf, -1.0, 0.0, -np.inf]]
    assert evaluate_xmc(dense, [[1, 0, 1, 0]], ks=[1, 3]) == report


def test_excluded_pairs_are_neither_predicted_nor_counted() -> None:
    scores, labels = [[0.9, 0.8, 0.1], [0.9, 0.8, 0.1]], [[1, 1, 0], [0, 1, 0]]
    report = evaluate_xmc(scores, labels, ks=[1], exclude=[[0, 0], [1, 0]])
    assert report.values == {"P@1": 1.0, "R@1": 1.0, "nDCG@1": 1.0}
    assert evaluate_xmc(csr_matrix(scores), labels, ks=[1], exclude=[[0, 0], [1, 0]]) == report


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    scores, labels = draw.random((50, 8)), draw.random((50, 8)) < 0.3
    whole = evaluate_xmc(scores, labels, exclude=[[49, 0], [0, 7]])
    monkeypatch.setattr("gossamer.retrieval.xmc_metrics._BLOCK", 24)
    assert evaluate_xmc(scores, labels, exclude=[[49, 0], [0, 7]]) == whole


def test_cut_offs_beyond_the_labels_still_divide_by_k() -> None:
    assert evaluate_xmc([[1.0, 0.0]], [[1, 1]], ks=[4]).values == {
        "P@4": 0.5, "R@4": 1.0, "nDCG@4": 1.0,
    }  # fmt: skip


def test_propensities_are_worked_out_from_the_formula() -> None:
    scale = (math.log(1000) - 1) * 3.6**0.6
    assert propensities([4], 1000, a=0.6, b=2.6)[0] == pytest.approx(1 + scale * 6.6**-0.6)
    assert (np.diff(propensities(range(10), 100)) < 0).all()


# --- bad input ---


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_are_numbers(bad: float) -> None:
    scores = np.array(SCORES)
    scores[1, 2] = bad
    for form in (scores, csr_matrix(scores)):
        with pytest.raises(DataError, match=r"got (nan|inf) at row 1, label 2"):
            evaluate_xmc(form, LABELS)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="ks must be >= 1; got 0"):
        evaluate_xmc(SCORES, LABELS, ks=[0])
    with pytest.raises(ConfigError, match="at least one cut-off"):
        evaluate_xmc(SCORES, LABELS, ks=[])
    with pytest.raises(ShapeError, match="labels must have the shape of scores"):
        evaluate_xmc(SCORES, LABELS[:2])
    with pytest.raises(ShapeError, match="scores must have the shape"):
        evaluate_xmc([0.5], LABELS)
    with pytest.raises(ShapeError, match=r"propensities must have the shape \(5\)"):
        evaluate_xmc(SCORES, LABELS, propensities=[1.0])
    with pytest.raises(DataError, match="got no true label"):
        evaluate_xmc(SCORES, np.zeros((3, 5)))
    with pytest.raises(DataError, match=r"exclude must hold rows in 0\.\.2"):
        evaluate_xmc(SCORES, LABELS, exclude=[[3, 0]])
    with pytest.raises(ConfigError, match=r"unknown metric of this report 'psp@1'"):
        evaluate_xmc(SCORES, LABELS)["PSP@1"]


def test_bad_counts_are_refused() -> None:
    with pytest.raises(DataError, match=r"label_counts must be in 0\.\.num_rows, 10; got -1 to 1"):
        propensities([-1, 1], 10)
    with pytest.raises(DataError, match="some have none"):
        propensities([0, 1], 10, b=0.0)
    with pytest.raises(ConfigError, match="num_rows must be >= 3"):
        propensities([1], 2)
    with pytest.raises(ConfigError, match="a must be > 0"):
        propensities([1], 10, a=0.0)
    with pytest.raises(ShapeError, match="label_counts"):
        propensities([[1]], 10)
