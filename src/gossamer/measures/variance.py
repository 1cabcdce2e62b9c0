"""How much attention outputs vary over inputs, by length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError, DataError, UnsupportedError

__all__ = ["VarianceReport", "variance_report"]

_PROJECTIONS = ("to_out", "o_proj", "out_proj", "out_norm")
_IN_ATTENTION = "c_proj"
_ENDING = "attention.output.dense"


@dataclass(frozen=True)
class VarianceReport:
    """Standard deviations of attention outputs over inputs, and how they fall with length.

    Args:
        stds: By module and length, the root of the mean variance over the components.
        slopes: By module, the slope of log std against log length: -1/2 for averages of
            independent values, 0 where the length does not matter, NaN with one length only.
        num_samples: Inputs at each length.

    Example:
        >>> report = VarianceReport({"to_out": {4: 0.5, 16: 0.25}}, {"to_out": -0.5}, {4: 9, 16: 9})
        >>> report.rows()[0]
        {'module': 'to_out', 'length': 4, 'std': 0.5, 'num_samples': 9}
    """

    stds: Mapping[str, Mapping[int, float]]
    slopes: Mapping[str, float]
    num_samples: Mapping[int, int]

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each module and length."""
        return [
            {"module": name, "length": length, "std": std, "num_samples": self.num_samples[length]}
            for name, by_length in self.stds.items()
            for length, std in by_length.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "stds": {name: dict(by_length) for name, by_length in self.stds.items()},
            "slopes": dict(self.slopes),
            "num_samples": dict(self.num_samples),
        }


def variance_report(
    model: nn.Module, batches: Iterable[Any], *, modules: Sequence[str] | None = None
) -> VarianceReport:
    r"""Measure how much attention outputs vary over inputs, for inputs of several lengths.

    For independent items and values of mean zero, attention that spreads over N items averages
    them, so that each component of its output has a variance that falls with N. What comes after it
    then meets smaller numbers than in training. (Where queries differ from input to input, the part
    of the output that follows the query remains.) The output at the last place is measured, which
    sees the whole sequence also in a causal model: before the output projection, and where a model
    of this library has a norm of attention outputs (`out_norm`), before and after that.

    The module sees each batch once, without gradients, in evaluation mode. One slice of each
    attention output is kept, so memory does not grow with the length.

    Args:
        model: A `Decoder`, an `Encoder`, a Hugging Face model, or any module that calls its output
            projections as modules.
        batches: What the model is called with: a tensor, a tuple of arguments, a mapping of
            keywords, or an object with `tokens` and `position_ids`. All inputs of a batch have one
            length, without padding; several batches may share a length.
        modules: Names of the modules whose input is measured, whole or their ends, as in
            `model.named_modules()`. Default: `to_out`, `o_proj`, `out_proj`, `out_norm`,
            `attention.output.dense`, and `c_proj` in an attention; those that are not called, and
            norms that do nothing, are left out.

    Raises:
        ConfigError: If a name in `modules` fits none.
        DataError: If there is no batch, or a length has fewer than 2 inputs.
        UnsupportedError: If no module can be measured, as in `nn.MultiheadAttention`.

    Example:
        >>> from gossamer.attention import MultiHeadAttention
        >>> uniform = MultiHeadAttention(16, 2)
        >>> _ = nn.init.zeros_(uniform.to_q.weight)
        >>> draw = torch.Generator().manual_seed(0)
        >>> batches = [torch.randn(64, n, 16, generator=draw) for n in (8, 32, 128)]
        >>> round(variance_report(uniform, batches).slopes["to_out"], 1)
        -0.5

    Source: Li et al., *On Vanishing Variance in Transformer Length Generalization*, 2025, figure 1.
    Deviations: the mean over all components (authors: one fixed component).
    """
    chosen = _chosen(model, modules)
    sums = {name: _Sums() for name in chosen}
    count = 0
    with _hooked(chosen, sums), evaluating(model), torch.no_grad():
        for batch in batches:
            call_model(model, batch)
            count += 1
    if not count:
        raise DataError("batches must hold at least one batch; got none. Add some.")
    silent = [name for name, seen in sums.items() if not seen.counts]
    if len(silent) == len(sums):
        raise UnsupportedError(
            f"the model must call its output projections as modules; {silent[0]} and "
            f"{len(silent) - 1} others were never called. Name other modules in `modules`."
        )
    measured = {name: seen.stds() for name, seen in sums.items() if seen.counts}
    first = next(seen for seen in sums.values() if seen.counts)
    slopes = {name: _slope(by_length) for name, by_length in measured.items()}
    return VarianceReport(measured, slopes, dict(sorted(first.counts.items())))


