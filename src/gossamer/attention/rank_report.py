"""Ranks of attention in a model of one's own, head by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.attention._sdpa_calls import AttentionCall, CallWatcher, check_can_watch
from gossamer.attention.head_size import attention_rank
from gossamer.measures.variance import call_model, evaluating

__all__ = ["HeadRankReport", "rank_report"]


@dataclass(frozen=True)
class HeadRankReport:
    """Head size and ranks of each layer and head, means over the samples.

    Args:
        layers: Name of the module -> figures by name, one number for each head: `logit_rank`,
            `logit_effective_rank`, `weight_rank`, `weight_effective_rank`.
        head_dims: Name of the module -> width of its heads.
        lengths: Name of the module -> keys that its queries met.
    """

    layers: dict[str, dict[str, list[float]]]
    head_dims: dict[str, int]
    lengths: dict[str, int]

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each layer and head."""
        return [
            {
                "layer": layer,
                "head": head,
                "head_dim": self.head_dims[layer],
                "length": self.lengths[layer],
                **{name: values[head] for name, values in figures.items()},
            }
            for layer, figures in self.layers.items()
            for head in range(len(figures["logit_rank"]))
        ]

    def narrow(self) -> list[str]:
        """Return the layers whose heads are narrower than `length - 1`."""
        return [name for name in self.layers if self.head_dims[name] < self.lengths[name] - 1]


@torch.no_grad()
def rank_report(model: nn.Module, batch: Any, *, tol: float = 1e-3) -> HeadRankReport:
    """Measure the ranks of logits and weights of every head on one batch.

    Args:
        model: Any module that calls PyTorch's `scaled_dot_product_attention`, such as the models of
            this library and those of transformers with `attn_implementation="sdpa"`.
        batch: What the model is called with: a tensor, keywords, a batch of a task, or a tuple.
        tol: As in `attention_rank`. Default 1e-3.

    Raises:
        UnsupportedError: If no attention could be seen; the message names the classes.

    Example:
        >>> from gossamer.attention import MultiHeadAttention
        >>> report = rank_report(MultiHeadAttention(16, 4), torch.randn(1, 12, 16))
        >>> max(report.layers[""]["logit_rank"]) <= 4
        True

    Source: Bhojanapalli et al., *Low-Rank Bottleneck in Multi-head Attention Models*, ICML 2020.
    Deviations: ranks are of the logits without an additive mask; the paper measures none.
    """
    check_can_watch(model)
    found: dict[str, list[dict[str, Tensor]]] = {}
    sizes: dict[str, tuple[int, int]] = {}

    def see(call: AttentionCall) -> None:
        mask, bias = call.bias, None
        if mask is not None and mask.dtype != torch.bool:
            scores = call.scores(0, call.q.shape[2], torch.zeros_like(call.q), call.k * 0)
            mask, bias = scores.isfinite(), scores.nan_to_num(neginf=0.0)
        if call.causal:
            length, keys = call.q.shape[2], call.k.shape[2]
            triangle = torch.ones(length, keys, dtype=torch.bool, device=call.q.device).tril()
            mask = triangle if mask is None else mask & triangle
        q = call.q * (call.scale * call.q.shape[-1] ** 0.5)
        report = attention_rank(q, call.k, mask, bias=bias, tol=tol)
        found.setdefault(call.layer, []).append(
            {name: value.double().mean(0) for name, value in vars(report).items()}
        )
        sizes[call.layer] = (call.q.shape[-1], call.k.shape[2])

    watcher = CallWatcher(model, see)
    with evaluating(model):
        watcher.start()
        try:
            call_model(model, batch)
        finally:
            watcher.stop()
    watcher.check()
    layers = {
        layer: {
            name: torch.stack([one[name] for one in calls]).mean(0).tolist() for name in calls[0]
        }
        for layer, calls in found.items()
    }
    return HeadRankReport(
        layers,
        {layer: size[0] for layer, size in sizes.items()},
        {layer: size[1] for layer, size in sizes.items()},
    )
