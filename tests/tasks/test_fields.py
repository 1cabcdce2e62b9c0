"""Rules by fields: ids against the tasks of the papers, proposals kind by kind, bad input."""

from __future__ import annotations

import random
from calendar import month_name
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError, DataError
from gossamer.tasks import (
    AdditionTask,
    CopyTask,
    FieldCoupling,
    ReverseTask,
    propose_coupling,
)
from gossamer.tasks.fields import AnswerField, QueryField, split_fields
from gossamer.tasks.propose import describe_coupling


def number(draw: random.Random, most: int = 6) -> int:
    return draw.randrange(10 ** draw.randint(1, most))


def word(draw: random.Random) -> str:
    return "".join(draw.choices("abcde", k=draw.randint(1, 7)))


def pair(draw: random.Random) -> tuple[int, int]:
    a, b = number(draw), number(draw)
    return max(a, b), min(a, b)


def date(draw: random.Random) -> tuple[int, int, int]:
    return draw.randint(10, 99_999), draw.randint(1, 12), draw.randint(1, 28)


Make = Callable[[random.Random], tuple[str, str]]
KINDS: dict[str, Make] = {
    "sum": lambda r: (lambda a, b: (f"{a} + {b}", f"{a + b}"))(number(r), number(r)),
    "sum of three": lambda r: (lambda a, b: (f"sum({a}, {b}, 7)", f"= {a + b + 7} EUR"))(*pair(r)),
    "equation": lambda r: (lambda a, b: (f"{a}+{b}", f"{a}+{b}={a + b}"))(*pair(r)),
    "difference": lambda r: (lambda a, b: (f"{a}-{b}", f"{a - b}"))(*pair(r)),
    "both": lambda r: (lambda a, b: (f"{a} {b}", f"{a + b} {a - b}"))(*pair(r)),
    "successor": lambda r: (lambda a: (f"{a}", f"{a + 1}"))(number(r)),
    "money": lambda r: (
        lambda a, b: (
            f"{a // 100}.{a % 100:02d}+{b // 100}.{b % 100:02d}",
            f"{(a + b) // 100}.{(a + b) % 100:02d}",
        )
    )(*pair(r)),
    "date": lambda r: (lambda y, m, d: (f"{y}-{m:02d}-{d:02d}", f"{d:02d}.{m:02d}.{y}"))(*date(r)),
    "date, zeros added": lambda r: (
        lambda y, m, d: (f"{y}/{m}/{d}", f"{d:02d}.{m:02d}.{y}")
    )(*date(r)),
    "date, zeros taken off": lambda r: (
        lambda y, m, d: (f"{y}-{m:02d}-{d:02d}", f"{d}.{m}.{y}")
    )(*date(r)),
    "date from words": lambda r: (
        lambda y, m, d: (f"{d} {month_name[m]} {y}", f"{y}-{m:02d}-{d:02d}")
    )(*date(r)),
    "date to words": lambda r: (
        lambda y, m, d: (f"{y}-{m:02d}-{d:02d}", f"{month_name[m]} {d:02d}, {y}")
    )(*date(r)),
    "copy": lambda r: (lambda a: (f"{a}=", a))(word(r)),
    "reverse": lambda r: (lambda a: (a, a[::-1]))(word(r)),
    "swap": lambda r: (lambda a, b: (f"{a} {b}", f"<{b}>, <{a}>"))(word(r), word(r)),
    "reverse with spaces": lambda r: (lambda a: (a, a[::-1]))(
        " ".join(word(r) for _ in range(r.randint(1, 3)))
    ),
    "letter by letter": lambda r: (
        lambda a: (a, "".join(chr(ord(c) + 1) for c in a))
    )(word(r)),
}  # fmt: skip


