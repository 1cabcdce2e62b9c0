"""The rank audit against closed forms and NumPy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from gossamer.attention import (
    MultiHeadAttention,
    attention_rank,
    min_head_dim,
    realize_attention,
)
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.positions import DietAbsolutePositions


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- reference values ---


def test_input_additive_positions_have_the_rank_of_the_head_and_diet_adds_its_own() -> None:
    """n = 128, d = 64, head width 16, rank of the bias 16: 16 against exactly 32."""
    n, d, width, rank = 128, 64, 16, 16
    x, added = draw(n, d), draw(n, d, seed=1)
    to_q, to_k = draw(d, width, seed=2) / 8, draw(d, width, seed=3) / 8

    def project(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (y @ to_q)[None, None], (y @ to_k)[None, None]

    additive = attention_rank(*project(x + added), tol=1e-5)
    assert additive.logit_rank.tolist() == [[16]]

    torch.manual_seed(0)
    diet = DietAbsolutePositions(1, n, rank=rank, init_std=1.0)
    ids = torch.arange(1, n + 1)[None]
    bias = diet.bias(ids, ids, q_index=ids - 1).detach()
    decoupled = attention_rank(*project(x), bias=bias, tol=1e-5)
    assert decoupled.logit_rank.tolist() == [[32]]
    assert attention_rank(*project(x), tol=1e-5).logit_rank.tolist() == [[16]]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_equals_numpy(kv_heads) -> None:
    q, k = draw(2, 2, 9, 4), draw(2, kv_heads, 12, 4, seed=1)
    bias = draw(1, 2, 9, 12, seed=2)
    mask = draw(2, 1, 9, 12, seed=3) > -0.5
    found = attention_rank(q, k, mask, bias=bias, tol=0.1)
    for b, h in np.ndindex(2, 2):
        a, c = q[b, h].double().numpy(), k[b, h * kv_heads // 2].double().numpy()
        logits = a @ c.T / 2 + bias[0, h].double().numpy()
        weights = np.where(mask[b, 0].numpy(), np.exp(logits), 0.0)
        weights /= weights.sum(1, keepdims=True)
        for name, matrix in (("logit", logits), ("weight", weights)):
            s = np.linalg.svd(matrix, compute_uv=False)
            assert int(getattr(found, f"{name}_rank")[b, h]) == (s > 0.1 * s[0]).sum()
            p = s / s.sum()
            effective = float(getattr(found, f"{name}_effective_rank")[b, h])
            assert effective == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-9)


# --- limits ---


def test_equal_singular_values_and_zero() -> None:
    q = torch.eye(4)[None, None]
    found = attention_rank(q, q)
    assert found.logit_rank.tolist() == [[4]]
    assert found.logit_effective_rank.item() == pytest.approx(4.0)
    nothing = attention_rank(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 5, 2))
    assert nothing.logit_rank.item() == 0
    assert nothing.logit_effective_rank.item() == 0.0
    assert nothing.weight_rank.item() == 1  # uniform
    assert nothing.weight_effective_rank.item() == pytest.approx(1.0)


def test_padding_adds_no_rank() -> None:
    q, k = draw(1, 1, 6, 8), draw(1, 1, 6, 8, seed=1)
    real = torch.tensor([0, 0, 1, 1, 1, 1], dtype=torch.bool)
    mask = (real[:, None] & real)[None, None]
    part, whole = attention_rank(q[:, :, 2:], k[:, :, 2:]), attention_rank(q, k, mask)
    for name, value in vars(whole).items():
        torch.testing.assert_close(value, getattr(part, name))


def test_result_is_plain() -> None:
    report = attention_rank(draw(2, 3, 5, 4), draw(2, 3, 5, 4, seed=1))
    table = json.loads(json.dumps(report.to_dict()))
    assert len(table["weight_rank"]) == 2
    assert len(table["weight_rank"][0]) == 3
    rows = report.rows()
    assert len(rows) == 6
    assert rows[4]["sample"] == 1
    assert rows[4]["head"] == 1
    assert rows[4]["logit_effective_rank"] == table["logit_effective_rank"][1][1]
    assert 1 <= rows[4]["logit_effective_rank"] <= math.nextafter(4, 5)


# --- bad input ---


def test_bad_input() -> None:
    q, k = draw(1, 2, 5, 4), draw(1, 2, 7, 4, seed=1)
    with pytest.raises(ShapeError, match=r"bias must broadcast to the logits.*\(1, 2, 5, 7\)"):
        attention_rank(q, k, bias=torch.zeros(1, 2, 5, 6))
    with pytest.raises(ShapeError, match="mask must broadcast"):
        attention_rank(q, k, torch.ones(3, 1, 5, 7, dtype=torch.bool))
    with pytest.raises(DtypeError, match="mask must be boolean"):
        attention_rank(q, k, torch.ones(5, 7))
    with pytest.raises(ConfigError, match="tol must be"):
        attention_rank(q, k, tol=0.0)
    with pytest.raises(ShapeError, match="q must have the shape"):
        attention_rank(q[0], k)


# --- theorem 1: attention that a head can realize ---


def columns(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random columns that sum to 1, in float64."""
    return (2 * draw(*shape, seed=seed).double()).softmax(0)


def softmax_of(
    x: torch.Tensor, to_q: torch.Tensor, to_k: torch.Tensor, head_dim: int
) -> np.ndarray:
    x, to_q, to_k = (value.numpy() for value in (x, to_q, to_k))
    logits = (to_k @ x).T @ (to_q @ x) / np.sqrt(head_dim)
    weights = np.exp(logits - logits.max(0))
    return weights / weights.sum(0)


