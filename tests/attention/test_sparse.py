"""Attention along patterns: every engine against dense masked attention, and the layer."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from gossamer.attention import (
    AttentionPattern,
    MultiHeadAttention,
    PositionBias,
    SparseAttention,
    attend,
    pattern_attention,
)
from gossamer.attention import sparse as module
from gossamer.attention._gather_plan import plan_gather
from gossamer.errors import ConfigError, DtypeError, ShapeError, UnsupportedError
from gossamer.models import Decoder, Encoder, TransformerBlock
from gossamer.positions import AlibiPositions
from tests.attention.test_patterns import make

CPU = torch.device("cpu")
WINDOW = {"kind": "sliding", "length": 9, "window": 2}
FAR = {"kind": "dilated", "length": 9, "window": None, "rate": 3}


def draw(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def heads(length: int, *, batch: int = 2, dtype=torch.float32):
    """Return queries with 4 heads, keys and values with 2."""
    shapes = ((batch, h, length, 8) for h in (4, 2, 2))
    parts = [draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    return [part.requires_grad_() for part in parts]


# --- engines ---


@pytest.mark.parametrize("n", [1, 17, 63])
def test_gathering_equals_the_mask_in_outputs_and_gradients(n: int) -> None:
    padding, bias = draw(2, 1, 1, n, seed=5) > -0.7, draw(1, 4, n, n, seed=6)
    for name, pattern in make(n).items():
        q, k, v = heads(n)
        for mask, added in ((None, None), (padding, None), (None, bias), (padding, bias[:, :1])):
            seen = pattern.mask() if mask is None else pattern.mask() & mask
            expected = attend(q, k, v, seen, bias=added)
            found = pattern_attention(q, k, v, pattern, mask, bias=added, engine="gather")
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=name)
            slopes = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (expected, found)]
            for one, two in zip(*slopes, strict=True):
                torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.slow  # without torch.compile
@pytest.mark.parametrize("name", ["sliding", "strided_causal", "document", "random"])
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_equals_the_mask(name: str) -> None:
    pattern = make(17)[name]
    with torch.no_grad():
        q, k, v = heads(17)
        found = pattern_attention(q, k, v, pattern, engine="flex")
    torch.testing.assert_close(found, attend(q, k, v, pattern.mask()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_equals_the_mask_where_it_gathers(dtype: torch.dtype) -> None:
    pattern = AttentionPattern.sliding(512, 8)
    assert plan_gather(pattern, CPU) is not None
    q, k, v = (x.detach() for x in heads(512, dtype=dtype))
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    found = pattern_attention(q, k, v, pattern)
    assert found.dtype == dtype
    torch.testing.assert_close(found, attend(q, k, v, pattern.mask()), **close)
    torch.testing.assert_close(
        pattern_attention(q, k, v, pattern, scale=0.1),
        attend(q, k, v, pattern.mask(), scale=0.1),
        **close,
    )


def test_full_pattern_is_plain_attention() -> None:
    q, k, v = heads(20)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for engine in ("auto", "dense", "gather"):
        found = pattern_attention(q, k, v, AttentionPattern.full(20), engine=engine)
        torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-5)


def test_a_row_without_keys_gives_zero_and_no_gradient() -> None:
    pattern = AttentionPattern(6, [[0], [], [1, 2], [], [4], [0, 5]])
    q, k, v = heads(6)
    for engine in ("dense", "gather"):
        out = pattern_attention(q, k, v, pattern, engine=engine)
        assert not out[:, :, [1, 3]].any()
        slope = torch.autograd.grad(out.sum(), q)[0]
        assert torch.isfinite(slope).all()
        assert not slope[:, :, [1, 3]].any()
    nothing = AttentionPattern(4, [[], [], [], []])
    assert not pattern_attention(*heads(4), nothing, engine="gather").any()


def test_work_grows_with_the_length_and_not_its_square() -> None:
    for make_one in (
        lambda n: AttentionPattern.sliding(n, 16),
        lambda n: AttentionPattern.star_ring(n),
        lambda n: AttentionPattern.global_local(n, 16, 4),
    ):
        pairs = [plan_gather(make_one(n), CPU).num_pairs for n in (1024, 4096)]
        assert pairs[1] / pairs[0] == pytest.approx(4, rel=0.1)
    strided = plan_gather(AttentionPattern.dilated(1024, None, 32), CPU)
    assert strided.num_pairs == 32 * 1024  # residues have their keys in common: no surplus
    assert plan_gather(AttentionPattern.full(256), CPU) is None


def test_masks_and_plans_live_as_long_as_the_pattern() -> None:
    pattern = AttentionPattern.sliding(8, 1)
    before = len(module._FORMS)
    pattern_attention(*heads(8), pattern)
    assert len(module._FORMS) == before + 1
    del pattern
    gc.collect()
    assert len(module._FORMS) == before


# --- the layer ---


def layer(patterns, **options) -> SparseAttention:
    torch.manual_seed(0)
    return SparseAttention(8, 4, patterns, **options)


def split(one: MultiHeadAttention, x: torch.Tensor) -> list[torch.Tensor]:
    parts = (one.to_q(x), one.to_k(x), one.to_v(x))
    return [part.view(*x.shape[:2], 4, -1).transpose(1, 2) for part in parts]


def by_mask(one: SparseAttention, x: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    """Return the output for one mask for each head."""
    out = attend(*split(one, x), torch.stack(masks)[None])
    return one.to_out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [False, True])
def test_ways_to_combine(causal: bool) -> None:
    x = draw(2, 9, 8)
    near, far = (AttentionPattern.from_options(entry) for entry in (WINDOW, FAR))
    if causal:
        a, b = near.causal().mask(), far.causal().mask()
    else:
        a, b = near.mask(), far.mask()
    for combine, number, masks in (
        ("union", 0, [a | b] * 4),
        ("per_head", 0, [a, a, b, b]),
        ("sequential", 0, [a] * 4),
        ("sequential", 1, [b] * 4),
        ("sequential", 4, [a] * 4),
    ):
        one = layer([near, FAR], combine=combine, layer=number)
        torch.testing.assert_close(one(x, causal=causal), by_mask(one, x, masks))
        seen = torch.stack(masks).any(0)
        whole = one.pattern.causal() if causal else one.pattern
        assert torch.equal(whole.mask(), seen)


def test_full_pattern_is_the_plain_layer() -> None:
    torch.manual_seed(0)
    plain = MultiHeadAttention(8, 4)
    sparse = layer([AttentionPattern.full(9)])
    x, mask = draw(2, 9, 8), draw(2, 1, 1, 9) > -0.5
    torch.testing.assert_close(sparse(x, mask), plain(x, mask))
    torch.testing.assert_close(sparse(x, causal=True), plain(x, causal=True))


def test_bias_by_head_and_by_rows() -> None:
    one = layer([WINDOW, FAR], combine="per_head")
    x, ids = draw(1, 9, 8), torch.arange(1, 10)[None]
    lazy = PositionBias(AlibiPositions(4), ids, ids, ids - 1)
    bias = lazy.rows(0, 9)
    torch.testing.assert_close(one(x, bias=lazy), one(x, bias=bias))
    masks = torch.stack([p.mask() for p in one.head_patterns for _ in range(2)])
    expected = attend(*split(one, x), masks[None], bias=bias)
    torch.testing.assert_close(one(x, bias=bias), one.to_out(expected.transpose(1, 2).flatten(2)))


def test_a_model_numbers_its_layers_and_is_saved_with_its_patterns(tmp_path) -> None:
    torch.manual_seed(0)
    entry = {"name": "sparse", "patterns": [WINDOW, FAR], "combine": "sequential"}
    model = Encoder(7, 8, 3, 4, attention=entry, max_length=9).eval()
    pairs = [block.attention.pattern.num_pairs for block in model.layers]
    assert pairs == [39, 27, 39]
    tokens = torch.randint(7, (2, 9))
    model.save_pretrained(tmp_path)
    again = Encoder.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(tokens), model(tokens))
    torch.testing.assert_close(copy.deepcopy(model)(tokens), model(tokens))
    with pytest.raises(ConfigError, match="unknown key 'layer' in attention"):
        TransformerBlock(8, 4, attention={**entry, "layer": 1})


def test_a_causal_model_decodes_with_a_cache_and_with_padding() -> None:
    torch.manual_seed(0)
    pattern = {"kind": "strided", "length": 16, "stride": 3}
    entry = {"name": "sparse", "patterns": [pattern]}
    model = Decoder(9, 8, 2, 4, attention=entry).eval()
    prompt = torch.randint(9, (2, 8))
    mask = torch.arange(8) >= torch.tensor([[0], [3]])
    cached = model.generate(prompt, max_new_tokens=5, mask=mask, use_cache=True)
    assert torch.equal(cached, model.generate(prompt, max_new_tokens=5, mask=mask, use_cache=False))
    assert torch.equal(cached[1:], model.generate(prompt[1:, 3:], max_new_tokens=5))


def test_padding_anywhere_counts_for_nothing() -> None:
    torch.manual_seed(0)
    entry = {"name": "sparse", "patterns": [WINDOW]}
    short = {"name": "sparse", "patterns": [{**WINDOW, "length": 6}]}
    model = Encoder(9, 8, 2, 4, attention=entry, max_length=9).eval()
    other = Encoder(9, 8, 2, 4, attention=short, max_length=9).eval()
    other.load_state_dict(model.state_dict())
    tokens = torch.randint(9, (1, 9))
    for mask in ([1, 0, 1, 1, 0, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 6 + [0] * 3):
        real = torch.tensor([mask], dtype=torch.bool)
        torch.testing.assert_close(model(tokens, mask=real)[real], other(tokens[real][None])[0])


def test_nothing_ahead_is_looked_at() -> None:
    one = layer([WINDOW, FAR])
    x = draw(1, 9, 8)
    changed = x.clone()
    changed[:, 5:] += 1
    before, after = (one(y, causal=True)[:, :5] for y in (x, changed))
    torch.testing.assert_close(before, after)


def test_gradients() -> None:
    one = layer([WINDOW], head_dim=1, bias=True).double()
    x = draw(1, 9, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: one(x), (x,))


# --- bad input ---


def test_bad_patterns() -> None:
    for call, words in (
        (lambda: layer([]), "list of one or more patterns"),
        (lambda: layer(AttentionPattern.full(3)), r"Pass \[pattern\]"),
        (lambda: layer([WINDOW] * 3, combine="per_head"), "multiple of the number of patterns"),
        (lambda: layer([WINDOW, {**FAR, "length": 8}]), r"one length; got \[9, 8\]"),
        (lambda: layer([WINDOW], combine="unoin"), "did you mean 'union'"),
        (lambda: layer([WINDOW], layer=-1), "layer must be"),
        (lambda: TransformerBlock(8, 4, attention="sparse"), "needs the option 'patterns'"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def test_bad_inputs() -> None:
    one = layer([WINDOW])
    with pytest.raises(ShapeError, match="x must have 9 tokens, the length of the patterns; got 8"):
        one(draw(1, 8, 8))
    with pytest.raises(ShapeError, match="x must have at most 9 tokens"):
        one(draw(1, 10, 8), causal=True)
    q, k, v = heads(9)
    pattern = AttentionPattern.sliding(9, 1)
    with pytest.raises(ShapeError, match="queries must be as many as the pattern has tokens, 9"):
        pattern_attention(*heads(8), pattern)
    with pytest.raises(ShapeError, match=r"mask must be one of keys, \(B, 1, 1, T\)"):
        pattern_attention(q, k, v, pattern, torch.ones(9, 9, dtype=torch.bool))
    with pytest.raises(DtypeError, match="mask must be boolean"):
        pattern_attention(q, k, v, pattern, torch.ones(2, 1, 1, 9))
    with pytest.raises(UnsupportedError, match="no gradient on the CPU"):
        pattern_attention(q, k, v, pattern, engine="flex")
    with pytest.raises(UnsupportedError, match="no mask and no bias"):
        pattern_attention(q, k, v, pattern, torch.ones(2, 1, 1, 9, dtype=torch.bool), engine="flex")
    with pytest.raises(ConfigError, match="unknown engine 'gatter'; did you mean 'gather'"):
        pattern_attention(q, k, v, pattern, engine="gatter")
