"""What rankers of lists share: candidates in any form, results, and whole runs."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.checks import check_range
from gossamer.errors import DataError
from gossamer.progress import progress
from gossamer.retrieval._tables import Run, as_run, ranked

__all__ = ["Candidate", "ListRanker", "RankResult", "candidates_of", "length_bias", "result_of"]


@dataclass(frozen=True)
class Candidate:
    """A document to rank.

    Args:
        name: Its id.
        text: Title first.
        named: Whether the caller gave the id, rather than its place in the list.
    """

    name: str
    text: str
    named: bool = True


@dataclass(frozen=True)
class RankResult:
    """An order of candidates.

    Args:
        ids: Ids of the documents, best first.
        scores: Their scores; they compare documents of this list alone.
        order: Their places among the candidates.
        lengths: Their tokens in the prompt.
        num_candidates: How many were ranked, also those beyond the best that are given.
        num_cut: How many of them lost their end to the limit of length.

    Example:
        >>> RankResult(("b", "a"), (0.75, 0.25), (1, 0), (20, 31), 2, 0).ids
        ('b', 'a')
    """

    ids: tuple[str, ...]
    scores: tuple[float, ...]
    order: tuple[int, ...]
    lengths: tuple[int, ...]
    num_candidates: int
    num_cut: int


class ListRanker(ABC):
    """Ranks lists of candidates; a subclass says how one list is ranked."""

    _told_of_cut = False

    @abstractmethod
    def rank(
        self, query: str, documents: Sequence[Any], top_k: int | None = None, **options: Any
    ) -> RankResult:
        """Rank the candidates of one query."""

    def rank_run(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, Any],
        run: Any,
        *,
        top_k: int = 100,
        quiet: bool = False,
        **options: Any,
    ) -> Run:
        """Rank the first documents of each query of a first-stage run anew.

        No document is lost: those beyond `top_k` follow in their first order, with scores -1,
        -2, ... . Equal scores keep the first order, by the least difference that a number can
        have.

        Args:
            queries: Query id -> text; those of the run must be among them.
            corpus: Document id -> text, or -> a mapping with `text` and perhaps `title`.
            run: First stage: a mapping query -> document -> score, a table, or a path.
            top_k: How many documents of each query are ranked. Range: >= 1. Default 100.
            quiet: Show no progress. Default false.
            options: Further options of `rank`, such as `batch_tokens`.

        Returns:
            Query id -> document id -> score, best first.

        Raises:
            DataError: If a query or document of the run has no text.
        """
        found = self.rank_lists(queries, corpus, run, top_k=top_k, quiet=quiet, **options)
        return {name: scores for name, scores, _ in found}

    def rank_lists(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, Any],
        run: Any,
        *,
        top_k: int = 100,
        quiet: bool = False,
        skip: Iterable[str] = (),
        **options: Any,
    ) -> Iterator[tuple[str, dict[str, float], RankResult]]:
        """Yield what `rank_run` returns query by query, with the result of each.

        Args:
            queries: As there.
            corpus: As there.
            run: As there.
            top_k: As there.
            quiet: As there.
            skip: Queries that are done.
            options: As there.
        """
        check_range(top_k, "top_k", low=1, integer=True)
        table = as_run(run)
        _check_texts(table, queries, corpus)
        done = set(skip)
        left = [name for name in table if name not in done]
        with progress("rank", len(left), quiet=quiet) as bar:
            for number, name in enumerate(left, start=1):
                order = ranked(table[name])
                documents = [Candidate(doc, text_of(corpus[doc], doc)) for doc in order[:top_k]]
                result = self.rank(queries[name], documents, **options)
                yield name, _scores(result, order[top_k:]), result
                bar.update(number, f"{number} of {len(left)} queries")

    def _tell_of_cut(self, num_cut: int, limit: int) -> None:
        """Warn about documents that were cut, the first time that it happens."""
        if num_cut and not self._told_of_cut:
            self._told_of_cut = True
            warnings.warn(
                f"{num_cut} documents were longer than max_document_length = {limit} tokens and "
                "lost their ends; results count them in num_cut. This is said once.",
                stacklevel=3,
            )


def candidates_of(documents: Any) -> list[Candidate]:
    """Return candidates with ids and texts.

    Args:
        documents: Texts, mappings with `text` and perhaps `id` (also `_id`, `doc_id`) and `title`,
            or a mapping id -> text. A document without an id is called by its place.

    Raises:
        DataError: If a text is missing or an id comes twice.
    """
    if isinstance(documents, str):
        raise DataError("documents must be a list; got one text. Put a single document in a list.")
    if isinstance(documents, Mapping):
        documents = [Candidate(name, text_of(value, name)) for name, value in documents.items()]
    made = [_candidate(value, place) for place, value in enumerate(documents)]
    names: set[str] = set()
    for candidate in made:
        if candidate.name in names:
            raise DataError(
                f"documents must have each id once; got {candidate.name!r} a second time. Take "
                "one of them out."
            )
        names.add(candidate.name)
    return made


def text_of(value: Any, name: str) -> str:
    """Return a document's text, title first.

    Raises:
        DataError: If there is none.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        text, title = value.get("text"), value.get("title") or ""
        if isinstance(text, str) and isinstance(title, str):
            return f"{title} {text}".strip()
        value = text if not isinstance(text, str) else title
    raise DataError(
        f"documents must have text; got {'None' if value is None else repr(value)[:60]} for "
        f"{name!r}. Fill it in or leave the document out."
    )


