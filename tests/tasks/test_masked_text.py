"""Masked characters: where blanks fall, how texts are mixed, queries, and bad options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.models import Encoder
from gossamer.tasks import MaskedTextTask, TextTask, build_task
from gossamer.train import answer_loss, evaluate_task

# every character of the first 80 says where it stands; the last tenth has its own
WRITING = "".join(chr(0x100 + n) for n in range(80)) * 9
TAIL = "".join(chr(0x3B1 + n % 20) for n in range(80))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "writing.txt"
    file.write_text(WRITING + TAIL, encoding="utf-8", newline="")
    return file


# --- reference values ---


def test_windows_are_parts_of_the_text(path: Path, generator: torch.Generator) -> None:
    task = MaskedTextTask(path, length=12)
    assert task.vocab == TextTask(path).vocab
    for split, part in (("train", WRITING), ("test", TAIL)):
        batch = task.sample(60, generator=generator, split=split)
        assert batch.tokens.shape == batch.loss_mask.shape == (60, 12)
        assert batch.position_ids.tolist() == [list(range(1, 13))] * 60
        windows = [task.symbols(row) for row in batch.tokens]
        assert all(window in part for window in windows)
        assert len(set(windows)) > 15


def test_the_first_and_the_last_window_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text("".join(chr(0x100 + n) for n in range(100)))
    task = MaskedTextTask(file, length=8)
    firsts = task.sample(2000, generator=torch.Generator().manual_seed(0)).tokens[:, 0] - 2
    assert sorted(set(firsts.tolist())) == list(range(90 - 8 + 1))


@pytest.mark.parametrize("rate", [0.15, 0.5])
def test_the_share_of_blanks(path: Path, rate: float, generator: torch.Generator) -> None:
    mask = MaskedTextTask(path, rate=rate).sample(2000, generator=generator).loss_mask
    # 128,000 independent draws: the standard error is at most .0014
    assert float(mask.float().mean()) == pytest.approx(rate, abs=0.005)
    assert float(mask.float().mean(0).std()) < 0.02


def test_every_sample_has_a_blank(path: Path, generator: torch.Generator) -> None:
    rare = MaskedTextTask(path, length=9, rate=1e-9).sample(900, generator=generator).loss_mask
    assert rare.sum(1).tolist() == [1] * 900
    assert rare.sum(0).min() > 50  # of 100 expected at each place
    assert MaskedTextTask(path, rate=1.0).sample(3, generator=generator).loss_mask.all()


def test_mixed_texts_come_apart_by_their_ids(path: Path, generator: torch.Generator) -> None:
    task = MaskedTextTask(path, length=20, num_texts=3)
    assert task.levels == 2
    batch = task.sample(200, generator=generator)
    assert batch.position_ids.shape == (200, 20, 2)
    assert batch.position_ids[..., 0].tolist() == [list(range(1, 21))] * 200
    numbers = batch.position_ids[..., 1]
    assert set(numbers.unique().tolist()) == {1, 2, 3}
    counts = [float((numbers == n).float().mean()) for n in (1, 2, 3)]
    assert counts == pytest.approx([1 / 3] * 3, abs=0.03)
    begins = []
    for row, own in zip(batch.tokens, numbers, strict=True):
        for number in (1, 2, 3):
            assert task.symbols(row[own == number]) in WRITING
        begins.append([int(row[own == n][0]) for n in (1, 2, 3) if (own == n).any()])
    apart = [pair[0] != pair[1] for pair in begins]
    assert sum(apart) > 180  # texts begin at places of their own


def test_a_mixture_hides_the_text_from_who_does_not_know_the_segments(path: Path) -> None:
    """The same draws with one text give the plain window: mixing changes tokens, not blanks."""
    plain = MaskedTextTask(path).stream(8, seed=3).batch(0)
    again = MaskedTextTask(path).stream(8, seed=3).batch(0)
    assert torch.equal(plain.tokens, again.tokens)
    assert torch.equal(plain.loss_mask, again.loss_mask)
    mixed = MaskedTextTask(path, num_texts=2).stream(8, seed=3).batch(0)
    assert not any(MaskedTextTask(path).symbols(row) in WRITING for row in mixed.tokens)


def test_blanks_in_a_query(path: Path) -> None:
    task = MaskedTextTask(path, length=12)
    a, b, c = WRITING[:3]
    tokens = task.encode(f"{a}_{c}")
    assert tokens.tolist()[1] == task.pad
    assert task.symbols(tokens) == f"{a}{c}"
    assert task.position_ids(f"{a}_{b}").tolist() == [1, 2, 3]
    assert task.position_ids(f"{a}_{b}", start=4).tolist() == [4, 5, 6]
    example = task.example(f"{a}__{b}")
    assert example.loss_mask.tolist() == [False, True, True, False]
    mixed = MaskedTextTask(path, num_texts=2)
    assert mixed.position_ids(f"{a}_{b}", start=4).tolist() == [[4, 1], [5, 1], [6, 1]]
    with pytest.raises(UnsupportedError, match="no true continuation"):
        task.answer(f"{a}_")


# --- with a model ---


def test_the_loss_is_taken_at_the_blanks_alone(path: Path) -> None:
    task = MaskedTextTask(path, length=12, rate=0.3)
    batch = task.stream(6, seed=0).batch(0)
    model = Encoder(task.vocab_size, 8, 1, 2, max_length=12)
    tokens = batch.tokens.masked_fill(batch.loss_mask, 0)
    chosen = model(tokens).log_softmax(-1)[batch.loss_mask]
    expected = -chosen.gather(1, batch.tokens[batch.loss_mask][:, None]).mean()
    torch.testing.assert_close(answer_loss(model, batch), expected)


def test_grid_keeps_the_options(path: Path) -> None:
    task = MaskedTextTask(path, length=12, rate=0.4, num_texts=2)
    cell = task.grid(length=[30])[0].task
    assert cell.config == {
        "name": "masked_text", "path": str(path), "length": 30, "rate": 0.4, "num_texts": 2,
    }  # fmt: skip
    assert task.length == 12
    model = Encoder(
        task.vocab_size, 8, 1, 2, positions={"name": "diet_relative", "num_segments": 2,
        "ids": "task"}, max_length=24,
    )  # fmt: skip
    rows = evaluate_task(model, task, {"length": [12, 24]}, num_samples=20).rows()
    assert [row["length"] for row in rows] == [12, 24]
    assert all(row["cross_entropy"] > 0 for row in rows)
    with pytest.raises(DataError, match="at least 10001 characters"):
        task.grid(length=[10_000])


def test_by_name(path: Path) -> None:
    task = build_task(f"masked_text:{path},rate=0.3,num_texts=2")
    assert isinstance(task, MaskedTextTask)
    options = {key: value for key, value in task.config.items() if key != "name"}
    assert build_task("masked_text", **options).config == task.config


# --- bad input ---


def test_bad_options(path: Path) -> None:
    for rate in (0.0, 1.5, "half"):
        with pytest.raises(ConfigError, match="rate"):
            MaskedTextTask(path, rate=rate)
    for count in (0, 1.5):
        with pytest.raises(ConfigError, match="num_texts"):
            MaskedTextTask(path, num_texts=count)
    task = MaskedTextTask(path)
    with pytest.raises(DataError, match=r"got 'Z' at column 3"):
        task.encode(f"{WRITING[0]}_Z")
    with pytest.raises(ConfigError, match="start"):
        task.position_ids(WRITING[:2], start=0)
    with pytest.raises(ConfigError, match="split"):
        task.sample(1, generator=torch.Generator(), split="valid")
