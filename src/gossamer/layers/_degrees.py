"""Degrees of homogeneity by measurement: one run as it is, one with weights divided by 32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Call", "Inputs", "ScaleBreak", "find_breaks", "measure_calls", "run_scaled", "tensors"]

# a power of two: a true power law shows without rounding; small, so that an epsilon shows too
_FACTOR = 2.0**-5
_TOL = 1e-4
_MOST_CANDIDATES = 32

# what to use in place of a part, by the name of its class
_NORM, _RELU = "ExactNorm, which has no epsilon", "ReLU"
_REMEDIES = {
    **dict.fromkeys(("LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm1d"), _NORM),
    **dict.fromkeys(("BatchNorm1d", "BatchNorm2d"), "ExactNorm, which keeps no statistics"),
    **dict.fromkeys(("GELU", "SiLU", "Mish", "ELU", "Softplus", "Tanh", "Sigmoid"), _RELU),
    "Softmax": "ReLU of the scores divided by their sum, as in ScaleInvariantAttention",
    **dict.fromkeys(("MultiheadAttention", "MultiHeadAttention"), "ScaleInvariantAttention"),
}
_ANY = "sums of equal degree, ReLU, linear maps without bias, ratios, ExactNorm"

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a module."""


@dataclass(frozen=True)
class ScaleBreak:
    """One part of a module that keeps its output from being a power of the scale of its weights.

    Args:
        module: Name of the part; `""` for the module itself.
        kind: Name of its class.
        parameter: Full name of the parameter that breaks it, or `""` where none alone does.
        reason: What was seen.
        remedy: What to use in its place.
        measured: False for a part that stands behind another break and is known by its class only.

    Example:
        >>> ScaleBreak("act", "GELU", "", "not a power", "ReLU").module
        'act'
    """

    module: str
    kind: str
    parameter: str
    reason: str
    remedy: str
    measured: bool = True


@dataclass(frozen=True)
class Call:
    """One call of a submodule, in both runs.

    Args:
        name: Name of the submodule.
        number: 1 for its first call, 2 for its second.
        module: The submodule.
        inputs: What it got in the second run.
        output: Floating tensors that it returned in the first run.
        input_degrees: Of its floating inputs; `None` for one without.
        degree: Of its output, or `None`.
    """

    name: str
    number: int
    module: nn.Module
    inputs: Inputs
    output: list[Tensor]
    input_degrees: tuple[float | None, ...]
    degree: float | None

    @property
    def label(self) -> str:
        """Name, with `#2` and so on from the second call on."""
        return self.name if self.number == 1 else f"{self.name}#{self.number}"


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors(vars(value))


