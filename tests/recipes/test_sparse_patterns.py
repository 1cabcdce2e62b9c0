"""The parts of the recipe on sparse patterns: every arm runs, and hops are as counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gossamer.recipes.sparse_patterns import (
    RECIPE,
    Config,
    _task,
    layers_of,
    measure_pattern,
    model_of,
    run,
)
from gossamer.train.logging import NoLogger

SMALL = Config()
TINY = dataclasses.replace(
    SMALL, num_samples=10, dim=8, hidden_dim=8, num_heads=2, batch_size=4, steps=2
)
ARMS = [arm.name for arm in RECIPE.arms]


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_gives_its_columns_and_rows(arm: str) -> None:
    torch.manual_seed(0)
    outcome = run(TINY, arm, 0, NoLogger())
    wanted = {column.name for column in RECIPE.columns}
    assert set(outcome.scalars) <= wanted
    assert wanted - set(outcome.scalars) <= {"reach"}
    assert [row["place"] for row in outcome.rows] == list(range(1, 13))
    assert outcome.scalars["layers"] == layers_of(arm, TINY)


def test_samples_are_digits_a_separator_and_their_copy() -> None:
    batch = _task(SMALL).stream(4, seed=0).batch(0)
    assert batch.tokens.shape == (4, 25)
    assert torch.equal(batch.tokens[:, :12], batch.tokens[:, 13:])
    assert batch.loss_mask.tolist() == [[False] * 13 + [True] * 12] * 4
    assert batch.tokens[:, 12].tolist() == [_task(SMALL).vocab.index("=")] * 4


@pytest.mark.parametrize(
    ("arm", "keys", "reach", "hops"),
    [
        ("full", 25.0, 1, [1] * 12),
        ("strided_union", 12.2, 2, [2] * 12),
        ("strided_per_head", 12.2, 2, [2] * 12),
        ("strided_sequential", 7.4, 2, [2] * 12),
        ("strided_one_layer", 12.2, 2, [2] * 12),
        ("sliding_wide", 12.8, 4, [2] * 12),
        ("sliding_narrow", 4.8, 12, [7] * 12),
        ("star_ring", 4.76, 2, [*[2] * 11, 1]),
    ],
)
def test_hops_keys_and_reach(arm: str, keys: float, reach: int, hops: list[int]) -> None:
    found = measure_pattern(model_of(arm, SMALL, 0), SMALL)
    assert found[0] == hops
    assert found[1] == pytest.approx(keys, abs=0.05)
    assert found[2] == reach


def test_random_patterns_reach_some_places_in_one_layer() -> None:
    for seed in range(3):
        hops = measure_pattern(model_of("random_one_layer", SMALL, seed), SMALL)[0]
        assert 0 < sum(hop == 1 for hop in hops) < 12
        assert max(measure_pattern(model_of("random", SMALL, seed), SMALL)[0]) == 2


def test_arms_of_two_layers_start_from_the_same_weights() -> None:
    states = []
    for arm in ARMS:
        torch.manual_seed(3)
        if layers_of(arm, SMALL) == 2:
            states.append(model_of(arm, SMALL, 0).state_dict())
    for name, value in states[0].items():
        assert all(torch.equal(state[name], value) for state in states[1:])
