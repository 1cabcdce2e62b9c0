"""Jobs of other tasks: settings that suit them, levels, encoders, a user's file, a text."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path

import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.models import Decoder, Encoder
from gossamer.tasks import TASK_NAMES, FileTask, build_task
from gossamer.train import TrainJob, load_run, solve_queries, train_task

TINY = {"dim": 16, "num_heads": 2, "num_layers": 1, "feed_forward": "gelu"}
QUICK = {"steps": 3, "device": "cpu"}


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "song.txt"
    path.write_text("la la li la lu " * 120)
    return str(path)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    draw = random.Random(0)
    path = tmp_path / "my.jsonl"
    pairs = {f"{draw.randrange(1000)}-{n:03d}": n for n in range(200)}
    rows = [{"query": q, "answer": f"{n:03d}.{q.split('-')[0]}"} for q, n in pairs.items()]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def job(task: dict, **tables: dict) -> TrainJob:
    return TrainJob.from_dict({"task": task, "train": QUICK, **tables}, "test")


@pytest.mark.parametrize("name", [name for name in TASK_NAMES if name not in ("file", "pairs")])
def test_every_task_trains_is_kept_and_read_back(name: str, tmp_path: Path, text: str) -> None:
    options = {"path": text} if name.endswith("text") else {}
    small = job({"name": name, **options}, model=TINY, batch_size=2)
    result = train_task(small, tmp_path / "run", quiet=True, num_samples=2)
    for row in result.rows():
        assert 0 <= row["exact_match"] <= 1
        assert row["cross_entropy"] > 0
    model, task = load_run(tmp_path / "run")
    assert isinstance(model, Encoder if name == "masked_text" else Decoder)
    kept = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["task"]
    assert kept == json.loads(json.dumps(task.config))
    again = build_task(kept.pop("name"), **kept)
    assert again.config == task.config
    one, two = (t.stream(2, seed=1).batch(0) for t in (task, again))
    assert torch.equal(one.tokens, two.tokens)


def test_settings_follow_the_task(text: str) -> None:
    assert job({"name": "addition"}).task == {"name": "addition", "carry_chains": 0.3}
    by_task = {
        name: TrainJob.from_dict({"task": {"name": name}}, "test")
        for name in ("addition", "multiplication", "argmax", "text", "markov")
    }
    assert by_task["addition"].model["positions"] == "coupled_relative"
    assert by_task["multiplication"].model["num_layers"] == 2
    assert by_task["multiplication"].batch_size == 32
    assert by_task["argmax"].model["positions"] == "none"
    assert by_task["text"].model["positions"] == by_task["markov"].model["positions"] == "rope"
    assert by_task["text"].train.lr < by_task["addition"].train.lr
    own = job({"name": "text", "path": text}, model={"positions": "alibi"}, batch_size=7)
    assert (own.model["positions"], own.model["num_layers"], own.batch_size) == ("alibi", 2, 7)
    plain = TrainJob({"name": "addition"})
    assert plain.model == TrainJob.from_dict({"task": {"name": "addition"}}, "test").model


@pytest.mark.parametrize(
    ("positions", "levels"),
    [
        ("coupled_relative", 2),
        ({"name": "coupled_relative", "window": 2}, 2),
        ({"name": "coupled", "max_position": 40}, 2),
        ({"name": "coupled_relative", "levels": 2}, 2),
        ("rope", 1),
        ({"name": "fire", "share": True}, 1),
    ],
)
def test_levels_of_the_task_reach_the_encoding(positions: object, levels: int) -> None:
    made = job({"name": "multi_addition"}, model={**TINY, "positions": positions})
    task = made.build_task()
    model = made.build_model(task)
    assert model.positions[0].levels == levels
    batch = task.stream(2, seed=0).batch(0)
    assert model(batch.tokens, batch.position_ids).shape[:2] == batch.tokens.shape


def test_an_encoder_trains_and_answers(tmp_path: Path) -> None:
    made = job({"name": "minesweeper", "size": 3}, model={**TINY, "name": "encoder"}, batch_size=2)
    train_task(made, tmp_path, quiet=True, num_samples=2)
    model, task = load_run(tmp_path)
    assert isinstance(model, Encoder)
    queries = ["EEM/EEE/MEE", "EM/EE"]
    results = solve_queries(model, task, queries)
    example = task.example(queries[0])
    blanked = torch.where(example.loss_mask, task.pad, example.tokens)
    best = model(blanked[None], example.position_ids[None])[0].argmax(-1)
    assert results[0].answer == task.decode(best[example.loss_mask])
    alone = [solve_queries(model, task, [query])[0] for query in queries]
    assert results == alone


def test_an_encoder_fills_the_blanks_of_a_text(tmp_path: Path, text: str) -> None:
    made = job({"name": "masked_text", "path": text, "length": 9}, model=TINY, batch_size=2)
    train_task(made, tmp_path / "run", quiet=True, num_samples=2)
    model, task = load_run(tmp_path / "run")
    results = solve_queries(model, task, ["la l_ la_", "l_"])
    assert [len(result.answer) for result in results] == [2, 1]
    assert [result.correct for result in results] == [None, None]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "decodr"}, "unknown model 'decodr'; did you mean 'decoder'"),
        ({"name": 3}, "unknown model '3'"),
        ({"name": "encoder", "loops": 2}, r"unknown key 'loops' in \[model\]"),
    ],
)
def test_bad_models(model: dict, message: str) -> None:
    made = job({"name": "addition"}, model=model)
    with pytest.raises(ConfigError, match=message):
        made.build_model(made.build_task())


# --- a user's own file ---


def test_a_users_file_is_kept_with_what_was_found(tmp_path: Path, rows: str) -> None:
    made = job({"name": "file", "path": rows}, model=TINY, batch_size=4)
    assert made.task["coupling"]["levels"] == 2
    result = train_task(made, tmp_path / "run", quiet=True)
    own = FileTask(rows)
    assert sum(row["num_samples"] for row in result.rows()) == own.count("held out")
    Path(rows).unlink()
    model, task = load_run(tmp_path / "run")
    assert task.config == own.config
    result = solve_queries(model, task, ["12345-678"])[0]
    assert result.correct is None
    assert "correct" not in result.to_dict()
    again = job({"name": "file", "path": rows, **task.config}, model=TINY, batch_size=4)
    with pytest.raises(DataError, match=r"my\.jsonl does not exist"):
        train_task(again, tmp_path / "again", quiet=True)


def test_a_users_file_resumes_and_refuses_another(tmp_path: Path, rows: str) -> None:
    made = job({"name": "file", "path": rows}, model=TINY, batch_size=4)
    first = train_task(made, tmp_path / "run", quiet=True)
    assert train_task(made, tmp_path / "run", resume=True, quiet=True) == first
    with Path(rows).open("a") as file:
        file.write('\n{"query": "7-001", "answer": "001.7"}')
    with pytest.raises(DataError, match="has changed"):
        train_task(made, tmp_path / "run", resume=True, quiet=True)
    anew = job({"name": "file", "path": rows}, model=TINY, batch_size=4)
    with pytest.raises(DataError, match="begun with other settings"):
        train_task(anew, tmp_path / "run", resume=True, quiet=True)


def test_numbers_that_must_be_told_apart_get_two_layers(tmp_path: Path) -> None:
    draw = random.Random(0)
    for operation, layers in (("+", 1), ("-", 2)):
        path = tmp_path / f"{layers}.jsonl"
        pairs = [sorted(draw.randrange(10**n) for _ in range(2)) for n in (1, 2, 3, 4) * 20]
        rows = {f"{b}{operation}{a}": eval(f"{b}{operation}{a}") for a, b in pairs}
        lines = [json.dumps({"query": q, "answer": str(n)}) for q, n in rows.items()]
        path.write_text("\n".join(lines))
        assert job({"name": "file", "path": str(path)}).model["num_layers"] == layers
    broken = {"name": "file", "path": "x", "facts": {}, "coupling": {"levels": 2, "answer": [3]}}
    with pytest.raises(ConfigError, match="facts"):
        job(broken).build_task()


def test_plain_ids_get_an_uncoupled_model(rows: str) -> None:
    made = job({"name": "file", "path": rows, "coupling": "none"})
    assert (made.model["positions"], made.model["num_layers"]) == ("rope", 2)


# --- answers ---


class Counting(FileTask):
    """A task that counts how often a query is read."""

    reads = 0

    def prompt(self, query: str, *, start: int | None = None) -> tuple:
        type(self).reads += 1
        return super().prompt(query, start=start)

    def scratchpad(self, tokens: object) -> str:
        return f"{len(tokens)} tokens"


def test_a_query_is_read_once_and_its_working_kept(rows: str) -> None:
    task = Counting(rows)
    model = Decoder(task.vocab_size, 16, 1, 2)
    known = task.rows()[0]
    results = solve_queries(model, task, ["1-002", known.query, "34-005"])
    assert Counting.reads == 3
    assert [result.correct for result in results][::2] == [None, None]
    assert results[1].correct is (results[1].answer == known.answer)
    assert all(result.scratchpad.endswith(" tokens") for result in results)
    assert results[0].to_dict().keys() == {"query", "answer", "scratchpad"}


def test_names_of_queries_stand_in_messages(rows: str) -> None:
    task = FileTask(rows)
    model = Decoder(task.vocab_size, 16, 1, 2)
    with pytest.raises(DataError, match=r"^q\.txt, line 7: query must have the form of"):
        solve_queries(model, task, ["1-002", "1-2-3"], names=["q.txt, line 5", "q.txt, line 7"])
    with pytest.raises(DataError, match=r"^query must have the form"):
        solve_queries(model, task, ["1-2-3"], names=[""])
