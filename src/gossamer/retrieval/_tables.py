"""Runs and judgements in any form that users have, as dicts of dicts."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np

from gossamer.errors import DataError

__all__ = ["Qrels", "Run", "as_qrels", "as_run", "check_ids", "ranked"]

Run = dict[str, dict[str, float]]
Qrels = dict[str, dict[str, int]]

QUERY_NAMES = ("query_id", "query-id", "qid", "q_id", "query")
DOCUMENT_NAMES = ("doc_id", "corpus-id", "corpus_id", "docid", "docno", "document_id", "doc")
GRADE_NAMES = ("score", "relevance", "rel", "grade", "label")
_SCORE_NAMES = ("score", "sim")


def ranked(scores: Mapping[str, float]) -> list[str]:
    """Return the documents of one query in the order that trec_eval gives them.

    By score, highest first; equal scores by document id, the later in string order first.
    """
    # two stable sorts: three times faster than one with pairs as keys
    return sorted(sorted(scores, key=str, reverse=True), key=scores.__getitem__, reverse=True)


def as_run(value: Any, name: str = "run") -> Run:
    """Return a run as a dict of dicts of finite floats.

    Args:
        value: A mapping query -> document -> score, a table with columns, or a path.
        name: The argument's name, for messages.

    Raises:
        DataError: If it is none of these, or a score is no finite number.
    """
    if isinstance(value, (str, os.PathLike)):
        from gossamer.retrieval.trec import read_run

        return read_run(value)
    run: Run = {}
    for query, documents in _rows(value, name, _SCORE_NAMES):
        run[query] = _scores(documents, query, name)
    return run


def as_qrels(value: Any, name: str = "qrels") -> Qrels:
    """Return judgements as a dict of dicts of integers.

    Args:
        value: A mapping query -> document -> grade, a table with columns, or a path.
        name: The argument's name, for messages.

    Raises:
        DataError: If it is none of these, or a grade is no integer.
    """
    if isinstance(value, (str, os.PathLike)):
        from gossamer.retrieval.trec import read_qrels

        return read_qrels(value)
    qrels: Qrels = {}
    for query, documents in _rows(value, name, GRADE_NAMES):
        qrels[query] = {doc: _grade(grade, query, doc, name) for doc, grade in documents.items()}
    return qrels


def check_ids(qrels: Qrels, run: Run, name: str = "run") -> None:
    """Check that judgements and run speak of the same queries, with ids of one type.

    Raises:
        DataError: If no query is in both, or the documents' ids are of different types; the
            message shows one id from each.
    """
    if not run:
        raise DataError(f"{name} must hold at least one query; it is empty. Give another run.")
    if qrels.keys().isdisjoint(run):
        raise _no_common("query", next(iter(qrels), None), next(iter(run)), name)
    judged = next((doc for docs in qrels.values() for doc in docs), None)
    found = next((doc for docs in run.values() for doc in docs), None)
    if (
        judged is not None
        and found is not None
        and isinstance(judged, str) != isinstance(found, str)
    ):
        raise _no_common("document", judged, found, name)


def _no_common(kind: str, judged: Any, found: Any, name: str) -> DataError:
    types = ""
    if type(judged) is not type(found):
        types = f" (the types differ: {type(judged).__name__} and {type(found).__name__})"
    return DataError(
        f"qrels and {name} must name the same {kind} ids; none is in both: qrels has {judged!r}, "
        f"{name} has {found!r}{types}. Give the judgements that belong to {name}, or convert the "
        "ids of one of them."
    )


def _rows(
    value: Any, name: str, values: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if hasattr(value, "columns"):  # a data frame, by what it can do: pandas is not imported here
        value = _grouped(value, name, values)
    if not isinstance(value, Mapping):
        raise DataError(
            f"{name} must map queries to documents with their {values[0]}s, or be a table or a "
            f"path; got a {type(value).__name__}. Give {{query: {{document: {values[0]}}}}}."
        )
    for query, documents in value.items():
        if not isinstance(documents, Mapping):
            raise DataError(
                f"{name}[{query!r}] must map documents to their {values[0]}s; got a "
                f"{type(documents).__name__}. Give {{document: {values[0]}}}."
            )
        yield query, documents


def _grouped(frame: Any, name: str, values: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the rows of a data frame by query; its ids become text, as files have them."""
    known = [str(column) for column in frame.columns]
    picked = []
    for names in (QUERY_NAMES, DOCUMENT_NAMES, values):
        column = next((one for one in names if one in known), None)
        if column is None:
            raise DataError(
                f"{name} must have one of the columns {', '.join(names)}; got "
                f"{', '.join(known)}. Rename a column."
            )
        picked.append(list(frame[column]))
    grouped: dict[str, dict[str, Any]] = {}
    for asked, document, value in zip(*picked, strict=True):
        query, text = str(asked), str(document)
        documents = grouped.setdefault(query, {})
        if text in documents:
            raise DataError(
                f"{name} must name a document once for each query; got document {text!r} of "
                f"query {query!r} twice. Remove one of the rows."
            )
        documents[text] = value
    return grouped


def _scores(documents: Mapping[str, Any], query: Hashable, name: str) -> dict[str, float]:
    """Return the scores of one query as floats; the dict itself where it holds nothing else."""
    try:
        values = np.fromiter(documents.values(), np.float64, len(documents))
    except (TypeError, ValueError):
        values = np.array([math.nan])
    if not np.isfinite(values).all():  # one after another, to say which is none
        return {doc: _score(score, query, doc, name) for doc, score in documents.items()}
    if isinstance(documents, dict) and set(map(type, documents.values())) <= {float}:
        return documents  # a copy of a large run takes as long as its evaluation
    return dict(zip(documents, values.tolist(), strict=True))


def _score(value: Any, query: Hashable, document: Hashable, name: str) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(
            f"{name} must have finite scores; got {value!r} for document {document!r} of query "
            f"{query!r}. Remove or replace it."
        )
    return score


def _grade(value: Any, query: Hashable, document: Hashable, name: str) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise DataError(
            f"{name} must have integer grades; got {value!r} for document {document!r} of query "
            f"{query!r}. Round or map the grades."
        )
    return int(value)
