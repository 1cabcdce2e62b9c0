"""The nearest vectors by cosine, exactly, whatever the blocks and the threads; needs numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.attention._compiled import compiled

__all__ = ["nearest"]

_BLOCK = 2048  # vectors of the corpus at once


def nearest(
    queries: NDArray[np.float32],
    corpus: NDArray[np.float32],
    own: NDArray[np.int64],
    groups: NDArray[np.int64],
    k: int,
    *,
    block_size: int = _BLOCK,
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return the rows of `corpus` with the largest inner products, equal ones by the lower row.

    A product of float32 matrices finds what may be among the k best. What decides is the sum in
    float64 in one fixed order, so that neither blocks nor threads nor the BLAS library matter.

    Args:
        queries: Of length 1, `(q, d)`.
        corpus: Of length 1, `(c, d)`.
        own: Group of each query: vectors of this group are no neighbours of it.
        groups: Group of each vector of the corpus.
        k: How many. Range: >= 1.
        block_size: Vectors of the corpus at once.

    Returns:
        Rows and cosines, `(q, k)`, best first; -1 and 0 where there are fewer.
    """
    best = np.zeros((len(queries), k))
    places = np.full((len(queries), k), -1, dtype=np.int32)
    filled = np.zeros(len(queries), dtype=np.int64)
    # twice the bound on the rounding of a float32 sum of d products of two vectors of length 1
    slack = (queries.shape[1] + 2) * float(np.finfo(np.float32).eps)
    for first in range(0, len(corpus), block_size):
        block = corpus[first : first + block_size]
        scores = queries @ block.T
        here = groups[first : first + block_size]
        _keep_best(scores, queries, block, own, here, first, slack, best, places, filled)
    best[places < 0] = -np.inf
    order = np.lexsort((places, -best), axis=1)
    rows: NDArray[np.int32] = np.take_along_axis(places, order, axis=1)
    return rows, np.where(rows < 0, 0.0, np.take_along_axis(best, order, axis=1))


@compiled
def _keep_best(
    scores: Any,
    queries: Any,
    block: Any,
    own: Any,
    groups: Any,
    first: int,
    slack: float,
    best: Any,
    places: Any,
    filled: Any,
) -> None:
    """Put the better vectors of a block into the heap of each query; the worst is on top."""
    k, dim, even = best.shape[1], queries.shape[1], queries.shape[1] // 4 * 4
    for row in range(scores.shape[0]):
        heap, rows, size = best[row], places[row], filled[row]
        for column in range(scores.shape[1]):
            if size == k and scores[row, column] < heap[0] - slack:
                continue
            if groups[column] == own[row]:
                continue
            a, b, c, d = 0.0, 0.0, 0.0, 0.0
            for i in range(0, even, 4):  # four sums, so that none waits for another
                a += np.float64(queries[row, i]) * np.float64(block[column, i])
                b += np.float64(queries[row, i + 1]) * np.float64(block[column, i + 1])
                c += np.float64(queries[row, i + 2]) * np.float64(block[column, i + 2])
                d += np.float64(queries[row, i + 3]) * np.float64(block[column, i + 3])
            for i in range(even, dim):
                a += np.float64(queries[row, i]) * np.float64(block[column, i])
            exact = (a + b) + (c + d)
            place = first + column
            if size < k:
                at = size
                size += 1
                while at > 0:  # up, past what is better; a later row is worse than an equal one
                    parent = (at - 1) // 2
                    if heap[parent] < exact:
                        break
                    if heap[parent] == exact and rows[parent] > place:
                        break
                    heap[at], rows[at] = heap[parent], rows[parent]
                    at = parent
                heap[at], rows[at] = exact, place
            elif exact > heap[0]:  # rows come in order: an equal one is later, so worse
                at = 0
                while 2 * at + 1 < k:
                    child = 2 * at + 1
                    other = child + 1
                    if other < k and (
                        heap[other] < heap[child]
                        or (heap[other] == heap[child] and rows[other] > rows[child])
                    ):
                        child = other
                    if heap[child] > exact:
                        break
                    if heap[child] == exact and rows[child] < place:
                        break
                    heap[at], rows[at] = heap[child], rows[child]
                    at = child
                heap[at], rows[at] = exact, place
        filled[row] = size
