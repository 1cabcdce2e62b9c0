"""How much the training loss rises when weights are moved: at worst, and on average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.checks import check_range
from gossamer.errors import ShapeError
from gossamer.measures._batches import Batches, exact_copy
from gossamer.measures._objective import Loss, Objective, folded_with
from gossamer.measures.folding import fold_batchnorm

__all__ = [
    "ExpectedSharpness",
    "MaxSharpness",
    "expected_sharpness",
    "max_sharpness",
]


@dataclass(frozen=True)
class MaxSharpness:
    """The largest rise of the loss that was found in a box around the weights.

    Args:
        value: The rise over 1 + loss; a lower bound of the maximum. Unit: none.
        increase: The rise itself. Unit: nats, for cross-entropy.
        loss: At the weights. Unit: nats, for cross-entropy.
        radius: Of the box, in units of |w| + 1.
        num_steps: Steps of the ascent.
        best_step: The step at which the rise was found; 0 if no step raised the loss.
    """

    value: float
    increase: float
    loss: float
    radius: float
    num_steps: int
    best_step: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row."""
        return [self.to_dict()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class ExpectedSharpness:
    """The mean rise of the loss under Gaussian noise on the weights.

    Args:
        value: Mean rise. Unit: nats, for cross-entropy.
        standard_error: Of the mean over the draws.
        error_increase: Mean rise of the training error; NaN with a loss of your own.
        loss: At the weights.
        sigma: Standard deviation of the noise.
        num_draws: Of the noise.
        kl: ||w||^2 / (2 sigma^2), or with the distance to the weights at the start. Unit: nats.
    """

    value: float
    standard_error: float
    error_increase: float
    loss: float
    sigma: float
    num_draws: int
    kl: float

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row."""
        return [self.to_dict()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def max_sharpness(
    model: nn.Module,
    loader: Any,
    *,
    radius: float = 5e-4,
    num_steps: int = 20,
    step_size: float = 0.3,
    loss: Loss | None = None,
) -> MaxSharpness:
    r"""Return how much the training loss can rise in a box around the weights.

    $$\zeta = \frac{\max_{|\nu_i| \le \alpha(|w_i| + 1)} L(w + \nu) - L(w)}{1 + L(w)}$$

    By projected ascent along the sign of the gradient over all data, from the weights themselves;
    the best point on the way counts, so that the value is a lower bound of the maximum and never
    negative. In float64 and evaluation mode, on a copy with BatchNorm folded; all parameters move,
    biases and frozen ones too.

    Args:
        model: Gives logits `(B, C)`, or with `loss` whatever that takes. It is untouched.
        loader: Batches `(x, y)`, or one pair of arrays; read once and kept.
        radius: Alpha, the half width of the box in units of |w| + 1. Range: > 0. Default 5e-4.
        num_steps: Of the ascent, each a pass forward and backward over the data. Default 20.
        step_size: Length of a step as a share of the half width. Range: > 0 to 1. Default 0.3.
        loss: `loss(outputs, labels)`, the mean over a batch. Default cross-entropy.

    Raises:
        ConfigError: If a number is out of its range.
        DataError: If there are no examples, labels are no classes, or the loss is not finite.
        UnsupportedError: If the model cannot be copied or its BatchNorm not folded.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> data = (torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 1]))
        >>> max_sharpness(model, data).value > 0
        True

    Source: Keskar et al., *On Large-Batch Training for Deep Learning*, ICLR 2017, equation 3;
        Neyshabur et al., NIPS 2017, section 2.3.
    Deviations: the optimiser is not stated there; the value of alpha is unconfirmed; the
        denominator is kept where the loss is about 0, where it changes nothing.
    """
    check_range(radius, "radius", low=0.0, open_low=True)
    check_range(num_steps, "num_steps", low=1, integer=True)
    check_range(step_size, "step_size", low=0.0, high=1.0, open_low=True)
    return climb(objective_of(model, loader, loss), radius, num_steps, step_size)


def climb(objective: Objective, radius: float, num_steps: int, step_size: float) -> MaxSharpness:
    """Return the best point of a projected ascent along the signs of the gradient."""
    box = [radius * (weight.abs() + 1) for weight in objective.start]
    offsets = [torch.zeros_like(weight) for weight in objective.start]
    first, gradient = objective.gradient(offsets)
    best, where = first, 0
    for step in range(1, num_steps + 1):
        offsets = [
            torch.clamp(offset + step_size * half * slope.sign(), -half, half)
            for offset, half, slope in zip(offsets, box, gradient, strict=True)
        ]
        if step < num_steps:
            value, gradient = objective.gradient(offsets)
        else:
            value = objective.at(offsets)[0]
        if value > best:
            best, where = value, step
    increase = best - first
    return MaxSharpness(increase / (1 + first), increase, first, radius, num_steps, where)


def expected_sharpness(
    model: nn.Module,
    loader: Any,
    *,
    sigma: float,
    num_draws: int = 20,
    init_model: nn.Module | None = None,
    random_state: int = 0,
    loss: Loss | None = None,
) -> ExpectedSharpness:
    r"""Return the mean rise of the training loss under Gaussian noise on the weights.

    $$\mathrm{E}_{\nu \sim N(0, \sigma^2 I)} L(w + \nu) - L(w)$$

    The same `random_state` gives the same directions for every sigma.

    Args:
        model: As in `max_sharpness`.
        loader: As in `max_sharpness`.
        sigma: Standard deviation of the noise, not its variance. Range: > 0.
        num_draws: Of the noise, each a pass over the data. Range: >= 2. Default 20.
        init_model: The model before training; KL is then measured from it. Default none: from 0.
        random_state: Seed of the noise. Default 0.
        loss: As in `max_sharpness`.

    Raises:
        As `max_sharpness`; ShapeError too if `init_model` has other parameters.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> data = (torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 1]))
        >>> expected_sharpness(model, data, sigma=0.1).kl > 0
        True

    Source: Neyshabur et al., *Exploring Generalization in Deep Learning*, NIPS 2017, section 2.3.
    Deviations: one sigma for all weights (the paper also tries one that grows with |w|, with
        constants that are unconfirmed).
    """
    check_range(sigma, "sigma", low=0.0, open_low=True)
    check_range(num_draws, "num_draws", low=2, integer=True)
    objective = objective_of(model, loader, loss)
    distance = squared_distance(objective, init_model)
    return shake(objective, sigma, num_draws, random_state, distance)


def shake(
    objective: Objective, sigma: float, num_draws: int, random_state: int, distance: float
) -> ExpectedSharpness:
    """Return the mean rise over draws of the noise."""
    generator = torch.Generator().manual_seed(random_state)
    loss, error = objective.at()
    rises: list[float] = []
    errors: list[float] = []
    for _ in range(num_draws):
        noise = [_normal(weight, generator).mul_(sigma) for weight in objective.start]
        value, wrong = objective.at(noise)
        rises.append(value - loss)
        errors.append(wrong - error)
    spread = torch.tensor(rises, dtype=torch.float64).std()
    return ExpectedSharpness(
        value=sum(rises) / num_draws,
        standard_error=float(spread) / math.sqrt(num_draws),
        error_increase=sum(errors) / num_draws,
        loss=loss,
        sigma=sigma,
        num_draws=num_draws,
        kl=distance / (2 * sigma**2),
    )


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)


def squared_distance(objective: Objective, init_model: nn.Module | None) -> float:
    """Return the squared norm of the weights, or of their difference to those of another model.

    Raises:
        ShapeError: If the other model has other parameters.
    """
    if init_model is None:
        return _squares(objective.start)
    others = [p.detach() for p in fold_batchnorm(exact_copy(init_model)).parameters()]
    shapes = [[tuple(p.shape) for p in each] for each in (objective.start, others)]
    if shapes[0] != shapes[1]:
        raise ShapeError(
            f"init_model must have the parameters of model, {len(shapes[0])} of the same shapes; "
            f"got {len(shapes[1])} {shapes[1]}. Pass the same network before training."
        )
    pairs = zip(objective.start, others, strict=True)
    return _squares([a - b.to(a.device) for a, b in pairs])


def _squares(tensors: Sequence[Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in tensors)


def objective_of(model: nn.Module, loader: Any, loss: Loss | None) -> Objective:
    copy = exact_copy(model)
    batches = Batches(loader, next(copy.parameters()).device)
    return Objective(folded_with(copy, batches), batches, loss)
