"""The recipe on scale-invariant training, with tiny settings: every arm gives its numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.layers import split_parameters
from gossamer.recipes import build_config, find_recipe
from gossamer.recipes.scale_invariant_sgd import MOST, groups_of, model_of, train
from gossamer.train.logging import NoLogger

RECIPE = find_recipe("scale-invariant-sgd")
TINY = {"length": 8, "dim": 16, "layers": 1, "batch_size": 4, "steps": 6, "test_tokens": 256}


def tiny(tmp_path: Path, **options: Any) -> Any:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    return build_config(RECIPE.scales["small"], {**TINY, "text": str(text), **options}, "tiny")


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_every_arm_gives_what_table_and_claims_ask(arm: str, tmp_path: Path) -> None:
    outcome = RECIPE.run(tiny(tmp_path), arm, 0, NoLogger())
    asked = {claim.metric for claim in RECIPE.claims if claim.ours == arm}
    assert asked <= set(outcome.scalars)
    assert all(math.isfinite(value) for value in outcome.scalars.values())
    assert set(outcome.scalars) <= {column.name for column in RECIPE.columns}
    assert {row["what"] for row in outcome.rows} == {"loss", "norm"}
    losses = [v for k, v in outcome.scalars.items() if k.startswith("init_")]
    assert len(losses) == (1 if arm == "si_adamw" else 5)
    if len(losses) > 1:
        assert outcome.scalars["spread_init"] == max(losses) - min(losses)


def test_the_scale_reaches_the_body_and_not_the_head(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    norms = [
        train(config, "si_sgd", 0, init=scale, loss_scale=1.0)["norms"][0]["norm"]
        for scale in (1.0, 100.0)
    ]
    assert norms[1] / norms[0] == pytest.approx(100.0, rel=1e-5)
    for arm in ("si_sgd", "sgd"):
        model = model_of(arm, 20, config)
        body, head = groups_of(model)
        assert [id(p) for p in head] == [id(model.head.weight)]
        assert len(body) + 1 == len(list(model.parameters()))
    model = model_of("si_sgd", 20, config)
    expected = [[id(p) for p in group] for group in split_parameters(model)]
    assert [[id(p) for p in group] for group in groups_of(model)] == expected


def test_a_run_that_diverges_counts_ten(tmp_path: Path) -> None:
    config = tiny(tmp_path, sgd_lr=1e30)
    assert train(config, "sgd", 0, init=1.0, loss_scale=1.0)["loss"] == MOST
    assert torch.isfinite(torch.tensor(MOST))
