"""Train a student on a teacher that runs beside it, or on outputs that were stored."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.checks import check_choice
from gossamer.errors import ConfigError
from gossamer.losses import DistillationLoss
from gossamer.measures.variance import evaluating
from gossamer.train._teaching import check_same_words, given
from gossamer.train.config import TrainConfig
from gossamer.train.devices import pick_device
from gossamer.train.logging import Logger
from gossamer.train.loop import NumberedBatches, Trainer, TrainResult, numbered
from gossamer.train.teacher_cache import TeacherCache

__all__ = ["DistillResult", "distill"]

TEACHING = ("consistent", "fixed")


@dataclass(frozen=True)
class DistillResult:
    """What a distillation came to, and what a reader of its deviations must know.

    Args:
        train: Of the student.
        teaching: `"consistent"` or `"fixed"`.
        temperature: Of the loss.
        alpha: Share of the teacher; `None` if it is a function of the step.
        targets: `"all classes"`, or `"top k and the rest"` with the number k.

    Example:
        >>> train = TrainResult(10, 0.5, 1.0)
        >>> DistillResult(train, "fixed", 4.0, 0.9, "all classes").rows()[0]["teaching"]
        'fixed'
    """

    train: TrainResult
    teaching: str
    temperature: float
    alpha: float | None
    targets: str

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures as one plain row."""
        own = {name: value for name, value in vars(self).items() if name != "train"}
        return [{**own, **self.train.to_dict()}]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**vars(self), "train": self.train.to_dict()}


def distill(
    teacher: nn.Module | TeacherCache,
    student: nn.Module,
    batches: NumberedBatches | Iterable[Any],
    *,
    loss: DistillationLoss | None = None,
    config: TrainConfig | None = None,
    teaching: str = "consistent",
    logger: Logger | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> DistillResult:
    """Train a student on a teacher's probabilities.

    A teacher that runs beside the student is held in evaluation mode, without gradients, and put
    back into its mode and on its device afterwards.

    Args:
        teacher: A module; or a `TeacherCache`, for `teaching="fixed"`.
        student: A module with the same classes; it is trained in place.
        batches: `(inputs, labels)`, `(inputs, labels, ids)`, mappings with the keys `inputs`,
            `labels`, `ids`, `mask`, or batches of a task. `inputs` is a tensor, a mapping of
            keywords, or a tuple of arguments. Labels may be `None` if the loss has alpha 1; `mask`
            is True where a row counts. Nothing is shifted: for a causal model of Hugging Face
            `labels[:, t]` is the token after the one at t.
        loss: Default `DistillationLoss()`.
        config: Of the training. Default `TrainConfig()`.
        teaching: `"consistent"`: the teacher sees what the student sees at this step, augmentation
            included. `"fixed"`: stored outputs, by id. It changes the deviations, so the result
            names it. Default `"consistent"`.
        logger: Where numbers and checkpoints go. Default nowhere.
        resume: Go on from the checkpoint in the logger's folder, if there is one. Default false.
        quiet: Show no progress. Default false.

    Raises:
        ConfigError: If teacher and teaching do not fit, or teacher and student are one module.
        UnsupportedError: If the models have different tokenizers.
        ShapeError: If they have different numbers of classes.
        DataError: If a batch is of no known form, or the cache lacks an example.
        GossamerError: If a loss is not finite; the message names the step.

    Example:
        >>> teacher, student = nn.Linear(2, 3).eval(), nn.Linear(2, 3)
        >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
        >>> config = TrainConfig(steps=2, device="cpu")
        >>> distill(teacher, student, batches, config=config, quiet=True).train.steps
        2

    Source: Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015; consistent and
        fixed teaching: Beyer et al., *Knowledge distillation: A good teacher is patient and
        consistent*, CVPR 2022.
    Deviations: none
    """
    check_choice(teaching, TEACHING, "teaching")
    loss = loss or DistillationLoss()
    config = config or TrainConfig()
    if (teaching == "fixed") != isinstance(teacher, TeacherCache):
        raise ConfigError(
            "teaching 'fixed' needs a TeacherCache as teacher, and 'consistent' a module; got "
            f"{teaching!r} with a {type(teacher).__name__}. Store the outputs with "
            "TeacherCache(path).build(teacher, batches), or change teaching."
        )
    targets = "all classes"
    if isinstance(teacher, TeacherCache):
        targets = teacher.targets
    elif teacher is student:
        raise ConfigError("teacher and student must be two modules; got one. Copy it first.")
    else:
        check_same_words(teacher, student)

    def step_loss(model: nn.Module, batch: tuple[int, Any]) -> Tensor:
        step, raw = batch
        device = next(model.parameters()).device
        part = given(raw).to(device)
        logits = part.logits(model)
        labels, mask = part.targets(model)
        if isinstance(teacher, TeacherCache):
            said = teacher.read(part.ids).to(device)
        else:
            with torch.no_grad():
                said = part.logits(teacher)
        value: Tensor = loss(logits, said, labels, mask, step=step)
        return value

    trainer = Trainer(student, step_loss, config, logger=logger, quiet=quiet)
    with _teaching(teacher, pick_device(config.device)):
        result = trainer.fit(_WithStep(batches), resume=resume)
    alpha = None if callable(loss.alpha) else loss.alpha
    return DistillResult(result, teaching, loss.temperature, alpha, targets)


@contextmanager
def _teaching(teacher: nn.Module | TeacherCache, device: torch.device) -> Iterator[None]:
    """Hold a teacher in evaluation mode on a device, and put it back as it was."""
    if isinstance(teacher, TeacherCache):
        yield
        return
    if teacher.training:
        warnings.warn(
            "the teacher was in training mode; it runs in evaluation mode here. Call "
            "teacher.eval() first.",
            stacklevel=4,
        )
    before = next(teacher.parameters(), torch.zeros(())).device
    teacher.to(device)
    try:
        with evaluating(teacher):
            yield
    finally:
        teacher.to(before)


class _WithStep:
    """Batches with the step they belong to, which a changing share of the teacher needs."""

    def __init__(self, batches: NumberedBatches | Iterable[Any]) -> None:
        self.source = numbered(batches)

    def batch(self, number: int) -> tuple[int, Any]:
        """Return step and batch; w processes take w batches in each step."""
        launched = torch.distributed.is_available() and torch.distributed.is_initialized()
        processes = torch.distributed.get_world_size() if launched else 1
        return number // processes, self.source(number)
