"""T5's buckets against the published ones, and the bias that they share."""

from __future__ import annotations

import json
import math

import pytest
import torch

from gossamer.errors import ConfigError
from gossamer.models import Decoder
from gossamer.positions import T5Positions
from tests.conftest import DATA

REFERENCE = json.loads((DATA / "length-task-fixtures" / "position_bias.json").read_text())


def bias(t5: T5Positions, ids: torch.Tensor) -> torch.Tensor:
    return t5.bias(ids, ids, q_index=ids - 1)


# --- reference values ---


@pytest.mark.parametrize(
    ("table", "bidirectional", "sign"),
    [("causal", False, 1), ("bidirectional_past", True, 1), ("bidirectional_future", True, -1)],
)
def test_published_buckets(table: str, bidirectional: bool, sign: int) -> None:
    expected = REFERENCE[f"t5_bucket_{table}_32_128"]
    offsets = sign * torch.arange(len(expected))
    assert T5Positions(1, bidirectional=bidirectional).bucket(offsets).tolist() == expected


def test_far_and_future_keys() -> None:
    causal, both = T5Positions(1), T5Positions(1, bidirectional=True)
    assert causal.bucket(torch.tensor([128, 1000, 10**9, -1, -500])).tolist() == [31, 31, 31, 0, 0]
    assert both.bucket(torch.tensor([1000, -1000])).tolist() == [15, 31]


@pytest.mark.parametrize(
    ("buckets", "distance"), [(8, 16), (16, 100), (64, 500), (3, 7), (2, 9), (32, 17), (33, 4096)]
)
def test_buckets_equal_the_formula(buckets: int, distance: int) -> None:
    t5 = T5Positions(1, num_buckets=buckets, max_distance=distance)
    exact = buckets // 2
    for d in range(2 * distance):
        expected = d
        if d >= exact:
            share = math.log(d / exact) / math.log(distance / exact)
            # exact powers may come out just below an integer in float64
            expected = min(exact + math.floor(share * (buckets - exact) + 1e-9), buckets - 1)
        assert t5.bucket(torch.tensor(d)).item() == expected


def test_bias_is_the_entry_of_the_bucket() -> None:
    t5 = T5Positions(3, num_buckets=8, max_distance=16, bidirectional=True)
    p = [0, 1, 4, 30, 2, 0]
    b = bias(t5, torch.tensor([p]))
    for i, p_i in enumerate(p):
        for j, p_j in enumerate(p):
            bucket = t5.bucket(torch.tensor(p_i - p_j))
            expected = t5.table[:, bucket] if p_i and p_j else torch.zeros(3)
            assert torch.equal(b[0, :, i, j], expected)


def test_start_is_uniform_xavier() -> None:
    torch.manual_seed(0)
    table = T5Positions(96).table
    limit = math.sqrt(6 / (96 + 32))
    assert table.abs().max() <= limit
    assert table.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.05)


# --- limits and invariances ---


def test_only_differences_count_and_the_far_are_alike() -> None:
    t5 = T5Positions(2)
    ids = torch.tensor([[1, 2, 20, 400, 401, 10000]])
    assert torch.equal(bias(t5, ids), bias(t5, ids + 77))
    assert torch.equal(bias(t5, ids)[:, :, 5, 0], bias(t5, ids)[:, :, 3, 0])


def test_one_table_serves_all_layers_and_the_scale_is_the_attentions() -> None:
    model = Decoder(14, 16, 3, 2, positions="t5", attention={"scale": 1.0})
    assert len(model.positions) == 1
    assert all(layer.attention.scale == 1.0 for layer in model.layers)
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 14)


# --- gradients ---


def test_gradient_of_the_table() -> None:
    t5 = T5Positions(2, num_buckets=6, max_distance=9, bidirectional=True).double()
    ids = torch.tensor([[0, 1, 2, 5, 4, 16, 0]])
    t5.forward = bias.__get__(t5)  # type: ignore[method-assign]

    def run(table: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(t5, {"table": table}, (ids,))

    assert torch.autograd.gradcheck(run, (t5.table.detach().clone().requires_grad_(),))


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"num_buckets": 1}, "num_buckets must be >= 2"),
        ({"num_buckets": 2, "bidirectional": True}, "num_buckets must be >= 4"),
        ({"num_buckets": 33, "bidirectional": True}, "must be even"),
        ({"max_distance": 16}, "max_distance must be larger than the 16 distances"),
        ({"max_distance": 8, "bidirectional": True}, "larger than the 8 distances"),
        ({"max_distance": 99.5}, "max_distance must be an integer"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        T5Positions(**{"num_heads": 2, **options})
