"""Patterns against double loops over their definitions, in every form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from gossamer.attention import AttentionPattern
from gossamer.errors import ConfigError, DtypeError, ShapeError


def make(length: int) -> dict[str, AttentionPattern]:
    """Return one of each kind."""
    stride = max(1, math.isqrt(length))
    ids = np.arange(length) // 3 % 3
    rows = [{k, (7 * k) % length} for k in range(length)]
    kinds = {
        "full": AttentionPattern.full(length),
        "sliding": AttentionPattern.sliding(length, 2),
        "wide": AttentionPattern.sliding(length, length + 9),
        "dilated": AttentionPattern.dilated(length, 2, 3),
        "strided": AttentionPattern.strided(length, stride),
        "fixed": AttentionPattern.fixed(length, stride, 1),
        "fixed_literal": AttentionPattern.fixed(length, stride, 1, pad_tail=False),
        "star": AttentionPattern.star(length),
        "star_ring": AttentionPattern.star_ring(length, relay=0),
        "global_local": AttentionPattern.global_local(length, 1, min(2, length)),
        "bigbird": AttentionPattern.bigbird(length, block_size=4),
        "random": AttentionPattern.random(length, min(3, length), seed=1),
        "block_diagonal": AttentionPattern.block_diagonal(length, 4),
        "document": AttentionPattern.document(ids),
        "rows": AttentionPattern(length, [sorted(row) for row in rows]),
    }
    return kinds | {f"{name}_causal": pattern.causal() for name, pattern in kinds.items()}


def by_loop(length: int, seen) -> torch.Tensor:
    return torch.tensor([[bool(seen(k, j)) for j in range(length)] for k in range(length)])


# --- reference values ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "stride"), [(17, 4), (16, 4), (5, 5), (9, 1)])
def test_strided_and_fixed_equal_the_definitions(n: int, stride: int, causal: bool) -> None:
    def past(k, j):
        return not causal or j <= k

    sets = {
        "strided": [
            lambda k, j: max(0, k - stride) <= j <= k + stride and past(k, j),
            lambda k, j: (k - j) % stride == 0 and past(k, j),
        ],
        "fixed": [
            lambda k, j: j // stride == k // stride and past(k, j),
            lambda k, j: (j % stride == stride - 1 or j == k) and past(k, j),
        ],
    }
    for pattern, name in (
        (AttentionPattern.strided(n, stride), "strided"),
        (AttentionPattern.fixed(n, stride, 1, pad_tail=False), "fixed"),
    ):
        pattern = pattern.causal() if causal else pattern
        assert len(pattern.parts) == 2
        for part, seen in zip(pattern.parts, sets[name], strict=True):
            assert torch.equal(part.mask(), by_loop(n, seen))
        assert torch.equal(pattern.mask(), pattern.parts[0].mask() | pattern.parts[1].mask())


def test_other_kinds_equal_their_definitions() -> None:
    n = 17
    ids = [0, 0, 1, 1, 0, 2, 2, 2, 2, 1, 3, 3, 3, 3, 3, 3, 0]
    expected = {
        "sliding": lambda k, j: abs(k - j) <= 3,
        "dilated": lambda k, j: (k - j) % 3 == 0 and abs(k - j) <= 6,
        "star": lambda k, j: k == j or 16 in (k, j),
        "star_ring": lambda k, j: abs(k - j) <= 1 or 5 in (k, j),
        "global_local": lambda k, j: abs(k - j) <= 2 or k < 2 or j < 2,
        "block_diagonal": lambda k, j: k // 5 == j // 5,
        "document": lambda k, j: ids[k] == ids[j],
        "summary": lambda k, j: k == j or j % 4 in (2, 3) or j == 16,
    }
    found = {
        "sliding": AttentionPattern.sliding(n, 3),
        "dilated": AttentionPattern.dilated(n, 2, 3),
        "star": AttentionPattern.star(n),
        "star_ring": AttentionPattern.star_ring(n, relay=5),
        "global_local": AttentionPattern.global_local(n, 2, 2),
        "block_diagonal": AttentionPattern.block_diagonal(n, 5),
        "document": AttentionPattern.document(ids),
        "summary": AttentionPattern.summary(n, 4, 2),
    }
    for name, seen in expected.items():
        assert torch.equal(found[name].mask(), by_loop(n, seen)), name


def test_bigbird_is_made_of_whole_blocks() -> None:
    pattern = AttentionPattern.bigbird(40, 1, 1, 2, block_size=4, seed=3)
    blocks = pattern.mask().view(10, 4, 10, 4)
    assert torch.equal(blocks.any(3).any(1), blocks.all(3).all(1))
    seen = blocks[:, 0, :, 0]
    assert seen[0].all()
    assert seen[:, 0].all()
    assert all(seen[b, max(0, b - 1) : b + 2].all() for b in range(10))
    # at most two random blocks besides the window, block 0 and itself
    assert int(seen[1:].sum(1).max()) <= 1 + 3 + 2
    assert not seen.all()


def test_random_has_as_many_keys_in_every_row_and_itself() -> None:
    pattern = AttentionPattern.random(50, 7, seed=4)
    mask = pattern.mask()
    assert mask.sum(1).tolist() == [7] * 50
    assert mask.diagonal().all()
    assert torch.equal(mask, AttentionPattern.random(50, 7, seed=4).mask())
    assert not torch.equal(mask, AttentionPattern.random(50, 7, seed=5).mask())
    other = (mask & ~torch.eye(50, dtype=torch.bool)).sum(0)
    assert 1 <= int(other.min()) <= int(other.max()) <= 16  # 6 expected in each column


@pytest.mark.parametrize("n", [16, 17, 64, 100])
def test_counts_by_formula(n: int) -> None:
    for w in (0, 1, 5, n - 1, n + 3):
        v = min(w, n - 1)
        pattern = AttentionPattern.sliding(n, w)
        assert pattern.num_pairs == n * (2 * v + 1) - v * (v + 1)
        assert pattern.causal().num_pairs == n * (v + 1) - v * (v + 1) // 2
    assert AttentionPattern.full(n).density == 1.0
    assert AttentionPattern.star(n).num_pairs == n + 2 * (n - 1)
    classes = [len(range(r, n, 4)) for r in range(4)]
    assert AttentionPattern.dilated(n, None, 4).num_pairs == sum(c * c for c in classes)
    assert AttentionPattern.random(n, 5).num_pairs == 5 * n
    blocks = [min(8, n - b) for b in range(0, n, 8)]
    assert AttentionPattern.block_diagonal(n, 8).num_pairs == sum(b * b for b in blocks)


def test_mean_keys_of_the_paper_patterns() -> None:
    strided, fixed = AttentionPattern.strided(256, 16), AttentionPattern.fixed(256, 16, 1)
    keys = [sum(p.num_pairs for p in pattern.parts) / 256 for pattern in (strided, fixed)]
    assert keys == pytest.approx([47.9, 32.9], abs=0.05)


# --- forms ---


@pytest.mark.parametrize("n", [1, 7, 17, 63])
def test_all_forms_agree(n: int) -> None:
    index = torch.arange(n)
    for name, pattern in make(n).items():
        mask = pattern.mask()
        assert mask.shape == (n, n), name
        seen = pattern.mask_mod()(index, index, index[:, None], index[None, :])
        assert torch.equal(seen.expand(n, n), mask), name
        assert np.array_equal(pattern.to_csr().toarray(), mask.numpy()), name
        assert pattern.num_pairs == int(mask.sum()), name
        assert torch.equal(AttentionPattern.from_mask(mask).mask(), mask), name
        some = np.array([n - 1, 0, n // 2])
        pointers, keys = pattern.keys(some)
        for row, query in enumerate(some):
            assert keys[pointers[row] : pointers[row + 1]].tolist() == (
                mask[query].nonzero()[:, 0].tolist()
            ), name


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("n", [16, 17, 40])
def test_block_mask_equals_the_one_from_all_pairs(n: int, size: int) -> None:
    for name, pattern in make(n).items():
        found = pattern.block_mask(size)
        expected = create_block_mask(
            pattern.mask_mod(), None, None, n, n, device="cpu", BLOCK_SIZE=size
        )
        assert found.seq_lengths == expected.seq_lengths
        for field in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks"):
            assert torch.equal(getattr(found, field), getattr(expected, field)), (name, field)
        assert torch.equal(found.to_dense(), expected.to_dense()), name


def test_a_long_pattern_is_never_spread_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block indices of 2^16 tokens come from lists of keys: the matrix would have 4 GiB."""
    monkeypatch.setattr(AttentionPattern, "mask", None)
    pattern = AttentionPattern.sliding(2**16, 8)
    blocks = pattern.block_mask(1024)
    assert blocks.kv_num_blocks[0, 0].tolist() == [2, *[3] * 62, 2]
    assert int(blocks.full_kv_num_blocks.sum()) == 0


