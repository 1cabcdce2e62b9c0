"""`gossamer train` and `gossamer solve` on files of the user's own: rows and texts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.files import read_json
from gossamer.tasks import TASK_NAMES

FAST = ["--steps", "3", "--batch-size", "4", "--quiet", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def write(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    rows = [json.dumps({"query": query, "answer": answer}) for query, answer in pairs]
    Path(name).write_text("\n".join(rows))
    return name


def sums(size: int, digits: int, seed: int = 0) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    rows = {}
    while len(rows) < size:
        a, b = (draw.randrange(10 ** draw.randint(1, digits)) for _ in range(2))
        rows[f"{a}+{b}"] = f"{a + b}"
    return list(rows.items())


@pytest.mark.slow
def test_a_file_of_rows_from_training_to_answers(capsys: pytest.CaptureFixture[str]) -> None:
    rows, longer = sums(200, 3), [(f"{10**n}+{10**n}", f"{2 * 10**n}") for n in range(7, 20)]
    write("my.jsonl", rows)
    write("longer.jsonl", longer)
    options = ["--task", "my.jsonl", "--test", "longer.jsonl"]
    assert run("train", *options, *[word for word in FAST if word != "--quiet"]) == 0
    captured = capsys.readouterr()
    for text in (
        "rows to train on",
        "longer.jsonl: 13 rows to test on",
        "these are few",
        "coupling: field 1 of the answer is aligned at the units with the numbers 1, 2",
        "another coupling: --coupling fields",
    ):
        assert text in captured.err
    assert captured.err.count("  tokens") == captured.err.count("  ids") == 3
    assert "length 41, part test: exact match 0.000 on " in captured.out
    cells = read_json("runs/train/summary.json")["cells"]
    assert sum(cell["num_samples"] for cell in cells if cell["part"] == "test") == 13
    html = Path("runs/train/report.html").read_text()
    assert "Training run: my.jsonl" in html
    assert "length 41, part test" in html

    for answers in ("my.jsonl", "longer.jsonl"):
        Path(answers).rename(f"away-{answers}")
    assert run("solve", "runs/train", "12+34") == 0  # nothing there to compare with
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(captured.out.splitlines()) == 1
    Path("away-my.jsonl").rename("my.jsonl")
    assert run("solve", "runs/train", rows[0][0]) == 1
    assert "1 of 1 answers are wrong" in capsys.readouterr().err
    assert run("solve", "runs/train", "12+34+5") == 2
    err = capsys.readouterr().err
    assert f"gossamer: query must have the form of '{rows[0][0]}', with 2 numbers; got 3" in err
    Path("away-longer.jsonl").rename("longer.jsonl")
    assert run("train", "--resume", "--quiet") == 0
    assert not Path("runs/train-2").exists()


def test_rows_of_json_are_queries_too(capsys: pytest.CaptureFixture[str]) -> None:
    write("my.jsonl", sums(60, 2))
    assert run("train", "--task", "my.jsonl", *FAST) == 0
    capsys.readouterr()
    write("ask.jsonl", [("1+2", "3"), ("4+4", "8")])
    Path("ask.jsonl").write_text(Path("ask.jsonl").read_text() + '\n{"query": "123456+7"}\n')
    assert run("solve", "runs/train", "ask.jsonl", "--json", "--out", "answers") == 1
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [row.get("correct") for row in rows] == [False, False, None]
    assert "2 of 2 answers are wrong" in captured.err
    assert run("solve", "runs/train", "ask.jsonl", "--no-check") == 0
    # what `solve` wrote can be asked again
    assert run("solve", "runs/train", "answers/answers.jsonl") == 0
    assert "3 of 3 answers checked, all exact" in capsys.readouterr().err
    for line, message in (
        ("{", "bad.jsonl, line 2: expected a JSON row .*not valid JSON"),
        ('{"answer": "3"}', "bad.jsonl, line 2: expected a JSON row with texts"),
        ('{"query": "1+x", "answer": "3"}', "bad.jsonl, line 2: query must hold characters"),
    ):
        Path("bad.jsonl").write_text(f'{{"query": "1+2"}}\n{line}\n')
        assert run("solve", "runs/train", "bad.jsonl") == 2
        assert re.search(message, capsys.readouterr().err)


def test_a_missing_file_is_no_query_but_slashes_are_fine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pairs = [(f"{y}/{m}.a", f"{m}/{y}") for y in range(100, 140) for m in (1, 5, 12)]
    write("my.jsonl", pairs)
    assert run("train", "--task", "my.jsonl", *FAST) == 0
    capsys.readouterr()
    assert run("solve", "runs/train", "2026/11.a") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    for name in ("none.txt", "runs/none.jsonl"):
        assert run("solve", "runs/train", name) == 2
        assert f"{name} looks like a file and does not exist" in capsys.readouterr().err
    for name in ("some/folder/file", "file.query"):
        assert run("solve", "runs/train", name) == 2
        err = capsys.readouterr().err
        assert "query must hold characters of my.jsonl only" in err
        assert f"Nor is there a file {name}: check the path." in err


def test_the_help_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--help") == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(name in words for name in TASK_NAMES if name != "file")


@pytest.mark.slow
def test_couplings_by_option(capsys: pytest.CaptureFixture[str]) -> None:
    write("my.jsonl", sums(60, 2))
    assert run("train", "--task", "my.jsonl", "--coupling", "none", *FAST) == 0
    assert 'positions = "rope"' in Path("runs/train/config.toml").read_text()
    Path("own_rules.py").write_text(
        "def rule(query):\n    n = len(query)\n    return range(n + 1), range(n + 1, n + 9)\n"
    )
    assert run("train", "--task", "my.jsonl", "--coupling", "own_rules:rule", *FAST) == 0
    assert 'coupling = "own_rules:rule"' in Path("runs/train-2/config.toml").read_text()
    capsys.readouterr()
    assert run("solve", "runs/train-2", "123456+7") == 0
    rows = [
        {"query": q, "answer": q[::-1], "groups": [[0, 1], [3, 2]]}
        for q in ("ab", "ba", "bb", "aa")
    ]
    Path("groups.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run("train", "--task", "groups.jsonl", *FAST) == 0
    capsys.readouterr()
    assert run("solve", "runs/train-3", "ab") in (0, 1)
    assert run("solve", "runs/train-3", "abab") == 2
    err = capsys.readouterr().err
    assert "groups give ids to these rows only" in err
    assert "--coupling module:function" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "none.jsonl"], "none.jsonl does not exist"),
        (["--task", "empty.jsonl"], "empty.jsonl must hold one row a line"),
        (["--task", "my.jsonl", "--test", "none.jsonl"], "none.jsonl does not exist"),
        (["--task", "my.jsonl", "--test", "other.jsonl"], "other.jsonl, line 1: query must hold"),
        (["--task", "my.jsonl", "--coupling", "groups"], "every row must have the key 'groups'"),
        (["--task", "my.jsonl", "--coupling", "auto:"], "needs the module 'auto'"),
        (["--task", "my.jsonl", "--coupling", "atuo"], "did you mean 'auto'"),
        (["--task", "my.jsonl,couplings=none"], "did you mean 'coupling'"),
        (["--task", "addition", "--coupling", "none"], "--coupling belongs to a file of your own"),
        (["--test", "my.jsonl"], "--test belongs to a file of your own; got no --task"),
        (["--task", "my.json"], "unknown task 'my.json'"),
        (["--task", "addition", "--model", "encoders"], "did you mean 'encoder'"),
        (["--task", "text:none.txt"], "none.txt does not exist"),
    ],
)
def test_user_errors(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("my.jsonl", sums(30, 2))
    write("other.jsonl", [("1-2", "3")])
    Path("empty.jsonl").write_text("")
    assert run("train", *options, *FAST) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_text_from_training_to_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    Path("song.txt").write_text("la la li la lu " * 200)
    assert run("train", "--task", "text:song.txt,length=6", *FAST) == 0
    out = capsys.readouterr().out
    assert "length 6: cross-entropy " in out
    assert " nats a token on 200 samples" in out
    html = Path("runs/train/report.html").read_text()
    assert "Cross-entropy beyond the trained length" in html
    assert read_json("runs/train/summary.json")["cells"][0]["cross_entropy"] > 0
    assert run("solve", "runs/train", "la la") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(captured.out.rstrip("\n")) == 2


def test_an_encoder_by_option_and_a_heat_map(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text("[model]\ndim = 16\nnum_layers = 1\nnum_heads = 2\n")
    options = ["--task", "lego:num_variables=4", "--model", "encoder", "--config", "job.toml"]
    assert run("train", *options, *FAST) == 0
    assert 'name = "encoder"' in Path("runs/train/config.toml").read_text()
    assert Path("runs/train/report.html").exists()
    capsys.readouterr()
    assert run("solve", "runs/train", "b=-a;a=+1") in (0, 1)


def test_the_working_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--task", "parity:length=1-3", *FAST) == 0
    capsys.readouterr()
    assert run("solve", "runs/train", "101", "--json") in (0, 1)
    captured = capsys.readouterr()
    row = json.loads(captured.out)
    if row.get("scratchpad"):
        assert f"101: {row['scratchpad']}" in captured.err
