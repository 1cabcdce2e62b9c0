"""What is recorded while a model runs, and how a layer's weights are got from the layer itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.errors import ConfigError, GossamerError, UnsupportedError

__all__ = ["Recorded", "Recorder", "mix_weights"]

# largest difference between the output and weights times values, as a share of the largest value
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.05


@dataclass(frozen=True)
class Recorded:
    """The weights of one layer, `(B, H, T, S)`, and which keys were visible, if that is known."""

    stack: str
    number: int
    module: int
    turn: int
    weights: Tensor
    visible: Tensor | None


@dataclass
class Recorder:
    """Counts the layers of each stack as they run and keeps those that are wanted."""

    wanted: set[int] | None
    layers: list[Recorded] = field(default_factory=list)
    _runs: Counter[str] = field(default_factory=Counter)
    _turns: Counter[tuple[str, int]] = field(default_factory=Counter)
    _now: tuple[str, int, int, int] = ("", 0, 0, 0)

    @property
    def calls(self) -> int:
        """How many layers ran."""
        return self._runs.total()

    def begin(self, stack: str, module: int) -> bool:
        """Count a layer that runs now; return whether it is wanted."""
        number, turn = self._runs[stack], self._turns[stack, module]
        self._runs[stack] += 1
        self._turns[stack, module] += 1
        self._now = (stack, number, module, turn)
        return self.wanted is None or number in self.wanted

    def add(self, weights: Tensor, visible: Tensor | None) -> None:
        """Keep the weights of the layer that was counted last."""
        self.layers.append(Recorded(*self._now, weights, visible))

    def check(self) -> None:
        """Check that every layer asked for has run.

        Raises:
            ConfigError: If there is no layer of a number.
            UnsupportedError: If no attention ran at all.
        """
        most = max(self._runs.values(), default=0)
        if not most:
            raise UnsupportedError(
                "the model must attend when it is called; got a pass without attention. Call the "
                "whole model."
            )
        for number in sorted(self.wanted or ()):
            if number >= most:
                raise ConfigError(
                    f"layers must be numbers from 0 to {most - 1}, since the model runs {most} "
                    f"layers; got {number}. Change layers."
                )


def mix_weights(attend_to: Callable[[Tensor], Tensor], v: Tensor, out: Tensor, name: str) -> Tensor:
    """Return the weights of a layer, `(B, H, T, S)`: what it makes of unit vectors as values.

    Args:
        attend_to: The layer's output for given values.
        v: Its values, `(B, H_kv, S, D_v)`.
        out: Its output for these values, `(B, H, T, D_v)`.
        name: Its class, for messages.

    Raises:
        UnsupportedError: If the output is not the weights times the values.
    """
    unit = torch.eye(v.shape[2], dtype=v.dtype, device=v.device)
    try:
        weights = attend_to(unit.expand(*v.shape[:2], -1, -1).contiguous())
        values = v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
        apart = (weights.double() @ values.double() - out.double()).abs().amax()
    except (RuntimeError, GossamerError):
        apart = torch.tensor(torch.inf)
    allowed = _TOLERANCE.get(v.dtype, _HALF_TOLERANCE) * max(1.0, float(v.abs().amax()))
    if not float(apart) <= allowed:
        raise UnsupportedError(
            f"the output of an attention layer must be its weights times its values; got {name}, "
            "which adds something else. Record the weights inside that class."
        )
    return weights
