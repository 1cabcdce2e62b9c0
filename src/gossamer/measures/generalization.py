"""All generalization measures of one network and its training set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gossamer.checks import check_choice
from gossamer.errors import ConfigError
from gossamer.measures._batches import Batches, exact_copy
from gossamer.measures._objective import Objective, folded_with
from gossamer.measures._tracers import PathTracer, SpectralTracer
from gossamer.measures.norms import frobenius_of, margin_quantile_of, margins_of, of_log
from gossamer.measures.pac_bayes import bound_of
from gossamer.measures.sharpness import climb, squared_distance

__all__ = ["MEASURES", "GeneralizationReport", "generalization_report"]

NORMS = ("l2", "l1_path", "l2_path", "spectral")
MEASURES = (*NORMS, "sharpness", "pac_bayes")
"""Names of the measures, in the order of the report."""

RADIUS, STEPS, STEP_SIZE = 5e-4, 20, 0.3
DELTA, MAX_DROP, DRAWS = 0.05, 0.1, 20


@dataclass(frozen=True)
class GeneralizationReport:
    """Measures of one network, with what is needed to read them.

    Args:
        values: By name of the measure; NaN where it is undefined.
        reasons: Why a value is NaN, by name of the measure.
        log: The four norms are natural logarithms.
        margin: The quantile of the margins that norms are divided by. Unit: logits.
        margin_quantile: Which one.
        norms: Natural logarithms of the four norms for a margin of 1, where they were asked for.
        baselines: Simple figures to compare with: `parameters`, `weight_norm`, `distance` from the
            start (NaN without a start), `inverse_margin`, `train_loss`, `train_error`.
        num_examples: Training examples.
        details: Fields of `MaxSharpness` and `PacBayesBound`, by name of the measure.
        layers: For each use of a weight its `layer`, `kind`, `units`, `frobenius` norm and
            `spectral` norm (the operator norm), where spectral was asked for.
        notes: What a reader should know, such as layers beyond the theory.

    Example:
        >>> report = GeneralizationReport({"l2": 3.5}, {}, True, 1.0, 0.05, {}, {}, 100)
        >>> report.rows()[0]
        {'measure': 'l2', 'value': 3.5, 'unit': 'ln', 'remark': ''}
    """

    values: Mapping[str, float]
    reasons: Mapping[str, str]
    log: bool
    margin: float
    margin_quantile: float
    norms: Mapping[str, float]
    baselines: Mapping[str, float]
    num_examples: int
    details: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    layers: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each measure and each simple figure."""
        found = [
            {
                "measure": name,
                "value": value,
                "unit": "ln" if self.log and name in NORMS else "",
                "remark": self.reasons.get(name, self._remark(name)),
            }
            for name, value in self.values.items()
        ]
        return found + [
            {"measure": name, "value": value, "unit": "", "remark": ""}
            for name, value in self.baselines.items()
        ]

    def _remark(self, name: str) -> str:
        known = self.details.get(name, {})
        if name == "pac_bayes" and known.get("vacuous"):
            return "vacuous: a bound of 1 or more says nothing"
        if name == "sharpness" and known:
            return f"best of {known['num_steps']} steps, a lower bound"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "values": dict(self.values),
            "reasons": dict(self.reasons),
            "log": self.log,
            "margin": self.margin,
            "margin_quantile": self.margin_quantile,
            "norms": dict(self.norms),
            "baselines": dict(self.baselines),
            "num_examples": self.num_examples,
            "details": {name: dict(known) for name, known in self.details.items()},
            "layers": [dict(layer) for layer in self.layers],
            "notes": list(self.notes),
        }


