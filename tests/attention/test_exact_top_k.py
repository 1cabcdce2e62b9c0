"""Exact top-k attention against plain attention and a loop in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.attention import TopKAttention, attend, causal_mask, top_k_attention
from gossamer.errors import ConfigError, DtypeError, ShapeError
from gossamer.models import Decoder, TransformerBlock


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def heads(length: int = 7, keys: int = 9):
    """Return queries with 4 heads, keys and values with 2."""
    return draw(2, 4, length, 3), draw(2, 2, keys, 3, seed=1), draw(2, 2, keys, 5, seed=2)


# --- reference values ---


@pytest.mark.parametrize("num_keys", [1, 3, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_loop(num_keys: int, masked: bool) -> None:
    q, k, v = heads()
    mask = draw(2, 1, 7, 9, seed=3) > -0.3 if masked else None
    found = top_k_attention(q, k, v, mask, num_keys=num_keys)
    expected = np.zeros(found.shape)
    for b, h, t in np.ndindex(2, 4, 7):
        logits = k[b, h // 2].numpy() @ q[b, h, t].numpy() / np.sqrt(3)
        seen = [j for j in range(9) if mask is None or bool(mask[b, 0, t, j])]
        kept = sorted(seen, key=lambda j: -logits[j])[:num_keys]
        weights = np.exp(logits[kept] - logits[kept].max()) if kept else np.zeros(0)
        for weight, j in zip(weights / max(weights.sum(), 1e-300), kept, strict=True):
            expected[b, h, t] += weight * v[b, h // 2, j].numpy()
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("num_keys", [9, 50])
def test_with_all_keys_it_is_plain_attention(num_keys: int) -> None:
    q, k, v = heads()
    mask = draw(2, 1, 7, 9, seed=3) > 0
    mask[0, 0, 2] = False
    for seen in (None, mask):
        found = top_k_attention(q, k, v, seen, num_keys=num_keys, scale=0.3)
        torch.testing.assert_close(found, attend(q, k, v, seen, scale=0.3))


def test_with_one_key_it_is_the_value_of_the_largest() -> None:
    q, k, v = draw(1, 1, 7, 3), draw(1, 1, 9, 3, seed=1), draw(1, 1, 9, 5, seed=2)
    best = (q @ k.mT).argmax(-1)[0, 0]
    torch.testing.assert_close(top_k_attention(q, k, v, num_keys=1)[0, 0], v[0, 0, best])


# --- limits and invariances ---


def test_rows_sum_to_one() -> None:
    q, k, _ = heads()
    ones = torch.ones(2, 2, 9, 1, dtype=torch.float64)
    for num_keys in (1, 4):
        out = top_k_attention(q, k, ones, num_keys=num_keys)
        torch.testing.assert_close(out, torch.ones_like(out))


def test_the_order_of_the_keys_does_not_matter() -> None:
    """Also where logits tie: all keys equal to the last one kept stay."""
    q, k, v = heads()
    k[:, :, 4] = k[:, :, 2]
    k[:, :, 7] = k[:, :, 2]
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    for num_keys in range(1, 9):
        one = top_k_attention(q, k, v, num_keys=num_keys)
        two = top_k_attention(q, k[:, :, order], v[:, :, order], num_keys=num_keys)
        torch.testing.assert_close(one, two)
    same = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    values = draw(1, 1, 4, 2)
    out = top_k_attention(same, same, values, num_keys=1)
    torch.testing.assert_close(out, values.mean(2, keepdim=True).expand_as(out))


def test_a_causal_mask_looks_at_nothing_ahead() -> None:
    q, k, v = draw(1, 2, 8, 3), draw(1, 2, 8, 3, seed=1), draw(1, 2, 8, 3, seed=2)
    mask = causal_mask(8, 8)
    before = top_k_attention(q, k, v, mask, num_keys=2)
    k[:, :, 5:], v[:, :, 5:] = 9.0, 9.0
    after = top_k_attention(q, k, v, mask, num_keys=2)
    torch.testing.assert_close(before[:, :, :5], after[:, :, :5])


def test_the_layer_decodes_with_a_cache() -> None:
    torch.manual_seed(0)
    model = Decoder(9, 8, 2, 2, attention={"name": "top_k", "num_keys": 3}).eval()
    prompt = torch.randint(9, (2, 6))
    cached = model.generate(prompt, max_new_tokens=6, use_cache=True)
    assert torch.equal(cached, model.generate(prompt, max_new_tokens=6, use_cache=False))


def test_the_layer_adds_a_bias_before_it_chooses() -> None:
    torch.manual_seed(0)
    layer = TopKAttention(8, 2, num_keys=1)
    x = torch.randn(1, 5, 8)
    bias = torch.full((1, 1, 5, 5), -100.0)
    bias[..., 3] = 0.0
    expected = layer.to_out(layer.to_v(x)[:, 3:4].expand(1, 5, 8))
    torch.testing.assert_close(layer(x, bias=bias), expected)


# --- gradients ---


def test_gradients_pass_through_the_kept_keys_alone() -> None:
    q, k, v = (x.requires_grad_() for x in heads())
    mask = draw(2, 1, 7, 9, seed=3) > -0.3
    assert torch.autograd.gradcheck(
        lambda q, k, v: top_k_attention(q, k, v, mask, num_keys=3), (q, k, v)
    )
    q, k, v = draw(1, 1, 1, 3), draw(1, 1, 9, 3, seed=1), draw(1, 1, 9, 5, seed=2)
    v.requires_grad_()
    top_k_attention(q, k, v, num_keys=2).sum().backward()
    kept = (q @ k.mT)[0, 0, 0].topk(2).indices.sort().values
    assert torch.equal(v.grad.abs().sum(-1)[0, 0].nonzero()[:, 0], kept)


def test_rows_that_see_nothing_have_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in heads())
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[2] = False
    out = top_k_attention(q, k, v, mask, num_keys=2)
    assert not out[:, :, 2].any()
    slopes = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(torch.isfinite(slope).all() for slope in slopes)
    assert not slopes[0][:, :, 2].any()


# --- bad input ---


def test_bad_input() -> None:
    q, k, v = heads()
    with pytest.raises(ConfigError, match="num_keys must be >= 1; got 0"):
        top_k_attention(q, k, v, num_keys=0)
    with pytest.raises(DtypeError, match="mask must be boolean"):
        top_k_attention(q, k, v, torch.ones(7, 9), num_keys=1)
    with pytest.raises(ShapeError, match=r"mask must broadcast.*\(2, 4, 7, 9\); got \(9, 7\)"):
        top_k_attention(q, k, v, torch.ones(9, 7, dtype=torch.bool), num_keys=1)
    with pytest.raises(ShapeError, match="heads of q must be a multiple"):
        top_k_attention(q[:, :3], k, v, num_keys=1)
    with pytest.raises(ConfigError, match="num_keys"):
        TopKAttention(8, 2, num_keys=0)
    with pytest.raises(ConfigError, match="needs the option 'num_keys'"):
        TransformerBlock(8, 2, attention="top_k")
