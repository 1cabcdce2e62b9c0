"""Pairs of texts: words, split by source, batches, one sequence for a decoder, bad files."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.models import Decoder
from gossamer.tasks import PairsTask, PairStream, Vocabulary, build_task, split_words
from gossamer.tasks.words import UNKNOWN

WORDS = ["red", "green", "blue", "old", "new", "big", "small", "cold", "warm", "dark"]


def lines(count: int = 120) -> list[str]:
    draw = random.Random(0)
    out = []
    for number in range(count):
        some = draw.sample(WORDS, draw.randint(1, 5))
        source = f"{' '.join(some)} {number}"
        for _ in range(draw.randint(1, 3)):
            out.append(f"{source}\tit is {', '.join(draw.sample(some, len(some)))} .")
    return out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "my.tsv"
    file.write_text("\n".join(lines()), encoding="utf-8")
    return file


# --- reference values ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's a x-name, no?", ["It's", "a", "x-name", ",", "no", "?"]),
        ("  two   spaces ", ["two", "spaces"]),
        ("\u55e8\u3002\u4f60\u597d ok", ["\u55e8", "\u3002", "\u4f60", "\u597d", "ok"]),
        ("12.5\u20ac -- (a)", ["12", ".", "5", "\u20ac", "-", "-", "(", "a", ")"]),
        (
            "\u0441\u043b\u043e\u0432\u043e caf\u00e9",
            ["\u0441\u043b\u043e\u0432\u043e", "caf\u00e9"],
        ),
        ("cafe\u0301s", ["cafe\u0301s"]),
        # vowel signs of Hindi and Thai are parts of words, the bar that ends a sentence is not
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u0939\u0948\u0964",
            ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u0939\u0948", "\u0964"],
        ),
        ("\u0e01\u0e34\u0e19 \u0e19\u0e49\u0e33", ["\u0e01\u0e34\u0e19", "\u0e19\u0e49\u0e33"]),
        (" \n", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split_words(text) == words
    assert split_words(" ".join(words)) == words


def test_the_vocabulary_holds_the_most_frequent_words() -> None:
    texts = [["b", "a", "c"], ["b", "a", "d"], ["b", "e", "e"]]
    assert Vocabulary(texts).symbols == ("_", "$", "<unk>", "b", "a", "e")
    small = Vocabulary(texts, size=5)
    assert small.symbols == ("_", "$", "<unk>", "b", "a")
    assert small.encode(["a", "e", "b"]) == [4, UNKNOWN, 3]


def test_the_vocabulary_is_that_of_the_training_pairs(path: Path) -> None:
    task = PairsTask(path)
    counts = Counter(
        word
        for line in lines()
        for part in [line.split("\t")]
        if part[0] not in task.references("test")
        for word in split_words(" ".join(part))
    )
    assert set(task.vocab[3:]) == {word for word, count in counts.items() if count > 1}
    assert [counts[w] for w in task.vocab[3:]] == sorted(
        (counts[w] for w in task.vocab[3:]), reverse=True
    )
    assert task.vocab_size == len(task.vocab)


def test_no_source_is_on_both_sides(path: Path) -> None:
    task = PairsTask(path)
    train, test = task.references("train"), task.references("test")
    assert not set(train) & set(test)
    assert len(train) + len(test) == 120
    assert 0.04 < len(test) / 120 < 0.2
    known: dict[str, list[str]] = {}
    for line in lines():
        source, target = line.split("\t")
        known.setdefault(source, []).append(" ".join(split_words(target)))
    assert {**train, **test} == known
    assert sorted(task.targets("train")) == sorted(t for s in train for t in known[s])


def test_a_pair_stays_on_its_side(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "more.tsv"
    turned = [*reversed(lines()), "some thing else\tit is some thing ."]
    other.write_text("\r\n".join(turned), encoding="utf-8")
    before, after = (set(PairsTask(p).references("test")) for p in (path, other))
    assert before == after - {"some thing else"}


def test_a_packed_file_and_further_columns(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "my.tsv.gz"
    packed.write_bytes(gzip.compress("\n".join(f"{line}\tby X" for line in lines()).encode()))
    assert PairsTask(packed).references("test") == PairsTask(path).references("test")


# --- batches ---


def test_an_epoch_holds_every_pair_once(path: Path) -> None:
    task = PairsTask(path)
    stream = task.pairs(16, seed=3)
    targets = task.targets("train")
    for epoch in (0, 1):
        first = epoch * stream.batches_per_epoch
        batches = [stream.batch(first + n) for n in range(stream.batches_per_epoch)]
        assert sorted(row for b in batches for row in b.rows.tolist()) == list(range(len(targets)))
        assert {batch.epoch for batch in batches} == {epoch}
        for batch in batches:
            assert batch.mask.any(0).all()
            assert (batch.labels != -100).any(0).all()
            assert torch.equal(batch.source == 0, ~batch.mask)
            for row, source, labels in zip(batch.rows, batch.source, batch.labels, strict=True):
                words = targets[int(row)]
                real = labels[labels != -100]
                assert torch.equal(real, task.target_tokens(words))
                assert torch.equal(source[source != 0], stream.source[row][stream.source[row] != 0])


def test_a_batch_depends_on_its_number_and_the_seed_alone(path: Path) -> None:
    task = PairsTask(path)
    one, two = task.pairs(16, seed=3), task.pairs(16, seed=3)
    late = one.batch(40)
    for number in (0, 39, 7, 40):
        again = two.batch(number)
    assert torch.equal(late.source, again.source)
    assert torch.equal(late.rows, again.rows)
    rows = {tuple(task.pairs(16, seed=seed).batch(0).rows.tolist()) for seed in range(4)}
    assert len(rows) == 4
    orders = {tuple(one.batch(n * one.batches_per_epoch).rows.tolist()) for n in range(4)}
    assert len(orders) == 4


def test_rows_of_similar_length_share_a_batch() -> None:
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 60, 640)
    targets = [[5] * int(size) for size in sizes]
    stream = PairStream([[4]] * 640, targets, 32)
    batches = [stream.batch(n) for n in range(stream.batches_per_epoch)]
    real = sum(int((b.labels != -100).sum()) for b in batches)
    whole = sum(b.labels.numel() for b in batches)
    assert real == int(sizes.sum()) + 640
    at_random = sum(32 * (1 + np.sort(sizes)[-20:].mean()) for _ in batches)
    assert whole < 0.75 * at_random


def test_a_batch_moves(path: Path) -> None:
    batch = PairsTask(path).pairs(4).batch(0)
    moved = batch.to("cpu")
    assert len(moved) == 4
    assert torch.equal(moved.labels, batch.labels)


# --- one sequence, for a decoder ---


def test_a_decoder_reads_source_and_target_as_one_sequence(path: Path) -> None:
    task = PairsTask(path)
    source, references = next(iter(task.references("train").items()))
    example = task.example(source)
    query = task.encode(source)
    assert torch.equal(example.tokens[: len(query)], query)
    answer = example.tokens[len(query) :]
    assert torch.equal(answer, task.target_tokens(references[0]))
    assert example.loss_mask.tolist() == [False] * len(query) + [True] * len(answer)
    assert example.position_ids.tolist() == list(range(1, len(example.tokens) + 1))
    assert task.decode(answer) == task.answer(source) == references[0]
    assert len(task.position_ids(source)) >= len(example.tokens)
    batch = task.sample(5, generator=torch.Generator().manual_seed(0), split="test")
    logits = Decoder(task.vocab_size, 16, 1, 2)(batch.tokens, batch.position_ids)
    assert logits.shape == (*batch.tokens.shape, task.vocab_size)
    shifted = task.example(source, start=4)
    assert torch.equal(shifted.position_ids, example.position_ids + 3)


def test_answers_are_checked_against_all_targets(path: Path) -> None:
    task = PairsTask(path)
    source = next(s for s, known in task.references("train").items() if len(set(known)) > 1)
    for text in task.references("train")[source]:
        assert task.check(source, text.replace(" ,", ",")) is True
    assert task.check(source, "it is not") is False
    assert task.check("never seen", "it is not") is None
    with pytest.raises(UnsupportedError, match="has no target for the source"):
        task.answer("never seen")


def test_unknown_words_and_special_tokens(path: Path) -> None:
    task = PairsTask(path)
    assert task.encode("red zebra").tolist()[1:] == [UNKNOWN, 1]
    red = task.vocabulary.encode(["red"])[0]
    assert task.decode([0, red, UNKNOWN, 1, red]) == "red <unk>"
    with pytest.raises(DataError, match="at least one word"):
        task.encode(" \t")


def test_it_is_built_by_name_and_kept(path: Path) -> None:
    task = build_task(f"pairs:{path},vocab_size=9")
    assert task.vocab_size == 9
    again = build_task(task.config["name"], **{k: v for k, v in task.config.items() if k != "name"})
    assert again.config == task.config
    assert [cell.coordinates for cell in task.grid()] == [{"split": "test"}]
    with pytest.raises(ConfigError, match="no axes"):
        task.grid(length=[3])


# --- bad input ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a\tb\nno tab here", "line 2, column 12: expected a tab"),
        ("a\tb\n\n\tb", "line 3, column 1: expected a source"),
        ("a\tb\nabc\t ", "line 2, column 5: expected a target"),
        ("a\tb\na\tb\tc", "line 2, column 4: expected 2 columns"),
        ("a\tb\tc\na\tb", "line 2, column 4: expected 3 columns"),
        ("a\tb b\na\tc c", "two different queries"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        PairsTask(path)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        PairsTask(tmp_path / "none.tsv")
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"a\tb\n\xff\tb")
    with pytest.raises(DataError, match="line 2, column 1: expected UTF-8"):
        PairsTask(path)
    for content in (b"a\tb", gzip.compress(b"a\tb" * 99)[:-9]):
        packed = tmp_path / "bad.tsv.gz"
        packed.write_bytes(content)
        with pytest.raises(DataError, match="expected a whole gzip file"):
            PairsTask(packed)


def test_another_file_than_in_training(path: Path) -> None:
    task = PairsTask(path)
    path.write_text(path.read_text() + "\nnew one\tit is new .")
    with pytest.raises(DataError, match="was changed since then"):
        PairsTask(path, checksum=task.checksum)


def test_bad_options(path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size must be"):
        PairsTask(path, vocab_size=3)
    with pytest.raises(ConfigError, match="needs the option 'path'"):
        build_task("pairs")
    task = PairsTask(path)
    with pytest.raises(ConfigError, match="batch_size must be"):
        task.pairs(0)
    with pytest.raises(ConfigError, match="unknown split"):
        task.targets("dev")
    with pytest.raises(DataError, match="one entry for each pair"):
        PairStream([[4]], [], 2)
    with pytest.raises(DataError, match="comes twice"):
        Vocabulary([["a", "b"]])
