"""The teacher that a table [loss] names: a run of this library, or a folder of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_given, check_keys
from gossamer.errors import ConfigError, DataError, MissingDependencyError, UnsupportedError
from gossamer.files import read_json
from gossamer.losses import DistillationLoss
from gossamer.tasks import LabelledTask, Task

__all__ = ["HuggingFaceClassifier", "has_teacher", "load_teacher", "taught_loss"]

_KEYS = ("name", "teacher", "alpha", "temperature")
_TOKENIZERS = (
    "Distillation compares probabilities class by class, so both must have one vocabulary. Train "
    "the teacher on the same task and file, or train on texts that it wrote."
)


def has_teacher(loss: Mapping[str, Any]) -> bool:
    """Whether a table [loss] names a teacher."""
    return loss.get("name") == "distillation"


def taught_loss(loss: Mapping[str, Any]) -> DistillationLoss:
    """Return the loss of a table `{"name": "distillation", "teacher": PATH, ...}`.

    Args:
        loss: With `alpha`, share of the teacher, and `temperature`, where they differ from the
            defaults of `DistillationLoss`.

    Raises:
        ConfigError: If a key is unknown or missing, or a number out of its range.

    Example:
        >>> taught_loss({"name": "distillation", "teacher": "runs/t", "alpha": 0.5}).alpha
        0.5
    """
    check_keys(loss, _KEYS, "loss 'distillation'")
    check_given(loss, "teacher", "loss 'distillation'")
    return DistillationLoss(**{k: v for k, v in loss.items() if k in ("alpha", "temperature")})


def load_teacher(folder: str | os.PathLike[str], task: Task | LabelledTask) -> nn.Module:
    """Return the teacher, in evaluation mode; its classes are those of the task.

    Args:
        folder: A run of `gossamer train`, or a folder of a Hugging Face image classifier, for a
            task on images.
        task: What the student is trained on.

    Raises:
        DataError: If the folder holds no such model, or was trained on other columns.
        UnsupportedError: If its classes or its vocabulary are others than those of the task.
        MissingDependencyError: If transformers is needed and not installed.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(
            f"teacher must be a run folder of `gossamer train` or a folder of a Hugging Face model;"
            f" {path} is no folder. Check the path."
        )
    if not (path / "config.toml").is_file():
        return _hugging_face(path, task)
    if isinstance(task, LabelledTask):
        return _labelled(path, task)
    from gossamer.train.job import load_run

    model, known = load_run(path)
    if known.vocab != task.vocab:
        raise UnsupportedError(
            f"teacher and student must have the same tokens; {path} has {known.vocab_size} and the "
            f"task {task.vocab_size}, or others. {_TOKENIZERS}"
        )
    return model


def _labelled(path: Path, task: LabelledTask) -> nn.Module:
    from gossamer.train.labelled import load_labelled_run

    model, table = load_labelled_run(path)
    facts = table["facts"]
    _check_classes(path, facts["classes"], task)
    width = model.config["num_features"]
    columns = task.config["facts"].get("columns")
    if width != task.x[0].numel() or columns != facts.get("columns"):
        raise DataError(
            f"the teacher in {path} must read the rows as the student does; it was trained on "
            "other columns, or on other rows of training. Train both on one file."
        )
    return model


def _check_classes(path: Path, classes: Sequence[str], task: LabelledTask) -> None:
    if tuple(classes) != task.classes:
        raise UnsupportedError(
            f"teacher and student must have the same classes; {path} has {len(classes)}, the task "
            f"{task.num_classes}, or others: {', '.join(map(str, classes[:5]))} and "
            f"{', '.join(task.classes[:5])}. Train both on one file."
        )


def _hugging_face(path: Path, task: Task | LabelledTask) -> nn.Module:
    if isinstance(task, Task):
        raise UnsupportedError(
            f"{path} has a tokenizer of its own, and the task {task.config['name']!r} another. "
            f"{_TOKENIZERS}"
        )
    if len(task.shape) != 3:
        raise UnsupportedError(
            f"a Hugging Face teacher reads images; got the task {task.config['name']!r} in {path}. "
            "Give a run of `gossamer train`."
        )
    try:
        from transformers import AutoModelForImageClassification
    except ImportError:
        raise MissingDependencyError("transformers", "hf") from None
    try:
        model = AutoModelForImageClassification.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise DataError(
            f"teacher must be a run folder of `gossamer train` or a folder of a Hugging Face image "
            f"classifier; {path}: {first} Check the path."
        ) from None
    return HuggingFaceClassifier(model, path, task).eval()


class HuggingFaceClassifier(nn.Module):
    """A Hugging Face image classifier on the images of a task: scaled, sized, classes in order.

    Args:
        model: Called with `pixel_values`, returns an object with `logits`.
        folder: Its folder; `preprocessor_config.json` says mean and deviation (0.5 if there is no
            such file), or that images are taken as they are.
        task: Gives the classes and the channels.

    Shape:
        - x: `(B, C, H, W)`, between 0 and 1.
        - output: `(B, number of classes)`.

    Raises:
        UnsupportedError: If its labels are not the classes of the task.

    Source: `AutoModelForImageClassification` of transformers.
    Deviations: bilinear resizing of the batch in place of that of its image processor.
    """

    mean: Tensor
    std: Tensor
    order: Tensor

    def __init__(
        self, model: nn.Module, folder: str | os.PathLike[str], task: LabelledTask
    ) -> None:
        super().__init__()
        self.model = model
        config: Any = model.config
        names = [str(config.id2label[n]) for n in sorted(config.id2label)]
        if names == [f"LABEL_{n}" for n in range(len(names))]:
            names = list(task.classes) if len(names) == task.num_classes else names
        if sorted(names) != sorted(task.classes):
            _check_classes(Path(folder), names, task)
        self.register_buffer("order", torch.tensor([names.index(name) for name in task.classes]))
        settings = Path(folder) / "preprocessor_config.json"
        values = read_json(settings) if settings.is_file() else {}
        self.channels = int(getattr(config, "num_channels", 3))
        scaled = values.get("do_normalize", True)
        for name, default, plain in (("mean", 0.5, 0.0), ("std", 0.5, 1.0)):
            given = values.get(f"image_{name}", default) if scaled else plain
            numbers = torch.tensor(given, dtype=torch.float32).expand(self.channels)
            self.register_buffer(name, numbers[:, None, None].clone())
        size = getattr(config, "image_size", None)
        self.size = (size, size) if isinstance(size, int) else size and tuple(size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the classes of the task."""
        if x.shape[1] == 1 and self.channels == 3:
            x = x.expand(-1, 3, -1, -1)
        if x.shape[1] != self.channels:
            raise ConfigError(
                f"the teacher reads images of {self.channels} channels; got {x.shape[1]}. Convert "
                "the images."
            )
        if self.size and tuple(x.shape[2:]) != tuple(self.size):
            x = F.interpolate(x, self.size, mode="bilinear", align_corners=False)
        logits: Tensor = self.model(pixel_values=(x - self.mean) / self.std).logits
        return logits[:, self.order]