def generalization_report(
    model: nn.Module,
    loader: Any,
    *,
    measures: Sequence[str] | None = None,
    init_model: nn.Module | None = None,
    margin_quantile: float = 0.05,
    log: bool = True,
    approximate: bool = False,
    random_state: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> GeneralizationReport:
    r"""Measure the capacity that a trained classifier used, by norms, sharpness and PAC-Bayes.

    Norms are divided by the squared margin gamma, the given quantile of the margins of the training
    set:

    | name | formula |
    |---|---|
    | `l2` | (1 / gamma^2) prod 4 ||W_i||_F^2 |
    | `l1_path` | (1 / gamma^2) (sum over paths of prod |2 W_i|)^2 |
    | `l2_path` | (1 / gamma^2) sum over paths of prod 4 h_i W_i^2 |
    | `spectral` | (1 / gamma^2) prod h_i ||W_i||_2^2 |
    | `sharpness` | `max_sharpness` with its defaults |
    | `pac_bayes` | `pac_bayes_bound` with its defaults |

    The first four compare networks of one architecture; only `pac_bayes` is a number that bounds
    the error itself, and it is nearly always vacuous. Everything is computed in float64 on a copy
    in evaluation mode, with BatchNorm folded: the model and its statistics are untouched. The data
    is read once and kept in memory, so that random augmentations do not differ between measures.

    Args:
        model: Gives logits `(B, C)`; for the norms as in `path_norm`, for the others any.
        loader: The training set: batches `(x, y)`, or one pair of arrays `(x, y)`.
        measures: Names from the table. Default all.
        init_model: The model before training, for `pac_bayes` and the distance. Default none.
        margin_quantile: Which quantile of the margins is gamma: at most this share of the examples,
            rounded up, lies below it. Range: > 0 to < 1. Default 0.05.
        log: Return natural logarithms of the norms. Default true.
        approximate: Let pass layers that the theory does not cover, as `path_norm`; each is noted.
            Default false.
        random_state: Seed of the noise of `pac_bayes`. Default 0.
        on_progress: Called with the name of each measure before it is computed. Default none.

    Raises:
        ConfigError: If a measure is unknown, or a number is out of its range.
        DataError: If there are no examples, labels are no classes, or the loss is not finite.
        ShapeError: If logits, labels or `init_model` have other shapes.
        UnsupportedError: If the norms have no rule for a layer; the message names it.

    Warns:
        UserWarning: If there are fewer than 1 / margin_quantile examples.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> data = (2 * torch.eye(2).repeat(20, 1), torch.tensor([0, 1] * 20))
        >>> report = generalization_report(model, data, measures=["l2"])
        >>> round(report.values["l2"], 3)  # ln(4 * 2 / 2^2)
        0.693

    Source: Neyshabur et al., *Exploring Generalization in Deep Learning*, NIPS 2017, section 2.
    Deviations: the quantile is not stated in the paper (first author's later code: 0.05); where
        gamma is not positive the norms are NaN, with the reason; those of the parts.
    """
    if isinstance(measures, str):
        raise ConfigError(f"measures must be a list of names; got {measures!r}. Write a list.")
    names = list(MEASURES if measures is None else measures)
    for name in names:
        check_choice(name, MEASURES, "measure")
    if not names:
        raise ConfigError("measures must name at least one measure; got none. Leave it out.")
    tell = on_progress or (lambda _: None)
    tell("margins")
    copy = exact_copy(model)
    batches = Batches(loader, next(copy.parameters()).device)
    network = folded_with(copy, batches)
    margin = margin_quantile_of(margins_of(network, batches), margin_quantile)
    objective = Objective(network, batches)
    loss, error = objective.at()
    wanted = [name for name in names if name in NORMS]
    norms, layers, notes = _norms(network, batches.input_shape, wanted, approximate, tell)
    values: dict[str, float] = {}
    reasons: dict[str, str] = {}
    details: dict[str, dict[str, Any]] = {}
    if not margin > 0:
        reason = f"undefined: the margin at quantile {margin_quantile:g} is {margin:.3g}, not > 0"
        reasons = dict.fromkeys(wanted, reason)
    for name in names:
        if name in wanted:
            values[name] = (
                of_log(norms[name] - 2 * math.log(margin), log) if margin > 0 else math.nan
            )
    distance = squared_distance(objective, init_model)
    if "sharpness" in names:
        tell("sharpness")
        details["sharpness"] = climb(objective, RADIUS, STEPS, STEP_SIZE).to_dict()
        values["sharpness"] = details["sharpness"]["value"]
    if "pac_bayes" in names:
        tell("pac_bayes")
        bound = bound_of(objective, distance, DELTA, MAX_DROP, DRAWS, random_state)
        details["pac_bayes"] = bound.to_dict()
        values["pac_bayes"] = bound.bound
    return GeneralizationReport(
        values={name: values[name] for name in MEASURES if name in values},
        reasons=reasons,
        log=log,
        margin=margin,
        margin_quantile=margin_quantile,
        norms=norms,
        baselines={
            "parameters": float(sum(weight.numel() for weight in objective.start)),
            "weight_norm": math.sqrt(squared_distance(objective, None)),
            "distance": math.nan if init_model is None else math.sqrt(distance),
            "inverse_margin": 1 / margin if margin > 0 else math.nan,
            "train_loss": loss,
            "train_error": error,
        },
        num_examples=batches.num_examples,
        details=details,
        layers=layers,
        notes=notes,
    )


def _norms(
    network: nn.Module,
    input_shape: Sequence[int],
    wanted: Sequence[str],
    approximate: bool,
    tell: Callable[[str], None],
) -> tuple[dict[str, float], list[dict[str, Any]], list[str]]:
    """Return logarithms of the norms for a margin of 1, rows of layers, and notes."""
    found: dict[str, float] = {}
    layers: list[dict[str, Any]] = []
    notes: list[str] = []
    for name in wanted:
        tell(name)
        if name == "spectral":
            spectral = SpectralTracer(network, "exact", approximate=approximate)
            found[name] = 2 * spectral.run(input_shape).log_scale
            notes += spectral.notes
            layers = [
                {
                    "layer": layer.name,
                    "kind": layer.kind,
                    "units": layer.units,
                    "frobenius": float(layer.weight.norm()),
                    "spectral": layer.norm,
                }
                for layer in spectral.layers
            ]
        else:
            path = PathTracer(network, 2 if name == "l2_path" else 1, approximate=approximate)
            total = path.total(path.run(input_shape))
            found[name] = frobenius_of(path.layers) if name == "l2" else total
            notes += path.notes
    if wanted and _has_bias(network):
        notes.append("biases are left out of the norms")
    if any(isinstance(module, _BatchNorm) for module in network.modules()):
        notes.append("BatchNorm that follows no layer counts as its factors, in l2 not at all")
    return found, layers, list(dict.fromkeys(notes))


def _has_bias(network: nn.Module) -> bool:
    return any(
        name.rpartition(".")[2] == "bias" and bool(weight.any())
        for name, weight in network.named_parameters()
    )
