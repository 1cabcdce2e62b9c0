"""Several runs made one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossamer.checks import check_range
from gossamer.errors import DataError
from gossamer.retrieval._tables import Run, as_run, ranked

__all__ = ["fuse_runs"]


def fuse_runs(runs: Any, *, k: int = 60) -> Run:
    r"""Fuse runs by reciprocal ranks; scores, whose scales may differ, are not used.

    $$s(d) = \sum_{\text{runs that hold } d} \frac{1}{k + \mathrm{rank}(d)}$$

    with ranks from 1 in trec_eval's order. Queries are those of any run.

    Args:
        runs: List of runs, or name -> run, at least one; each a mapping, a table or a path.
        k: How little the first ranks stand out. Range: >= 0. Default 60, the paper's value.

    Returns:
        The fused run, best documents first.

    Raises:
        ConfigError: If `k` is out of its range.
        DataError: If there is no run, or one is malformed.

    Example:
        >>> fused = fuse_runs([{"q": {"a": 9.0, "b": 8.0}}, {"q": {"b": 0.2, "c": 0.1}}])
        >>> list(fused["q"])
        ['b', 'a', 'c']

    Source: Cormack, Clarke and Büttcher, *Reciprocal Rank Fusion Outperforms Condorcet and
        Individual Rank Learning Methods*, SIGIR 2009.
    Deviations: none
    """
    check_range(k, "k", low=0, integer=True)
    many = dict(runs) if isinstance(runs, Mapping) else dict(enumerate(runs))
    if not many:
        raise DataError("runs must hold at least one run; it is empty. Add a run.")
    fused: Run = {}
    for name, run in many.items():
        for query, scores in as_run(run, f"runs[{name!r}]").items():
            sums = fused.setdefault(query, {})
            for rank, document in enumerate(ranked(scores), start=1):
                sums[document] = sums.get(document, 0.0) + 1.0 / (k + rank)
    return {query: {doc: sums[doc] for doc in ranked(sums)} for query, sums in fused.items()}