def run_scaled(
    module: nn.Module, inputs: Inputs, weights: Mapping[str, Tensor], factor: float
) -> Any:
    """Call a module with a multiple of `weights` as its parameters of these names."""
    replaced = {name: weight * factor for name, weight in weights.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.func.functional_call(module, replaced, *inputs)


def measure_calls(module: nn.Module, inputs: Inputs, weights: Mapping[str, Tensor]) -> list[Call]:
    """Return every call inside a module with its degrees, in the order in which calls end."""
    first = _record(module, inputs, weights, 1.0)
    second = _record(module, inputs, weights, _FACTOR)
    calls: list[Call] = []
    counts: dict[str, int] = {}
    for (name, part, given, output), (_, _, scaled_given, scaled_output) in zip(
        first, second, strict=True
    ):
        counts[name] = counts.get(name, 0) + 1
        pairs = zip(tensors(given), tensors(scaled_given), strict=True)
        degrees = tuple(_degree(a, b) for a, b in pairs)
        values = list(tensors(output))
        found = _common(values, list(tensors(scaled_output)))
        calls.append(Call(name, counts[name], part, scaled_given, values, degrees, found))
    return calls


def find_breaks(calls: Sequence[Call], weights: Mapping[str, Tensor]) -> list[ScaleBreak]:
    """Return the innermost parts whose inputs have degrees and whose output has none.

    Behind such a part nothing can be measured; what is known to break by its class is listed too.
    If all parts have degrees but the output is not of degree 0, the last part that leaves degree 0
    is named.
    """
    breaks: list[ScaleBreak] = []
    for call in calls:
        below = f"{call.name}." if call.name else ""
        if call.degree is not None or any(
            part.module == call.name or part.module.startswith(below) for part in breaks
        ):
            continue
        if None not in call.input_degrees:
            breaks.append(_explain(call, calls, weights))
        elif (kind := type(call.module).__name__) in _REMEDIES:
            reason = f"{kind} does not keep degrees; it stands behind another such part"
            breaks.append(ScaleBreak(call.name, kind, "", reason, _REMEDIES[kind], measured=False))
    return breaks or _rises(calls, weights)


def _record(
    module: nn.Module, inputs: Inputs, weights: Mapping[str, Tensor], factor: float
) -> list[tuple[str, nn.Module, Inputs, Any]]:
    seen: list[tuple[str, nn.Module, Inputs, Any]] = []

    def watch(name: str, part: nn.Module) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.append((name, part, _kept((args, kwargs)), _kept(output)))

        return part.register_forward_hook(hook, with_kwargs=True)

    hooks = [watch(name, part) for name, part in module.named_modules()]
    try:
        run_scaled(module, inputs, weights, factor)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _kept(value: Any) -> Any:
    """Return nested values with tensors copied, so that work in place does not change them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_kept(item) for item in value)
    return value


def _degree(one: Tensor, two: Tensor) -> float | None:
    """Return k such that `two` is `one` times the factor to the power k, if there is one."""
    if one.shape != two.shape:
        return None
    if torch.equal(one, two):
        return 0.0
    one, two = one.double(), two.double()
    ratio = float(two.norm() / one.norm())
    if not 0.0 < ratio < math.inf:
        return None
    power = math.log(ratio) / math.log(_FACTOR)
    power = float(round(power)) if abs(power - round(power)) < 0.01 else power
    gap = (two - one * _FACTOR**power).norm()
    return power if bool(gap <= _TOL * two.norm()) else None


def _common(one: list[Tensor], two: list[Tensor]) -> float | None:
    """Return the degree of the first output, if all outputs have one; 0 for none."""
    if len(one) != len(two):
        return None
    degrees = [_degree(a, b) for a, b in zip(one, two, strict=True)]
    return None if None in degrees else (degrees or [0.0])[0]


def _explain(call: Call, calls: Sequence[Call], weights: Mapping[str, Tensor]) -> ScaleBreak:
    kind = type(call.module).__name__
    eps = getattr(call.module, "eps", None)
    got = ", ".join(f"{degree:g}" for degree in call.input_degrees if degree is not None)
    seen = f"inputs of degree {got or 0} give an output without one"
    if kind in _REMEDIES:
        reason = f"eps = {eps} does not scale: {seen}" if eps else f"{kind}: {seen}"
        return ScaleBreak(call.name, kind, "", reason, _REMEDIES[kind])
    below = f"{call.name}." if call.name else ""
    own = {n.removeprefix(below): w for n, w in weights.items() if n.startswith(below)}
    found = _wrong_parameter(call, own)
    if found:
        name, power = found
        reason = f"{below}{name} counts with degree 1 where {power} is needed: {seen}"
        return ScaleBreak(call.name, kind, f"{below}{name}", reason, f"{_ANY}; no {name} here")
    inside = [
        f"{other.name.removeprefix(below)} {other.degree:g}"
        for other in calls
        if other.name.startswith(below) and other is not call and other.degree is not None
    ]
    reason = f"the code of {kind} itself: {seen}"
    if inside:
        reason += f"; degrees inside: {', '.join(inside[-6:])}"
    return ScaleBreak(call.name, kind, "", reason, _ANY)


def _wrong_parameter(call: Call, own: Mapping[str, Tensor]) -> tuple[str, int] | None:
    """Return the parameter that would have to scale by another power, and that power."""
    for name in sorted(own, key=lambda n: own[n].numel())[:_MOST_CANDIDATES]:
        # a matrix that should not scale at all is the sign of a function behind it, as GELU
        for power in (2, 3, 4, -1, 0) if own[name].dim() < 2 else (2, 3, 4):
            tried = {**own, name: own[name] * _FACTOR ** (power - 1)}
            output = run_scaled(call.module, call.inputs, tried, _FACTOR)
            if _common(call.output, list(tensors(output))) is not None:
                return name, power
    return None


def _rises(calls: Sequence[Call], weights: Mapping[str, Tensor]) -> list[ScaleBreak]:
    """Return the last part that takes degree 0 and gives another, if the output is not of 0."""
    if not calls or not calls[-1].degree:
        return []
    for call in reversed(calls):
        own = [n for n, _ in call.module.named_parameters(recurse=False)]
        names = [name for n in own if (name := f"{call.name}.{n}".lstrip(".")) in weights]
        if names and call.degree and not any(call.input_degrees):
            reason = (
                f"the output is of degree {calls[-1].degree:g}; this is the last part that takes "
                f"degree 0 and gives {call.degree:g}"
            )
            remedy = "an ExactNorm behind it, or leave it out of the invariant part"
            kind = type(call.module).__name__
            return [ScaleBreak(call.name, kind, names[0], reason, remedy)]
    return []
