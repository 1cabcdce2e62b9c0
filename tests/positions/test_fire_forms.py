"""FIRE's quick forms against the formula, the memory that they take, and random positions."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.errors import ConfigError, DataError
from gossamer.models import Decoder
from gossamer.positions import FirePositions, fire

PLAIN = torch.arange(1, 24)[None]
PADDED = torch.stack([torch.nn.functional.pad(PLAIN[0, : 23 - n], (n, 0)) for n in (0, 3, 9)])
COUPLED = torch.tensor([[0, 3, 2, 1, 0, 3, 2, 1, 1, 2, 3, 4]])
IDS = {"plain": PLAIN, "padded": PADDED, "coupled": COUPLED}


def build(length: float, **options: object) -> FirePositions:
    torch.manual_seed(0)
    return FirePositions(
        3, hidden_dim=5, init_length=length, **{"coupled": True, **options}
    ).double()


def bias(positions: FirePositions, ids: torch.Tensor) -> torch.Tensor:
    return positions.bias(ids, ids, q_index=ids - 1)


def formula(positions: FirePositions, ids: torch.Tensor) -> torch.Tensor:
    return positions._pairs(ids, ids, positions._learned())


def assert_same(positions: FirePositions, ids: torch.Tensor) -> None:
    quick, plain = bias(positions, ids), formula(positions, ids)
    torch.testing.assert_close(quick, plain)
    weight = torch.randn_like(plain)
    parameters = list(positions.parameters())
    gradients = [torch.autograd.grad((b * weight).sum(), parameters) for b in (quick, plain)]
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)


class Largest(TorchDispatchMode):
    """Remember the size of the largest tensor made, and of the largest hidden layer."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.hidden = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() > 1 and out.shape[-1] == self.hidden_dim:
            self.hidden = max(self.hidden, out.numel())
        return out


# --- below the threshold: once for each distance ---


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("ids", IDS)
def test_a_table_of_distances_equals_the_formula(ids: str, bidirectional: bool) -> None:
    assert_same(build(23.5, bidirectional=bidirectional), IDS[ids])


@pytest.mark.parametrize("length", [21.5, 22.0, 22.5])
def test_near_the_threshold_as_well(length: float) -> None:
    """The last of 23 queries is at 22: at equality the maximum shares its gradient."""
    assert_same(build(length), PLAIN)


@pytest.mark.parametrize("length", [64.0, 4.0])
def test_how_often_the_network_runs(length: float) -> None:
    positions = build(length)
    with Largest(5) as largest:
        bias(positions, PLAIN)
    assert largest.hidden == 5 * (23 if length == 64.0 else 23 * 23)


# --- beyond it: blocks of queries ---


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("limit", [1, 5 * 23 * 4, 5 * 23 * 23 - 1])
@pytest.mark.parametrize("ids", IDS)
def test_blocks_equal_the_formula(
    ids: str, limit: int, bidirectional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fire, "_MOST_HIDDEN", limit)
    assert_same(build(2.0, bidirectional=bidirectional), IDS[ids])


@pytest.mark.parametrize("learning", [False, True])
def test_hidden_layer_is_bounded(learning: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 5 * 23 * 4
    monkeypatch.setattr(fire, "_MOST_HIDDEN", limit)
    positions = build(2.0)
    with Largest(5) as largest, torch.set_grad_enabled(learning):
        out = bias(positions, PLAIN)
        if learning:
            out.sum().backward()
    assert 0 < largest.hidden <= limit


def test_blocks_keep_the_parameters_that_a_call_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed again in the backward pass, a block must not see the module's own parameters."""
    monkeypatch.setattr(fire, "_MOST_HIDDEN", 2 * 5 * 2)
    positions = FirePositions(1, hidden_dim=2, init_length=3.0).double()
    positions.forward = bias.__get__(positions)  # type: ignore[method-assign]
    names = [name for name, _ in positions.named_parameters()]

    def run(*values: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(positions, given, (PLAIN[:, :5],))

    values = tuple((p.detach() * 1.1).requires_grad_() for p in positions.parameters())
    assert torch.autograd.gradcheck(run, values)


# --- random positions ---


def drawn(positions: FirePositions, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return positions._redrawn(ids, ids)


def test_drawn_positions_increase_below_the_limit_and_reach_all_of_it() -> None:
    positions = build(8.0, random_max_position=40)
    seen = torch.zeros(41)
    for _ in range(200):
        q_ids, k_ids = drawn(positions, PADDED)
        assert torch.equal(q_ids, k_ids)
        assert (q_ids[0].diff() > 0).all()
        assert q_ids.max() <= 40
        assert torch.equal(q_ids == 0, PADDED == 0)
        # samples share the draw: equal ids, equal positions
        assert torch.equal(q_ids[1, 3:], q_ids[0, :20])
        seen += torch.bincount(q_ids[0], minlength=41)
    # each of 40 positions is in a draw of 23 with probability 23/40, standard deviation 7
    assert seen[0] == 0
    assert (seen[1:] - 200 * 23 / 40).abs().max() < 28


def test_tokens_that_share_an_id_share_the_position_drawn() -> None:
    positions = build(8.0, random_max_position=40)
    ids, _ = drawn(positions, COUPLED)
    by_id = [set(ids[n == COUPLED].tolist()) for n in range(5)]
    assert by_id[0] == {0}
    assert all(len(found) == 1 for found in by_id)
    assert [min(found) for found in by_id] == sorted(min(found) for found in by_id)


def test_training_draws_and_evaluation_does_not() -> None:
    plain, random = build(8.0), build(8.0, random_max_position=200)
    assert torch.equal(bias(random.eval(), PLAIN), bias(plain, PLAIN))
    random.train()
    torch.manual_seed(1)
    first, second = bias(random, PLAIN), bias(random, PLAIN)
    assert (first - second).abs().max() > 1e-3
    torch.manual_seed(1)
    assert torch.equal(bias(random, PLAIN), first)
    # a query and its own key are at the same position, whatever is drawn
    diagonal = first.diagonal(dim1=2, dim2=3)
    torch.testing.assert_close(diagonal, bias(plain, PLAIN).diagonal(dim1=2, dim2=3))


def test_as_many_positions_as_tokens_are_the_plain_ones() -> None:
    plain, random = build(8.0), build(8.0, random_max_position=23)
    assert torch.equal(bias(random, PLAIN), bias(plain, PLAIN))


def test_a_model_trains_on_random_positions_and_decodes_on_plain_ones() -> None:
    torch.manual_seed(0)
    entry = {"name": "fire", "init_length": 8.0, "random_max_position": 64}
    model = Decoder(14, 16, 2, 2, positions=entry)
    tokens = torch.randint(14, (3, 12))
    assert (model(tokens) - model(tokens)).abs().max() > 1e-5
    model(tokens).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        cache = model.new_cache()
        parts = [model(tokens[:, n : n + 1], cache=cache) for n in range(12)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-5, rtol=0)
    long = torch.randint(14, (1, 80))
    assert model(long).shape == (1, 80, 14)
    with pytest.raises(DataError, match="got 80 with random_max_position = 64"):
        model.train()(long)


@pytest.mark.parametrize("limit", [-1, 2.5, True])
def test_bad_limits(limit: object) -> None:
    with pytest.raises(ConfigError, match="random_max_position"):
        FirePositions(2, random_max_position=limit)
