"""The recipe on real texts, with a tiny model and a tiny collection."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from gossamer.errors import DataError
from gossamer.recipes import build_config
from gossamer.recipes.blockrank_text import RECIPE, Config, Texts, run, titles_and_texts
from gossamer.retrieval import RankingRow
from gossamer.train import NoLogger

from ..retrieval.tiny_ranker import WORDS, model, tokenizer


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    documents = [
        {
            "_id": f"d{k}",
            "title": f"{word} w{k % 3} .",
            "text": f"{word} w{k % 3} . {word} w{k % 5}",
        }
        for k, word in enumerate(WORDS)
    ]
    documents.append({"_id": "empty", "title": "", "text": "w1"})
    (folder / "corpus.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    queries = [{"_id": f"q{k}", "text": WORDS[k]} for k in range(4)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(q) + "\n" for q in queries))
    judged = "".join(f"q{k}\td{k}\t1\n" for k in range(4))
    (folder / "qrels" / "test.tsv").write_text(judged)
    model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return Config(
        data=str(folder), model=str(tmp_path / "model"), layers=2, documents=3, steps=2,
        batch_size=2, query_offset=300, held_out=5, num_samples=4,
    )  # fmt: skip


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_every_arm_gives_what_table_and_claims_ask(arm: str, config: Config) -> None:
    outcome = run(config, arm, 0, NoLogger())
    asked = {claim.metric for claim in RECIPE.claims if claim.ours == arm}
    assert asked <= set(outcome.scalars) <= {column.name for column in RECIPE.columns}
    assert all(math.isfinite(value) for value in outcome.scalars.values())
    assert outcome.scalars["random_chance"] == pytest.approx(100 / 3)
    assert len(outcome.rows) == 3


def test_titles_are_cut_off_and_none_is_trained_on_and_tested(config: Config) -> None:
    titles, texts = titles_and_texts(Path(config.data))
    assert titles["d1"] == "w1 w1 ."
    assert texts["d1"] == "w1 w1"
    assert "empty" not in titles
    made = Texts(config, tokenizer(), seed=0)
    trained = {row.query_id for row in made.training()}
    tested = {row.query_id for kind in ("random", "near") for row in made.tests(kind)}
    assert len(trained) == 7
    assert len(tested) == 4
    assert not trained & tested
    for row in (*made.training(), *made.tests("random"), *made.tests("near")):
        assert row.answer_ids == (row.query_id,)
        assert row.answer_places[0] < 3
    for row in made.tests("queries"):
        assert set(row.answer_ids) <= set(row.documents)
    row = RankingRow("w7", {name: made.documents[name] for name in ("d1", "d7", "d8")}, ("d7",))
    assert made.first_by_bm25(row) == "d7"
    again = Texts(config, tokenizer(), seed=0)
    assert again.training() == made.training()
    assert Texts(config, tokenizer(), seed=1).training() != made.training()


def test_a_corpus_without_titles(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "text": "a"}\n')
    with pytest.raises(DataError, match="must hold documents with title and text"):
        titles_and_texts(tmp_path)


def test_the_data_may_lie_in_the_folder_of_the_environment(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_DATA", str(Path(config.data).parent))
    moved = build_config(config, {"data": "data"}, "test")
    assert Texts(moved, tokenizer(), seed=0).titles["d1"] == "w1 w1 ."
