"""Attention weights of a model, per layer and head, as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.attention._hf_capture import capture_outputs
from gossamer.attention._recording import Recorded, Recorder, mix_weights
from gossamer.attention.bias import PositionBias
from gossamer.attention.core import MultiHeadAttention, causal_mask
from gossamer.checks import check_range
from gossamer.errors import ConfigError, UnsupportedError
from gossamer.measures import head_report

__all__ = ["AttentionMaps", "LayerMaps", "capture_attention"]

SEQUENCES = {
    "layer": ("input", "input"),
    "encoder": ("input", "input"),
    "decoder": ("output", "output"),
    "cross": ("output", "input"),
}


@dataclass(frozen=True)
class LayerMaps:
    """The attention weights of one layer.

    Args:
        stack: `"layer"` in a model with one stack of layers, else `"encoder"`, `"decoder"` or
            `"cross"` (from the decoder to the encoder).
        number: Number in the stack, in the order in which the model runs, from 0.
        weights: One map for each sample and head.
        visible: Which keys a query may read, True = may.
        note: What tells a layer that runs several times apart, `""` elsewhere.

    Shape:
        - weights: `(B, H, T, S)`, float32; visible: `(B, T, S)`, boolean.
    """

    stack: str
    number: int
    weights: NDArray[np.float32]
    visible: NDArray[np.bool_]
    note: str = ""

    @property
    def name(self) -> str:
        """Stack and number, such as `"layer 0"`."""
        return f"{self.stack} {self.number}"

    @property
    def queries(self) -> str:
        """Which tokens ask: `"input"` or `"output"`."""
        return SEQUENCES[self.stack][0]

    @property
    def keys(self) -> str:
        """Which tokens are read: `"input"` or `"output"`."""
        return SEQUENCES[self.stack][1]

    def rows(self) -> list[dict[str, Any]]:
        """Return the measures of each head, see `gossamer.measures.head_report`."""
        report = head_report(self.weights, self.visible, distance=self.queries == self.keys)
        return [{"layer": self.name, **row} for row in report.rows()]


@dataclass(frozen=True)
class AttentionMaps:
    """The attention weights of a model on one input.

    Args:
        layers: Those captured, stack by stack, in the order in which they run.
        tokens: What stands at each place of a sequence, by its name: `"input"`, and `"output"` in
            an encoder-decoder model. A sequence that is missing is numbered. Default none.
        about: What a page says on top, title to text. Default the model's class.
    """

    layers: tuple[LayerMaps, ...]
    tokens: Mapping[str, Sequence[str]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    def sample(self, number: int) -> AttentionMaps:
        """Return the maps of one sample of a batch.

        Raises:
            ConfigError: If there is none of that number.
        """
        size = len(self.layers[0].weights)
        check_range(number, "number of the sample", low=0, high=size - 1, integer=True)
        part = slice(number, number + 1)
        layers = (
            dataclasses.replace(one, weights=one.weights[part], visible=one.visible[part])
            for one in self.layers
        )
        return dataclasses.replace(self, layers=tuple(layers))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each head: layer, head, entropy, sparsity, distance."""
        return [row for layer in self.layers for row in layer.rows()]

    def to_dict(self) -> dict[str, Any]:
        """Return tokens and measures as plain values; the weights themselves are left out."""
        tokens = {name: list(texts) for name, texts in self.tokens.items()}
        return {"about": dict(self.about), "tokens": tokens, "heads": self.rows()}


