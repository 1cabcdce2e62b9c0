"""Teachers named by a job: runs, Hugging Face folders, and those that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.losses import DistillationLoss
from gossamer.models import Decoder, MultiLayerPerceptron
from gossamer.tasks import AdditionTask, CopyTask, ImageTask, TableTask
from gossamer.train import TrainJob, answer_logits, load_run, train_labelled, train_task
from gossamer.train.taught import load_teacher, taught_loss

FAST = {"steps": 5, "device": "cpu", "log_every": 5, "checkpoint_every": 0}
TINY = {"dim": 8, "num_heads": 2, "feed_forward": {"name": "gated", "hidden_dim": 8}}


def images(folder: Path, classes: tuple[str, ...] = ("dark", "light")) -> Path:
    random = np.random.default_rng(0)
    labels = np.arange(60) % 2
    pixels = random.integers(0, 256, (60, 4, 4), dtype=np.uint8)
    path = folder / "dots.npz"
    np.savez(path, images=pixels, labels=np.array(classes)[labels])
    return path


def table(folder: Path, name: str = "my.csv", size: int = 60) -> Path:
    random = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{'xy'[int(a > 0)]}" for a, b in random.standard_normal((size, 2))]
    path = folder / name
    path.write_text("\n".join(["a,b,label", *rows]))
    return path


def job(task: dict[str, Any], **values: Any) -> TrainJob:
    return TrainJob.from_dict({"task": task, "train": FAST, **values}, "test")


def test_a_student_of_a_table_learns_what_its_teacher_says(tmp_path: Path) -> None:
    task = {"name": "table", "path": str(table(tmp_path))}
    train_labelled(job(task), tmp_path / "teacher", quiet=True)
    loss = {"name": "distillation", "teacher": str(tmp_path / "teacher"), "alpha": 1.0}
    found = job(
        task, loss={**loss, "temperature": 2.0}, train={**FAST, "steps": 400, "lr": 0.01}, seed=3
    )
    train_labelled(found, tmp_path / "student", quiet=True)
    rows = TableTask(tmp_path / "my.csv").rows("train")
    teacher, student = (
        MultiLayerPerceptron.from_pretrained(tmp_path / name)(rows.x).log_softmax(1)
        for name in ("teacher", "student")
    )
    away = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
    # the labels alone would make it far surer than a teacher of five steps
    assert away.item() < 0.01
    assert teacher.exp().max(1).values.mean().item() < 0.8


def test_a_student_of_a_sequence_task_takes_the_step_of_the_loss(tmp_path: Path) -> None:
    task = {"name": "addition", "digits": [1, 2]}
    train_task(job(task, model=TINY), tmp_path / "teacher", quiet=True, num_samples=2)
    loss = {"name": "distillation", "teacher": str(tmp_path / "teacher")}
    one = {**FAST, "steps": 1, "lr": 1e-2, "warmup": 0.0, "clip": 0.0}
    begin = job(task, model=TINY, loss=loss, train=one, seed=5)
    train_task(begin, tmp_path / "student", quiet=True, num_samples=2)
    teacher, known = load_run(tmp_path / "teacher")
    model = begin.build_model(known)
    batch = known.stream(64, seed=5).batch(0)
    logits, targets, wanted = answer_logits(model, batch)
    with torch.no_grad():
        said = answer_logits(teacher, batch)[0]
    DistillationLoss()(logits, said, targets, wanted).backward()
    # the first step of Adam is the sign of the gradient, where that is not tiny
    trained = Decoder.from_pretrained(tmp_path / "student")
    for before, after in zip(model.parameters(), trained.parameters(), strict=True):
        large = before.grad.abs() > 1e-4
        moved = (after - before)[large]
        assert torch.allclose(moved, -1e-2 * before.grad[large].sign(), atol=2e-4)


def test_a_hugging_face_classifier_reads_scaled_images_in_the_order_of_the_task(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        image_size=8, patch_size=4, num_channels=3, id2label={0: "light", 1: "dark"},
        label2id={"light": 0, "dark": 1},
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path / "vit"
    plain = transformers.ViTForImageClassification(config).eval()
    plain.save_pretrained(folder)
    settings = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 1.0]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    task = ImageTask(images(tmp_path))
    teacher = load_teacher(folder, task)
    x = task.x[:3]
    sized = F.interpolate(x.expand(-1, 3, -1, -1), (8, 8), mode="bilinear", align_corners=False)
    mean, std = (torch.tensor(v)[:, None, None] for v in settings.values())
    with torch.no_grad():
        expected = plain(pixel_values=(sized - mean) / std).logits[:, [1, 0]]
        assert torch.allclose(teacher(x), expected, atol=1e-5)
        as_they_are = {**settings, "do_normalize": False}
        (folder / "preprocessor_config.json").write_text(json.dumps(as_they_are))
        expected = plain(pixel_values=sized).logits[:, [1, 0]]
        assert torch.allclose(load_teacher(folder, task)(x), expected, atol=1e-5)

    loss = {"name": "distillation", "teacher": str(folder)}
    found = job({"name": "images", "path": str(tmp_path / "dots.npz")}, loss=loss)
    assert train_labelled(found, tmp_path / "student", quiet=True).num_samples == 12

    other = ImageTask(images(tmp_path, ("cat", "dog")))
    with pytest.raises(UnsupportedError, match="light, dark and cat, dog"):
        load_teacher(folder, other)
    with pytest.raises(UnsupportedError, match="tokenizer of its own"):
        load_teacher(folder, CopyTask())
    with pytest.raises(UnsupportedError, match="reads images"):
        load_teacher(folder, TableTask(table(tmp_path)))


def test_teachers_that_do_not_fit(tmp_path: Path) -> None:
    task = {"name": "table", "path": str(table(tmp_path))}
    train_labelled(job(task), tmp_path / "rows", quiet=True)
    train_task(job({"name": "addition"}, model=TINY), tmp_path / "sums", quiet=True, num_samples=1)
    with pytest.raises(DataError, match="is no folder"):
        load_teacher(tmp_path / "none", CopyTask())
    with pytest.raises(UnsupportedError, match="same tokens"):
        load_teacher(tmp_path / "sums", CopyTask())
    assert load_teacher(tmp_path / "sums", AdditionTask()).training is False
    with pytest.raises(DataError, match="classifier of table"):
        load_teacher(tmp_path / "rows", CopyTask())
    more = TableTask(table(tmp_path, "more.csv", 90))
    with pytest.raises(DataError, match="other columns, or on other rows"):
        load_teacher(tmp_path / "rows", more)
    with pytest.raises(UnsupportedError, match="same classes"):
        load_teacher(tmp_path / "rows", ImageTask(images(tmp_path)))
    with pytest.raises(DataError, match="must be a run on a table"):
        load_teacher(tmp_path / "sums", more)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"name": "distillation"}, "teacher"),
        ({"name": "distillation", "teacher": "x", "tau": 2}, "unknown key 'tau'"),
        ({"name": "distillation", "teacher": "x", "temperature": 0.0}, "temperature"),
        ({"name": "distillation", "teacher": "x", "alpha": 1.5}, "alpha"),
    ],
)
def test_bad_tables(loss: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        taught_loss(loss)
