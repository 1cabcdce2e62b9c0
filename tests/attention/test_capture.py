"""Captured weights of this library's models against weights computed in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.attention import (
    LinformerAttention,
    MultiHeadAttention,
    ShawAttention,
    SparkAttention,
    capture_attention,
)
from gossamer.errors import ConfigError, UnsupportedError
from gossamer.models import Decoder, Encoder

TOKENS = torch.tensor([[2, 5, 7, 3, 4, 6], [0, 0, 8, 2, 9, 3]])
MASK = TOKENS > 0
TRIANGLE = np.tri(6, dtype=bool)

Array = NDArray[Any]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inputs_of_layers(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
    """Run a model; return what goes into its attention layers and what comes out of them."""
    seen: list[Any] = []
    out: list[Any] = []
    layers = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for m in layers]
    hooks += [m.register_forward_hook(lambda _, args, y: out.append(y)) for m in layers]
    with torch.no_grad():
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return seen, out


def split(x: Tensor, weight: Tensor, heads: int) -> Array:
    y = x.double().numpy() @ weight.detach().double().numpy().T
    return y.reshape(*y.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def softmax(logits: Array, seen: Array) -> Array:
    logits = np.where(seen, logits, -np.inf)
    most = logits.max(-1, keepdims=True)
    part = np.where(seen, np.exp(logits - np.where(np.isfinite(most), most, 0)), 0.0)
    return part / np.maximum(part.sum(-1, keepdims=True), 1e-300)


def weights_by_hand(
    layer: Any, x: Tensor, seen: Array, bias: Array | float = 0.0, scale: Array | float = 1.0
) -> Array:
    q = split(x, layer.to_q.weight, layer.num_heads)
    k = split(x, layer.to_k.weight, layer.num_kv_heads)
    k = k.repeat(layer.num_heads // layer.num_kv_heads, axis=1)
    return softmax(q @ k.swapaxes(-1, -2) * scale / layer.head_dim**0.5 + bias, seen)


def test_decoder_with_grouped_keys() -> None:
    model = Decoder(12, 16, 2, 4, positions="none", attention={"num_kv_heads": 2}).train()
    maps = capture_attention(model, TOKENS)
    seen, outputs = inputs_of_layers(model, TOKENS)
    assert [layer.name for layer in maps.layers] == ["layer 0", "layer 1"]
    for block, x, out, layer in zip(model.layers, seen, outputs, maps.layers, strict=True):
        expected = weights_by_hand(block.attention, x, TRIANGLE)
        np.testing.assert_allclose(layer.weights, expected, atol=1e-6)
        assert layer.weights.dtype == np.float32
        np.testing.assert_array_equal(layer.visible, np.broadcast_to(TRIANGLE, (2, 6, 6)))
        # the maps times the values are the layer's output
        v = split(x, block.attention.to_v.weight, 2).repeat(2, axis=1)
        mixed = torch.tensor(layer.weights @ v).transpose(1, 2).flatten(2)
        made = block.attention.to_out(mixed.float())
        torch.testing.assert_close(made, out, atol=1e-5, rtol=1e-4)


def test_encoder_with_padding_and_segments() -> None:
    model = Encoder(12, 16, 2, 4, max_length=8, num_segments=2).eval()
    given = {"tokens": TOKENS, "mask": MASK, "segments": (TOKENS > 6).long()}
    maps = capture_attention(model, given)
    seen, _ = inputs_of_layers(model, **given)
    keys = MASK.numpy()[:, None, None]
    for block, x, layer in zip(model.layers, seen, maps.layers, strict=True):
        np.testing.assert_allclose(
            layer.weights, weights_by_hand(block.attention, x, keys), atol=1e-6
        )
        np.testing.assert_array_equal(layer.visible[1, :, :2], False)


def test_alibi_with_left_padding() -> None:
    model = Decoder(12, 16, 1, 4, positions="alibi").eval()
    maps = capture_attention(model, {"tokens": TOKENS, "mask": MASK})
    seen, _ = inputs_of_layers(model, TOKENS, mask=MASK)
    place = np.arange(6)
    slopes = 2.0 ** -np.array([2, 4, 6, 8])[:, None, None]
    bias = -slopes * np.abs(place[:, None] - place)
    visible = TRIANGLE & MASK.numpy()[:, None, None]
    expected = weights_by_hand(model.layers[0].attention, seen[0], visible, bias)
    np.testing.assert_allclose(maps.layers[0].weights, expected, atol=1e-6)
    # a query that sees nothing reads nothing
    assert (maps.layers[0].weights[1, :, :2] == 0).all()


def test_coupled_bias_with_padding() -> None:
    model = Decoder(12, 16, 1, 4, positions="coupled_relative").eval()
    ids = torch.tensor([[3, 2, 1, 2, 3, 0], [0, 0, 2, 1, 2, 0]])
    given = {"tokens": TOKENS, "position_ids": ids, "mask": MASK}
    maps = capture_attention(model, given)
    seen, _ = inputs_of_layers(model, **given)
    index = (MASK.cumsum(1) - 1).clamp(min=0).numpy()
    scale = (np.log(index + 2) / np.log(32))[:, None, :, None]
    table = model.positions[0].table[0].detach().double().numpy()  # (10, H): 7 distances, 3 others
    q_ids, k_ids = ids.numpy()[:, :, None], ids.numpy()[:, None, :]
    bucket = np.clip(k_ids - q_ids, -3, 3) + 3
    bucket = np.where(q_ids == 0, np.where(k_ids == 0, 9, 7), np.where(k_ids == 0, 8, bucket))
    bias = 10 * scale * table[bucket].transpose(0, 3, 1, 2)
    visible = TRIANGLE & MASK.numpy()[:, None, None]
    expected = weights_by_hand(model.layers[0].attention, seen[0], visible, bias, scale)
    np.testing.assert_allclose(maps.layers[0].weights, expected, atol=1e-6)


def test_spark_weights_are_its_own() -> None:
    layer = SparkAttention(16, 2, k=2).eval()
    x = torch.randn(1, 9, 16)
    with torch.no_grad():
        maps = capture_attention(layer, {"x": x, "causal": True})
    q, k = (split(x, w, 2) for w in (layer.to_q.weight, layer.to_k.weight))
    r = layer.predictor_dim
    logits = q[..., :r] @ k[..., :r].swapaxes(-1, -2) / r**0.5
    seen = np.tri(9, dtype=bool)
    kept = maps.layers[0].weights > 0
    gains = np.log1p(np.exp(q[..., r:] @ k[..., r:].swapaxes(-1, -2) / (8 - r) ** 0.5))
    np.testing.assert_allclose(maps.layers[0].weights, softmax(logits, kept) * gains, atol=1e-6)
    # what is kept has the largest logits among the visible keys
    least = np.where(kept, logits, np.inf).min(-1)
    most_left = np.where(seen & ~kept, logits, -np.inf).max(-1)
    assert (least > most_left).all()
    np.testing.assert_array_equal(maps.layers[0].visible[0], seen)
    assert (kept <= seen).all()
    assert kept.sum() < seen.sum() * 2


def test_linformer_weights_are_those_of_tokens() -> None:
    layer = LinformerAttention(16, 2, length=8, projection_dim=3).eval()
    x = torch.randn(2, 6, 16)
    maps = capture_attention(layer, x)
    q, k = (split(x, m.weight, 2) for m in (layer.to_q, layer.to_k))
    mixing = layer.mixing.detach().double().numpy()[:, :6]
    logits = q @ (mixing @ k).swapaxes(-1, -2) / 8**0.5
    expected = softmax(logits, np.ones_like(logits, dtype=bool)) @ mixing
    np.testing.assert_allclose(maps.layers[0].weights, expected, atol=1e-5)


@pytest.mark.parametrize("length", [6, 8])  # 8 is also the head's width
def test_shaw_is_refused_by_name(length: int) -> None:
    layer = ShawAttention(16, 2, max_distance=2)
    with pytest.raises(UnsupportedError, match="got ShawAttention, which adds something else"):
        capture_attention(layer, torch.randn(1, length, 16))
    assert "mix" not in layer.__dict__


def test_loops_are_numbered_as_they_run() -> None:
    model = Decoder(12, 16, 2, 4, loops=2)
    maps = capture_attention(model, TOKENS, layers=[0, 3])
    assert [(layer.name, layer.note) for layer in maps.layers] == [
        ("layer 0", "block 0, pass 1"),
        ("layer 3", "block 1, pass 2"),
    ]


def test_the_model_is_left_as_it_was() -> None:
    model = Decoder(12, 16, 2, 4, attention={"dropout": 0.5}).train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    one, two = (capture_attention(model, TOKENS) for _ in range(2))
    np.testing.assert_array_equal(one.layers[0].weights, two.layers[0].weights)  # no dropout
    assert [module.training for module in model.modules()] == modes
    assert all("mix" not in module.__dict__ for module in model.modules())
    assert model(TOKENS).requires_grad


def test_half_precision() -> None:
    model = Decoder(12, 16, 1, 4).bfloat16()
    weights = capture_attention(model, TOKENS).layers[0].weights
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=0.02)


def test_samples_rows_and_dict() -> None:
    model = Decoder(12, 16, 2, 4)
    maps = capture_attention(model, TOKENS)
    one = maps.sample(1)
    np.testing.assert_array_equal(one.layers[1].weights[0], maps.layers[1].weights[1])
    rows = one.rows()
    assert [(row["layer"], row["head"]) for row in rows][3:5] == [("layer 0", 3), ("layer 1", 0)]
    assert one.to_dict()["heads"] == rows
    with pytest.raises(ConfigError, match="number of the sample must be >= 0 and <= 1; got 2"):
        maps.sample(2)


def test_bad_input() -> None:
    model = Decoder(12, 16, 2, 4)
    with pytest.raises(ConfigError, match=r"numbers from 0 to 1, since .* 2 layers; got 2"):
        capture_attention(model, TOKENS, layers=[0, 2])
    with pytest.raises(ConfigError, match="layers must be >= 0; got -1"):
        capture_attention(model, TOKENS, layers=[-1])
    with pytest.raises(ConfigError, match="at least one layer; got none"):
        capture_attention(model, TOKENS, layers=[])
    with pytest.raises(UnsupportedError, match="got Linear"):
        capture_attention(nn.Linear(2, 2), torch.ones(1, 2))
    assert all("mix" not in module.__dict__ for module in model.modules())


def test_a_mix_that_the_caller_put_there_stays() -> None:
    layer = MultiHeadAttention(8, 2)
    own = layer.mix
    layer.mix = lambda *args, **kwargs: 2 * own(*args, **kwargs)
    kept = layer.mix
    weights = capture_attention(layer, torch.randn(1, 4, 8)).layers[0].weights
    np.testing.assert_allclose(weights.sum(-1), 2.0, rtol=1e-5)
    assert layer.mix is kept
