"""`gossamer solve`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gossamer.cli._common import COMMON, Common, set_threads

__all__ = ["run"]


def run(
    folder: Path,
    query: Annotated[str, Parameter(allow_leading_hyphen=True)] = "-",
    /,
    *,
    batch_size: int = 64,
    no_check: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> int:
    """Answer queries with a trained model, one answer a line.

    A wrong answer, where the task knows the truth, is marked on standard error; then the exit code
    is 1.

    Example: gossamer solve runs/train "123+4567="

    Args:
        folder: A run folder of gossamer train.
        query: One query, a file with one query a line, or - for standard input.
        batch_size: Queries at once.
        no_check: Do not compare with the true answer.
    """
    from gossamer.files import write_text
    from gossamer.train import load_run, pick_device, solve_queries

    set_threads(common)
    model, task = load_run(folder)
    model.to(pick_device(common.device))
    lines_of, source = _read(query)
    for number, text in lines_of.items():
        _check(task, text, source, number)
    queries = list(lines_of.values())
    results = solve_queries(model, task, queries, batch_size=batch_size, check=not no_check)
    lines = [json.dumps(result.to_dict(), ensure_ascii=False) for result in results]
    for result, line in zip(results, lines, strict=True):
        print(line if common.json else result.answer)
    if common.out is not None:
        write_text(common.out / "answers.jsonl", "".join(line + "\n" for line in lines))
    wrong = [result for result in results if result.correct is False]
    for result in wrong[:5]:
        print(f"wrong: {result.query} -> {result.answer or '(nothing)'}", file=sys.stderr)
    if wrong:
        print(f"{len(wrong)} of {len(results)} answers are wrong", file=sys.stderr)
    return 1 if wrong else 0


def _read(query: str) -> tuple[dict[int, str], str]:
    """Return queries by line and the name of the file they come from, `""` for a single query."""
    from gossamer.errors import DataError
    from gossamer.files import read_text

    if query == "-":
        text, source = sys.stdin.read(), "standard input"
    elif os.path.isfile(query):  # false, not an error, for a query longer than a file name may be
        text, source = read_text(query), query
    else:
        return {1: query}, ""
    queries = {n: line for n, line in enumerate(text.splitlines(), start=1) if line.strip()}
    if not queries:
        raise DataError(f"{source} must hold one query a line; it is empty. Add queries.")
    return queries, source


def _check(task: object, text: str, source: str, number: int) -> None:
    """Read a query before any is answered, so that a bad line loses nothing and is named."""
    from gossamer.errors import DataError

    try:
        task.encode(text)  # type: ignore[attr-defined]
    except DataError as error:
        raise DataError(f"{source}, line {number}: {error}" if source else str(error)) from None
