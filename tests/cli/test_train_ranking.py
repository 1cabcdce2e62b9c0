"""`gossamer train --task ranking:FILE` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from gossamer.cli import main
from gossamer.files import read_json
from gossamer.retrieval import BlockRanker, write_ranking_rows

from ..retrieval.tiny_ranker import model, rows, tokenizer


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_ranking_rows(rows(), "rows.jsonl")
    write_ranking_rows(rows(4, seed=1), "held.jsonl")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def train(untrained: str, *more: str, task: str = "ranking:rows.jsonl") -> int:
    common = ("--quiet", "--device", "cpu", "--batch-size", "1")
    return run("train", "--task", task, "--model", untrained, *common, *more)


def test_it_leaves_a_run_folder_that_ranks(
    untrained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "ranking:rows.jsonl,aux_layer=1,aux_weight=0.5,query_position_offset=300"
    options = ("--steps", "3", "--lr", "0.01", "--seed", "4", "--test", "held.jsonl")
    assert train(untrained, *options, "--out", "run", task=task) == 0
    shown = capsys.readouterr().out
    assert "layer 1: precision at 1" in shown
    assert "the trained layer" in shown
    assert "chance 0.250, 4 queries, none of them trained on" in shown
    assert "next: gossamer rank DATA --run RUN --model run" in shown
    made = {path.name for path in Path("run").iterdir()}
    assert {"model.safetensors", "config.json", "report.html", "tokenizer.json"} <= made
    loaded = BlockRanker.from_pretrained("run")
    assert (loaded.layer, loaded.template.query_offset) == (1, 300)
    summary = read_json("run/summary.json")
    assert [cell["layer"] for cell in summary["cells"]] == [0, 1, 2]
    assert (summary["layer"], summary["seed"]) == (1, 4)
    assert read_json("run/ranking.json")["aux_weight"] == 0.5
    text = Path("run/config.toml").read_text()
    for line in ('path = "rows.jsonl"', "aux_layer = 1", "lr = 0.01", "seed = 4", "steps = 3"):
        assert line in text
    assert run("train", "--resume", "--out", "run", "--quiet", "--json", "--device", "cpu") == 0
    assert json.loads(capsys.readouterr().out)["cells"] == summary["cells"]
    assert train(untrained, "--out", "run", "--resume", "--steps", "5", task=task) == 2
    assert "begun with other settings" in capsys.readouterr().err


def test_held_out_rows_that_were_trained_on_are_counted(
    untrained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(untrained, "--steps", "1", "--test", "rows.jsonl", "--out", "run") == 0
    count = read_json("run/summary.json")["num_queries"]
    assert f"{count} queries, {count} of them trained on" in capsys.readouterr().out


def test_without_held_out_rows_the_page_shows_the_loss(untrained: str) -> None:
    assert train(untrained, "--steps", "1", "--out", "run") == 0
    assert read_json("run/summary.json")["cells"] == []
    assert not Path("run/figures/layers.svg").exists()
    assert Path("run/figures/loss.svg").exists()


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("ranking:none.jsonl", (), "none.jsonl"),
        ("ranking", (), "needs the option 'path'"),
        ("ranking:rows.jsonl,aux_wight=1", (), "did you mean 'aux_weight'"),
        ("ranking:rows.jsonl,aux_layer=3", (), "layer must be >= 0 and <= 2; got 3"),
        ("ranking:rows.jsonl,temperature=0", (), "temperature must be > 0"),
        ("ranking:rows.jsonl", ("--positions", "rope"), "--positions does not belong to ranking"),
        ("ranking:rows.jsonl", ("--test", "absent.jsonl"), "absent.jsonl"),
        ("ranking:rows.jsonl", ("--steps", "0"), "steps must be >= 1; got 0"),
    ],
)
def test_bad_input(
    untrained: str, task: str, more: tuple[str, ...], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert train(untrained, *more, task=task) == 2
    assert message in capsys.readouterr().err


def test_a_model_and_answers_are_needed(untrained: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--task", "ranking:rows.jsonl") == 2
    assert "ranking needs --model" in capsys.readouterr().err
    assert run("train", "--task", "ranking:rows.jsonl", "--model", "absent") == 2
    assert "absent must hold a causal language model" in capsys.readouterr().err
    row = {"query": "w1", "documents": ["w1", "w2"], "answer_ids": ["7"]}
    Path("wrong.jsonl").write_text(json.dumps(row) + "\n")
    assert train(untrained, task="ranking:wrong.jsonl") == 2
    assert "answer_ids must be among the 2 documents" in capsys.readouterr().err
