"""TREC files: judgements (qrels) and runs."""

from __future__ import annotations

import math
import re
from itertools import groupby
from typing import Any

from gossamer.errors import DataError
from gossamer.retrieval._streams import (
    PathLike,
    column_of,
    line_error,
    named,
    stream_lines,
    writing,
)
from gossamer.retrieval._tables import (
    DOCUMENT_NAMES,
    GRADE_NAMES,
    QUERY_NAMES,
    Qrels,
    Run,
    as_qrels,
    as_run,
    ranked,
)

__all__ = ["read_qrels", "read_run", "write_qrels", "write_run"]

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_RUN_LINE = "'qid Q0 docid rank score tag'"
_QRELS_LINE = "'qid iter docid rel', or three columns with or without the header 'query-id ...'"


def read_run(path: PathLike) -> Run:
    """Read a TREC run, six columns `qid Q0 docid rank score tag`.

    Documents are ordered by score, and equal scores by document id, the later in string order
    first; the rank column is ignored. That is the rule of trec_eval.

    Args:
        path: A file; `.gz` is unpacked; `-` is standard input.

    Returns:
        For each query, in the order of the file, its documents with their scores, best first.

    Raises:
        DataError: If the file is missing or empty, a line has not six columns, a score is not a
            finite number, or a query names a document twice; the message names the place.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/run.trec"
        >>> write_run({"q1": {"d1": 0.5, "d2": 0.9}}, path)
        >>> read_run(path)
        {'q1': {'d2': 0.9, 'd1': 0.5}}

    Source: trec_eval, NIST, its README on input formats.
    Deviations: scores are compared in float64; trec_eval rounds them to float32 first, so that
        scores which differ by less become ties there.
    """
    run: Run = {}
    for number, line in stream_lines(path):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 6:
            raise line_error(
                path, number, column_of(line, min(6, len(fields))),
                f"expected six columns {_RUN_LINE}; got {len(fields)} in {line[:80]!r}. Mend the "
                "line.",
            )  # fmt: skip
        query, _, document, _, text, _ = fields
        score = _number(text)
        if not math.isfinite(score):
            raise line_error(
                path, number, column_of(line, 4),
                f"expected a finite score for document {document!r} of query {query!r}; got "
                f"{text!r}. Remove or replace it.",
            )  # fmt: skip
        documents = run.setdefault(query, {})
        if document in documents:
            raise _twice(path, number, line, 2, query, document)
        documents[document] = score
    if not run:
        raise DataError(
            f"{named(path)} must hold a run, lines {_RUN_LINE}; it is empty. Check the path."
        )
    return {query: {d: scores[d] for d in ranked(scores)} for query, scores in run.items()}


def write_run(run: Any, path: PathLike, *, tag: str = "gossamer") -> None:
    """Write a TREC run: ranks from 1 in the order of scores, ties as `read_run` orders them.

    Scores have nine significant digits, and all their digits where two different scores of a
    query would look alike, so that the order survives. A query without documents has no line.

    Args:
        run: For each query its documents with their scores; a mapping, a table or a path.
        path: A file; `.gz` is packed; `-` is standard output. It appears whole or not at all.
        tag: Name of the run, its last column. Default `"gossamer"`.

    Raises:
        DataError: If an id or the tag is empty or has white space, or a score is not finite.

    Example:
        >>> write_run({"q1": {"d1": 0.5, "d2": 0.9}}, "-")
        q1 Q0 d2 1 0.9 gossamer
        q1 Q0 d1 2 0.5 gossamer

    Source: trec_eval, NIST, its README on input formats.
    Deviations: none
    """
    table = as_run(run)
    _check_word(tag, "tag")
    with writing(path) as file:
        for query, scores in table.items():
            _check_word(query, "query id")
            order = ranked(scores)
            texts = _score_texts([scores[document] for document in order])
            for rank, (document, text) in enumerate(zip(order, texts, strict=True), start=1):
                _check_word(document, "document id")
                file.write(f"{query} Q0 {document} {rank} {text} {tag}\n")


