"""Chains of assignments: an interpreter of their own, what is scored, shortcuts, bad queries."""

from __future__ import annotations

import random

import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.tasks import Batch, LegoTask, build_task, collate, guess_from_minus_signs


def solve(text: str) -> dict[str, int]:
    """Return the value of every variable, by rewriting clauses until nothing is left."""
    open_clauses = dict(clause.split("=") for clause in text.strip(";").split(";"))
    values: dict[str, int] = {}
    while open_clauses:
        for name, right in list(open_clauses.items()):
            known = 1 if right[1] == "1" else values.get(right[1])
            if known is not None:
                values[name] = known if right[0] == "+" else -known
                del open_clauses[name]
    return values


def depths(text: str) -> dict[str, int]:
    """Return the place in the chain of every variable, from 1."""
    parents = {clause[0]: clause[3] for clause in text.strip(";").split(";")}

    def depth(name: str) -> int:
        return 0 if name == "1" else 1 + depth(parents[name])

    return {name: depth(name) for name in parents}


def texts(task: LegoTask, batch: Batch) -> list[str]:
    """Return the clauses of every sample, without the answer."""
    return [task.symbols(row).strip("$").partition(">")[0] for row in batch.tokens]


# --- reference values ---


def test_the_layout() -> None:
    task = LegoTask()
    example = task.example("b=-a;a=+1;c=+b")
    assert task.symbols(example.tokens) == "$b=-a;a=+1;c=+b;>-+-$"
    levels = example.position_ids.T.tolist()
    assert levels[0] == [0, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 1, 2, 3, 4, 0]
    assert levels[1] == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 6, 6, 6, 0]
    assert example.loss_mask.tolist() == [False] * 17 + [True] * 4
    assert task.answer("b=-a;a=+1;c=+b") == "-+-"
    assert task.symbols(task.encode(" b = - a ; a=+1;c=+b;> ")) == "$b=-a;a=+1;c=+b;>"
    shifted = task.position_ids("a=+1", start=[3, 2])
    assert shifted.T.tolist() == [[0, 4, 4, 4, 4, 4, 3, 4, 0], [0, 2, 3, 4, 5, 6, 7, 7, 0]]


@pytest.mark.parametrize("n", [1, 2, 12, 26])
def test_answers_of_samples(n: int, generator: torch.Generator) -> None:
    task = LegoTask(n, num_supervised=26)
    batch = task.sample(40, generator=generator)
    for row, text in zip(batch.tokens, texts(task, batch), strict=True):
        values = solve(text)
        assert len(values) == n
        wanted = "".join("+" if value > 0 else "-" for value in values_in_order(text, values))
        assert task.symbols(row).rstrip("$").partition(">")[2] == wanted == task.answer(text)
        assert torch.equal(task.example(text).tokens, row)
        chain = sorted(depths(text).values())
        assert chain == list(range(1, n + 1))


def values_in_order(text: str, values: dict[str, int]) -> list[int]:
    return [values[clause[0]] for clause in text.strip(";").split(";")]


def test_trees_and_several_roots_are_answered() -> None:
    assert LegoTask().answer("c=-a;a=-1;b=+a;d=+1;e=-d") == "+--+-"
    draw = random.Random(1)
    for _ in range(50):
        names = draw.sample("abcdefghijkl", 8)
        clauses = [
            f"{name}={draw.choice('+-')}{draw.choice(['1', *names[:place]])}"
            for place, name in enumerate(names)
        ]
        if not clauses[0].endswith("1"):
            continue
        draw.shuffle(clauses)
        text = ";".join(clauses)
        found = values_in_order(text, solve(text))
        assert LegoTask().answer(text) == "".join("+" if value > 0 else "-" for value in found)


def test_flipping_the_root_flips_every_value(generator: torch.Generator) -> None:
    task = LegoTask(9)
    flip = str.maketrans("+-", "-+")
    for text in texts(task, task.sample(30, generator=generator)):
        root = next(clause for clause in text.split(";") if clause.endswith("1"))
        other = text.replace(root, root.translate(flip))
        assert task.answer(other) == task.answer(text).translate(flip)


# --- what is scored ---


def test_training_scores_the_first_of_the_chain_and_blanks_the_rest(
    generator: torch.Generator,
) -> None:
    task = LegoTask(8, num_supervised=3)
    batch = task.sample(50, generator=generator)
    for row, mask, text in zip(batch.tokens, batch.loss_mask, texts(task, batch), strict=True):
        places = [depths(text)[clause[0]] for clause in text.strip(";").split(";")]
        assert mask[-9:].tolist() == [place <= 3 for place in places] + [True]
        assert not mask[:-9].any()
        truth = task.example(text).tokens
        assert torch.equal(row[mask], truth[mask])
        assert (row[-9:][~mask[-9:]] == task.pad).all()
    whole = task.sample(5, generator=generator, split="test")
    assert whole.loss_mask.sum(1).tolist() == [9] * 5


