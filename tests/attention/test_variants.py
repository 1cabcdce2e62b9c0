"""Linformer and Shaw attention against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.attention import LinformerAttention, PositionBias, ShawAttention, attend
from gossamer.errors import ConfigError, DtypeError, ShapeError, UnsupportedError
from gossamer.models import Decoder, Encoder, TransformerBlock
from gossamer.positions import AlibiPositions, DietAbsolutePositions, RopePositions

HOST = {"name": "linformer", "length": 8, "projection_dim": 4}
SHAW = {"name": "shaw", "max_distance": 4}


def split(layer, x):
    """Return queries, keys and values as `(B, H, T, D)` arrays."""
    parts = (layer.to_q(x), layer.to_k(x), layer.to_v(x))
    return [
        p.detach().numpy().reshape(*x.shape[:2], layer.num_heads, -1).swapaxes(1, 2) for p in parts
    ]


def join(layer, out):
    """Apply the output map to `(B, H, T, D)`."""
    batch, _, length, _ = out.shape
    joined = out.swapaxes(1, 2).reshape(batch, length, -1)
    return joined @ layer.to_out.weight.detach().numpy().T


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def linformer(length: int = 9, mixtures: int = 4) -> LinformerAttention:
    torch.manual_seed(0)
    return LinformerAttention(8, 2, length=length, projection_dim=mixtures).double()


def shaw(width: int = 2) -> ShawAttention:
    torch.manual_seed(0)
    return ShawAttention(8, 2, max_distance=width).double()


# --- Linformer ---


@pytest.mark.parametrize("length", [1, 6, 9])
@pytest.mark.parametrize("padded", [False, True])
def test_linformer_equals_the_loop(length, padded) -> None:
    layer = linformer()
    x = torch.randn(2, length, 8, dtype=torch.float64)
    bias = torch.randn(1, 2, length, 4, dtype=torch.float64)
    real = torch.ones(2, length, dtype=torch.bool)
    real[1, length // 2 :] = not padded
    q, k, v = split(layer, x)
    mixing = layer.mixing.detach().numpy()
    out = np.zeros_like(q)
    for b, h, t in np.ndindex(*q.shape[:3]):
        tokens = [j for j in range(length) if real[b, j]]
        keys = sum((np.outer(mixing[:, j], k[b, h, j]) for j in tokens), np.zeros((4, 4)))
        values = sum((np.outer(mixing[:, j], v[b, h, j]) for j in tokens), np.zeros((4, 4)))
        weights = softmax(keys @ q[b, h, t] / 2 + bias[0, h, t].numpy())
        out[b, h, t] = weights @ values
    mask = real[:, None, None, :] if padded else None
    found = layer(x, mask, bias=bias).detach().numpy()
    np.testing.assert_allclose(found, join(layer, out), atol=1e-12)


def test_linformer_with_the_identity_is_plain_attention() -> None:
    layer = linformer(length=5, mixtures=5)
    with torch.no_grad():
        layer.mixing.copy_(torch.eye(5))
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = (torch.from_numpy(a) for a in split(layer, x))
    expected = join(layer, attend(q, k, v).numpy())
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, atol=1e-12)


def test_linformer_in_an_encoder_with_diet() -> None:
    """DIET-ABS-LIN: the logits are those of the content plus P_Q P_K^T over the mixtures."""
    torch.manual_seed(0)
    entry = {"name": "diet_absolute", "rank": 3, "key_length": 4, "init_std": 0.5}
    host = {"name": "linformer", "length": 12, "projection_dim": 4}
    model = Encoder(9, 8, 2, 2, positions=entry, attention=host, max_length=12).eval()
    tokens = torch.randint(9, (2, 10))
    seen = []
    for layer in model.layers:
        layer.attention.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["bias"]), with_kwargs=True
        )
    assert model(tokens).shape == (2, 10, 9)
    diet = model.positions[0]
    expected = diet.query[:, :10] @ diet.key.transpose(1, 2)
    for bias in seen:
        torch.testing.assert_close(bias, expected[None])


def test_linformer_gradients() -> None:
    layer = linformer(length=3, mixtures=2)
    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, bias: layer(x, bias=bias), (x, bias))
    layer(x).sum().backward()
    assert layer.mixing.grad.abs().sum() > 0


def test_linformer_bad_input() -> None:
    layer = linformer()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    with pytest.raises(ShapeError, match="at most length = 9 tokens; got 10"):
        layer(torch.cat((x, x[:, :1]), 1))
    with pytest.raises(ShapeError, match=r"projection_dim = 4 keys; got 9\. .*key_length=4"):
        layer(x, bias=torch.zeros(1, 2, 9, 9))
    with pytest.raises(UnsupportedError, match="same for all queries"):
        layer(x, torch.ones(1, 1, 9, 9, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="bidirectional"):
        layer(x, causal=True)
    with pytest.raises(UnsupportedError, match="got RopePositions"):
        layer(x, positions=RopePositions(4), ids=torch.ones(1, 9).long())
    decoder = Decoder(9, 8, 1, 2, positions="none", attention=HOST)
    with pytest.raises(UnsupportedError, match="Use it in an Encoder"):
        decoder(torch.zeros(1, 3).long())
    for option in ("length", "projection_dim"):
        with pytest.raises(ConfigError, match=f"{option} must be"):
            LinformerAttention(8, 2, **{"length": 3, "projection_dim": 3, option: 0})
    diet = {"name": "diet_absolute", "key_length": 3}
    model = Encoder(9, 8, 1, 2, positions=diet, attention=HOST, max_length=8)
    with pytest.raises(ShapeError, match="one id for each projected key"):
        model(torch.zeros(1, 3).long())


# --- Shaw ---


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_shaw_equals_the_loop(length, causal, masked) -> None:
    layer = shaw()
    x = torch.randn(2, length, 8, dtype=torch.float64)
    bias = torch.randn(1, 2, length, length, dtype=torch.float64)
    mask = torch.rand(2, 1, length, length) > 0.4 if masked else None
    q, k, v = split(layer, x)
    keys, values = layer.key_table.detach().numpy(), layer.value_table.detach().numpy()
    out = np.zeros_like(q)
    for b, h, t in np.ndindex(*q.shape[:3]):
        seen = [
            j
            for j in range(length)
            if (j <= t or not causal) and (mask is None or bool(mask[b, 0, t, j]))
        ]
        if not seen:
            continue
        bucket = [min(max(j - t, -2), 2) + 2 for j in seen]
        logits = [
            q[b, h, t] @ (k[b, h, j] + keys[c]) / 2 + float(bias[0, h, t, j])
            for j, c in zip(seen, bucket, strict=True)
        ]
        weights = softmax(np.array(logits))
        out[b, h, t] = sum(
            w * (v[b, h, j] + values[c]) for w, j, c in zip(weights, seen, bucket, strict=True)
        )
    found = layer(x, mask, bias=bias, causal=causal).detach().numpy()
    np.testing.assert_allclose(found, join(layer, out), atol=1e-12)


def test_shaw_with_zero_tables_is_plain_attention() -> None:
    layer = shaw()
    torch.nn.init.zeros_(layer.key_table)
    torch.nn.init.zeros_(layer.value_table)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    q, k, v = (torch.from_numpy(a) for a in split(layer, x))
    expected = join(layer, attend(q, k, v, causal=True).numpy())
    np.testing.assert_allclose(layer(x, causal=True).detach().numpy(), expected, atol=1e-12)


def test_shaw_takes_a_bias_by_rows() -> None:
    layer = shaw()
    x, ids = torch.randn(1, 6, 8, dtype=torch.float64), torch.arange(1, 7)[None]
    lazy = PositionBias(AlibiPositions(2), ids, ids, ids - 1)
    torch.testing.assert_close(layer(x, bias=lazy), layer(x, bias=lazy.rows(0, 6)))


def test_shaw_decodes_with_a_cache_and_left_padding() -> None:
    torch.manual_seed(0)
    entry = {"name": "shaw", "max_distance": 3}
    model = Decoder(9, 8, 2, 2, positions="none", attention=entry).eval()
    prompt = torch.randint(9, (2, 8))
    mask = torch.arange(8) >= torch.tensor([[0], [3]])
    cached = model.generate(prompt, max_new_tokens=5, mask=mask, use_cache=True)
    assert torch.equal(cached, model.generate(prompt, max_new_tokens=5, mask=mask, use_cache=False))
    assert torch.equal(cached[1:], model.generate(prompt[1:, 3:], max_new_tokens=5))


def test_shaw_leaves_padding_out_of_the_distances() -> None:
    torch.manual_seed(0)
    entry = {"name": "shaw", "max_distance": 3}
    model = Encoder(9, 8, 2, 2, positions="none", attention=entry).eval()
    tokens = torch.randint(9, (1, 6))
    holes = torch.tensor([[1, 0, 1, 1, 0, 1]], dtype=torch.bool)
    torch.testing.assert_close(model(tokens, mask=holes)[holes], model(tokens[holes][None])[0])


def test_shaw_gradients() -> None:
    layer = shaw(1)
    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    assert torch.autograd.gradcheck(lambda x: layer(x, mask), (x,))
    layer(x).square().sum().backward()
    assert layer.key_table.grad.abs().sum() > 0
    assert layer.value_table.grad.abs().sum() > 0


def test_shaw_bad_input() -> None:
    with pytest.raises(ConfigError, match="max_distance must be"):
        ShawAttention(8, 2, max_distance=0)
    with pytest.raises(DtypeError, match="mask must be boolean"):
        shaw()(torch.zeros(1, 3, 8, dtype=torch.float64), torch.ones(3, 3))


# --- in a block ---


def test_the_block_builds_them_by_name() -> None:
    block = TransformerBlock(
        8, 2, attention={"name": "linformer", "length": 5, "projection_dim": 2}
    )
    assert isinstance(block.attention, LinformerAttention)
    assert isinstance(TransformerBlock(8, 2, attention=SHAW).attention, ShawAttention)
    with pytest.raises(ConfigError, match="needs the option 'max_distance'"):
        TransformerBlock(8, 2, attention="shaw")
    with pytest.raises(ConfigError, match="unknown attention 'shav'; did you mean 'shaw'"):
        TransformerBlock(8, 2, attention="shav")
    with pytest.raises(ConfigError, match="unknown key 'num_kv_heads' in attention"):
        TransformerBlock(8, 2, attention={**SHAW, "num_kv_heads": 1})


def test_diet_takes_part_in_the_first_layer_of_linformer() -> None:
    """Another bias of the encoding is another output: the bias is not dropped on the way."""
    torch.manual_seed(0)
    entry = {"name": "diet_absolute", "rank": 3, "key_length": 4}
    model = Encoder(9, 8, 1, 2, positions=entry, attention=HOST, max_length=8).eval()
    tokens = torch.randint(9, (1, 7))
    before = model(tokens)
    assert isinstance(model.positions[0], DietAbsolutePositions)
    with torch.no_grad():
        model.positions[0].key.normal_()
    model.positions[0].eval()
    assert not torch.allclose(model(tokens), before)
