"""Relevant labels in any of the forms that users have, as one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import DataError, DtypeError, ShapeError

__all__ = ["check_rows", "check_scores", "label_matrix"]


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
    if hasattr(labels, "tocsr"):  # SciPy, without importing it
        labels = labels.toarray()
    elif isinstance(labels, Tensor) and labels.layout != torch.strided:
        labels = labels.to_dense()
    elif isinstance(labels, (list, tuple)) and not _is_matrix(labels):
        return _from_lists(labels, shape, device)
    matrix = torch.as_tensor(labels, device=device)
    if matrix.is_complex():
        raise DtypeError(f"labels must be real; got {matrix.dtype}. Give 0, 1 or weights.")
    if tuple(matrix.shape) != shape:
        raise ShapeError(
            f"labels must have the shape of the logits, {shape}; got {tuple(matrix.shape)}. "
            "Give one row for each input and one column for each label, or lists of indices."
        )
    matrix = matrix.to(torch.float32)
    if bool((matrix.isnan() | (matrix < 0)).any()):
        raise DataError(
            "labels must be 0, 1 or weights >= 0; got negative or NaN entries. Give 0 where a "
            "label is not relevant."
        )
    return matrix


def _is_matrix(labels: Sequence[Any]) -> bool:
    """Whether a list holds rows of truth values or floats, which are no indices."""
    first: Sequence[Any] = next((row for row in labels if hasattr(row, "__len__") and len(row)), ())
    return len(first) > 0 and isinstance(first[0], (bool, float))


def _from_lists(labels: Sequence[Any], shape: tuple[int, int], device: torch.device) -> Tensor:
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
        indices = [int(index) for index in row]
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
    matrix = torch.zeros(shape, device=device)
    matrix[rows, columns] = 1.0
    return matrix


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


def check_rows(relevant: Tensor, empty: str) -> Tensor:
    """Return which rows have a relevant label.

    Raises:
        DataError: If some have none and `empty` is `"error"`.
    """
    some = relevant.any(1)
    if empty == "error" and not bool(some.all()):
        missing = (~some).nonzero().flatten().tolist()
        raise DataError(
            f"every row must have a relevant label; got none in row {missing[0]} "
            f"({len(missing)} rows in all). Remove such rows or use empty='skip'."
        )
    return some
