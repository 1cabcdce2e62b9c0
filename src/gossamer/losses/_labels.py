"""Relevant labels in any of the forms that users have, as one matrix or as pairs."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import DataError, DtypeError, ShapeError

__all__ = [
    "Pairs",
    "check_rows",
    "check_scores",
    "label_matrix",
    "label_pairs",
    "scaled",
    "warn_of_range",
]

_SMALL_TEMPERATURE = 0.1  # what contrastive models of unit vectors use
_LARGEST_COSINE = 1.05  # with the rounding of half precision


@dataclass(frozen=True)
class Pairs:
    """Relevant labels of rows as pairs, in the order of the labels; no matrix."""

    rows: Tensor
    columns: Tensor
    weights: Tensor

    def between(self, begin: int, end: int) -> slice:
        """Return which pairs have a label from `begin` to before `end`."""
        first, last = torch.searchsorted(
            self.columns, torch.tensor([begin, end], device=self.columns.device)
        ).tolist()
        return slice(first, last)

    def where(self, kept: Tensor | slice) -> Pairs:
        """Return some of the pairs."""
        return Pairs(self.rows[kept], self.columns[kept], self.weights[kept])


def label_matrix(labels: Any, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return non-negative float32 weights `(B, L)`, above 0 where a label is relevant.

    Args:
        labels: A `(B, L)` tensor or array, boolean, 0-1 or weights >= 0; a list of lists of label
            indices; a SciPy sparse matrix or a torch CSR tensor of that shape.
        shape: Rows B and labels L.
        device: Of the result.

    Raises:
        ShapeError: If rows or columns do not fit.
        DataError: If a weight is negative or NaN, or an index list names a label that does not
            exist, or one twice.
        DtypeError: If a tensor is complex.
    """
    if _is_sparse(labels):
        pairs = label_pairs(labels, shape, device)
        matrix = torch.zeros(shape, device=device)
        matrix[pairs.rows, pairs.columns] = pairs.weights
        return matrix
    return _checked(_dense(labels, device), shape)


def label_pairs(labels: Any, shape: tuple[int, int], device: torch.device) -> Pairs:
    """Return the relevant labels as pairs; what comes sparse stays so. Else as `label_matrix`."""
    if hasattr(labels, "tocoo"):  # SciPy, without importing it
        _check_shape(tuple(labels.shape), shape)
        matrix = labels.tocsr(copy=True)
        matrix.sum_duplicates()
        entries = matrix.tocoo()
        rows, columns, weights = (
            torch.as_tensor(value, device=device)
            for value in (entries.row, entries.col, entries.data)
        )
    elif isinstance(labels, Tensor) and labels.layout != torch.strided:
        _check_shape(tuple(labels.shape), shape)
        sparse = labels.to_sparse_coo().coalesce().to(device)  # type: ignore[no-untyped-call]
        (rows, columns), weights = sparse.indices(), sparse.values()
    elif _is_sparse(labels):
        rows, columns = _from_lists(labels, shape, device)
        weights = torch.ones(len(rows), device=device)
    else:
        dense = _dense(labels, device)
        _check_shape(tuple(dense.shape), shape)
        rows, columns = dense.nonzero().T
        weights = dense[rows, columns]
    weights = _checked_weights(weights)
    found = Pairs(rows.long(), columns.long(), weights).where(weights > 0)
    return found.where(found.columns.argsort(stable=True))


def _is_sparse(labels: Any) -> bool:
    """Whether labels are no matrix of all pairs."""
    if isinstance(labels, (list, tuple)):
        return not _is_matrix(labels)
    return hasattr(labels, "tocoo") or (
        isinstance(labels, Tensor) and labels.layout != torch.strided
    )


def _is_matrix(labels: Sequence[Any]) -> bool:
    """Whether a list holds rows of truth values or floats, which are no indices."""
    first: Sequence[Any] = next((row for row in labels if hasattr(row, "__len__") and len(row)), ())
    return len(first) > 0 and isinstance(first[0], (bool, float))


def _dense(labels: Any, device: torch.device) -> Tensor:
    try:
        return torch.as_tensor(labels, device=device)
    except (RuntimeError, TypeError, ValueError):
        raise DataError(
            f"labels must be a matrix of numbers or lists of indices; got {type(labels).__name__}. "
            "Write [[3], [0, 7]], or give an array with a row for each input."
        ) from None


