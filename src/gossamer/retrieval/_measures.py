"""The measures of one query, and the spellings of their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError

__all__ = ["JudgedQuery", "Measure", "build_measures", "canonical_name"]

Array = NDArray[np.float64]

_SPELLINGS = {
    "ndcg": "ndcg",
    "ndcg_exp": "ndcg_exp",
    "recall": "recall",
    "r": "recall",
    "p": "precision",
    "precision": "precision",
    "map": "map",
    "ap": "map",
    "mrr": "mrr",
    "rr": "mrr",
    "recip_rank": "mrr",
    "success": "success",
}
_NEEDS_CUT = ("recall", "precision", "success")
_CUT = re.compile(r"(?P<name>.*?)(?:(?:@|_cut_|_cut\.|_|\.)(?P<k>-?[0-9]+))?")


@dataclass(frozen=True)
class JudgedQuery:
    """One query: where the run has its judged documents, and all grades."""

    ranks: NDArray[np.int64]  # of the retrieved judged documents, from 1, rising
    grades: Array  # of these
    ideal: Array  # of all judged documents, highest first
    level: int

    def cut(self, k: int | None) -> JudgedQuery:
        """Return the same with the first k retrieved documents alone."""
        if k is None:
            return self
        kept = self.ranks <= k
        return JudgedQuery(self.ranks[kept], self.grades[kept], self.ideal, self.level)

    @property
    def hits(self) -> NDArray[np.int64]:
        """Ranks of the retrieved relevant documents."""
        return self.ranks[self.grades >= self.level]

    @property
    def num_relevant(self) -> int:
        """Relevant documents, retrieved or not."""
        return int((self.ideal >= self.level).sum())


Measure = Callable[[JudgedQuery], float]


def build_measures(metrics: Iterable[str]) -> dict[str, Measure]:
    """Return the measures by their canonical names.

    Raises:
        ConfigError: If a name is unknown, lacks its cut-off, or there is none.
    """
    if isinstance(metrics, str):
        raise ConfigError(f"metrics must be a list of names; got {metrics!r}. Write [{metrics!r}].")
    names = [canonical_name(metric) for metric in metrics]
    if not names:
        raise ConfigError('metrics must name at least one metric; got none. Try ["ndcg@10"].')
    return {name: _measure(*_parts(name)) for name in names}


def canonical_name(metric: str) -> str:
    """Return the one name of a metric, such as `ndcg@10`."""
    name, k = _parts(metric)
    return name if k is None else f"{name}@{k}"


def _parts(metric: str) -> tuple[str, int | None]:
    match = _CUT.fullmatch(str(metric).lower())
    base, cut = (match["name"], match["k"]) if match else (str(metric), None)
    check_choice(base, _SPELLINGS, "metric")
    name = _SPELLINGS[base]
    if cut is None and name in _NEEDS_CUT:
        raise ConfigError(f"the metric {metric!r} needs a cut-off; got none. Write {metric}@10.")
    if cut is not None:
        check_range(int(cut), f"the cut-off of {metric!r}", low=1, integer=True)
    return name, None if cut is None else int(cut)


def _measure(name: str, k: int | None) -> Measure:
    def value(judged: JudgedQuery) -> float:
        found = judged.cut(k)
        if name in ("ndcg", "ndcg_exp"):
            gain = np.exp2 if name == "ndcg_exp" else None
            best = judged.ideal[:k]
            # rel_level = 1 leaves no query without a gain: its grades are integers
            return _dcg(found.grades, found.ranks, gain) / _dcg(
                best, np.arange(1, len(best) + 1), gain
            )
        hits = found.hits
        if name == "recall":
            return len(hits) / judged.num_relevant
        if name == "precision":
            return len(hits) / (k or 1)
        if name == "success":
            return float(len(hits) > 0)
        if name == "mrr":
            return 1.0 / float(hits[0]) if len(hits) else 0.0
        return float((np.arange(1, len(hits) + 1) / hits).sum()) / judged.num_relevant

    return value


def _dcg(grades: Array, ranks: NDArray[np.int64], gain: Callable[[Array], Array] | None) -> float:
    grades = np.clip(grades, 0.0, None)
    gains = grades if gain is None else gain(grades) - 1.0
    return float((gains / np.log2(ranks + 1)).sum())
