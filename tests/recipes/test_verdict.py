"""Verdicts by rule, against SciPy's own t-interval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from gossamer.errors import ConfigError
from gossamer.recipes import Arm, Claim, Column, Recipe, build_config
from gossamer.recipes._verdict import judge, t_interval, worst


def claim(**options: Any) -> Claim:
    plain = {
        "text": "x",
        "metric": "m",
        "unit": "u",
        "ours": "a",
        "better": "higher",
        "rule": "bar",
        "bar": 0.5,
    }
    return Claim(**{**plain, **options})


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_interval_is_that_of_scipy(count: int) -> None:
    values = np.random.default_rng(0).normal(size=count)
    expected = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
    np.testing.assert_allclose(t_interval(list(values)), expected, rtol=1e-9)
    assert all(math.isnan(end) for end in t_interval([1.0]))


@pytest.mark.parametrize(
    ("values", "better", "statistic", "verdict"),
    [
        ((0.6, 0.5, 0.1), "higher", "median", "held"),
        ((0.6, 0.49, 0.1), "higher", "median", "not held"),
        ((0.6, 0.6, 0.1), "higher", "mean", "not held"),
        ((0.6, 0.5, 0.1), "lower", "median", "held"),
        ((0.6, 0.5, 0.1), "lower", "max", "not held"),
        ((0.6, 0.5, 0.5), "higher", "min", "held"),
        ((math.nan, 0.9, 0.9), "higher", "median", "not held"),
    ],
)
def test_bar(values: tuple, better: str, statistic: str, verdict: str) -> None:
    assert (
        judge(claim(better=better, statistic=statistic), {"a": seeds(*values)})["verdict"]
        == verdict
    )


@pytest.mark.parametrize(("needed", "verdict"), [(1, "held"), (2, "held"), (3, "not held")])
def test_seeds(needed: int, verdict: str) -> None:
    entry = judge(claim(rule="seeds", needed=needed), {"a": seeds(0.9, 0.5, 0.4)})
    assert entry["verdict"] == verdict


@pytest.mark.parametrize(
    ("ours", "baseline", "bar", "verdict"),
    [
        ((0.9, 0.92, 0.91), (0.5, 0.51, 0.52), 0.0, "held"),
        ((0.9, 0.92, 0.91), (0.5, 0.51, 0.52), 0.39, "undecided"),
        ((0.9, 0.92, 0.91), (0.5, 0.51, 0.52), 0.5, "not held"),
        ((0.9, 0.1, 0.91), (0.5, 0.51, 0.52), 0.0, "undecided"),
        ((0.9,), (0.1,), 0.0, "undecided"),
    ],
)
def test_paired(ours: tuple, baseline: tuple, bar: float, verdict: str) -> None:
    entry = judge(
        claim(rule="paired", bar=bar, baselines=("b",), statistic="mean"),
        {"a": seeds(*ours), "b": seeds(*baseline)},
    )
    assert entry["verdict"] == verdict
    gains = np.subtract(ours, baseline)
    assert entry["difference"] == pytest.approx(gains.mean())


def test_paired_takes_the_best_baseline_and_the_common_seeds() -> None:
    results = {"a": seeds(1.0, 2.0, 3.0), "b": {1: 5.0, 2: 5.0}, "c": seeds(4.0, 4.0, 4.0)}
    entry = judge(
        claim(rule="paired", better="lower", baselines=("b", "c"), statistic="mean"), results
    )
    assert entry["baseline"]["name"] == "c"
    entry = judge(
        claim(rule="paired", better="higher", baselines=("b", "c"), statistic="mean"), results
    )
    assert entry["baseline"]["name"] == "b"
    assert entry["difference"] == pytest.approx(-2.5)


def test_the_worst_claim_decides() -> None:
    assert worst(["held", "held"]) == "held"
    assert worst(["held", "undecided", "held"]) == "undecided"
    assert worst(["not held", "undecided"]) == "not held"


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "paired"},
        {"rule": "seeds"},
        {"rule": "bat"},
        {"better": "more"},
        {"statistic": "mode"},
    ],
)
def test_bad_claims(options: dict) -> None:
    with pytest.raises(ConfigError):
        claim(**options)


def test_bad_recipes() -> None:
    parts: dict[str, Any] = {
        "name": "r", "method": "rope", "title": "t", "what": "w", "claims": (claim(),),
        "arms": (Arm("a", "A", "ours"),), "scales": {"small": Arm("x", "x", "ours")}, "run": print,
        "columns": (Column("m", "M", "u"),), "figures": (), "budget": {"small": 1},
    }  # fmt: skip
    assert Recipe(**parts).name == "r"
    for change, message in (
        ({"arms": ()}, "unknown arm in a claim of r 'a'"),
        ({"columns": ()}, "unknown metric in a claim of r 'm'"),
        ({"budget": {}}, "unknown scale with a budget in r 'small'"),
        ({"scales": {"tiny": claim()}}, "unknown scale 'tiny'"),
        ({"scales": {"small": {"steps": 1}}}, "must hold instances of a frozen dataclass"),
    ):
        with pytest.raises(ConfigError, match=message):
            Recipe(**{**parts, **change})


def test_configurations_are_checked() -> None:
    base = claim(paper={})
    assert build_config(base, {"bar": 1}, "f.toml").bar == 1.0
    assert build_config(base, {"baselines": ["b"]}, "f.toml").baselines == ("b",)
    with pytest.raises(ConfigError, match=r"did you mean 'metric'"):
        build_config(base, {"metrik": "x"}, "f.toml")
    with pytest.raises(ConfigError, match=r"bar in f.toml must be of type float"):
        build_config(base, {"bar": "high"}, "f.toml")
