"""Saved outputs of a model, checked: logits, labels, flags and ids of rows; knows NumPy only."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_finite
from gossamer.errors import DataError, DtypeError, ShapeError
from gossamer.probabilities import as_numpy, check_labels

__all__ = ["class_labels", "logits_of", "row_flags", "same_rows"]

_LOOKED_AT = 16


def logits_of(values: Any, name: str, like: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return logits as an array `(N, C)`, of the shape of others if these are given."""
    logits = as_numpy(values)
    if logits.ndim != 2 or len(logits) == 0 or logits.shape[1] < 2:
        raise ShapeError(
            f"{name} must be (N, C) with a row or more and 2 classes or more; got {logits.shape}. "
            "For tokens take those that count: logits[mask]."
        )
    if like is not None and logits.shape != like.shape:
        what = "classes" if logits.shape[0] == like.shape[0] else "rows"
        raise ShapeError(
            f"{name} must have the rows and classes of teacher_logits, {like.shape}; got "
            f"{logits.shape}. Save all outputs on the same data with the same {what}."
        )
    if not np.issubdtype(logits.dtype, np.floating):
        raise DtypeError(f"{name} must be floating point; got {logits.dtype}. Convert them.")
    check_finite(logits, name)
    first = logits[:_LOOKED_AT].astype(np.float64)
    if (first >= 0).all() and (np.abs(first.sum(1) - 1) < 1e-3).all():
        warnings.warn(
            f"{name} look like probabilities: they are >= 0 and sum to 1 in each row. Logits are "
            "wanted, before the softmax; give those, or the logarithms.",
            stacklevel=3,
        )
    return logits


def class_labels(values: Any, shape: Sequence[int]) -> NDArray[Any]:
    """Return labels as an array `(N,)` of classes 0 to C - 1."""
    labels = as_numpy(values)
    if labels.shape != (shape[0],):
        raise ShapeError(
            f"labels must have one class for each row, ({shape[0]},); got {labels.shape}. Take the "
            "labels of the same data."
        )
    check_labels(labels, shape[1])
    return labels


def row_flags(values: Any, name: str, count: int) -> NDArray[np.bool_]:
    """Return one truth value for each row."""
    flags = as_numpy(values)
    if flags.shape != (count,):
        raise ShapeError(f"{name} must be ({count},), one for each row; got {flags.shape}. Cut it.")
    if flags.dtype != np.bool_:
        raise DtypeError(f"{name} must be boolean; got {flags.dtype}. Use .astype(bool).")
    return flags


def same_rows(ids: Sequence[Any] | None, names: Sequence[str], count: int) -> None:
    """Check that all arrays hold the same rows in the same order, if their ids are given."""
    if ids is None:
        return
    if len(ids) != len(names):
        raise ShapeError(
            f"ids must hold one array for each of {', '.join(names)}; got {len(ids)}. Give the ids "
            "of all, or of none."
        )
    first = as_numpy(ids[0])
    for name, values in zip(names, ids, strict=True):
        found = as_numpy(values)
        if found.shape != (count,):
            raise ShapeError(
                f"ids of the {name} must be ({count},), one for each row; got {found.shape}. Give "
                "the ids that were saved with its logits."
            )
        different = found != first
        if different.any():
            row = int(different.argmax())
            raise DataError(
                f"the {name} must hold the rows of the {names[0]} in the same order; row {row} "
                f"has the id {found[row]}, not {first[row]}. Sort both by id."
            )
