"""Rows to train a ranker with: a query, its candidates and which of them answer it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gossamer.errors import DataError
from gossamer.retrieval._streams import PathLike, line_error, named, stream_lines, writing

__all__ = ["RankingRow", "read_ranking_rows", "write_ranking_rows"]


@dataclass(frozen=True)
class RankingRow:
    """A query with candidates.

    Args:
        query: The question.
        documents: Document id -> text, title first, in the order of the candidates.
        answer_ids: Ids of the candidates that answer it, at least one.
        query_id: Of the query; empty without one.

    Example:
        >>> row = RankingRow("which?", {"a": "this", "b": "that"}, ("b",))
        >>> row.answer_places
        (1,)
    """

    query: str
    documents: dict[str, str]
    answer_ids: tuple[str, ...]
    query_id: str = ""

    @property
    def answer_places(self) -> tuple[int, ...]:
        """Places of the answers among the candidates, from 0."""
        places = {name: place for place, name in enumerate(self.documents)}
        return tuple(places[name] for name in self.answer_ids)


def read_ranking_rows(path: PathLike) -> list[RankingRow]:
    r"""Read rows for the training of a ranker, one JSON object a line.

    Each has `query`, `documents` and `answer_ids`, and may have `query_id`. A document is an
    object with `doc_id`, `text` and perhaps `title`, or a text alone, whose id is its place from
    0. Ids may be integers. Other keys are left alone.

    Args:
        path: A file; `.gz` is unpacked; `-` is standard input.

    Raises:
        DataError: If the file is missing, empty or malformed, a query is blank, a text is missing,
            an id comes twice among the candidates, or an answer is none of them; the message
            names file, line and column.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "rows.jsonl"
        >>> text = '{"query": "which?", "documents": ["this", "that"], "answer_ids": [1]}\n'
        >>> _ = path.write_text(text)
        >>> read_ranking_rows(path)
        [RankingRow(query='which?', documents={'0': 'this', '1': 'that'}, answer_ids=('1',),
                    query_id='')]

    Source: Gupta et al., *Scalable In-context Ranking with Generative Models*, NeurIPS 2025;
        training data of the official code.
    Deviations: none
    """
    rows = [_row(_Place(path, number, line)) for number, line in stream_lines(path) if line.strip()]
    if not rows:
        raise DataError(f"{named(path)} must hold one row a line; it is empty. Check the path.")
    return rows


def write_ranking_rows(rows: Iterable[RankingRow], path: PathLike) -> None:
    """Write rows as JSON lines, so that `read_ranking_rows` gives them back.

    Args:
        rows: What to write.
        path: A file; `.gz` is packed; `-` is standard output. It appears whole or not at all.

    Example:
        >>> write_ranking_rows([RankingRow("which?", {"a": "this"}, ("a",))], "-")
        {"query": "which?", "documents": [{"doc_id": "a", "text": "this"}], "answer_ids": ["a"]}

    Source: as `read_ranking_rows`.
    Deviations: none
    """
    with writing(path) as file:
        for row in rows:
            value: dict[str, Any] = {"query_id": row.query_id} if row.query_id else {}
            value |= {
                "query": row.query,
                "documents": [{"doc_id": key, "text": text} for key, text in row.documents.items()],
                "answer_ids": list(row.answer_ids),
            }
            file.write(json.dumps(value, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class _Place:
    """A line of a file, to point at in messages."""

    path: PathLike
    number: int
    line: str

    def error(self, text: str, key: str = "") -> DataError:
        column = self.line.find(f'"{key}"') + 1 if key else 1
        return line_error(self.path, self.number, max(1, column), text)


def _row(place: _Place) -> RankingRow:
    value = _parsed(place)
    for key in ("query", "documents", "answer_ids"):
        if key not in value:
            raise place.error(
                f"expected the key {key!r}; got {', '.join(value) or 'none'}. Add it."
            )
    query = value["query"]
    if not isinstance(query, str) or not query.strip():
        raise place.error(f"query must be a text that is not blank; got {_shown(query)}. Fill it "
                          "in or remove the line.", "query")  # fmt: skip
    documents = _documents(place, value["documents"])
    answers = value["answer_ids"]
    if not isinstance(answers, list) or not answers:
        raise place.error("answer_ids must be a list of at least one id; got "
                          f"{_shown(answers)}. Remove lines without an answer.",
                          "answer_ids")  # fmt: skip
    ids = tuple(dict.fromkeys(_id(place, answer, "answer_ids") for answer in answers))
    unknown = next((name for name in ids if name not in documents), None)
    if unknown is not None:
        raise place.error(
            f"answer_ids must be among the {len(documents)} documents, such as "
            f"{next(iter(documents))!r}; got {unknown!r}. Add the document or take the id out.",
            "answer_ids",
        )
    number = value.get("query_id")
    return RankingRow(
        query, documents, ids, "" if number is None else _id(place, number, "query_id")
    )


def _parsed(place: _Place) -> dict[str, Any]:
    try:
        value = json.loads(place.line)
    except json.JSONDecodeError as error:
        near = place.line[max(0, error.pos - 20) : error.pos + 20].strip()
        raise line_error(
            place.path, place.number, error.colno, f"expected a JSON object; not valid JSON "
            f"({error.msg}), near {near!r}. Mend the line.",
        ) from None  # fmt: skip
    except (RecursionError, ValueError):
        raise place.error("expected a JSON object; got one nested too deep or with a number too "
                          "long. Mend the line.") from None  # fmt: skip
    if not isinstance(value, dict):
        raise place.error(
            f"expected a JSON object with query, documents and answer_ids; got "
            f"{place.line[:40]!r}. Mend the line."
        )
    return value


def _documents(place: _Place, value: Any) -> dict[str, str]:
    if not isinstance(value, list) or not value:
        raise place.error(
            f"documents must be a list of at least one document; got {_shown(value)}. Fill it in.",
            "documents",
        )
    documents: dict[str, str] = {}
    for number, document in enumerate(value):
        name, text = _document(place, document, number)
        if name in documents:
            raise place.error(
                f"documents must have each id once; got {name!r} a second time. Take one out.",
                "documents",
            )
        documents[name] = text
    return documents


def _document(place: _Place, value: Any, number: int) -> tuple[str, str]:
    if isinstance(value, str):
        return str(number), value
    if not isinstance(value, dict):
        raise place.error(
            f"documents must be texts or objects with doc_id and text; got {_shown(value)} at "
            f"place {number}. Mend it.",
            "documents",
        )
    text, title = value.get("text"), value.get("title") or ""
    if not isinstance(text, str) or not isinstance(title, str):
        raise place.error(
            f"documents must have text, and title if at all, in quotation marks; got "
            f"{_shown(title if isinstance(text, str) else text)} at place {number}. Fill it in.",
            "documents",
        )
    return _id(place, value.get("doc_id", number), "documents"), f"{title} {text}".strip()


def _id(place: _Place, value: Any, key: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise place.error(
            f"ids must be texts or integers; got {_shown(value)} in {key}. Mend it.", key
        )
    return value


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)[:60]
