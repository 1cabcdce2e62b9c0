"""Rows of a user's own JSONL file: `query`, `answer` and, if wanted, `groups`."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from gossamer.errors import DataError
from gossamer.files import read_text

__all__ = ["Row", "checksum", "held_out", "read_rows", "unit_hash"]

_KEYS = ("query", "answer", "groups")
_HELD_OUT = 0.1
_EXAMPLE = '{"query": "12+34", "answer": "46"}'


@dataclass(frozen=True)
class Row:
    """One question with its true answer.

    Args:
        query: What is asked.
        answer: The true answer.
        groups: Lists of indices into query + answer; the n-th of every list play one role.
        line: Line of the file, from 1.
    """

    query: str
    answer: str
    groups: tuple[tuple[int, ...], ...] | None
    line: int


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Read a JSONL file, one row a line; blank lines are left out.

    Raises:
        DataError: If the file is missing, empty, not UTF-8 or not JSON, a row has other keys or
            types, or one query has two answers; the message names file and line.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "my.jsonl"
        >>> _ = path.write_text('{"query": "1+2", "answer": "3"}')
        >>> read_rows(path)
        [Row(query='1+2', answer='3', groups=None, line=1)]
    """
    text = read_text(path, f"Give a file in UTF-8 with one row a line, such as {_EXAMPLE}.")
    rows = [
        _read_row(line, f"{path}, line {number}", number)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not rows:
        raise DataError(
            f"{path} must hold one row a line, such as {_EXAMPLE}; it is empty. Add rows."
        )
    seen: dict[str, Row] = {}
    for row in rows:
        first = seen.setdefault(row.query, row)
        if first.answer != row.answer:
            raise DataError(
                f"{path}, line {row.line}: a query must have one answer; got {row.answer!r} for "
                f"{row.query!r}, which has {first.answer!r} on line {first.line}. Remove one of "
                "the rows, or put what tells them apart into the query."
            )
    return rows


def checksum(rows: Sequence[Row]) -> str:
    """Return a short text that changes when a row does.

    Example:
        >>> checksum([]) == checksum([])
        True
    """
    digest = blake2b(digest_size=8)
    for row in rows:
        digest.update(json.dumps([row.query, row.answer, row.groups]).encode())
    return digest.hexdigest()


def held_out(rows: Sequence[Row], path: str) -> list[bool]:
    """Return which rows are kept for tests: about 10 %, by a hash of the query.

    A row stays on its side when others are added or change places. Both sides get at least one
    query.

    Args:
        rows: All rows of a file.
        path: Its path, for the message.

    Raises:
        DataError: If there are not two different queries.

    Example:
        >>> sum(held_out([Row(str(n), "x", None, n) for n in range(1000)], "my.jsonl"))
        94
    """
    hashes = {row.query: unit_hash(row.query) for row in rows}
    if len(hashes) < 2:
        raise DataError(
            f"{path} must hold at least two different queries, one to train on and one to test; "
            f"got {len(hashes)}. Add rows; a few thousand are usually needed."
        )
    low, *_, high = sorted(hashes.values())
    limit = min(max(_HELD_OUT, low), (low + high) / 2)
    return [hashes[row.query] <= limit for row in rows]


def unit_hash(text: str) -> float:
    """Return a number from 0 to 1 that depends on the text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56


def _read_row(text: str, place: str, line: int) -> Row:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}, column {error.colno}: expected a JSON object such as {_EXAMPLE}; not valid "
            f"JSON ({error.msg}). Mend the line."
        ) from None
    except (RecursionError, ValueError):
        raise DataError(
            f"{place}: expected a JSON object such as {_EXAMPLE}; got one nested too deep or with "
            "a number too long. Write query and answer as text."
        ) from None
    if not isinstance(value, dict):
        raise DataError(
            f"{place}: expected a JSON object such as {_EXAMPLE}; got {str(value)[:40]!r}. Write "
            "one."
        )
    for key in value:
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise DataError(
                f"{place}: unknown key {key!r}{hint} Known: {', '.join(_KEYS)}. Rename or remove "
                "it."
            )
    query, answer = (_text(value, key, place) for key in ("query", "answer"))
    return Row(query, answer, _groups(value, len(query) + len(answer), place), line)


def _text(value: dict[str, Any], key: str, place: str) -> str:
    if key not in value:
        raise DataError(f"{place}: expected the key {key!r}, as in {_EXAMPLE}; got none. Add it.")
    text = value[key]
    if not isinstance(text, str):
        raise DataError(
            f"{place}: {key} must be text in quotation marks; got {text!r}. Write it as "
            f'"{key}": "{text}".'
        )
    if not text:
        raise DataError(f"{place}: {key} must hold at least one character; got ''. Fill it in.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {key} must be valid text; got half of a surrogate pair at its character "
            f"{error.start + 1}. Remove it."
        ) from None
    return text


def _groups(value: dict[str, Any], length: int, place: str) -> tuple[tuple[int, ...], ...] | None:
    if "groups" not in value:
        return None
    groups = value["groups"]
    if not isinstance(groups, list) or any(not isinstance(group, list) for group in groups):
        raise DataError(
            f"{place}: groups must be lists of indices such as [[0, 1], [3, 4]]; got {groups!r}. "
            "Change groups."
        )
    seen: set[int] = set()
    for index in (index for group in groups for index in group):
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < length:
            raise DataError(
                f"{place}: groups must hold indices in 0..{length - 1}, which count the characters "
                f"of query and answer together, from 0; got {index!r}. Change groups."
            )
        if index in seen:
            raise DataError(
                f"{place}: groups must name every character once; got index {index} twice. Remove "
                "one of them."
            )
        seen.add(index)
    return tuple(tuple(group) for group in groups)
