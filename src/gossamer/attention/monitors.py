"""Which attention heads round to one side in low precision: a report, and a monitor of a run."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.attention._rounding import HeadSums, query_norms
from gossamer.attention._sdpa_calls import AttentionCall, CallWatcher, check_can_watch
from gossamer.checks import check_range
from gossamer.measures.spectra import SpectralReport, spectral_report
from gossamer.measures.variance import call_model, evaluating

__all__ = ["RoundingMonitor", "RoundingReport", "rounding_report"]

# A mean error of a tenth of a bfloat16 step, far outside what independent errors give, and values
# of nearly one sign: with both signs the few values of one batch give a mean error of their own.
RISK_BIAS, RISK_Z, RISK_IMBALANCE = 0.1, 5.0, 0.9
ALARM_CHECKS, ALARM_GROWTH = 50, 2.0
MAX_TOKENS = 4096


@dataclass(frozen=True)
class RoundingReport:
    """How bfloat16 attention rounds, head by head.

    Args:
        layers: By layer and figure, one number for each head. `tied_rows`: share of rows in which
            two or more weights round to 1. `sign_imbalance`: |mean sign| of the values in their
            most one-sided feature. `bias`: mean error of the output over its mean size, in the
            feature where that is largest, in units of 2^-8; `tied_bias`: the same over tied rows
            only, `tied_bias_z` over its standard error. `largest_logit`. `q_stable_rank` and so on
            for keys and values. `query_norm`: spectral norm of the head's query weights, NaN where
            these are not found.
        spectra: By projection and `"weight"` or `"output"`, its spectrum: queries, keys, values,
            and the latents of multi-head latent attention. Empty in checks of a monitor.
        unseen: Attention modules that did not call PyTorch's attention, with their class.

    Example:
        >>> figures = {"tied_bias": [-0.4], "tied_bias_z": [-30.0], "sign_imbalance": [1.0]}
        >>> RoundingReport({"layers.1": figures}).at_risk()
        [('layers.1', 0)]
    """

    layers: Mapping[str, Mapping[str, list[float]]]
    spectra: Mapping[str, Mapping[str, SpectralReport]] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each layer and head."""
        risky = set(self.at_risk())
        return [
            {
                "layer": layer,
                "head": head,
                "at_risk": (layer, head) in risky,
                **{name: values[head] for name, values in figures.items()},
            }
            for layer, figures in self.layers.items()
            for head in range(len(figures["tied_rows"]))
        ]

    def spectral_rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each weight and output of a projection."""
        return [
            {"module": module, "what": what, **report.to_dict()}
            for module, reports in self.spectra.items()
            for what, report in reports.items()
        ]

    def at_risk(self) -> list[tuple[str, int]]:
        """Return layer and head wherever tied rows round to one side.

        That is a mean error of a tenth of a unit or more, five standard errors or more from 0, in
        a head with a feature whose values have nearly one sign (imbalance .9 or more).
        """
        names = ("tied_bias", "tied_bias_z", "sign_imbalance")
        return [
            (layer, head)
            for layer, figures in self.layers.items()
            for head, (bias, z, imbalance) in enumerate(
                zip(*(figures[name] for name in names), strict=True)
            )
            if abs(bias) >= RISK_BIAS and abs(z) >= RISK_Z and imbalance >= RISK_IMBALANCE
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "layers": {layer: dict(figures) for layer, figures in self.layers.items()},
            "spectra": {
                module: {what: report.to_dict() for what, report in reports.items()}
                for module, reports in self.spectra.items()
            },
            "unseen": list(self.unseen),
        }


def rounding_report(model: nn.Module, batch: Any) -> RoundingReport:
    r"""Say which heads of a model would round to one side in bfloat16, on one batch.

    Every call of PyTorch's attention inside the model is seen, whatever class makes it: those of
    this library, and transformers models with the usual `attn_implementation="sdpa"`. The precision
    of the model does not matter: queries, keys and values are rounded to bfloat16, and the output
    with rounded weights and a rounded product is compared with the one that is exact for the same
    numbers. One pass without gradients, in evaluation mode; it holds a block of scores in memory.

    Args:
        model: Any module that computes attention by
            `torch.nn.functional.scaled_dot_product_attention`.
        batch: What the model is called with: a tensor, keywords, a batch of a task, or a tuple.

    Raises:
        UnsupportedError: If no attention is seen; the message names the classes.

    Example:
        >>> from gossamer.attention import MultiHeadAttention
        >>> report = rounding_report(MultiHeadAttention(16, 2), torch.randn(2, 9, 16))
        >>> [row["at_risk"] for row in report.rows()]
        [False, False]

    Source: Qiu and Yao, *Why Low-Precision Transformer Training Fails*, 2025, sections 3 and 4.
    Deviations: a weight counts as tied where it rounds to 1, also when its score is a little lower.
    """
    check_can_watch(model)
    sums: dict[str, HeadSums] = {}
    watcher = CallWatcher(model, lambda call: _note(sums, call))
    outputs: dict[str, Tensor] = {}
    handles = []
    for name, module in _projections(model).items():

        def keep(_: nn.Module, inputs: Any, out: Any, name: str = name) -> None:
            outputs[name] = out.detach().flatten(0, -2)[:MAX_TOKENS]

        handles.append(module.register_forward_hook(keep))
    watcher.start()
    try:
        with evaluating(model), torch.no_grad():
            call_model(model, batch)
    finally:
        watcher.stop()
        for handle in handles:
            handle.remove()
    watcher.check()
    modules = dict(model.named_modules())
    spectra = {
        name: {
            "weight": spectral_report(modules[name].weight),
            "output": spectral_report(output),
        }
        for name, output in outputs.items()
    }
    return RoundingReport(_figures(model, sums), spectra, tuple(watcher.unseen))


class RoundingMonitor:
    r"""Watches a training run for heads that round to one side.

    On every `every`-th training pass it takes the figures of `rounding_report` (without spectra),
    and in the backward pass that follows, for each head, the error of
    $\delta = \mathrm{rowsum}(dO \circ O)$ that a rounded output would bring. Its running sum
    drifts where errors share one sign. An alarm is a head whose running sum has kept its sign for
    50 checks and whose query weights have more than twice their median spectral norm. Passes in
    between cost one comparison. The hooks sit on the module, so the monitor works under any
    training loop; call `close`, or use it in a `with` block, to remove them.

    Args:
        model: As in `rounding_report`; not compiled.
        every: Training passes between checks. Range: >= 1. Default 50.

    Raises:
        UnsupportedError: If no attention can be seen, at once or in the first checked pass; the
            message names the classes.
        ConfigError: If `every` is out of its range.

    Example:
        >>> from gossamer.attention import MultiHeadAttention
        >>> layer = MultiHeadAttention(16, 2)
        >>> with RoundingMonitor(layer, every=1) as monitor:
        ...     layer(torch.randn(2, 9, 16)).sum().backward()
        >>> monitor.alarms(), monitor.summary()["rounding/heads_at_risk"]
        ([], 0)

    Source: Qiu and Yao 2025, sections 3.3 and 3.4, figures 4 to 6.
    Deviations: the rule of the alarm is this library's; spectral norms are exact, not estimated by
        power iteration, since the products of a head's weights are small matrices.
    """

    def __init__(self, model: nn.Module, *, every: int = 50) -> None:
        check_range(every, "every", low=1, integer=True)
        check_can_watch(model)
        self.model = model
        self.every = every
        self.report: RoundingReport | None = None
        self.num_passes = 0
        self._deltas: dict[str, list[Tensor]] = {}
        self._norms: dict[str, list[list[float]]] = {}
        self._sums: dict[str, HeadSums] = {}
        self._watching = False
        self._learns = False
        self._watcher = CallWatcher(model, self._see)
        self._handles = (
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        )

    @property
    def num_checks(self) -> int:
        """How many passes have been looked at."""
        return max((len(norms) for norms in self._norms.values()), default=0)

    def running_sums(self) -> dict[str, list[list[float]]]:
        """Return for each layer and check the sums, over the checks so far, of delta's errors."""
        return {
            layer: torch.stack(deltas).cumsum(0).tolist() for layer, deltas in self._deltas.items()
        }

    def query_norms(self) -> dict[str, list[list[float]]]:
        """Return for each layer and check the spectral norm of each head's query weights."""
        return {layer: list(norms) for layer, norms in self._norms.items()}

    def alarms(self) -> list[tuple[str, int]]:
        """Return layer and head wherever the run shows the failure coming."""
        found = []
        for layer, sums in self.running_sums().items():
            norms = self._norms[layer]
            last = sums[-ALARM_CHECKS:]
            if len(last) < ALARM_CHECKS:
                continue
            for head in range(len(norms[-1])):
                drift = {math.copysign(1.0, row[head]) if row[head] else 0.0 for row in last}
                median = statistics.median(row[head] for row in norms)
                grown = norms[-1][head] > ALARM_GROWTH * median
                if grown and len(drift) == 1 and 0.0 not in drift:
                    found.append((layer, head))
        return found

    def summary(self) -> dict[str, float]:
        """Return the figures of the last check for a logger, by name; empty before the first."""
        if self.report is None:
            return {}
        rows = self.report.rows()
        return {
            "rounding/heads_at_risk": len(self.report.at_risk()),
            "rounding/alarms": len(self.alarms()),
            **{
                f"rounding/max_{name}": max(row[name] for row in rows)
                for name in ("tied_rows", "largest_logit", "query_norm")
            },
        }

    def close(self) -> None:
        """Remove the hooks; the figures stay."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> RoundingMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if not model.training or not torch.is_grad_enabled():
            return
        if self.num_passes % self.every == 0:
            self._sums = {}
            self._watching = True
            self._watcher.start()
        self.num_passes += 1

    def _see(self, call: AttentionCall) -> None:
        first = call.layer not in self._sums
        error = _note(self._sums, call, keep=call.out.requires_grad)
        history = self._deltas.setdefault(call.layer, [])
        if first:
            history.append(torch.zeros(call.q.shape[1], dtype=torch.float64))
        if error is not None:
            self._learns = True
            total = history[-1]

            def add(grad: Tensor, error: Tensor = error, total: Tensor = total) -> None:
                total += (grad.double() * error).sum((0, 2, 3)).cpu()

            call.out.register_hook(add)  # type: ignore[no-untyped-call]

    def _end(self, model: nn.Module, inputs: Any, out: Any) -> None:
        if not self._watching:
            return
        self._watching = False
        self._watcher.stop()
        if out is None:  # the pass ended in an error of its own
            return
        self._watcher.check()
        layers = _figures(model, self._sums)
        for layer, figures in layers.items():
            self._norms.setdefault(layer, []).append(figures["query_norm"])
        self.report = RoundingReport(layers, unseen=tuple(self._watcher.unseen))
        if self.num_checks == 1:
            self._warn_of_blind_spots(layers)

    def _warn_of_blind_spots(self, layers: Mapping[str, Mapping[str, list[float]]]) -> None:
        """Say once where an alarm can never come."""
        unknown = [
            name or "the model itself"
            for name, one in layers.items()
            if math.isnan(one["query_norm"][0])
        ]
        if unknown:
            warnings.warn(
                f"the query weights of {', '.join(unknown)} were not found, so that no alarm can "
                "come for them; `report` and `running_sums` are right.",
                stacklevel=2,
            )
        if not self._learns:
            warnings.warn(
                "no attention output of this pass needs a gradient, as with reentrant "
                "checkpointing, so that running sums stay 0 and no alarm can come. Use "
                "use_reentrant=False.",
                stacklevel=2,
            )


def _note(sums: dict[str, HeadSums], call: AttentionCall, *, keep: bool = False) -> Tensor | None:
    return sums.setdefault(call.layer, HeadSums()).add(call, keep=keep)


def _figures(model: nn.Module, sums: Mapping[str, HeadSums]) -> dict[str, dict[str, list[float]]]:
    found = {}
    for layer, one in sums.items():
        figures = one.figures()
        figures["query_norm"] = query_norms(model.get_submodule(layer), len(figures["tied_rows"]))
        found[layer] = figures
    return found


def _projections(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with a weight matrix that sit right inside an attention module."""
    modules = dict(model.named_modules())
    found = {}
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        parent = modules[name.rpartition(".")[0]] if name else None
        inside = parent is not None and "attention" in type(parent).__name__.lower()
        if inside and isinstance(weight, Tensor) and weight.dim() == 2:
            found[name] = module
    return found
