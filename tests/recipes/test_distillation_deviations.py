"""The parts of the recipe on distillation: arms, data, the linear case in exact arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.recipes import _distillation as parts
from gossamer.recipes.distillation_deviations import RECIPE, Config, run
from gossamer.train.logging import NoLogger

TINY = Config(data="digits", hidden=8, epochs=1, batch_size=128, tracked_steps=9, resamples=5)


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_every_arm_gives_what_its_claims_and_figures_need(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "STOPS", (5,))  # the exact counts have a test of their own
    if arm == "linear":
        monkeypatch.setattr(parts, "violations", lambda: {"violations": 0.0, "violations_all": 0.0})
    outcome = run(TINY, arm, 0, NoLogger())
    columns = {column.name for column in RECIPE.columns}
    for scalars in (outcome.scalars, *outcome.variants.values()):
        assert set(scalars) <= columns
        assert all(isinstance(value, float) for value in scalars.values())
        assert math.isfinite(scalars.get("slope", 0.0))
    assert {c.metric for c in RECIPE.claims if c.ours == arm} <= set(outcome.scalars)
    for figure in RECIPE.figures:
        where = dict(figure.options["where"])
        if where.pop("arm", "linear") == arm:
            rows = [r for r in outcome.rows if all(r[k] == v for k, v in where.items())]
            assert rows
            assert all({figure.x, figure.options["group"]} <= set(row) for row in rows)
            assert any(figure.y in row for row in rows)


def test_the_control_stands_beside_the_student() -> None:
    outcome = run(TINY, "noisy", 0, NoLogger())
    assert set(outcome.variants) == {"control", "label smoothing .1", "temperature 1"}
    control = outcome.variants["control"]
    for name in ("slope", "deming", "underfit"):
        gain = outcome.scalars[f"{name}_gain"]
        assert gain == pytest.approx(outcome.scalars[name] - control[name])
    assert outcome.scalars["over_control"] == pytest.approx(
        outcome.scalars["accuracy"] - control["accuracy"]
    )
    assert not any(name.endswith("_gain") for name in control)


def test_all_but_the_teacher_start_alike() -> None:
    still = Config(data="digits", hidden=8, epochs=1, batch_size=2000, lr=1e-12, tracked_steps=1)
    teacher, *others = (parts.fit(still, 0.2, 0, kind).test for kind in ("teacher", *parts.RUNS))
    for other in others[1:]:
        torch.testing.assert_close(other, others[0], atol=1e-6, rtol=0)
    assert not torch.allclose(teacher, others[0], atol=1e-2)


def test_pixels_are_standardised_by_training() -> None:
    data = parts.data_of(TINY, 0.2, 0)
    assert float(data.x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.x.std()) == pytest.approx(1, abs=1e-5)
    assert float(data.x_test.mean()) != float(data.x.mean())
    assert torch.equal(data.flipped, data.labels != data.true)
    assert 0.15 < float(data.flipped.float().mean()) < 0.25


def test_digits_stand_in_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    with pytest.warns(UserWarning, match="mnist_10k is not below GOSSAMER_DATA"):
        data = parts.data_of(Config(lr=0.01), 0.0, 0)
    assert data.x.shape == (1078, 64)


def test_images_where_they_are(outside_data: Any) -> None:
    if not (outside_data / "mnist_10k").is_dir():
        pytest.skip("mnist_10k is not below GOSSAMER_DATA: this test needs it")
    data = parts.data_of(Config(), 0.0, 0)
    assert data.x.shape == data.x_test.shape == (5000, 784)


def test_students_learn_from_outputs_alone() -> None:
    config = Config(data="digits", hidden=32, epochs=8, tracked_steps=1)
    teacher, student = (parts.fit(config, 0.0, 0, kind) for kind in ("teacher", "kd_4"))
    data = parts.data_of(config, 0.0, 0)
    right = (student.test.argmax(1) == data.y_test).float().mean()
    assert float(right) > 0.9
    agreement = (student.train.argmax(1) == teacher.train.argmax(1)).float().mean()
    assert float(agreement) > 0.95


def test_violations_are_counted_in_exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "EIGENVALUES", 12)
    assert parts.violations() == {"violations": 0.0, "violations_all": 0.0}
    # so late that 60 digits see no difference on the upper directions
    monkeypatch.setattr(parts, "STOPS", (1000,))
    found = parts.violations()
    assert found["violations_all"] > found["violations"] > 0


def test_descent_and_factors() -> None:
    assert parts.descent_error(0, steps=80) < 1e-12
    factors, rows = parts.linear_rows()
    assert [round(factors[f"factor_{stop}"], 1) for stop in (5, 20, 80)] == [4.2, 3.2, 1.4]
    runs = {row["run"] for row in rows}
    assert runs == {"teacher", *(f"student of time {stop}" for stop in (5, 20, 80))}
    finite = [row for row in rows if np.isfinite(row["lower"])]
    assert all(0 < row["lower"] < row["upper"] < 1 for row in finite)
