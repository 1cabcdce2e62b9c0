"""Coupled relative bias and the rules that make ids."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.models import Decoder
from gossamer.positions import CoupledRelativePositions, abacus_ids, couple_groups, shift_ids
from gossamer.tasks import AdditionTask

# --- reference values ---


def test_bias_by_hand() -> None:
    encoding = CoupledRelativePositions(2, window=2, gain=10.0, base_length=32)
    ids = [0, 4, 1, 2, 0, 9]
    index = [3, 4, 5, 6, 7, 8]
    tensor = torch.tensor([ids])
    bias = encoding.bias(tensor, tensor, q_index=torch.tensor([index]))
    table = encoding.table[0].detach().double().numpy()
    for q, (q_id, i) in enumerate(zip(ids, index, strict=True)):
        for k, k_id in enumerate(ids):
            if q_id == 0 and k_id == 0:
                bucket = 7
            elif q_id == 0:
                bucket = 5
            elif k_id == 0:
                bucket = 6
            else:
                bucket = int(np.clip(k_id - q_id, -2, 2)) + 2
            expected = math.log(i + 2) / math.log(32) * 10 * table[bucket]
            np.testing.assert_allclose(bias[0, :, q, k].detach().numpy(), expected, rtol=1e-5)


def test_queries_are_scaled_like_the_bias() -> None:
    encoding = CoupledRelativePositions(2, base_length=16)
    q = torch.ones(1, 2, 3, 4)
    ids = torch.tensor([[1, 2, 3]])
    scaled, k = encoding.rotate(q, q, ids, ids, q_index=torch.tensor([[0, 14, 254]]))
    expected = torch.tensor([math.log(2) / math.log(16), 1.0, 2.0])
    torch.testing.assert_close(scaled[0, 0, :, 0], expected)
    assert k is q


def test_parameter_count_of_the_quickstart_model() -> None:
    model = Decoder(
        14, 64, 1, 4, positions="coupled_relative", norm="pre_post",
        feed_forward={"name": "gated", "hidden_dim": 256},
    )  # fmt: skip
    # 67,680 with one bucket for id 0; three buckets here, 2 x 4 heads more
    assert model.num_parameters() == 67_688


# --- limits and invariances ---


@torch.no_grad()
def test_logits_do_not_depend_on_the_start() -> None:
    torch.manual_seed(0)
    relative = Decoder(14, 32, 1, 4, positions="coupled_relative").eval()
    table = Decoder(14, 32, 1, 4, positions={"name": "coupled", "max_position": 40}).eval()
    task = AdditionTask()
    example = task.example("653+49")
    tokens = example.tokens[None]
    for start in (2, 7, 30):
        shifted = task.position_ids("653+49", start=start)[None]
        difference = relative(tokens, shifted) - relative(tokens, example.position_ids[None])
        assert difference.abs().max() < 1e-5
        assert (
            table(tokens, shifted) - table(tokens, example.position_ids[None])
        ).abs().max() > 1e-3


def test_levels_add_up_exactly() -> None:
    encoding = CoupledRelativePositions(3, levels=2, window=2, length_scale="none")
    ids = torch.randint(0, 5, (2, 6, 2))
    whole = encoding.bias(ids, ids, q_index=torch.zeros(2, 6))
    total = torch.zeros_like(whole)
    for level in range(2):
        one = CoupledRelativePositions(3, window=2, length_scale="none")
        one.table.data = encoding.table.data[level : level + 1]
        total = total + one.bias(ids[..., level], ids[..., level], q_index=torch.zeros(2, 6))
    torch.testing.assert_close(whole, total)


def test_levels_may_be_permuted_together_with_their_tables() -> None:
    one, other = (CoupledRelativePositions(3, levels=3, window=2) for _ in range(2))
    order = [2, 0, 1]
    other.table.data = one.table.data[order]
    ids, index = torch.randint(0, 5, (2, 6, 3)), torch.arange(6)[None]
    torch.testing.assert_close(
        other.bias(ids[..., order], ids[..., order], q_index=index),
        one.bias(ids, ids, q_index=index),
    )


def test_each_level_may_be_shifted_by_its_own_constant() -> None:
    encoding = CoupledRelativePositions(3, levels=3)
    ids, index = torch.randint(0, 5, (2, 6, 3)), torch.arange(6)[None]
    moved = torch.where(ids > 0, ids + torch.tensor([7, 0, 400]), 0)
    assert torch.equal(
        encoding.bias(moved, moved, q_index=index), encoding.bias(ids, ids, q_index=index)
    )


@torch.no_grad()
def test_a_model_does_not_see_the_start_of_a_level() -> None:
    torch.manual_seed(0)
    entry = {"name": "coupled_relative", "levels": 2}
    model = Decoder(14, 32, 2, 4, positions=entry).eval()
    tokens, ids = torch.randint(14, (2, 9)), torch.randint(0, 6, (2, 9, 2))
    moved = torch.where(ids > 0, ids + torch.tensor([3, 90]), 0)
    assert torch.equal(model(tokens, moved), model(tokens, ids))
    assert (model(tokens, ids.flip(-1)) - model(tokens, ids)).abs().max() > 1e-3


def test_an_empty_level_reads_its_bucket_for_none_alone() -> None:
    """With the second level dropped, two levels are the one-level bias plus a constant."""
    two = CoupledRelativePositions(3, levels=2, length_scale="none")
    one = CoupledRelativePositions(3, length_scale="none")
    one.table.data = two.table.data[:1]
    ids, index = torch.randint(0, 5, (2, 6)), torch.arange(6)[None]
    both = torch.stack((ids, torch.zeros_like(ids)), dim=-1)
    constant = 10.0 * two.table[1, -1].view(1, 3, 1, 1)
    torch.testing.assert_close(
        two.bias(both, both, q_index=index), one.bias(ids, ids, q_index=index) + constant
    )


def test_one_token_keeps_its_logits() -> None:
    """log(1) = 0 would erase every logit of a sequence of one token."""
    encoding = CoupledRelativePositions(2, length_scale="sequence")
    ids = torch.tensor([[3]])
    q = torch.ones(1, 2, 1, 4)
    scaled, _ = encoding.rotate(q, q, ids, ids, q_index=torch.tensor([[0]]))
    assert scaled.abs().min() > 0.1
    assert encoding.bias(ids, ids, q_index=torch.tensor([[0]])).abs().min() > 0


def test_sequence_scale_is_not_cacheable() -> None:
    model = Decoder(
        14, 16, 1, 2, positions={"name": "coupled_relative", "length_scale": "sequence"}
    )
    assert not model.cacheable
    prompt = torch.tensor([[1, 2, 3]])
    ids = torch.arange(1, 6)[None]
    assert model.generate(prompt, ids, max_new_tokens=2).shape == (1, 2)
    with pytest.raises(NotImplementedError, match="final length"):
        model.generate(prompt, ids, max_new_tokens=2, use_cache=True)


# --- gradients ---


def test_gradient_of_the_table() -> None:
    encoding = CoupledRelativePositions(2, levels=2, window=1).double()
    ids = torch.randint(0, 4, (1, 5, 2))
    index = torch.arange(5)[None]

    def bias(table: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(
            encoding, {"table": table}, (ids, ids), {"q_index": index}
        )

    encoding.forward = encoding.bias  # type: ignore[method-assign]
    table = encoding.table.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(bias, (table,))


def test_buckets_of_tokens_without_position_learn() -> None:
    encoding = CoupledRelativePositions(2, levels=2, window=2)
    ids = torch.tensor([[[0, 1], [3, 0], [0, 0], [2, 2]]])
    encoding.bias(ids, ids, q_index=torch.arange(4)[None]).sum().backward()
    # query without, key without, both without: the last three rows of each level
    assert (encoding.table.grad[:, -3:].abs() > 0).all()


# --- rules that make ids ---


def test_couple_groups_gives_the_ids_of_addition() -> None:
    ids = couple_groups([[4, 3, 2, 1], [8, 7, 6, 5], [9, 10, 11, 12, 13]], 15)
    assert ids.tolist() == [0, 4, 3, 2, 1, 4, 3, 2, 1, 1, 2, 3, 4, 5, 0]
    with pytest.raises(DataError, match="index 1 twice"):
        couple_groups([[1], [1]], 3)
    with pytest.raises(DataError, match=r"0\.\.2; got 3"):
        couple_groups([[3]], 3)


def test_shift_ids_is_uniform_seeded_and_bounded() -> None:
    ids = torch.tensor([[0, 2, 1, 2, 0]]).expand(3000, 5)
    shifted = shift_ids(ids, 5, generator=torch.Generator().manual_seed(0))
    offsets = shifted[:, 1] - 2
    counts = torch.bincount(offsets, minlength=4)
    assert len(counts) == 4
    # chi-square over 4 cells; 16.3 is the 99.9 % point of 3 degrees of freedom
    assert ((counts - 750) ** 2 / 750).sum() < 16.3
    assert (shifted[:, [0, 4]] == 0).all()
    assert (shifted[:, 1] == shifted[:, 3]).all()
    again = shift_ids(ids, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(shifted, again)
    state = torch.get_rng_state()
    shift_ids(ids, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(state, torch.get_rng_state())


def test_shift_ids_moves_every_level_alone() -> None:
    ids = torch.ones(200, 3, 2, dtype=torch.long)
    shifted = shift_ids(ids, [4, 9], generator=torch.Generator().manual_seed(0))
    assert shifted[..., 0].max() == 4
    assert shifted[..., 1].max() == 9
    with pytest.raises(DataError, match="max_position = 4"):
        shift_ids(torch.tensor([[5]]), 4)
    with pytest.raises(ShapeError, match="one entry for each of 2 levels"):
        shift_ids(ids, [4])


def test_abacus_ids() -> None:
    tokens = torch.tensor([[1, 2, 10, 3, 4, 5, 11], [10, 10, 1, 11, 2, 3, 4]])
    expected = [[1, 2, 0, 1, 2, 3, 0], [0, 0, 1, 0, 1, 2, 3]]
    assert abacus_ids(tokens, range(10)).tolist() == expected
    assert abacus_ids(tokens[0], range(10), start=5).tolist() == [5, 6, 0, 5, 6, 7, 0]


# --- bad input ---


@pytest.mark.parametrize(
    "options",
    [{"window": 0}, {"gain": 0.0}, {"base_length": 1}, {"levels": 0}, {"length_scale": "no"},
     {"num_heads": 0}],
)  # fmt: skip
def test_bad_options(options: dict) -> None:
    with pytest.raises(ConfigError):
        CoupledRelativePositions(**{"num_heads": 2, **options})
