"""Does a network forget the scale of its weights? Measured, for any module."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.layers._degrees import (
    Inputs,
    ScaleBreak,
    find_breaks,
    measure_calls,
    run_scaled,
    tensors,
)

__all__ = [
    "ScaleBreak",
    "ScaleInvarianceReport",
    "check_scale_invariance",
    "homogeneity_degrees",
    "split_parameters",
]

# classes that no invariant part can hold, wherever they stand in it
_SUSPECTS = (nn.GELU, nn.Softmax, nn.MultiheadAttention, nn.SiLU, nn.Sigmoid, nn.Tanh)


@dataclass(frozen=True)
class ScaleInvarianceReport:
    """Whether a module forgets the scale of its weights, and which parts keep it.

    Args:
        holds: Whether the output stayed the same at every scale.
        error: Largest change of the output, relative to its largest entry.
        errors: The same for each scale.
        degrees: Degree of each submodule's output by name, `""` for the module itself; `None`
            where it is no power of the scale. `#2` marks the second call of a submodule.
        breaks: Parts that break it, with a parameter where one is at fault; empty if it holds.
    """

    holds: bool
    error: float
    errors: dict[float, float]
    degrees: dict[str, float | None]
    breaks: tuple[ScaleBreak, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each part that breaks the invariance."""
        return [dataclasses.asdict(part) for part in self.breaks]

    def __str__(self) -> str:
        """Return the finding in lines of text."""
        if self.holds:
            return f"scale invariant: the output changes by {self.error:.1e} at most"
        lines = [f"not scale invariant: the output changes by {self.error:.1e}"]
        for part in self.breaks:
            place = part.parameter or part.module or "the module itself"
            lines.append(f"- {place} ({part.kind}): {part.reason}. Use {part.remedy}.")
        return "\n".join(lines)


def check_scale_invariance(
    module: nn.Module,
    inputs: Any,
    *,
    scales: Sequence[float] = (1e-2, 1e2),
    tol: float = 1e-4,
) -> ScaleInvarianceReport:
    r"""Check that $f(c\,\theta) = f(\theta)$, and name the parts and parameters that break it.

    The module runs in evaluation mode with all its parameters multiplied by each scale; its own
    weights are left alone. Parameters that are all zero are given small random values for the
    check, since a bias would otherwise hide behind its start at 0. Parts that the module lists in
    its attribute `variant_parts`, such as `("head",)`, are not scaled. The cost is a few passes,
    with copies of all activations, so give a small input.

    Args:
        module: Any module, in float32 or float64.
        inputs: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        scales: Factors c on the weights. Range: > 0. Default 0.01 and 100.
        tol: Largest change that counts as none. Range: > 0. Default 1e-4.

    Returns:
        A `ScaleInvarianceReport`; print it.

    Raises:
        ConfigError: If an option is out of range, or the module has no parameters to scale.
        DataError: If the output is not finite, or holds no floating tensor.

    Example:
        >>> from gossamer.layers import ExactNorm
        >>> good = nn.Sequential(nn.Linear(4, 8, bias=False), ExactNorm(8))
        >>> check_scale_invariance(good, torch.ones(2, 4)).holds
        True
        >>> bad = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), ExactNorm(8))
        >>> check_scale_invariance(bad, torch.ones(2, 4)).breaks[0].parameter
        '2.bias'

    Source: definition of Li et al., *Robust Training of Neural Networks Using Scale Invariant
        Architectures*, ICML 2022, section 2.
    Deviations: degrees are measured, the paper derives them by rules.
    """
    check_range(tol, "tol", low=0.0, open_low=True)
    if not scales:
        raise ConfigError("scales must hold at least one factor; got none. Give (0.01, 100).")
    for scale in scales:
        check_range(scale, "scales", low=0.0, open_low=True)
    weights, given = _scaled_weights(module), _arguments(inputs)
    with _evaluating(module):
        base = _output(module, given, weights, 1.0)
        errors = {
            float(scale): _change(base, _output(module, given, weights, scale, strict=False))
            for scale in scales
        }
        calls = measure_calls(module, given, weights)
        holds = max(errors.values()) <= tol
        breaks = () if holds else tuple(find_breaks(calls, weights))
    degrees = {call.label: call.degree for call in calls}
    return ScaleInvarianceReport(holds, max(errors.values()), errors, degrees, breaks)


