"""Addition: the published tables, Python's integers, seeds, and bad queries."""

from __future__ import annotations

import json
import random

import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.tasks import AdditionTask, build_task, collate, parse_range
from tests.conftest import DATA

FIXTURES = [
    row
    for line in (DATA / "length-task-fixtures" / "tasks.jsonl").read_text().splitlines()
    if (row := json.loads(line))["task"] == "addition"
]


def query_of(task: AdditionTask, row: torch.Tensor) -> tuple[str, str]:
    """Return the query and the human answer that a row of tokens spells."""
    query, answer = task.symbols(row).strip("$").split("=")
    return query, answer[::-1].lstrip("0") or "0"


# --- reference values ---


def test_the_table_of_the_format() -> None:
    task = AdditionTask()
    example = task.example("653+49")
    assert task.symbols(example.tokens) == "$653+049=2070$"
    assert example.position_ids.tolist() == [0, 4, 3, 2, 1, 4, 3, 2, 1, 2, 3, 4, 5, 0]
    assert example.loss_mask.tolist() == [False] * 9 + [True] * 5
    shifted = task.position_ids("7+305", start=4)
    assert shifted.tolist() == [0, 7, 6, 5, 4, 7, 6, 5, 4, 5, 6, 7, 8, 0]
    assert task.symbols(task.encode("653+49=")) == "$653+049="


@pytest.mark.parametrize("row", FIXTURES, ids=lambda row: row["tokens"][:24])
def test_published_tokens_and_ids(row: dict) -> None:
    task = AdditionTask()
    example = task.example(f"{row['a']}+{row['b']}", start=row["start"][0])
    assert task.symbols(example.tokens) == row["tokens"]
    assert example.position_ids.tolist() == row["ids"][0]


def test_there_are_fixtures() -> None:
    assert len(FIXTURES) == 61


@pytest.mark.parametrize("operands", [2, 3, 4, 11])
def test_answers_are_those_of_python(operands: int) -> None:
    draw = random.Random(0)
    task = AdditionTask(operands=operands)
    for _ in range(150):
        numbers = [draw.randrange(10 ** draw.randint(1, 300)) for _ in range(operands)]
        query = "+".join(map(str, numbers))
        assert task.answer(query) == str(sum(numbers))
        assert task.check(query + "=", f" {sum(numbers)}\n")
        assert not task.check(query, str(sum(numbers) + 1))


def test_numbers_beyond_the_limit_of_python_text_conversion() -> None:
    nines = "9" * 20_000
    assert AdditionTask().answer(f"{nines}+1") == "1" + "0" * 20_000


def test_more_operands_are_padded_to_the_largest_sum() -> None:
    task = AdditionTask(operands=3)
    example = task.example("999+999+1")
    assert task.symbols(example.tokens) == "$0999+0999+0001=9991$"
    assert example.position_ids.tolist() == [
        0, 5, 4, 3, 2, 1, 5, 4, 3, 2, 1, 5, 4, 3, 2, 1, 2, 3, 4, 5, 0,
    ]  # fmt: skip
    # eleven one-digit numbers make at most 99, two digits
    assert (
        AdditionTask(operands=11).symbols(AdditionTask(operands=11).encode("+".join("9" * 11)))[:4]
        == "$09+"
    )


# --- samples ---


