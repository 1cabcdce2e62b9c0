"""Spectra of weights, factors and activations; knows NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_finite, check_range
from gossamer.errors import ShapeError

__all__ = [
    "SpectralReport",
    "effective_rank",
    "marchenko_pastur_edges",
    "spectral_report",
    "stable_rank",
]

Array = NDArray[np.float64]
# The largest eigenvalue of random entries exceeds the edge by more than this many of its own
# deviations in 1 % of draws (Tracy-Widom law for real entries).
TRACY_WIDOM = 2.02


@dataclass(frozen=True)
class SpectralReport:
    """The spectrum of one matrix against that of random entries.

    Args:
        shape: Of the matrix.
        spectral_norm: Largest singular value.
        stable_rank: Squared Frobenius norm over squared spectral norm.
        effective_rank: exp of the entropy of the normalised squared singular values.
        variance: Of the entries of the random part, from the median eigenvalue.
        lower_edge: Of the Marchenko-Pastur bulk of the eigenvalues of W W^T / q.
        upper_edge: Of the bulk.
        num_outliers: Eigenvalues above the upper edge by more than chance.
        bulk_mass: Share of the squared Frobenius norm that is not in outliers.

    Example:
        >>> spectral_report(np.eye(3)).rows()[0]["stable_rank"]
        3.0
    """

    shape: tuple[int, int]
    spectral_norm: float
    stable_rank: float
    effective_rank: float
    variance: float
    lower_edge: float
    upper_edge: float
    num_outliers: int
    bulk_mass: float

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures as one plain row."""
        return [self.to_dict()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**vars(self), "shape": list(self.shape)}


def spectral_report(weight: Any) -> SpectralReport:
    r"""Describe the spectrum of a matrix: ranks, and what stands out of random entries.

    The eigenvalues of $W W^\top / q$, for W with p rows and q >= p columns of independent entries,
    fill the Marchenko-Pastur bulk. Those above its upper edge carry structure: a weight matrix
    whose energy moves into few outliers, or whose stable rank falls, has begun to collapse. For
    activations (tokens x features), as queries, keys, values or the latents of multi-head latent
    attention, the same figures say how many directions are in use.

    Args:
        weight: NumPy array or torch tensor with two axes, in either orientation.

    Raises:
        ShapeError: If it is not a matrix, or empty.
        DataError: If it holds NaN or infinity.

    Example:
        >>> noise = np.random.default_rng(0).standard_normal((100, 400))
        >>> spectral_report(noise).num_outliers
        0

    Source: edges: Marchenko and Pastur 1967; chance at the edge: Johnstone, *On the Distribution
        of the Largest Eigenvalue*, Annals of Statistics 2001; spectral norms of heads as a sign of
        failing training: Qiu and Yao, *Why Low-Precision Transformer Training Fails*, 2025.
    Deviations: the variance is that of the median eigenvalue, not the mean, which outliers move;
        an outlier exceeds the edge by what chance gives in 1 % of draws.
    """
    matrix = _matrix(weight)
    p, q = sorted(matrix.shape)
    eigenvalues = _energies(matrix) / q
    variance = float(np.median(eigenvalues)) / _bulk_median(p / q)
    lower, upper = marchenko_pastur_edges((p, q), variance)
    roots = np.sqrt(p) + np.sqrt(q), 1 / np.sqrt(p) + 1 / np.sqrt(q)
    chance = TRACY_WIDOM * variance / q * roots[0] * roots[1] ** (1 / 3)
    # with a variance of 0 the rounding errors of the decomposition are no outliers
    above = eigenvalues > max(upper + chance, 1e-12 * eigenvalues[-1])
    total = float(eigenvalues.sum())
    return SpectralReport(
        shape=(matrix.shape[0], matrix.shape[1]),
        spectral_norm=float(np.sqrt(eigenvalues[-1] * q)),
        stable_rank=_stable(eigenvalues),
        effective_rank=_effective(eigenvalues),
        variance=variance,
        lower_edge=lower,
        upper_edge=upper,
        num_outliers=int(above.sum()),
        bulk_mass=float(eigenvalues[~above].sum()) / total if total else 1.0,
    )


