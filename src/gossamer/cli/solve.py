"""`gossamer solve`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from gossamer.cli._common import COMMON, Common, set_threads

if TYPE_CHECKING:
    from gossamer.tasks import Task
    from gossamer.train import SolveResult

__all__ = ["run"]

_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv")
_ROW = '{"query": "12+34", "answer": "46"}'


def run(
    folder: Path,
    query: Annotated[str, Parameter(allow_leading_hyphen=True)] = "-",
    /,
    *,
    batch_size: int = 64,
    no_check: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> int:
    """Answer queries with a trained model, one answer a line; classify rows of a table, or images.

    Standard error says how many answers were checked, where the task knows the truth, and shows the
    working of tasks that have one. When a checked answer is wrong the exit code is 1.

    Example: gossamer solve runs/train "123+4567="

    Example: gossamer solve runs/train-2 new.csv --out answers

    Args:
        folder: A run folder of gossamer train.
        query: One query, a file with one query a line (or rows of JSONL with query and, if known,
            answer), or - for standard input. For a classifier, a table with the columns that it was
            trained on, or images.
        batch_size: Queries at once.
        no_check: Do not compare with the true answer.
    """
    from gossamer.cli._solve_labelled import classify, is_labelled_run
    from gossamer.files import write_text
    from gossamer.train import load_run, pick_device, solve_queries

    set_threads(common)
    if is_labelled_run(folder):
        return classify(folder, query, check=not no_check, common=common)
    model, task = load_run(folder)
    model.to(pick_device(common.device))
    asked, source = _read(query, task)
    results = solve_queries(
        model,
        task,
        [one.query for one in asked],
        batch_size=batch_size,
        check=not no_check,
        names=[f"{source}, line {one.line}" if source else "" for one in asked],
    )
    if not no_check:
        results = [_checked(result, one.answer) for result, one in zip(results, asked, strict=True)]
    lines = [json.dumps(result.to_dict(), ensure_ascii=False) for result in results]
    for result, line in zip(results, lines, strict=True):
        print(line if common.json else result.answer)
    if common.out is not None:
        write_text(common.out / "answers.jsonl", "".join(line + "\n" for line in lines))
    return _report(results, quiet=common.quiet)


@dataclass(frozen=True)
class _Asked:
    """A query, the line it stands on, and its answer where the user knows it."""

    query: str
    line: int = 1
    answer: str | None = None


def _checked(result: SolveResult, answer: str | None) -> SolveResult:
    """Compare with the answer that the user gave, which wins over the task's own."""
    if answer is None:
        return result
    return dataclasses.replace(result, correct=result.answer.strip() == answer.strip())


def _report(results: Sequence[SolveResult], *, quiet: bool) -> int:
    checked = [result for result in results if result.correct is not None]
    wrong = [result for result in checked if not result.correct]
    if not quiet:
        for result in results:
            if result.scratchpad:
                print(f"{result.query}: {result.scratchpad}", file=sys.stderr)
    for result in wrong[:5]:
        print(f"wrong: {result.query} -> {result.answer or '(nothing)'}", file=sys.stderr)
    if wrong:
        print(f"{len(wrong)} of {len(checked)} answers are wrong", file=sys.stderr)
    elif checked and not quiet:
        print(f"{len(checked)} of {len(results)} answers checked, all exact", file=sys.stderr)
    return 1 if wrong else 0


def _read(query: str, task: Task) -> tuple[list[_Asked], str]:
    """Return queries and the name of the file they come from, `""` for a single query."""
    from gossamer.errors import DataError
    from gossamer.files import read_text

    if query == "-":
        text, source = sys.stdin.read(), "standard input"
    elif os.path.isfile(query):  # false, not an error, for a query longer than a file name may be
        text, source = read_text(query), query
    else:
        _refuse_missing_file(query, task)
        return [_Asked(query)], ""
    rows = source.endswith(".jsonl")
    lines = text.split("\n") if rows else text.splitlines()
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    asked = [_row(line, source, n) if rows else _Asked(line, n) for n, line in numbered]
    if not asked:
        raise DataError(f"{source} must hold one query a line; it is empty. Add queries.")
    return asked, source


def _refuse_missing_file(query: str, task: Task) -> None:
    """Refuse a text that names a file which is not there; what the task can read is a query."""
    from gossamer.errors import DataError

    if query.endswith(_SUFFIXES):
        raise DataError(
            f"expected a query or a file of queries; {query} looks like a file and does not exist. "
            "Check the path."
        )
    if os.sep in query or Path(query).suffix[1:2].isalpha():
        try:
            task.prompt(query)
        except DataError as error:
            raise DataError(f"{error} Nor is there a file {query}: check the path.") from None


def _row(line: str, source: str, number: int) -> _Asked:
    from gossamer.errors import DataError

    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{source}, line {number}: expected a JSON row such as {_ROW}; not valid JSON "
            f"({error}). Mend the line."
        ) from None
    query = row.get("query") if isinstance(row, dict) else None
    answer = row.get("answer") if isinstance(row, dict) else None
    if not isinstance(query, str) or not isinstance(answer, str | None):
        raise DataError(
            f"{source}, line {number}: expected a JSON row with texts such as {_ROW}; got "
            f"{line[:60]}. Change the line."
        )
    return _Asked(query, number, answer)
