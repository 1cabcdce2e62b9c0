"""Metrics of multi-label predictions as the extreme classification repository defines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, issparse

from gossamer.checks import check_choice, check_range, check_same_shape, check_shape
from gossamer.errors import ConfigError, DataError
from gossamer.retrieval._top_k import top_k_columns

__all__ = ["XmcReport", "evaluate_xmc", "propensities"]

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_BLOCK = 2**22  # entries of dense scores that are ranked at once


@dataclass(frozen=True)
class XmcReport:
    """Metrics of multi-label predictions, fractions in 0..1; `report["P@1"]` is one of them.

    Args:
        values: Metric (`P@k`, `R@k`, `nDCG@k`, `PSP@k`) -> value.
        num_rows: Rows in the means.
        num_without_labels: Rows without a true label, left out.

    Example:
        >>> evaluate_xmc([[0.2, 0.9]], [[0, 1]], ks=[1])["p@1"]
        1.0
    """

    values: dict[str, float]
    num_rows: int
    num_without_labels: int

    def __getitem__(self, metric: str) -> float:
        """Return one value; upper and lower case do not matter.

        Raises:
            ConfigError: If it was not computed.
        """
        names = {name.lower(): name for name in self.values}
        check_choice(metric.lower(), names, "metric of this report")
        return self.values[names[metric.lower()]]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each metric."""
        return [{"metric": name, "value": value} for name, value in self.values.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dict(vars(self))


def propensities(label_counts: Any, num_rows: int, *, a: float = 0.55, b: float = 1.5) -> Array:
    r"""Return the weight of each label in propensity-scored metrics: rare labels weigh more.

    $$w_l = 1 + C (n_l + b)^{-a}, \quad C = (\ln N - 1)(b + 1)^a$$

    These are inverse propensities $1 / p_l$, from the counts $n_l$ in N **training** rows. Usual
    values: a 0.5, b 0.4 for Wikipedia sets; 0.6, 2.6 for Amazon; 0.55, 1.5 otherwise.

    Args:
        label_counts: Training rows of each label, shape (labels,). Range: 0 to `num_rows`.
        num_rows: Training rows. Range: >= 3, so that C > 0.
        a: Range: > 0. Default 0.55.
        b: Range: >= 0. Default 1.5.

    Raises:
        ConfigError: If an option is out of its range.
        ShapeError: If the counts are no vector.
        DataError: If a count is negative, larger than `num_rows`, or NaN.

    Example:
        >>> propensities([50, 10, 1], 100).round(3).tolist()
        [1.683, 2.557, 4.605]

    Source: Jain, Prabhu and Varma, *Extreme Multi-label Loss Functions for Recommendation,
        Tagging, Ranking and Other Missing Label Applications*, KDD 2016.
    Deviations: none
    """
    check_range(num_rows, "num_rows", low=3, integer=True)
    check_range(a, "a", low=0.0, open_low=True)
    check_range(b, "b", low=0.0)
    counts = np.asarray(label_counts, dtype=np.float64)
    check_shape(counts, (None,), "label_counts")
    if not ((counts >= 0) & (counts <= num_rows)).all():
        raise DataError(
            f"label_counts must be in 0..num_rows, {num_rows}; got {counts.min():g} to "
            f"{counts.max():g}. Count the rows of each label in the training split."
        )
    if b == 0 and not counts.all():
        raise DataError("with b = 0 every label needs a training row; some have none. Raise b.")
    scale = (np.log(num_rows) - 1.0) * (b + 1.0) ** a
    return np.asarray(1.0 + scale * (counts + b) ** -a)


def evaluate_xmc(
    scores: Any,
    labels: Any,
    *,
    ks: Sequence[int] = (1, 3, 5),
    propensities: Any = None,
    exclude: Any = None,
) -> XmcReport:
    r"""Evaluate scores of labels: precision, recall, nDCG and propensity-scored precision at k.

    With the hits h among the first k labels by score (ties: the lower label first), P true labels
    of a row and weights w:

    $$\mathrm{P}@k = \sum h / k, \quad \mathrm{R}@k = \sum h / P, \quad
      \mathrm{nDCG}@k = \sum_i \frac{h_i}{\log_2(i + 1)} \Big/
      \sum_{i \le \min(k, P)} \frac{1}{\log_2(i + 1)}$$

    each a mean over rows, and PSP@k: the sum of w over the hits of all rows over the sum of the
    $\min(k, P)$ largest w of each row's true labels.

    Args:
        scores: Rows x labels. An array, where `-inf` means not predicted, or SciPy sparse, where
            only stored entries are predicted.
        labels: Rows x labels, above 0 where true; SciPy sparse or an array.
        ks: Cut-offs. Range: >= 1. Default (1, 3, 5).
        propensities: Weights of the labels, what `propensities` returns; without them there is no
            PSP. Default none.
        exclude: Pairs (row, label), neither predicted nor counted, shape (n, 2). Default none.

    Raises:
        ConfigError: If a cut-off is out of its range, or there is none.
        ShapeError: If shapes do not fit.
        DataError: If a score is NaN or +infinity (the message names row and label), or no row has
            a true label.

    Example:
        >>> evaluate_xmc([[0.9, 0.1, 0.8]], [[1, 1, 0]], ks=[1, 2])["P@2"]
        0.5

    Source: Bhatia et al., *The Extreme Classification Repository*, 2016; Jain, Prabhu and Varma,
        KDD 2016.
    Deviations: rows without a true label are left out and counted, where the repository's code
        divides by zero; values are fractions.
    """
    if len(ks) == 0:
        raise ConfigError("ks must hold at least one cut-off; got none. Try (1, 3, 5).")
    for k in ks:
        check_range(k, "ks", low=1, integer=True)
    truth = csr_matrix(labels, copy=True)
    found: Any = csr_matrix(scores, copy=True) if issparse(scores) else np.asarray(scores)
    if issparse(found):
        found.sum_duplicates()
    check_shape(found, (None, None), "scores")
    check_same_shape(found, truth, ("scores", "labels"))
    _check_scores(found)
    truth.data = (truth.data > 0).astype(np.float64)
    truth.sum_duplicates()
    truth.eliminate_zeros()
    keys = _pair_keys(exclude, truth.shape)
    truth = _without(truth, keys)
    best = (_best_stored if issparse(found) else _best_dense)(found, max(ks), keys)
    num_true = np.diff(truth.indptr)
    rows = np.flatnonzero(num_true)
    if len(rows) == 0:
        raise DataError("labels must be true somewhere; got no true label. Give another split.")
    hits = _hits(best, truth)[rows]
    values = _values(hits, num_true[rows], sorted(set(ks)))
    if propensities is not None:
        weights = np.asarray(propensities, dtype=np.float64)
        check_shape(weights, (truth.shape[1],), "propensities")
        values |= _weighted(hits, best[rows], truth[rows], weights, sorted(set(ks)))
    order = ("P", "R", "nDCG", "PSP")
    named = {f"{name}@{k}": values[f"{name}@{k}"] for name in order for k in sorted(set(ks))
             if f"{name}@{k}" in values}  # fmt: skip
    return XmcReport(named, len(rows), truth.shape[0] - len(rows))


def _values(hits: Array, num_true: Indices, ks: Sequence[int]) -> dict[str, float]:
    discount = 1.0 / np.log2(np.arange(2, max(ks) + 2))
    ideal = np.concatenate([[0.0], np.cumsum(discount)])
    values = {}
    for k in ks:
        found = hits[:, :k]
        values[f"P@{k}"] = float(found.sum(axis=1).mean() / k)
        values[f"R@{k}"] = float((found.sum(axis=1) / num_true).mean())
        gains = found @ discount[:k] / ideal[np.minimum(num_true, k)]
        values[f"nDCG@{k}"] = float(gains.mean())
    return values


def _weighted(
    hits: Array, best: Indices, truth: csr_matrix, weights: Array, ks: Sequence[int]
) -> dict[str, float]:
    gained = hits * weights[best]
    largest = _largest_stored(truth, weights[truth.indices], max(ks))
    held = np.where(largest >= 0, weights[largest], 0.0)
    return {f"PSP@{k}": float(gained[:, :k].sum() / held[:, :k].sum()) for k in ks}


def _hits(best: Indices, truth: csr_matrix) -> Array:
    """Return 1 where a predicted label is true; -1 stands for no prediction."""
    rows, columns = truth.shape
    predicted = best + np.arange(rows)[:, None] * columns
    return np.asarray((best >= 0) & np.isin(predicted, _keys(truth)), dtype=np.float64)


def _keys(matrix: csr_matrix) -> Indices:
    """Return one number for each stored entry."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    return np.asarray(rows * matrix.shape[1] + matrix.indices, dtype=np.int64)


def _without(matrix: csr_matrix, keys: Indices) -> csr_matrix:
    """Return a matrix without the stored entries of these keys."""
    kept = ~np.isin(_keys(matrix), keys)
    starts = np.concatenate([[0], np.cumsum(kept)])[matrix.indptr]
    return csr_matrix((matrix.data[kept], matrix.indices[kept], starts), shape=matrix.shape)


def _best_dense(scores: NDArray[Any], k: int, keys: Indices) -> Indices:
    rows, columns = scores.shape
    best = np.full((rows, k), -1, dtype=np.int64)
    step = max(1, _BLOCK // max(columns, 1))
    for start in range(0, rows, step):
        block = np.array(scores[start : start + step], dtype=np.float64)
        inside = keys[(keys >= start * columns) & (keys < (start + step) * columns)]
        block[inside // columns - start, inside % columns] = -np.inf
        top = top_k_columns(block, min(k, columns))
        known = np.take_along_axis(block, top, axis=1) > -np.inf
        best[start : start + step, : top.shape[1]] = np.where(known, top, -1)
    return best


def _best_stored(scores: csr_matrix, k: int, keys: Indices) -> Indices:
    scores = _without(scores, keys)
    return _largest_stored(scores, scores.data, k)


def _largest_stored(matrix: csr_matrix, values: NDArray[Any], k: int) -> Indices:
    """Return the columns of each row's k largest of `values`, one for each stored entry."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    order = np.lexsort((matrix.indices, -values, rows))
    place = np.arange(len(order)) - matrix.indptr[rows]  # `order` keeps the rows together
    kept = place < k
    best = np.full((matrix.shape[0], k), -1, dtype=np.int64)
    best[rows[kept], place[kept]] = matrix.indices[order][kept]
    return best


def _check_scores(scores: Any) -> None:
    values = scores.data if issparse(scores) else scores
    if np.isnan(values).any() or np.isposinf(values).any():
        bad = np.isnan(values) | np.isposinf(values)
        if issparse(scores):
            row, label = divmod(int(_keys(scores)[bad][0]), scores.shape[1])
        else:
            row, label = (int(axis[0]) for axis in np.nonzero(bad))
        raise DataError(
            f"scores must be numbers or -inf; got {float(scores[row, label])} at row {row}, label "
            f"{label}. Remove or replace it."
        )


def _pair_keys(exclude: Any, shape: tuple[int, int]) -> Indices:
    if exclude is None:
        return np.zeros(0, dtype=np.int64)
    pairs = np.asarray(exclude, dtype=np.int64)
    check_shape(pairs, (None, 2), "exclude")
    if len(pairs) and ((pairs < 0) | (pairs >= shape)).any():
        raise DataError(
            f"exclude must hold rows in 0..{shape[0] - 1} and labels in 0..{shape[1] - 1}; got "
            f"up to {pairs.max(axis=0).tolist()}. Give the pairs of this split."
        )
    return np.asarray(pairs[:, 0] * shape[1] + pairs[:, 1])
