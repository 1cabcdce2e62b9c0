"""How many hidden units are active, layer by layer, and how well the predictor picks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import DataError, UnsupportedError
from gossamer.layers.feed_forward import FeedForward, GatedFeedForward
from gossamer.layers.spark import SparkFeedForward
from gossamer.layers.spark_decode import PackedSparkFeedForward
from gossamer.measures.variance import call_model

__all__ = ["LayerSparsity", "SparsityReport", "sparsity_report"]

_SPARK = (SparkFeedForward, PackedSparkFeedForward)
_KINDS = (*_SPARK, FeedForward, GatedFeedForward)
Layer = SparkFeedForward | PackedSparkFeedForward | FeedForward | GatedFeedForward


@dataclass(frozen=True)
class LayerSparsity:
    """Figures of one feed-forward layer, means over all tokens.

    Args:
        active: Share of the hidden units that are not 0.
        target: Share that was asked for; `None` where a layer has no target.
        skew: Third standardised moment of the scores, 0 for normal ones.
        kurtosis: Fourth standardised moment less 3, 0 for normal scores.
        recall: Share of the k units with the largest hidden value that are kept, if all were
            computed; `None` without a predictor.
    """

    active: float
    target: float | None
    skew: float
    kurtosis: float
    recall: float | None


@dataclass(frozen=True)
class SparsityReport:
    """Figures of every feed-forward layer by its name in the model.

    Args:
        layers: Name of the module -> its figures.
    """

    layers: dict[str, LayerSparsity]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each layer, for a table."""
        names = [field.name for field in fields(LayerSparsity)]
        return [
            {"layer": name, **{key: getattr(layer, key) for key in names}}
            for name, layer in self.layers.items()
        ]

    def __str__(self) -> str:
        lines = ["layer                     active  target  skew  kurtosis  recall"]
        for row in self.rows():
            numbers = [row[key] for key in ("active", "target", "skew", "kurtosis", "recall")]
            cells = "  ".join("-" if n is None else f"{n:.3f}" for n in numbers)
            lines.append(f"{row['layer']:<24}  {cells}")
        return "\n".join(lines)


@torch.no_grad()
def sparsity_report(model: nn.Module, batches: Iterable[Any]) -> SparsityReport:
    """Measure active share, shape of the scores and the predictor's recall on a user's data.

    The threshold supposes normal scores; skew and kurtosis say how far they are from that, which is
    why the active share drifts from its target.

    Args:
        model: Any module that holds `SparkFeedForward`, its packed form, `FeedForward` or
            `GatedFeedForward`, or classes derived from these that change `hidden`; its mode is
            kept. Use `model.eval()` where dropout matters.
        batches: What the model is called with: tensors, keywords, batches of a task, or tuples.

    Raises:
        UnsupportedError: If the model holds no such layer.
        DataError: If there is no batch.

    Example:
        >>> layer = SparkFeedForward(16, 400, k=0.1)
        >>> report = sparsity_report(layer, [torch.randn(64, 16)])
        >>> 0.05 < report.layers[""].active < 0.15
        True

    Source: figures as in You et al., *Spark Transformer*, NeurIPS 2025, section 4.
    Deviations: recall is ours.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, _KINDS)}
    if not found:
        raise UnsupportedError(
            "the model must hold SparkFeedForward, its packed form, FeedForward or "
            "GatedFeedForward layers; got "
            f"{type(model).__name__} without any. Replace its blocks with replace_feed_forward."
        )
    sums: dict[str, list[Tensor]] = {name: [] for name in found}
    calibrating = [m.top_k for m in found.values() if isinstance(m, _SPARK)]
    modes = [top_k.training for top_k in calibrating]
    hooks = [m.register_forward_pre_hook(_measure(m, sums[name])) for name, m in found.items()]
    try:
        for top_k in calibrating:
            top_k.eval()  # a measurement must not move a calibrated threshold
        for batch in batches:
            call_model(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for top_k, mode in zip(calibrating, modes, strict=True):
            top_k.train(mode)
    if not any(sums.values()):
        raise DataError("batches must hold at least one input; got none. Give some inputs.")
    return SparsityReport(
        {name: _summary(found[name], rows) for name, rows in sums.items() if rows}
    )


def _measure(layer: Layer, sums: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Return a hook that adds what a layer sees: tokens, active, cubes, fourth powers, hits."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        scores = layer.scores(x)
        active = layer.hidden(x) != 0
        standard = (scores - scores.mean(-1, keepdim=True)).double()
        standard /= standard.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
        hits = torch.zeros((), dtype=torch.float64)
        if isinstance(layer, _SPARK):
            whole = layer.units_of(scores, x)
            best = whole.abs().topk(layer.top_k.count_of(whole.shape[-1]), dim=-1).indices
            hits = active.gather(-1, best).double().mean(-1).sum().cpu()
        sums.append(
            torch.stack(
                [
                    torch.tensor(float(len(x)), dtype=torch.float64),
                    active.double().mean(-1).sum().cpu(),
                    standard.pow(3).mean(-1).sum().cpu(),
                    standard.pow(4).mean(-1).sum().cpu(),
                    hits,
                ]
            )
        )

    return hook


def _summary(layer: Layer, rows: list[Tensor]) -> LayerSparsity:
    tokens, active, cubes, fourths, hits = torch.stack(rows).sum(0).tolist()
    target = None
    if isinstance(layer, _SPARK):
        units = layer.rows if isinstance(layer, PackedSparkFeedForward) else layer.up.weight
        size = len(units)
        target = layer.top_k.count_of(size) / size
    return LayerSparsity(
        active=active / tokens,
        target=target,
        skew=cubes / tokens,
        kurtosis=fourths / tokens - 3,
        recall=None if target is None else hits / tokens,
    )
