"""Attention weights of models of transformers (extra `hf`), by the library's own outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gossamer.attention._recording import Recorder, mix_weights
from gossamer.errors import DataError, UnsupportedError

__all__ = ["capture_outputs"]

# the outputs of a model, and how their stacks are called here
_STACKS = {
    "encoder_attentions": "encoder",
    "decoder_attentions": "decoder",
    "cross_attentions": "cross",
}
# implementations in place of which a model can compute eagerly; any other is somebody's own
_BUILT_IN = ("eager", "sdpa", "flex_attention")


def capture_outputs(model: Any, inputs: Tensor | Mapping[str, Any], recorder: Recorder) -> None:
    """Run a model of transformers and record its attention.

    Raises:
        DataError: If an encoder-decoder model gets no input for its decoder.
        UnsupportedError: If the model returns no weights.
    """
    given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    if getattr(model.config, "is_encoder_decoder", False) and not (
        {"decoder_input_ids", "decoder_inputs_embeds", "labels"} & set(given)
    ):
        raise DataError(
            "inputs of an encoder-decoder model must hold decoder_input_ids; got "
            f"{', '.join(given)}. Add what the decoder reads, for example model.generate(...)."
        )
    used = model.config._attn_implementation
    if used not in _BUILT_IN and "flash" not in str(used):
        with _recording(used, recorder):
            model(**given)
        return
    model.set_attn_implementation("eager")
    try:
        outputs = model(**given, output_attentions=True, return_dict=True)
    finally:
        model.set_attn_implementation(used)
    for name, stack in _found(outputs, type(model).__name__).items():
        for number, weights in enumerate(outputs[name]):
            if weights is None or weights.dim() != 4:
                raise _refused(f"{type(model).__name__} without them in {name}[{number}]")
            if recorder.begin(stack, number):
                recorder.add(weights, None)


def _found(outputs: Any, model: str) -> dict[str, str]:
    found = {name: stack for name, stack in _STACKS.items() if outputs.get(name)}
    if "encoder_attentions" in found:
        return found
    if not outputs.get("attentions"):
        raise _refused(model)
    return {"attentions": "layer"}


def _refused(got: str) -> UnsupportedError:
    return UnsupportedError(
        "the model must return one map of attention weights, (batch, heads, queries, keys), for "
        f"each layer; got {got}. Choose a model whose layers are all softmax attention."
    )


@contextmanager
def _recording(name: str, recorder: Recorder) -> Iterator[None]:
    """Put a recording function in the place of a registered attention function."""
    from transformers import AttentionInterface

    function: Any = AttentionInterface()[name]
    modules: dict[nn.Module, int] = {}

    def recorded(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        def attend_to(values: Tensor) -> Tensor:
            out: Tensor = function(module, query, key, values, *rest, **kwargs)[0]
            return out.transpose(1, 2)

        made: tuple[Tensor, Tensor | None] = function(module, query, key, value, *rest, **kwargs)
        if recorder.begin("layer", modules.setdefault(module, len(modules))):
            weights = mix_weights(attend_to, value, made[0].transpose(1, 2), name)
            recorder.add(weights, None)
        return made

    AttentionInterface.register(name, recorded)
    try:
        yield
    finally:
        AttentionInterface.register(name, function)