@pytest.mark.parametrize("n", [2, 5, 16])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("more", [-1, 0, 3])
def test_every_pattern_is_within_reach_of_a_head_of_the_length(n, times, more) -> None:
    x, target = draw(times * n, n, seed=1).double(), columns(n, n)
    to_q, to_k, residual = realize_attention(x, target, n + more)
    assert to_q.shape == to_k.shape == (n + more, times * n)
    assert residual < 1e-10
    found = softmax_of(x, to_q, to_k, n + more)
    np.testing.assert_allclose(found, target.numpy(), atol=1e-10)


def test_reference_values(outside_data) -> None:
    with np.load(outside_data / "attention_reference" / "head_size.npz") as saved:
        data = {name: saved[name] for name in ("X", "P", "W_q", "W_k")}
    x, target = torch.from_numpy(data["X"]), torch.from_numpy(data["P"])
    to_q, to_k, residual = realize_attention(x, target, 8)
    np.testing.assert_allclose(to_q.numpy(), data["W_q"], atol=1e-11)
    np.testing.assert_allclose(to_k.numpy(), data["W_k"], atol=1e-11)
    assert residual < 1e-12


def test_weights_work_in_an_attention_layer() -> None:
    """Rows of a layer's attention are the columns of the target."""
    x, target = draw(6, 4, seed=1).double(), columns(4, 4)
    layer = MultiHeadAttention(6, 1, head_dim=4, value_dim=6).double()
    with torch.no_grad():
        to_q, to_k, _ = realize_attention(x, target, 4)
        layer.to_q.weight.copy_(to_q)
        layer.to_k.weight.copy_(to_k)
        for part in (layer.to_v, layer.to_out):
            torch.nn.init.eye_(part.weight)
        torch.testing.assert_close(layer(x.T[None])[0], target.T @ x.T, atol=1e-9, rtol=1e-9)


def test_counter_example_with_one_dimension() -> None:
    """d = 1, X = [1, 0]: the second query sees both keys alike, whatever the weights."""
    x, target = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.75], [0.5, 0.25]])
    for seed in range(5):
        to_q, to_k = draw(3, 1, seed=seed), draw(3, 1, seed=seed + 9)
        assert softmax_of(x, to_q, to_k, 3)[:, 1].tolist() == [0.5, 0.5]
    with pytest.warns(UserWarning, match="linearly independent tokens"):
        residual = realize_attention(x, target, 2)[2]
    assert residual == pytest.approx(0.25)


def test_smaller_heads_are_worse_and_dependent_tokens_are_told() -> None:
    x, target = draw(16, 8, seed=1).double(), columns(8, 8)
    residuals = [realize_attention(x, target, size)[2] for size in (1, 3, 5, 7)]
    assert residuals == sorted(residuals, reverse=True)
    assert residuals[2] > 1e-3
    repeated = x.clone()
    repeated[:, 3] = repeated[:, 5]
    for tokens in (repeated, draw(6, 8).double()):
        with pytest.warns(UserWarning, match="rank below T"):
            assert realize_attention(tokens, target, 8)[2] > 1e-3


def test_rank_of_logits_is_at_most_the_head_and_that_of_weights_is_not() -> None:
    for head_dim, n in ((4, 16), (16, 8), (1, 5)):
        q, k = draw(2, 3, n, head_dim), draw(2, 3, n, head_dim, seed=1)
        found = attention_rank(q, k, tol=1e-9)
        assert (found.logit_rank == min(head_dim, n)).all()
    assert attention_rank(draw(1, 1, 5, 1), draw(1, 1, 5, 1, seed=1), tol=1e-9).weight_rank > 1


# --- least head size ---


def test_costs_are_those_of_the_layer() -> None:
    report = min_head_dim(24, dim=32, num_heads=4)
    assert (report.head_dim, report.generic_head_dim, report.standard_head_dim) == (24, 23, 8)
    assert (report.enough, report.reachable) == (False, True)
    for size, count in ((24, report.parameters), (8, report.standard_parameters)):
        layer = MultiHeadAttention(32, 4, head_dim=size)
        assert sum(p.numel() for p in layer.parameters()) == count
    assert report.standard_flops == 2 * 24 * 4 * 32 * 32 + 4 * 24 * 24 * 32
    assert min_head_dim(8, dim=32, num_heads=4).enough
    assert not min_head_dim(64, dim=32, num_heads=4).reachable
    assert min_head_dim(1).rows()[0]["generic_head_dim"] == 1
    assert min_head_dim(9, dim=8).parameters is None


def test_bad_input_of_the_head_size() -> None:
    x, target = draw(6, 4).double(), columns(4, 4)
    with pytest.raises(ConfigError, match="length must be >= 1"):
        min_head_dim(0)
    with pytest.raises(ConfigError, match="num_heads must be >= 1"):
        min_head_dim(4, dim=8, num_heads=0)
    with pytest.raises(ConfigError, match="head_dim must be >= 1"):
        realize_attention(x, target, 0)
    with pytest.raises(DataError, match=r"greater than 0.* Clip it: target\.clamp"):
        realize_attention(x, torch.eye(4), 4)
    with pytest.raises(DataError, match=r"columns that sum to 1.* pass the transpose"):
        realize_attention(x, target.T, 4)
    with pytest.raises(ShapeError, match=r"target must have the shape \(4, 4\)"):
        realize_attention(x, columns(4, 5), 4)
    with pytest.raises(DataError, match="x must be finite"):
        realize_attention(x * math.nan, target, 4)
