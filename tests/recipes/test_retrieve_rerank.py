"""Three stages on a tiny collection, with stand-ins for the two models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.models import BagEncoder
from gossamer.recipes import retrieve_rerank
from gossamer.recipes.retrieve_rerank import Config, gain, run, top
from gossamer.train.logging import NoLogger

WORDS = ["red", "blue", "green", "shoe", "lamp", "boat"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    pairs = [(a, b) for a in WORDS[:3] for b in WORDS[3:]]
    rows = [
        {"_id": f"d{n}", "title": f"On {a}", "text": f"On {a} the {b} is {a}"}
        for n, (a, b) in enumerate(pairs)
    ]
    asked = [{"_id": f"q{n}", "text": f"{b} in {a}"} for n, (a, b) in enumerate(pairs)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, asked)))
    (tmp_path / "qrels").mkdir()
    lines = [f"q{n}\td{n}\t1" for n in range(len(pairs))]
    (tmp_path / "qrels" / "test.tsv").write_text("\n".join(lines))

    def encoder(name: str, **options: Any) -> BagEncoder:
        torch.manual_seed(0)
        return BagEncoder(8, num_buckets=128)

    def ranked(config: Any, arm: str, seed: int, corpus: Any, queries: Any, first: Any) -> Any:
        return {q: {d: -s for d, s in found.items()} for q, found in first.items()}

    monkeypatch.setattr("gossamer.models.TextEncoder", encoder)
    monkeypatch.setattr(retrieve_rerank, "ranked", ranked)
    return Config(data=str(tmp_path), top_k=3)


def test_every_stage_is_measured(config: Config) -> None:
    outcome = run(config, "stock", 0, NoLogger())
    assert set(outcome.scalars) == {column.name for column in retrieve_rerank.RECIPE.columns}
    assert outcome.scalars["bm25"] > 0.9
    assert outcome.scalars["ranker"] < outcome.scalars["fused"]  # the stand-in turns it round
    assert outcome.scalars["recall_lost"] == 0.0
    assert [row["stage"] for row in outcome.rows] == list(retrieve_rerank.STAGES.values())


def test_the_first_queries_alone_can_be_used(config: Config) -> None:
    import dataclasses

    outcome = run(dataclasses.replace(config, num_queries=2), "stock", 0, NoLogger())
    assert 0.0 <= outcome.scalars["encoder"] <= 1.0


def test_the_best_are_cut_as_trec_eval_orders_them() -> None:
    assert list(top({"q": {"a": 1.0, "c": 2.0, "b": 2.0}}, 2)["q"]) == ["c", "b"]


def test_a_gain_has_an_interval_around_it() -> None:
    truth = {f"q{n}": {"a": 1} for n in range(20)}
    runs = {
        "one": {q: {"a": 2.0, "b": 1.0} for q in truth},
        "two": {q: {"a": 1.0, "b": 2.0 * (n % 2)} for n, q in enumerate(truth)},
    }
    found = gain(truth, runs, "one", "two")
    assert found["one_low"] < found["one_gain"] < found["one_high"]
    assert found["one_gain"] == pytest.approx(0.5 * (1 - 0.6309297535714575))
