"""Kerple's two kernels against their formulas, and the ranges of what is learned."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError
from gossamer.positions import (
    AlibiPositions,
    KerpleLogPositions,
    KerplePowerPositions,
    Positions,
    alibi_slopes,
)
from tests.conftest import DATA

REFERENCE = json.loads((DATA / "length-task-fixtures" / "position_bias.json").read_text())
KINDS = {"log": KerpleLogPositions, "power": KerplePowerPositions}


def with_values(kind: str, r1: object, r2: object, **options: bool) -> Positions:
    """Build with given coefficients, by the inverse of softplus or of twice the sigmoid."""
    r1, r2 = (np.atleast_1d(np.asarray(r, dtype=np.float64)) for r in (r1, r2))
    positions = KINDS[kind](len(r1), **options).double()
    raw_r2 = np.log(np.expm1(r2 - 1e-6))
    if kind == "power":
        share = (r2 - 1e-6) / (2 - 1e-6)
        raw_r2 = np.log(share / (1 - share))
    with torch.no_grad():
        positions.raw_r1.copy_(torch.from_numpy(np.log(np.expm1(r1 - 1e-6))))
        positions.raw_r2.copy_(torch.from_numpy(raw_r2))
    return positions


def bias(positions: Positions, ids: torch.Tensor) -> torch.Tensor:
    return positions.bias(ids, ids, q_index=ids - 1)


# --- reference values ---


@pytest.mark.parametrize("row", REFERENCE["kerple"], ids=lambda r: f"{r['kind']}-{r['dist']}")
def test_reference(row: dict) -> None:
    positions = with_values(row["kind"], row["r1"], row["r2"])
    q_ids, k_ids = torch.tensor([[row["dist"] + 1]]), torch.tensor([[1]])
    value = positions.bias(q_ids, k_ids, q_index=q_ids - 1)
    assert value.item() == pytest.approx(row["b"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bias_equals_the_formula_in_numpy(kind: str, bidirectional: bool) -> None:
    r1, r2 = np.array([0.5, 1.7, 0.02]), np.array([0.9, 0.1, 1.4])
    positions = with_values(kind, r1, r2, bidirectional=bidirectional)
    p = np.array([0, 1, 2, 7, 4, 0, 30])
    difference = (p[:, None] - p[None]).astype(np.float64)
    distance = np.abs(difference) if bidirectional else np.maximum(difference, 0)
    a, b, d = r1[:, None, None], r2[:, None, None], distance[None]
    expected = -a * np.log(1 + b * d) if kind == "log" else -a * d**b
    expected = expected * ((p > 0)[:, None] & (p > 0)[None])
    ours = bias(positions, torch.from_numpy(p)[None])[0].detach().numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


# --- limits and invariances ---


def test_power_one_is_alibi() -> None:
    ids = torch.arange(1, 30)[None]
    positions = with_values("power", alibi_slopes(6).double().numpy(), np.ones(6))
    torch.testing.assert_close(
        bias(positions, ids).float(), bias(AlibiPositions(6), ids), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_only_differences_count(kind: str) -> None:
    positions = KINDS[kind](3, bidirectional=True)
    ids = torch.tensor([[5, 1, 9, 9, 30]])
    torch.testing.assert_close(bias(positions, ids), bias(positions, ids + 4000))


@pytest.mark.parametrize("kind", KINDS)
def test_start_is_in_the_authors_range(kind: str) -> None:
    torch.manual_seed(0)
    positions = KINDS[kind](4000)
    high = {"log": (2.0, 1.0), "power": (1.0, 2.0)}[kind]
    for value, top in zip((positions.r1, positions.r2), high, strict=True):
        assert 0.0099 < value.min() < 0.02
        assert top - 0.02 < value.max() < top
        assert value.mean().item() == pytest.approx(top / 2, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_no_training_step_leaves_the_range(kind: str, sign: float) -> None:
    """Whatever the optimizer does to the free numbers, the kernel stays one."""
    torch.manual_seed(0)
    positions = KINDS[kind](4)
    optimizer = torch.optim.SGD(positions.parameters(), lr=100.0)
    ids = torch.arange(1, 9)[None]
    for _ in range(20):
        optimizer.zero_grad()
        (sign * bias(positions, ids).sum()).backward()
        optimizer.step()
        assert (positions.r1 > 0).all()
        assert (positions.r2 > 0).all()
        assert torch.isfinite(bias(positions, ids)).all()
        if kind == "power":
            assert (positions.r2 <= 2).all()
    with torch.no_grad():
        positions.raw_r2.fill_(-1e4 * sign)
        positions.raw_r1.fill_(-1e4)
    assert (positions.r1 > 0).all()
    assert (positions.r2 > 0).all()
    assert kind == "log" or (positions.r2 <= 2).all()


# --- gradients ---


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    positions = KINDS[kind](2).double()
    ids = torch.tensor([[0, 1, 2, 3, 3, 9]])
    positions.forward = bias.__get__(positions)  # type: ignore[method-assign]

    def run(*values: torch.Tensor) -> torch.Tensor:
        named = dict(zip(("raw_r1", "raw_r2"), values, strict=True))
        return torch.func.functional_call(positions, named, (ids,))

    values = tuple(p.detach().clone().requires_grad_() for p in positions.parameters())
    assert torch.autograd.gradcheck(run, values)


# --- bad input ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [0, 1.5])
def test_bad_head_counts(kind: str, heads: object) -> None:
    with pytest.raises(ConfigError, match="num_heads"):
        KINDS[kind](heads)
