"""DIET: both forms against their formulas and against each other, and segments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gossamer.attention import attend
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.positions import (
    AlibiPositions,
    DietAbsolutePositions,
    DietRelativePositions,
    Positions,
    T5Positions,
    alibi_slopes,
)


def bias(
    positions: Positions, ids: torch.Tensor, k_ids: torch.Tensor | None = None
) -> torch.Tensor:
    k_ids = ids if k_ids is None else k_ids
    return positions.bias(ids, k_ids, q_index=torch.zeros(ids.shape[:2], dtype=torch.long))


def absolute(*args: int, **options: object) -> DietAbsolutePositions:
    torch.manual_seed(0)
    return DietAbsolutePositions(*args, **{"rank": 3, "init_std": 1.0, **options}).double()


def relative(*args: int, **options: object) -> DietRelativePositions:
    torch.manual_seed(0)
    positions = DietRelativePositions(*args, **options).double()
    torch.nn.init.normal_(positions.table)
    return positions


IDS = torch.tensor([[0, 1, 2, 5, 3, 3, 8]])
PLAIN = torch.arange(1, 7)[None]
MANY = torch.tensor([[0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [2, 1, 0, 2, 2, 3]])


# --- reference values ---


@pytest.mark.parametrize("ids", [IDS, MANY, torch.arange(1, 9)[None]], ids=["one", "many", "plain"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@torch.no_grad()
def test_absolute_equals_the_formula_in_numpy(ids: torch.Tensor, mode: bool) -> None:
    positions = absolute(2, 8).train(mode)
    p_q, p_k = positions.query.numpy(), positions.key.numpy()
    ours = bias(positions, ids).numpy()
    for b, row in enumerate(ids.tolist()):
        for i, p_i in enumerate(row):
            for j, p_j in enumerate(row):
                expected = np.einsum("hr,hr->h", p_q[:, p_i - 1], p_k[:, p_j - 1])
                np.testing.assert_allclose(ours[b, :, i, j], expected * bool(p_i and p_j))


def test_relative_equals_its_table() -> None:
    positions = relative(2, 6)
    ours = bias(positions, IDS)
    for i, p_i in enumerate(IDS[0].tolist()):
        for j, p_j in enumerate(IDS[0].tolist()):
            offset = max(-5, min(5, p_i - p_j))  # id 8 is clipped: 7 tokens from id 1
            expected = positions.table[:, offset + 5] * bool(p_i and p_j)
            assert torch.equal(ours[0, :, i, j], expected)


@pytest.mark.parametrize("kind", [absolute, relative])
def test_segments_fill_four_blocks_with_four_values(kind: object) -> None:
    positions, plain = kind(3, 8, num_segments=2), kind(3, 8)
    torch.nn.init.normal_(positions.segments)
    segments = torch.tensor([[1, 1, 1, 2, 2, 0]])
    ids = torch.arange(1, 7)[None]
    both = bias(positions, torch.stack((ids, segments), dim=-1))
    difference = (both - bias(plain, ids))[0]
    table = positions.segments
    for i, s_i in enumerate(segments[0].tolist()):
        for j, s_j in enumerate(segments[0].tolist()):
            expected = table[:, s_i - 1, s_j - 1] if s_i and s_j else torch.zeros(3).double()
            torch.testing.assert_close(difference[:, i, j], expected)


def test_linformer_form_has_a_row_for_each_projected_key() -> None:
    positions = absolute(2, 50, key_length=4)
    ids, k_ids = torch.arange(1, 31)[None], torch.arange(1, 5)[None]
    ours = bias(positions, ids, k_ids)
    expected = positions.query[:, :30] @ positions.key.mT
    torch.testing.assert_close(ours[0], expected)
    assert positions.key.shape == (2, 4, 3)
    assert not positions.cacheable
    left_padded = torch.nn.functional.pad(ids, (2, 0))
    assert torch.equal(bias(positions, left_padded, k_ids)[:, :, :2], torch.zeros(1, 2, 2, 4))


def test_start() -> None:
    torch.manual_seed(0)
    positions = DietAbsolutePositions(4, 200)
    assert positions.rank == 64
    deviation = bias(positions, torch.arange(1, 201)[None]).std().item()
    assert deviation == pytest.approx(0.02**2 * math.sqrt(64), rel=0.1)
    assert not bias(DietRelativePositions(2, 5), IDS).any()


# --- limits and invariances ---


def test_without_terms_the_logits_are_those_of_the_content() -> None:
    positions = absolute(2, 8, num_segments=2)
    torch.nn.init.zeros_(positions.query)
    q, k, v = torch.randn(3, 1, 2, 7, 4).double()
    ids = torch.stack((IDS, IDS.clamp(max=2)), dim=-1)
    logits = q @ k.mT / 2.0
    assert torch.equal(logits + bias(positions, ids), logits)
    torch.testing.assert_close(attend(q, k, v, bias=bias(positions, ids)), attend(q, k, v))


def test_relative_is_absolute_with_a_toeplitz_product() -> None:
    n = 9
    rel, full = relative(2, n), absolute(2, n, rank=n)
    steps = torch.arange(n)
    with torch.no_grad():
        full.query.copy_(rel.table[:, steps[:, None] - steps[None] + n - 1])
        full.key.copy_(torch.eye(n).double().expand(2, n, n))
    for ids in (torch.arange(1, n + 1)[None], IDS, MANY):
        torch.testing.assert_close(bias(full, ids), bias(rel, ids))


def test_relative_can_be_symmetric_alibi() -> None:
    rel = relative(6, 40)
    with torch.no_grad():
        rel.table.copy_(-alibi_slopes(6)[:, None] * torch.arange(-39, 40).abs())
    alibi = AlibiPositions(6, bidirectional=True)
    ids = torch.arange(1, 41)[None]
    torch.testing.assert_close(bias(rel, ids).float(), bias(alibi, ids))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_tied_inside_buckets_is_t5(bidirectional: bool) -> None:
    t5 = T5Positions(2, bidirectional=bidirectional).double()
    rel = relative(2, 300)
    with torch.no_grad():
        rel.table.copy_(t5.table[:, t5.bucket(torch.arange(-299, 300))])
    ids = torch.arange(1, 301)[None]
    assert torch.equal(bias(rel, ids), bias(t5, ids))


def test_the_decoupled_term_lifts_the_rank_of_the_logits() -> None:
    """Additive positions: rank at most D; with the term of rank d_p: D + d_p, here attained."""
    generator = torch.Generator().manual_seed(0)
    n, dim, head_dim = 128, 64, 16
    x, p = torch.randn(2, n, dim, generator=generator, dtype=torch.float64)
    w_q, w_k = torch.randn(2, dim, head_dim, generator=generator, dtype=torch.float64)
    additive = (x + p) @ w_q @ ((x + p) @ w_k).T / 4.0
    positions = absolute(1, n, rank=16)
    decoupled = x @ w_q @ (x @ w_k).T / 4.0 + bias(positions, torch.arange(1, n + 1)[None])[0, 0]
    assert torch.linalg.matrix_rank(additive, rtol=1e-5) == 16
    assert torch.linalg.matrix_rank(decoupled, rtol=1e-5) == 32


@pytest.mark.parametrize("ids", [IDS, MANY, torch.arange(1, 9)[None]], ids=["one", "many", "plain"])
def test_all_ways_to_the_product_agree(ids: torch.Tensor) -> None:
    """Samples together or alone, all rows or one by one: values and gradients are the same."""
    positions = absolute(2, 8)
    together = bias(positions, ids)
    parts = [
        torch.cat([bias(positions, row[:, n : n + 1], row) for n in range(row.shape[1])], dim=2)
        for row in ids.split(1)
    ]
    alone = torch.cat(parts)
    torch.testing.assert_close(together, alone)
    weight = torch.randn_like(together)
    tables = [positions.query, positions.key]
    gradients = [torch.autograd.grad((b * weight).sum(), tables) for b in (together, alone)]
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)


def test_shared_heads() -> None:
    with pytest.warns(UserWarning, match="worst"):
        one = DietAbsolutePositions(3, 8, rank=2, share_heads=True, num_segments=2)
    two = DietRelativePositions(3, 8, share_heads=True)
    torch.nn.init.normal_(two.table)
    ids = torch.stack((IDS, IDS.clamp(max=2)), dim=-1)
    for positions, given in ((one, ids), (two, IDS)):
        b = bias(positions, given)
        assert b.shape == (1, 3, 7, 7)
        assert torch.equal(b[:, 0], b[:, 2])
        assert b.any()
    torch.nn.init.normal_(one.segments)  # segments stay per head
    assert not torch.equal(bias(one, ids)[:, 0], bias(one, ids)[:, 2])


# --- gradients ---


@pytest.mark.parametrize("ids", [IDS, MANY, PLAIN], ids=["one", "many", "plain"])
@pytest.mark.parametrize("kind", [absolute, relative])
def test_gradients(kind: object, ids: torch.Tensor) -> None:
    positions = kind(2, 8, num_segments=2)
    positions.forward = bias.__get__(positions)  # type: ignore[method-assign]
    both = torch.stack((ids, ids.clamp(max=2)), dim=-1)
    names = [name for name, _ in positions.named_parameters()]

    def run(*values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(positions, dict(zip(names, values, strict=True)), (both,))

    values = tuple(p.detach().clone().requires_grad_() for p in positions.parameters())
    assert torch.autograd.gradcheck(run, values)


# --- bad input ---


@pytest.mark.parametrize(
    "options",
    [{"num_heads": 0}, {"max_length": 0}, {"rank": 0}, {"rank": 1.5}, {"num_segments": -1},
     {"init_std": 0.0}, {"key_length": 0}, {"key_length": 4, "num_segments": 2}],
)  # fmt: skip
def test_bad_options(options: dict) -> None:
    name = next(reversed(options))
    with pytest.raises(ConfigError, match=name):
        DietAbsolutePositions(**{"num_heads": 2, "max_length": 8, **options})


@pytest.mark.parametrize("options", [{"num_heads": 0}, {"max_length": 0}, {"num_segments": -1}])
def test_bad_options_of_the_relative_form(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        DietRelativePositions(**{"num_heads": 2, "max_length": 8, **options})


def test_too_long_names_both_numbers_and_a_way_out() -> None:
    positions = absolute(2, 8)
    for q_ids, k_ids in ((PLAIN + 3, PLAIN), (PLAIN, PLAIN + 3), (PLAIN[:, :1], PLAIN + 3)):
        message = "max_length = 8.*got 9.*DietRelativePositions"
        with pytest.raises(DataError, match=message):
            bias(positions, q_ids, k_ids)
    assert bias(relative(2, 8), PLAIN * 100).shape == (1, 2, 6, 6)


@pytest.mark.parametrize("kind", [absolute, relative])
def test_bad_segments(kind: object) -> None:
    positions = kind(2, 8, num_segments=2)
    ids = torch.stack((PLAIN, torch.full_like(PLAIN, 3)), dim=-1)
    with pytest.raises(DataError, match="num_segments = 2; got 3"):
        bias(positions, ids)
    with pytest.raises(DataError, match="num_segments = 2; got 3"):
        bias(positions, ids.clamp(max=2), ids)
    with pytest.raises(ShapeError, match=r"\(B, T, 2\) for 2 level"):
        bias(positions, PLAIN)
    with pytest.raises(DtypeError, match="must be integers"):
        bias(positions, ids.float())
    with pytest.raises(DataError, match=">= 0"):
        bias(positions, ids - 4)


def test_keys_must_fit_the_projection() -> None:
    positions = absolute(2, 50, key_length=4)
    with pytest.raises(ShapeError, match=r"\(1, 4\); got \(1, 6\)"):
        bias(positions, PLAIN)
    with pytest.raises(DataError, match=r"key_length = 4.*got 6"):
        bias(positions, PLAIN, PLAIN[:, 2:])
    few = torch.tensor([[3, 9, 4, 1]])
    with pytest.raises(DataError, match=r"key_length = 4.*got 9"):
        positions.bias(few, few, q_index=few - 1)
