"""How far a training has come along the principal directions of its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.checks import check_finite, check_range
from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.measures.variance import evaluating
from gossamer.probabilities import as_numpy

__all__ = [
    "EigenTracker",
    "EigenTrajectory",
    "MatchedProgress",
    "eigen_progress",
    "matched_progress",
]

Array = NDArray[np.float64]
TENTHS = tuple(tenth / 10 for tenth in range(1, 10))
_LEAST_SHARE = 1e-12  # of the largest eigenvalue; below it a direction is rounding error
_BATCH = 1000


def eigen_progress(
    eigenvalues: Any,
    times: Any,
    *,
    teacher_time: float | None = None,
    step_size: float | None = None,
) -> Array:
    r"""Progress of least squares from zero along the data's eigenvectors, in closed form.

    By gradient flow: predictions of a linear model on the training inputs X are $A(t) y$ with
    $A(t) = I - e^{-t X X^\top}$, so that along eigenvalue $\lambda_k$ the share

    $$a_k(t) = 1 - e^{-\lambda_k t}, \qquad \text{for a student of a teacher stopped at } T:
      \quad a_k(t)\,a_k(T)$$

    of the labels is learned. With a step size $\eta$, exactly $1 - (1 - \eta \lambda_k)^n$ after n
    steps of gradient descent.

    Args:
        eigenvalues: Of $X X^\top$, `(K,)`. Range: >= 0.
        times: `(S,)`; with `step_size` numbers of steps. Range: >= 0.
        teacher_time: Time, or number of steps, at which the teacher was stopped; the student's
            progress is returned. Default none: that of training on the labels.
        step_size: Of gradient descent; below 2 over the largest eigenvalue. Default 0 in the
            limit: gradient flow.

    Returns:
        `(S, K)`.

    Raises:
        ConfigError: If a number is out of its range.
        ShapeError: If the arguments are not flat.

    Example:
        >>> eigen_progress([1.0, 0.1], [1.0]).round(3).tolist()
        [[0.632, 0.095]]
        >>> eigen_progress([1.0, 0.1], [1.0], teacher_time=1.0).round(3).tolist()
        [[0.4, 0.009]]

    Source: Nagarajan et al., *On student-teacher deviations in distillation*, NeurIPS 2023,
        section 5 and its theorem.
    Deviations: the form for steps is this library's; it is exact.
    """
    lam, t = _flat(eigenvalues, "eigenvalues"), _flat(times, "times")
    if step_size is not None:
        check_range(step_size, "step_size", low=0.0, open_low=True)
        if step_size * lam.max() >= 2:
            raise ConfigError(
                f"step_size must be below 2 / {lam.max():g}, or gradient descent diverges; got "
                f"{step_size}. Lower it."
            )
        if (t != np.round(t)).any():
            raise ConfigError(
                "with a step_size times must be whole numbers of steps; got others. Leave out "
                "step_size for gradient flow."
            )
    found = _progress(lam, t, step_size)
    if teacher_time is not None:
        check_range(teacher_time, "teacher_time", low=0.0, integer=step_size is not None)
        found = found * _progress(lam, np.array([float(teacher_time)]), step_size)
    return found


def _progress(lam: Array, times: Array, step_size: float | None) -> Array:
    t = times[:, None]
    if step_size is None:
        return -np.expm1(-lam * t)
    left = 1 - step_size * lam
    # the logarithm keeps the digits of small eigenvalues, and exists below 1 / step_size only
    safe = np.log1p(-np.where(left > 0, step_size * lam, 0.0))
    return np.where(left > 0, -np.expm1(t * safe), 1 - left**t)


@dataclass(frozen=True)
class MatchedProgress:
    """Two trainings at the moments at which they have come equally far along one direction.

    Args:
        direction: That one, from 0.
        values: Its progress at those moments, `(V,)`.
        teacher: Progress of the first training along all directions then, `(V, K)`; NaN at values
            that it does not reach.
        student: That of the second.

    Example:
        >>> times = np.linspace(0, 9, 400)
        >>> teacher = eigen_progress([1.0, 0.1], times)
        >>> student = eigen_progress([1.0, 0.1], times, teacher_time=5.0)
        >>> float(matched_progress(teacher, student).ratio[4, 1].round(2))
        0.4
    """

    direction: int
    values: Array
    teacher: Array
    student: Array

    @property
    def ratio(self) -> Array:
        """Progress of the second training over that of the first, `(V, K)`."""
        return self.student / self.teacher

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each value and direction."""
        return [
            {"value": float(value), "direction": k, "teacher": float(a), "student": float(b),
             "ratio": float(b / a)}
            for value, first, second in zip(self.values, self.teacher, self.student, strict=True)
            for k, (a, b) in enumerate(zip(first, second, strict=True))
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }


