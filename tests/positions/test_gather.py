"""Biases by offset: one evaluation for each offset against one for each pair."""

from __future__ import annotations

import pytest
import torch

from gossamer.positions import (
    FirePositions,
    KerpleLogPositions,
    KerplePowerPositions,
    Positions,
    T5Positions,
)
from gossamer.positions._gather import bias_of_offsets, take

SHAPES = [(1, 1, 1), (1, 7, 7), (3, 5, 9), (2, 63, 63), (1, 1, 40), (1, 100, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_equal_the_plain_evaluation(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    offset = torch.randint(-4, 5, shape, generator=generator)
    placed = torch.rand(shape, generator=generator) < 0.8
    weight = torch.randn(shape[0], 3, *shape[1:], generator=generator).double()
    slopes = torch.tensor([[0.3], [1.0], [2.0]], dtype=torch.float64, requires_grad=True)

    def columns(n: torch.Tensor) -> torch.Tensor:
        return torch.sin(slopes * n)

    fast = bias_of_offsets(columns, offset, placed)
    plain = torch.sin(slopes[:, :, None, None] * offset).transpose(0, 1) * placed.unsqueeze(1)
    torch.testing.assert_close(fast, plain)
    ours, expected = (torch.autograd.grad((b * weight).sum(), slopes)[0] for b in (fast, plain))
    torch.testing.assert_close(ours, expected)


def test_each_offset_is_evaluated_once() -> None:
    asked: list[int] = []

    def columns(n: torch.Tensor) -> torch.Tensor:
        asked.extend(n.tolist())
        return n[None].double()

    ids = torch.arange(1, 31)
    offset = (ids[:, None] - ids[None])[None]
    bias_of_offsets(columns, offset, torch.ones_like(offset, dtype=torch.bool))
    assert asked == list(range(-29, 30))
    asked.clear()
    # a few far ids: a table of all offsets between would be larger than the pairs
    far = torch.tensor([[[0, 10**9], [-(10**9), 0]]])
    bias_of_offsets(columns, far, torch.ones_like(far, dtype=torch.bool))
    assert len(asked) == 4


def test_both_ways_to_take_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    index = torch.randint(6, (2, 5, 4))
    embedded = torch.nn.functional.embedding(index, table.T).permute(0, 3, 1, 2)
    assert torch.equal(take(table, index), embedded)
    weight = torch.randn(2, 3, 5, 4).double()
    ours, expected = (
        torch.autograd.grad((b * weight).sum(), table)[0] for b in (take(table, index), embedded)
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    "kind", [FirePositions, KerpleLogPositions, KerplePowerPositions, T5Positions]
)
def test_encodings_give_the_same_by_table_and_by_pair(
    kind: type[Positions], bidirectional: bool
) -> None:
    """A row by itself is evaluated by pair, many rows by table."""
    torch.manual_seed(0)
    positions = kind(3, bidirectional=bidirectional).double()
    ids = torch.tensor([[0, 0, *range(1, 38)], [*range(1, 40)]])
    whole = positions.bias(ids, ids, q_index=ids)
    weight = torch.randn_like(whole)
    gradients = torch.autograd.grad((whole * weight).sum(), list(positions.parameters()))
    rows = [
        torch.cat(
            [positions.bias(s[:, n : n + 1], s, q_index=s[:, n : n + 1]) for n in range(39)], dim=2
        )
        for s in ids.split(1)
    ]
    by_pair = torch.cat(rows)
    torch.testing.assert_close(whole, by_pair)
    others = torch.autograd.grad((by_pair * weight).sum(), list(positions.parameters()))
    for ours, expected in zip(gradients, others, strict=True):
        torch.testing.assert_close(ours, expected)
