"""One against all: hand values, PyTorch's own, the bias."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.losses import BinaryCrossEntropyLoss

HAND = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)


def test_hand_value() -> None:
    """softplus of -2, -1 and 0: 0.126928 + 0.313262 + 0.693147 over 3 labels."""
    loss = BinaryCrossEntropyLoss(temperature=1.0)
    assert math.isclose(float(loss(HAND, [[0, 1]])), 0.377779, abs_tol=1e-6)
    halved = BinaryCrossEntropyLoss(temperature=0.5)(HAND / 2, [[0, 1]])
    assert math.isclose(float(halved), 0.377779, abs_tol=1e-6)


@pytest.mark.parametrize("bias", [None, -3.0])
def test_against_pytorch_and_differences(bias: float | None) -> None:
    torch.manual_seed(0)
    scores = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    targets = (torch.rand(4, 7) < 0.3).double()
    loss = BinaryCrossEntropyLoss(temperature=0.5, bias=bias)
    expected = F.binary_cross_entropy_with_logits(scores / 0.5 + (bias or 0.0), targets)
    torch.testing.assert_close(loss(scores, targets), expected)
    assert torch.autograd.gradcheck(lambda x: loss.double()(x, targets), (scores,))
    each = BinaryCrossEntropyLoss(temperature=0.5, bias=bias, reduction="none")(scores, targets)
    torch.testing.assert_close(each.mean(), expected)
    torch.testing.assert_close(
        BinaryCrossEntropyLoss(temperature=0.5, bias=bias, reduction="sum")(scores, targets),
        each.sum(),
    )


def test_the_bias_learns_and_starts_at_the_share_of_relevant_labels() -> None:
    assert list(BinaryCrossEntropyLoss().parameters()) == []
    labels = [[n] for n in range(5)]
    start = BinaryCrossEntropyLoss(bias=-math.log(99.0))  # 1 of 100 labels is relevant
    start(torch.zeros(5, 100), labels).backward()
    assert start.bias is not None
    assert start.bias.grad is not None
    assert abs(float(start.bias.grad)) < 1e-6
    zero = BinaryCrossEntropyLoss(bias=0.0)
    zero(torch.zeros(5, 100), labels).backward()
    assert zero.bias is not None
    assert zero.bias.grad is not None
    assert math.isclose(float(zero.bias.grad), 0.5 - 0.01, rel_tol=1e-5)


def test_a_row_may_be_empty() -> None:
    value = BinaryCrossEntropyLoss(temperature=1.0)(torch.zeros(1, 4), [[]])
    assert math.isclose(float(value), math.log(2), rel_tol=1e-6)


def test_half_precision_is_computed_in_float32() -> None:
    half = F.normalize(torch.randn(3, 8)).bfloat16().requires_grad_()
    loss = BinaryCrossEntropyLoss()
    value = loss(half, [[0], [1], [2]])
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(half.float(), [[0], [1], [2]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"bias": math.nan}, "bias must be finite"),
        ({"reduction": "max"}, "reduction"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BinaryCrossEntropyLoss(**options)


def test_bad_input() -> None:
    loss = BinaryCrossEntropyLoss()
    with pytest.raises(ShapeError, match=r"\(1, 3\); got \(1, 4\)"):
        loss(torch.zeros(1, 3), torch.zeros(1, 4))
    with pytest.raises(DataError, match="must not hold NaN"):
        loss(torch.tensor([[math.nan]]), [[0]])
