"""BM25 against the formula and on real sets, and fusion of runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError, DataError
from gossamer.retrieval import (
    BM25Index,
    evaluate_run,
    fuse_runs,
    read_beir,
    write_run,
)

TEXTS = st.lists(st.sampled_from(["red", "blue", "wing", "boat", "the"]), max_size=6).map(" ".join)
CORPORA = st.dictionaries(st.sampled_from([f"d{i}" for i in range(8)]), TEXTS, min_size=1)


def formula(query: str, corpus: dict[str, str], k1: float, b: float) -> dict[str, float]:
    """The score of every document with a word of the query, from the definition."""
    words = {name: [w for w in text.split() if w != "the"] for name, text in corpus.items()}
    mean = sum(map(len, words.values())) / len(corpus)
    scores: dict[str, float] = {}
    for word in query.split():
        holding = sum(word in document for document in words.values())
        for name, document in words.items():
            count = document.count(word)
            if word != "the" and count:
                idf = math.log(1 + (len(corpus) - holding + 0.5) / (holding + 0.5))
                norm = k1 * (1 - b + b * len(document) / mean)
                scores[name] = scores.get(name, 0.0) + idf * count / (count + norm)
    return scores


@settings(deadline=None, derandomize=True, max_examples=60)
@given(CORPORA, TEXTS, st.sampled_from([(0.9, 0.4), (1.5, 0.75), (0.0, 0.0), (1.2, 1.0)]))
def test_scores_are_those_of_the_formula(
    corpus: dict[str, str], query: str, options: tuple[float, float]
) -> None:
    k1, b = options
    run = BM25Index(corpus, k1=k1, b=b).search({"q": query}, len(corpus))
    assert run["q"] == pytest.approx(formula(query, corpus, k1, b))
    assert list(run["q"].values()) == sorted(run["q"].values(), reverse=True)


# the figures of BM25 with another English stop list, and how far this one may be from them
@pytest.mark.parametrize(
    ("name", "expected", "tolerance"),
    [
        ("cranfield", {"ndcg@10": 0.342, "recall@100": 0.698, "mrr": 0.522, "map": 0.273}, 0.01),
        ("vaswani", {"ndcg@10": 0.382, "recall@100": 0.494, "mrr": 0.659, "map": 0.207}, 0.005),
    ],
)
def test_real_sets(
    outside_data: Path, tmp_path: Path, name: str, expected: dict[str, float], tolerance: float
) -> None:
    corpus, queries, qrels = read_beir(outside_data / name)
    run = BM25Index(corpus).search(queries, 100)
    report = evaluate_run(qrels, run, list(expected))
    assert report.means == pytest.approx(expected, abs=tolerance)
    assert report.num_missing == 0
    write_run(run, tmp_path / "run.trec.gz")
    assert evaluate_run(qrels, tmp_path / "run.trec.gz", list(expected)).means == pytest.approx(
        report.means, abs=1e-12
    )


def test_case_punctuation_and_stop_words_do_not_matter() -> None:
    index = BM25Index({"d1": "The Wing-tip, 1960!", "d2": "boats", "d3": "Über_maß"})
    run = index.search({"q": "WING tip of 1960", "p": "the of", "u": "über"}, 5)
    assert {query: list(found) for query, found in run.items()} == {
        "q": ["d1"], "p": [], "u": ["d3"],
    }  # fmt: skip
    assert len(index) == 3
    assert repr(index) == "BM25Index(3 documents, 6 words, k1=0.9, b=0.4)"


def test_ties_are_cut_as_trec_eval_orders_them() -> None:
    index = BM25Index(dict.fromkeys(("b", "c", "a"), "wing"))
    assert list(index.search({"q": "wing"}, 2)["q"]) == ["c", "b"]


def test_blocks_of_queries_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = {f"d{i}": "red " * (i % 3) + "wing " * (i % 5) for i in range(30)}
    queries = {f"q{i}": text for i, text in enumerate(["red", "wing", "red wing"] * 3)}
    index = BM25Index(corpus)
    whole = index.search(queries, 7)
    monkeypatch.setattr("gossamer.retrieval.bm25._BLOCK", 60)
    assert index.search(queries, 7) == whole
    assert list(whole) == list(queries)


def test_documents_without_words_are_never_found() -> None:
    assert BM25Index({"d1": "", "d2": "the"}).search({"q": "wing"}, 3) == {"q": {}}
    assert BM25Index({"d1": "", "d2": "wing"}).search({"q": "wing"}, 3)["q"].keys() == {"d2"}
    assert BM25Index({"d1": "wing"}).search({}, 3) == {}


def test_bad_input_is_refused() -> None:
    with pytest.raises(DataError, match="corpus must hold at least one document; it is empty"):
        BM25Index({})
    with pytest.raises(DataError, match=r"corpus\['d'\] must be a text; got None"):
        BM25Index({"d": None})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="k1 must be >= 0; got -1"):
        BM25Index({"d": "x"}, k1=-1.0)
    with pytest.raises(ConfigError, match="b must be >= 0 and <= 1; got 2"):
        BM25Index({"d": "x"}, b=2.0)
    index = BM25Index({"d": "x"})
    with pytest.raises(ConfigError, match="top_k must be >= 1; got 0"):
        index.search({"q": "x"}, 0)
    with pytest.raises(DataError, match=r"queries\['q'\] must be a text; got 3"):
        index.search({"q": 3}, 1)  # type: ignore[dict-item]
    with pytest.raises(DataError, match="corpus must be a mapping from id to text; got list"):
        BM25Index(["x"])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="queries must be a mapping from id to text; got str"):
        index.search("x", 1)  # type: ignore[arg-type]


# --- fusion ---


def test_fused_scores_are_sums_of_reciprocal_ranks(tmp_path: Path) -> None:
    one = {"q": {"a": 9.0, "b": 8.0, "c": 8.0}, "p": {"x": 1.0}}
    two = {"q": {"b": 0.2, "d": 0.1}}
    expected = {
        "q": {"b": 1 / 63 + 1 / 61, "a": 1 / 61, "d": 1 / 62, "c": 1 / 62},
        "p": {"x": 1 / 61},
    }
    fused = fuse_runs([one, two])
    assert fused == {query: pytest.approx(scores) for query, scores in expected.items()}
    assert list(fused["q"]) == ["b", "a", "d", "c"]
    write_run(two, tmp_path / "two.trec")
    assert fuse_runs({"one": one, "two": tmp_path / "two.trec"}) == fused
    assert fuse_runs([one], k=0)["p"] == {"x": 1.0}


def test_fusing_does_not_depend_on_scores() -> None:
    one, two = {"q": {"a": 3.0, "b": 2.0}}, {"q": {"b": 5.0, "c": 1.0}}
    scaled = {"q": {doc: 100 * score - 7 for doc, score in one["q"].items()}}
    assert fuse_runs([one, two]) == fuse_runs([scaled, two])


def test_bad_runs_are_not_fused() -> None:
    with pytest.raises(DataError, match="runs must hold at least one run"):
        fuse_runs([])
    with pytest.raises(ConfigError, match="k must be >= 0; got -1"):
        fuse_runs([{"q": {"a": 1.0}}], k=-1)
    with pytest.raises(DataError, match=r"runs\[1\] must have finite scores; got inf"):
        fuse_runs([{"q": {"a": 1.0}}, {"q": {"a": math.inf}}])