def homogeneity_degrees(module: nn.Module, inputs: Any) -> dict[str, float]:
    r"""Return how the output of each submodule grows with the scale of all weights.

    A tensor is of degree k if it becomes $c^k$ times itself when every weight is multiplied by c.
    Degrees are measured from two passes, weights as they are and weights divided by 32. Parts in
    `module.variant_parts` are not scaled.

    Args:
        module: Any module, in float32 or float64.
        inputs: As in `check_scale_invariance`.

    Returns:
        Degree by name of the submodule, in the order in which calls end; `""` is the module.

    Raises:
        UnsupportedError: If a part has no degree; the message names it.
        ConfigError: If the module has no parameters to scale.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
        >>> homogeneity_degrees(net, torch.randn(3, 4))
        {'0': 1.0, '1': 1.0, '2': 2.0, '': 2.0}

    Source: Li et al., ICML 2022, section 2 and appendix on homogeneity.
    Deviations: measured instead of derived.
    """
    weights, given = _scaled_weights(module), _arguments(inputs)
    with _evaluating(module):
        calls = measure_calls(module, given, weights)
        breaks = find_breaks(calls, weights) if any(c.degree is None for c in calls) else []
    if breaks:
        part = breaks[0]
        raise UnsupportedError(
            f"every part must have a degree; got none for {part.module or 'the module itself'!r} "
            f"({part.kind}): {part.reason}. Use {part.remedy}; check_scale_invariance lists all "
            "such parts."
        )
    return {call.label: call.degree for call in calls if call.degree is not None}


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of the scale-invariant part, and the rest, for two optimisers.

    The module says which parts are not invariant in its attribute `variant_parts`, a tuple of
    names of submodules; `ScaleInvariantTransformer` has `("head",)`. Set it on a module of your
    own. All other parameters are of the invariant part, biases and gains included.

    Args:
        module: With the attribute `variant_parts`.

    Raises:
        ConfigError: If the attribute is missing or names no submodule, or a parameter is in both.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.LayerNorm(8, eps=0.0))
        >>> _ = net.add_module("head", nn.Linear(8, 2))
        >>> net.variant_parts = ("head",)
        >>> [len(group) for group in split_parameters(net)]
        [3, 2]

    Source: Li et al., ICML 2022, section 5: the head has an optimiser of its own.
    Deviations: none
    """
    parts = getattr(module, "variant_parts", None)
    if not isinstance(parts, (tuple, list)):
        raise ConfigError(
            "module must say which of its parts are not scale invariant; got no attribute "
            "variant_parts. Set module.variant_parts = ('head',), or () if all are invariant."
        )
    names = dict(module.named_modules())
    for part in parts:
        if part not in names:
            raise ConfigError(
                f"variant_parts must name submodules; got {part!r}. Known: {sorted(names)[1:]}."
            )
    invariant: dict[int, tuple[str, nn.Parameter]] = {}
    rest: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        group = rest if _belongs(name, parts) else invariant
        group.setdefault(id(parameter), (name, parameter))
    for key in invariant.keys() & rest.keys():
        raise ConfigError(
            f"the invariant part and the rest must not share a parameter; got {rest[key][0]} = "
            f"{invariant[key][0]}. Give the head weights of its own."
        )
    for name, part in names.items():
        if isinstance(part, _SUSPECTS) and not _belongs(name, parts):
            warnings.warn(
                f"{name or 'the module'} is a {type(part).__name__}, which no scale-invariant part "
                "can hold. Run check_scale_invariance, or list it in variant_parts.",
                UserWarning,
                stacklevel=2,
            )
    return [p for _, p in invariant.values()], [p for _, p in rest.values()]


def _belongs(name: str, parts: Sequence[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _scaled_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return what is scaled, by name, with random values in place of all-zero parameters."""
    parts = getattr(module, "variant_parts", ())
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point() or _belongs(name, parts):
            continue
        weight = parameter.detach()
        if not bool(weight.any()):
            weight = 0.02 * torch.randn(weight.shape, generator=generator).to(weight)
        weights[name] = weight
    if not weights:
        raise ConfigError(
            "module must have parameters to scale; got none. Give a module with weights that "
            "variant_parts does not name."
        )
    return weights


def _arguments(inputs: Any) -> Inputs:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _output(
    module: nn.Module,
    inputs: Inputs,
    weights: Mapping[str, Tensor],
    factor: float,
    *,
    strict: bool = True,
) -> list[Tensor]:
    found = list(tensors(run_scaled(module, inputs, weights, factor)))
    if strict and not found:
        raise DataError("the module must return a floating tensor; got none. Check inputs.")
    if strict and not all(bool(torch.isfinite(tensor).all()) for tensor in found):
        raise DataError(
            "the output must be finite at the weights as they are; got NaN or infinity. Check "
            "inputs and weights."
        )
    return found


def _change(one: list[Tensor], two: list[Tensor]) -> float:
    gaps = [
        float((b - a).abs().max() / a.abs().max().clamp(min=torch.finfo(a.dtype).tiny))
        for a, b in zip(one, two, strict=True)
        if a.numel()
    ]
    worst = max(gaps, default=0.0)
    return math.inf if any(math.isnan(gap) for gap in gaps) else worst


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and each part back afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