def test_a_cell_scores_one_place_of_the_chain(generator: torch.Generator) -> None:
    task = LegoTask(4, num_supervised=2)
    cells = task.grid()
    assert [tuple(cell.coordinates.values()) for cell in cells] == [
        (n, place) for n in (4, 8) for place in range(1, n + 1)
    ]
    for cell in cells:
        batch = cell.task.sample(20, generator=generator, split="test")
        n, place = cell.coordinates["num_variables"], cell.coordinates["position"]
        assert batch.loss_mask.sum(1).tolist() == [1] * 20
        rows = zip(batch.tokens, batch.loss_mask, texts(task, batch), strict=True)
        for row, mask, text in rows:
            name = text.split(";")[int(mask[-n - 1 :].float().argmax())][0]
            assert depths(text)[name] == place
            assert task.symbols(row[mask]) == ("+" if solve(text)[name] > 0 else "-")
            # every other answer is blank, the end token too
            assert (row[-n - 1 :] == task.pad).sum() == n
    assert [c.coordinates["position"] for c in task.grid(num_variables=[3], position=[2, 5])] == [2]


def test_signs_and_orders_are_uniform(generator: torch.Generator) -> None:
    task = LegoTask(3, num_supervised=3)
    batch = task.sample(1800, generator=generator)
    orders: dict[tuple[int, ...], int] = {}
    for text in texts(task, batch):
        places = depths(text)
        key = tuple(places[clause[0]] for clause in text.strip(";").split(";"))
        orders[key] = orders.get(key, 0) + 1
    assert len(orders) == 6
    # 20.5 is the 99.9 % point of 5 degrees of freedom
    assert sum((count - 300) ** 2 / 300 for count in orders.values()) < 20.5
    minus = (batch.tokens[:, [3, 8, 13]] == task.vocab.index("-")).float().mean(0)
    assert (minus - 0.5).abs().max() < 0.05
    names = torch.bincount(batch.tokens[:, 1] - 2, minlength=26).float()
    # 54.1 is the 99.9 % point of 25 degrees of freedom
    assert ((names - 1800 / 26) ** 2 / (1800 / 26)).sum() < 54.1


# --- the shortcut ---


@pytest.mark.parametrize("place", [1, 7, 8])
def test_counting_minus_signs_solves_the_last_variable_only(
    place: int, generator: torch.Generator
) -> None:
    cell = LegoTask(8).grid(num_variables=[8], position=[place])[0]
    batch = cell.task.sample(1000, generator=generator, split="test")
    right = (guess_from_minus_signs(batch.tokens) == batch.tokens[batch.loss_mask]).float().mean()
    assert right == 1 if place == 8 else 0.4 < right < 0.6


# --- use, and bad input ---


def test_by_name_and_in_batches(generator: torch.Generator) -> None:
    task = build_task("lego:num_variables=5,num_supervised=2")
    assert task.config == {"name": "lego", "num_variables": 5, "num_supervised": 2}
    cell = task.grid()[3].task
    options = {key: value for key, value in cell.config.items() if key != "name"}
    assert build_task("lego", **options).config == cell.config
    assert collate([task.example("a=+1"), task.example("a=+1;b=-a")]).tokens.shape == (2, 15)
    table = LegoTask(5, max_position=[10, 6])
    starts = table.sample(300, generator=generator).position_ids[:, 1]
    assert set(starts[:, 0].tolist()) == set(range(2, 7))
    assert set(starts[:, 1].tolist()) == {1}
    assert [c.coordinates["num_variables"] for c in table.grid()] == [5] * 5


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("a=+1;a=-1", "each variable once; got 'a' in clauses 1 and 2"),
        ("b=-a", "set one variable to 1, such as b=\\+1; got none"),
        ("a=+1;b=-c", "got 'b' from 'c', which no clause sets"),
        ("a=+1;b=-c;c=+b", "got a circle from 'b'"),
        ("a=+1;b=+b", "got a circle from 'b'"),
        ("a=+b;b=+a", "set one variable to 1"),
        ("a=1", "got 'a=1' as clause 1"),
        ("a=+1;;b=+a", "got '' as clause 2"),
        ("a=+1;B=+a", "got 'B=\\+a' as clause 2"),
        ("", "got '' as clause 1"),
        ("a=+2", "got 'a=\\+2' as clause 1"),
    ],
)
def test_bad_queries(query: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        LegoTask().encode(query)


@pytest.mark.parametrize(
    "options",
    [{"num_variables": 27}, {"num_variables": 0}, {"num_supervised": 0}, {"position": 13},
     {"max_position": [12, 6]}, {"max_position": [20, 5]}, {"max_position": [1, 2, 3]}],
)  # fmt: skip
def test_bad_options(options: dict) -> None:
    with pytest.raises(ConfigError):
        LegoTask(**options)
