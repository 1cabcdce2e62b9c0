"""Distillation: live and stored teachers, both kinds of teaching, resume, refused pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.errors import ConfigError, DataError, ShapeError, UnsupportedError
from gossamer.losses import DistillationLoss, TopKLogits
from gossamer.models import Decoder
from gossamer.optim import switch_at
from gossamer.tasks import AdditionTask
from gossamer.train import FileLogger, TeacherCache, TrainConfig, answer_logits, distill

CONFIG = TrainConfig(steps=12, lr=0.05, device="cpu", log_every=4, checkpoint_every=5)
X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3


def network(seed: int, classes: int = 3, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, classes)
    )  # fmt: skip


def batches(size: int = 5) -> list[tuple[Any, ...]]:
    return [(X[rows], Y[rows], rows) for rows in torch.arange(20).split(size)]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- the cache ---


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("top_k", [None, 2])
def test_what_is_stored_is_what_the_teacher_says(
    top_k: int | None, tokens: bool, tmp_path: Path
) -> None:
    teacher = network(0, 5).eval()
    x = X.reshape(4, 5, 6) if tokens else X
    ids = 100 - torch.arange(len(x))
    cache = TeacherCache(tmp_path / "t", top_k=top_k, temperature=2.0)
    assert cache.build(teacher, [(x[:3], None, ids[:3]), (x[3:], None, ids[3:])]) is cache
    order = torch.tensor([2, 0, 3])
    said = teacher(x[order]).detach()
    found = TeacherCache(tmp_path / "t", top_k=top_k, temperature=2.0).read(ids[order])
    if isinstance(found, TopKLogits):
        direct = TopKLogits.of(said, 2, temperature=2.0)
        assert torch.equal(found.indices, direct.indices)
        shift = said.amax(-1)
        torch.testing.assert_close(
            found.values, direct.values - shift[..., None], atol=5e-3, rtol=0
        )
        torch.testing.assert_close(found.rest, direct.rest - shift / 2)
    else:
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.softmax(-1), said.softmax(-1), atol=2e-3, rtol=0)
        assert (found.amax(-1) == 0).all()
    assert cache.complete
    assert cache.num_classes == 5
    assert cache.ids.tolist() == ids.tolist()


def test_classes_far_below_stay_finite_and_masked_ones_infinite(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[1e6, 0.0, -float("inf")]])

    cache = TeacherCache(tmp_path / "t").build(Fixed(), [(X[:1], None, [0])])
    assert cache.read([0]).tolist() == [[0.0, -65504.0, -float("inf")]]


class Broken(nn.Module):
    """A teacher that fails at some call."""

    def __init__(self, model: nn.Module, at: int) -> None:
        super().__init__()
        self.model, self.at, self.calls = model, at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("broken off")
        return self.model(x)


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("cut", [0, 1, 13])
def test_an_interrupted_build_goes_on(top_k: int | None, cut: int, tmp_path: Path) -> None:
    whole = TeacherCache(tmp_path / "whole", top_k=top_k)
    whole.build(Broken(network(0), 0), batches())
    folder = tmp_path / "part"
    with pytest.raises(RuntimeError, match="broken off"):
        TeacherCache(folder, top_k=top_k).build(Broken(network(0), 3), batches())
    part = TeacherCache(folder, top_k=top_k)
    assert not part.complete
    with pytest.raises(DataError, match="goes on where it was interrupted"):
        part.read([0])
    if cut:  # killed while it wrote: one file is shorter than the others
        name = "logits.bin" if top_k is None else "rest.bin"
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-cut])
    again = Broken(network(0), 0)
    part.build(again, batches())
    assert again.calls == (2 if not cut else 3)
    for file in (tmp_path / "whole").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name
    assert part.build(again, batches()) is part
    assert again.calls <= 3  # complete: nothing is run


def test_mode_and_gradients_of_the_teacher(tmp_path: Path) -> None:
    teacher = network(0, dropout=0.5)
    teacher.train()
    teacher[0].eval()
    cache = TeacherCache(tmp_path / "t").build(teacher, batches())
    assert [m.training for m in teacher] == [False, True, True, True]
    said = teacher.eval()(X).detach()
    torch.testing.assert_close(
        cache.read(np.arange(20)).softmax(1), said.softmax(1), atol=2e-3, rtol=0
    )
    assert all(p.grad is None for p in teacher.parameters())


def test_export_holds_plain_arrays(tmp_path: Path) -> None:
    cache = TeacherCache(tmp_path / "t", top_k=2).build(network(0), batches())
    cache.export(tmp_path / "teacher.npz")
    with np.load(tmp_path / "teacher.npz") as arrays:
        assert set(arrays) == {"ids", "values", "indices", "rest", "temperature"}
        assert arrays["values"].shape == (20, 2)
        assert arrays["values"].dtype == np.float16


def _with_nan(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    return model


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: TeacherCache(p / "b"), DataError, "begun with the top_k 2; got None"),
        (lambda p: TeacherCache(p / "b", top_k=2, temperature=1.0), DataError, "the temperature 4"),
        (lambda p: TeacherCache(p / "b", top_k=2).build(network(1), batches()), DataError,
         "begun with the fingerprint"),
        (lambda p: TeacherCache(p / "b", top_k=2).read([99]), DataError, "none for id 99"),
        (lambda p: TeacherCache(p / "n", top_k=0), ConfigError, "top_k must be >= 1"),
        (lambda p: TeacherCache(p / "n", top_k=4).build(network(0), batches()), ConfigError,
         "top_k must be >= 1 and <= 3"),
        (lambda p: TeacherCache(p / "n", temperature=0.0), ConfigError, "temperature must be > 0"),
        (lambda p: TeacherCache(p / "n").read([0]), DataError, "no meta.json"),
        (lambda p: TeacherCache(p / "n").build(network(0), [(X, Y)]), DataError, "need the ids"),
        (lambda p: TeacherCache(p / "n").build(network(0), []), DataError, "at least one example"),
        (lambda p: TeacherCache(p / "n").build(network(0), [(X, Y, Y)]), DataError, "id 0 came 7"),
        (lambda p: TeacherCache(p / "n").build(network(0), [(X, Y, Y[:5])]), ShapeError, "one id"),
        (lambda p: TeacherCache(p / "n").build(network(0), [(X, Y, X[0])]), DataError, "integer"),
        (lambda p: TeacherCache(p / "n").build(_with_nan(network(0)), batches()), DataError, "NaN"),
        (lambda p: TeacherCache(p / "n").build(network(0), ["text"]), DataError, "a batch must be"),
    ],
)  # fmt: skip
def test_bad_caches(call: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    TeacherCache(tmp_path / "b", top_k=2).build(network(0), batches())
    with pytest.raises(error, match=message):
        call(tmp_path)


def test_a_folder_that_lost_a_file_is_refused(tmp_path: Path) -> None:
    TeacherCache(tmp_path / "b", top_k=2).build(network(0), batches())
    (tmp_path / "b" / "rest.bin").unlink()
    with pytest.raises(DataError, match=r"rest.bin must hold \(20,\); got 0 bytes"):
        TeacherCache(tmp_path / "b", top_k=2)
    (tmp_path / "b" / "meta.json").write_text('{"top_k": 2, "temperature": 4.0}')
    with pytest.raises(DataError, match=r"meta\.json must say num_classes"):
        TeacherCache(tmp_path / "b", top_k=2)


def test_a_resumed_build_checks_the_examples(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        TeacherCache(tmp_path).build(Broken(network(0), 3), batches())
    with pytest.raises(DataError, match="example 0 differs"):
        TeacherCache(tmp_path).build(Broken(network(0), 0), batches()[::-1])
    with pytest.raises(DataError, match="more examples than the 5"):
        TeacherCache(tmp_path).build(Broken(network(0), 0), batches()[:1])
    with pytest.raises(DataError, match="fingerprint"):
        TeacherCache(tmp_path).build(Broken(network(1), 0), batches())
    lengths = [(X[:4].reshape(2, 2, 6), None, [0, 1]), (X[:3].reshape(1, 3, 6), None, [2])]
    with pytest.raises(ShapeError, match="Pad to one length"):
        TeacherCache(tmp_path / "tokens").build(network(0), lengths)


# --- training ---


def by_hand(teacher: nn.Module, student: nn.Module, loss: DistillationLoss) -> nn.Module:
    """Return the student after 12 steps of a plain loop with the trainer's settings."""
    from gossamer.optim import warmup_cosine

    optimizer = torch.optim.AdamW(student.parameters(), 0.05, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = warmup_cosine(12)
    for step in range(12):
        x, y, _ = batches()[step % 4]
        optimizer.param_groups[0]["lr"] = 0.05 * schedule(step)
        optimizer.zero_grad()
        with torch.no_grad():
            said = teacher(x)
        loss(student(x), said, y, step=step).backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
    return student


def halved(logits: torch.Tensor, top: int = 3) -> torch.Tensor:
    """Return logits with the `top` largest of each row in 16 bits, the largest at 0."""
    logits = logits - logits.amax(1, keepdim=True)
    kept = logits.argsort(1, descending=True).argsort(1) < top
    return torch.where(kept, logits.half().float(), logits)


@pytest.mark.parametrize("alpha", [0.9, 1.0, switch_at(6, 1.0, 0.0)])
def test_equal_to_a_plain_loop(alpha: Any) -> None:
    teacher, loss = network(0).eval(), DistillationLoss(alpha=alpha)
    student = network(1)
    result = distill(teacher, student, batches(), loss=loss, config=CONFIG, quiet=True)
    torch.testing.assert_close(weights(student), weights(by_hand(teacher, network(1), loss)))
    assert result.teaching == "consistent"
    assert result.alpha == (None if callable(alpha) else alpha)
    assert result.rows()[0]["steps"] == 12
    assert "train" not in result.rows()[0]
    assert json.loads(json.dumps(result.to_dict()))["targets"] == "all classes"


def test_stored_outputs_teach_as_the_teacher_does(tmp_path: Path) -> None:
    teacher = network(0).eval()
    cache = TeacherCache(tmp_path / "t").build(teacher, batches())
    live, stored, top = (network(1) for _ in range(3))
    distill(teacher, live, batches(), config=CONFIG, quiet=True)
    result = distill(cache, stored, batches(), config=CONFIG, teaching="fixed", quiet=True)
    # files keep 16 bits of each logit, less the largest of its row
    rounded = by_hand(lambda x: halved(teacher(x)), network(1), DistillationLoss())
    torch.testing.assert_close(weights(stored), weights(rounded))
    assert not torch.equal(weights(stored), weights(live))
    assert result.teaching == "fixed"
    few = TeacherCache(tmp_path / "few", top_k=2).build(teacher, batches())
    result = distill(few, top, batches(), config=CONFIG, teaching="fixed", quiet=True)
    assert result.targets == "top 2 and the rest"
    # of 3 classes the rest is one, and is kept in 32 bits
    rounded = by_hand(lambda x: halved(teacher(x), top=2), network(1), DistillationLoss())
    torch.testing.assert_close(weights(top), weights(rounded))


def test_the_student_comes_close_to_its_teacher() -> None:
    teacher, student = network(0).eval(), network(1)
    loss = DistillationLoss(temperature=1.0, alpha=1.0)
    before = float(loss(student(X).detach(), teacher(X).detach()))
    config = TrainConfig(steps=300, lr=0.02, device="cpu")
    distill(teacher, student, [(X, None)], loss=loss, config=config, quiet=True)
    assert float(loss(student(X).detach(), teacher(X).detach())) < 0.05 * before


class Augmented:
    """Batches whose inputs differ at each step, by number."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(20, 6, generator=torch.Generator().manual_seed(number))
        self.seen.append(X + noise)
        return self.seen[-1], Y


def test_consistent_teaching_shows_both_the_same() -> None:
    seen: list[torch.Tensor] = []
    teacher, source = network(0).eval(), Augmented()
    teacher.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    distill(teacher, network(1), source, config=CONFIG, quiet=True)
    assert len(seen) == 12
    assert all(torch.equal(a, b) for a, b in zip(seen, source.seen, strict=True))


def test_a_resumed_run_is_equal_to_the_bit(tmp_path: Path) -> None:
    teacher, loss = network(0).eval(), DistillationLoss(alpha=switch_at(8, 1.0, 0.0))

    def train(folder: Path, source: Any, *, resume: bool = False) -> nn.Module:
        student = network(1)
        distill(
            teacher, student, source, loss=loss, config=CONFIG, logger=FileLogger(folder),
            resume=resume, quiet=True,
        )  # fmt: skip
        return student

    def breaking() -> Iterator[Any]:
        yield from (*batches(), *batches()[:3])
        raise RuntimeError("broken off")

    whole = train(tmp_path / "whole", batches())
    with pytest.raises(RuntimeError, match="broken off"):
        train(tmp_path / "part", breaking())
    assert torch.equal(weights(train(tmp_path / "part", batches(), resume=True)), weights(whole))


def test_masks_mappings_and_tasks() -> None:
    teacher, one, two = network(0).eval(), network(1), network(1)
    x, y = X.reshape(4, 5, 6), Y.reshape(4, 5)
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(3)) > 0.4
    whole = [{"inputs": x, "labels": torch.where(mask, y, -100), "mask": mask}]
    distill(teacher, one, whole, config=CONFIG, quiet=True)
    distill(teacher, two, [(x[mask], y[mask])], config=CONFIG, quiet=True)
    torch.testing.assert_close(weights(one), weights(two))
    task, config = AdditionTask((1, 2)), TrainConfig(steps=2, device="cpu")
    torch.manual_seed(0)
    large, small = Decoder(14, 16, 1, 2).eval(), Decoder(14, 8, 1, 2)
    stream = task.stream(4, seed=0)
    loss = DistillationLoss()
    logits, targets, wanted = answer_logits(small, stream.batch(0))
    said = answer_logits(large, stream.batch(0))[0].detach()
    expected = float(loss(logits, said, targets, wanted).detach())
    losses: list[float] = []

    class Noting(DistillationLoss):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            losses.append(float(super().forward(*args, **kwargs).detach()))
            return super().forward(*args, **kwargs)

    distill(large, small, stream, loss=Noting(), config=config, quiet=True)
    assert losses[0] == pytest.approx(expected, rel=1e-5)


def test_keywords_and_outputs_with_logits() -> None:
    class Wrapped(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.inner = network(seed)

        def forward(self, values: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.inner(values))

    one, two = Wrapped(1), network(1)
    distill(Wrapped(0).eval(), one, [({"values": X}, Y)], config=CONFIG, quiet=True)
    distill(network(0).eval(), two, [(X, Y)], config=CONFIG, quiet=True)
    assert torch.equal(weights(one), weights(two))


def test_a_teacher_in_training_mode_is_warned_of_and_put_back() -> None:
    teacher, plain = network(0, dropout=0.5), network(0).eval()
    one, two = network(1), network(1)
    with pytest.warns(UserWarning, match="was in training mode") as seen:
        distill(teacher, one, batches(), config=CONFIG, quiet=True)
    assert seen[0].filename == __file__
    assert teacher.training
    assert all(p.grad is None for p in teacher.parameters())
    distill(plain, two, batches(), config=CONFIG, quiet=True)
    assert torch.equal(weights(one), weights(two))


def _words(vocab: dict[str, int]) -> nn.Module:
    model = network(0).eval()
    model.tokenizer = SimpleNamespace(get_vocab=lambda: vocab)
    return model


def test_refused_pairs(tmp_path: Path) -> None:
    student = network(1)

    def call(teacher: Any, source: Any = None, **options: Any) -> None:
        distill(teacher, options.pop("student", student), source or batches(), config=CONFIG,
                quiet=True, **options)  # fmt: skip

    with pytest.raises(ShapeError, match="same classes"):
        call(network(0, 4).eval())
    with pytest.raises(UnsupportedError, match="vocabularies of 14 and 12"):
        call(Decoder(14, 8, 1, 2).eval(), student=Decoder(12, 8, 1, 2))
    with pytest.raises(UnsupportedError, match=r"2 and 2 tokens, 2 of the teacher's"):
        call(_words({"a": 0, "b": 1}), student=_words({"a": 1, "b": 0}))
    call(_words({"a": 0}), student=_words({"a": 0}))
    with pytest.raises(ConfigError, match="must be two modules"):
        call(student)
    with pytest.raises(ConfigError, match="teaching 'fixed' needs a TeacherCache"):
        call(network(0).eval(), teaching="fixed")
    with pytest.raises(ConfigError, match="'consistent' with a TeacherCache"):
        call(TeacherCache(tmp_path / "t"))
    with pytest.raises(ConfigError, match="unknown teaching 'fix'; did you mean 'fixed'"):
        call(network(0), teaching="fix")
    with pytest.raises(DataError, match=r"no meta.json"):
        call(TeacherCache(tmp_path / "t"), teaching="fixed")
    cache = TeacherCache(tmp_path / "t").build(network(0), batches()[:2])
    with pytest.raises(DataError, match="none for id 10"):
        call(cache, teaching="fixed")
    with pytest.raises(DataError, match="need the ids"):
        call(cache, [(X, Y)], teaching="fixed")
    with pytest.raises(ConfigError, match="needs labels"):
        call(network(0).eval(), [(X, None)])
    with pytest.raises(ConfigError, match="'input' in a batch; did you mean 'inputs'"):
        call(network(0).eval(), [{"input": X}])
    with pytest.raises(ConfigError, match="must have the key 'inputs'"):
        call(network(0).eval(), [{"labels": Y}])
