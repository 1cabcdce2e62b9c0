"""Learned tables, plain and coupled."""

from __future__ import annotations

import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.models import Decoder
from gossamer.positions import CoupledPositions, LearnedPositions

# --- reference values ---


def test_distinct_consecutive_ids_equal_plain_absolute_positions() -> None:
    plain, coupled = LearnedPositions(8, 20), CoupledPositions(8, 20)
    coupled.tables[0].load_state_dict(plain.table.state_dict())
    ids = torch.arange(1, 15)[None]
    assert torch.equal(plain.embed(ids), coupled.embed(ids))


@pytest.mark.parametrize(("rows", "dim"), [(10, 32), (32, 32), (50, 32)])
def test_rows_start_orthogonal_where_they_fit(rows: int, dim: int) -> None:
    table = CoupledPositions(dim, rows - 1).tables[0].weight.detach().double()
    products = table @ table.T if rows <= dim else table.T @ table
    size = max(rows, dim)
    torch.testing.assert_close(
        products, size * torch.eye(min(rows, dim)).double(), atol=1e-4, rtol=0
    )
    assert table.std().item() == pytest.approx(1.0, rel=0.05)


def test_levels_are_summed_and_row_zero_learns() -> None:
    coupled = CoupledPositions(8, [5, 9], levels=2)
    ids = torch.tensor([[[0, 9], [5, 0]]])
    expected = coupled.tables[0](ids[..., 0]) + coupled.tables[1](ids[..., 1])
    assert torch.equal(coupled.embed(ids), expected)
    coupled.embed(ids).sum().backward()
    assert coupled.tables[0].weight.grad[0].abs().sum() > 0
    shared = CoupledPositions(8, [5, 9], levels=2, shared=True)
    assert len(shared.tables) == 1
    assert torch.equal(shared.embed(ids), shared.tables[0](ids).sum(2))


def test_a_table_names_its_maximum() -> None:
    with pytest.raises(DataError, match="max_position = 5"):
        CoupledPositions(8, 5).embed(torch.tensor([[6]]))
    with pytest.raises(DataError, match="max_position = 5 at level 1"):
        CoupledPositions(8, [5, 9], levels=2).embed(torch.tensor([[[6, 9]]]))
    with pytest.raises(ConfigError, match="one entry for each of 2 levels"):
        CoupledPositions(8, [5], levels=2)


def test_random_start_is_drawn_for_each_sample_of_a_batch() -> None:
    torch.manual_seed(0)
    positions = {"name": "learned", "max_position": 60, "random_start": True}
    model = Decoder(14, 16, 1, 2, positions=positions)
    tokens = torch.randint(14, (1, 8)).expand(6, 8)
    assert not torch.allclose(model.train()(tokens)[0], model(tokens)[1])
    rows = model(tokens)
    assert len({tuple(row.flatten().tolist()) for row in rows}) > 3
    assert torch.equal(model.eval()(tokens)[0], model(tokens)[1])


def test_random_start_reaches_every_row_and_keeps_zero() -> None:
    torch.manual_seed(0)
    learned = LearnedPositions(4, 12, random_start=True).train()
    ids = torch.tensor([[0, 1, 2, 3]]).expand(400, 4)
    learned.embed(ids).sum().backward()
    touched = learned.table.weight.grad.abs().sum(1) > 0
    assert touched.all()
    # 0 is not shifted: its row was looked up once for each sample
    assert learned.table.weight.grad[0, 0] == 400
    learned.eval()
    assert torch.equal(learned.embed(ids[:1])[0, 1:], learned.table(torch.tensor([4, 5, 6])))
    message = r"must be <= 9 in evaluation, where a table of 12 .* read from 3 on; got 11"
    with pytest.raises(DataError, match=message):
        learned.embed(torch.arange(1, 12)[None])
    with pytest.raises(DataError, match="max_position = 12"):
        learned.train().embed(torch.arange(1, 14)[None])


def test_random_start_of_a_short_sample_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    learned = LearnedPositions(4, 12, random_start=True).train()
    ids = torch.tensor([[1, 2, 0, 0], [9, 10, 11, 12]]).repeat(300, 1)
    learned.embed(ids)[0::2].sum().backward()
    assert (learned.table.weight.grad.abs().sum(1) > 0).all()


# --- levels ---


def test_levels_may_be_permuted_together_with_their_tables() -> None:
    limits = [5, 9, 3]
    one = CoupledPositions(8, limits, levels=3)
    order = [2, 0, 1]
    other = CoupledPositions(8, [limits[n] for n in order], levels=3)
    for table, n in zip(other.tables, order, strict=True):
        table.load_state_dict(one.tables[n].state_dict())
    ids = torch.stack([torch.randint(m + 1, (2, 6)) for m in limits], dim=-1)
    torch.testing.assert_close(other.embed(ids[..., order]), one.embed(ids))


def test_a_level_without_ids_adds_the_same_everywhere() -> None:
    """With the second level dropped, two levels are the one-level model."""
    two, one = CoupledPositions(8, 9, levels=2), CoupledPositions(8, 9)
    one.tables[0].load_state_dict(two.tables[0].state_dict())
    ids = torch.randint(10, (2, 6))
    with_zeros = torch.stack((ids, torch.zeros_like(ids)), dim=-1)
    torch.testing.assert_close(
        two.embed(with_zeros) - two.tables[1].weight[0], one.embed(ids), atol=1e-5, rtol=0
    )


# --- gradients ---


def test_token_and_position_rows_have_equal_gradients() -> None:
    """Added at the input they cannot be told apart: both rows move by the same vector."""
    torch.manual_seed(0)
    model = Decoder(14, 16, 2, 2, positions={"name": "learned", "max_position": 12})
    tokens = torch.randperm(14)[None, :9]
    model(tokens).square().sum().backward()
    by_token = model.embedding.weight.grad[tokens[0]]
    by_position = model.positions[0].table.weight.grad[1:10]
    assert by_token.abs().min(1).values.max() > 0
    torch.testing.assert_close(by_token, by_position)


# --- bad input ---


@pytest.mark.parametrize("limit", [0, -3, 2.5, [4, 0]])
def test_bad_tables(limit: object) -> None:
    with pytest.raises(ConfigError, match="max_position"):
        CoupledPositions(8, limit, levels=2)
    with pytest.raises(ConfigError, match="max_position"):
        LearnedPositions(8, limit)
