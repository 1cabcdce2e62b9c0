"""Metrics against trec_eval itself, on real collections and with many equal scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer.retrieval import BM25Index, evaluate_run, read_beir

pytrec_eval: Any = pytest.importorskip("pytrec_eval")

NAMES = {
    "ndcg": "ndcg",
    "ndcg@10": "ndcg_cut_10",
    "recall@100": "recall_100",
    "precision@5": "P_5",
    "map": "map",
    "map@10": "map_cut_10",
    "mrr": "recip_rank",
    "success@1": "success_1",
}
ASKED = {"ndcg", "ndcg_cut.10", "recall.100", "P.5", "map", "map_cut.10", "recip_rank", "success.1"}


def agrees(qrels: dict[str, dict[str, int]], run: dict[str, dict[str, float]], level: int) -> None:
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, ASKED, relevance_level=level)
    official = evaluator.evaluate(run)
    report = evaluate_run(qrels, run, list(NAMES), per_query=True, rel_level=level)
    for query, values in report.per_query.items():
        if query in run:  # trec_eval is silent on queries that a run lacks
            expected = {ours: official[query][theirs] for ours, theirs in NAMES.items()}
            assert values == pytest.approx(expected, abs=1e-9), query
    assert set(report.per_query) & set(run) <= set(official)
    assert len(set(report.per_query) & set(run)) > 50


def rounded(run: dict[str, dict[str, float]], digits: int) -> dict[str, dict[str, float]]:
    """Return scores that float32, in which trec_eval compares, keeps as they are."""
    return {
        query: {doc: float(np.float32(round(score, digits))) for doc, score in scores.items()}
        for query, scores in run.items()
    }


@pytest.mark.parametrize("name", ["cranfield", "vaswani"])
def test_real_collections(outside_data: Path, name: str) -> None:
    corpus, queries, qrels = read_beir(outside_data / name)
    run = BM25Index(corpus).search(queries, 100)
    for digits in (6, 1, 0):  # with one digit or none most documents share their score
        agrees(qrels, rounded(run, digits), level=1)


@pytest.mark.parametrize("level", [1, 2])
def test_random_grades_and_equal_scores(level: int) -> None:
    rng = np.random.default_rng(0)
    qrels, run = {}, {}
    for number in range(150):
        judged = rng.choice(60, size=int(rng.integers(1, 20)), replace=False)
        found = rng.choice(60, size=int(rng.integers(1, 40)), replace=False)
        # nDCG of grades below 0 is that of 0 in both
        qrels[f"q{number}"] = {f"d{i}": int(rng.integers(-1, 4)) for i in judged}
        run[f"q{number}"] = {f"d{i}": float(rng.integers(0, 5)) / 4 for i in found}
    agrees(qrels, run, level)
