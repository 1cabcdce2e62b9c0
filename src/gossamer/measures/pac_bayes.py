"""The PAC-Bayes bound of a network with noise on its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError
from gossamer.measures._objective import Objective
from gossamer.measures.sharpness import ExpectedSharpness, objective_of, shake, squared_distance

__all__ = ["PacBayesBound", "pac_bayes_bound"]

_START = 0.01
_STEP = 4.0
_RANGE = (1e-8, 100.0)
_CLOSE = 1.05
"""The search for sigma ends when the largest good and the smallest bad one are this close."""


@dataclass(frozen=True)
class PacBayesBound:
    """A bound on the error of the noisy network, with the noise it was found for.

    Args:
        bound: On the expected test error: the next two and the complexity term. Unit: share.
        error: Training error of the network itself. Unit: share.
        error_increase: Its mean rise under the noise. Unit: share.
        complexity: 4 sqrt((KL + ln(2 m / delta)) / m).
        kl: Unit: nats.
        sigma: Standard deviation of the noise.
        expected_sharpness: Mean rise of the cross-entropy under the noise. Unit: nats.
        num_examples: m.
        delta: Chance that the bound fails.
        vacuous: The bound is 1 or more, and so says nothing.
    """

    bound: float
    error: float
    error_increase: float
    complexity: float
    kl: float
    sigma: float
    expected_sharpness: float
    num_examples: int
    delta: float
    vacuous: bool

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row."""
        return [self.to_dict()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def pac_bayes_bound(
    model: nn.Module,
    loader: Any,
    *,
    init_model: nn.Module | None = None,
    delta: float = 0.05,
    max_drop: float = 0.1,
    num_draws: int = 20,
    random_state: int = 0,
) -> PacBayesBound:
    r"""Return the PAC-Bayes bound on the error of a network with noise on its weights.

    $$\mathrm{E} L(w + \nu) \le \hat L(w) + [\mathrm{E} \hat L(w + \nu) - \hat L(w)]
      + 4 \sqrt{\frac{\mathrm{KL} + \ln(2m / \delta)}{m}}, \qquad
      \mathrm{KL} = \frac{\|w - w_0\|^2}{2 \sigma^2}$$

    with probability 1 - delta over the m training examples, L the error and w_0 = 0 or the weights
    before training. Sigma is the largest found whose mean drop of training accuracy is at most
    `max_drop`, by steps of 4 and then halving, to 5 %, with the same directions of noise
    throughout.

    Args:
        model: As in `max_sharpness`.
        loader: The training set; as in `max_sharpness`.
        init_model: The model before training. Default none: w_0 = 0.
        delta: Chance that the bound fails. Range: > 0 to < 1. Default 0.05.
        max_drop: Largest mean drop of training accuracy. Range: > 0 to 1. Default 0.1.
        num_draws: Of the noise at each sigma; about 8 are tried. Range: >= 20. Default 20.
        random_state: Seed of the noise. Default 0.

    Raises:
        As `expected_sharpness`; DataError too if no sigma down to 1e-8 keeps the accuracy.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> data = (torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 1]))
        >>> pac_bayes_bound(model, data).vacuous  # two examples prove nothing
        True

    Source: Neyshabur et al., *Exploring Generalization in Deep Learning*, NIPS 2017, equation 6.
    Deviations: L is the error, since the bound needs a loss between 0 and 1; sigma is chosen on the
        training data, which delta does not pay for.
    """
    check_range(delta, "delta", low=0.0, high=1.0, open_low=True)
    if delta == 1:
        raise ConfigError("delta must be < 1; got 1. Use for example 0.05.")
    check_range(max_drop, "max_drop", low=0.0, high=1.0, open_low=True)
    check_range(num_draws, "num_draws", low=20, integer=True)
    objective = objective_of(model, loader, None)
    distance = squared_distance(objective, init_model)
    return bound_of(objective, distance, delta, max_drop, num_draws, random_state)


def bound_of(
    objective: Objective,
    distance: float,
    delta: float,
    max_drop: float,
    num_draws: int,
    random_state: int,
) -> PacBayesBound:
    """Search sigma and return the bound there."""

    def at(sigma: float) -> ExpectedSharpness:
        return shake(objective, sigma, num_draws, random_state, distance)

    found = _largest(at, max_drop)
    count = objective.batches.num_examples
    error = objective.at()[1]
    complexity = 4 * math.sqrt((found.kl + math.log(2 * count / delta)) / count)
    bound = error + found.error_increase + complexity
    return PacBayesBound(
        bound, error, found.error_increase, complexity, found.kl, found.sigma, found.value,
        count, delta, bound >= 1,
    )  # fmt: skip


def _largest(at: Callable[[float], ExpectedSharpness], max_drop: float) -> ExpectedSharpness:
    """Return the result at the largest sigma found that costs at most `max_drop`."""
    good = at(_START)
    bad = _START
    if good.error_increase <= max_drop:
        while good.sigma < _RANGE[1]:
            bad = good.sigma * _STEP
            tried = at(bad)
            if tried.error_increase > max_drop:
                break
            good = tried
        else:
            return good
    while good.error_increase > max_drop:
        bad = good.sigma
        if bad < _RANGE[0]:
            raise DataError(
                f"max_drop must be kept by some noise; got a larger drop than {max_drop:g} at "
                f"sigma {bad:.1g} already. Raise max_drop."
            )
        good = at(bad / _STEP)
    while bad / good.sigma > _CLOSE:
        tried = at(math.sqrt(bad * good.sigma))
        if tried.error_increase > max_drop:
            bad = tried.sigma
        else:
            good = tried
    return good
