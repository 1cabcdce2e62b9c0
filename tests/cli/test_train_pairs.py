"""Neighbours for `gossamer train`: mined into a file, read back, refused for other targets."""

from __future__ import annotations

from pathlib import Path

import pytest

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