def _checked(matrix: Tensor, shape: tuple[int, int]) -> Tensor:
    _check_shape(tuple(matrix.shape), shape)
    return _checked_weights(matrix)


def _check_shape(got: tuple[int, ...], shape: tuple[int, int]) -> None:
    if got != shape:
        raise ShapeError(
            f"labels must have the shape of the logits, {shape}; got {got}. "
            "Give one row for each input and one column for each label, or lists of indices."
        )


def _checked_weights(weights: Tensor) -> Tensor:
    if weights.is_complex():
        raise DtypeError(f"labels must be real; got {weights.dtype}. Give 0, 1 or weights.")
    weights = weights.to(torch.float32)
    if bool((weights.isnan() | (weights < 0)).any()):
        raise DataError(
            "labels must be 0, 1 or weights >= 0; got negative or NaN entries. Give 0 where a "
            "label is not relevant."
        )
    return weights


def _from_lists(
    labels: Sequence[Any], shape: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    if len(labels) != shape[0]:
        raise ShapeError(
            f"labels must hold one list for each row, {shape[0]}; got {len(labels)}. Add or "
            "remove lists."
        )
    rows, columns = [], []
    for number, row in enumerate(labels):
        if not isinstance(row, (list, tuple, Tensor)) and not hasattr(row, "__len__"):
            raise DataError(
                f"labels must hold a list of indices for each row; got {row!r} for row {number}. "
                "Write [[3], [0, 7]], also where a row has one label."
            )
        try:
            indices = [operator.index(index) for index in row]
        except TypeError:
            raise DataError(
                f"labels must be lists of indices; got {row!r} for row {number}. Give the column "
                "of each relevant label, as an integer."
            ) from None
        for index in indices:
            if not 0 <= index < shape[1]:
                raise DataError(
                    f"labels must be indices from 0 to {shape[1] - 1}; got {index} in row "
                    f"{number}. Check the number of labels."
                )
        if len(set(indices)) < len(indices):
            twice = next(i for i in indices if indices.count(i) > 1)
            raise DataError(
                f"labels of a row must be different; got {twice} twice in row {number}. Remove "
                "one of them."
            )
        rows += [number] * len(indices)
        columns += indices
    found = torch.tensor([rows, columns], dtype=torch.long, device=device)
    return found[0], found[1]


def check_scores(logits: Tensor) -> Tensor:
    """Return scores `(B, L)` in float32 or better.

    Raises:
        ShapeError: If there are not two axes.
        DtypeError: If they are integers.
        DataError: If one is NaN.
    """
    if logits.dim() != 2:
        raise ShapeError(
            f"logits must have the shape (rows, labels); got {tuple(logits.shape)}. Use a matrix."
        )
    if not logits.is_floating_point():
        raise DtypeError(f"logits must be floating point; got {logits.dtype}. Use .float().")
    if bool(logits.isnan().any()):
        raise DataError(
            "logits must not hold NaN; got some. Lower the learning rate or check the encoder."
        )
    return logits if logits.dtype == torch.float64 else logits.float()


def scaled(loss: Any, logits: Tensor) -> Tensor:
    """Return the checked scores of a loss, divided by its temperature."""
    scores = check_scores(logits)
    warn_of_range(loss, scores)
    return scores / float(loss.temperature)


def warn_of_range(loss: Any, scores: Tensor) -> None:
    """Warn once for a loss with a small temperature if scores are no cosines."""
    small = loss.temperature <= _SMALL_TEMPERATURE and scores.numel() > 0
    if not small or getattr(loss, "_warned", False):
        return
    low, high = (float(value) for value in scores.detach().aminmax())
    if high > _LARGEST_COSINE or -math.inf < low < -_LARGEST_COSINE:  # -inf is a hidden score
        loss._warned = True
        warnings.warn(
            f"temperature {loss.temperature:g} is for embeddings of length 1, whose scores lie in "
            f"[-1, 1]; got scores from {low:.3g} to {high:.3g}. "
            "Normalize the embeddings, or use temperature=1.",
            stacklevel=4,
        )


def check_rows(some: Tensor, empty: str) -> Tensor:
    """Return which rows have a relevant label, as they come.

    Raises:
        DataError: If some have none and `empty` is `"error"`.
    """
    if empty == "error" and not bool(some.all()):
        missing = (~some).nonzero().flatten().tolist()
        raise DataError(
            f"every row must have a relevant label; got none in row {missing[0]} "
            f"({len(missing)} rows in all). Remove such rows or use empty='skip'."
        )
    return some