@dataclass
class _Sums:
    """Running sums over inputs, by length: of the components, and of their squares."""

    counts: dict[int, int] = field(default_factory=dict)
    totals: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def add(self, x: Tensor) -> None:
        """Add attention outputs, `(B, ..., T, D)`: their last place."""
        length = x.shape[-2]
        last = x[..., -1, :].reshape(len(x), -1).double()
        # about the first input, so that a large common mean does not eat the digits
        shift = self.totals[length][2] if length in self.totals else last[0].clone()
        moved = last - shift
        one, two = moved.sum(0), moved.square().sum(0)
        if length in self.totals:
            one, two = one + self.totals[length][0], two + self.totals[length][1]
        self.totals[length] = (one, two, shift)
        self.counts[length] = self.counts.get(length, 0) + len(x)

    def stds(self) -> dict[int, float]:
        """Return the root of the mean variance over components, by length."""
        found = {}
        for length, (one, two, _) in sorted(self.totals.items()):
            n = self.counts[length]
            if n < 2:
                raise DataError(
                    f"batches must hold at least 2 inputs of each length; got {n} of length "
                    f"{length}. Add inputs."
                )
            variance = (two - one.square() / n) / (n - 1)
            found[length] = math.sqrt(max(float(variance.mean()), 0.0))
        return found


def _chosen(model: nn.Module, modules: Sequence[str] | None) -> dict[str, nn.Module]:
    named = dict(model.named_modules())
    if modules is not None:
        found = {}
        for wanted in modules:
            fitting = [n for n in named if n == wanted or n.endswith("." + wanted)]
            if not fitting:
                raise ConfigError(
                    f"modules must be names of the model's modules or their ends; {wanted!r} fits "
                    "none. See model.named_modules()."
                )
            found.update({name: named[name] for name in fitting})
        return found
    hidden = {
        f"{name}.out_proj".lstrip(".")
        for name, module in named.items()
        if isinstance(module, nn.MultiheadAttention)
    }
    found = {
        name: module
        for name, module in named.items()
        if name not in hidden and _is_projection(name) and not isinstance(module, nn.Identity)
    }
    if not found:
        reason = (
            "nn.MultiheadAttention applies its output projection without calling it as a module"
            if hidden
            else "no module has a name that is known for it"
        )
        raise UnsupportedError(
            f"the model must call the output projections of its attention as modules; {reason}. "
            "Name the modules whose input is to be measured in `modules`."
        )
    return found


def _is_projection(name: str) -> bool:
    parent, _, last = name.rpartition(".")
    if last == _IN_ATTENTION:  # feed-forward blocks of GPT-2 use the name too
        return "attn" in parent or "attention" in parent
    return last in _PROJECTIONS or f".{name}".endswith("." + _ENDING)


@contextmanager
def _hooked(modules: Mapping[str, nn.Module], sums: Mapping[str, _Sums]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, module in modules.items():

            def look(_: nn.Module, inputs: tuple[Any, ...], seen: _Sums = sums[name]) -> None:
                seen.add(inputs[0])

            stack.callback(module.register_forward_pre_hook(look).remove)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Hold a model in evaluation mode, and put every module back as it was."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a tensor, keywords, a batch of a task, or positional arguments."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if hasattr(batch, "tokens"):
        return model(batch.tokens, batch.position_ids)
    return model(*batch)


def _slope(stds: Mapping[int, float]) -> float:
    """Return the least-squares slope of log std against log length."""
    if len(stds) < 2 or min(stds.values()) <= 0:
        return math.nan
    x = torch.tensor([math.log(length) for length in stds], dtype=torch.float64)
    y = torch.tensor([math.log(std) for std in stds.values()], dtype=torch.float64)
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())