def stable_rank(weight: Any) -> float:
    r"""Return $\lVert W \rVert_F^2 / \lVert W \rVert_2^2$, from 1 to the rank; 0 for zeros.

    Args:
        weight: NumPy array or torch tensor with two axes.

    Raises:
        ShapeError: If it is not a matrix, or empty.
        DataError: If it holds NaN or infinity.

    Example:
        >>> stable_rank(np.diag([2.0, 1.0, 1.0]))
        1.5

    Source: Rudelson and Vershynin, *Sampling from Large Matrices*, JACM 2007.
    Deviations: none
    """
    return _stable(_energies(_matrix(weight)))


def effective_rank(weight: Any) -> float:
    """Return exp of the entropy of the normalised squared singular values; 0 for zeros.

    Args:
        weight: NumPy array or torch tensor with two axes.

    Raises:
        ShapeError: If it is not a matrix, or empty.
        DataError: If it holds NaN or infinity.

    Example:
        >>> round(effective_rank(np.eye(4)), 12)
        4.0

    Source: Roy and Vetterli, *The Effective Rank*, EUSIPCO 2007.
    Deviations: singular values are squared, so that shares are those of the energy.
    """
    return _effective(_energies(_matrix(weight)))


def marchenko_pastur_edges(shape: Sequence[int], variance: float) -> tuple[float, float]:
    r"""Return the edges of the eigenvalues of W W^T / q for random W, p x q with p <= q.

    $$\sigma^2 (1 \pm \sqrt{p / q})^2$$

    Args:
        shape: The two sides of W, in either order. Range: >= 1.
        variance: Of the entries, of mean zero. Range: >= 0.

    Raises:
        ShapeError: If there are not two sides of at least 1.
        ConfigError: If the variance is out of its range.

    Example:
        >>> marchenko_pastur_edges((100, 400), 1.0)
        (0.25, 2.25)

    Source: Marchenko and Pastur, *Distribution of Eigenvalues for Some Sets of Random Matrices*,
        1967.
    Deviations: none
    """
    check_range(variance, "variance", low=0.0)
    if len(shape) != 2 or min(shape) < 1:
        raise ShapeError(
            f"shape must be the two sides of a matrix, >= 1; got {tuple(shape)}. Pass W.shape."
        )
    root = float(np.sqrt(min(shape) / max(shape)))
    return variance * (1 - root) ** 2, variance * (1 + root) ** 2


@lru_cache(maxsize=64)
def _bulk_median(ratio: float) -> float:
    """Return the median of the Marchenko-Pastur law of variance 1 for a ratio p / q <= 1."""
    root = np.sqrt(ratio)
    steps = 20_000
    # x = 1 + ratio + 2 root cos(angle) takes the roots at both edges out of the density
    angle = (np.arange(steps) + 0.5) * np.pi / steps
    x = 1 + ratio + 2 * root * np.cos(angle)
    mass = np.cumsum((np.sin(angle) ** 2 / x)[::-1])
    return float(np.interp(0.5, mass / mass[-1], x[::-1]))


def _energies(matrix: Array) -> Array:
    """Return the squared singular values, ascending; an order faster than all singular vectors."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    return np.clip(np.linalg.eigvalsh(wide @ wide.T), 0.0, None)


def _stable(energies: Array) -> float:
    return float(energies.sum() / energies.max()) if energies.max() > 0 else 0.0


def _effective(energies: Array) -> float:
    shares = energies[energies > 0] / max(energies.sum(), np.finfo(np.float64).tiny)
    return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0


def _matrix(weight: Any) -> Array:
    if hasattr(weight, "detach"):  # a tensor, named by what it can do: torch is not imported here
        weight = weight.detach().cpu().double().numpy()
    matrix = np.asarray(weight, dtype=np.float64)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ShapeError(
            f"weight must be a matrix with two axes and at least one entry; got {matrix.shape}. "
            "Reshape it, for example with weight.flatten(1)."
        )
    check_finite(matrix, "weight")
    return matrix
