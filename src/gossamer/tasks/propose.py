"""A proposal of a coupling, found in the rows themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.errors import DataError
from gossamer.tasks.fields import SPLITS, AnswerField, FieldCoupling, QueryField, split_fields

__all__ = ["describe_coupling", "propose_coupling"]

# more different texts at one place than this are contents, not delimiters
_MOST_DELIMITERS = 16
# a number that needs more room than this beyond the widest number of the query does not follow it
_MOST_EXTRA = 2
# values must come back this often on average before one field may be said to decide another
_REPEATS = 3
# Python refuses to turn longer numbers into text and back
_LONGEST_NUMBER = 4000

Column = Sequence[str]


def propose_coupling(rows: Sequence[Mapping[str, Any]]) -> FieldCoupling | None:
    """Propose a coupling rule by aligning the fields of query and answer.

    The texts are cut into numbers, else into words, else not at all; the first cut is taken with
    which every field of the answer can be placed in all rows. A field of the answer that equals a
    field of the query, or is as long as one, runs along it; one that equals it from the end runs
    back along it; what one field decides alone, such as the number of a month by its name, belongs
    to that field. Another number is aligned at the units with all numbers of the query, padded
    with zeros and produced units first; unless it is their sum, another cut is tried before.

    Args:
        rows: Mappings with the texts `query` and `answer`.

    Returns:
        The rule, or `None` when no cut places every field.

    Raises:
        DataError: If there is no row.

    Example:
        >>> rows = [("2026-11-30", "30.11.2026"), ("814-02-07", "07.02.814")]
        >>> rule = propose_coupling([{"query": q, "answer": a} for q, a in rows])
        >>> [field.source for field in rule.answer]
        [2, 1, 0]
        >>> rule.place("814-02-07").answer_ids[:4]
        [(2, 3), (3, 3), (1, 2), (2, 2)]

    Source: the library's own.
    Deviations: none
    """
    if not rows:
        raise DataError("rows must hold at least one row with query and answer; got none. Add one.")
    pairs = {row["query"]: row["answer"] for row in rows}
    queries, answers = list(pairs), list(pairs.values())
    guess = None
    for split in SPLITS:
        found = _propose(queries, answers, split)
        if found is None or not _holds(found[0], queries, answers):
            continue
        rule, sure = found
        if sure:
            return rule
        guess = guess or rule
    return guess


def describe_coupling(rule: FieldCoupling) -> list[str]:
    """Return a rule in words, one line for each field of the answer.

    Example:
        >>> rule = propose_coupling([{"query": "ab,cde", "answer": "edc"}])
        >>> describe_coupling(rule)
        ['field 1 of the answer runs along field 2 of the query, from its end']
    """
    lines = []
    for number, field in enumerate(rule.answer, start=1):
        source = f"field {field.source + 1} of the query"
        if field.relation == "number" and field.source < 0:
            padded = [str(n) for n, f in enumerate(rule.query, start=1) if f.pad == "common"]
            text = f"is aligned at the units with the numbers {', '.join(padded)} of the query"
        elif field.relation == "free":
            text = f"belongs to {source}" if field.source >= 0 else "stands alone"
        else:
            text = {
                "along": f"runs along {source}",
                "reverse": f"runs along {source}, from its end",
                "number": f"is the number in {source}, padded with zeros",
            }[field.relation]
        lines.append(f"field {number} of the answer {text}")
    if any(field.pad == "common" for field in rule.query):
        lines.append("these numbers are padded with zeros to one width")
    if rule.order == "backward":
        lines.append("the answer is produced from its last character on, and turned back for you")
    return lines


def _holds(rule: FieldCoupling, queries: Column, answers: Column) -> bool:
    """Whether every answer is written and read back the same."""
    try:
        pairs = zip(queries, answers, strict=True)
        return all(rule.read(rule.write(query, answer)) == answer for query, answer in pairs)
    except DataError:
        return False


def _propose(queries: Column, answers: Column, split: str) -> tuple[FieldCoupling, bool] | None:
    """Return the rule for one cut, and whether every relation in it was seen to hold."""
    given, query_between = _columns(queries, split)
    wanted, answer_between = _columns(answers, split)
    if not given or not wanted or any(len(texts) > 1 for texts in answer_between):
        return None
    if any(len(texts) > _MOST_DELIMITERS for texts in query_between):
        return None
    numbers = [n for n, column in enumerate(given) if _all_numbers(column) and len(set(column)) > 1]
    total = _totals(given) if len(numbers) == len(given) else None
    fields = [_relate(column, given, numbers, total) for column in wanted]
    if any(field is None for field in fields):
        return None
    related = [field for field in fields if field is not None]
    computed = [n for n, f in enumerate(related) if f.relation == "number" and f.source < 0]
    open_ended = [
        n
        for n, (field, column) in enumerate(zip(related, wanted, strict=True))
        if field.relation == "free" and len(set(map(len, column))) > 1
    ]
    # a field whose length is not known before must be the last that is produced
    backward = bool(computed) or (open_ended == [0] and len(related) > 1)
    if open_ended not in ([], [0 if backward else len(related) - 1]):
        return None
    pads = _pads(related, len(given), numbers if computed else [])
    related = [_as_number(f, c, pads) for f, c in zip(related, wanted, strict=True)]
    # a sum does not ask which number is which, and one field is not to be told from others
    alone = len(related) == 1 and (len(given) == 1 or wanted[0] == total)
    rule = FieldCoupling(
        split=split,
        order="backward" if backward else "forward",
        levels=1 if alone else 2,
        query=pads,
        answer=tuple(related),
        query_between=tuple(query_between),
        answer_between=tuple(texts[0] for texts in answer_between),
        example=queries[0],
    )
    return rule, all(wanted[n] == total for n in computed)


def _columns(texts: Column, split: str) -> tuple[list[Column], list[tuple[str, ...]]]:
    """Return fields by their number, and the different texts at each place between them."""
    cut = [split_fields(text, split) for text in texts]
    if len({len(fields) for fields, _ in cut}) > 1:
        return [], []
    columns: list[Column] = [
        list(column) for column in zip(*(fields for fields, _ in cut), strict=True)
    ]
    between = zip(*(between for _, between in cut), strict=True)
    return columns, [tuple(dict.fromkeys(texts)) for texts in between]


def _relate(
    column: Column, given: Sequence[Column], numbers: Sequence[int], total: Column | None
) -> AnswerField | None:
    """Return where a field of the answer belongs, or `None`."""
    for source, other in enumerate(given):
        if column == other:
            return AnswerField("along", source)
    for source, other in enumerate(given):
        if all(a == b[::-1] for a, b in zip(column, other, strict=True)):
            return AnswerField("reverse", source)
    digits = _fewest_digits(column) if _all_numbers(column) else 0
    if digits:
        for source in numbers:
            pairs = zip(column, given[source], strict=True)
            if all(a.lstrip("0") == b.lstrip("0") for a, b in pairs):
                return AnswerField("number", source, digits=digits)
    lengths = list(map(len, column))
    for source, other in enumerate(given):
        # digits that depend on more than the digit above them need carries, so the number form
        by_character = not digits or _decides_characters(other, column)
        if lengths == list(map(len, other)) and len(set(lengths)) > 1 and by_character:
            return AnswerField("along", source)
    decider = _decided_by(column, given)
    if decider is not None:
        return AnswerField("free", decider, length=max(map(len, column)))
    if digits and numbers:
        widths = [max(len(_plain(given[n][row])) for n in numbers) for row in range(len(column))]
        extra = max(len(_plain(a)) - width for a, width in zip(column, widths, strict=True))
        if extra <= _MOST_EXTRA:
            return AnswerField("number", digits=digits, extra=max(0, extra))
    return None


def _decided_by(column: Column, given: Sequence[Column]) -> int | None:
    """Return the field of the query that alone decides a field, -1 for a constant, or `None`."""
    if len(set(column)) == 1:
        return -1
    best: tuple[int, int] | None = None
    for source, other in enumerate(given):
        values = len(set(other))
        if values * _REPEATS > len(column) or len(set(zip(other, column, strict=True))) > values:
            continue
        best = min(best or (values, source), (values, source))
    return None if best is None else best[1]


def _pads(
    fields: Sequence[AnswerField], count: int, common: Sequence[int]
) -> tuple[QueryField, ...]:
    pads = [QueryField("common") if n in common else QueryField() for n in range(count)]
    for field in fields:
        if field.relation == "number" and field.source >= 0:
            before = pads[field.source]
            pad = before.pad if before.pad != "none" else "own"
            pads[field.source] = QueryField(pad, max(before.digits, field.digits))
    return tuple(pads)


def _as_number(field: AnswerField, column: Column, pads: Sequence[QueryField]) -> AnswerField:
    """Return a copied field as a number where its source is padded, so that zeros are taken off."""
    if field.relation != "along" or pads[field.source].pad == "none":
        return field
    return AnswerField("number", field.source, digits=_fewest_digits(column) or 1)


def _all_numbers(column: Column) -> bool:
    return all(text.isascii() and text.isdigit() for text in column)


def _fewest_digits(column: Column) -> int:
    """Return the width up to which numbers have zeros in front, 0 where there is no such width."""
    padded = any(_plain(text) != text for text in column)
    digits = min(map(len, column)) if padded else 1
    return digits if all(_plain(text).zfill(digits) == text for text in column) else 0


def _decides_characters(source: Column, column: Column) -> bool:
    """Whether each character of a field depends on the one at its place in the source alone."""
    pairs = {
        pair for texts in zip(source, column, strict=False) for pair in zip(*texts, strict=False)
    }
    return len(pairs) == len({character for character, _ in pairs})


def _totals(columns: Sequence[Column]) -> list[str] | None:
    """Return the sums of numbers, row by row; `None` where they are too long for Python's text."""
    if max(len(text) for column in columns for text in column) > _LONGEST_NUMBER:
        return None
    return [str(sum(map(int, values))) for values in zip(*columns, strict=True)]


def _plain(digits: str) -> str:
    return digits.lstrip("0") or "0"
