"""Metrics of runs, as trec_eval computes them, and the paired comparison of runs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_choice, check_range
from gossamer.errors import DataError
from gossamer.retrieval._measures import JudgedQuery, Measure, build_measures, canonical_name
from gossamer.retrieval._tables import Qrels, Run, as_qrels, as_run, check_ids, ranked

__all__ = ["ComparisonReport", "RunReport", "compare_runs", "evaluate_run"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RunReport:
    """Metrics of one run; `report["ndcg@10"]` is the mean, in any spelling of the name.

    Args:
        means: Metric -> mean over the evaluated queries, fractions in 0..1.
        per_query: Query -> metric -> value; empty unless asked for.
        num_queries: Queries in the means.
        num_missing: Queries with a relevant document that the run does not answer.
        num_without_relevant: Judged queries without any relevant document, left out.
        num_unjudged: Queries of the run that have no judgements, left out.

    Example:
        >>> evaluate_run({"q": {"d": 1}}, {"q": {"d": 0.3}}, ["P@1"])["precision@1"]
        1.0
    """

    means: dict[str, float]
    per_query: dict[str, dict[str, float]] = field(repr=False)
    num_queries: int
    num_missing: int
    num_without_relevant: int
    num_unjudged: int

    def __getitem__(self, metric: str) -> float:
        """Return the mean of a metric.

        Raises:
            ConfigError: If it was not computed.
        """
        name = canonical_name(metric)
        check_choice(name, self.means, "metric of this report")
        return self.means[name]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each metric."""
        return [{"metric": name, "value": value} for name, value in self.means.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dict(vars(self))


@dataclass(frozen=True)
class ComparisonReport:
    """Runs compared query by query.

    Args:
        metric: What is compared.
        means: Run -> mean over the queries.
        pairs: One row for each pair of runs: `first`, `second`, `difference` (first minus
            second), `low` and `high` (its 95 % bootstrap interval), `p_bootstrap`, `p_ttest`,
            `wins`, `losses` and `ties` of the first.
        num_queries: Queries compared.

    Example:
        >>> qrels = {"q1": {"d": 1}, "q2": {"d": 1}}
        >>> good, bad = {"q1": {"d": 1.0}}, {"q1": {"e": 1.0}}
        >>> compare_runs(qrels, {"good": good, "bad": bad}, "P@1").pairs[0]["wins"]
        1
    """

    metric: str
    means: dict[str, float]
    pairs: tuple[dict[str, Any], ...]
    num_queries: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each pair of runs."""
        return [dict(pair) for pair in self.pairs]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**vars(self), "pairs": self.rows()}


def evaluate_run(
    qrels: Any,
    run: Any,
    metrics: Sequence[str],
    *,
    per_query: bool = False,
    missing: Literal["zero", "skip"] = "zero",
    rel_level: int = 1,
    drop_self: bool = False,
) -> RunReport:
    r"""Evaluate a run against judgements, each query as trec_eval does, then the mean.

    Documents are ordered by score, equal scores by document id, the later in string order first.
    With gains g (the grades, negative ones as 0), R relevant documents (grade >= `rel_level`):

    $$\mathrm{DCG}@k = \sum_{i \le k} \frac{g_i}{\log_2(i + 1)}, \quad
      \mathrm{nDCG}@k = \mathrm{DCG}@k / \mathrm{DCG}@k(\text{all judged documents, best first})$$

    recall@k divides the hits by R, precision@k by k, map by R; mrr@k is cut at k, mrr is not;
    success@k is 1 with a hit. `ndcg_exp@k` has the gains $2^g - 1$. Names may be written
    `ndcg@10`, `nDCG@10` or `ndcg_cut_10`, `P_5`, `R@100`, `recip_rank`.

    Args:
        qrels: Query -> document -> integer grade: a mapping, a table (columns `query_id`,
            `doc_id`, `relevance` or the usual other spellings), or a path.
        run: Query -> document -> score, in the same forms.
        metrics: Names: `ndcg ndcg_exp map mrr` with or without `@k`, `recall precision success`
            with it; k >= 1.
        per_query: Keep the value of every query. Default false.
        missing: `"zero"`: the mean is over all queries with a relevant document, those that the
            run lacks count 0; `"skip"`: over those that the run answers. Default `"zero"`.
        rel_level: Least grade that is relevant; nDCG does not use it but for the choice of
            queries. Range: >= 1. Default 1.
        drop_self: Take the document whose id is the query's out of the run. Default false.

    Raises:
        ConfigError: If a metric or an option is unknown or out of its range.
        DataError: If the tables are malformed or have no id in common, or no query has a
            relevant document.

    Example:
        >>> qrels = {"q1": {"a": 3, "b": 2, "c": 1, "d": 0}}
        >>> run = {"q1": {"a": 0.1, "b": 0.9, "c": 0.9, "d": 0.5, "e": 0.5}}
        >>> round(evaluate_run(qrels, run, ["nDCG@3"])["ndcg_cut_3"], 4)
        0.475

    Source: trec_eval, NIST; nDCG: Järvelin and Kekäläinen, *Cumulated Gain-Based Evaluation of IR
        Techniques*, TOIS 2002.
    Deviations: scores are compared in float64, where trec_eval rounds them to float32; the mean
        counts missing queries as 0 and leaves out queries without a relevant document, where
        trec_eval averages over all queries that are in both files.
    """
    measures = build_measures(metrics)
    check_choice(missing, ("zero", "skip"), "value of missing")
    check_range(rel_level, "rel_level", low=1, integer=True)
    truth, found = as_qrels(qrels), as_run(run)
    if not truth:
        raise DataError("qrels must judge at least one query; got none. Give some judgements.")
    values, without = _values(truth, found, measures, rel_level, drop_self)
    answered = [query for query in values if query in found]
    queries = answered if missing == "skip" else list(values)
    if not queries:
        raise DataError(
            f"the queries of the run must include one with a relevant document (grade >= "
            f"{rel_level}); none of {len(values)} such queries is answered. Count missing ones as "
            'zero with missing="zero", or give another run.'
        )
    table = np.array([values[query] for query in queries])
    return RunReport(
        means=dict(zip(measures, table.mean(axis=0).tolist(), strict=True)),
        per_query={q: dict(zip(measures, values[q], strict=True)) for q in queries if per_query},
        num_queries=len(queries),
        num_missing=len(values) - len(answered),
        num_without_relevant=without,
        num_unjudged=len(found.keys() - truth.keys()),
    )


def compare_runs(
    qrels: Any, runs: Any, metric: str, *, num_bootstrap: int = 1000, random_state: int = 0
) -> ComparisonReport:
    r"""Compare runs query by query: differences, intervals, two p-values, wins.

    For every pair the difference of each query is taken; queries that a run lacks count 0.
    `p_ttest` is the two-sided paired t-test. The bootstrap draws queries with replacement: its
    quantiles give the interval, and the share of draws of the centred differences at least as
    far from 0 as the mean found gives `p_bootstrap`, $(1 + \#) / (1 + \text{draws})$.

    Args:
        qrels: As `evaluate_run` takes them.
        runs: Name -> run, or a list of paths, at least two; the files' stems are the names.
        metric: One name, as `evaluate_run` takes it.
        num_bootstrap: Draws. Range: >= 1. Default 1000.
        random_state: Seed of the draws. Default 0.

    Raises:
        ConfigError: If the metric is unknown or an option out of its range.
        DataError: If there are fewer than two runs or queries, or a table is malformed.

    Example:
        >>> qrels = {"q1": {"d": 1}, "q2": {"d": 1}}
        >>> run = {"q1": {"d": 1.0}}
        >>> compare_runs(qrels, {"one": run, "two": run}, "map").pairs[0]["p_ttest"]
        1.0

    Source: Smucker, Allan and Carterette, *A Comparison of Statistical Significance Tests for
        Information Retrieval Evaluation*, CIKM 2007.
    Deviations: p-values are not corrected for the number of pairs.
    """
    check_range(num_bootstrap, "num_bootstrap", low=1, integer=True)
    measures = build_measures([metric])
    truth, named_runs = as_qrels(qrels), _named_runs(runs)
    values = {
        name: _values(truth, run, measures, 1, False, f"run {name!r}")[0]
        for name, run in named_runs.items()
    }
    queries = list(next(iter(values.values())))
    if len(queries) < 2:
        raise DataError(
            f"qrels must have two or more queries with a relevant document to compare runs on; got "
            f"{len(queries)}. Judge more queries."
        )
    columns = {name: np.array([per[q][0] for q in queries]) for name, per in values.items()}
    draws = np.random.default_rng(random_state).integers(
        len(queries), size=(num_bootstrap, len(queries))
    )
    return ComparisonReport(
        metric=next(iter(measures)),
        means={name: float(column.mean()) for name, column in columns.items()},
        pairs=tuple(
            {"first": one, "second": two, **_paired(columns[one] - columns[two], draws)}
            for one, two in combinations(columns, 2)
        ),
        num_queries=len(queries),
    )


def _paired(difference: Array, draws: NDArray[np.int64]) -> dict[str, Any]:
    from scipy.special import stdtr

    n, mean = len(difference), float(difference.mean())
    error = float(difference.std(ddof=1)) / math.sqrt(n)
    means = np.array([difference[draw].mean() for draw in draws])
    low, high = np.quantile(means, [0.025, 0.975])
    # rounding must not decide about draws that equal the mean found
    far = int((np.abs(means - mean) >= abs(mean) - 1e-12).sum())
    if error > 0:
        p_ttest = float(2 * stdtr(n - 1, -abs(mean) / error))
    else:
        p_ttest = 1.0 if mean == 0 else 0.0
    return {
        "difference": mean,
        "low": float(low),
        "high": float(high),
        "p_bootstrap": (1 + far) / (1 + len(draws)),
        "p_ttest": p_ttest,
        "wins": int((difference > 0).sum()),
        "losses": int((difference < 0).sum()),
        "ties": int((difference == 0).sum()),
    }


def _named_runs(runs: Any) -> dict[str, Run]:
    if isinstance(runs, Sequence) and all(isinstance(one, (str, os.PathLike)) for one in runs):
        stems = [Path(one).name.removesuffix(".gz").removesuffix(".trec") for one in runs]
        names = stems if len(set(stems)) == len(stems) else [str(one) for one in runs]
        runs = dict(zip(names, runs, strict=True))
    if not isinstance(runs, Mapping) or len(runs) < 2:
        got = len(runs) if isinstance(runs, Mapping) else f"a {type(runs).__name__}"
        raise DataError(
            f"runs must be two or more, as {{name: run}} or a list of different paths; got {got}. "
            "Name each run."
        )
    return {name: as_run(run, f"run {name!r}") for name, run in runs.items()}


def _values(
    qrels: Qrels,
    run: Run,
    measures: Mapping[str, Measure],
    rel_level: int,
    drop_self: bool,
    name: str = "run",
) -> tuple[dict[str, list[float]], int]:
    """Return the values of every query with a relevant document, and the number of others."""
    check_ids(qrels, run, name)
    values = {}
    for query, grades in qrels.items():
        if max(grades.values(), default=0) < rel_level:
            continue
        scores: Mapping[str, float] = run.get(query, {})
        if drop_self:
            scores = {document: score for document, score in scores.items() if document != query}
        found = [document for document in grades if document in scores]
        ranks = _ranks(found, scores)
        order = np.argsort(ranks)
        judged = JudgedQuery(
            ranks=ranks[order],
            grades=np.array([grades[document] for document in found], dtype=np.float64)[order],
            ideal=np.sort(np.array(list(grades.values()), dtype=np.float64))[::-1],
            level=rel_level,
        )
        values[query] = [measure(judged) for measure in measures.values()]
    if not values:
        raise DataError(
            f"qrels must hold a relevant document (grade >= {rel_level}) for some query; got none "
            f"in {len(qrels)} queries. Lower rel_level, or give other judgements."
        )
    return values, len(qrels) - len(values)


def _ranks(found: Sequence[str], scores: Mapping[str, float]) -> NDArray[np.int64]:
    """Return the ranks of some documents, from 1, in the order of `ranked`."""
    every = np.sort(np.fromiter(scores.values(), np.float64, len(scores)))
    own = np.array([scores[document] for document in found], dtype=np.float64)
    above = len(every) - np.searchsorted(every, own, side="right")
    equal = len(every) - np.searchsorted(every, own, side="left") - above
    if (equal == 1).all():  # ids decide among equal scores alone
        return above + 1
    place = {document: rank for rank, document in enumerate(ranked(scores), start=1)}
    return np.array([place[document] for document in found], dtype=np.int64)
