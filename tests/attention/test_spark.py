"""Spark attention: reference values, masks, positions, and decoding from a cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossamer.attention import SparkAttention
from gossamer.errors import ConfigError
from gossamer.models import Decoder
from gossamer.positions import RopePositions


def mix(layer: SparkAttention, q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
    return layer.mix(q, k, v, mask, **{"bias": None, "causal": False, "index": None, **options})


def test_reference_values(outside_data: Path) -> None:
    data = np.load(outside_data / "attention_reference" / "spark_attention.npz")
    layer = SparkAttention(16, 1, predictor_dim=int(data["r"]), k=int(data["k_keep"])).double()
    q, k, v = (torch.from_numpy(data[name])[None, None] for name in ("q", "k", "v"))
    out = mix(layer, q, k, v, causal=True)
    np.testing.assert_allclose(out[0, 0].numpy(), data["out"], atol=1e-12)
    # the last row again as a decoder asks for it
    with torch.no_grad():
        last = mix(layer.eval(), q[:, :, -1:], k, v)
    np.testing.assert_allclose(last[0, 0, 0].numpy(), data["out"][-1], atol=1e-12)


def test_every_key_kept_is_the_dense_formula() -> None:
    torch.manual_seed(0)
    layer = SparkAttention(24, 2, k=50, predictor_dim=4)
    q, k, v = torch.randn(3, 2, 2, 9, 12)
    weights = (q[..., :4] @ k[..., :4].mT / 2).softmax(-1)
    gains = F.softplus(q[..., 4:] @ k[..., 4:].mT / 8**0.5)
    torch.testing.assert_close(mix(layer, q, k, v), (weights * gains) @ v)


def test_rows_with_few_visible_keys_are_dense_and_padding_moves_nothing() -> None:
    torch.manual_seed(0)
    layer, dense = SparkAttention(16, 2, k=5), SparkAttention(16, 2, k=1.0)
    q, k, v = torch.randn(3, 1, 2, 12, 8)
    out = mix(layer, q, k, v, causal=True)
    torch.testing.assert_close(out[:, :, :5], mix(dense, q, k, v, causal=True)[:, :, :5])
    assert not torch.allclose(out[:, :, 8:], mix(dense, q, k, v, causal=True)[:, :, 8:])
    pad = torch.full((1, 2, 4, 8), math.nan)
    mask = torch.arange(16) < 12
    k, v = torch.cat((k, pad), 2), torch.cat((v, torch.zeros_like(pad)), 2)
    k = k.nan_to_num(nan=1e4)
    padded = mix(layer, q, k, v, mask & torch.ones(12, 16, dtype=torch.bool).tril())
    torch.testing.assert_close(padded, out)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    layer = SparkAttention(16, 2, k=3)
    q, k, v = torch.randn(3, 1, 2, 6, 8, requires_grad=True)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    out = mix(layer, q, k, v, mask)
    assert not out[:, :, 2].any()
    out.sum().backward()
    with torch.no_grad():
        assert not mix(layer.eval(), q[:, :, 2:3], k, v, mask[2:3]).any()


def test_equal_scores_are_read_and_not_dropped() -> None:
    layer = SparkAttention(16, 1, k=2)
    q, k, v = torch.zeros(1, 1, 1, 16), torch.randn(1, 1, 9, 16), torch.randn(1, 1, 9, 16)
    out = mix(layer, q, k, v)
    torch.testing.assert_close(out[0, 0, 0], math.log(2) * v[0, 0].mean(0))
    two = torch.cat((torch.ones(5), -torch.ones(5)))[None, None, :, None].expand(1, 1, 10, 16)
    v = torch.randn(1, 1, 10, 16)
    out = mix(SparkAttention(16, 1, k=1), torch.ones(1, 1, 1, 16), two, v)
    gain = F.softplus(torch.tensor(8 / 8**0.5))
    torch.testing.assert_close(out[0, 0, 0], gain * v[0, 0, :5].mean(0))


def test_gathering_equals_masking() -> None:
    torch.manual_seed(0)
    layer = SparkAttention(32, 4, k=5, num_kv_heads=2).eval()
    q, (k, v) = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 2, 90, 8)
    with torch.no_grad():
        gathered = mix(layer, q, k, v)
    torch.testing.assert_close(mix(layer, q, k, v).detach(), gathered)


def test_grouped_keys_equal_repeated_ones() -> None:
    torch.manual_seed(0)
    layer = SparkAttention(32, 4, k=4, num_kv_heads=2)
    q, (k, v) = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 2, 9, 8)
    wide = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    expected = mix(SparkAttention(32, 4, k=4), q, *wide, causal=True)
    torch.testing.assert_close(mix(layer, q, k, v, causal=True), expected)
    with torch.no_grad():
        torch.testing.assert_close(mix(layer.eval(), q[:, :, -1:], k, v), expected[:, :, -1:])


def test_rotary_positions_turn_each_slice_as_a_head_of_its_own() -> None:
    layer = SparkAttention(16, 1, predictor_dim=6)
    q, k = torch.randn(2, 1, 1, 5, 16)
    ids = torch.arange(1, 6)[None]
    got = layer.rotate(RopePositions(16), q, k, ids, ids - 1)
    for x, turned in zip((q, k), got, strict=True):
        for part, width in ((slice(0, 6), 6), (slice(6, 16), 10)):
            own = RopePositions(width)
            expected = own.rotate(x[..., part], x[..., part], ids, ids, q_index=ids - 1)[0]
            torch.testing.assert_close(turned[..., part], expected)
    # so that the logits depend on differences of positions alone
    far = layer.rotate(RopePositions(16), q, k, ids + 700, ids + 699)
    for part in (slice(0, 6), slice(6, 16)):
        near_logits = got[0][..., part] @ got[1][..., part].mT
        far_logits = far[0][..., part] @ far[1][..., part].mT
        torch.testing.assert_close(near_logits, far_logits, atol=1e-3, rtol=0)
    with pytest.raises(ConfigError, match="both slices of a head must be even; got 5 and 11"):
        SparkAttention(16, 1, predictor_dim=5).rotate(RopePositions(16), q, k, ids, ids - 1)


@pytest.mark.parametrize("positions", ["rope", "alibi", "coupled_relative"])
def test_a_decoder_decodes_with_its_cache_as_without(positions: str) -> None:
    torch.manual_seed(0)
    attention = {"name": "spark", "k": 6, "num_kv_heads": 2}
    feed_forward = {"name": "spark", "hidden_dim": 200, "k": 0.1}
    model = Decoder(
        11, 32, 2, 4, positions=positions, attention=attention, feed_forward=feed_forward
    ).eval()
    prompt = torch.randint(1, 11, (3, 20))
    ids = torch.arange(1, 41).expand(3, 40) if model.ids == "task" else None
    got = model.generate(prompt, ids, max_new_tokens=20)
    tokens = torch.cat((prompt, got), 1)
    with torch.no_grad():
        full = model(tokens[:, :-1], None if ids is None else ids[:, :39])
    torch.testing.assert_close(full[:, 19:].argmax(-1), got)


def test_gradients() -> None:
    torch.manual_seed(3)
    layer = SparkAttention(8, 2, k=3).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x, causal=True), (x,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predictor_dim": 0}, "predictor_dim"),
        ({"predictor_dim": 8}, "predictor_dim"),
        ({"head_dim": 1}, "head_dim"),
        ({"k": 0}, r"k \(a count\)"),
        ({"k": 2.0}, r"k \(a share\)"),
        ({"scales": (1.0,)}, "scales must be two numbers; got 1"),
        ({"scales": (1.0, -1.0)}, "scales must be"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SparkAttention(16, 2, **options)