def read_qrels(path: PathLike) -> Qrels:
    r"""Read judgements: TREC lines `qid iter docid rel`, or three columns query, document, grade.

    Three columns may have a header, known by its names (`query-id`, `corpus-id`, `score` and the
    usual other spellings), which also give the order; a first line that holds other words is not
    taken for one. Grades are integers; 0 and negative ones are kept.

    Args:
        path: A file; `.gz` is unpacked; `-` is standard input.

    Returns:
        For each query its judged documents with their grades, in the order of the file.

    Raises:
        DataError: If the file is missing or empty, columns are wrong, a grade is no integer, or a
            pair is judged twice; the message names the place.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "test.tsv"
        >>> text = "query-id\tcorpus-id\tscore\nq1\td1\t2\n"
        >>> _ = path.write_text(text)
        >>> read_qrels(path)
        {'q1': {'d1': 2}}

    Source: trec_eval, NIST, its README on input formats; BEIR, Thakur et al., 2021.
    Deviations: none
    """
    qrels: Qrels = {}
    places: tuple[int, int, int] | None = None
    width = 0
    for number, line in stream_lines(path):
        fields = _split(line)
        if not any(fields):
            continue
        if places is None:
            width = len(fields)
            header = _header(fields)
            places = header or ((0, 2, 3) if width == 4 else (0, 1, 2))
            if header:
                continue
        if len(fields) != width or width not in (3, 4):
            raise line_error(
                path, number, column_of(line, min(width, len(fields), 4)),
                f"expected {_QRELS_LINE}, and as many columns as on the first line; got "
                f"{len(fields)} in {line[:80]!r}. Mend the line.",
            )  # fmt: skip
        query, document, text = (fields[place] for place in places)
        if not query or not document:
            raise line_error(
                path, number, 1, f"expected a query and a document; got {line[:80]!r}. Fill in "
                "the id.",
            )  # fmt: skip
        if not _INTEGER.fullmatch(text):
            raise line_error(
                path, number, column_of(line, places[2]),
                f"expected an integer grade for document {document!r} of query {query!r}; got "
                f"{text!r}. Round or map the grades; a header has names such as query-id, "
                "corpus-id, score.",
            )  # fmt: skip
        documents = qrels.setdefault(query, {})
        if document in documents:
            raise _twice(path, number, line, places[1], query, document)
        documents[document] = int(text)
    if not qrels:
        raise DataError(
            f"{named(path)} must hold judgements, lines {_QRELS_LINE}; it has none. Check the path."
        )
    return qrels


def write_qrels(qrels: Any, path: PathLike) -> None:
    """Write judgements as TREC lines `qid 0 docid rel`.

    Args:
        qrels: For each query its judged documents with their grades; a mapping, a table or a path.
        path: A file; `.gz` is packed; `-` is standard output. It appears whole or not at all.

    Raises:
        DataError: If an id is empty or has white space, or a grade is no integer.

    Example:
        >>> write_qrels({"q1": {"d1": 2}}, "-")
        q1 0 d1 2

    Source: trec_eval, NIST, its README on input formats.
    Deviations: none
    """
    table = as_qrels(qrels)
    with writing(path) as file:
        for query, grades in table.items():
            _check_word(query, "query id")
            for document, grade in grades.items():
                _check_word(document, "document id")
                file.write(f"{query} 0 {document} {grade}\n")


def _number(text: str) -> float:
    """Return a number; NaN for what is none, also for the underscores that Python would take."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def _split(line: str) -> list[str]:
    """Split at tabs where there are three columns of them: such ids may hold spaces."""
    if line.count("\t") == 2:
        return [field.strip() for field in line.split("\t")]
    return line.split()


def _header(fields: list[str]) -> tuple[int, int, int] | None:
    """Return the columns of query, document and grade if a line holds their names."""
    names = [field.lower() for field in fields]
    places = [
        next((i for i, name in enumerate(names) if name in known), -1)
        for known in (QUERY_NAMES, DOCUMENT_NAMES, GRADE_NAMES)
    ]
    return None if -1 in places else (places[0], places[1], places[2])


def _score_texts(scores: list[float]) -> list[str]:
    """Return sorted scores as text, with as many digits as keep different ones apart."""
    texts: list[str] = []
    for text, group in groupby(scores, key=lambda score: f"{score:.9g}"):
        same = list(group)
        texts += [text] * len(same) if len(set(same)) == 1 else [repr(score) for score in same]
    return texts


def _check_word(value: Any, name: str) -> None:
    text = str(value)
    if len(text.split()) != 1 or text.split()[0] != text:
        raise DataError(
            f"{name} must be one word, without white space, in a TREC file; got {text!r}. Replace "
            "the spaces."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} must be valid text; got half of a surrogate pair at character "
            f"{error.start + 1} of {text!r}. Remove it."
        ) from None


def _twice(
    path: PathLike, number: int, line: str, field: int, query: str, document: str
) -> DataError:
    return line_error(
        path, number, column_of(line, field),
        f"expected each document once for a query; got document {document!r} of query {query!r} "
        "a second time. Remove one of the lines.",
    )  # fmt: skip