def test_window_beyond_the_length_is_full() -> None:
    assert AttentionPattern.sliding(6, 5).mask().all()
    assert AttentionPattern.sliding(6, 100).mask().all()
    assert not AttentionPattern.sliding(6, 4).mask().all()


def test_unions_keep_their_parts() -> None:
    a, b, c = (AttentionPattern.sliding(9, w) for w in (1, 2, 0))
    assert len((a + b + c).parts) == 3
    assert a.parts == (a,)
    assert torch.equal((a + AttentionPattern.star(9)).mask(), AttentionPattern.star_ring(9).mask())
    causal = AttentionPattern.fixed(9, 3, 1).causal()
    assert [p.num_pairs for p in causal.parts] == [18, 18]


def test_pad_tail_makes_the_last_token_of_an_incomplete_stretch_a_summary() -> None:
    literal = AttentionPattern.fixed(17, 4, 1, pad_tail=False)
    assert not literal.mask()[0, 16]
    assert AttentionPattern.fixed(17, 4, 1).mask()[:, 16].all()
    whole = AttentionPattern.fixed(16, 4, 1), AttentionPattern.fixed(16, 4, 1, pad_tail=False)
    assert torch.equal(whole[0].mask(), whole[1].mask())


def test_plain_values() -> None:
    entry = {"kind": "strided", "length": 25, "stride": 5}
    assert AttentionPattern.from_options(entry).num_pairs == 305
    built = AttentionPattern.from_options({"kind": "document", "ids": [0, 1, 1]})
    assert built.num_pairs == 5
    assert "305" in repr(AttentionPattern.strided(25, 5))


