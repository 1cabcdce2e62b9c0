"""A user's rows: what is read, what is held out, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gossamer.errors import DataError
from gossamer.tasks.rows import Row, checksum, held_out, read_rows

GOOD = '{"query": "1+2", "answer": "3"}'


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "my.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_rows_are_read_as_they_stand(tmp_path: Path) -> None:
    text = f'\ufeff{GOOD}\r\n\n{{"query": " \u2028é", "answer": "ß ", "groups": [[0, 1], [3]]}}\n'
    assert read_rows(write(tmp_path, text)) == [
        Row("1+2", "3", None, 1),
        Row(" \u2028é", "ß ", ((0, 1), (3,)), 3),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"my\.jsonl must hold one row a line, such as .*; it is empty"),
        ("\n \n", "it is empty"),
        (
            GOOD + "\n{query}",
            r"my\.jsonl, line 2, column 2: expected a JSON object .*not valid",
        ),
        (GOOD + "\n\n[1]", r"line 3: expected a JSON object .*; got '\[1\]'"),
        ('{"query": "1"}', "line 1: expected the key 'answer'"),
        ('{"answer": "1"}', "line 1: expected the key 'query'"),
        ('{"query": 12, "answer": "1"}', r'query must be text in quotation marks; got 12\. .*"12"'),
        ('{"query": "1", "answer": null}', "answer must be text in quotation marks; got None"),
        ('{"query": "", "answer": "1"}', "query must hold at least one character"),
        ('{"query": "1", "answer": ""}', "answer must hold at least one character"),
        ('{"query": "1", "answr": "1"}', "unknown key 'answr'; did you mean 'answer'"),
        ('{"query": "1", "answer": "1", "zzz": 1}', "unknown key 'zzz'. Known: query, answer, gr"),
        ('{"query": "\\ud800", "answer": "1"}', "half of a surrogate pair at its character 1"),
        (
            b'{"query": "\xff", "answer": "1"}',
            "line 1, column 12: expected UTF-8 text; .* 0xff",
        ),
        ("[" * 100_000, "nested too deep"),
        ('{"query": ' + "1" * 5000 + "}", "a number too long"),
        (
            GOOD + '\n{"query": "1+2", "answer": "4"}',
            "line 2: a query must have one answer; got '4' for '1.2', which has '3' on line 1",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_rows(write(tmp_path, text))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (3, "groups must be lists of indices"),
        ([1, 2], "groups must be lists of indices"),
        ([[4]], r"indices in 0\.\.3, .*; got 4"),
        ([[-1]], "got -1"),
        ([[True]], "got True"),
        ([["0"]], "got '0'"),
        ([[0, 1], [1]], "got index 1 twice"),
    ],
)
def test_bad_groups(tmp_path: Path, groups: object, message: str) -> None:
    row = json.dumps({"query": "1+2", "answer": "3", "groups": groups})
    with pytest.raises(DataError, match=f"my.jsonl, line 2: .*{message}"):
        read_rows(write(tmp_path, "\n" + row))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl does not exist\. Give a file"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path)


# --- parts ---


def rows_of(queries: list[str]) -> list[Row]:
    return [Row(query, "x", None, n) for n, query in enumerate(queries, start=1)]


def test_a_tenth_is_held_out_and_stays_so() -> None:
    queries = [str(random.Random(0).getrandbits(64) + n) for n in range(5000)]
    kept = dict(zip(queries, held_out(rows_of(queries), "f"), strict=True))
    assert 400 < sum(kept.values()) < 600
    random.Random(1).shuffle(queries)
    some = queries[:3000]
    assert held_out(rows_of(some), "f") == [kept[query] for query in some]


def test_equal_queries_are_on_one_side() -> None:
    queries = [str(n % 300) for n in range(900)]
    kept = held_out(rows_of(queries), "f")
    assert kept[:300] == kept[300:600] == kept[600:]


def test_both_sides_have_a_query_however_few_there_are() -> None:
    for size in range(2, 40):
        for begin in range(20):
            kept = held_out(rows_of([str(begin + n) for n in range(size)]), "f")
            assert 0 < sum(kept) < size
    with pytest.raises(DataError, match=r"my\.jsonl must hold at least two different queries"):
        held_out(rows_of(["a", "a"]), "my.jsonl")


def test_the_checksum_sees_every_part_of_a_row() -> None:
    base = [Row("ab", "c", None, 1), Row("d", "e", None, 2)]
    others = [
        [base[1], base[0]],
        base[:1],
        [Row("a", "bc", None, 1), base[1]],
        [Row("ab", "c", ((0,),), 1), base[1]],
    ]
    assert len({checksum(rows) for rows in (base, *others)}) == 5
    assert checksum([Row("ab", "c", None, 7), base[1]]) == checksum(base)
