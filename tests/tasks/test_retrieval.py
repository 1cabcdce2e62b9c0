"""Sets: the layout, Python's own answers, laws of the samples, order, bad queries."""

from __future__ import annotations

import random

import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.tasks import ArgmaxTask, LookupTask, StructuredTask, build_task


def items_of(text: str) -> list[tuple[int, int]]:
    return [tuple(map(int, word.split(":"))) for word in text.split()]


def truth(name: str, text: str) -> str:
    """Return the class asked for, from the text of a sample up to its answer."""
    if name == "argmax":
        return str(max(items_of(text))[1])
    items, asked = text.split("?")
    return str(dict(items_of(items))[int(asked)])


# --- reference values ---


@pytest.mark.parametrize(
    ("task", "query", "tokens"),
    [
        (ArgmaxTask(num_priorities=100), "17:3 42:7 5:1", "$17:3 42:7 5:1 =7$"),
        (LookupTask(num_keys=64), "17:3 42:7 5:1 ?5=", "$17:3 42:7 5:1 ?5=1$"),
        (ArgmaxTask(num_classes=12), "0:11", "$0:11 =11$"),
        (LookupTask(num_keys=64), "0:0 0:1 63:9 ?63", "$0:0 0:1 63:9 ?63=9$"),
    ],
)
def test_the_layout(task: StructuredTask, query: str, tokens: str) -> None:
    example = task.example(query)
    assert task.symbols(example.tokens) == tokens
    # one token for each item, one that asks, the class, and an end token on each side
    assert len(example.tokens) == query.count(":") + 4
    assert example.position_ids.abs().sum() == 0
    assert example.loss_mask.tolist() == [False] * (len(example.tokens) - 2) + [True] * 2
    assert task.answer(query) == tokens.rpartition("=")[2].rstrip("$")
    assert len(set(task.vocab)) == len(task.vocab)


@pytest.mark.parametrize("name", ["argmax", "lookup"])
def test_samples_say_what_python_says(name: str, generator: torch.Generator) -> None:
    task = build_task(f"{name}:num_items=1-6,num_classes=5")
    sizes = set()
    for _ in range(40):
        batch = task.sample(8, generator=generator)
        sizes.add(batch.tokens.shape[1] - 4)
        for tokens in batch.tokens:
            query, _, answer = task.symbols(tokens).strip("$").rpartition("=")
            assert answer == truth(name, query)
            assert torch.equal(task.example(query).tokens, tokens)
    assert sizes == set(range(1, 7))


# --- laws and invariances ---


def test_the_largest_is_unique_and_the_others_uniform_below_it(generator: torch.Generator) -> None:
    task = ArgmaxTask((6, 6), num_priorities=4, num_classes=2)
    batch = task.sample(4000, generator=generator)
    marks = (batch.tokens[:, 1:-3] - task.first_item) // 2
    top, places = marks.max(1)
    assert ((marks == top[:, None]).sum(1) == 1).all()
    # the largest of six uniform draws of 0 to 3, where one of them is at least 1
    share = torch.bincount(top, minlength=4) / 4000
    law = torch.tensor([0.0, 2**6, 3**6 - 2**6, 4**6 - 3**6]) / 4**6
    assert (share - law).abs().max() < 0.025
    assert (torch.bincount(places, minlength=6) / 4000 - 1 / 6).abs().max() < 0.03
    below = marks[top == 3].flatten()
    others = torch.bincount(below[below < 3], minlength=3).float()
    assert (others / others.sum() - 1 / 3).abs().max() < 0.02


