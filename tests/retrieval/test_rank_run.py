"""Whole runs, and the baseline that reads attention without training."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.retrieval import AttentionReader, BlockRanker, RankResult
from gossamer.retrieval._ranker_lists import ListRanker, candidates_of, result_of

from .ranking_models import DOCUMENTS, language_model, tokenizer

MODEL = language_model()
CORPUS = {d["id"]: d for d in DOCUMENTS}
QUERIES = {"q1": "what carries lift?", "q2": "heat", "q3": "not in the run"}
RUN = {
    "q2": {"d1": 0.5},
    "q1": {"d1": 1.0, "d2": 4.0, "d3": 2.0, "d4": 3.0},
}


class Lengths(ListRanker):
    """Scores a document by its length, to see what a run does with scores."""

    def rank(self, query, documents, top_k=None, **options) -> RankResult:
        made = candidates_of(documents)
        lengths = [len(one.text) // 10 for one in made]
        return result_of(made, [n / 10 for n in lengths], lengths, num_cut=0, top_k=top_k)


def test_a_run_is_ranked_query_by_query() -> None:
    ranker = BlockRanker(MODEL, tokenizer())
    found = ranker.rank_run(QUERIES, CORPUS, RUN, quiet=True, batch_tokens=100)
    assert list(found) == ["q2", "q1"]
    order = [CORPUS[name] for name in ("d2", "d4", "d3", "d1")]  # that of the first stage
    alone = ranker.rank(QUERIES["q1"], order)
    assert list(found["q1"]) == list(alone.ids)
    assert list(found["q1"].values()) == pytest.approx(alone.scores, abs=1e-5)
    assert found["q2"] == {"d1": pytest.approx(1.0)}


def test_no_document_is_lost_and_the_others_keep_their_order() -> None:
    found = Lengths().rank_run(QUERIES, CORPUS, RUN, top_k=2, quiet=True)["q1"]
    assert found == {"d2": pytest.approx(0.1), "d4": 0.0, "d3": -1.0, "d1": -2.0}
    assert list(found) == ["d2", "d4", "d3", "d1"]


def test_equal_scores_keep_the_first_order_in_any_tool() -> None:
    corpus = dict.fromkeys("abcd", "equal")
    run = {"q": {"b": 4, "d": 3, "c": 2, "a": 1}}
    found = Lengths().rank_run({"q": "x"}, corpus, run, quiet=True)["q"]
    assert list(found) == ["b", "d", "c", "a"]
    values = list(found.values())
    assert all(a > b for a, b in itertools.pairwise(values))
    assert values == pytest.approx([0.0] * 4)


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Lengths().rank_run(QUERIES, CORPUS, RUN)
    assert "rank: 100 % 2 of 2 queries" in capsys.readouterr().err


def test_runs_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="'q2' has none, where the queries have ids like 'x'"):
        Lengths().rank_run({"x": "y"}, CORPUS, RUN)
    with pytest.raises(DataError, match=r"'d1' of query 'q2' is not, where the corpus has ids"):
        Lengths().rank_run(QUERIES, {"x": "y"}, RUN)
    with pytest.raises(DataError, match="must have text; got None for 'd1'"):
        Lengths().rank_run(QUERIES, {**CORPUS, "d1": None}, RUN)
    with pytest.raises(ConfigError, match="top_k must be >= 1"):
        Lengths().rank_run(QUERIES, CORPUS, RUN, top_k=0)
    with pytest.raises(ConfigError, match="options top_k, labels and batch_tokens; got beam"):
        BlockRanker(MODEL, tokenizer()).rank_run(QUERIES, CORPUS, RUN, beam=1, quiet=True)


# --- the baseline ---


def weights_by_hand(query: str, texts: list[str]) -> tuple[torch.Tensor, list[int]]:
    """Return the query's attention on each document token from transformers' own weights."""
    words, model = tokenizer(), language_model(attn_implementation="eager")
    prompt = BlockRanker(model, words, query_in_prefix=False).template.prompt(query, texts)
    with torch.no_grad():
        found = model(prompt.input_ids[None], output_attentions=True).attentions
    lengths = prompt.layout.lengths
    pieces = [words.decode([token]) for token in prompt.input_ids]
    starts = [0, *itertools.accumulate(map(len, pieces))]
    begin = starts.index("".join(pieces).rindex("Query: ") + len("Query: "))
    documents = slice(lengths[0], sum(lengths[:-1]))
    rows = torch.stack(found)[:, 0, :, begin : begin + len(query), documents]
    return rows.sum((0, 1)).mean(0), list(lengths[1:-1])


def test_the_reader_adds_up_what_eager_attention_returns() -> None:
    query, texts = "what lifts", ["Wings carry lift", "heat in slabs", "x"]
    weights, lengths = weights_by_hand(query, texts)
    expected = [float(part.sum()) for part in weights.split(lengths)]
    plain = AttentionReader(MODEL, tokenizer(), calibrate=False)
    for batch_tokens in (64, 8192):
        found = plain.rank(query, texts, batch_tokens=batch_tokens)
        assert [found.scores[found.order.index(i)] for i in range(3)] == pytest.approx(
            expected, abs=1e-4
        )
    weights = weights - weights_by_hand("N/A", texts)[0]
    expected = [
        float(part[part >= part.mean() - 2 * part.std()].sum()) for part in weights.split(lengths)
    ]
    found = AttentionReader(MODEL, tokenizer()).rank(query, texts)
    assert [found.scores[found.order.index(i)] for i in range(3)] == pytest.approx(
        expected, abs=1e-4
    )


def test_the_reader_takes_runs_and_refuses_what_does_not_fit() -> None:
    reader = AttentionReader(MODEL, tokenizer())
    found = reader.rank_run(QUERIES, CORPUS, RUN, top_k=3, quiet=True)
    assert set(found["q1"]) == set(CORPUS)
    assert reader.rank("q", []) == RankResult((), (), (), (), 0, 0)
    with pytest.raises(ConfigError, match=r"fit the model's 2048 positions; got \d+ tokens"):
        reader.rank("q", ["long " * 60] * 20)
    with pytest.raises(DataError, match="query must be a text"):
        reader.rank("", ["x"])
    with pytest.raises(ConfigError, match=re.escape("rank has no option labels")):
        reader.rank("q", ["x"], labels=[3])