def capture_attention(
    model: nn.Module, inputs: Tensor | Mapping[str, Any], *, layers: Iterable[int] | None = None
) -> AttentionMaps:
    """Run a model once and return its attention weights.

    Works on models that hold `MultiHeadAttention` layers (or variants whose output is a sum of
    values with weights), and on models of transformers. The model runs in evaluation mode without
    gradients and is left as it was. Layers of this library are asked a second time, with unit
    vectors for values, so what is returned is what the layer really does: weights of
    `SparkAttention` do not sum to 1, those of `LinformerAttention` are the tokens' parts in its
    mixtures and may be negative. That takes H x T x S numbers for each layer that is kept.

    Args:
        model: In any mode, on any device.
        inputs: Tokens, or the keywords of the model's forward pass by name.
        layers: Numbers of the layers to keep, from 0, in the order in which they run; in an
            encoder-decoder model of each stack. A looped model counts on. Default all.

    Returns:
        Maps with one `LayerMaps` for each layer; in an encoder-decoder model those of the encoder,
        of the decoder and from decoder to encoder.

    Raises:
        UnsupportedError: If a layer's output is no sum of values with weights, such as that of
            `ShawAttention`, or no attention is found.
        ConfigError: If a number is no layer.

    Example:
        >>> layer = MultiHeadAttention(16, 4)
        >>> maps = capture_attention(layer, torch.randn(1, 5, 16))
        >>> maps.layers[0].weights.shape
        (1, 4, 5, 5)

    Source: the library's own.
    Deviations: none
    """
    wanted = None if layers is None else list(layers)
    if wanted is not None:
        if not wanted:
            raise ConfigError("layers must name at least one layer; got none. Leave it out.")
        for number in wanted:
            check_range(number, "layers", low=0, integer=True)
    own = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    foreign = getattr(getattr(model, "config", None), "model_type", None) is not None
    if not own and not foreign:
        raise UnsupportedError(
            "model must hold MultiHeadAttention layers, or be one of transformers; got "
            f"{type(model).__name__}. Record the weights in your own attention."
        )
    recorder = Recorder(None if wanted is None else set(wanted))
    with torch.no_grad(), _evaluating(model):
        if own:
            _check_all_replaced(model, len(own), foreign)
            with ExitStack() as stack:
                for number, module in enumerate(own):
                    stack.enter_context(_recording(module, number, recorder))
                model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        else:
            capture_outputs(model, inputs, recorder)
    recorder.check()
    several = recorder.calls > len(own) > 0
    return AttentionMaps(
        tuple(_layer_maps(one, several) for one in recorder.layers),
        about={"model": type(model).__name__},
    )


def _layer_maps(one: Recorded, several: bool) -> LayerMaps:
    weights: NDArray[np.float32] = one.weights.float().cpu().numpy()
    if one.visible is None:
        visible = (weights != 0).any(1)
    else:
        visible = np.broadcast_to(one.visible.cpu().numpy(), (len(weights), *weights.shape[2:]))
    note = f"block {one.module}, pass {one.turn + 1}" if several else ""
    return LayerMaps(one.stack, one.number, weights, visible, note)


def _check_all_replaced(model: Any, count: int, foreign: bool) -> None:
    """Refuse a model of transformers in which some layers are ours and some its own."""
    expected = getattr(model.config, "num_hidden_layers", count) if foreign else count
    if count != expected:
        raise UnsupportedError(
            f"either all or none of the model's {expected} attention layers may be of this "
            f"library; got {count}. Capture the model before its layers are replaced, or replace "
            "all of them."
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode; give each module its own mode back in the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _recording(module: MultiHeadAttention, number: int, recorder: Recorder) -> Iterator[None]:
    """Record the weights each time a layer attends."""
    kept = module.__dict__.get("mix")  # what the caller may have put over the class's
    mix = module.mix

    def recorded(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        bias: Tensor | PositionBias | None,
        causal: bool,
        index: Tensor | None,
    ) -> Tensor:
        def attend_to(values: Tensor) -> Tensor:
            return mix(q, k, values, mask, bias=bias, causal=causal, index=index)

        out = attend_to(v)
        if recorder.begin("layer", number):
            weights = mix_weights(attend_to, v, out, type(module).__name__)
            recorder.add(weights, _visible(weights, mask, causal))
        return out

    module.mix = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.mix
        if kept is not None:
            module.mix = kept  # type: ignore[method-assign]


def _visible(weights: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return which keys each query may read, `(1 or B, T, S)`."""
    length, num_keys = weights.shape[2:]
    seen = torch.ones(1, 1, length, num_keys, dtype=torch.bool, device=weights.device)
    if mask is not None:
        seen = seen & mask
    if causal and length > 1:
        seen = seen & causal_mask(length, num_keys, device=weights.device)
    return seen.any(1)