# --- bad input ---


def test_bad_numbers() -> None:
    p = AttentionPattern
    for call, words in (
        (lambda: p.sliding(5, -1), "window must be >= 0; got -1"),
        (lambda: p.sliding(0, 1), "length must be >= 1"),
        (lambda: p.dilated(5, 1, 0), "rate must be >= 1"),
        (lambda: p.strided(5, 0), "stride must be >= 1"),
        (lambda: p.strided(5, 6), "stride must be >= 1 and <= 5; got 6"),
        (lambda: p.fixed(8, 4, 5), "num_summary must be >= 1 and <= 4; got 5"),
        (lambda: p.fixed(8, 4, 0), "num_summary"),
        (lambda: p.star(4, 4), "relay must be >= 0 and <= 3"),
        (lambda: p.global_local(4, 1, 5), "num_global"),
        (lambda: p.random(4, 5), "num_keys must be >= 1 and <= 4"),
        (lambda: p.bigbird(8, 1, 1, -1), "num_random"),
        (lambda: p.block_diagonal(8, 0), "block_size"),
        (lambda: p.sliding(8, 1).block_mask(0), "block_size"),
        (lambda: p(2, [[0], [2]]), "keys in rows must be 0 to 1; got 2 to 2 in row 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def test_bad_shapes_and_entries() -> None:
    with pytest.raises(ShapeError, match=r"mask must be square.*got \(3, 4\)"):
        AttentionPattern.from_mask(np.ones((3, 4), dtype=bool))
    with pytest.raises(DtypeError, match=r"mask must be boolean.*got float64"):
        AttentionPattern.from_mask(np.ones((3, 3)))
    with pytest.raises(ShapeError, match="one length; got 4 and 5"):
        AttentionPattern.full(4) + AttentionPattern.full(5)
    with pytest.raises(ShapeError, match="each of 3 queries; got 2 rows"):
        AttentionPattern(3, [[0], [1]])
    with pytest.raises(ShapeError, match="one for each token"):
        AttentionPattern.document([0.5, 1.0])
    for entry, words in (
        ({"length": 4}, "pattern needs the option 'kind'"),
        ({"kind": "slidng", "length": 4}, "did you mean 'sliding'"),
        ({"kind": "sliding", "length": 4}, "pattern 'sliding' needs the option 'window'"),
        ({"kind": "sliding", "length": 4, "windw": 1}, "did you mean 'window'"),
        (3, "pattern must be a table"),
    ):
        with pytest.raises(ConfigError, match=words):
            AttentionPattern.from_options(entry)
