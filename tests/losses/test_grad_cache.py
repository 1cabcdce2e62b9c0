"""The gradient by chunks against the gradient of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.losses import (
    BinaryCrossEntropyLoss,
    CoupledSoftmaxLoss,
    DecoupledSoftmaxLoss,
    GradientCache,
    SoftTopKLoss,
    SummedSoftmaxLoss,
)

LABELS = [[0], [1, 2], [3], [4, 5], [6]]
LOSSES: list[Any] = [
    DecoupledSoftmaxLoss(temperature=1.0),
    CoupledSoftmaxLoss(temperature=0.5, reduction="sum"),
    SummedSoftmaxLoss(temperature=0.5),
    SoftTopKLoss(2, temperature=1.0),
    SoftTopKLoss("positives", temperature=0.5),
    BinaryCrossEntropyLoss(temperature=1.0),  # needs all scores
    DecoupledSoftmaxLoss(temperature=1.0, num_negatives=99),  # this one too
]


def encoder(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4)
    return nn.Sequential(*layers).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(5, 6, generator=generator, dtype=torch.float64),
        torch.randn(9, 6, generator=generator, dtype=torch.float64),
    )


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 9, 100])
@pytest.mark.parametrize(
    "loss", [DecoupledSoftmaxLoss(temperature=1.0), SoftTopKLoss(2, temperature=1.0)]
)
def test_equals_the_whole_batch(chunk_size: int, loss: Any) -> None:
    model, (x, y) = encoder(), data()
    plain = loss(model(x) @ model(y).T, LABELS)
    plain.backward()
    expected = gradients(model)
    value = GradientCache(model, loss, chunk_size=chunk_size).backward(x, y, LABELS)
    torch.testing.assert_close(value, plain.detach(), atol=1e-12, rtol=0)
    assert not value.requires_grad
    for a, b in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 9])
def test_dropout_draws_the_same_in_both_passes(chunk_size: int) -> None:
    model, (x, y) = encoder(0.5).train(), data()
    loss = DecoupledSoftmaxLoss(temperature=1.0)
    torch.manual_seed(7)
    # the whole batch encodes in the same chunks, so that it draws the same
    parts = [[model(part) for part in side.split(chunk_size)] for side in (x, y)]
    plain = loss(torch.cat(parts[0]) @ torch.cat(parts[1]).T, LABELS)
    plain.backward()
    after = torch.rand(1)
    expected = gradients(model)
    torch.manual_seed(7)
    value = GradientCache(model, loss, chunk_size=chunk_size).backward(x, y, LABELS)
    assert torch.equal(torch.rand(1), after)  # as if encoded once
    torch.testing.assert_close(value, plain.detach())
    for a, b in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)


def test_mappings_lists_and_two_encoders() -> None:
    """One `encode` may tell its two sides apart, and gets what the user has."""
    model, (x, y) = encoder(), data()
    towers = nn.ModuleDict({"x": encoder(), "y": encoder()})
    torch.manual_seed(3)
    nn.init.normal_(towers["y"][0].weight)
    loss = DecoupledSoftmaxLoss(temperature=1.0)

    def encode(chunk: Any) -> Tensor:
        kind = "x" if "x" in chunk else "y"
        return towers[kind](chunk[kind])

    loss(towers["x"](x) @ towers["y"](y).T, LABELS).backward()
    expected = gradients(towers)
    GradientCache(encode, loss, chunk_size=2).backward({"x": x}, {"y": y}, LABELS)
    for a, b in zip(gradients(towers), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)
    loss(model(x) @ model(y).T, LABELS).backward()
    expected = gradients(model)
    stacked = GradientCache(lambda rows: model(torch.stack(rows)), loss, chunk_size=4)
    stacked.backward(list(x), list(y), LABELS)
    for a, b in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize("loss", LOSSES[:5], ids=lambda loss: type(loss).__name__)
def test_float32_with_dropout(loss: Any) -> None:
    model, (x, y) = encoder(0.3).float().train(), data()
    x, y = x.float(), y.float()
    torch.manual_seed(5)
    plain = loss(torch.cat([model(x[:4]), model(x[4:])]) @ torch.cat(
        [model(y[:4]), model(y[4:8]), model(y[8:])]
    ).T, LABELS)  # fmt: skip
    plain.backward()
    expected = gradients(model)
    torch.manual_seed(5)
    value = GradientCache(model, loss, chunk_size=4).backward(x, y, LABELS)
    torch.testing.assert_close(value, plain.detach(), atol=1e-6, rtol=1e-5)
    for a, b in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * b.abs().max().item(), rtol=1e-4)


def test_stored_embeddings_may_be_smaller() -> None:
    model, (x, y) = encoder(), data()
    seen = {}
    for dtype in (None, torch.float32, torch.float16):
        cache = GradientCache(model, SoftTopKLoss(2), chunk_size=4, store_dtype=dtype)
        value = cache.backward(x / 9, y / 9, LABELS)
        seen[dtype] = [value, *gradients(model)]
    for dtype, off in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        for a, b in zip(seen[dtype], seen[None], strict=True):
            torch.testing.assert_close(a, b, atol=off * b.abs().max().item(), rtol=off)
        assert not torch.equal(seen[dtype][0], seen[None][0])


def test_fewer_label_inputs_than_columns() -> None:
    model, (x, y) = encoder(), data()
    cache = GradientCache(model, DecoupledSoftmaxLoss(temperature=1.0), chunk_size=4)
    with pytest.raises(DataError, match="from 0 to 5; got 6 in row 4"):
        cache.backward(x, y[:6], LABELS)
    with pytest.raises(ShapeError, match=r"the shape of the logits, \(5, 6\); got \(5, 9\)"):
        cache.backward(x, y[:6], torch.ones(5, 9))


def test_gradients_are_added() -> None:
    model, (x, y) = encoder(), data()
    cache = GradientCache(model, DecoupledSoftmaxLoss(temperature=1.0), chunk_size=3)
    cache.backward(x, y, LABELS)
    once = [p.grad.clone() for p in model.parameters()]
    cache.backward(x, y, LABELS)
    for p, g in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)


def test_bad_input() -> None:
    model, (x, y) = encoder(), data()
    loss = DecoupledSoftmaxLoss(temperature=1.0)
    with pytest.raises(ConfigError, match="chunk_size"):
        GradientCache(model, loss, chunk_size=0)
    with pytest.raises(ConfigError, match=r"store_dtype must be floating point; got torch\.int8"):
        GradientCache(model, loss, store_dtype=torch.int8)
    cache = GradientCache(model, loss, chunk_size=4)
    with pytest.raises(DataError, match="label_inputs must hold at least one entry"):
        cache.backward(x, y[:0], LABELS)
    with pytest.raises(ShapeError, match=r"entries of inputs must have one length; got \[4, 5\]"):
        cache.backward({"a": x, "b": x[:4]}, y, LABELS)
    with pytest.raises(ShapeError, match="one row for each of 4 inputs"):
        GradientCache(lambda rows: model(rows)[None], loss, chunk_size=4).backward(x, y, LABELS)
    with pytest.raises(ConfigError, match="parameters that learn"):
        GradientCache(lambda rows: model(rows).detach(), loss).backward(x, y, LABELS)
