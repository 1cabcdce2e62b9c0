"""The ground floor: checks, files, progress."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.checks import (
    check_choice,
    check_finite,
    check_given,
    check_keys,
    check_range,
    check_same_shape,
    check_shape,
)
from gossamer.errors import (
    ConfigError,
    DataError,
    GossamerError,
    MissingDependencyError,
    ShapeError,
)
from gossamer.files import choose_folder, read_json, read_toml, replacing, write_json
from gossamer.progress import progress


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_shapes(make: object) -> None:
    check_shape(make((2, 3)), (2, None), "x")
    with pytest.raises(ShapeError, match=r"x must have the shape \(2, any\); got \(3, 3\)"):
        check_shape(make((3, 3)), (2, None), "x")
    with pytest.raises(
        ShapeError, match=r"labels must have the shape of logits, \(2, 1\); got \(2,\)"
    ):
        check_same_shape(make((2, 1)), make((2,)), ("logits", "labels"))


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_finite(array: object) -> None:
    check_finite(array([1.0, 2.0]), "x")
    check_finite(3.0, "x")
    with pytest.raises(DataError, match="got 2 NaN or infinite"):
        check_finite(array([1.0, math.nan, math.inf]), "x")


def test_choices_and_keys_suggest() -> None:
    with pytest.raises(ConfigError, match=r"unknown colour 'blu'; did you mean 'blue'\?"):
        check_choice("blu", ["red", "blue"], "colour")
    with pytest.raises(ConfigError, match="Known: a, b"):
        check_choice("zzz", "ab", "letter")
    with pytest.raises(
        ConfigError, match=r"unknown key 'stepz' in run\.toml; did you mean 'steps'"
    ):
        check_keys(["stepz"], ["steps", "lr"], "run.toml")
    with pytest.raises(ConfigError, match="needs the option 'a'; got b"):
        check_given({"b": 1}, "a", "thing")


@pytest.mark.parametrize("value", [-1.0, 3.0, math.nan, math.inf])
def test_ranges(value: float) -> None:
    check_range(1.0, "x", low=0, high=2)
    with pytest.raises(ConfigError, match="x must be >= 0 and <= 2; got"):
        check_range(value, "x", low=0, high=2)
    with pytest.raises(ConfigError, match="x must be > 0"):
        check_range(0, "x", low=0, open_low=True)


def test_every_error_is_ours_and_a_builtin_too() -> None:
    assert issubclass(ShapeError, GossamerError)
    assert issubclass(ShapeError, ValueError)
    error = MissingDependencyError("pyspark", "spark")
    assert isinstance(error, ImportError)
    assert 'pip install "gossamer[spark]"' in str(error)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "a" / "f.txt"

    def break_off() -> None:
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    assert list((tmp_path / "a").iterdir()) == []
    write_json(target, {"b": math.nan, "a": [math.inf, 1.5], "c": "é"})
    assert json.loads(target.read_text("utf-8")) == {"b": None, "a": [None, 1.5], "c": "é"}
    assert list(read_json(target)) == ["b", "a", "c"]


def test_files_name_the_place(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{\n  "a": 1,\n  "b" 2\n}')
    with pytest.raises(DataError, match=r"x\.json, line 3, column 7: not valid JSON"):
        read_json(path)
    path.write_text("[1]")
    with pytest.raises(DataError, match="must hold a JSON object; got a list"):
        read_json(path)
    path.write_bytes(b"a\xff")
    with pytest.raises(DataError, match=r"x\.json, line 1, column 2: .* got the byte 0xff"):
        read_toml(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_toml(tmp_path)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_folder("runs/x", None) == Path("runs/x")
    assert choose_folder("runs/x", None) == Path("runs/x-2")
    Path("runs/x/config.toml").touch()
    assert choose_folder("runs/x", None, resume=True) == Path("runs/x")  # x-2 was never begun
    Path("runs/x/config.toml").unlink()
    assert choose_folder("runs/x", "runs/x") == Path("runs/x")  # empty
    Path("runs/x/f").touch()
    with pytest.raises(DataError, match="new or empty folder; runs/x has content"):
        choose_folder("runs/x", "runs/x")
    assert choose_folder("runs/x", "runs/x", resume=True) == Path("runs/x")


def test_progress_prints_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress("work", 4, interval=0.0) as bar:
        bar.update(1, "slow")
        bar.update(4)
        bar.update(4)
    assert capsys.readouterr().err.splitlines() == ["work: 25 % slow", "work: 100 %"]
    with progress("work", 4, interval=60.0) as bar:
        bar.update(1)
    with progress("work", 4, quiet=True) as bar:
        bar.update(4)
    assert capsys.readouterr().err == ""
