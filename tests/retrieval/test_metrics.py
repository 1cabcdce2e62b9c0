"""Metrics of runs against trec_eval's values and a plain computation, and paired comparison."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gossamer.errors import ConfigError, DataError
from gossamer.retrieval import compare_runs, evaluate_run, write_qrels, write_run

QRELS = {"q1": {"a": 3, "b": 2, "c": 1, "d": 0}, "q2": {"x": 1}, "q3": {"z": 0}}
RUN = {
    "q1": {"a": 0.1, "b": 0.9, "c": 0.9, "d": 0.5, "e": 0.5},
    "q2": {"y": 1.0},
    "q3": {"z": 1.0},
    "q9": {"a": 1.0},
}
# values of trec_eval for q1
EXPECTED = {
    "ndcg@3": 0.4749950106,
    "ndcg@10": 0.7187145954,
    "map": 0.8666666667,
    "mrr": 1.0,
    "precision@2": 1.0,
    "recall@2": 0.6666666667,
}


class Frame:
    """The part of a data frame that is used."""

    def __init__(self, **columns: list[object]) -> None:
        self.columns = list(columns)
        self._values = columns

    def __getitem__(self, name: str) -> list[object]:
        return self._values[name]


# --- reference values ---


def test_values_of_trec_eval() -> None:
    report = evaluate_run(QRELS, RUN, list(EXPECTED), per_query=True)
    assert report.per_query["q1"] == pytest.approx(EXPECTED, abs=1e-10)
    assert report.per_query["q2"] == dict.fromkeys(EXPECTED, 0.0)
    assert set(report.per_query) == {"q1", "q2"}
    assert report["ndcg@10"] == pytest.approx(EXPECTED["ndcg@10"] / 2)
    assert (report.num_queries, report.num_missing) == (2, 0)
    assert (report.num_without_relevant, report.num_unjudged) == (1, 1)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("ndcg", EXPECTED["ndcg@10"]),
        ("ndcg_exp@3", (1 + 3 / math.log2(3)) / (7 + 3 / math.log2(3) + 1 / 2)),
        ("map@2", 2 / 3),
        ("P@10", 0.3),
        ("R@5", 1.0),
        ("success@1", 1.0),
    ],
)
def test_further_measures(metric: str, value: float) -> None:
    assert evaluate_run({"q1": QRELS["q1"]}, RUN, [metric])[metric] == pytest.approx(value)


def test_mrr_is_cut() -> None:
    run = {"q": {"a": 3.0, "b": 2.0, "x": 1.0}}
    report = evaluate_run({"q": {"x": 1}}, run, ["mrr", "MRR@2", "recip_rank_cut_3"])
    assert report.means == pytest.approx({"mrr": 1 / 3, "mrr@2": 0.0, "mrr@3": 1 / 3})


@pytest.mark.parametrize(
    ("spellings", "name"),
    [
        (("ndcg_cut_10", "nDCG@10", "NDCG@10", "ndcg_cut.10"), "ndcg@10"),
        (("P_5", "P@5", "precision@5"), "precision@5"),
        (("recall_100", "R@100", "Recall@100"), "recall@100"),
        (("map", "MAP", "AP"), "map"),
        (("recip_rank", "MRR", "RR"), "mrr"),
    ],
)
def test_spellings(spellings: tuple[str, ...], name: str) -> None:
    for spelling in spellings:
        report = evaluate_run(QRELS, RUN, [spelling])
        assert list(report.means) == [name]
        assert {report[other] for other in spellings} == {report.means[name]}


def naive(grades: dict[str, int], scores: dict[str, float], k: int) -> dict[str, float]:
    """nDCG, recall, precision and average precision at k, in words of the definitions."""
    order = sorted(scores, reverse=True)
    order.sort(key=lambda doc: -scores[doc])
    gains = [max(grades.get(doc, 0), 0) for doc in order][:k]
    ideal = sorted((max(grade, 0) for grade in grades.values()), reverse=True)[:k]
    relevant = sum(grade >= 1 for grade in grades.values())
    found, precisions = 0, 0.0
    for rank, gain in enumerate(gains, start=1):
        if gain >= 1:
            found += 1
            precisions += found / rank
    dcg, best = (sum(g / math.log2(i + 2) for i, g in enumerate(x)) for x in (gains, ideal))
    return {
        f"ndcg@{k}": dcg / best,
        f"recall@{k}": found / relevant,
        f"precision@{k}": found / k,
        f"map@{k}": precisions / relevant,
    }


DOCUMENTS = st.sampled_from([f"d{i}" for i in range(12)])
GRADES = st.dictionaries(DOCUMENTS, st.integers(-1, 3), min_size=1).filter(
    lambda grades: max(grades.values()) > 0
)
SCORES = st.dictionaries(DOCUMENTS, st.sampled_from([0.0, 0.5, 1.0, 2.0]))


@settings(deadline=None, derandomize=True)
@given(GRADES, SCORES, st.integers(1, 14))
def test_the_plain_computation_agrees(
    grades: dict[str, int], scores: dict[str, float], k: int
) -> None:
    expected = naive(grades, scores, k)
    report = evaluate_run({"q": grades}, {"q": scores}, list(expected))
    assert report.means == pytest.approx(expected, abs=1e-12)


# --- limits and invariances ---


@settings(deadline=None, derandomize=True, max_examples=50)
@given(GRADES, SCORES)
def test_recall_grows_with_k_and_ndcg_is_a_fraction(
    grades: dict[str, int], scores: dict[str, float]
) -> None:
    names = [f"recall@{k}" for k in range(1, 14)] + [f"ndcg@{k}" for k in range(1, 14)]
    values = list(evaluate_run({"q": grades}, {"q": scores}, names).means.values())
    assert values[:13] == sorted(values[:13])
    assert all(0 <= value <= 1 + 1e-12 for value in values)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(GRADES, SCORES, st.integers(1, 12))
def test_unjudged_documents_below_rank_k_change_nothing_at_k(
    grades: dict[str, int], scores: dict[str, float], k: int
) -> None:
    names = [f"{name}@{k}" for name in ("ndcg", "recall", "precision", "map", "mrr")]
    more = {**scores, **{f"new{i}": -1.0 - i for i in range(max(k - len(scores), 0) + 3)}}
    one, two = (evaluate_run({"q": grades}, {"q": run}, names) for run in (scores, more))
    assert one.means == two.means


def test_a_perfect_ranking_gives_one_with_ties_in_relevance() -> None:
    grades = {"a": 2, "b": 2, "c": 1, "d": 1, "e": 0}
    for order in ("abcde", "badce"):
        run = {"q": {doc: -float(rank) for rank, doc in enumerate(order)}}
        report = evaluate_run({"q": grades}, run, ["ndcg", "ndcg@2", "ndcg_exp", "map", "mrr"])
        assert set(report.means.values()) == {1.0}


def test_the_order_of_equal_scores_in_the_run_does_not_matter() -> None:
    names = "abcdefgh"
    one, two = (evaluate_run({"q": {"c": 1}}, {"q": dict.fromkeys(order, 1.0)}, ["mrr"])
                for order in (names, names[::-1]))  # fmt: skip
    assert one.means == two.means == {"mrr": 1 / 6}


def test_missing_queries_count_zero_or_are_skipped() -> None:
    qrels = {"q1": {"a": 1}, "q2": {"b": 1}, "q3": {"c": 0}}
    run = {"q1": {"a": 1.0}}
    zero, skip = (evaluate_run(qrels, run, ["P@1"], missing=m) for m in ("zero", "skip"))
    assert (zero["P@1"], zero.num_queries, zero.num_missing) == (0.5, 2, 1)
    assert (skip["P@1"], skip.num_queries, skip.num_missing) == (1.0, 1, 1)


def test_the_least_relevant_grade_can_be_raised() -> None:
    report = evaluate_run({"q1": QRELS["q1"]}, RUN, ["R@2", "ndcg@10"], rel_level=2)
    assert report["R@2"] == 0.5
    assert report["ndcg@10"] == pytest.approx(EXPECTED["ndcg@10"])
    assert evaluate_run(QRELS, RUN, ["map"], rel_level=2).num_without_relevant == 2


def test_the_query_itself_can_be_dropped() -> None:
    run = {"q": {"q": 2.0, "x": 1.0}}
    for drop, value in ((False, 0.5), (True, 1.0)):
        assert evaluate_run({"q": {"x": 1}}, run, ["mrr"], drop_self=drop)["mrr"] == value


# --- forms of input ---


def test_files_and_tables_give_the_same(tmp_path: Path) -> None:
    write_run(RUN, tmp_path / "run.trec.gz")
    write_qrels(QRELS, tmp_path / "qrels")
    expected = evaluate_run(QRELS, RUN, list(EXPECTED))
    assert evaluate_run(tmp_path / "qrels", str(tmp_path / "run.trec.gz"), list(EXPECTED)) == (
        expected
    )
    pairs = [(q, d, v) for q, docs in RUN.items() for d, v in docs.items()]
    run = Frame(**dict(zip(("query_id", "doc_id", "score"), map(list, zip(*pairs, strict=True)),
                           strict=True)))  # fmt: skip
    assert evaluate_run(QRELS, run, list(EXPECTED)) == expected


def test_ids_of_a_table_become_text() -> None:
    qrels = Frame(qid=[1, 1], docid=[7, 8], relevance=[1, 0])
    assert evaluate_run(qrels, {"1": {"7": 0.5}}, ["P@1"])["P@1"] == 1.0


def test_reports_are_plain() -> None:
    report = evaluate_run(QRELS, RUN, ["map"])
    assert report.rows() == [{"metric": "map", "value": report["map"]}]
    assert report.to_dict()["num_unjudged"] == 1
    with pytest.raises(ConfigError, match="unknown metric of this report 'ndcg@10'"):
        report["ndcg@10"]


def test_nothing_heavy_is_needed() -> None:
    import subprocess

    code = (
        "import sys, gossamer.retrieval as r\n"
        "r.evaluate_run({'q': {'d': 1}}, {'q': {'d': 1.0}}, ['map'])\n"
        "assert not {'torch', 'sklearn', 'scipy', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- comparison ---


def test_a_comparison_agrees_with_scipy() -> None:
    values = [(1, 2), (1, 3), (2, 1), (1, 4), (1, 1), (1, 2), (3, 5), (2, 4)]
    qrels = {f"q{i}": {"x": 1} for i in range(len(values))}

    def run(which: int) -> dict[str, dict[str, float]]:
        """A run with the relevant document at the wanted ranks."""
        return {
            f"q{i}": {"x": 0.0, **{f"d{j}": 1.0 + j for j in range(ranks[which] - 1)}}
            for i, ranks in enumerate(values)
        }

    report = compare_runs(qrels, {"one": run(0), "two": run(1)}, "recip_rank")
    one, two = ([1 / ranks[which] for ranks in values] for which in (0, 1))
    (pair,) = report.pairs
    assert report.means == pytest.approx({"one": sum(one) / 8, "two": sum(two) / 8})
    assert (pair["first"], pair["second"]) == ("one", "two")
    assert (pair["wins"], pair["losses"], pair["ties"]) == (6, 1, 1)
    assert pair["p_ttest"] == pytest.approx(stats.ttest_rel(one, two).pvalue)
    assert pair["difference"] == pytest.approx(report.means["one"] - report.means["two"])
    assert pair["low"] < pair["difference"] < pair["high"]


def test_the_bootstrap_agrees_with_all_draws_that_there_are() -> None:
    ranks = (1, 2, 4)
    qrels = {f"q{i}": {"x": 1} for i in range(3)}
    one = {f"q{i}": {"x": 1.0} for i in range(3)}
    two = {
        f"q{i}": {"x": 0.0, **{f"d{j}": 1.0 for j in range(rank - 1)}}
        for i, rank in enumerate(ranks)
    }
    differences = [1 - 1 / rank for rank in ranks]
    mean = sum(differences) / 3
    means = [sum(draw) / 3 for draw in itertools.product(differences, repeat=3)]
    exact = sum(abs(value - mean) >= abs(mean) - 1e-12 for value in means) / 27
    (pair,) = compare_runs(qrels, {"one": one, "two": two}, "mrr", num_bootstrap=20_000).pairs
    assert pair["p_bootstrap"] == pytest.approx(exact, abs=0.01)
    assert pair["low"] == pytest.approx(min(means))
    assert pair["high"] == pytest.approx(max(means))


def test_equal_runs_do_not_differ_and_three_make_three_pairs() -> None:
    report = compare_runs(QRELS, dict.fromkeys("abc", RUN), "ndcg@10")
    assert [(pair["first"], pair["second"]) for pair in report.pairs] == [
        ("a", "b"), ("a", "c"), ("b", "c"),
    ]  # fmt: skip
    assert all(pair["p_bootstrap"] == pair["p_ttest"] == 1.0 for pair in report.pairs)
    assert report.num_queries == 2


def test_a_constant_difference_is_certain_and_missing_queries_lose() -> None:
    qrels = {f"q{i}": {"x": 1} for i in range(3)}
    full = {query: {"x": 1.0} for query in qrels}
    report = compare_runs(qrels, {"full": full, "bad": {"q0": {"y": 1.0}}}, "P@1")
    assert report.pairs[0]["wins"] == 3
    assert report.pairs[0]["p_ttest"] == 0.0


def test_runs_are_named_by_their_files(tmp_path: Path) -> None:
    for name in ("one.trec", "two.trec.gz"):
        write_run(RUN, tmp_path / name)
    paths = [tmp_path / "one.trec", tmp_path / "two.trec.gz"]
    assert list(compare_runs(QRELS, paths, "map").means) == ["one", "two"]


# --- bad input ---


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("ndgc@10", "unknown metric 'ndgc'; did you mean 'ndcg'"),
        ("ndcg@0", "cut-off of 'ndcg@0' must be >= 1; got 0"),
        ("P@-1", "must be >= 1; got -1"),
        ("recall", r"'recall' needs a cut-off; got none. Write recall@10"),
    ],
)
def test_bad_metrics_are_refused(metric: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate_run(QRELS, RUN, [metric])


def test_bad_options_are_refused() -> None:
    with pytest.raises(DataError, match="qrels must judge at least one query; got none"):
        evaluate_run({}, RUN, ["map"])
    with pytest.raises(ConfigError, match="must be a list of names; got 'map'"):
        evaluate_run(QRELS, RUN, "map")
    with pytest.raises(ConfigError, match="at least one metric"):
        evaluate_run(QRELS, RUN, [])
    with pytest.raises(ConfigError, match="value of missing"):
        evaluate_run(QRELS, RUN, ["map"], missing="one")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rel_level must be >= 1; got 0"):
        evaluate_run(QRELS, RUN, ["map"], rel_level=0)


@pytest.mark.parametrize(
    ("qrels", "run", "message"),
    [
        ({1: {"a": 1}}, {"1": {"a": 1.0}}, r"qrels has 1, run has '1' \(the types differ: int"),
        ({"q": {1: 1}}, {"q": {"1": 1.0}}, r"same document ids.*has 1, run has '1'"),
        ({"q": {"a": 1}}, {"p": {"a": 1.0}}, "same query ids; none is in both: qrels has 'q', run"),
        ({"q": {"a": 1}}, {}, "run must hold at least one query"),
        ({"q": {"a": 0}}, {"q": {"a": 1.0}}, r"relevant document \(grade >= 1\) for some query"),
        ({"q": {"a": 1}}, {"q": {"a": math.nan}}, "finite scores; got nan for document 'a' of qu"),
        ({"q": {"a": 0.5}}, {"q": {"a": 1.0}}, "integer grades; got 0.5 for document 'a'"),
        (3, {"q": {"a": 1.0}}, "qrels must map queries to documents"),
        (Frame(qid=[1], doc=[1]), {"q": {"a": 1.0}}, "one of the columns score, relevance"),
        (Frame(qid=[1, 1], doc=[1, 1], rel=[1, 1]), {"1": {"a": 1.0}}, "document '1' of query '1'"),
    ],
)
def test_bad_tables_are_refused(qrels: object, run: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        evaluate_run(qrels, run, ["map"])


def test_skipping_every_query_is_refused() -> None:
    qrels = {"q1": {"a": 0}, "q2": {"a": 1}}
    with pytest.raises(DataError, match="none of 1 such queries is answered"):
        evaluate_run(qrels, {"q1": {"a": 1.0}}, ["map"], missing="skip")


def test_bad_comparisons_are_refused() -> None:
    with pytest.raises(DataError, match=r"two or more, .*; got 1"):
        compare_runs(QRELS, {"one": RUN}, "map")
    with pytest.raises(DataError, match=r"two or more, .*; got a int"):
        compare_runs(QRELS, 3, "map")
    with pytest.raises(DataError, match=r"two or more queries .*; got 1"):
        compare_runs({"q1": QRELS["q1"]}, {"one": RUN, "two": RUN}, "map")
    with pytest.raises(ConfigError, match="num_bootstrap must be >= 1"):
        compare_runs(QRELS, {"one": RUN, "two": RUN}, "map", num_bootstrap=0)
    with pytest.raises(DataError, match="qrels and run 'two' must name the same query ids"):
        compare_runs(QRELS, {"one": RUN, "two": {"p": {"a": 1.0}}}, "map")
