"""What a user sees of a file before a model is trained on it."""

from __future__ import annotations

from itertools import accumulate

from gossamer.tasks.coupling import FunctionCoupling, GroupCoupling
from gossamer.tasks.fields import FieldCoupling
from gossamer.tasks.propose import describe_coupling
from gossamer.tasks.user import FileTask

__all__ = ["preview_task"]

_ROWS, _WIDTH = 3, 100
# with fewer rows than this, sums and dates were measured to end below .99 at twice the length
_FEW_ROWS = 1000


def preview_task(task: FileTask) -> str:
    r"""Return the parts of a file, the coupling in words, and three rows with tokens and ids.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/my.jsonl"
        >>> with open(path, "w") as file:
        ...     _ = file.write('{"query": "ab", "answer": "ba"}\n{"query": "x", "answer": "x"}')
        >>> print(preview_task(FileTask(path)).split("coupling: ")[1].splitlines()[0])
        field 1 of the answer runs along field 1 of the query, from its end
    """
    counts = f"{task.count('train')} rows to train on, {task.count('held out')} held out"
    lines = [f"{task.path}: {counts}"]
    if task.test is not None:
        lines.append(f"{task.test}: {task.count('test')} rows to test on")
        if task.repeated:
            lines.append(f"  {task.repeated} rows are left out, since {task.path} has them too")
    if task.count("train") < _FEW_ROWS:
        lines.append("  these are few: a thousand or more are usually needed for exact answers")
    words = _describe(task)
    lines.append(f"coupling: {words[0]}")
    lines += [f"  {line}" for line in words[1:]]
    for row in task.rows()[:_ROWS]:
        lines += [f"{row.query!r} -> {row.answer!r}", *_table(task, row.query)]
    lines.append("another coupling: --coupling fields, groups, none or module:function")
    return "\n".join(lines)


def _describe(task: FileTask) -> list[str]:
    if isinstance(task.coupling, FieldCoupling):
        return describe_coupling(task.coupling)
    if isinstance(task.coupling, FunctionCoupling):
        return [f"the function {task.coupling.spec}"]
    if isinstance(task.coupling, GroupCoupling):
        return ["the groups of the rows", "new queries cannot be answered without a rule"]
    return [
        "none, characters are counted 1..T",
        "longer queries than those trained on will probably be answered wrongly",
    ]


def _table(task: FileTask, query: str) -> list[str]:
    """Return tokens and ids beneath each other, cut at the right where they are long."""
    example = task.example(query)
    levels = example.position_ids.reshape(len(example.tokens), -1).T.tolist()
    tokens = [_shown(task.vocab[int(token)]) for token in example.tokens]
    names = [
        "tokens",
        *(["ids"] if len(levels) == 1 else [f"ids {n + 1}" for n in range(len(levels))]),
    ]
    cells = [tokens, *([str(number) for number in level] for level in levels)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = _WIDTH - len("  tokens   ...")
    fits = sum(end <= room for end in accumulate(width + 1 for width in widths))
    lines = []
    for name, row in zip(names, cells, strict=True):
        shown = [cell.rjust(width) for cell, width in zip(row[:fits], widths, strict=False)]
        lines.append(f"  {name:6}  {' '.join(shown)}{' ...' if fits < len(row) else ''}")
    return lines


def _shown(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]
