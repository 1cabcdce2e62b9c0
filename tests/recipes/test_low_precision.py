"""The parts of the recipe on low precision: every arm runs, roundings are what they say."""

from __future__ import annotations

import math

import pytest
import torch

from gossamer.recipes.low_precision import (
    RECIPE,
    Config,
    bias_of,
    compute,
    draw,
    exactly,
    round_stochastically,
    run,
)
from gossamer.train.logging import NoLogger

TINY = Config(num_rows=300, num_values=2)


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_every_arm_gives_its_columns(arm: str) -> None:
    outcome = run(TINY, arm, 0, NoLogger())
    assert set(outcome.scalars) == {column.name for column in RECIPE.columns}
    assert all(math.isfinite(value) for value in outcome.scalars.values())
    assert len(outcome.rows) == 7


def test_draws_are_shared_and_have_the_ties_they_should() -> None:
    q, k, v = draw(TINY, 3, TINY.tail, TINY.values, 1)
    again = draw(TINY, 3, TINY.tail, TINY.values, 1)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), again, strict=True))
    scores = (q @ k.mT / 8)[:, 0, 0]
    assert (scores == 3.0).sum(-1).tolist() == [3] * 300
    assert scores[:, 3:].max() <= 3.0 - 13.9
    assert v.max() <= -2.09
    assert torch.equal(v, v.bfloat16().float())


def test_bias_of_plain_attention_is_seen_and_removed() -> None:
    inputs = draw(TINY, 2, TINY.tail, TINY.values, 1)
    exact = exactly(*inputs)
    plain = bias_of(compute("plain", *inputs), exact)
    assert -0.6 < plain < -0.2
    assert abs(bias_of(compute("beta7", *inputs), exact)) < abs(plain) / 4


def test_stochastic_rounding_keeps_the_mean() -> None:
    x = torch.full((100_000,), -4.7)
    out = round_stochastically(x, torch.Generator().manual_seed(0))
    assert torch.equal(out, out.bfloat16().float())
    assert len(out.unique()) == 2
    assert float(out.double().mean()) == pytest.approx(-4.7, abs=2e-4)
    kept = torch.tensor([1.0, -2.5])
    assert torch.equal(round_stochastically(kept, torch.Generator()), kept)
