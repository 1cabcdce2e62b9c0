"""What a walk through a model sums up: paths, or products of operator norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.measures._operators import circular_norm, operator_norm
from gossamer.measures._rules import RULES
from gossamer.measures._trace import Traced, Tracer

__all__ = ["PathTracer", "SpectralTracer"]


class PathTracer(Tracer):
    """Sums over paths: one pass with the absolute or squared weights, kept within range."""

    rules = RULES

    def __init__(self, model: nn.Module, p: int, *, approximate: bool = False) -> None:
        super().__init__(model, approximate=approximate)
        self.p = p

    def apply_layer(
        self, x: Traced, weight: Tensor, apply: Callable[[Tensor, Tensor], Tensor], **how: Any
    ) -> Traced:
        """Apply |2 W|, or 4 h W^2, h the output units."""
        out = apply(x.content, weight.abs() if self.p == 1 else weight.square())
        units = self.record(weight, out).units
        return self._within(out, x.log_scale + math.log(2.0 if self.p == 1 else 4.0 * units))

    def total(self, out: Traced) -> float:
        """Return the logarithm of the sum over all paths; for p = 1 of its square."""
        total = float(out.content.sum())
        value = out.log_scale + math.log(total) if total > 0 else -math.inf
        return 2 * value if self.p == 1 else value

    def _within(self, content: Tensor, log: float) -> Traced:
        # the largest entry goes into the logarithm, so that no depth overflows
        most = float(content.max()) if content.numel() else 0.0
        if most > 0:
            content, log = content / most, log + math.log(most)
        return self.traced(content, log)

    def scale(self, x: Traced, factor: Tensor) -> Traced:
        """Multiply by |factor| or its square."""
        return self._within(x.content * factor.abs() ** self.p, x.log_scale)

    def add(self, x: Traced, y: Traced) -> Traced:
        """Add the paths of both branches."""
        top = max(x.log_scale, y.log_scale)
        both = x.content * math.exp(x.log_scale - top) + y.content * math.exp(y.log_scale - top)
        return self._within(both, top)

    def join(self, parts: Sequence[Traced], dim: int) -> Traced:
        """Keep the paths of all branches apart."""
        top = max(part.log_scale for part in parts)
        return self.traced(
            torch.cat([part.content * math.exp(part.log_scale - top) for part in parts], dim), top
        )

    def pool(self, x: Traced, out: Tensor, share: Tensor) -> Traced:
        """Weigh paths through a window by 1/k, or by its square."""
        return self._within(out if self.p == 1 else out * share, x.log_scale)

    def pad(self, x: Traced, apply: Callable[[Tensor], Tensor]) -> Traced:
        """Let paths start from the copied entries too."""
        return self.traced(apply(x.content), x.log_scale)


class SpectralTracer(Tracer):
    """Products of operator norms; `log` is that of the root of the product so far."""

    rules = RULES

    def __init__(self, model: nn.Module, convolution: str, *, approximate: bool = False) -> None:
        super().__init__(model, approximate=approximate)
        self.convolution = convolution

    def apply_layer(
        self, x: Traced, weight: Tensor, apply: Callable[[Tensor, Tensor], Tensor], **how: Any
    ) -> Traced:
        """Multiply by the norm and the root of the output units."""
        out = apply(x.content, weight)
        norm = self._norm(x.content, out, weight, apply, how)
        units = self.record(weight, out, norm).units
        log = math.log(norm) if norm > 0 else -math.inf
        return self.traced(torch.zeros_like(out), x.log_scale + 0.5 * math.log(units) + log)

    def _norm(self, x: Tensor, out: Tensor, weight: Tensor, apply: Any, how: Any) -> float:
        if not how or self.convolution == "reshaped":
            return float(torch.linalg.matrix_norm(weight.flatten(1), 2))
        if self.convolution == "exact":
            return operator_norm(lambda v: apply(v, weight), x)
        strides = how.get("stride", 1)
        ones = (strides,) if isinstance(strides, int) else strides
        if "output_padding" in how or any(step != 1 for step in ones):
            raise self.refuse(
                "a convolution with strides or a transposed one for convolution='circular'",
                "Use convolution='exact'",
            )
        return circular_norm(weight, x.shape[2:], how.get("groups", 1), how.get("dilation", 1))

    def scale(self, x: Traced, factor: Tensor) -> Traced:
        """Multiply by the largest factor."""
        most = float(factor.abs().max())
        log = math.log(most) if most > 0 else -math.inf
        return self.traced(x.content * factor, x.log_scale + log)

    def add(self, x: Traced, y: Traced) -> Traced:
        """Add the bounds of both branches: 1 + the branch, for a branch around a skip."""
        return self.traced(x.content + y.content, _log_add(x.log_scale, y.log_scale))

    def join(self, parts: Sequence[Traced], dim: int) -> Traced:
        """Add the squares of the bounds."""
        total = -math.inf
        for part in parts:
            total = _log_add(total, 2 * part.log_scale)
        return self.traced(torch.cat([part.content for part in parts], dim), total / 2)

    def pool(self, x: Traced, out: Tensor, share: Tensor) -> Traced:
        """Leave pooling out of the product."""
        return self.traced(out, x.log_scale)

    def pad(self, x: Traced, apply: Callable[[Tensor], Tensor]) -> Traced:
        """Multiply by the norm of the padding, which bounds that of both together."""
        norm = operator_norm(apply, x.content)
        return self.traced(apply(x.content), x.log_scale + math.log(norm))


def _log_add(a: float, b: float) -> float:
    top, low = max(a, b), min(a, b)
    return top if low == -math.inf else top + math.log1p(math.exp(low - top))
