"""Neighbours for `gossamer train`: mined into a file, read back, refused for other targets."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.cli._train_pairs import neighbors_of
from gossamer.errors import DataError
from gossamer.tasks import PairsTask

WORDS = ["red", "green", "blue", "old", "new", "big", "small", "cold"]


def task_of(path: Path, name: str) -> PairsTask:
    lines = [f"{a} {b}\tthe {a} {name} is near the {b} one" for a in WORDS for b in WORDS]
    path.write_text("\n".join(lines))
    return PairsTask(path)


def test_neighbours_are_mined_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = task_of(tmp_path / "my.tsv", "house")
    table = neighbors_of(tmp_path / "nb.npz", task)
    assert "neighbours a target" in capsys.readouterr().err
    assert table.targets == tuple(task.targets("train"))
    held = set(task.targets("test"))
    assert held
    assert not held & {table.corpus[place] for place in table.indices.ravel() if place >= 0}
    again = neighbors_of(tmp_path / "nb.npz", task)
    assert capsys.readouterr().err == ""
    assert again.fingerprint == table.fingerprint
    with pytest.raises(DataError, match="must have been mined from these targets"):
        neighbors_of(tmp_path / "nb.npz", task_of(tmp_path / "other.tsv", "garden"))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def test_pairs_from_training_to_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task_of(Path("my.tsv"), "house")
    train = ["train", "--task", "pairs:my.tsv", "--steps", "30", "--batch-size", "8", "--quiet"]
    assert run(*train, "--neighbors", "nb.npz", "--alpha", "0.2", "--out", "near") == 0
    assert "split test: BLEU" in capsys.readouterr().out
    assert Path("nb.npz").exists()
    kept = tomllib.loads(Path("near/config.toml").read_text())
    assert kept["loss"] == {"name": "sequence_smoothing", "neighbors": "nb.npz", "alpha": 0.2}
    assert kept["model"]["name"] == "seq2seq"
    assert "against all their targets" in Path("near/report.html").read_text()
    run("solve", "near", "red green")
    assert capsys.readouterr().out.startswith("the ")
    assert run(*train, "--loss", "smoothing", "--alpha", "0.1", "--out", "words") == 0
    capsys.readouterr()

    task_of(Path("my.tsv"), "garden")
    for options, words in (
        (["--neighbors", "nb.npz"], "must have been mined from these targets"),
        (["--neighbors", "nb.npz", "--loss", "smoothing"], "has a loss of its own"),
        (["--neighbors", "nb.npz", "--model", "decoder"], "belongs to pairs with the model"),
        (["--loss", "forward"], "unknown loss for pairs of texts 'forward'"),
    ):
        assert run(*train, *options) == 2
        assert words in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_page_without_an_axis_has_no_figure_of_it() -> None:
    from gossamer.cli._train_page import _no_axis

    assert _no_axis([{"split": "test", "exact_match": 0.5}], ["split"])
    assert not _no_axis([{"digits": 10, "exact_match": 0.5}], ["digits"])
