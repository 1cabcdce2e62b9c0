"""The parts of the recipe on generalization measures: arms, data, gaps."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.errors import DataError
from gossamer.recipes import _generalization
from gossamer.recipes._generalization import curve, fit, load, measure, report, shaken, taus
from gossamer.recipes.generalization_measures import RECIPE, Config, gaps, least, rises, run
from gossamer.train.logging import NoLogger


@pytest.fixture
def tiny(tmp_path: Path) -> Config:
    """Return settings for a hundred images of 8 x 8, one pattern for each class."""
    rng = np.random.default_rng(0)
    labels = (np.arange(200) % 10).astype(np.uint8)
    codes = rng.integers(0, 2, (10, 64)) * 100
    pixels = (codes[labels] + rng.integers(0, 150, (200, 64))).astype(np.uint8)
    header = b"".join(n.to_bytes(4, "big") for n in (2051, 200, 8, 8))
    content = gzip.compress(header + pixels.tobytes())
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(content)
    header = b"".join(n.to_bytes(4, "big") for n in (2049, 200))
    content = gzip.compress(header + labels.tobytes())
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(content)
    for cached in (load, fit, report, shaken):
        cached.cache_clear()
    return Config(
        data=str(tmp_path),
        sizes=(20, 40),
        confusion=(10, 20),
        more_confusion=40,
        widths=(8, 16),
        hidden=(32, 32),
        batch_size=20,
        max_epochs=1000,
        sigmas=(0.01, 0.1),
    )


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_every_arm_gives_what_its_claims_need(arm: str, tiny: Config) -> None:
    outcome = run(tiny, arm, 0, NoLogger())
    columns = {column.name for column in RECIPE.columns}
    for scalars in (outcome.scalars, *outcome.variants.values()):
        assert set(scalars) <= columns
        assert all(math.isfinite(value) for value in scalars.values())
    assert {c.metric for c in RECIPE.claims if c.ours == arm} <= set(outcome.scalars)
    wanted = {f.options["where"]["what"] for f in RECIPE.figures if arm == "labels"}
    assert wanted - {"confusion"} <= {row["what"] for row in outcome.rows}


def test_rows_are_nested_and_labels_are_what_they_are_called(tiny: Config) -> None:
    true, random = fit(tiny, 0, "true", 40), fit(tiny, 0, "random", 40)
    assert torch.equal(true.x, random.x)
    assert torch.equal(fit(tiny, 0, "true", 20).x, true.x[:20])
    data = load(tiny.data)
    assert len(data.x) == len(data.x_test) == 100
    where = [int((data.x == row).all(1).nonzero()[0, 0]) for row in true.x]
    assert torch.equal(true.labels, data.y[where])
    assert float((random.labels != true.labels).float().mean()) > 0.7
    mixed = fit(tiny, 0, "confusion", 20)
    assert torch.equal(mixed.labels[:40], true.labels)
    assert len(mixed.labels) == 60
    assert not torch.equal(fit(tiny, 1, "true", 40).x, true.x)


def test_networks_have_no_bias_and_fit(tiny: Config) -> None:
    network = fit(tiny, 0, "random", 40)
    assert all(layer.bias is None for layer in network.trained if hasattr(layer, "bias"))
    assert network.epochs < tiny.max_epochs
    assert measure(tiny, 0, "random", 40)["train_error"] == 0
    slow = fit(Config(**{**vars(tiny), "max_epochs": 2}), 0, "random", 40)
    assert slow.epochs == 2


def test_curves_and_ranks(tiny: Config) -> None:
    rows = curve(tiny, 0, "true")
    assert [row["sigma"] for row in rows] == [0.01, 0.1]
    assert rows[0]["kl"] == pytest.approx(100 * rows[1]["kl"])
    ranks = {row["measure"]: row for row in taus(tiny, 0)}
    assert set(ranks["l2"]) >= {"tau", "tau_size", "tau_labels", "granulated"}
    assert ranks["l2"]["num_models"] == 4


def row(**values: float) -> dict[str, float]:
    names = ("test_error", "l2", "l1_path", "l2_path", "spectral", "sharpness")
    return dict.fromkeys(names, 1.0) | values


def test_gaps_and_rises_by_hand() -> None:
    true = {10: row(), 20: row(l2=2.0), 40: row(l2=3.0)}
    random = {10: row(l2=2.0, sharpness=0.5), 20: row(l2=5.0, sharpness=2.0), 40: row(l2=7.0)}
    found = gaps(true, random)
    assert (found["gap_l2"], found["gap_growth"], found["gap_spectral"]) == (1.0, 1.0, 0.0)
    assert found["sharpness_agrees"] == pytest.approx(100 / 3)
    steps = rises({0: row(), 5: row(l2=3.0, spectral=4.0), 9: row(l2=2.5, spectral=2.0)})
    assert (steps["rise_l2"], steps["rise_spectral"]) == (-0.5, 1.0)
    assert math.isnan(least([1.0, math.nan, 0.5]))
    assert math.isnan(least([math.nan, 1.0]))


def test_an_undefined_norm_holds_no_claim() -> None:
    found = gaps({1: row(), 2: row()}, {1: row(l2=math.nan), 2: row(l2=2.0)})
    assert math.isnan(found["gap_l2"])
    assert math.isnan(found["gap_growth"])


def test_digits_stand_in_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    load.cache_clear()
    with pytest.warns(UserWarning, match="digits of scikit-learn"):
        data = load("no_such_folder")
    assert (len(data.x), len(data.x_test), data.share) == (1078, 719, 4)
    config = Config(data="no_such_folder", max_epochs=1)
    assert len(_generalization.fit(config, 0, "confusion", 2000).x) == 1000
    small = Config(**{**vars(config), "sizes": (100, 200), "hidden": (8,), "sigmas": (0.01,)})
    outcome = run(small, "labels", 0, NoLogger())  # names and sizes are those that were trained
    assert list(outcome.variants) == ["25 random labels", "25 true labels", "50 true labels"]
    assert {row["size"] for row in outcome.rows if row["what"] == "size"} == {25, 50}
    load.cache_clear()


def test_sizes_must_fit(tiny: Config) -> None:
    with pytest.raises(DataError, match="at most 100"):
        fit(tiny, 0, "true", 101)