def matched_progress(
    teacher: Any, student: Any, *, direction: int = 0, values: Sequence[float] = TENTHS
) -> MatchedProgress:
    """Compare two trainings where they have come equally far along one direction.

    A ratio below 1 on the lower directions means that the second training keeps closer to the upper
    one: the bias of gradient descent to the data's leading directions, exaggerated. The moments are
    found by linear interpolation, so steps must be recorded densely where progress is fast.

    Args:
        teacher: Progress by time and direction, `(S, K)`, from `eigen_progress`, or
            `EigenTrajectory.outputs` over a common final value.
        student: `(S', K)`, another number of times if need be.
        direction: Along which they are matched. Range: 0 to K - 1. Default 0, the first.
        values: Progress at which they are compared. Default 0.1, 0.2, ..., 0.9.

    Raises:
        ShapeError: If the numbers of directions differ.
        DataError: If a number is not finite.
        ConfigError: If the direction is out of its range.

    Example:
        >>> times = np.linspace(0, 9, 400)
        >>> teacher = eigen_progress([1.0, 0.1], times)
        >>> bool((matched_progress(teacher, teacher).ratio == 1).all())
        True

    Source: Nagarajan et al., NeurIPS 2023, section 5.
    Deviations: the table of ratios is this library's; the authors plot paths.
    """
    one, two = _table(teacher, "teacher"), _table(student, "student")
    if one.shape[1] != two.shape[1]:
        raise ShapeError(
            f"teacher and student must have the same directions; got {one.shape[1]} and "
            f"{two.shape[1]}. Track both on the same data."
        )
    check_range(direction, "direction", low=0, high=one.shape[1] - 1, integer=True)
    wanted = _flat(values, "values")
    at = [np.stack([_at(path, direction, value) for value in wanted]) for path in (one, two)]
    return MatchedProgress(direction, wanted, at[0], at[1])


def _at(path: Array, direction: int, value: float) -> Array:
    """Return a row of a path where it first reaches a value along a direction."""
    reached = np.flatnonzero(path[:, direction] >= value)
    if not len(reached) or (reached[0] == 0 and path[0, direction] > value):
        return np.full(path.shape[1], np.nan)
    after = int(reached[0])
    before = max(after - 1, 0)
    rise = path[after, direction] - path[before, direction]
    share = (value - path[before, direction]) / rise if rise > 0 else 1.0
    row: Array = path[before] + share * (path[after] - path[before])
    return row


