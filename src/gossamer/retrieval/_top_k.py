"""The k largest entries of each row, with one rule for ties."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["top_k_columns"]


def top_k_columns(scores: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Return the columns of the k largest entries, largest first; ties by the lower column.

    Linear in the size of `scores` but for a sort of k entries a row.

    Args:
        scores: Rows x columns, without NaN.
        k: Range: 1 to the number of columns.
    """
    rows, columns = scores.shape
    border = np.partition(scores, columns - k, axis=1)[:, columns - k, None]
    above, tied = scores > border, scores == border
    room = k - above.sum(axis=1, keepdims=True)
    # exactly k entries a row are kept: all above the border, and the first of those on it
    kept = above | (tied & (np.cumsum(tied, axis=1) <= room))
    found = np.nonzero(kept)[1].reshape(rows, k)
    order = np.argsort(-np.take_along_axis(scores, found, axis=1), axis=1, kind="stable")
    return np.take_along_axis(found, order, axis=1)
