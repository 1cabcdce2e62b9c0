"""Rows to train a ranker with."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from gossamer.errors import DataError
from gossamer.retrieval import RankingRow, read_ranking_rows, write_ranking_rows

GOOD = {
    "query_id": 3,
    "query": "which?",
    "documents": [{"doc_id": "a", "title": "T", "text": "this"}, {"doc_id": 7, "text": "that"}],
    "answer_ids": [7, "a", 7],
    "source": "kept out",
}
ROW = RankingRow("which?", {"a": "T this", "7": "that"}, ("7", "a"), "3")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_objects_and_texts(tmp_path: Path) -> None:
    plain = {"query": "which?", "documents": ["this", "that"], "answer_ids": ["1"]}
    rows = read_ranking_rows(write(tmp_path / "rows.jsonl", GOOD, plain))
    assert rows == [ROW, RankingRow("which?", {"0": "this", "1": "that"}, ("1",))]
    assert rows[0].answer_places == (1, 0)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    rows = [ROW, RankingRow("grüße?", {"ä": "x"}, ("ä",))]
    write_ranking_rows(rows, tmp_path / name)
    assert read_ranking_rows(tmp_path / name) == rows
    if name.endswith(".gz"):
        assert gzip.decompress((tmp_path / name).read_bytes()).startswith(b'{"query_id": "3"')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": " "}, "query must be a text that is not blank; got ' '"),
        ({"query": None}, "query must be a text that is not blank; got null"),
        ({"documents": []}, "documents must be a list of at least one document"),
        ({"documents": "this"}, "documents must be a list"),
        ({"documents": [None]}, "got null at place 0"),
        ({"documents": [{"doc_id": "a"}]}, "documents must have text"),
        ({"documents": [{"text": "x", "title": 3}]}, "title if at all, in quotation marks; got 3"),
        ({"documents": [{"doc_id": [1], "text": "x"}]}, "ids must be texts or integers; got [1]"),
        ({"documents": [{"doc_id": "a", "text": "x"}] * 2}, "each id once; got 'a'"),
        ({"answer_ids": []}, "answer_ids must be a list of at least one id"),
        ({"answer_ids": "a"}, "answer_ids must be a list"),
        ({"answer_ids": ["b"]}, "answer_ids must be among the 2 documents, such as 'a'; got 'b'"),
        ({"answer_ids": [True]}, "ids must be texts or integers; got True in answer_ids"),
        ({"query_id": 0.5}, "ids must be texts or integers; got 0.5 in query_id"),
    ],
)
def test_bad_rows_name_file_line_and_column(tmp_path: Path, change, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", GOOD, {**GOOD, **change})
    with pytest.raises(DataError, match=re.escape(message)) as error:
        read_ranking_rows(path)
    line = path.read_text().splitlines()[1]
    column = line.index(f'"{next(iter(change))}"') + 1
    assert error.match(rf"rows\.jsonl, line 2, column {column}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold one row a line; it is empty"),
        ("[1]\n", "expected a JSON object with query, documents and answer_ids"),
        ('{"query": "x"}\n', "expected the key 'documents'; got query"),
        ('{"query": }\n', "line 1, column 11: expected a JSON object; not valid JSON"),
        ("[" * 99999, "nested too deep"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        read_ranking_rows(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_ranking_rows(tmp_path / "none.jsonl")