def result_of(
    candidates: Sequence[Candidate],
    scores: Sequence[float],
    lengths: Sequence[int],
    *,
    num_cut: int,
    top_k: int | None,
) -> RankResult:
    """Return the candidates by falling score, equal ones in their first order.

    Raises:
        DataError: If a score is not finite.
    """
    if not all(math.isfinite(score) for score in scores):
        raise DataError(
            "scores must be finite; got NaN, as float16 gives where logits are large. Load the "
            "model with dtype 'bfloat16' or 'float32', and check its weights for NaN."
        )
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[:top_k]
    return RankResult(
        ids=tuple(candidates[place].name for place in order),
        scores=tuple(float(scores[place]) for place in order),
        order=tuple(order),
        lengths=tuple(lengths[place] for place in order),
        num_candidates=len(candidates),
        num_cut=num_cut,
    )


def length_bias(results: Iterable[RankResult]) -> float:
    """Return how far longer documents get higher scores: Spearman's correlation, mean over lists.

    A ranker that sums attention over a document's tokens can favour long ones; where this is far
    above the same figure for relevant documents, try `aggregate="mean"` or `"max"`.

    Args:
        results: Of several queries; lists of fewer than 3, of one length, or of one score are left
            out.

    Returns:
        From -1 to 1; NaN where no list is left.

    Example:
        >>> length_bias([RankResult(("b", "a", "c"), (0.5, 0.3, 0.2), (1, 0, 2), (9, 7, 4), 3, 0)])
        1.0

    Source: rank correlation, the definition.
    Deviations: none
    """
    from scipy.stats import spearmanr

    found = [
        float(spearmanr(result.scores, result.lengths).statistic)
        for result in results
        if len(set(result.scores)) > 1 and len(set(result.lengths)) > 1 and len(result.ids) > 2
    ]
    return float(np.mean(found)) if found else math.nan


def _candidate(value: Any, place: int) -> Candidate:
    if isinstance(value, Candidate):
        return value
    if isinstance(value, Mapping):
        found = next((value[key] for key in ("id", "_id", "doc_id") if key in value), None)
        name = str(place) if found is None else str(found)
        return Candidate(name, text_of(value, name), found is not None)
    return Candidate(str(place), text_of(value, str(place)), False)


def _check_texts(run: Run, queries: Mapping[str, str], corpus: Mapping[str, Any]) -> None:
    absent = next((name for name in run if name not in queries), None)
    if absent is not None:
        raise DataError(
            f"the queries of the run must have texts; {absent!r} has none, where the queries have "
            f"ids like {next(iter(queries), None)!r}. Give the queries that belong to the run."
        )
    for name, documents in run.items():
        unknown = next((doc for doc in documents if doc not in corpus), None)
        if unknown is not None:
            raise DataError(
                f"the documents of the run must be in the corpus; {unknown!r} of query {name!r} is "
                f"not, where the corpus has ids like {next(iter(corpus), None)!r}. Give the corpus "
                "that belongs to the run."
            )


def _scores(result: RankResult, rest: Sequence[str]) -> dict[str, float]:
    """Return strictly falling scores, the documents that were not ranked behind."""
    scores: dict[str, float] = {}
    last = math.inf
    for name, score in zip(result.ids, result.scores, strict=True):
        # in float32, in which trec_eval compares
        last = min(score, float(np.nextafter(np.float32(last), np.float32(-np.inf))))
        scores[name] = last
    floor = min(0.0, math.floor(last)) if scores else 0.0
    return scores | {name: floor - place for place, name in enumerate(rest, start=1)}
