"""Spark feed-forward for decoding: only the rows of active units are read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.attention import StatisticalTopK
from gossamer.checks import check_choice, check_shape
from gossamer.errors import ConfigError, DtypeError, UnsupportedError
from gossamer.layers import _spark_kernels as kernels
from gossamer.layers.feed_forward import ACTIVATIONS
from gossamer.layers.spark import SparkFeedForward

__all__ = ["PackedSparkFeedForward"]

ENGINES = ("auto", "torch", "numba", "cpp")
# With more tokens the union of their active units is most of the layer, and one product of
# matrices is faster than a gather for each token.
MAX_TOKENS = 8


class PackedSparkFeedForward(nn.Module):
    """The decoding form of `SparkFeedForward`: gathers the rows of the active units.

    Weights are copied: one contiguous row for each hidden unit holds what it reads of the input and
    what it adds to the output. Up to 8 tokens go one by one through the gather; more, as in a
    prompt, go through dense products with the same result.

    Args:
        module: The layer to pack; later changes of its weights make this copy out of date.
        engine: What gathers: `"torch"` (`index_select`, any device and dtype), `"numba"` (float32
            on the CPU), `"cpp"` (float32 and bfloat16 on the CPU; built at the first call, needs a
            C++ compiler and ninja), or `"auto"`: cpp where it can be
            built, else numba for float32 on a CPU, else torch. Default `"auto"`.

    Shape:
        - input and output: `(..., dim)`.

    Raises:
        ShapeError: If x has another width.
        DtypeError: If x has another dtype than the weights, or is on another device.
        ConfigError: If the engine is unknown, or the weights of `module` changed since packing.
        UnsupportedError: If called in training mode or with a gradient asked for, or if the engine
            cannot run here.

    Example:
        >>> packed = SparkFeedForward(8, 48, k=4).pack(engine="torch")
        >>> with torch.no_grad():
        ...     packed(torch.ones(1, 8)).shape
        torch.Size([1, 8])

    Source: You et al., *Spark Transformer*, NeurIPS 2025, section 2.
    Deviations: none
    """

    predictor: Tensor
    rows: Tensor

    def __init__(self, module: SparkFeedForward, *, engine: str = "auto") -> None:
        super().__init__()
        check_choice(engine, ENGINES, "engine")
        self.engine = engine
        self.activation = module.activation
        self.predictor_dim = module.predictor_dim
        self.dim = module.down.out_features
        self.top_k: StatisticalTopK = _copy_of(module.top_k)
        predictor = module.predictor.weight.detach()
        self.register_buffer("predictor", predictor.clone(memory_format=torch.contiguous_format))
        # what a unit needs stands in one row: one stretch of memory for each active unit
        rows = torch.cat((module.up.weight.detach(), module.down.weight.detach().T), dim=1)
        self.register_buffer("rows", rows.contiguous())
        tensors = (*module.parameters(), *module.buffers())
        self._source = [(weakref.ref(t), t._version) for t in tensors]
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to the last axis."""
        self._check(x)
        tokens = x.reshape(-1, x.shape[-1])
        if len(tokens) > MAX_TOKENS:
            return (self.hidden(tokens) @ self.down).view(x.shape)
        gather, matvec = self._route()
        out = torch.empty_like(tokens)
        for row, token in zip(out, tokens, strict=True):
            scores = matvec(self.predictor, token[: self.predictor_dim].contiguous())
            units, active = self.top_k.select(scores)
            weights = ACTIVATIONS[self.activation](active)
            row.copy_(gather(units, weights, self.rows, token[self.predictor_dim :].contiguous()))
        return out.view(x.shape)

    @property
    def up(self) -> Tensor:
        """The part of each row that meets the rest of the input, `(hidden_dim, dim - r)`."""
        return self.rows[:, : -self.dim]

    @property
    def down(self) -> Tensor:
        """The part of each row that makes the output, `(hidden_dim, dim)`."""
        return self.rows[:, -self.dim :]

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden units of many tokens, `(..., hidden_dim)`, by dense products."""
        return self.units_of(self.top_k(self.scores(x)), x)

    def scores(self, x: Tensor) -> Tensor:
        """Return the predictor's scores of many tokens, `(..., hidden_dim)`."""
        return x[..., : self.predictor_dim] @ self.predictor.T

    def units_of(self, scores: Tensor, x: Tensor) -> Tensor:
        """Return the hidden units for given scores of an input; of all of them, none is dropped."""
        return ACTIVATIONS[self.activation](scores) * (x[..., self.predictor_dim :] @ self.up.T)

    def _route(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Return the gather and the product with the predictor's rows."""
        dtype, cpu = self.rows.dtype, self.rows.device.type == "cpu"
        engine = self.engine
        if engine == "auto":
            fallback = "numba" if cpu and dtype == torch.float32 else "torch"
            compiles = cpu and dtype in (torch.float32, torch.bfloat16) and kernels.can_compile()
            engine = "cpp" if compiles else fallback
        runs = {"torch": None, "numba": [torch.float32], "cpp": [torch.float32, torch.bfloat16]}
        dtypes = runs[engine]
        if dtypes is not None and not (cpu and dtype in dtypes):
            raise UnsupportedError(
                f"the engine {engine!r} runs on a CPU in {' and '.join(map(str, dtypes))}; got "
                f"{dtype} on {self.rows.device}. Use engine='torch'."
            )
        if engine == "numba":
            return kernels.gather_numba, torch.mv
        if engine == "cpp":
            library = kernels.compiled()
            return library.gather, library.matvec
        return gather_torch, torch.mv

    def _check(self, x: Tensor) -> None:
        check_shape(x, (*[None] * (x.dim() - 1), self.dim), "x")
        if x.dtype != self.rows.dtype or x.device != self.rows.device:
            raise DtypeError(
                f"x must be {self.rows.dtype} on {self.rows.device} as the weights; got "
                f"{x.dtype} on {x.device}. Convert one of them."
            )
        if self.training or (torch.is_grad_enabled() and x.requires_grad):
            asked = "training mode" if self.training else "an input that requires a gradient"
            raise UnsupportedError(
                f"the packed layer decodes only; got {asked}. Use model.eval() and "
                "torch.no_grad(), or train the SparkFeedForward that it was packed from."
            )
        for reference, version in self._source:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise ConfigError(
                    "the packed weights must be those of the layer they were packed from; it was "
                    "changed since. Call pack() again."
                )

    def __getstate__(self) -> dict[str, Any]:
        """Leave the layer that this was packed from behind."""
        return {**self.__dict__, "_source": []}

    def extra_repr(self) -> str:
        """Show the options."""
        return f"engine={self.engine}, active={self.top_k.k} of {len(self.rows)}"


def gather_torch(units: Tensor, weights: Tensor, rows: Tensor, rest: Tensor) -> Tensor:
    """Return the weighted sum of what active units add, on any device and in any dtype."""
    width = len(rest)
    hidden = weights * torch.mv(rows[:, :width].index_select(0, units), rest)
    # a bag of rows reads each where it lies; a product would need a copy of them first
    begin = torch.zeros(1, dtype=torch.long, device=units.device)
    bag = F.embedding_bag(units, rows, begin, mode="sum", per_sample_weights=hidden)
    return bag[0, width:]


def _copy_of(top_k: StatisticalTopK) -> StatisticalTopK:
    copy = StatisticalTopK(
        top_k.k, soft=top_k.soft, unbiased=top_k.unbiased, calibrate=top_k.calibrate
    )
    copy.load_state_dict(top_k.state_dict())
    return copy
