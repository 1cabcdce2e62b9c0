"""Captured weights of models of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from gossamer.attention import MultiHeadAttention, SparkAttention, capture_attention
from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.models import add_positions, replace_attention
from gossamer.positions import AlibiPositions
from tests.models.hf_models import attention_layers, make

TOKENS = torch.tensor([[2, 5, 7, 3, 4, 6]])
WRITTEN = torch.tensor([[0, 3, 5, 2]])
TRIANGLE = np.tri(6, dtype=bool)


def seq2seq(kind: str) -> Any:
    """A tiny random encoder-decoder model."""
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        config = T5Config(vocab_size=14, num_decoder_layers=3, **sizes, **tokens)
        return T5ForConditionalGeneration(config).eval()
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
    wide = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 24}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=14, **sizes, **heads, **wide, **tokens)
    ).eval()


def by_hand(module: Any, x: torch.Tensor, causal: bool) -> np.ndarray:
    """Softmax weights of a BERT-type layer, or of a Llama-type layer whose rotation is off."""
    names = ("query", "key") if hasattr(module, "query") else ("q_proj", "k_proj")
    q, k = (getattr(module, n)(x).unflatten(-1, (-1, 4)).transpose(1, 2).numpy() for n in names)
    k = k.repeat(4 // k.shape[1], axis=1)
    logits = q @ k.swapaxes(-1, -2) / 2
    part = np.exp(logits - logits.max(-1, keepdims=True))
    part = part * TRIANGLE if causal else part
    return part / part.sum(-1, keepdims=True)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_one_stack(kind: str) -> None:
    model = make(kind)
    model.set_attn_implementation("sdpa")
    maps = capture_attention(model, TOKENS)
    assert model.config._attn_implementation == "sdpa"
    assert [layer.name for layer in maps.layers] == ["layer 0", "layer 1"]
    visible = np.ones((6, 6), dtype=bool) if kind == "bert" else TRIANGLE
    for layer in maps.layers:
        assert layer.weights.shape == (1, 4, 6, 6)
        np.testing.assert_allclose(layer.weights.sum(-1), 1.0, atol=1e-6)
        np.testing.assert_array_equal(layer.visible[0], visible)
    if kind == "bert":
        seen: list[Any] = []
        module = attention_layers(model)[0]
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(TOKENS)
        np.testing.assert_allclose(
            maps.layers[0].weights, by_hand(module, seen[0], False), atol=1e-6
        )


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_added_positions(kind: str) -> None:
    model = make(kind)
    encoding = AlibiPositions(4, bidirectional=True) if kind == "bert" else AlibiPositions(4)
    model = add_positions(model, encoding).double()
    seen: list[Any] = []
    module = attention_layers(model)[1]
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    before = model(TOKENS).logits
    hook.remove()
    maps = capture_attention(model, {"input_ids": TOKENS})
    logits = np.log(by_hand(module, seen[0], False))
    place = np.arange(6)
    bias = -(2.0 ** -np.array([2, 4, 6, 8]))[:, None, None] * np.abs(place[:, None] - place)
    part = np.exp(logits + bias) * (True if kind == "bert" else TRIANGLE)
    np.testing.assert_allclose(
        maps.layers[1].weights, part / part.sum(-1, keepdims=True), atol=1e-6
    )
    assert torch.equal(model(TOKENS).logits, before)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoder(kind: str) -> None:
    model = seq2seq(kind)
    given = {"input_ids": TOKENS, "decoder_input_ids": WRITTEN}
    maps = capture_attention(model, given)
    names = ["encoder 0", "encoder 1", "decoder 0", "decoder 1", "decoder 2"]
    assert [m.name for m in maps.layers] == [*names, "cross 0", "cross 1", "cross 2"]
    shapes = {m.stack: m.weights.shape[2:] for m in maps.layers}
    assert shapes == {"encoder": (6, 6), "decoder": (4, 4), "cross": (4, 6)}
    for layer in maps.layers:
        np.testing.assert_allclose(layer.weights.sum(-1), 1.0, atol=1e-5)
    np.testing.assert_array_equal(maps.layers[2].visible[0], np.tri(4, dtype=bool))
    assert (maps.layers[-1].queries, maps.layers[-1].keys) == ("output", "input")
    assert maps.rows()[-1]["distance"] is None
    # a layer number counts in each stack that has it
    last = capture_attention(model, given, layers=[2])
    assert [m.name for m in last.layers] == ["decoder 2", "cross 2"]


@torch.no_grad()
def test_layers_of_this_library_inside() -> None:
    model = make("llama").float()
    model = replace_attention(model, lambda old: SparkAttention(16, 2, k=2))
    maps = capture_attention(model, TOKENS)
    assert maps.layers[1].weights.shape == (1, 2, 6, 6)
    assert (maps.layers[0].weights[..., ~TRIANGLE] == 0).all()
    mixed = replace_attention(
        make("llama").float(), lambda old: MultiHeadAttention(16, 2), layers=[0]
    )
    with pytest.raises(UnsupportedError, match=r"all or none of the model's 2 .* got 1"):
        capture_attention(mixed, TOKENS)


def test_bad_input() -> None:
    with pytest.raises(DataError, match="must hold decoder_input_ids; got input_ids"):
        capture_attention(seq2seq("t5"), TOKENS)
    with pytest.raises(ConfigError, match=r"numbers from 0 to 1, .* got 9"):
        capture_attention(make("bert"), TOKENS, layers=[9])
