"""The parts of the recipe on attention outputs: every arm runs, and arms differ in the norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossamer.recipes.vanishing_variance import NORM, RECIPE, Config, model_of, run, task_of
from gossamer.train.logging import NoLogger

TINY = Config(
    num_items=(2, 4), test_items=(16, 64), num_samples=20, num_priorities=8, num_keys=4,
    num_classes=3, dim=8, num_heads=2, batch_size=4, steps=2,
)  # fmt: skip
ARMS = [arm.name for arm in RECIPE.arms]


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_gives_its_columns_and_rows(arm: str) -> None:
    torch.manual_seed(0)
    outcome = run(TINY, arm, 0, NoLogger())
    scalars = outcome.scalars
    assert {"exact_match_16", "exact_match_64", "slope_trained"} <= set(scalars)
    assert scalars["distance_from_half"] == pytest.approx(abs(scalars["slope_start"] + 0.5))
    kinds = [row["what"] for row in outcome.rows]
    assert kinds == ["answers"] * 2 + ["start"] * 2 + ["trained"] * 2
    if arm.endswith("_none"):  # without a norm there is one output to measure
        assert scalars["slope_after_norm"] == scalars["slope_trained"]


@pytest.mark.parametrize("task", ["argmax", "lookup"])
def test_arms_of_a_task_start_from_the_same_weights(task: str) -> None:
    states = []
    for norm in ("none", "layer", "rms", "standard"):
        torch.manual_seed(3)
        model = model_of(f"{task}_{norm}", task_of(task, TINY), TINY)
        states.append(model.state_dict())
    for name, value in states[0].items():
        assert all(torch.equal(state[name], value) for state in states[1:])


def test_standardisation_is_a_layer_norm_that_learns_nothing() -> None:
    model = model_of("argmax_standard", task_of("argmax", TINY), TINY)
    norm = model.get_submodule(NORM)
    assert isinstance(norm, nn.LayerNorm)
    assert not any(parameter.requires_grad for parameter in norm.parameters())
    learned = model_of("argmax_layer", task_of("argmax", TINY), TINY).get_submodule(NORM)
    assert all(parameter.requires_grad for parameter in learned.parameters())
