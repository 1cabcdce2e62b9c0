"""The parts of the recipe on label noise: arms, measures, data."""

from __future__ import annotations

import math

import pytest
import torch

from gossamer.recipes import _label_noise
from gossamer.recipes._label_noise import Fitted, load, measure, train
from gossamer.recipes.label_noise import RECIPE, Config, run
from gossamer.train.logging import NoLogger

TINY = Config(hidden=8, epochs=1, batch_size=512)


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_every_arm_gives_what_its_claims_need(arm: str) -> None:
    outcome = run(TINY, arm, 0, NoLogger())
    needed = {c.metric for c in RECIPE.claims if c.ours == arm}
    columns = {column.name for column in RECIPE.columns}
    for scalars in (outcome.scalars, *outcome.variants.values()):
        assert set(scalars) <= columns
        assert all(math.isfinite(value) for value in scalars.values())
    assert needed <= set(outcome.scalars)
    assert len(outcome.rows) == 1 + len(outcome.variants)


def test_variants_are_the_alphas() -> None:
    smoothing = run(TINY, "smoothing", 0, NoLogger())
    assert list(smoothing.variants) == ["alpha 0.1", "alpha 0.2", "alpha 0.6"]
    forward = run(TINY, "forward", 0, NoLogger())
    assert list(forward.variants) == ["alpha 0.22", "estimated"]
    assert forward.rows[0]["loss"] == "forward alpha 0.6"


def test_noise_is_in_the_training_labels_alone() -> None:
    data = load("digits", 0.2, 0)
    assert (len(data.x), len(data.x_test)) == (1078, 719)
    assert 0.15 < float(data.flipped.float().mean()) < 0.25
    assert torch.equal(data.flipped, data.labels != data.true)
    other = load("digits", 0.2, 1)
    assert not torch.equal(other.labels, data.labels)
    assert not load("digits", 0.0, 0).flipped.any()


def test_measures_by_hand() -> None:
    data = load("digits", 0.2, 0)
    perfect = Fitted(*(50.0 * torch.eye(10)[labels] for labels in (data.true, data.y_test)))
    found = measure(perfect, data)
    assert found["accuracy"] == found["repaired"] == 100
    assert found["ece"] == pytest.approx(0, abs=1e-6)
    learned = Fitted(50.0 * torch.eye(10)[data.labels], perfect.test)
    assert measure(learned, data)["repaired"] == 0


def test_early_stopping_keeps_the_best_epoch() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x[:, 0] > 0).long()
    config = Config(hidden=8, epochs=6, batch_size=16, lr=0.02)
    loss = _label_noise.LabelSmoothingLoss(0.0)
    kept = train(x, 1 - y, loss, config, 0, held=(x, y))  # learning makes it worse
    last = train(x, 1 - y, loss, config, 0)
    shares = [float((net(x).argmax(1) == y).float().mean()) for net in (kept, last)]
    assert shares[0] > shares[1]