def rows_of(kind: str, size: int = 400, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    return [dict(zip(("query", "answer"), KINDS[kind](draw), strict=True)) for _ in range(size)]


def rule_of(kind: str) -> FieldCoupling:
    rule = propose_coupling(rows_of(kind))
    assert rule is not None
    return rule


# --- reference values: the formats of the papers ---


def test_sums_have_the_ids_of_the_addition_task() -> None:
    rule = rule_of("sum")
    task = AdditionTask()
    draw = random.Random(3)
    for _ in range(50):
        a, b = number(draw, 30), number(draw, 30)
        placed = rule.place(f"{a} + {b}")
        written = rule.write(f"{a} + {b}", str(a + b))
        text = placed.text.replace(" ", "") + "=" + written
        theirs = task.example(f"{a}+{b}")
        assert f"${text}$" == task.symbols(theirs.tokens)
        ours = [*placed.query_ids, *placed.answer_ids]
        # theirs gives the sign between the numbers 1, ours 0; blanks are ours alone
        kept = [i for (i,), c in zip(ours, placed.text + "=" + written, strict=True) if c != " "]
        signs = [1 if c == "+" else i for i, c in zip(kept, text, strict=True)]
        assert signs == theirs.position_ids.tolist()[1:-1]


def test_copies_and_reversals_have_the_ids_of_their_tasks() -> None:
    for kind, task in (("copy", CopyTask()), ("reverse", ReverseTask())):
        rule = rule_of(kind)
        for text in ("3", "31", "31415926535"):
            placed = rule.place(text + "=" if kind == "copy" else text)
            places = [i for (i,) in placed.query_ids if i] + [i for (i,) in placed.answer_ids]
            theirs = task.position_ids(text).tolist()[1:-1]
            assert [i - places[0] for i in places] == [i - theirs[0] for i in theirs]


def test_the_table_of_a_date() -> None:
    placed = rule_of("date").place("814-02-07")
    assert placed.text == "814-02-07"
    levels = list(zip(*placed.query_ids, strict=True))
    assert levels[0] == (2, 3, 4, 0, 2, 3, 0, 2, 3, 1)
    assert levels[1] == (1, 1, 1, 0, 2, 2, 0, 3, 3, 3)
    levels = list(zip(*placed.answer_ids, strict=True))  # 07.02.814
    assert levels[0] == (2, 3, 1, 2, 3, 1, 2, 3, 4)
    assert levels[1] == (3, 3, 2, 2, 2, 1, 1, 1, 1)


# --- proposals ---


@pytest.mark.parametrize(
    ("kind", "split", "order", "levels", "relations"),
    [
        ("sum", "numbers", "backward", 1, [("number", -1)]),
        ("sum of three", "numbers", "backward", 2, [("number", -1)]),
        ("equation", "numbers", "backward", 2, [("number", 0), ("number", 1), ("number", -1)]),
        ("difference", "numbers", "backward", 2, [("number", -1)]),
        ("both", "numbers", "backward", 2, [("number", -1)] * 2),
        ("successor", "numbers", "backward", 1, [("number", -1)]),
        ("money", "numbers", "backward", 2, [("number", -1)] * 2),
        ("date", "numbers", "forward", 2, [("along", 2), ("along", 1), ("along", 0)]),
        (
            "date, zeros added", "numbers", "forward", 2,
            [("number", 2), ("number", 1), ("along", 0)],
        ),
        (
            "date, zeros taken off", "numbers", "forward", 2,
            [("number", 2), ("number", 1), ("along", 0)],
        ),
        ("date from words", "words", "forward", 2, [("along", 2), ("free", 1), ("number", 0)]),
        ("date to words", "words", "backward", 2, [("free", 1), ("along", 2), ("along", 0)]),
        ("copy", "words", "forward", 1, [("along", 0)]),
        ("reverse", "words", "forward", 1, [("reverse", 0)]),
        ("swap", "words", "forward", 2, [("along", 1), ("along", 0)]),
        ("reverse with spaces", "text", "forward", 1, [("reverse", 0)]),
        ("letter by letter", "words", "forward", 1, [("along", 0)]),
    ],
)  # fmt: skip
def test_what_is_proposed(
    kind: str, split: str, order: str, levels: int, relations: list[tuple[str, int]]
) -> None:
    rule = rule_of(kind)
    assert (rule.split, rule.order, rule.levels) == (split, order, levels)
    assert [(field.relation, field.source) for field in rule.answer] == relations
    lines = describe_coupling(rule)
    assert len(lines) >= len(rule.answer)
    assert any("from its last character on" in line for line in lines) == (order == "backward")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_holds_on_rows_it_has_not_seen(kind: str) -> None:
    rule = rule_of(kind)
    for row in rows_of(kind, seed=9):
        placed = rule.place(row["query"])
        written = rule.write(row["query"], row["answer"])
        assert rule.read(written) == row["answer"]
        assert len(placed.query_ids) == len(placed.text) + 1
        assert len(written) <= len(placed.answer_ids)
        if all(field.relation != "free" for field in rule.answer):
            assert len(written) == len(placed.answer_ids)
        ids = [*placed.query_ids, *placed.answer_ids]
        assert {len(one) for one in ids} == {rule.levels}
        assert min(min(one) for one in ids) >= 0
    assert FieldCoupling.from_dict(rule.to_dict(), "test") == rule


@pytest.mark.parametrize("kind", ["copy", "reverse", "swap", "date", "date from words"])
def test_the_answer_steps_through_the_places_of_its_source(kind: str) -> None:
    """From one produced character to the next the place changes by one, or a new field begins."""
    rule = rule_of(kind)
    for row in rows_of(kind, 50, seed=4):
        placed = rule.place(row["query"])
        answer = rule.write(row["query"], row["answer"])
        path = [placed.query_ids[-1], *placed.answer_ids]
        query = dict(zip(placed.query_ids, placed.text, strict=False))
        for before, here, character in zip(path, path[1:], answer, strict=False):
            if before[-1] == here[-1] or rule.levels == 1:
                assert abs(here[0] - before[0]) == 1
            copied = rule.levels == 1 or rule.answer[_field(rule, here[1])].relation == "along"
            if copied and character.isalnum():
                assert query[here] == character


def _field(rule: FieldCoupling, level: int) -> int:
    return [field.source + 1 for field in rule.answer].index(level)


@pytest.mark.parametrize(
    "make",
    [
        lambda r: (f"{number(r)}<{number(r)}", r.choice(["yes", "no"])),
        lambda r: ((a := word(r)), str(a.count("a") % 2)),
        lambda r: (f"{(a := number(r))}*{(b := number(r))}", str(a * b)),
        lambda r: (f"{(a := number(r))}-{(b := number(r))}", str(a - b)),
    ],
    ids=["comparison", "parity", "product", "signed"],
)
def test_nothing_is_proposed_where_nothing_aligns(make: Make) -> None:
    draw = random.Random(0)
    rows = [dict(zip(("query", "answer"), make(draw), strict=True)) for _ in range(400)]
    assert propose_coupling(rows) is None


def test_a_number_of_fixed_width_keeps_its_zeros() -> None:
    draw = random.Random(0)
    rows = []
    for _ in range(200):
        a, b = draw.randrange(500), draw.randrange(500)
        rows.append({"query": f"{a:03d}+{b:03d}", "answer": f"{a + b:04d}"})
    rule = propose_coupling(rows)
    assert rule is not None
    assert rule.answer == (AnswerField("number", digits=4, extra=rule.answer[0].extra),)
    assert rule.read(rule.write("007+005", "0012")) == "0012"
    assert rule.read(rule.write("99999+1", "100000")) == "100000"


def test_very_long_numbers_are_read() -> None:
    rows = [{"query": f"{'9' * n}+1", "answer": "1" + "0" * n} for n in (2, 30, 5000)]
    rule = propose_coupling(rows)
    assert rule is not None
    assert rule.read(rule.write(rows[2]["query"], rows[2]["answer"])) == rows[2]["answer"]


@given(st.text(alphabet="ab1 2-.é", min_size=1), st.sampled_from(["numbers", "words", "text"]))
@settings(deadline=None, derandomize=True)
def test_fields_and_what_is_between_make_the_text(text: str, split: str) -> None:
    fields, between = split_fields(text, split)
    assert all(fields)
    assert "".join(b + f for b, f in zip(between, [*fields, ""], strict=True)) == text


def test_unreadable_answers_stay_as_they_are() -> None:
    assert rule_of("sum").read("3+4") == "4+3"
    assert rule_of("sum").read("") == ""
    assert rule_of("date").read("1.2") == "1.2"


# --- bad input ---


@pytest.mark.parametrize(
    ("kind", "query", "message"),
    [
        ("sum", "1 + 2 + 3", r"form of '.* \+ .*', with 2 numbers; got 3 in '1 \+ 2 \+ 3'"),
        ("sum", "12+3", r"with ' \+ ' at column 3; got '\+' in '12\+3'"),
        ("sum", "12 + 3=", r"with '' at column 7; got '='"),
        ("sum", "", "with 2 numbers; got 0"),
        ("copy", "ab cd=", "with 1 words; got 2"),
        ("date from words", "x May 2026", "with a number as its word 1; got 'x'"),
    ],
)
def test_queries_of_another_form(kind: str, query: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rule_of(kind).place(query)


@pytest.mark.parametrize(
    ("kind", "query", "answer", "message"),
    [
        ("sum", "1 + 2", "3 4", "answer must have the form '...' with numbers for ...; got '3 4'"),
        ("sum", "1 + 2", "=3", "answer must have the form"),
        ("sum", "1 + 2", "345", "field 1 of the answer must have 2 characters .*; got '345'"),
        ("copy", "abc=", "ab", "must have 3 characters for the query 'abc='"),
    ],
)
def test_answers_of_another_form(kind: str, query: str, answer: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rule_of(kind).write(query, answer)


def test_no_rows() -> None:
    with pytest.raises(DataError, match="at least one row"):
        propose_coupling([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "letters"}, "unknown split 'letters'"),
        ({"order": "up"}, "unknown order"),
        ({"levels": 3}, "levels must be"),
        ({"levels": "1"}, "levels must be an integer"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"query": 3}, "query of rule must be a list"),
        ({"query": ["x"]}, "query of rule must be a table"),
        ({"query": [{"pads": "own"}]}, "did you mean 'pad'"),
        ({"query": [{"pad": "left"}, {}]}, "unknown pad 'left'"),
        ({"query": [{}]}, "one text more than fields"),
        ({"answer": [{"relation": "near"}]}, "unknown relation 'near'"),
        ({"answer": [{"relation": "along"}]}, "'along' needs a source"),
        ({"answer": [{"relation": "along", "source": 2}]}, "source must be >= -1 and <= 1"),
        ({"answer": [{"relation": "free"}]}, "length must be >= 1"),
        ({"query": [{}, {}]}, "needs a field of the query with pad = 'common'"),
        ({"query_between": [[""], ["+"]]}, "one text more than fields"),
        ({"query_between": [[""], "+", [""]]}, "query_between of rule must be a list"),
        ({"answer_between": ["", 3]}, "must be a list of texts"),
        ({"example": None}, "example"),
    ],
)
def test_rules_that_do_not_fit_together(change: dict, message: str) -> None:
    values = rule_of("sum").to_dict() | change
    with pytest.raises(ConfigError, match=message):
        FieldCoupling.from_dict(values, "rule")


def test_a_missing_part_of_a_rule() -> None:
    values = rule_of("sum").to_dict()
    del values["order"]
    with pytest.raises(ConfigError, match="rule needs the option 'order'"):
        FieldCoupling.from_dict(values, "rule")
    with pytest.raises(ConfigError, match="digits must be >= 1"):
        QueryField("own", 0)
