"""Attention against NumPy in float64, empty rows, grouped heads, the growing cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.attention import KVCache, MultiHeadAttention, attend, causal_mask
from gossamer.errors import ConfigError, ShapeError


def reference(q, k, v, mask=None, bias=None, scale=None):
    """Softmax attention as it is written down, one query at a time."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    batch, heads, length, dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros((batch, heads, length, v.shape[-1]))
    for b, h, t in np.ndindex(batch, heads, length):
        logits = k[b, h // group] @ q[b, h, t] * (dim**-0.5 if scale is None else scale)
        if bias is not None:
            logits = logits + bias.expand(batch, heads, -1, -1)[b, h, t].double().numpy()
        seen = (
            np.ones(len(logits), bool)
            if mask is None
            else mask.expand(batch, heads, -1, -1)[b, h, t].numpy()
        )
        if seen.any():
            weights = np.exp(logits[seen] - logits[seen].max())
            out[b, h, t] = weights @ v[b, h // group][seen] / weights.sum()
    return out


def make(heads: int = 4, kv_heads: int = 4, length: int = 7, keys: int = 7, value_dim: int = 5):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, length, 6, generator=g)
    k = torch.randn(2, kv_heads, keys, 6, generator=g)
    v = torch.randn(2, kv_heads, keys, value_dim, generator=g)
    return q, k, v


# --- reference values ---


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("length", "keys"), [(7, 7), (1, 9), (3, 63)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("masking", ["none", "causal", "mask", "both"])
def test_equals_the_definition(kv_heads, length, keys, with_bias, masking) -> None:
    q, k, v = make(4, kv_heads, length, keys)
    bias = torch.randn(1, 4, length, keys) if with_bias else None
    mask = torch.rand(2, 1, length, keys) > 0.5 if masking in ("mask", "both") else None
    causal = masking in ("causal", "both")
    out = attend(q, k, v, mask, bias=bias, causal=causal)
    whole = mask
    if causal:
        triangle = causal_mask(length, keys)[None, None]
        whole = triangle if mask is None else mask & triangle
    np.testing.assert_allclose(out.numpy(), reference(q, k, v, whole, bias), atol=1e-5)


def test_scale() -> None:
    q, k, v = make()
    np.testing.assert_allclose(
        attend(q, k, v, scale=2.0).numpy(), reference(q, k, v, scale=2.0), atol=1e-5
    )


# --- limits ---


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_that_sees_nothing_gives_zero_and_no_gradient(with_bias, dtype) -> None:
    q, k, v = (x.to(dtype).requires_grad_() for x in make())
    mask = torch.ones(7, 7, dtype=torch.bool)
    mask[2] = False
    bias = torch.zeros(1, 4, 7, 7, dtype=dtype, requires_grad=True) if with_bias else None
    out = attend(q, k, v, mask, bias=bias)
    assert (out[:, :, 2] == 0).all()
    out[:, :, 2].sum().backward()
    for x in (q, k, v):
        assert x.grad is None or (x.grad == 0).all()
    whole = attend(q, k, v, torch.zeros(7, 7, dtype=torch.bool), bias=bias)
    assert (whole == 0).all()


def test_not_contiguous_inputs() -> None:
    q, k, v = make()
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(attend(*turned, causal=True), attend(q, k, v, causal=True))


# --- gradients ---


def test_gradients() -> None:
    q, k, v = (x.double().requires_grad_() for x in make(2, 1, 3, 3, 2))
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])

    def run(q, k, v, bias):
        return attend(q, k, v, mask, bias=bias, causal=True)

    assert torch.autograd.gradcheck(run, (q, k, v, bias))


# --- the layer ---


@pytest.mark.parametrize("out_norm", ["none", "layer", "rms"])
def test_layer_with_free_sizes(out_norm) -> None:
    layer = MultiHeadAttention(10, 4, head_dim=6, value_dim=3, num_kv_heads=2, out_norm=out_norm)
    assert layer(torch.randn(2, 5, 10), causal=True).shape == (2, 5, 10)
    assert layer.to_v.out_features == 6


def test_a_scale_of_the_logits_starts_alike_and_learns_faster() -> None:
    torch.manual_seed(0)
    plain = MultiHeadAttention(8, 2)
    torch.manual_seed(0)
    scaled = MultiHeadAttention(8, 2, scale=1.0)
    x = torch.randn(1, 5, 8)
    torch.testing.assert_close(scaled(x), plain(x))
    for layer in (plain, scaled):
        layer(x).square().sum().backward()
    # the same step of the query weights moves a logit by sqrt(head_dim) more
    ratio = scaled.to_q.weight.grad / plain.to_q.weight.grad
    torch.testing.assert_close(ratio, torch.full_like(ratio, 2.0), rtol=1e-3, atol=1e-3)


def test_out_norm_keeps_the_spread_of_uniform_attention() -> None:
    """Uniform attention over N unit values has deviation 1 / sqrt(N); the norm restores 1."""
    torch.manual_seed(0)
    n, width = 400, 64
    for out_norm, expected in (("none", n**-0.5), ("layer", 1.0)):
        layer = MultiHeadAttention(width, 1, out_norm=out_norm)
        with torch.no_grad():
            layer.to_q.weight.zero_()
            for linear in (layer.to_v, layer.to_out):
                linear.weight.copy_(torch.eye(width))
            out = layer(torch.randn(8, n, width))[:, 0]
        assert out.std().item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "multiple of num_heads"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"out_norm": "batch"}, "unknown out_norm"),
        ({"dropout": 2.0}, "dropout must be"),
        ({"scale": 0.0}, "scale must be"),
        ({"num_heads": 0}, "num_heads must be"),
    ],
)
def test_bad_sizes(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        MultiHeadAttention(**{"dim": 16, "num_heads": 4, **options})


def test_bad_shapes() -> None:
    q, k, v = make()
    with pytest.raises(ShapeError, match="batch, heads, length, head_dim"):
        attend(q[0], k, v)
    with pytest.raises(ShapeError, match="v must have the shape"):
        attend(q, k, v[:, :, :-1])
    with pytest.raises(ShapeError, match="multiple of those of k"):
        attend(q, k[:, :3], v[:, :3])


# --- the cache ---


def test_cache_grows_and_keeps_its_content() -> None:
    cache = KVCache(1).layer(0)
    parts = [torch.randn(2, 3, n, 4) for n in (50, 1, 1, 200)]
    for part in parts:
        k, v = cache.append(part, 2 * part)
    assert torch.equal(k, torch.cat(parts, 2))
    assert torch.equal(v, 2 * torch.cat(parts, 2))
    with pytest.raises(ShapeError, match="holds 2 sequences; got 3"):
        cache.append(torch.zeros(3, 3, 1, 4), torch.zeros(3, 3, 1, 4))


def test_cache_lets_samples_begin_to_differ() -> None:
    cache = KVCache(1)
    mask = torch.ones(1, 2, dtype=torch.bool)
    cache.extend(torch.tensor([[1, 2]]), mask)
    ids, _ = cache.extend(torch.tensor([[3], [4]]), mask[:, :1])
    assert ids.tolist() == [[1, 2, 3], [1, 2, 4]]
    ids, _ = cache.extend(torch.tensor([[5]]), mask[:, :1])
    assert ids.tolist() == [[1, 2, 3, 5], [1, 2, 4, 5]]
    assert cache.index.tolist() == [[4]]
