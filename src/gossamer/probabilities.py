"""Probabilities of classes beside labels: read, checked, and confidently counted; NumPy only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_finite
from gossamer.errors import DataError, DtypeError, ShapeError

__all__ = ["as_numpy", "check_labels", "check_probabilities", "confident_guess"]

_ROW_SUM = 1e-2
"""How far from 1 a row may sum: as far as bfloat16 is off."""


def as_numpy(value: Any) -> NDArray[Any]:
    """Return an array as one of NumPy; a torch tensor comes to the CPU, without its gradient.

    The dtype stays, but for bfloat16, which becomes float32.

    Args:
        value: NumPy array, torch tensor or nested lists.

    Example:
        >>> as_numpy([1, 2]).tolist()
        [1, 2]
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # NumPy has no bfloat16; torch is not imported here
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    return np.asarray(value)


def check_probabilities(probabilities: Any, labels: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return probabilities in float64, rows summing to 1, and labels as integers.

    Args:
        probabilities: `(N, C)`.
        labels: `(N,)`, integers from 0 to C - 1.

    Raises:
        ShapeError: If they do not belong together.
        DataError: If there are no rows, a row is no distribution, or a label is not one of them.
        DtypeError: If the labels are no integers.

    Example:
        >>> check_probabilities([[0.2, 0.8]], [1])[0].tolist()
        [[0.2, 0.8]]
    """
    p = np.asarray(as_numpy(probabilities), dtype=np.float64)
    y = as_numpy(labels)
    if p.ndim != 2 or y.shape != p.shape[:1]:
        raise ShapeError(
            f"probabilities must be (N, C) and labels (N,); got {p.shape} and {y.shape}. Give one "
            "row of probabilities for each label."
        )
    check_finite(p, "probabilities")
    off = np.abs(p.sum(1) - 1)
    if len(p) == 0 or (p < 0).any() or off.max() > _ROW_SUM:
        got = "no rows" if len(p) == 0 else f"a row with sum {p[off.argmax()].sum():.4g}"
        raise DataError(
            f"rows of probabilities must be >= 0 and sum to 1; got {got}. Apply the softmax to "
            "logits first."
        )
    check_labels(y, p.shape[1])
    return p / p.sum(1, keepdims=True), y


def check_labels(labels: NDArray[Any], count: int) -> None:
    """Check that labels are numbers of classes.

    Args:
        labels: Any shape.
        count: How many classes there are.

    Raises:
        DtypeError: If they are no integers.
        DataError: If one lies outside 0 to `count` - 1.

    Example:
        >>> check_labels(np.array([0, 2]), 3)
    """
    if not np.issubdtype(labels.dtype, np.integer):
        raise DtypeError(f"labels must be integers; got {labels.dtype}. Number the classes from 0.")
    outside = labels[(labels < 0) | (labels >= count)]
    if len(outside):
        raise DataError(
            f"labels must lie in 0 to {count - 1}; got {outside[0]}. Check the number of classes, "
            "and leave out rows without label."
        )


def confident_guess(p: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Return the class that each row is confidently of, -1 where it is of none.

    A row may be of every class whose probability reaches the mean probability that the rows with
    that label give to it; of those it is of the likeliest. No row is of a class without labels.

    Args:
        p: `(N, C)`, rows summing to 1.
        y: `(N,)`, labels.

    Example:
        >>> p = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.95, 0.05]])
        >>> confident_guess(p, np.array([0, 0, 1, 1])).tolist()
        [0, -1, 1, 0]

    Source: Northcutt et al., *Confident Learning*, JAIR 2021, equation 1.
    Deviations: none
    """
    size = p.shape[1]
    counts = np.bincount(y, minlength=size)
    thresholds = np.full(size, np.inf)
    np.divide(np.bincount(y, p[np.arange(len(y)), y], size), counts, thresholds, where=counts > 0)
    eligible = np.where(p >= thresholds - 1e-12, p, -1.0)
    guess: NDArray[Any] = np.where(eligible.max(1) >= 0, eligible.argmax(1), -1)
    return guess
