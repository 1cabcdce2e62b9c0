"""The exact token and id tables of the arithmetic tasks and boards, and Python's own arithmetic."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.tasks import (
    AdditionTask,
    FixedMultiplicationTask,
    MinesweeperTask,
    MultiAdditionTask,
    MultiplicationTask,
    StructuredTask,
    build_task,
    parse_two_ranges,
)
from tests.conftest import DATA

ROWS = [
    json.loads(line)
    for line in (DATA / "length-task-fixtures" / "tasks.jsonl").read_text().splitlines()
]
MADE = {
    "addition": AdditionTask(),
    "multiplication_nx2": FixedMultiplicationTask(),
    "multi_addition_scratchpad": MultiAdditionTask(),
    "multiplication_scratchpad": MultiplicationTask(),
    "minesweeper": MinesweeperTask(),
}
TASKS: dict[str, StructuredTask] = {
    "addition": AdditionTask((1, 4), max_position=30, operands=3),
    "fixed_multiplication": FixedMultiplicationTask((1, 4), max_position=30),
    "multi_addition": MultiAdditionTask((1, 3), (2, 4), max_position=30),
    "multiplication": MultiplicationTask(((1, 3), (1, 4)), max_position=[30, 12, 40]),
    "minesweeper": MinesweeperTask(((2, 4), (3, 5)), max_position=30),
}


def query_of(row: dict[str, Any]) -> str:
    if "board" in row:
        return "/".join(row["board"])
    if "operands" in row:
        return "+".join(map(str, row["operands"]))
    sign = "+" if row["task"] == "addition" else "*"
    return f"{row['a']}{sign}{row['b']}"


def text(strings: str) -> list[int]:
    return [int(part) for part in strings.split()]


# --- reference values ---


@pytest.mark.parametrize("name", MADE)
def test_published_tokens_and_ids(name: str) -> None:
    rows = [row for row in ROWS if row["task"] == name]
    assert len(rows) >= 20
    task = MADE[name]
    for row in rows:
        example = task.example(query_of(row), start=row["start"])
        assert task.symbols(example.tokens) == row["tokens"]
        ids = example.position_ids if task.levels > 1 else example.position_ids[:, None]
        assert ids.T.tolist() == row["ids"]


def test_the_table_of_many_operands() -> None:
    task = MultiAdditionTask()
    example = task.example("57+48+96")
    assert task.symbols(example.tokens) == "$057+048+096=000>750>501>102$"
    one = "0 4 3 2 1 4 3 2 1 4 3 2 1 2 3 4 1 2 3 4 1 2 3 4 1 2 3 4 0"
    two = "0 1 1 1 1 2 2 2 2 3 3 3 1 1 1 1 2 2 2 2 3 3 3 3 4 4 4 4 0"
    assert example.position_ids.T.tolist() == [text(one), text(two)]
    # the answer begins after "=" and ends with the end token
    assert example.loss_mask.tolist() == [False] * 13 + [True] * 16


def test_the_tables_of_multiplication() -> None:
    task = MultiplicationTask()
    example = task.example("43*12")
    assert task.symbols(example.tokens) == "$43*12=680+340=6800>6150$"
    one = "0 3 2 0 0 0 1 2 3 4 1 2 3 4 0 0 0 0 0 0 0 0 0 0 0"
    two = "0 0 0 0 2 1 1 1 1 1 2 2 2 2 1 1 1 1 1 2 2 2 2 2 0"
    three = "0 0 0 0 0 0 1 2 3 4 2 3 4 5 1 2 3 4 5 1 2 3 4 5 0"
    assert example.position_ids.T.tolist() == [text(one), text(two), text(three)]
    small = task.example("9*9")
    assert task.symbols(small.tokens) == "$9*9=18=18$"
    assert small.position_ids.T.tolist() == [
        text("0 2 0 0 1 2 3 0 0 0 0"),
        text("0 0 0 1 1 1 1 1 1 1 0"),
        text("0 0 0 0 1 2 3 1 2 3 0"),
    ]


def test_the_table_of_a_fixed_factor() -> None:
    task = FixedMultiplicationTask()
    example = task.example("653*49")
    assert task.symbols(example.tokens) == "$653*49=79913$"
    assert example.position_ids.tolist() == text("0 3 4 5 6 4 5 6 5 4 3 2 1 0")
    assert task.symbols(task.encode("653*4")) == "$653*04="


def test_the_table_of_a_board() -> None:
    task = MinesweeperTask()
    example = task.example("EEM/EEE/MEE")
    assert task.symbols(example.tokens) == "^EEMEEEMEE=01M121M10$"
    one = "0 2 3 4 2 3 4 2 3 4 1 2 3 4 2 3 4 2 3 4 0"
    two = "0 2 2 2 3 3 3 4 4 4 1 2 2 2 3 3 3 4 4 4 0"
    assert example.position_ids.T.tolist() == [text(one), text(two)]


def test_answers_are_those_of_python() -> None:
    draw = random.Random(0)
    many, product = MultiAdditionTask(), MultiplicationTask()
    fixed = FixedMultiplicationTask(second=3)
    for _ in range(60):
        a, b = (draw.randrange(10 ** draw.randint(1, 60)) for _ in range(2))
        numbers = [draw.randrange(10 ** draw.randint(1, 300)) for _ in range(draw.randint(2, 9))]
        assert many.answer("+".join(map(str, numbers))) == str(sum(numbers))
        assert product.answer(f"{a}*{b}") == str(a * b)
        assert fixed.answer(f"{a}*{b % 1000}") == str(a * (b % 1000))


def test_counts_of_neighbours_by_hand() -> None:
    draw = random.Random(1)
    for _ in range(20):
        h, w = draw.randint(1, 9), draw.randint(1, 9)
        board = ["".join(draw.choice("EEM") for _ in range(w)) for _ in range(h)]
        mines = {(i, j) for i in range(h) for j in range(w) if board[i][j] == "M"}
        expected = "".join(
            "M"
            if (i, j) in mines
            else str(sum((i + a, j + b) in mines for a in (-1, 0, 1) for b in (-1, 0, 1)))
            for i in range(h)
            for j in range(w)
        )
        assert MinesweeperTask().answer("/".join(board)) == expected


# --- what holds for every task of this kind ---


def parts_of(task: StructuredTask, tokens: torch.Tensor, ids: torch.Tensor) -> str:
    """Return the query that a sampled row spells."""
    query = task.symbols(tokens).lstrip("$^").partition("=")[0]
    if isinstance(task, MinesweeperTask):
        width = int(ids[1:, 0].max() - ids[ids[:, 0] > 0, 0].min())
        return "/".join(query[i : i + width] for i in range(0, len(query), width))
    return query


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_examples_of_their_own_query(name: str, generator: torch.Generator) -> None:
    task = TASKS[name]
    for _ in range(15):
        batch = task.sample(8, generator=generator)
        limits = torch.tensor(task.max_position)
        for tokens, ids, mask in zip(
            batch.tokens, batch.position_ids, batch.loss_mask, strict=True
        ):
            grid = ids if task.levels > 1 else ids[:, None]
            starts = [int(level[level > 0].min()) for level in grid.T]
            example = task.example(parts_of(task, tokens, grid), start=starts)
            assert task.symbols(example.tokens) == task.symbols(tokens)
            assert torch.equal(example.position_ids, ids)
            assert torch.equal(example.loss_mask, mask)
            assert (grid.amax(0) <= limits).all()


@pytest.mark.parametrize("name", TASKS)
def test_every_level_has_its_own_random_start(name: str, generator: torch.Generator) -> None:
    task = TASKS[name]
    for split, several in (("train", True), ("test", False)):
        ids = task.sample(200, generator=generator, split=split).position_ids
        grid = ids if task.levels > 1 else ids[..., None]
        starts = torch.where(grid > 0, grid, 10**6).amin(1)  # (B, levels)
        assert (starts >= 1).all()
        for level in range(task.levels):
            assert (len(starts[:, level].unique()) > 1) == several
        if several and task.levels > 1:
            pairs = {tuple(row) for row in starts[:, :2].tolist()}
            counts = [len(starts[:, level].unique()) for level in range(2)]
            assert len(pairs) > max(counts)  # the draws of two levels are independent


@pytest.mark.parametrize("name", TASKS)
def test_a_start_moves_the_ids_by_a_constant(name: str) -> None:
    task = build_task(name)
    query = {"addition": "12+345", "multi_addition": "1+20+300", "minesweeper": "EM/EE"}.get(
        name, "345*12"
    )
    one = task.position_ids(query, start=1)
    far = task.position_ids(query, start=[7] * task.levels)
    assert torch.equal(far, torch.where(one > 0, one + 6, 0))


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_depends_on_seed_and_number_alone(name: str) -> None:
    stream = TASKS[name].stream(4, seed=3)
    later = [stream.batch(n).tokens for n in (5, 2, 0)]
    again = [batch.tokens for batch, _ in zip(stream, range(6), strict=False)]
    for tokens, number in zip(later, (5, 2, 0), strict=True):
        assert torch.equal(tokens, again[number])


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_made_again_from_its_config(name: str) -> None:
    config = TASKS[name].config
    again = build_task(config["name"], **{k: v for k, v in config.items() if k != "name"})
    assert again.config == config
    assert torch.equal(
        again.stream(4, seed=0).batch(1).tokens, TASKS[name].stream(4, seed=0).batch(1).tokens
    )


@pytest.mark.parametrize("name", TASKS)
def test_ids_of_the_answer_follow_from_the_query_alone(
    name: str, generator: torch.Generator
) -> None:
    """Decoding can know them beforehand: two samples of one shape have the same ids."""
    task = build_task(name)
    batch = task.sample(16, generator=generator)
    assert (batch.position_ids == batch.position_ids[:1]).all()
    assert len(batch.tokens.unique(dim=0)) > 1


# --- grids and shapes ---


def test_grids_have_exactly_the_asked_shapes(generator: torch.Generator) -> None:
    cells = MultiAdditionTask((1, 5), (2, 5)).grid(digits=[2, 15], operands=[3, 15])
    assert [tuple(c.coordinates.values()) for c in cells] == [(2, 3), (2, 15), (15, 3), (15, 15)]
    tokens = cells[-1].task.sample(3, generator=generator).tokens
    assert tokens.shape == (3, 15 * 18 + 16 * 18 + 1)  # width 17 for 15 numbers of 15 digits
    assert (tokens[:, 1 : 1 + 17] != 0).all()
    cells = MultiplicationTask().grid(first=[10], second=[7])
    assert cells[0].task.symbols(cells[0].task.sample(1, generator=generator).tokens[0])[11] == "*"
    assert [c.coordinates for c in FixedMultiplicationTask((1, 10)).grid()] == [
        {"digits": n} for n in (10, 15, 20, 30)
    ]
    board = MinesweeperTask((5, 9)).grid(height=[3], width=[4, 6])
    assert [c.task.sample(1, generator=generator).tokens.shape[1] for c in board] == [27, 39]
    assert [c.coordinates["width"] for c in MinesweeperTask((5, 8)).grid()] == [8, 12, 16]
    uneven = MinesweeperTask(((5, 9), (4, 12))).grid()
    assert [c.coordinates["width"] for c in uneven] == [12, 18, 24]


def test_default_grids_stay_inside_the_table() -> None:
    assert [c.coordinates for c in MultiAdditionTask(max_position=[9, 40]).grid()] == [
        {"digits": 5, "operands": 5 * k} for k in (1, 2, 3)
    ]
    assert len(MultiplicationTask(max_position=[12, 10, 22]).grid()) == 4
    assert len(MinesweeperTask((5, 8), max_position=13).grid()) == 2


def test_half_of_the_samples_have_operands_of_one_length() -> None:
    generator = torch.Generator().manual_seed(0)
    task = MultiAdditionTask((1, 5), (4, 4))
    common = 0
    for _ in range(300):
        tokens = task.sample(1, generator=generator).tokens[0]
        numbers = task.symbols(tokens).strip("$").partition("=")[0].split("+")
        lengths = {len(n.lstrip("0") or "0") for n in numbers}
        common += len(lengths) == 1
    # a half, and a little more where uniform lengths agree by chance; 4 deviations are .12
    assert 0.4 < common / 300 < 0.75


def test_operands_without_padding(generator: torch.Generator) -> None:
    with pytest.warns(UserWarning, match="do not begin at one place"):
        task = MultiAdditionTask((1, 3), (2, 3), padding=False)
    example = task.example("7+305")
    assert task.symbols(example.tokens) == "$7+305=0000>7000>2130$"
    assert example.position_ids[:8].T.tolist() == [
        [0, 2, 1, 4, 3, 2, 1, 2],
        [0, 1, 1, 2, 2, 2, 1, 1],
    ]
    with pytest.warns(UserWarning, match="do not begin at one place"):
        cells = task.grid(digits=[3], operands=[2])
    assert cells[0].task.sample(4, generator=generator).tokens.shape == (4, 9 + 3 * 5)


def test_scratchpads_and_answers() -> None:
    many, product = MultiAdditionTask(), MultiplicationTask()
    tokens = many.example("57+48+96").tokens[13:]
    assert many.scratchpad(tokens) == "000>750>501>102"
    assert many.decode(tokens) == "201"
    assert many.decode(tokens[:4]) == ""  # ends with ">" and nothing after it
    tokens = product.example("43*12").tokens[7:]
    assert product.scratchpad(tokens) == "680+340=6800>6150"
    assert product.decode(tokens) == "516"
    assert product.check("43*12=", " 516 ")
    assert not product.check("43*12", "517")


# --- bad input ---


@pytest.mark.parametrize(
    ("task", "query", "message"),
    [
        (MultiAdditionTask(), "12++3", "a number on each side of"),
        (MultiAdditionTask(), "12+3>4", "got '>' at column 5"),
        (MultiAdditionTask(), "12", "at least 2 numbers"),
        (
            MultiAdditionTask(max_position=[7, 40]),
            "1234567+1",
            "level 1, .*2 operands of 5 digits",
        ),
        (MultiAdditionTask(max_position=[40, 6]), "+".join("1" * 9), "9 operands.*at level 2"),
        (MultiplicationTask(), "12*3*4", "must multiply 2 numbers; got 3"),
        (MultiplicationTask(), "-12*3", "Negative numbers"),
        (MultiplicationTask(), "12+3", "got '\\+' at column 3"),
        (FixedMultiplicationTask(), "12*345", "at most 2 digits"),
        (MinesweeperTask(), "EM/E", "length of the first, 2; got 1 in row 2"),
        (MinesweeperTask(), "EM/EX", "got 'X' in row 2, column 2"),
        (MinesweeperTask(), "", "in row 1"),
        (MinesweeperTask((2, 3), max_position=5), "EEEEEE/EEEEEE", "fit: boards of 2 x 4"),
    ],
)
def test_bad_queries(task: StructuredTask, query: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        task.encode(query)


def test_bad_options() -> None:
    for make, message in [
        (lambda: MultiAdditionTask(operands=(1, 3)), "operands must be a range"),
        (lambda: MultiAdditionTask((5, 1)), "digits must be a range"),
        (
            lambda: MultiAdditionTask(max_position=[40, 4]),
            "level 2, .*3 operands of 5 digits",
        ),
        (lambda: MultiAdditionTask(max_position=[1, 2, 3]), "one for each of 2 levels"),
        (lambda: MultiplicationTask(max_position=6), "level 1, .*fit: factors of 2 and 3 digits"),
        (lambda: MultiplicationTask(max_position=[4, 9, 11]), "level 1, .*of 2 and 5 digits"),
        (lambda: MultiplicationTask(max_position=[9, 2, 11]), "level 2, .*of 5 and 2 digits"),
        (lambda: FixedMultiplicationTask(second=0), "second"),
        (lambda: FixedMultiplicationTask((1, 9), max_position=8), "factors of 5 and 2 digits"),
        (lambda: MinesweeperTask(mine_rate=(0.5, 0.1)), "mine_rate"),
        (lambda: MinesweeperTask(mine_rate=0.5), "two shares"),
        (lambda: MinesweeperTask((0, 3)), "size must be a range"),
        (lambda: parse_two_ranges("1-2x1-2x1-2", "digits"), "one range or two"),
    ]:
        with pytest.raises(ConfigError, match=message):
            make()
    with pytest.raises(ConfigError, match="one number or one for each of 3 levels"):
        MultiplicationTask().position_ids("1*1", start=[1, 2])
    with pytest.raises(ConfigError, match="start"):
        MultiplicationTask(max_position=12).position_ids("1*1", start=12)
