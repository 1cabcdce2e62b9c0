"""Baselines of the Spark recipe: sparsity without a predictor, and the dense bytes per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.attention import StatisticalTopK
from gossamer.layers import ACTIVATIONS, FeedForward, GatedFeedForward, SparkFeedForward
from gossamer.layers import _spark_kernels as kernels

__all__ = ["ExactTopK", "GateTopK", "SquaredRelu", "decode_runs"]

_GELU = ACTIVATIONS["gelu_tanh"]


class ExactTopK(FeedForward):
    """A plain GELU block that keeps the k largest scores of each token, found by sorting.

    Args:
        dim: Model width.
        hidden_dim: Hidden units.
        k: Units kept.
    """

    def __init__(self, dim: int, hidden_dim: int, k: int) -> None:
        super().__init__(dim, hidden_dim)
        self.k = k

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden values, 0 where a unit is dropped."""
        scores = self.up(x)
        values, units = scores.topk(self.k, dim=-1)
        return torch.zeros_like(scores).scatter(-1, units, _GELU(values))


class GateTopK(GatedFeedForward):
    """A gated block whose gate passes statistical top-k, as in the released Gemma 3n.

    Args:
        dim: Model width.
        hidden_dim: Hidden units.
        k: Share of the gate that is kept.
    """

    def __init__(self, dim: int, hidden_dim: int, k: float) -> None:
        super().__init__(dim, hidden_dim)
        self.top_k = StatisticalTopK(k)

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden values, 0 where a unit is dropped."""
        return _GELU(self.top_k(self.gate(x))) * self.up(x)  # type: ignore[no-any-return]


class SquaredRelu(FeedForward):
    """A plain block with the square of ReLU, which leaves many units at 0 by itself."""

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden values."""
        return torch.relu(self.up(x)).square()


def decode_runs(
    dim: int, hidden_dim: int, predictor_dim: int, k: int, dtype: torch.dtype
) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """Return runs of one token through dense routes and through Spark's, fresh input each.

    Args:
        dim: Model width.
        hidden_dim: Of the Spark layer; the dense block has two thirds, as many parameters.
        predictor_dim: As in `SparkFeedForward`.
        k: Active units.
        dtype: Of weights and inputs.
    """
    gated = GatedFeedForward(dim, 2 * hidden_dim // 3, activation="gelu_tanh").to(dtype).eval()
    spark = SparkFeedForward(dim, hidden_dim, predictor_dim=predictor_dim, k=k).to(dtype).eval()
    engines = ["torch", *(["numba"] if dtype == torch.float32 else [])]
    dense: dict[str, Any] = {"dense, torch": gated}
    if kernels.can_compile():
        engines.append("cpp")
        dense["dense, cpp"] = _dense_by_kernel(gated)
    sparse = {f"Spark, {engine}": spark.pack(engine=engine) for engine in engines}

    def runs(layers: dict[str, Any]) -> dict[str, Callable[[], Any]]:
        return {name: _run(layer, dim, dtype) for name, layer in layers.items()}

    return runs(dense), runs(sparse)


def _run(layer: Callable[[Tensor], Tensor], dim: int, dtype: torch.dtype) -> Callable[[], Any]:
    def run() -> Tensor:
        with torch.no_grad():
            return layer(torch.randn(1, dim).to(dtype))

    return run


def _dense_by_kernel(gated: GatedFeedForward) -> Callable[[Tensor], Tensor]:
    """Return the dense block on the compiled loops, the best dense route in bfloat16."""
    library = kernels.compiled()
    gate, up, down = (getattr(gated, name).weight.detach() for name in ("gate", "up", "down"))

    def layer(x: Tensor) -> Tensor:
        token = x[0]
        hidden = _GELU(library.matvec(gate, token)) * library.matvec(up, token)
        return library.matvec(down, hidden.to(x.dtype)).to(x.dtype)[None]

    return layer
