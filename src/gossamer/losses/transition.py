"""How labels go wrong: transition matrices, noise put into labels, estimates from predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.checks import check_choice, check_finite, check_range
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.probabilities import (
    as_numpy,
    check_labels,
    check_probabilities,
    confident_guess,
)

__all__ = [
    "SymmetricNoise",
    "check_square",
    "check_transition",
    "estimate_transition",
    "inject_noise",
    "pair_noise",
]

_ROW_TOLERANCE = 1e-4
METHODS = ("anchor", "confident")
MISSING = ("error", "identity")


@dataclass(frozen=True)
class SymmetricNoise:
    r"""Labels replaced by another class, every other one equally likely; in closed form.

    $$T = (1 - \alpha) I + \frac{\alpha}{C} J, \qquad \alpha = \rho \frac{C}{C - 1}$$

    The rate rho is the chance that a label becomes *another* class; alpha is the chance that it is
    drawn again from all classes, its own included. Many codes mix up the two. Nothing of size
    C x C is built but by `matrix()`.

    Args:
        num_classes: C. Range: >= 2.
        rate: rho. Range: 0 to 1 - 1/C, where labels say nothing any more.

    Raises:
        ConfigError: If an argument is out of its range.

    Example:
        >>> noise = SymmetricNoise(10, 0.2)
        >>> round(noise.alpha, 4), round(float(noise.matrix()[0, 0]), 4)
        (0.2222, 0.8)

    Source: Lukasik et al., *Does label smoothing mitigate label noise?*, ICML 2020, section 2.
    Deviations: none
    """

    num_classes: int
    rate: float

    def __post_init__(self) -> None:
        check_range(self.num_classes, "num_classes", low=2, integer=True)
        # one rounding step above the end is still the end
        check_range(self.rate, "rate", low=0.0, high=1 - 1 / self.num_classes + 1e-12)

    @property
    def alpha(self) -> float:
        """Chance that a label is drawn again from all classes."""
        return min(self.rate * self.num_classes / (self.num_classes - 1), 1.0)

    @classmethod
    def from_alpha(cls, num_classes: int, alpha: float) -> SymmetricNoise:
        """Return the noise that draws a label again from all classes with chance `alpha`.

        Args:
            num_classes: C. Range: >= 2.
            alpha: Range: 0 to 1.

        Example:
            >>> round(SymmetricNoise.from_alpha(10, 0.5).rate, 4)
            0.45
        """
        check_range(num_classes, "num_classes", low=2, integer=True)
        check_range(alpha, "alpha", low=0.0, high=1.0)
        return cls(num_classes, alpha * (num_classes - 1) / num_classes)

    def matrix(self) -> Tensor:
        """Return T, `(C, C)`, float64; entry (i, j) is the chance of label j for true class i."""
        count = self.num_classes
        off = torch.full((count, count), self.alpha / count, dtype=torch.float64)
        return off + (1 - self.alpha) * torch.eye(count, dtype=torch.float64)


def pair_noise(num_classes: int, rate: float) -> Tensor:
    """Return the transition matrix where each class becomes the next one with a chance.

    Args:
        num_classes: C. Range: >= 2.
        rate: Chance of a change. Range: 0 to 1.

    Shape:
        - output: `(C, C)`, float64.

    Raises:
        ConfigError: If an argument is out of its range.

    Example:
        >>> pair_noise(3, 0.25)[2].tolist()
        [0.25, 0.0, 0.75]

    Source: Han et al., *Co-teaching*, NeurIPS 2018, section 4 (pair flipping).
    Deviations: none
    """
    check_range(num_classes, "num_classes", low=2, integer=True)
    check_range(rate, "rate", low=0.0, high=1.0)
    eye = torch.eye(num_classes, dtype=torch.float64)
    return (1 - rate) * eye + rate * eye.roll(1, 1)


def inject_noise(labels: Any, transition: Any, *, random_state: Any = None) -> tuple[Any, Any]:
    """Replace labels at random; return the noisy ones and where they differ.

    Args:
        labels: True classes, integers of any shape: a tensor, an array or a list.
        transition: `(C, C)`, entry (i, j) the chance of label j for true class i; or a
            `SymmetricNoise`.
        random_state: Seed or `numpy.random.Generator`. Default a new seed.

    Shape:
        - labels: any; both outputs: the same, tensors if labels are one, else arrays; noisy labels
          have the dtype of the labels, the mask is boolean.

    Raises:
        DataError: If a label lies outside 0 to C - 1, or the matrix is no transition matrix.
        DtypeError: If labels are no integers.
        ShapeError: If the matrix is not square.

    Example:
        >>> noisy, flipped = inject_noise([0, 1, 2, 1], pair_noise(3, 1.0))
        >>> noisy.tolist(), flipped.tolist()
        ([1, 2, 0, 2], [True, True, True, True])

    Source: Patrini et al., *Making Deep Neural Networks Robust to Label Noise*, CVPR 2017,
        section 2 (noise that depends on the class alone).
    Deviations: none
    """
    array = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if not np.issubdtype(array.dtype, np.integer):
        raise DtypeError(
            f"labels must be integers, one class for each row; got {array.dtype}. Number the "
            "classes from 0."
        )
    generator = np.random.default_rng(random_state)
    flat = array.ravel().astype(np.int64)
    if isinstance(transition, SymmetricNoise):
        count = transition.num_classes
        check_labels(flat, count)
        steps = generator.integers(1, count, size=flat.shape)
        moved = generator.random(flat.shape) < transition.rate
        noisy = np.where(moved, (flat + steps) % count, flat)
    else:
        matrix = check_transition(transition).numpy()
        check_labels(flat, len(matrix))
        noisy = _draw(flat, matrix, generator.random(flat.shape))
    result = noisy.reshape(array.shape).astype(array.dtype)
    if isinstance(labels, Tensor):
        drawn = torch.from_numpy(result).to(labels.device)
        return drawn, drawn != labels
    return result, result != array


def _draw(labels: NDArray[Any], matrix: NDArray[Any], uniform: NDArray[Any]) -> NDArray[Any]:
    """Return a class for each label by the inverse of the distribution function of its row."""
    noisy = labels.copy()
    for label in np.unique(labels):
        upper = np.cumsum(matrix[label])
        rows = labels == label
        noisy[rows] = np.searchsorted(upper / upper[-1], uniform[rows], side="right")
    return noisy


def estimate_transition(
    probabilities: Any,
    labels: Any,
    *,
    method: str = "anchor",
    percentile: float = 97,
    missing: str = "error",
) -> Tensor:
    """Estimate the transition matrix from predictions of a model trained on the noisy labels.

    Give out-of-fold probabilities, such as `sklearn.model_selection.cross_val_predict` makes: on
    its own training rows a model has learned the wrong labels too.

    `"anchor"` takes, for each class, the row whose probability of the class is the given
    percentile over all rows, and reads its whole distribution: few numbers, so it needs well
    calibrated predictions and classes of more than a few percent of the rows. `"confident"`
    counts rows that are confidently of a class (above the mean probability that rows labelled so
    have) by their label; better on small data.

    Args:
        probabilities: Predictions for each row; rows sum to 1.
        labels: Noisy classes.
        method: `"anchor"` or `"confident"`. Default `"anchor"`.
        percentile: For `"anchor"`; 100 would take outliers. Range: 0 to 100. Default 97.
        missing: What a class without any label gives: `"error"`, or `"identity"`: the row says
            that its labels are right. Default `"error"`.

    Shape:
        - probabilities: `(N, C)`; labels: `(N,)`, integers; output: `(C, C)`, float64.

    Raises:
        ShapeError: If the two do not fit.
        DataError: If rows do not sum to 1, a label is outside, or a class has no label.
        ConfigError: If an option is out of its range.

    Example:
        >>> sure = np.repeat(np.eye(2) * 0.8 + 0.1, 50, axis=0)
        >>> estimate_transition(sure, np.repeat([0, 1], 50)).round(decimals=2)[0].tolist()
        [0.9, 0.1]

    Source: Patrini et al., CVPR 2017, section 4.2 (anchors); Northcutt et al., *Confident
        Learning*, JAIR 2021, section 3.1 (counts, calibrated to the number of labels).
    Deviations: anchors are the row at the percentile (Patrini's code: the next one below it).
    """
    check_choice(method, METHODS, "method")
    check_choice(missing, MISSING, "missing")
    check_range(percentile, "percentile", low=0.0, high=100.0)
    p, y = check_probabilities(probabilities, labels)
    counts = np.bincount(y, minlength=p.shape[1])
    absent = np.flatnonzero(counts == 0)
    if len(absent) and missing == "error":
        raise DataError(
            f"every class must occur among the labels; got none of class {absent[0]} "
            f"({len(absent)} classes in all). Leave it out, or use missing='identity'."
        )
    found = _anchors(p, percentile) if method == "anchor" else _confident(p, y, counts)
    found[absent] = np.eye(p.shape[1])[absent]
    return torch.from_numpy(found)


def _anchors(p: NDArray[Any], percentile: float) -> NDArray[Any]:
    order = p.argsort(axis=0, kind="stable")
    rows = order[round((len(p) - 1) * percentile / 100)]
    found: NDArray[Any] = p[rows]
    return found


def _confident(p: NDArray[Any], y: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    size = p.shape[1]
    present = counts > 0
    guess = confident_guess(p, y)
    sure = guess >= 0
    joint = np.zeros((size, size))  # (label, guessed true class)
    np.add.at(joint, (y[sure], guess[sure]), 1.0)
    # one count on the diagonal keeps a class that nothing is sure of
    np.fill_diagonal(joint, np.maximum(joint.diagonal(), 1.0))
    joint *= (counts / joint.sum(1))[:, None]
    found: NDArray[Any] = np.eye(size)
    np.divide(joint.T, joint.sum(0)[:, None], found, where=present[:, None])
    return found


def check_square(matrix: Any, name: str) -> Tensor:
    """Return a square finite matrix in float64 on the CPU.

    Raises:
        ShapeError: If it is not square.
        DataError: If an entry is not finite.
    """
    # a copy: the caller's array may be read-only, or change later
    found = torch.from_numpy(np.array(as_numpy(matrix), dtype=np.float64))
    if found.dim() != 2 or found.shape[0] != found.shape[1]:
        raise ShapeError(
            f"{name} must be square, (C, C); got {tuple(found.shape)}. Give one row and one column "
            "for each class."
        )
    check_finite(found, name)
    return found


def check_transition(matrix: Any) -> Tensor:
    """Return a row-stochastic matrix in float64 on the CPU.

    Raises:
        ShapeError: If it is not square.
        DataError: If an entry is negative or a row does not sum to 1 within 1e-4.
    """
    if isinstance(matrix, str):
        raise ConfigError(
            f"transition must be a matrix or a SymmetricNoise; got {matrix!r}. Estimate one by "
            "estimate_transition."
        )
    found = check_square(matrix, "transition")
    if bool((found < 0).any()):
        row = int((found < 0).any(1).nonzero()[0])
        raise DataError(
            f"transition must hold chances >= 0; got a negative one in row {row}. Give the matrix "
            "itself, not its inverse."
        )
    off = (found.sum(1) - 1).abs()
    if float(off.max()) > _ROW_TOLERANCE:
        row = int(off.argmax())
        hint = (
            " Its columns do: transpose it."
            if bool(((found.sum(0) - 1).abs() < 1e-4).all())
            else ""
        )
        raise DataError(
            f"rows of transition must sum to 1 within {_ROW_TOLERANCE:g}; got "
            f"{float(found[row].sum()):.6g} in row {row}. Entry (i, j) is the chance of label j "
            f"for true class i.{hint}"
        )
    return found