@dataclass(frozen=True)
class EigenTrajectory:
    """How far a training has come along the principal directions of its data, by step.

    Args:
        eigenvalues: Of the data's Gram matrix, descending, `(K,)`.
        steps: Recorded, `(S,)`.
        outputs: Distance of the module's outputs from those at the first record, along each
            direction, `(S, K)`.
        weights: The same for the weights of the first layer; `None` if it has none that reads the
            data as they are.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> EigenTracker(model, torch.eye(3), num_directions=2).trajectory().outputs.shape
        (0, 2)
    """

    eigenvalues: Array
    steps: NDArray[np.int64]
    outputs: Array
    weights: Array | None

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each step and direction."""
        return [
            {"step": int(step), "direction": k, "output": float(self.outputs[i, k])}
            | ({} if self.weights is None else {"weight": float(self.weights[i, k])})
            for i, step in enumerate(self.steps)
            for k in range(len(self.eigenvalues))
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {k: None if v is None else v.tolist() for k, v in vars(self).items()}


class EigenTracker:
    r"""Follows a training along the principal directions of its data.

    The directions are eigenvectors of the Gram matrix $X X^\top$ of the inputs, not centred, as in
    the theory of the linear case: $u_k$ over examples, $v_k$ over features. At every recorded step
    the outputs F give $\lVert u_k^\top (F - F_0) \rVert$, the weights W of the first layer
    $\lVert (W - W_0) v_k \rVert$. Divide both runs that you compare by the last record of the one
    trained on labels, and see `matched_progress`. The matrix is decomposed once, on the smaller
    side, in float64; a record is one pass over the data.

    Args:
        module: Called with the data; returns a tensor with one row for each input, or an object
            with `logits`.
        data: Inputs, `(n, ...)`; more than 5000 are subsampled.
        num_directions: Leading ones. Range: 1 to min(n, p). Default 10. Those along which the data
            are zero are left out.
        every: Steps between records. Unit: steps. Range: >= 1. Default 50.
        random_state: Of the subsample. Default 0.

    Raises:
        ShapeError: If data have no rows or features.
        DataError: If they are not finite, or all zero.
        ConfigError: If a number is out of its range.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> tracker = EigenTracker(model, torch.eye(2), num_directions=1, every=10)
        >>> for step in range(21):
        ...     tracker.update(step)
        >>> tracker.trajectory().steps.tolist()
        [0, 10, 20]

    Source: Nagarajan et al., NeurIPS 2023, section 5: projections of the first layer's weights.
    Deviations: norms of the distance from the start (the authors' choice is unconfirmed); outputs
        beside weights.
    """

    def __init__(
        self,
        module: nn.Module,
        data: Any,
        *,
        num_directions: int = 10,
        every: int = 50,
        random_state: int = 0,
    ) -> None:
        check_range(every, "every", low=1, integer=True)
        inputs = torch.as_tensor(data)
        if len(inputs) > 5000:
            rows = np.random.default_rng(random_state).choice(len(inputs), 5000, replace=False)
            inputs = inputs[torch.from_numpy(np.sort(rows))]
        if inputs.dim() < 2 or 0 in inputs.shape:
            raise ShapeError(
                f"data must be (n, ...) with a row and a feature or more; got "
                f"{tuple(inputs.shape)}. Reshape them."
            )
        x = as_numpy(inputs.flatten(1)).astype(np.float64)
        check_finite(x, "data")
        check_range(num_directions, "num_directions", low=1, high=min(x.shape), integer=True)
        self.module = module
        self.every = every
        self.eigenvalues, self.left, self.right = principal_directions(x, num_directions)
        self._inputs = inputs
        self._layer = _first_layer(module, x.shape[1])
        self._steps: list[int] = []
        self._outputs: list[Array] = []
        self._weights: list[Array] = []

    def update(self, step: int) -> None:
        """Record a step if it is due; call it before or after each optimiser step."""
        if step % self.every == 0:
            self._steps.append(step)
            self._outputs.append(self.left.T @ self._now())
            if self._layer is not None:
                weight = self._layer.weight.detach().cpu().double().numpy()
                self._weights.append(self.right @ weight.T)

    def trajectory(self) -> EigenTrajectory:
        """Return what was recorded so far."""
        weights = _distances(self._weights, self.eigenvalues) if self._layer is not None else None
        return EigenTrajectory(
            self.eigenvalues,
            np.array(self._steps, dtype=np.int64),
            _distances(self._outputs, self.eigenvalues),
            weights,
        )

    def _now(self) -> Array:
        """Return the outputs, `(n, C)`."""
        like = next(self.module.parameters(), torch.zeros(()))
        found = []
        with evaluating(self.module), torch.no_grad():
            for part in torch.split(self._inputs, _BATCH):
                part = part.to(like.device, like.dtype if part.is_floating_point() else part.dtype)
                out = self.module(part)
                out = out if isinstance(out, Tensor) else out.logits
                found.append(out.reshape(len(part), -1).cpu().double())
        return torch.cat(found).numpy()


def principal_directions(x: Array, count: int) -> tuple[Array, Array, Array]:
    """Return leading eigenvalues of X X^T, vectors over rows `(n, K)` and over columns `(K, p)`.

    The largest entry of each vector over columns is positive.

    Raises:
        DataError: If all data are zero.
    """
    from scipy.linalg import eigh

    wide = x.shape[0] <= x.shape[1]
    gram = x @ x.T if wide else x.T @ x
    values, vectors = eigh(gram, subset_by_index=[len(gram) - count, len(gram) - 1])
    values, vectors = values[::-1], vectors[:, ::-1]
    kept = values > _LEAST_SHARE * max(values[0], 0.0)
    if not kept.any():
        raise DataError("data must differ from zero; got zeros alone. Check the inputs.")
    values, vectors = values[kept], vectors[:, kept]
    roots = np.sqrt(values)
    left, right = (vectors, vectors.T @ x / roots[:, None]) if wide else (
        x @ vectors / roots, vectors.T)  # fmt: skip
    sign = np.sign(right[np.arange(len(right)), np.abs(right).argmax(1)])
    return values, left * sign, right * sign[:, None]


def _first_layer(module: nn.Module, features: int) -> nn.Linear | None:
    layers = (m for m in module.modules() if isinstance(m, nn.Linear))
    return next((layer for layer in layers if layer.in_features == features), None)


def _distances(records: Sequence[Array], eigenvalues: Array) -> Array:
    """Return the norms of records less the first one, `(S, K)`."""
    if not records:
        return np.empty((0, len(eigenvalues)))
    found: Array = np.linalg.norm(np.stack(records) - records[0], axis=2)
    return found


def _flat(values: Any, name: str) -> Array:
    found = as_numpy(values).astype(np.float64)
    if found.ndim != 1 or not len(found):
        raise ShapeError(f"{name} must be flat, with one number or more; got {found.shape}.")
    if not ((found >= 0) & np.isfinite(found)).all():
        raise ConfigError(f"{name} must be finite and >= 0; got other numbers. Change them.")
    return found


def _table(values: Any, name: str) -> Array:
    found = as_numpy(values).astype(np.float64)
    if found.ndim != 2 or 0 in found.shape:
        raise ShapeError(
            f"{name} must be (S, K), progress by time and direction; got {found.shape}. Use "
            "eigen_progress, or the outputs of an EigenTrajectory."
        )
    check_finite(found, name)
    return found
