"""What one attention head does, in three numbers: entropy, sparsity, distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ShapeError

__all__ = ["HeadReport", "head_report"]

Numbers = NDArray[np.float64]

# share of a query's weight that counts as nearly all of it
_MOST = 0.9


@dataclass(frozen=True)
class HeadReport:
    """Measures of the heads of one layer; NaN where a head has no query with weight.

    Args:
        entropy: Of a query's weights, mean over queries. Unit: bits.
        sparsity: 1 minus the share of the visible keys that hold 90 % of the weight.
        distance: Mean distance between a query and what it reads, or `None`. Unit: tokens.

    Shape:
        - entropy, sparsity, distance: `(H,)`.
    """

    entropy: Numbers
    sparsity: Numbers
    distance: Numbers | None

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each head."""
        return [
            {
                "head": head,
                "entropy": float(self.entropy[head]),
                "sparsity": float(self.sparsity[head]),
                "distance": None if self.distance is None else float(self.distance[head]),
            }
            for head in range(len(self.entropy))
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the rows under one key."""
        return {"heads": self.rows()}


def head_report(
    weights: NDArray[Any], visible: NDArray[np.bool_] | None = None, *, distance: bool = True
) -> HeadReport:
    r"""Measure the attention weights of a layer's heads.

    With $p_j$ the share of a query's weight on key j,

    $$-\sum_j p_j \log_2 p_j, \qquad 1 - \frac{\min\{n : n\text{ keys hold }90\,\%\}}{|visible|},
      \qquad \sum_j p_j\,|i - j|$$

    each averaged over the queries. Weights need not sum to 1 and may be negative: shares are of
    their sizes. A query without any weight is left out.

    Args:
        weights: Attention weights of one layer.
        visible: Which keys a query may read, True = may. Default: those with weight in any head.
        distance: Whether queries and keys are the same tokens, so that a distance has a meaning.
            The last query stands at the last key. Default true.

    Shape:
        - weights: `(H, T, S)` or `(B, H, T, S)`; visible: `(T, S)` or `(B, T, S)`.

    Raises:
        ShapeError: If the shapes do not fit.

    Example:
        >>> head_report(np.full((1, 4, 4), 0.25)).entropy.tolist()
        [2.0]

    Source: entropy and distance: Vig and Belinkov, *Analyzing the Structure of Attention*, 2019,
        section 4; the share of keys with 90 % of the weight: the library's own.
    Deviations: none
    """
    if weights.ndim not in (3, 4):
        raise ShapeError(
            "weights must have the shape (heads, queries, keys) or (batch, heads, queries, keys); "
            f"got {weights.shape}. Pass the weights of one layer."
        )
    size = np.abs(weights.astype(np.float64)).reshape(-1, *weights.shape[-3:])  # (B, H, T, S)
    batch, _, length, num_keys = size.shape
    seen = (size > 0).any(1) if visible is None else visible
    if seen.shape[-2:] != (length, num_keys) or seen.size not in (
        length * num_keys,
        batch * length * num_keys,
    ):
        raise ShapeError(
            f"visible must have the shape of weights without heads, {(batch, length, num_keys)}; "
            f"got {seen.shape}. Pass one mask for all heads."
        )
    count = seen.reshape(-1, 1, length, num_keys).sum(-1)  # (B or 1, 1, T)
    total = size.sum(-1, keepdims=True)
    share = np.divide(size, total, out=np.zeros_like(size), where=total > 0)
    bits = -(share * np.log2(np.where(share > 0, share, 1.0))).sum(-1)
    reached = np.sort(share, axis=-1)[..., ::-1].cumsum(-1)
    needed = (reached < _MOST - 1e-9).sum(-1) + 1  # rounding must not ask for one key more
    measured = total[..., 0] > 0
    far = None
    if distance:
        place = np.arange(length)[:, None] + num_keys - length
        apart = np.abs(place - np.arange(num_keys))
        far = _mean((share * apart).sum(-1), measured)
    return HeadReport(
        _mean(bits, measured), _mean(1 - needed / np.maximum(count, 1), measured), far
    )


def _mean(values: Numbers, measured: NDArray[np.bool_]) -> Numbers:
    """Return the mean over samples and queries, `(H,)`."""
    number = measured.sum((0, 2))
    added: Numbers = np.where(measured, values, 0.0).sum((0, 2))
    mean: Numbers = np.full(len(added), np.nan)
    np.divide(added, number, out=mean, where=number > 0)
    return mean
