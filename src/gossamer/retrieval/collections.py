"""Collections to search in: documents, queries and judgements from the field's folders."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.errors import DataError
from gossamer.retrieval._streams import (
    PathLike,
    column_of,
    existing,
    line_error,
    named,
    stream_lines,
)
from gossamer.retrieval._tables import Qrels
from gossamer.retrieval.trec import read_qrels

__all__ = ["Collection", "read_beir", "read_msmarco", "read_texts"]


class Collection(NamedTuple):
    """What a search is evaluated on: `corpus, queries, qrels = read_beir(folder)`.

    Args:
        corpus: Document id -> text, title first.
        queries: Query id -> text, those with judgements.
        qrels: Query id -> document id -> grade.

    Example:
        >>> Collection({"d": "a text"}, {"q": "a question"}, {"q": {"d": 1}}).queries
        {'q': 'a question'}
    """

    corpus: dict[str, str]
    queries: dict[str, str]
    qrels: Qrels


def read_beir(folder: PathLike, *, split: str | None = "test") -> Collection:
    r"""Read a BEIR folder: `corpus.jsonl`, `queries.jsonl` and `qrels/<split>.tsv`.

    A document's text is title + " " + text, stripped. Only queries with judgements in the split
    are kept. Each file may be packed (`.gz`); files are read line by line.

    Args:
        folder: Of the data set.
        split: Name of the judgements' file, or `None` for all queries and no judgements.
            Default `"test"`.

    Returns:
        Documents, queries and judgements.

    Raises:
        DataError: If a file is missing, empty or malformed (the message names file, line and
            column), an id comes twice, or ids of the files do not belong together.

    Warns:
        UserWarning: If judged documents are not in the corpus; they stay in the judgements, as
            in trec_eval.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "corpus.jsonl").write_text('{"_id": 7, "title": "A", "text": "b"}')
        >>> _ = (folder / "queries.jsonl").write_text('{"_id": "q", "text": "a b?"}')
        >>> (folder / "qrels").mkdir()
        >>> _ = (folder / "qrels" / "test.tsv").write_text("q\t7\t1")
        >>> read_beir(folder)
        Collection(corpus={'7': 'A b'}, queries={'q': 'a b?'}, qrels={'q': {'7': 1}})

    Source: Thakur et al., *BEIR: A Heterogeneous Benchmark for Zero-shot Evaluation of
        Information Retrieval Models*, NeurIPS 2021; its data format.
    Deviations: none
    """
    root = Path(folder)
    qrels: Qrels = {}
    if split is not None:
        words = f"the judgements of the split {split!r}"
        qrels = read_qrels(_present(root / "qrels", f"{split}.tsv", words))
    queries = _read_texts(_json_rows(_present(root, "queries.jsonl", "the queries")))
    corpus = _read_texts(_json_rows(_present(root, "corpus.jsonl", "the documents")))
    data = _collected(root, corpus, queries, qrels)
    return data if split is not None else data._replace(queries=queries)


def read_msmarco(folder: PathLike, *, split: str = "dev.small") -> Collection:
    r"""Read the MS MARCO passage files.

    These are `collection.tsv` (id, text), `queries.<split>.tsv` (id, text) and
    `qrels.<split>.tsv`; each may be packed (`.gz`). Only queries with judgements are kept.

    Args:
        folder: That holds the files.
        split: `"dev.small"`, `"dev"`, `"train"`, ... Default `"dev.small"`.

    Returns:
        Documents, queries and judgements.

    Raises:
        DataError: As `read_beir`.

    Warns:
        UserWarning: As `read_beir`.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "collection.tsv").write_text("7\ta passage")
        >>> _ = (folder / "queries.dev.small.tsv").write_text("1\twhat?")
        >>> _ = (folder / "qrels.dev.small.tsv").write_text("1\t0\t7\t1")
        >>> read_msmarco(folder).corpus
        {'7': 'a passage'}

    Source: Nguyen et al., *MS MARCO: A Human Generated Machine Reading Comprehension Dataset*,
        2016; its passage ranking files.
    Deviations: the files of the document task, with url and title, are not read.
    """
    root = Path(folder)
    qrels = read_qrels(_present(root, f"qrels.{split}.tsv", f"the judgements of {split!r}"))
    queries = _read_texts(_tsv_rows(_present(root, f"queries.{split}.tsv", "the queries")))
    corpus = _read_texts(_tsv_rows(_present(root, "collection.tsv", "the documents")))
    return _collected(root, corpus, queries, qrels)


def read_texts(path: PathLike) -> dict[str, str]:
    r"""Read documents or queries from one file, in the form of BEIR or of MS MARCO.

    Args:
        path: JSON lines with `_id`, `text` and perhaps `title`; or, where it ends in `.tsv` or
            `.txt`, lines of an id, a tab and a text. `.gz` is unpacked.

    Returns:
        Id -> text, title first.

    Raises:
        DataError: If the file is missing, empty or malformed, or an id comes twice; the message
            names file, line and column.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "queries.tsv"
        >>> _ = path.write_text("1\twhat?")
        >>> read_texts(path)
        {'1': 'what?'}

    Source: as `read_beir` and `read_msmarco`.
    Deviations: none
    """
    file = Path(path)
    table = file.name.removesuffix(".gz").endswith((".tsv", ".txt"))
    return _read_texts(_tsv_rows(file) if table else _json_rows(file))


class _Row(NamedTuple):
    id: str
    text: str
    place: tuple[Path, int]


def _read_texts(rows: Iterator[_Row]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for row in rows:
        if row.id in texts:
            raise line_error(
                *row.place, 1, f"expected each id once; got {row.id!r} a second time. Remove one "
                "of the lines.",
            )  # fmt: skip
        texts[row.id] = row.text
    return texts


def _json_rows(path: Path) -> Iterator[_Row]:
    number = 0
    for number, line in stream_lines(path):
        if line.strip():
            value = _json_object(path, number, line)
            title = "" if value.get("title") is None else value["title"]
            text = _field(path, number, value, "text")
            if not isinstance(title, str):
                raise _wrong(path, number, "title", "text in quotation marks", title)
            key = _field(path, number, value, "_id")
            yield _Row(key, f"{title} {text}".strip(), (path, number))
    if number == 0:
        raise _empty(path)


def _json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        near = line[max(0, error.pos - 20) : error.pos + 20].strip()
        raise line_error(
            path, number, error.colno, f"expected a JSON object; not valid JSON ({error.msg}), "
            f"near {near!r}. Mend the line.",
        ) from None  # fmt: skip
    except (RecursionError, ValueError):
        raise line_error(
            path, number, 1, "expected a JSON object; got one nested too deep or with a number "
            "too long. Mend the line.",
        ) from None  # fmt: skip
    if not isinstance(value, dict):
        raise line_error(
            path, number, 1, f'expected a JSON object with "_id" and "text"; got {line[:40]!r}. '
            "Mend the line.",
        )  # fmt: skip
    return value


def _field(path: Path, number: int, value: dict[str, Any], key: str) -> str:
    """Return a text; an id may also be an integer."""
    if key not in value:
        raise line_error(
            path, number, 1, f"expected the key {key!r}; got {', '.join(value) or 'none'}. Add it."
        )
    field = value[key]
    if key == "_id" and isinstance(field, int) and not isinstance(field, bool):
        return str(field)
    if not isinstance(field, str):
        raise _wrong(path, number, key, "text in quotation marks", field)
    if key == "_id" and not field:
        raise _wrong(path, number, key, "at least one character", field)
    return field


def _wrong(path: Path, number: int, key: str, wanted: str, got: Any) -> DataError:
    shown = "null" if got is None else repr(got)
    return line_error(
        path, number, 1, f"{key} must be {wanted}; got {shown}. Fill it in or remove the line."
    )


def _tsv_rows(path: Path) -> Iterator[_Row]:
    number = 0
    for number, line in stream_lines(path):
        if not line.strip():
            continue
        key, tab, text = line.partition("\t")
        if not tab or not key.strip():
            raise line_error(
                path, number, column_of(line, 1), "expected an id, a tab and a text; got "
                f"{line[:40]!r}. Mend the line.",
            )  # fmt: skip
        yield _Row(key.strip(), text.strip(), (path, number))
    if number == 0:
        raise _empty(path)


def _empty(path: Path) -> DataError:
    return DataError(f"{named(path)} must hold one item a line; it is empty. Check the path.")


def _present(folder: Path, name: str, what: str) -> Path:
    path = existing(folder / name)
    if path is None:
        there = sorted(file.name for file in folder.glob("*")) if folder.is_dir() else []
        raise DataError(
            f"{folder} must hold {what} as {name} or {name}.gz; "
            + (f"it holds {', '.join(there[:8])}. " if there else "there is no such folder. ")
            + "Check the path and the split."
        )
    return path


def _collected(
    folder: Path, corpus: dict[str, str], queries: dict[str, str], qrels: Qrels
) -> Collection:
    for texts, what in ((corpus, "document"), (queries, "query")):
        if not texts:
            raise DataError(f"{folder} must hold at least one {what}; got none. Add lines.")
    unknown = [query for query in qrels if query not in queries]
    if unknown:
        raise DataError(
            f"the judged queries of {folder} must be among its queries; {len(unknown)} of "
            f"{len(qrels)} are not, such as {unknown[0]!r}, where the queries' file has ids like "
            f"{next(iter(queries))!r}. Give the files that belong together."
        )
    judged = {document for grades in qrels.values() for document in grades}
    absent = judged - corpus.keys()
    if judged and len(absent) == len(judged):
        raise DataError(
            f"the judged documents of {folder} must be among its documents; none of {len(judged)} "
            f"is, such as {min(absent)!r}, where the corpus has ids like "
            f"{next(iter(corpus))!r}. Give the files that belong together."
        )
    if absent:
        warnings.warn(
            f"{len(absent)} judged documents of {folder} are not in its corpus, such as "
            f"{min(absent)!r}; they stay in the judgements, so that no run can be perfect.",
            stacklevel=3,
        )
    return Collection(corpus, {query: queries[query] for query in qrels}, qrels)
