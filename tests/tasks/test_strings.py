"""Copy, reverse, parity: the tables, Python's own strings, tables of positions, bad queries."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.tasks import CopyTask, ParityTask, ReverseTask, StructuredTask, build_task

TASKS: dict[str, StructuredTask] = {
    "copy": CopyTask((1, 6), max_position=30),
    "reverse": ReverseTask((1, 6), max_position=30),
    "parity": ParityTask((1, 6), max_position=30),
    "parity, no scratchpad": ParityTask((1, 6), scratchpad=False, max_position=30),
}


def truth(name: str, text: str) -> str:
    """Return what the whole answer must say, by Python's strings and integers."""
    if name == "copy":
        return text
    if name == "reverse":
        return "".join(reversed(text))
    running = [str(text[: n + 1].count("1") % 2) for n in range(len(text))]
    return "".join(running) if name == "parity" else running[-1]


# --- reference values ---


@pytest.mark.parametrize(
    ("task", "query", "tokens", "ids"),
    [
        (CopyTask(), "3141=", "$3141=3141$", [0, 2, 3, 4, 5, 1, 2, 3, 4, 5, 0]),
        (ReverseTask(), "3141=", "$3141=1413$", [0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0]),
        (ParityTask(), "1011=", "$1011=1101$", [0, 2, 3, 4, 5, 1, 2, 3, 4, 5, 0]),
        (ParityTask(scratchpad=False), "1011", "$1011=1$", [0, 2, 2, 2, 2, 1, 2, 0]),
        (CopyTask(), "7", "$7=7$", [0, 2, 1, 2, 0]),
    ],
)
def test_the_tables(task: StructuredTask, query: str, tokens: str, ids: list[int]) -> None:
    example = task.example(query)
    assert task.symbols(example.tokens) == tokens
    assert example.position_ids.tolist() == ids
    answer = len(tokens) - tokens.index("=") - 1
    assert example.loss_mask.tolist() == [False] * (len(ids) - answer) + [True] * answer
    assert task.symbols(task.encode(query)) == tokens[: tokens.index("=") + 1]
    shifted = task.position_ids(query, start=7)
    assert shifted.tolist() == [n and n + 6 for n in ids]


@pytest.mark.parametrize("name", TASKS)
def test_samples_say_what_python_says(name: str, generator: torch.Generator) -> None:
    task = TASKS[name]
    lengths = set()
    for _ in range(60):
        batch = task.sample(8, generator=generator)
        rows = zip(batch.tokens, batch.position_ids, batch.loss_mask, strict=True)
        for tokens, ids, mask in rows:
            query, answer = task.symbols(tokens).strip("$").split("=")
            assert answer == truth(name, query)
            lengths.add(len(query))
            example = task.example(query, start=int(ids[ids > 0].min()))
            assert torch.equal(example.tokens, tokens)
            assert torch.equal(example.position_ids, ids)
            assert torch.equal(example.loss_mask, mask)
            assert ids.max() <= 30
    assert lengths == set(range(1, 7))


@pytest.mark.parametrize("name", TASKS)
def test_any_length_is_answered(name: str) -> None:
    draw = random.Random(0)
    free = build_task(
        **{"spec": name.split(",")[0], **({"scratchpad": False} if "," in name else {})}
    )
    for size in (1, 2, 50, 600):
        text = "".join(draw.choice("01") for _ in range(size))
        whole = truth(name, text)
        assert free.answer(text) == (whole[-1] if "parity" in name else whole)
        assert free.check(text + "=", f" {free.answer(text)}\n")
        assert not free.check(text, "x")


def test_parity_separates_the_bit_from_its_working() -> None:
    task = ParityTask()
    produced = [3, 2, 3, 1, 2]  # "101$0"
    assert task.decode(produced) == "1"
    assert task.scratchpad(produced) == "101"
    assert task.decode([1]) == ""
    plain = ParityTask(scratchpad=False)
    assert plain.decode([2, 1]) == "0"
    assert plain.scratchpad([2, 1]) == CopyTask().scratchpad([2, 1]) == ""


# --- limits and invariances ---


def test_only_the_count_of_ones_matters_without_scratchpad() -> None:
    """All bits share one id, so permuting them changes neither the ids nor the answer."""
    task = ParityTask(scratchpad=False)
    for bits in set(itertools.permutations("1101")):
        text = "".join(bits)
        assert task.answer(text) == "1"
        assert torch.equal(task.position_ids(text), task.position_ids("1101"))


def test_lengths_are_uniform(generator: torch.Generator) -> None:
    counts = torch.zeros(6)
    for _ in range(1200):
        length = TASKS["copy"].sample(1, generator=generator).tokens.shape[1]
        counts[(length - 3) // 2 - 1] += 1
    # 20.5 is the 99.9 % point of 5 degrees of freedom
    assert ((counts - 200) ** 2 / 200).sum() < 20.5


@pytest.mark.parametrize("task", [CopyTask((1, 20)), ReverseTask((3, 20)), ParityTask((1, 20))])
def test_grids(task: StructuredTask, generator: torch.Generator) -> None:
    assert [c.coordinates for c in task.grid()] == [{"length": n} for n in (20, 40, 60, 100, 200)]
    cell = task.grid(length=[33])[0]
    assert cell.task.sample(2, generator=generator, split="test").tokens.shape == (2, 69)
    limited = build_task(task.config["name"], length=(1, 20), max_position=41)
    assert [c.coordinates["length"] for c in limited.grid()] == [20, 40]


def test_a_table_is_used_up_to_its_end() -> None:
    for kind in (CopyTask, ReverseTask, ParityTask):
        assert kind((1, 9), max_position=10).position_ids("1" * 9, start=1).max() == 10
        with pytest.raises(ConfigError, match="the largest that fit: strings of 9 symbols"):
            kind((1, 10), max_position=10)
    # one id serves all bits, so any length fits
    assert ParityTask((1, 500), scratchpad=False, max_position=2).config["max_position"] == 2


# --- by name, and bad input ---


def test_by_name() -> None:
    for name in ("copy", "reverse", "parity"):
        task = build_task(f"{name}:length=2-7,max_position=9")
        assert task.config["length"] == [2, 7]
        options = {key: value for key, value in task.config.items() if key != "name"}
        assert build_task(name, **options).config == task.config
    assert build_task("parity:scratchpad=false").config["scratchpad"] is False


@pytest.mark.parametrize(
    ("query", "message"),
    [("31a", "'a' at column 3"), ("", "at least one symbol"), ("=", "at least one symbol"),
     ("3 1", "' ' at column 2"), ("３", "at column 1"), ("1=1", "'=' at column 2")],
)  # fmt: skip
def test_bad_queries(query: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        CopyTask().encode(query)
    with pytest.raises(DataError, match="symbols 01"):
        ParityTask().encode("12")


@pytest.mark.parametrize("options", [{"length": (5, 2)}, {"length": 0}, {"length": "x"}])
def test_bad_options(options: dict) -> None:
    for kind in (CopyTask, ReverseTask, ParityTask):
        with pytest.raises(ConfigError, match="length"):
            kind(**options)
    with pytest.raises(ConfigError, match="scratchpad must be true or false"):
        ParityTask(scratchpad="yes")
