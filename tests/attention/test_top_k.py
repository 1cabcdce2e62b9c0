"""Statistical top-k against its formula, its invariances, and the released relative of it."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gossamer.attention import StatisticalTopK, _top_k_loop, expected_count, statistical_top_k
from gossamer.errors import ConfigError, DataError, DtypeError

RAMP = torch.arange(10.0, dtype=torch.float64)


def reference(x: np.ndarray, k: int, *, ddof: int = 0) -> np.ndarray:
    """The formula in NumPy, float64, row by row."""
    out = np.zeros_like(x)
    for row, y in zip(x, out, strict=True):
        theta = row.mean() + row.std(ddof=ddof) * NormalDist().inv_cdf(1 - k / len(row))
        y[:] = np.maximum(row - theta, 0)
    return out


def test_worked_example() -> None:
    sample = statistical_top_k(RAMP, 2, unbiased=True)
    expected = torch.tensor([0.0] * 8 + [0.951865174, 1.951865174], dtype=torch.float64)
    torch.testing.assert_close(sample, expected, atol=1e-9, rtol=0)
    population = statistical_top_k(RAMP, 2)
    assert math.isclose(9 - float(population[9]), 6.917372950458, abs_tol=1e-12)
    assert math.isclose(9 - float(sample[9]), 7.048134825843, abs_tol=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
def test_equals_the_formula_on_any_axis(unbiased: bool) -> None:
    x = np.random.default_rng(0).normal(3, 2, (7, 50))
    expected = reference(x, 9, ddof=int(unbiased))
    rows = statistical_top_k(torch.from_numpy(x), 9, unbiased=unbiased)
    columns = statistical_top_k(torch.from_numpy(x.T.copy()), 9, dim=0, unbiased=unbiased)
    np.testing.assert_allclose(rows.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(columns.T.numpy(), expected, atol=1e-12)
    share = statistical_top_k(torch.from_numpy(x), 0.18, unbiased=unbiased)
    np.testing.assert_allclose(share.numpy(), expected, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    scale=st.floats(0.01, 100),
    shift=st.floats(-50, 50),
    seed=st.integers(0, 1000),
    k=st.integers(1, 19),
)
def test_scale_shift_and_order(scale: float, shift: float, seed: int, k: int) -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    plain = statistical_top_k(x, k)
    torch.testing.assert_close(statistical_top_k(scale * x + shift, k), scale * plain)
    order = torch.randperm(20)
    torch.testing.assert_close(statistical_top_k(x[:, order], k), plain[:, order])


def test_soft_form_solves_its_problem() -> None:
    """Minimises theta |z|_1 + |x - z|^2 / 2 over z >= 0, for a positive theta."""
    x = torch.randn(30, dtype=torch.float64) + 2
    z = statistical_top_k(x, 5)
    theta = float((x - z)[z > 0][0])
    grid = torch.linspace(0, 6, 6001, dtype=torch.float64)[:, None]
    cost = theta * grid + 0.5 * (x - grid).square()
    torch.testing.assert_close(grid[cost.argmin(0), 0], z, atol=1e-3, rtol=0)


def test_hard_form_keeps_values_and_fills() -> None:
    x = torch.randn(4, 100)
    soft, hard = statistical_top_k(x, 20), statistical_top_k(x, 20, soft=False, fill=-math.inf)
    assert torch.equal(hard > -math.inf, soft > 0)
    assert torch.equal(hard[soft > 0], x[soft > 0])
    # a softmax cannot tell them apart
    moved = statistical_top_k(x, 20, fill=-math.inf)
    torch.testing.assert_close(moved.softmax(-1), hard.softmax(-1), atol=1e-7, rtol=0)


def test_all_and_none() -> None:
    x = torch.randn(3, 6)
    assert torch.equal(statistical_top_k(x, 6), x)
    assert torch.equal(statistical_top_k(x, 1.0, soft=False, fill=-math.inf), x)
    for value in (0.0, 0.1, -7.3, 1e6):
        for k in (1, 3, 5):
            assert not statistical_top_k(torch.full((2, 6), value), k).any()
            assert not statistical_top_k(torch.full((2, 6), value), k, soft=False).any()


def test_a_large_mean_cancels_nothing() -> None:
    x = 100 + 0.01 * torch.randn(8, 4096)
    assert abs(float((statistical_top_k(x, 0.08) > 0).float().mean()) - 0.08) < 0.005
    half = 1 + torch.randn(8, 4096)
    for dtype in (torch.bfloat16, torch.float16):
        out = statistical_top_k(half.to(dtype), 0.08)
        assert out.dtype == dtype
        wide = statistical_top_k(half.to(dtype).float(), 0.08)
        torch.testing.assert_close(out, wide.to(dtype))


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("normal", 0.080), ("uniform", 0.094), ("laplace", 0.069), ("lognormal", 0.061),
        ("student", 0.047), ("outlier", 0.0001),
    ],
)  # fmt: skip
def test_share_that_other_laws_keep(name: str, share: float) -> None:
    """The operator is not robust: published shares at k = 8 % of 13,824."""
    rng = np.random.default_rng(1)
    size = (60, 13824)
    draws = {
        "normal": lambda: rng.normal(size=size),
        "uniform": lambda: rng.random(size),
        "laplace": lambda: rng.laplace(size=size),
        "lognormal": lambda: rng.lognormal(size=size),
        "student": lambda: rng.standard_t(3, size),
        "outlier": lambda: rng.normal(size=size),
    }
    x = draws[name]()
    if name == "outlier":
        x[:, 5] = 1000.0
    kept = (statistical_top_k(torch.from_numpy(x), 1106) > 0).double().mean()
    assert abs(float(kept) - share) < (5e-5 if name == "outlier" else 2e-3)


def test_spread_of_the_count() -> None:
    x = torch.randn(400, 4096, generator=torch.Generator().manual_seed(3))
    counts = (statistical_top_k(x, 0.08) > 0).sum(-1).double()
    mean, deviation = expected_count(4096, 0.08)
    assert abs(float(counts.mean()) / mean - 1) < 0.01
    assert abs(float(counts.std()) / deviation - 1) < 0.15
    assert math.isclose(expected_count(13824, 1106)[1], 20.3, abs_tol=0.05)
    assert expected_count(10, 10) == (10.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("unbiased", [False, True])
def test_inference_by_rows_equals_the_form_that_learns(
    dtype: torch.dtype, unbiased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_top_k_loop, "BLOCK_SIZE", 7 * 50)
    x = (torch.randn(4, 6, 50) * 3 + 1).to(dtype)
    x[1, 2] = 0.3  # a constant row
    for dim in (0, 1, -1):
        y = x.movedim(-1, dim).contiguous()
        learns = statistical_top_k(y.clone().requires_grad_(), 9, dim, unbiased=unbiased)
        got = statistical_top_k(y, 9, dim, unbiased=unbiased)
        assert got.shape == y.shape
        torch.testing.assert_close(got, learns.detach())
        assert not got.movedim(dim, -1)[1, 2].any()


@pytest.mark.parametrize("k", [9, 0.1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_selected_is_what_is_kept(k: float, dtype: torch.dtype) -> None:
    for unbiased in (False, True):
        top_k = StatisticalTopK(k, unbiased=unbiased)
        for x in (torch.randn(50), torch.full((50,), 0.3), torch.randn(100)[::2]):
            out = top_k(x.to(dtype))
            units, values = top_k.select(x.to(dtype))
            if k == 50:
                assert len(units) == 50
            assert units.tolist() == out.nonzero().squeeze(1).tolist()
            torch.testing.assert_close(values, out[units])
    moved = StatisticalTopK(20, calibrate=True)
    for _ in range(9):
        moved(torch.randn(8, 200).exp())
    x = torch.randn(200).exp()
    units, values = moved.eval().select(x)
    torch.testing.assert_close(values, moved(x)[units])
    assert len(units) == int((moved(x) > 0).sum())


# --- masks ---


def test_masked_rows_are_those_of_the_visible_entries() -> None:
    x = torch.randn(5, 40, dtype=torch.float64)
    mask = torch.rand(5, 40) < 0.6
    x = x.masked_fill(~mask, math.inf)  # what is hidden must not leak
    out = statistical_top_k(x, 6, mask=mask, soft=False, fill=-9.0)
    for row, seen, got in zip(x, mask, out, strict=True):
        expected = statistical_top_k(row[seen], 6, soft=False, fill=-9.0)
        torch.testing.assert_close(got[seen], expected)
        assert (got[~seen] == -9.0).all()


def test_few_visible_entries_are_kept_as_they_are() -> None:
    x = torch.randn(4, 9)
    mask = torch.arange(9) < torch.tensor([[0], [1], [4], [9]])
    out = statistical_top_k(x, 4, mask=mask)
    assert not out[0].any()
    assert torch.equal(out[1:3], x[1:3] * mask[1:3])
    assert 0 < int((out[3] > 0).sum()) < 9
    torch.testing.assert_close(out[3], statistical_top_k(x[3], 4))
    assert torch.equal(statistical_top_k(x, 99, mask=mask), x * mask)


# --- gradients ---


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_gradients(soft: bool, masked: bool) -> None:
    x = torch.linspace(-2, 3, 24, dtype=torch.float64).view(2, 12).sin() + RAMP[:2, None]
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 3] = False
    x.requires_grad_(True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return statistical_top_k(x, 4, mask=mask if masked else None, soft=soft)

    theta = (x - f(x))[f(x) > 0] if soft else None
    assert theta is None or ((x[..., None] - theta).abs() > 1e-3).all()  # away from the kink
    assert torch.autograd.gradcheck(f, (x,))


def test_gradient_flows_through_the_threshold_unless_detached() -> None:
    x = torch.randn(3, 50, dtype=torch.float64)
    weight = torch.randn(3, 50, dtype=torch.float64)
    through, cut = x.clone().requires_grad_(), x.clone().requires_grad_()
    (statistical_top_k(through, 9) * weight).sum().backward()
    (statistical_top_k(cut, 9, detach=True) * weight).sum().backward()
    kept = statistical_top_k(x, 9) > 0
    torch.testing.assert_close(cut.grad, weight * kept)
    # by hand: d theta / d x_j = 1/d + z (x_j - mean) / (d s)
    z = NormalDist().inv_cdf(1 - 9 / 50)
    slope = 1 / 50 + z * (x - x.mean(-1, keepdim=True)) / (
        50 * x.std(-1, correction=0, keepdim=True)
    )
    total = (weight * kept).sum(-1, keepdim=True)
    torch.testing.assert_close(through.grad, weight * kept - total * slope)


def test_a_constant_row_has_a_finite_gradient() -> None:
    x = torch.ones(2, 8, requires_grad=True)
    statistical_top_k(x, 3).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


# --- the module ---


def test_calibration_brings_the_count_back() -> None:
    generator = torch.Generator().manual_seed(0)

    def skewed() -> torch.Tensor:
        return torch.randn(32, 2000, generator=generator).exp()

    top_k = StatisticalTopK(160, calibrate=True)
    before = float((top_k.eval()(skewed()) > 0).float().mean())
    top_k.train()
    for _ in range(120):
        top_k(skewed())
    top_k.eval()
    after = float((top_k(skewed()) > 0).float().mean())
    assert abs(before - 0.08) > 0.01
    assert abs(after - 0.08) < 0.003
    frozen = top_k.offset.clone()
    top_k(skewed())
    assert torch.equal(top_k.offset, frozen)
    other = StatisticalTopK(160, calibrate=True)
    other.load_state_dict(top_k.state_dict())
    x = skewed()
    assert torch.equal(other.eval()(x), top_k(x))


def test_a_layer_that_is_computed_again_finds_the_threshold_it_had() -> None:
    top_k = StatisticalTopK(20, calibrate=True)
    twin = StatisticalTopK(20, calibrate=True)
    for _ in range(5):
        x = torch.randn(8, 200).exp().requires_grad_()
        y = x.detach().clone().requires_grad_()
        checkpoint(top_k, x, use_reentrant=False).square().sum().backward()
        twin(y).square().sum().backward()
        assert torch.equal(x.grad, y.grad)
    for name, value in twin.state_dict().items():
        assert torch.equal(top_k.state_dict()[name], value)
    assert float(top_k.offset) != 0.0


def test_quantiles() -> None:
    for share, z in ((0.2, 0.841621233573), (0.08, 1.405071560310), (0.05, 1.644853626951)):
        x = torch.randn(1000, dtype=torch.float64)
        x = (x - x.mean()) / x.std(correction=0)  # so that theta is the quantile
        out = statistical_top_k(x, share)
        theta = (x - out)[out > 0]
        torch.testing.assert_close(theta, torch.full_like(theta, z), atol=1e-10, rtol=0)


def test_calibration_counts_visible_entries_only() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(64, 300, generator=generator) < 0.5
    top_k = StatisticalTopK(20, calibrate=True)
    for _ in range(120):
        top_k(torch.randn(64, 300, generator=generator).exp(), mask)
    kept = top_k.eval()(torch.randn(64, 300, generator=generator).exp(), mask) > 0
    assert abs(float(kept.sum(-1).float().mean()) - 20) < 1.0


def test_module_exports_and_compiles_without_host_values() -> None:
    top_k = StatisticalTopK(5)
    x = torch.randn(3, 60)
    program = torch.export.export(top_k, (x,))
    torch.testing.assert_close(program.module()(x), top_k(x))
    targets = {str(node.target) for node in program.graph.nodes}
    assert not [name for name in targets if "erfinv" in name or "local_scalar" in name]


def test_equals_the_released_gemma_block() -> None:
    pytest.importorskip("transformers")
    from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    config = Gemma3nTextConfig(
        hidden_size=32,
        intermediate_size=400,
        num_hidden_layers=1,
        activation_sparsity_pattern=[0.95],
    )
    block = Gemma3nTextMLP(config, layer_idx=0).eval()
    x = torch.randn(6, 32)
    with torch.no_grad():
        gate = statistical_top_k(block.gate_proj(x), 0.05)
        ours = block.down_proj(F.gelu(gate, approximate="tanh") * block.up_proj(x))
        torch.testing.assert_close(ours, block(x), atol=1e-6, rtol=0)


# --- bad input ---


@pytest.mark.parametrize("k", [0, -1, 11, 0.0, 1.5, -0.1, True, math.nan])
def test_bad_targets(k: float) -> None:
    with pytest.raises(ConfigError, match=r"k \(a"):
        statistical_top_k(RAMP, k)


def test_bad_input() -> None:
    with pytest.raises(DtypeError, match="x must be floating point; got"):
        statistical_top_k(torch.arange(4), 2)
    with pytest.raises(ConfigError, match="needs at least 2 entries; got 1"):
        statistical_top_k(torch.ones(3, 1), 1, unbiased=True)
    with pytest.raises(DtypeError, match="mask must be boolean"):
        statistical_top_k(RAMP, 2, mask=torch.ones(10))
    with pytest.raises(ConfigError, match=r"k \(a share\)"):
        StatisticalTopK(2.0)
    with pytest.raises(ConfigError, match="size must be"):
        expected_count(1, 1)
    bad = torch.tensor([1.0, math.nan, 3.0])
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(DataError, match="x must be finite"):
            statistical_top_k(bad, 1)
        hidden = torch.tensor([True, False, True])
        assert statistical_top_k(bad, 1, mask=hidden).isfinite().all()
