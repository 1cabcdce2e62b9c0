"""The recipes over many labels on a tiny data set: every arm gives every metric."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from gossamer.errors import DataError
from gossamer.recipes import decoupled_softmax, soft_top_k
from gossamer.recipes._multi_label import COLUMNS, MultiLabelConfig, measure_count
from gossamer.retrieval import write_xmc
from gossamer.train.logging import NoLogger

WORDS = [f"w{n}" for n in range(120)]


@pytest.fixture
def config(tmp_path: Path) -> MultiLabelConfig:
    """Texts that hold the words of their labels, the first label on every other row."""
    rng = np.random.default_rng(0)
    for short, size in (("trn", 60), ("tst", 30)):
        labels = rng.random((size, len(WORDS))) < 0.02
        labels[::2, 0] = True
        labels[1::2, 1] = True
        write_xmc(labels.astype(float), labels, tmp_path / f"{short}.txt")
    (tmp_path / "features.txt").write_text("\n".join(WORDS))
    (tmp_path / "labels.txt").write_text("\n".join(f"about {word}" for word in WORDS))
    return MultiLabelConfig(data=str(tmp_path), dim=8, epochs=2, batch_size=16, neighbours=3)


@pytest.mark.parametrize("recipe", [decoupled_softmax, soft_top_k])
def test_every_arm_gives_every_metric(recipe: object, config: MultiLabelConfig) -> None:
    for arm in recipe.RECIPE.arms:
        outcome = recipe.run(config, arm.name, 0, NoLogger())
        assert set(outcome.scalars) == {column.name for column in COLUMNS}
        assert all(0.0 <= value <= 100.0 for value in outcome.scalars.values())
        assert {row["metric"] for row in outcome.rows} == {column.label for column in COLUMNS}


def test_popularity_is_right_where_the_first_label_is(config: MultiLabelConfig) -> None:
    assert measure_count(config, "popularity").scalars["p1"] >= 50.0


def test_a_linear_model_reads_the_words(config: MultiLabelConfig) -> None:
    assert measure_count(config, "linear").scalars["p1"] > 90.0


def test_missing_data_names_the_variable(
    config: MultiLabelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    with pytest.raises(DataError, match="no GOSSAMER_DATA"):
        measure_count(dataclasses.replace(config, data="none"), "linear")