@pytest.mark.parametrize("carry_chains", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("operands", [2, 3])
def test_samples_are_examples_of_their_own_query(
    carry_chains: float, operands: int, generator: torch.Generator
) -> None:
    task = AdditionTask((1, 9), operands=operands, max_position=30, carry_chains=carry_chains)
    for _ in range(20):
        batch = task.sample(16, generator=generator)
        for tokens, ids, mask in zip(
            batch.tokens, batch.position_ids, batch.loss_mask, strict=True
        ):
            query, answer = query_of(task, tokens)
            assert answer == str(sum(map(int, query.split("+"))))
            example = task.example(query, start=int(ids[ids > 0].min()))
            assert task.symbols(example.tokens) == task.symbols(tokens)
            assert torch.equal(example.position_ids, ids)
            assert torch.equal(example.loss_mask, mask)
            assert 1 <= ids.max() <= 30


def test_lengths_follow_independent_uniform_draws(generator: torch.Generator) -> None:
    """Over batches, pairs of lengths are uniform; a chi-square over the 16 pairs checks it."""
    task = AdditionTask((1, 4))
    counts = torch.zeros(4, 4)
    for _ in range(4000):
        lengths = task._draw_lengths(1, generator)[0] - 1
        counts[lengths[0], lengths[1]] += 1
    # 37.7 is the 99.9 % point of 15 degrees of freedom
    assert ((counts - 250) ** 2 / 250).sum() < 37.7


def test_leading_digits_are_not_zero_and_digits_are_uniform(generator: torch.Generator) -> None:
    task = AdditionTask((5, 5))
    tokens = task.sample(20_000, generator=generator).tokens[:, 1:6] - 2
    leading = torch.bincount(tokens[:, 0], minlength=10)
    assert leading[0] == 0
    others = torch.bincount(tokens[:, 1:].flatten(), minlength=10).float()
    # 27.9 is the 99.9 % point of 9 degrees of freedom
    assert ((others - 8000) ** 2 / 8000).sum() < 27.9


def test_carry_chains_are_longer(generator: torch.Generator) -> None:
    def longest_nines(share: float) -> float:
        tokens = (
            AdditionTask((30, 30), carry_chains=share).sample(200, generator=generator).tokens - 2
        )
        nines = (tokens[:, 1:31] + tokens[:, 32:62]) == 9
        return (
            sum(
                max(map(len, "".join("x" if n else " " for n in row).split()), default=0)
                for row in nines
            )
            / 200
        )

    assert longest_nines(0.0) < 2.5
    assert longest_nines(1.0) > 6


def test_random_start_only_with_a_table_and_only_in_training(generator: torch.Generator) -> None:
    def starts(split: str, max_position: int | None) -> set[int]:
        task = AdditionTask((3, 3), max_position=max_position)
        ids = task.sample(500, generator=generator, split=split).position_ids
        return set(ids[:, 4].tolist())  # the id of "+"

    assert starts("train", None) == starts("test", None) == {1}
    assert starts("train", 12) == set(range(1, 9))
    assert starts("test", 12) == {4}


def test_shift_changes_the_ids_by_a_constant() -> None:
    task = AdditionTask()
    one, far = task.position_ids("12+345"), task.position_ids("12+345", start=50)
    assert torch.equal((far - one)[one > 0].unique(), torch.tensor([49]))
    assert torch.equal(far == 0, one == 0)


def test_a_batch_depends_on_seed_and_number_alone() -> None:
    task = AdditionTask((1, 10), carry_chains=0.3, max_position=40)
    stream = task.stream(8, seed=5)
    whole = [b.tokens for b, _ in zip(stream, range(12), strict=False)]
    workers = [[stream.batch(n).tokens for n in range(w, 12, 3)] for w in range(3)]
    for number, tokens in enumerate(whole):
        assert torch.equal(tokens, workers[number % 3][number // 3])
    other = task.stream(8, seed=6).batch(0).tokens
    assert other.shape != whole[0].shape or not torch.equal(other, whole[0])
    state = torch.get_rng_state()
    stream.batch(0)
    assert torch.equal(state, torch.get_rng_state())


def test_labels_and_collation() -> None:
    task = AdditionTask()
    batch = collate([task.example("1+2"), task.example("10+20")])
    assert batch.labels[0].tolist() == [-100] * 5 + [5, 2, 1] + [-100] * 3
    assert batch.position_ids[0, -3:].tolist() == [0, 0, 0]
    with pytest.raises(DataError, match="at least one example"):
        collate([])


# --- grids ---


def test_grid_cells_have_exactly_that_many_digits(generator: torch.Generator) -> None:
    task = AdditionTask((1, 10), carry_chains=0.3)
    cells = task.grid(digits=[3, 20], carry_chains=[0.0, 1.0])
    assert [c.coordinates for c in cells] == [
        {"digits": n, "carry_chains": share} for share in (0.0, 1.0) for n in (3, 20)
    ]
    assert cells[1].task.sample(2, generator=generator).tokens.shape == (2, 65)
    assert [c.coordinates["digits"] for c in task.grid()] == [10, 20, 30, 50, 100]
    assert [c.coordinates["digits"] for c in AdditionTask((1, 10), max_position=42).grid()] == [
        10,
        20,
        30,
    ]


def test_unseen_lengths_only() -> None:
    cells = AdditionTask((2, 10)).grid(digits=range(1, 13), unseen_only=True)
    assert [c.coordinates["digits"] for c in cells] == [1, 11, 12]


# --- bad input ---


def test_too_long_for_the_table_names_the_longest_that_fits() -> None:
    with pytest.raises(ConfigError, match="the largest that fit: operands of 40 digits"):
        AdditionTask((1, 41), max_position=42)
    AdditionTask((1, 40), max_position=42)
    with pytest.raises(DataError, match="the largest that fit: operands of 10 digits"):
        AdditionTask((1, 10), max_position=12).example("12345678901+1")
    with pytest.raises(ConfigError, match="start must be"):
        AdditionTask((1, 10), max_position=12).example("1+1", start=11)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("12a+3", "'a' at column 3"),
        ("-1+3", "Negative numbers are not supported"),
        ("1++3", "a number on each side"),
        ("", "a number on each side"),
        ("1 2+3", "a number on each side"),
        ("1+2+3", "must add 2 numbers, as this task was built; got 3"),
        ("12", "must add 2 numbers"),
        ("1+2=3", "'=' at column 4"),
        ("１+2", "at column 1"),
    ],
)
def test_bad_queries(query: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        AdditionTask().encode(query)


@pytest.mark.parametrize(
    "options",
    [{"digits": (5, 2)}, {"digits": (0, 2)}, {"digits": "a-b"}, {"operands": 1},
     {"carry_chains": 1.5}, {"digits": (1, 2, 3)}],
)  # fmt: skip
def test_bad_options(options: dict) -> None:
    with pytest.raises(ConfigError):
        AdditionTask(**options)


def test_tasks_by_name() -> None:
    task = build_task("addition:digits=2-7,carry_chains=0.5")
    assert task.config == {"name": "addition", "digits": [2, 7], "operands": 2, "carry_chains": 0.5}
    options = {k: v for k, v in task.config.items() if k != "name"}
    assert build_task("addition", **options).config == task.config
    assert build_task("addition:digits=3").config["digits"] == [3, 3]
    with pytest.raises(ConfigError, match="did you mean 'addition'"):
        build_task("aditon")
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        build_task("addition:digit=3")
    with pytest.raises(ConfigError, match="key=value"):
        build_task("addition:digits")
    assert parse_range("3-4", "digits") == (3, 4)


def test_decode_reads_what_a_model_may_say() -> None:
    task = AdditionTask()
    answer = [4, 2, 9, 1, 5]  # "207$3"
    assert task.decode(torch.tensor(answer)) == "702"
    assert task.decode([2, 2, 1]) == "0"
    assert task.decode([1]) == ""
    assert task.decode([3, 12, 4]) == "2+1"
    assert task.decode([0, 3, 1]) == "1"
