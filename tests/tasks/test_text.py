"""A character language model's data: split, windows, queries, and files that are no text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.tasks import TextTask, build_task

# the last tenth has its own letters, so that a window shows which part it is from
WRITING = "".join(f"line {n}: the quick brown fox\n" for n in range(45))
LETTERS = "".join(chr(0x3B1 + n % 20) for n in range(len(WRITING) // 9))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "writing.txt"
    file.write_text(WRITING + LETTERS, encoding="utf-8", newline="")
    return file


# --- reference values ---


def test_alphabet_and_windows(path: Path, generator: torch.Generator) -> None:
    task = TextTask(path, length=12)
    whole = WRITING + LETTERS
    assert task.vocab == ("_", "$", *sorted(set(whole)))
    for split in ("train", "test"):
        batch = task.sample(100, generator=generator, split=split)
        assert batch.tokens.shape == (100, 13)
        assert batch.position_ids.tolist()[0] == list(range(1, 14))
        assert batch.loss_mask[0].tolist() == [False] + [True] * 12
        cut = math.floor(0.9 * len(whole))
        part = whole[:cut] if split == "train" else whole[cut:]
        windows = [task.symbols(row) for row in batch.tokens]
        assert all(window in part for window in windows)
        assert len(set(windows)) > 15


def test_every_place_is_drawn(tmp_path: Path, generator: torch.Generator) -> None:
    """Of 40 characters 36 are for training: 32 windows of 5, the first and the last too."""
    file = tmp_path / "t.txt"
    file.write_text("".join(chr(97 + n % 26) + str(n % 7) for n in range(50))[:100])
    task = TextTask(file, length=4)
    text = file.read_text()
    windows = {task.symbols(row) for row in task.sample(4000, generator=generator).tokens}
    assert windows == {text[begin : begin + 5] for begin in range(90 - 4)}
    windows = {
        task.symbols(row) for row in task.sample(500, generator=generator, split="test").tokens
    }
    assert windows == {text[begin : begin + 5] for begin in range(90, 100 - 4)}


def test_continuing_a_text(path: Path) -> None:
    task = TextTask(path, length=12)
    tokens = task.encode("the fox")
    assert task.symbols(tokens) == "the fox"
    assert task.decode([*tokens.tolist(), 1, 5]) == "the fox"
    # query and continuation fill a window; a long query goes on by one character
    assert task.position_ids("the fox").tolist() == list(range(1, 14))
    assert task.position_ids("the quick brown fox").tolist() == list(range(1, 21))
    assert task.position_ids("the", start=3)[0] == 3
    example = task.example("the fox")
    assert example.loss_mask.tolist() == [False] + [True] * 6
    assert example.position_ids.tolist() == list(range(1, 8))


def test_there_is_no_truth(path: Path) -> None:
    task = TextTask(path)
    with pytest.raises(UnsupportedError, match="no true continuation; got the query 'the fox'"):
        task.answer("the fox")
    assert task.check("the fox", "anything") is None


# --- grids and names ---


def test_grid_keeps_the_characters(path: Path, generator: torch.Generator) -> None:
    task = TextTask(path, length=12)
    cells = task.grid()
    assert [c.coordinates["length"] for c in cells] == [12, 24, 48, 96]  # the test part ends there
    cell = task.grid(length=[30])[0].task
    assert cell.sample(3, generator=generator, split="test").tokens.shape == (3, 31)
    assert cell.vocab == task.vocab
    assert cell.config == {"name": "text", "path": str(path), "length": 30}
    assert task.length == 12
    with pytest.raises(DataError, match="at least 10001 characters"):
        task.grid(length=[10_000])


def test_windows_depend_on_seed_and_number_alone(path: Path) -> None:
    one, two = (TextTask(path).stream(4, seed=1).batch(3).tokens for _ in range(2))
    assert torch.equal(one, two)


def test_by_name(path: Path) -> None:
    task = build_task(f"text:{path},length=32")
    assert task.config == {"name": "text", "path": str(path), "length": 32}
    assert build_task("text", path=str(path)).config["length"] == 64
    assert build_task(f"text:path={path}").config["path"] == str(path)
    with pytest.raises(ConfigError, match="needs the option 'path'"):
        build_task("text")
    with pytest.raises(ConfigError, match="did you mean 'length'"):
        build_task(f"text:{path},lenght=3")


def test_line_ends_and_byte_order_marks(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_bytes(b"\xef\xbb\xbf" + b"one\r\ntwo\r\n" * 20)
    assert TextTask(file, length=4).vocab[2:] == ("\n", "\r", "e", "n", "o", "t", "w")


# --- bad input ---


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.txt does not exist\. Give a text file"):
        TextTask(tmp_path / "no.txt")
    with pytest.raises(DataError, match="cannot be read"):
        TextTask(tmp_path)
    file = tmp_path / "t.txt"
    file.write_text("")
    with pytest.raises(DataError, match=r"t\.txt: expected text; the file is empty"):
        TextTask(file)
    file.write_text("x" * 600)
    with pytest.raises(DataError, match=r"at least 65 characters.*got 540 .* and 60 for tests"):
        TextTask(file)
    file.write_bytes("grün\nblau \xff".encode("latin-1"))
    with pytest.raises(DataError, match=r"t\.txt, line 1, column 3.*0xfc"):
        TextTask(file)
    file.write_bytes("grün\nblau ".encode() + b"\xff")
    with pytest.raises(DataError, match=r"t\.txt, line 2, column 6.*0xff"):
        TextTask(file)
    file.write_bytes(b"\xef\xbb\xbf\xff")
    with pytest.raises(DataError, match=r"t\.txt, line 1, column 1.*0xff"):
        TextTask(file)


def test_bad_queries_and_options(path: Path) -> None:
    task = TextTask(path)
    with pytest.raises(DataError, match=r"characters of .*writing\.txt only; got 'Z' at column 5"):
        task.encode("the Zoo")
    with pytest.raises(DataError, match="at least one character"):
        task.encode("")
    with pytest.raises(ConfigError, match="length"):
        TextTask(path, length=0)
    with pytest.raises(ConfigError, match="start"):
        task.position_ids("the", start=0)
