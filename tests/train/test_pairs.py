"""Training on pairs of texts: the loss with neighbours, measures, a run kept and solved."""

from __future__ import annotations

import dataclasses
import random
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError
from gossamer.measures import corpus_bleu
from gossamer.models import Decoder, Seq2Seq, shift_right
from gossamer.retrieval import NeighborTable
from gossamer.tasks import PairsTask
from gossamer.tasks.rows import unit_hash
from gossamer.train import (
    PairsLoss,
    TrainJob,
    evaluate_pairs,
    load_run,
    solve_queries,
    train_pairs,
    train_task,
)

TINY = {"dim": 16, "num_heads": 2, "num_layers": 1}
QUICK = {"steps": 3, "device": "cpu"}
WORDS = ["red", "green", "blue", "old", "new", "big", "small", "cold", "warm", "dark"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    draw = random.Random(0)
    lines = []
    for number in range(60):
        some = draw.sample(WORDS, draw.randint(2, 4))
        lines.append(f"{' '.join(some)} {number}\tthe {' and '.join(some)} house")
        if number % 3 == 0:
            lines.append(f"{' '.join(some)} {number}\ta house , {some[0]}")
    file = tmp_path / "my.tsv"
    file.write_text("\n".join(lines))
    return str(file)


@pytest.fixture
def task(path: str) -> PairsTask:
    return PairsTask(path)


def model_of(task: PairsTask, **options: object) -> Seq2Seq:
    torch.manual_seed(0)
    return Seq2Seq(task.vocab_size, 16, 1, 2, positions="rope", **options).double()


def table_of(targets: list[str]) -> NeighborTable:
    """Return a table in which every fourth target has no neighbour."""
    indices = np.random.default_rng(0).integers(0, len(targets), (len(targets), 3), np.int32)
    indices[::4] = -1
    scores = np.zeros(indices.shape, np.float32)
    return NeighborTable(tuple(targets), tuple(targets), indices, scores, scores, {}, "made")


def job(path: str, **tables: object) -> TrainJob:
    values = {"task": {"name": "pairs", "path": path}, "model": TINY, "train": QUICK}
    return TrainJob.from_dict({**values, "batch_size": 8, **tables}, "test")


# --- reference values ---


def nll(model: Seq2Seq, source: torch.Tensor, target: torch.Tensor, smoothing: float = 0.0):
    """Return the mean loss of the tokens of one target, without padding."""
    logits = model(source[None], shift_right(target[None]))[0]
    return F.cross_entropy(logits, target, label_smoothing=smoothing)


@pytest.mark.parametrize("token_alpha", [0.0, 0.2])
def test_the_loss_is_that_of_targets_and_drawn_neighbours(
    task: PairsTask, token_alpha: float
) -> None:
    table = table_of(task.targets())
    model = model_of(task)
    batch = task.pairs(12, seed=1).batch(7)
    drawn = table.sample(batch.rows.tolist(), epoch=batch.epoch, random_state=5)
    assert {-1} < set(drawn.tolist())
    loss = PairsLoss(task, alpha=0.3, token_alpha=token_alpha, neighbors=table, seed=5)
    total = tokens = 0.0
    for source, labels, place in zip(batch.source, batch.labels, drawn.tolist(), strict=True):
        source, target = source[source != 0], labels[labels != -100]
        own = nll(model, source, target, token_alpha)
        if place >= 0:
            near = task.target_tokens(table.corpus[place])
            own = 0.7 * own + 0.3 * nll(model, source, near, token_alpha)
        total, tokens = total + len(target) * own, tokens + len(target)
    torch.testing.assert_close(loss(model, batch), total / tokens)


def test_without_neighbours_or_alpha_it_is_cross_entropy_to_the_last_bit(task: PairsTask) -> None:
    table = table_of(task.targets())
    model, batch = model_of(task), task.pairs(8).batch(0)
    logits = model(batch.source, shift_right(batch.labels), mask=batch.mask)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    plain = PairsLoss(task)(model, batch)
    zero = PairsLoss(task, alpha=0.0, neighbors=table)(model, batch)
    assert torch.equal(plain, expected)
    assert torch.equal(zero, expected)


def test_the_encoder_runs_once_for_a_batch(task: PairsTask) -> None:
    table = table_of(task.targets())
    model, calls = model_of(task), []
    model.encoder.layers[0].register_forward_hook(lambda *_: calls.append(1))
    PairsLoss(task, neighbors=table)(model, task.pairs(8).batch(0))
    assert len(calls) == 1


def test_measures_by_hand(task: PairsTask) -> None:
    model = model_of(task).eval()
    (cell,) = evaluate_pairs(model, task).rows()
    references = task.references("test")
    written = []
    loss = right = count = 0.0
    for source, known in references.items():
        tokens = task.encode(source)
        made = model.generate(tokens[None], max_new_tokens=task.longest_target + 1)[0]
        written.append(task.decode(made))
        for text in known:
            target = task.target_tokens(text)
            logits = model(tokens[None], shift_right(target[None]))[0]
            loss += float(F.cross_entropy(logits, target, reduction="sum").detach())
            right += int((logits.argmax(-1) == target).sum())
            count += len(target)
    assert cell["bleu"] == corpus_bleu(written, list(references.values()))
    assert cell["cross_entropy"] == pytest.approx(loss / count)
    assert cell["token_accuracy"] == pytest.approx(right / count)
    assert cell["num_samples"] == len(references)
    few = evaluate_pairs(model.train(), task, split="train", num_sources=5, num_beams=2)
    assert few.rows()[0]["num_samples"] == 5
    assert model.training


# --- runs ---


def test_a_model_learns_kept_pairs_and_answers(tmp_path: Path) -> None:
    path = tmp_path / "easy.tsv"
    path.write_text("\n".join(f"{a} {b}\t{b} , {a}" for a in WORDS for b in WORDS))
    train = {"steps": 80, "lr": 1e-2, "device": "cpu"}
    whole = job(str(path), train=train, model={**TINY, "dropout": 0.0}, batch_size=32)
    result = train_task(whole, tmp_path / "run", quiet=True)
    (cell,) = result.rows()
    model, task = load_run(tmp_path / "run")
    assert isinstance(model, Seq2Seq)
    assert cell == evaluate_pairs(model, task).rows()[0]
    sources = list(task.references("train"))[:20]
    answers = solve_queries(model, task, [*sources, "big zebra"], batch_size=7)
    assert [answer.query for answer in answers] == [*sources, "big zebra"]
    assert answers[-1].correct is None
    for answer in answers:
        made = model.generate(
            task.encode(answer.query)[None], max_new_tokens=task.longest_target + 1
        )[0]
        assert answer.answer == task.decode(made)
    assert sum(bool(a.correct) for a in answers) >= 10
    kept = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert kept["model"]["name"] == "seq2seq"
    assert kept["loss"] == {}


def test_a_run_with_neighbours_resumes_to_the_bit(path: str, tmp_path: Path) -> None:
    table = table_of(PairsTask(path).targets())
    options = {
        "loss": {
            "name": "sequence_smoothing",
            "neighbors": "nb.npz",
            "alpha": 0.2,
            "token_alpha": 0.1,
        },
        "train": {**QUICK, "steps": 6, "checkpoint_every": 3},
    }
    whole = job(path, **options)
    train_pairs(whole, tmp_path / "a", quiet=True, neighbors=table)

    class Stop(Exception):
        pass

    class Stopping(type(table)):  # type: ignore[misc]
        calls = 0

        def sample(self, *args: object, **options: object) -> np.ndarray:
            type(self).calls += 1
            if type(self).calls == 5:
                raise Stop
            return super().sample(*args, **options)

    parts = {name: getattr(table, name) for name in table.__dataclass_fields__}
    with pytest.raises(Stop):
        train_pairs(whole, tmp_path / "b", quiet=True, neighbors=Stopping(**parts))
    train_task(whole, tmp_path / "b", quiet=True, resume=True, neighbors=table)
    one, two = (Seq2Seq.from_pretrained(tmp_path / name).state_dict() for name in "ab")
    assert all(torch.equal(one[key], two[key]) for key in one)
    kept = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert kept["loss"] == options["loss"]
    assert TrainJob.from_dict(kept, "kept") == TrainJob.from_dict(
        tomllib.loads((tmp_path / "b" / "config.toml").read_text()), "kept"
    )


def test_a_decoder_trains_on_pairs(path: str, tmp_path: Path) -> None:
    small = job(path, model={**TINY, "name": "decoder"})
    (cell,) = train_task(small, tmp_path / "run", quiet=True, num_samples=3).rows()
    assert 0 <= cell["exact_match"] <= 1
    model, task = load_run(tmp_path / "run")
    assert isinstance(model, Decoder)
    assert solve_queries(model, task, ["red green"])[0].query == "red green"


def test_settings_of_pairs(path: str) -> None:
    plain = TrainJob.from_dict({"task": {"name": "pairs", "path": path}}, "test")
    assert plain.model["name"] == "seq2seq"
    decoder = TrainJob.from_dict(
        {"task": {"name": "pairs", "path": path}, "model": {"name": "decoder"}}, "test"
    )
    assert "dropout" not in decoder.model


# --- bad input ---


def test_bad_settings(path: str, tmp_path: Path, task: PairsTask) -> None:
    def start(**tables: object) -> None:
        train_task(job(path, **tables), tmp_path / "run", quiet=True)

    mixed = {"name": "sequence_smoothing"}
    with pytest.raises(ConfigError, match="got no table"):
        start(loss={**mixed, "alpha": 0.1})
    with pytest.raises(ConfigError, match="got no table"):
        start(loss={**mixed, "neighbors": "nb.npz"})
    with pytest.raises(ConfigError, match="unknown key 'alhpa'"):
        start(loss={**mixed, "alhpa": 0.1})
    with pytest.raises(ConfigError, match="alpha must be"):
        start(loss={"name": "smoothing", "alpha": 1.5})
    with pytest.raises(ConfigError, match="did you mean 'smoothing'"):
        start(loss={"name": "smothing"})
    with pytest.raises(ConfigError, match="unknown loss 'sequence_smoothing'"):
        start(loss=mixed, model={**TINY, "name": "decoder"})
    with pytest.raises(ConfigError, match="needs pairs of texts"):
        start(task={"name": "addition"}, model={**TINY, "name": "seq2seq"})
    with pytest.raises(DataError, match="the longest target must have at most max_length = 6"):
        start(model={**TINY, "max_length": 6})
    with pytest.raises(ConfigError, match="num_sources must be"):
        evaluate_pairs(model_of(task), task, num_sources=0)
    assert not (tmp_path / "run").exists()


def test_texts_that_are_too_long_are_found_before_training(path: str, tmp_path: Path) -> None:
    task = PairsTask(path)
    long = " ".join(["red"] * 30)
    kept = next(iter(task.references("test")))
    extra = tmp_path / "long.tsv"
    # a further target of a source that is held out, and a source that its hash holds out
    extra.write_text(Path(path).read_text() + f"\n{kept}\t{long}")
    model = {**TINY, "max_length": 12}
    with pytest.raises(DataError, match="longest test target must have at most max_length = 12"):
        train_pairs(job(str(extra), model=model), tmp_path / "run", quiet=True)
    held = next(f"{long} {n}" for n in range(1000) if unit_hash(f"{long} {n}") < 0.05)
    extra.write_text(Path(path).read_text() + f"\n{held}\ta house")
    with pytest.raises(DataError, match="longest test source must have at most max_length = 12"):
        train_pairs(job(str(extra), model=model), tmp_path / "run", quiet=True)
    targets = task.targets()
    table = table_of(targets)
    table = dataclasses.replace(table, corpus=(*targets[1:], long))
    loss = {"name": "sequence_smoothing", "neighbors": "nb.npz"}
    with pytest.raises(DataError, match="longest neighbour must have at most max_length = 12"):
        train_pairs(
            job(path, model=model, loss=loss), tmp_path / "run", quiet=True, neighbors=table
        )
    assert not (tmp_path / "run").exists()


def test_a_table_of_other_targets(path: str, tmp_path: Path, task: PairsTask) -> None:
    table = table_of(list(reversed(task.targets())))
    loss = {"name": "sequence_smoothing", "neighbors": "nb.npz"}
    with pytest.raises(DataError, match="must have been mined from these targets"):
        train_task(job(path, loss=loss), tmp_path / "run", quiet=True, neighbors=table)
    with pytest.raises(ConfigError, match="belong to the loss sequence_smoothing"):
        train_task(job(path), tmp_path / "run", quiet=True, neighbors=table)
