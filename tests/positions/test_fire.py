"""FIRE against its formula in NumPy, its limits and its gradients."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.positions import FirePositions, T5Positions
from tests.conftest import DATA

REFERENCE = json.loads((DATA / "length-task-fixtures" / "position_bias.json").read_text())


def normalised(fire: FirePositions, q_ids: torch.Tensor, k_ids: torch.Tensor) -> torch.Tensor:
    distance = fire._distance(q_ids.unsqueeze(2) - k_ids.unsqueeze(1))
    return fire._normalised(distance, fire._reach(q_ids, k_ids), fire._learned())


def bias(fire: FirePositions, ids: torch.Tensor) -> torch.Tensor:
    return fire.bias(ids, ids, q_index=ids - 1)


# --- reference values ---


@pytest.mark.parametrize("row", REFERENCE["fire_u"], ids=lambda r: f"{r['i']}-{r['j']}-{r['L']:g}")
def test_normalised_distance(row: dict) -> None:
    fire = FirePositions(1, init_c=row["c"], init_length=row["L"], eps=row["eps"])
    u = normalised(fire, torch.tensor([[row["i"] + 1]]), torch.tensor([[row["j"] + 1]]))
    assert u.item() == pytest.approx(row["u"], abs=2e-6)


def test_bias_equals_the_formula_in_numpy() -> None:
    torch.manual_seed(0)
    fire = FirePositions(3, hidden_dim=5, init_length=4.0, gain=2.0).double()
    w1, b1, w2, b2 = (
        p.detach().numpy()
        for p in (fire.mlp[0].weight, fire.mlp[0].bias, fire.mlp[2].weight, fire.mlp[2].bias)
    )
    out = bias(fire, torch.arange(1, 10)[None])[0].detach().numpy()
    for i in range(9):
        for j in range(i + 1):
            u = np.log(0.1 * (i - j) + 1) / (np.log(0.1 * max(i, 4) + 1) + 1e-6)
            expected = 2.0 * (w2 @ np.maximum(w1[:, 0] * u + b1, 0) + b2)
            np.testing.assert_allclose(out[:, i, j], expected, rtol=1e-6)


# --- limits and invariances ---


@pytest.mark.parametrize("c", [0.01, 0.1, 5.0])
@pytest.mark.parametrize("length", [1.0, 64.0, 1e5])
def test_input_of_the_network_stays_in_the_unit_interval(c: float, length: float) -> None:
    fire = FirePositions(1, init_c=c, init_length=length)
    positions = torch.tensor([[1, 2, 10, 1000, 10**6]])
    u = normalised(fire, positions, positions)
    assert (u >= 0).all()
    assert (u <= 1).all()


def test_toeplitz_below_the_threshold_only() -> None:
    def is_toeplitz(size: int) -> bool:
        b = bias(FirePositions(2, init_length=16.0), torch.arange(1, size + 1)[None])[0, 0]
        return all(
            torch.allclose(b.diagonal(-d), b.diagonal(-d)[:1], atol=1e-6) for d in range(size)
        )

    assert is_toeplitz(16)
    assert not is_toeplitz(24)


def test_one_query_equals_its_row() -> None:
    fire = FirePositions(2, init_length=4.0)
    ids = torch.arange(1, 12)[None]
    row = fire.bias(ids[:, 7:8], ids[:, :8], q_index=ids[:, 7:8] - 1)
    torch.testing.assert_close(row[:, :, 0], bias(fire, ids)[:, :, 7, :8])


def test_the_network_is_not_linear() -> None:
    torch.manual_seed(0)
    mlp = FirePositions(1).mlp
    halves = (
        mlp(torch.tensor([[0.5]])) - (mlp(torch.tensor([[0.0]])) + mlp(torch.tensor([[1.0]]))) / 2
    )
    assert halves.abs() > 1e-3


def test_batches_and_half_precision_agree() -> None:
    fire = FirePositions(2, init_length=4.0)
    ids = torch.arange(1, 9)[None]
    one = bias(fire, ids)
    assert torch.equal(one.expand(8, -1, -1, -1), bias(fire, ids.expand(8, 8)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = bias(fire, ids)
    torch.testing.assert_close(half, one, atol=1e-2, rtol=0)


def test_bidirectional_is_symmetric() -> None:
    b = bias(FirePositions(2, init_length=4.0, bidirectional=True), torch.arange(1, 12)[None])
    torch.testing.assert_close(b, b.mT)


def test_pairs_without_position_have_no_bias() -> None:
    b = bias(FirePositions(2, coupled=True), torch.tensor([[0, 3, 1, 3, 0]]))
    assert (b[..., 0, :] == 0).all()
    assert (b[..., :, 4] == 0).all()
    assert b[..., 1, 2].abs().min() > 0


def test_the_threshold_is_kept_in_the_state() -> None:
    fire = FirePositions(2, init_length=99.0)
    other = FirePositions(2, init_length=1.0)
    other.load_state_dict(fire.state_dict())
    assert other.init_length == 99.0


def test_it_can_be_alibi() -> None:
    """With its network fitted by least squares on 64 distances, FIRE equals a linear bias."""
    torch.manual_seed(0)
    fire = FirePositions(1, hidden_dim=256, init_length=64.0).double()
    distance = torch.arange(64, dtype=torch.float64)
    u = (normalised(fire, torch.full((1, 1), 64), torch.arange(64, 0, -1)[None])).flatten().detach()
    with torch.no_grad():
        fire.mlp[0].weight.fill_(1.0)
        fire.mlp[0].bias.copy_(-torch.linspace(-0.01, 1.0, 256, dtype=torch.float64))
        hidden = torch.cat((fire.mlp[1](fire.mlp[0](u[:, None])), torch.ones(64, 1).double()), 1)
        solution = torch.linalg.lstsq(hidden, -0.25 * distance[:, None], driver="gelsd").solution
        fire.mlp[2].weight.copy_(solution[:-1].T)
        fire.mlp[2].bias.copy_(solution[-1])
    ids = torch.arange(1, 65)[None]
    i, j = torch.tril_indices(64, 64)
    error = (bias(fire, ids)[0, 0, i, j] + 0.25 * (i - j)).abs().max()
    assert error < 1e-3


def test_it_can_be_t5() -> None:
    """Steep pairs of hidden units, one for each border of a bucket, make its steps."""
    torch.manual_seed(0)
    t5 = T5Positions(3, num_buckets=16, max_distance=40).double()
    borders = t5.borders.unique()
    fire = FirePositions(3, hidden_dim=2 * len(borders), init_length=64.0).double()
    far = torch.full((1, 1), 64)
    u = normalised(fire, far, torch.arange(64, 0, -1)[None]).flatten().detach()
    low, high = u[borders - 1], u[borders]
    values = t5.table[:, t5.bucket(torch.arange(64))].detach()  # (H, 64)
    steepness = (values[:, borders] - values[:, borders - 1]) / (high - low)
    with torch.no_grad():
        fire.mlp[0].weight.fill_(1.0)
        fire.mlp[0].bias.copy_(-torch.cat((low, high)))
        fire.mlp[2].weight.copy_(torch.cat((steepness, -steepness), dim=1))
        fire.mlp[2].bias.copy_(values[:, 0])
    ids = torch.arange(1, 65)[None]
    torch.testing.assert_close(
        bias(fire, ids), t5.bias(ids, ids, q_index=ids - 1), atol=1e-9, rtol=0
    )


# --- gradients ---


def test_gradients_of_every_parameter() -> None:
    fire = FirePositions(2, hidden_dim=4, init_length=3.0).double()
    ids = torch.arange(1, 7)[None]
    names = [name for name, _ in fire.named_parameters()]
    fire.forward = bias.__get__(fire)  # type: ignore[method-assign]

    def run(*values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(fire, dict(zip(names, values, strict=True)), (ids,))

    values = tuple(p.detach().clone().requires_grad_() for p in fire.parameters())
    assert torch.autograd.gradcheck(run, values)


def test_keys_after_the_query_give_no_nan() -> None:
    fire = FirePositions(1, init_c=2.0)
    ids = torch.arange(1, 50)[None]
    bias(fire, ids).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in fire.parameters())


def test_c_and_m_may_cross_zero() -> None:
    """Their absolute values are used; at 0 nothing becomes infinite."""
    fire = FirePositions(1, init_length=4.0)
    mirrored = FirePositions(1, init_length=4.0)
    mirrored.load_state_dict({**fire.state_dict(), "c": -fire.c, "multiplier": -fire.multiplier})
    ids = torch.arange(1, 12)[None]
    assert torch.equal(bias(mirrored, ids), bias(fire, ids))
    with torch.no_grad():
        fire.multiplier.zero_()
    bias(fire, ids).sum().backward()
    assert torch.isfinite(bias(fire, ids)).all()
    assert all(torch.isfinite(p.grad).all() for p in fire.parameters())


# --- bad input ---


@pytest.mark.parametrize(
    "options",
    [{"num_heads": 0}, {"hidden_dim": 0}, {"init_c": 0.0}, {"init_length": 0.0},
     {"init_length": -1.0}, {"eps": 0}],
)  # fmt: skip
def test_bad_options(options: dict) -> None:
    with pytest.raises(ConfigError):
        FirePositions(**{"num_heads": 2, **options})


def test_decreasing_ids_need_the_coupled_form() -> None:
    ids = torch.tensor([[3, 2, 1]])
    with pytest.raises(DataError, match="got decreasing ids"):
        bias(FirePositions(1), torch.tensor([[1, 2, 0, 1, 2, 3, 0]]))
    with pytest.raises(DataError, match="coupled=True"):
        bias(FirePositions(1), ids)
    assert bias(FirePositions(1, coupled=True), ids).shape == (1, 1, 3, 3)