def test_the_key_asked_for_stands_once_and_the_others_are_uniform(
    generator: torch.Generator,
) -> None:
    task = LookupTask((9, 9), num_keys=4, num_classes=2)
    batch = task.sample(3000, generator=generator)
    keys = (batch.tokens[:, 1:-3] - task.first_item) // 2
    asked = batch.tokens[:, -3] - 2 - 2
    found = keys == asked[:, None]
    assert (found.sum(1) == 1).all()
    assert (torch.bincount(asked, minlength=4) / 3000 - 0.25).abs().max() < 0.04
    assert (found.float().mean(0) - 1 / 9).abs().max() < 0.03
    others = torch.bincount((keys - asked[:, None])[~found] % 4, minlength=4)
    assert others[0] == 0
    assert (others[1:] / others.sum() - 1 / 3).abs().max() < 0.02


@pytest.mark.parametrize("name", ["argmax", "lookup"])
def test_sets_of_thousands(name: str, generator: torch.Generator) -> None:
    cells = build_task(name).grid(num_items=[16, 2000])
    batch = cells[1].task.sample(4, generator=generator, split="test")
    assert batch.tokens.shape == (4, 2004)
    for tokens in batch.tokens:
        query, _, answer = cells[1].task.symbols(tokens).strip("$").rpartition("=")
        assert answer == truth(name, query)
    assert [c.coordinates["num_items"] for c in build_task(name).grid()] == [16, 64, 256, 1024]


@pytest.mark.parametrize(("name", "tail"), [("argmax", ""), ("lookup", " ?3")])
def test_order_does_not_matter(name: str, tail: str) -> None:
    task = build_task(name)
    draw = random.Random(0)
    items = ["9:1", "3:4", "7:2", "0:0"]
    answers = set()
    for _ in range(10):
        draw.shuffle(items)
        answers.add(task.answer(" ".join(items) + tail))
    assert len(answers) == 1


# --- by name, and bad input ---


def test_by_name() -> None:
    for spec in ("argmax:num_items=3,num_priorities=7", "lookup:num_keys=9,num_classes=3"):
        task = build_task(spec)
        options = {key: value for key, value in task.config.items() if key != "name"}
        assert build_task(spec.split(":")[0], **options).config == task.config


@pytest.mark.parametrize(
    ("task", "query", "message"),
    [
        (
            ArgmaxTask(num_priorities=100),
            "3:1 9:2 9:3",
            "one item must have the highest priority; got 9 2 times",
        ),
        (ArgmaxTask(num_priorities=100), "", "at least one item"),
        (ArgmaxTask(num_priorities=100), "3:1 9", "item 2 must be a priority and a class.*got '9'"),
        (
            ArgmaxTask(num_priorities=100),
            "100:1",
            "priority of item 1 must be a number from 0 to 99",
        ),
        (
            ArgmaxTask(num_priorities=100),
            "3:1 -1:2",
            "priority of item 2 must be a number from 0 to 99",
        ),
        (ArgmaxTask(num_priorities=100), "3:10", "class of item 1 must be a number from 0 to 9"),
        (ArgmaxTask(num_priorities=100), f"{'9' * 5000}:1", "from 0 to 99"),
        (ArgmaxTask(num_priorities=100), "３:1", "from 0 to 99"),
        (LookupTask(num_keys=64), "3:1 5:2", "must end with the key"),
        (LookupTask(num_keys=64), "3:1 5:2 ?4", "must stand once; got 4 0 times"),
        (LookupTask(num_keys=64), "3:1 3:2 ?3", "must stand once; got 3 2 times"),
        (LookupTask(num_keys=64), "3:1 5:2 ?", "key asked for must be a number from 0 to 63"),
        (LookupTask(num_keys=64), "?3", "at least one item"),
    ],
)
def test_bad_queries(task: StructuredTask, query: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        task.encode(query)


@pytest.mark.parametrize("options", [{"num_items": (5, 2)}, {"num_items": 0}, {"num_classes": 1}])
def test_bad_options(options: dict) -> None:
    for kind in (ArgmaxTask, LookupTask):
        with pytest.raises(ConfigError):
            kind(**options)
    with pytest.raises(ConfigError, match="num_keys"):
        LookupTask(num_keys=1)
    with pytest.raises(ConfigError, match="num_priorities"):
        ArgmaxTask(num_priorities=1)
