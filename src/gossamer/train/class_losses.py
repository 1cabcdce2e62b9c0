"""Losses on classes by name, as `--loss` and the table [loss] ask for them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from gossamer.checks import check_choice, check_keys
from gossamer.errors import ConfigError, DataError
from gossamer.losses import (
    BackwardCorrectionLoss,
    ForwardCorrectionLoss,
    GeneralizedCrossEntropyLoss,
    LabelSmoothingLoss,
    SymmetricCrossEntropyLoss,
    SymmetricNoise,
)

__all__ = ["CLASS_LOSSES", "build_class_loss", "read_transition"]

CLASS_LOSSES = ("backward", "cross_entropy", "forward", "generalized", "smoothing", "symmetric")
_CORRECTIONS = {"forward": ForwardCorrectionLoss, "backward": BackwardCorrectionLoss}


def build_class_loss(
    loss: Mapping[str, Any] | None, num_classes: int, *, transition: Any = None
) -> nn.Module:
    """Return a loss that is called with logits `(N, C)` and labels.

    Args:
        loss: `{"name": ..., "alpha": ..., "noise_matrix": ...}`. Names: `"cross_entropy"`,
            the default, `"smoothing"`, `"forward"`, `"backward"`, `"generalized"`, `"symmetric"`.
            `alpha`: of smoothing, default 0.1; of a correction, the share of labels drawn again,
            unless a matrix is given. `noise_matrix`: a `.npy` file with the chances of labels.
        num_classes: C.
        transition: A matrix or `SymmetricNoise` that wins over the table's.

    Raises:
        ConfigError: If a name or key is unknown, or does not belong to the loss.
        DataError: If the file holds no such matrix.

    Example:
        >>> build_class_loss({"name": "smoothing", "alpha": 0.2}, 10).alpha
        0.2
    """
    table = {"name": "cross_entropy", **(loss or {})}
    name = table["name"]
    check_choice(str(name), CLASS_LOSSES, "loss")
    correction = _CORRECTIONS.get(name)
    allowed = ["name", *(["alpha"] if name == "smoothing" or correction else [])]
    check_keys(table, [*allowed, *(["noise_matrix"] if correction else [])], f"loss {name!r}")
    alpha = table.get("alpha", 0.1)
    if correction is not None:
        if transition is None:
            path = table.get("noise_matrix")
            if path is None:
                transition = SymmetricNoise.from_alpha(num_classes, alpha)
            else:
                transition = read_transition(path, num_classes)
        corrected: nn.Module = correction(transition)
        return corrected
    simple: dict[str, Any] = {
        "cross_entropy": lambda: LabelSmoothingLoss(0.0),
        "smoothing": lambda: LabelSmoothingLoss(alpha),
        "generalized": GeneralizedCrossEntropyLoss,
        "symmetric": SymmetricCrossEntropyLoss,
    }
    built: nn.Module = simple[name]()
    return built


def read_transition(path: str | Path, num_classes: int) -> Any:
    """Return the matrix of a `.npy` file, entry (i, j) the chance of label j for true class i.

    Args:
        path: The file.
        num_classes: Rows and columns that it must have.

    Raises:
        ConfigError: If it is `"estimate"`, which needs rows with labels.
        DataError: If there is no such file, or it holds something else.
    """
    if str(path) == "estimate":
        raise ConfigError(
            "noise_matrix must be a .npy file here; got 'estimate', which needs a table or images "
            "with one class each. Give a file, or alpha alone for symmetric noise."
        )
    try:
        with Path(path).open("rb") as file:
            matrix = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        missing = isinstance(error, FileNotFoundError)
        raise DataError(
            f"noise_matrix must be a .npy file with the chances of labels; {path}: "
            f"{'it does not exist' if missing else error}. Write it by numpy.save."
        ) from None
    if isinstance(matrix, np.ndarray) and matrix.dtype.kind not in "iuf":
        raise DataError(f"{path} must hold numbers; got {matrix.dtype}. Write chances.")
    if not isinstance(matrix, np.ndarray) or matrix.shape != (num_classes, num_classes):
        got = getattr(matrix, "shape", "several arrays")
        raise DataError(
            f"{path} must hold one row and one column for each class, ({num_classes}, "
            f"{num_classes}); got {got}. Look at the order of the classes."
        )
    return matrix
