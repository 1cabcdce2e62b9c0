"""Block attention: every engine against the reference, the mask, and what the pattern promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gossamer.attention import BlockLayout, _block_engines, attend, block_attention, block_scores
from gossamer.errors import ConfigError, DataError, ShapeError, UnsupportedError

from .block_reference import REFERENCE, place

LENGTHS = REFERENCE["lengths"].tolist()
FAST = ("sdpa", "merge")
SHAPES = {
    "equal": [32, 48, 48, 48, 16],
    "ragged": [21, 64, 3, 40, 33, 1, 70, 64, 9],
    "one document": [5, 130, 7],
    "one-token documents": [1, 1, 1, 1, 1],
    "sorted": [8, 2, 31, 33, 40, 65, 4],
    "last one shorter": [8, 32, 30, 4],
}


def draw(layout: BlockLayout, heads: int, dim: int = 16, *, seed: int = 0, **options) -> Tensor:
    maker = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, layout.num_tokens, dim, generator=maker, **options)


def inputs(layout: BlockLayout, kv_heads: int = 4, **options) -> list[Tensor]:
    heads = (4, kv_heads, kv_heads)
    return [draw(layout, count, seed=i, **options) for i, count in enumerate(heads)]


# --- reference values ---


@pytest.mark.parametrize("engine", ["dense", *FAST])
@pytest.mark.parametrize("pad_multiple", [1, 16, 64])
def test_equals_the_reference_whatever_the_padding(engine: str, pad_multiple: int) -> None:
    layout = BlockLayout(LENGTHS, pad_multiple=pad_multiple)
    q, k, v = (place(torch.from_numpy(REFERENCE[name])[None], layout) for name in "qkv")
    out, logits = block_attention(q, k, v, layout, engine=engine, return_signal_logits=True)
    real = layout.real()
    torch.testing.assert_close(out[0, :, real], torch.from_numpy(REFERENCE["out"]))
    assert out[:, :, ~real].eq(0).all()  # although padding is NaN
    scores = block_scores(logits, layout)
    torch.testing.assert_close(scores[0], torch.from_numpy(REFERENCE["doc_scores"]))


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("kv_heads", "pad_multiple"), [(4, 1), (2, 16), (1, 1)])
def test_engines_equal_the_mask(engine, lengths, kv_heads, pad_multiple) -> None:
    layout = BlockLayout(lengths, pad_multiple=pad_multiple)
    q, k, v = inputs(layout, kv_heads)
    plain = block_attention(q, k, v, layout, engine="dense", return_signal_logits=True)
    found = block_attention(q, k, v, layout, engine=engine, return_signal_logits=True)
    torch.testing.assert_close(found[0], plain[0], atol=1e-5, rtol=0)
    assert torch.equal(found[1], plain[1])
    repeated = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
    same = block_attention(q, *repeated, layout, engine=engine)
    torch.testing.assert_close(same, plain[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
def test_gradients_equal_those_of_the_mask(lengths: list[int]) -> None:
    layout = BlockLayout(lengths)
    weight = draw(layout, 4, seed=9)
    found = {}
    for engine in ("dense", "sdpa"):
        q, k, v = (x.requires_grad_() for x in inputs(layout, 2))
        out, logits = block_attention(q, k, v, layout, engine=engine, return_signal_logits=True)
        loss = (weight * out).sum() + block_scores(logits, layout).square().sum()
        found[engine] = torch.autograd.grad(loss, (q, k, v))
    for a, b in zip(found["sdpa"], found["dense"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        assert a[:, :, ~layout.real()].eq(0).all()


@pytest.mark.parametrize("lengths", [[70], [30, 41]])
@pytest.mark.parametrize("engine", ["dense", *FAST])
def test_without_documents_it_is_causal_attention(lengths: list[int], engine: str) -> None:
    layout = BlockLayout(lengths, pad_multiple=1)
    q, k, v = inputs(layout)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = block_attention(q, k, v, layout, engine=engine)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", ["dense", *FAST])
def test_scale_and_transposed_inputs(engine: str) -> None:
    layout = BlockLayout(SHAPES["ragged"])
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(layout, 2))
    expected = attend(q, k, v, layout.mask(), scale=0.7)
    found, logits = block_attention(
        q, k, v, layout, scale=0.7, engine=engine, return_signal_logits=True
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    row = 0.7 * q[1, 3, -1] @ k[1, 1, layout.block_ids() == 2].T
    torch.testing.assert_close(logits[1, 3, -1, 64:67], row)


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(engine: str, dtype: torch.dtype) -> None:
    layout = BlockLayout(SHAPES["ragged"])
    q, k, v = (x.to(dtype) for x in inputs(layout, 2))
    expected = block_attention(q.float(), k.float(), v.float(), layout, engine="dense")
    found, logits = block_attention(q, k, v, layout, engine=engine, return_signal_logits=True)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=0)
    assert block_scores(logits, layout).dtype == torch.float32


def test_values_may_be_wider_than_keys() -> None:
    layout = BlockLayout(SHAPES["ragged"])
    q, k, _ = inputs(layout)
    v = draw(layout, 4, 24, seed=5)
    expected = block_attention(q, k, v, layout, engine="dense")
    for engine in ("auto", "merge", "sdpa"):
        found = block_attention(q, k, v, layout, engine=engine)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("shape", "kv_heads"), [("equal", 4), ("ragged", 2), ("one document", 1)])
def test_flex_equals_the_mask(shape, kv_heads, monkeypatch: pytest.MonkeyPatch) -> None:
    # its plain form: compiling takes 10 s and more for each shape
    monkeypatch.setattr(_block_engines, "_compiled_flex", lambda: flex_attention)
    layout = BlockLayout(SHAPES[shape])
    q, k, v = inputs(layout, kv_heads)
    plain = block_attention(q, k, v, layout, scale=0.7, engine="dense", return_signal_logits=True)
    found = block_attention(q, k, v, layout, scale=0.7, engine="flex", return_signal_logits=True)
    torch.testing.assert_close(found[0], plain[0], atol=1e-5, rtol=0)
    assert torch.equal(found[1], plain[1])


@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("lengths", [*SHAPES.values(), [70], [30, 34]])
def test_block_mask_has_the_tiles_of_the_mask(tile: int, lengths: list[int]) -> None:
    layout = BlockLayout(lengths, pad_multiple=1)
    size = layout.num_tokens
    cpu = torch.device("cpu")
    found = _block_engines.flex_block_mask(tuple(lengths), cpu, tile)
    made = create_block_mask(
        layout.mask_mod(), None, None, size, size, device="cpu", BLOCK_SIZE=tile
    )
    assert torch.equal(found.to_dense(), made.to_dense())
    # a tile that is said to be full is full
    full = found.full_kv_num_blocks[0, 0], found.full_kv_indices[0, 0]
    for row, (count, columns) in enumerate(zip(*full, strict=True)):
        for column in columns[:count].tolist():
            rows = slice(tile * row, tile * row + tile)
            assert layout.mask()[rows, tile * column : tile * column + tile].all()
    if lengths == SHAPES["equal"]:
        assert full[0].sum() > 0


# --- limits and invariances ---


@pytest.mark.parametrize("engine", ["dense", *FAST])
def test_the_order_of_documents_does_not_matter(engine: str) -> None:
    layout = BlockLayout(SHAPES["ragged"], pad_multiple=1)
    blocks = layout.block_ids()
    order = torch.tensor([0, 4, 1, 7, 3, 2, 6, 5, 8])
    slots = torch.cat([(blocks == block).nonzero()[:, 0] for block in order])
    other = BlockLayout([layout.lengths[block] for block in order], pad_multiple=1)
    assert torch.equal(other.position_ids(), layout.position_ids()[slots])
    q, k, v = inputs(layout, 2)
    out, logits = block_attention(q, k, v, layout, engine=engine, return_signal_logits=True)
    moved = [x[:, :, slots] for x in (q, k, v)]
    found = block_attention(*moved, other, engine=engine, return_signal_logits=True)
    torch.testing.assert_close(found[0], out[:, :, slots], atol=1e-5, rtol=0)
    scores = block_scores(logits, layout)
    torch.testing.assert_close(block_scores(found[1], other), scores[:, order[1:-1] - 1])


@pytest.mark.parametrize("engine", ["dense", *FAST])
def test_a_changed_document_leaves_the_others_as_they_are_bit_for_bit(engine: str) -> None:
    layout = BlockLayout(SHAPES["ragged"])
    q, k, v = inputs(layout)
    before = block_attention(q, k, v, layout, engine=engine)
    changed = layout.block_ids() == 3
    for x in (q, k, v):
        x[:, :, changed] += 1.0
    after = block_attention(q, k, v, layout, engine=engine)
    kept = (layout.block_ids() != 3) & (layout.block_ids() != layout.num_blocks - 1)
    assert torch.equal(after[:, :, kept], before[:, :, kept])
    assert not torch.equal(after[:, :, -1], before[:, :, -1])


def test_auto_learns_with_one_engine_and_infers_with_another() -> None:
    layout = BlockLayout(SHAPES["ragged"])
    q, k, v = inputs(layout)
    with torch.inference_mode():  # what it keeps from here must serve the gradient below
        quick = block_attention(q, k, v, layout)
    assert torch.equal(quick, block_attention(q, k, v, layout, engine="merge"))
    q.requires_grad_()
    out = block_attention(q, k, v, layout)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), quick, atol=1e-5, rtol=0)
    with torch.no_grad():
        assert torch.equal(block_attention(q, k, v, layout), quick)


def test_without_the_private_operator_merge_is_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout(SHAPES["equal"])
    q, k, v = inputs(layout)
    expected = block_attention(q, k, v, layout, engine="sdpa")

    def gone(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise AttributeError("no such operator")

    def wrong(q: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q[..., 0]

    for replaced in (gone, wrong):
        _block_engines.flash_works.cache_clear()
        monkeypatch.setattr(_block_engines, "_flash", replaced)
        for engine in ("merge", "auto"):
            assert torch.equal(block_attention(q, k, v, layout, engine=engine), expected)
    _block_engines.flash_works.cache_clear()


def test_the_private_operator_is_trusted_here() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert _block_engines.flash_works(dtype)


def test_scores_are_shares() -> None:
    layout = BlockLayout(SHAPES["ragged"])
    q, k, v = inputs(layout)
    _, logits = block_attention(q, k, v, layout, return_signal_logits=True)
    scores = block_scores(logits, layout)
    assert scores.shape == (2, 7)
    assert (scores >= 0).all()
    torch.testing.assert_close(scores.sum(-1), torch.ones(2))
    weights = logits.softmax(-1)
    parts = weights.split(layout.lengths[1:-1], dim=-1)
    for name, expected in (
        ("sum", [part.sum(-1) for part in parts]),
        ("mean", [part.mean(-1) for part in parts]),
        ("max", [part.amax(-1) for part in parts]),
    ):
        stacked = torch.stack(expected, dim=-1).mean((1, 2))
        torch.testing.assert_close(block_scores(logits, layout, aggregate=name), stacked)


def test_identical_documents_share_the_score() -> None:
    layout = BlockLayout([4, 6, 6, 6, 6, 3], pad_multiple=1)
    q, k, v = inputs(layout)
    k[:, :, 4:28] = k[:, :, 4:10].repeat(1, 1, 4, 1)
    _, logits = block_attention(q, k, v, layout, return_signal_logits=True)
    torch.testing.assert_close(block_scores(logits, layout), torch.full((2, 4), 0.25))


def test_signals_are_chosen_by_the_layout() -> None:
    q, k, v = inputs(BlockLayout(LENGTHS))
    found = {}
    for signals in ((-2, -1), (5,)):
        layout = BlockLayout(LENGTHS, signals=signals)
        found[signals] = block_attention(q, k, v, layout, return_signal_logits=True)[1]
        assert found[signals].shape == (2, 4, len(signals), 18)
    layout = BlockLayout(LENGTHS)
    row = q[0, 0, -3] @ k[0, 0, layout.block_ids() == 3].T / 4
    torch.testing.assert_close(found[(5,)][0, 0, 0, 11], row[0])


# --- gradients ---


@pytest.mark.parametrize("aggregate", ["sum", "mean", "max"])
def test_gradcheck(aggregate: str) -> None:
    layout = BlockLayout([2, 1, 3, 2], pad_multiple=2)
    maker = torch.Generator().manual_seed(3)
    options = {"dtype": torch.float64, "generator": maker, "requires_grad": True}
    q, k, v = (torch.randn(1, h, layout.num_tokens, 3, **options) for h in (2, 1, 1))

    def work(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, logits = block_attention(q, k, v, layout, return_signal_logits=True)
        return out, block_scores(logits, layout, aggregate=aggregate)

    assert torch.autograd.gradcheck(work, (q, k, v))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["sdpa", "flex"])
@pytest.mark.parametrize("lengths", [SHAPES["ragged"], [160] * 12])
def test_cuda_equals_the_mask(engine, lengths) -> None:
    layout = BlockLayout(lengths)
    found = {}
    for name in ("dense", engine):
        q, k, v = (x.cuda().requires_grad_() for x in inputs(layout, 2))
        out, logits = block_attention(q, k, v, layout, engine=name, return_signal_logits=True)
        loss = out.square().sum() + block_scores(logits, layout).square().sum()
        found[name] = [out, logits, *torch.autograd.grad(loss, (q, k, v))]
    for a, b in zip(found[engine], found["dense"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


# --- bad input ---


def test_engines_that_cannot() -> None:
    layout = BlockLayout(LENGTHS)
    q, k, v = inputs(layout)
    q.requires_grad_()
    with pytest.raises(UnsupportedError, match=r"'flex' has no gradient on CPUs.*Use.*'sdpa'"):
        block_attention(q, k, v, layout, engine="flex")
    with pytest.raises(UnsupportedError, match=r"'merge' has no gradient.*Use engine 'sdpa'"):
        block_attention(q, k, v, layout, engine="merge")
    with pytest.raises(ConfigError, match=r"unknown engine 'mask'.*dense"):
        block_attention(q, k, v, layout, engine="mask")


def test_shapes_that_do_not_fit() -> None:
    layout = BlockLayout(LENGTHS)
    q, k, v = inputs(layout)
    with pytest.raises(ShapeError, match="q must have the 96 slots of the layout; got 95"):
        block_attention(q[:, :, 1:], k, v, layout)
    with pytest.raises(ShapeError, match="k must have the 96 slots"):
        block_attention(q, k[:, :, 1:], v[:, :, 1:], layout)
    with pytest.raises(ShapeError, match="multiple of those of k"):
        block_attention(q, k[:, :3], v[:, :3], layout)
    with pytest.raises(ConfigError, match="scale must be > 0"):
        block_attention(q, k, v, layout, scale=0.0)


def test_scores_without_documents_or_of_another_layout() -> None:
    layout = BlockLayout([4, 4])
    q, k, v = inputs(layout)
    with pytest.raises(DataError, match=r"at least one document.*got 2 block"):
        block_attention(q, k, v, layout, return_signal_logits=True)
    with pytest.raises(DataError, match="at least one document"):
        block_scores(torch.zeros(1, 1, 2, 4), layout)
    with pytest.raises(ShapeError, match=r"\(batch, heads, signals, 18\).*got \(1, 1, 2, 17\)"):
        block_scores(torch.zeros(1, 1, 2, 17), BlockLayout(LENGTHS))
    with pytest.raises(ConfigError, match="unknown aggregate 'total'"):
        block_scores(torch.zeros(1, 1, 2, 18), BlockLayout(LENGTHS), aggregate="total")
