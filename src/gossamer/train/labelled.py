"""Training on rows with one class each: a table, images, or arrays of one's own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.checks import check_choice, check_given, check_keys, check_range
from gossamer.errors import ConfigError, DataError
from gossamer.files import begin_folder, read_toml
from gossamer.losses import LabelSmoothingLoss, estimate_transition
from gossamer.models import MultiLayerPerceptron
from gossamer.tasks import (
    LABELLED_NAMES,
    LabelledBatch,
    LabelledStream,
    LabelledTask,
    build_labelled_task,
)
from gossamer.train.class_losses import build_class_loss
from gossamer.train.config import TrainConfig
from gossamer.train.devices import pick_device
from gossamer.train.distill import distill
from gossamer.train.job import TrainJob
from gossamer.train.logging import FileLogger, Logger
from gossamer.train.loop import Trainer
from gossamer.train.optimizers import build_optimizers
from gossamer.train.seeding import seed_all
from gossamer.train.taught import has_teacher, load_teacher, taught_loss

__all__ = [
    "LabelledResult",
    "fit_rows",
    "load_labelled_run",
    "out_of_fold",
    "predict_rows",
    "train_labelled",
]

FOLDS = 3
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class LabelledResult:
    """What a training run on labelled rows came to.

    Args:
        accuracy: Share of the test rows whose predicted class is their label.
        cross_entropy: Of their labels. Unit: nats for each row.
        num_samples: Test rows.
        transition: The estimated chances of labels `(C, C)`, or `None`.
        probabilities: Of the test rows, `(N, C)`.
        labels: Of the test rows, `(N,)`.
    """

    accuracy: float
    cross_entropy: float
    num_samples: int
    transition: NDArray[np.float64] | None
    probabilities: NDArray[np.float64]
    labels: NDArray[np.int64]

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures as one plain row."""
        names = ("accuracy", "cross_entropy", "num_samples")
        return [{name: getattr(self, name) for name in names}]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and the matrix as plain values."""
        matrix = None if self.transition is None else self.transition.tolist()
        return {**self.rows()[0], "transition": matrix}


def fit_rows(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    config: TrainConfig,
    *,
    batch_size: int = 64,
    seed: int = 0,
    logger: Logger | None = None,
    resume: bool = False,
    quiet: bool = True,
) -> None:
    """Train a classifier on rows; it is left in evaluation mode.

    Args:
        model: Called with `(B, ...)`, returns logits `(B, C)`.
        x: `(N, ...)`.
        labels: `(N,)`, or distributions `(N, C)`.
        loss: Called with logits and labels.
        config: Settings of the loop.
        batch_size: Rows for each step. Range: >= 1. Default 64.
        seed: Of the order of the rows. Default 0.
        logger: Where numbers and checkpoints go; default nowhere.
        resume: Go on from the checkpoint in the logger's folder. Default false.
        quiet: Show no progress. Default true.
    """

    def of_batch(module: nn.Module, batch: LabelledBatch) -> Tensor:
        return loss(module(batch.x), batch.labels)

    trainer = Trainer(model, of_batch, config, logger=logger, quiet=quiet)
    trainer.fit(LabelledStream(x, labels, batch_size, seed), resume=resume)
    model.eval()


@torch.no_grad()
def predict_rows(model: nn.Module, x: Tensor) -> Tensor:
    """Return the probabilities of the classes of rows, `(N, C)`, float64 on the CPU.

    Args:
        model: In the mode it is in.
        x: `(N, ...)`.
    """
    device = next(model.parameters()).device
    parts = [
        model(part.to(device)).double().softmax(1).cpu() for part in torch.split(x, _ROWS_AT_ONCE)
    ]
    return torch.cat(parts)


def out_of_fold(
    build: Callable[[], nn.Module],
    x: Tensor,
    labels: Tensor,
    config: TrainConfig,
    *,
    batch_size: int = 64,
    seed: int = 0,
    folds: int = FOLDS,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Return what models that did not see a row say of it, `(N, C)` probabilities.

    The rows are cut into folds with about as many of each class; for each, a new model is trained
    by cross-entropy on the others.

    Args:
        build: Makes an untrained model.
        x: `(N, ...)`.
        labels: `(N,)`, classes from 0.
        config: Settings of the loop, for each fold.
        batch_size: Rows for each step. Default 64.
        seed: Of folds and orders. Default 0.
        folds: Range: 2 to N. Default 3.
        progress: Called with the number of folds done.

    Raises:
        ConfigError: If there are fewer than two rows, or not 2 to N folds.
    """
    check_range(folds, "folds", low=2, high=len(x), integer=True)
    place = _folds(labels, folds, seed)
    found: list[Tensor | None] = [None] * folds
    for fold in range(folds):
        held = place == fold
        model = build()
        loss = LabelSmoothingLoss(0.0)
        fit_rows(model, x[~held], labels[~held], loss, config, batch_size=batch_size, seed=seed)
        found[fold] = predict_rows(model, x[held])
        if progress is not None:
            progress(fold + 1)
    probabilities = torch.empty(len(x), _width(found), dtype=torch.float64)
    for fold, part in enumerate(found):
        if part is not None:
            probabilities[place == fold] = part
    return probabilities


def _width(parts: list[Tensor | None]) -> int:
    return next(part.shape[1] for part in parts if part is not None)


def _folds(labels: Tensor, folds: int, seed: int) -> Tensor:
    """Return the fold of each row: rows of a class, in random order, are dealt out in turn."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
    by_class = order[labels[order].argsort(stable=True)]
    place = torch.empty(len(labels), dtype=torch.long)
    place[by_class] = torch.arange(len(labels)) % folds
    return place


def train_labelled(
    job: TrainJob,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    quiet: bool = False,
    task: LabelledTask | None = None,
) -> LabelledResult:
    """Train the job's classifier, keep it in a run folder, and measure it on the test rows.

    The folder then holds `config.toml`, `metrics.jsonl`, `model.safetensors` and `config.json`;
    with an estimated matrix also `transition.npy`. The last step is kept. The labels of the test
    rows come from the same file, so that where labels are wrong some of those are too.

    Args:
        job: What to train; its `loss` may have `noise_matrix = "estimate"`, which trains three more
            models to estimate it from rows that they did not see, or name a teacher.
        folder: Run folder.
        resume: Go on from the folder's checkpoint, if there is one.
        quiet: Show no progress. Default false.
        task: What the job's task is, so that a long file is not read again. Default: built.

    Raises:
        ConfigError: If an option is unknown.
        DataError: If the folder was begun with other settings.
        GossamerError: If the loss is not finite; the message names the step.
    """
    import tomli_w

    path = Path(folder)
    task = task or labelled_task(job)
    model = build_classifier(job, task)
    check_labelled(job, task)
    job = dataclasses.replace(job, task=task.config)
    begin_folder(path, tomli_w.dumps(job.to_dict()), resume=resume)
    rows, transition = task.rows("train"), None
    if job.loss.get("noise_matrix") == "estimate":
        transition = _estimated(job, task, rows, path, resume=resume, quiet=quiet)
    seed_all(job.seed)
    if has_teacher(job.loss):
        distill(
            load_teacher(job.loss["teacher"], task), model,
            task.stream(job.batch_size, seed=job.seed), loss=taught_loss(job.loss),
            config=job.train, logger=FileLogger(path), resume=resume, quiet=quiet,
        )  # fmt: skip
        model.eval()
    else:
        built = build_class_loss(job.loss, task.num_classes, transition=transition)
        fit_rows(
            model, rows.x, rows.labels, built, job.train, batch_size=job.batch_size,
            seed=job.seed, logger=FileLogger(path), resume=resume, quiet=quiet,
        )  # fmt: skip
    model.save_pretrained(path)
    test = task.rows("test")
    p = predict_rows(model, test.x)
    right = p.argmax(1) == test.labels
    return LabelledResult(
        accuracy=float(right.double().mean()),
        cross_entropy=float(-p[torch.arange(len(p)), test.labels].log().mean()),
        num_samples=len(test),
        transition=transition,
        probabilities=p.numpy(),
        labels=test.labels.numpy(),
    )


def _estimated(
    job: TrainJob,
    task: LabelledTask,
    rows: LabelledBatch,
    folder: Path,
    *,
    resume: bool,
    quiet: bool,
) -> NDArray[np.float64]:
    """Return the estimated matrix, from the folder if an earlier part of the run wrote it."""
    from gossamer.files import replacing
    from gossamer.progress import progress

    kept = folder / "transition.npy"
    if resume and kept.is_file():
        matrix: NDArray[np.float64] = np.load(kept, allow_pickle=False)
        return matrix
    config = dataclasses.replace(job.train, checkpoint_every=0)
    with progress("estimating the noise", FOLDS, quiet=quiet) as bar:
        p = out_of_fold(
            lambda: build_classifier(job, task), rows.x, rows.labels, config,
            batch_size=job.batch_size, seed=job.seed, progress=lambda done: bar.update(done, ""),
        )  # fmt: skip
    matrix = estimate_transition(p, rows.labels, method="confident").numpy()
    with replacing(kept) as temporary, temporary.open("wb") as file:
        np.save(file, matrix)
    return matrix


def check_labelled(job: TrainJob, task: LabelledTask) -> None:
    """Build model, loss and optimiser once, so that a wrong option is found at once.

    Raises:
        ConfigError: If an option of one of them is unknown, or they do not fit each other.
        DataError: If the file of the matrix is wrong, or a class has too few rows to estimate one.
    """
    if job.train.optimizer == "scale_invariant_sgd":
        raise ConfigError(
            "optimizer scale_invariant_sgd belongs to the model scale_invariant, on sequences; got "
            f"the task {job.task['name']}. Use adamw or sgd."
        )
    build_optimizers(build_classifier(job, task), job.train, torch.device("cpu"))
    if has_teacher(job.loss):
        taught_loss(job.loss)
        load_teacher(job.loss["teacher"], task)
        return
    estimate = job.loss.get("noise_matrix") == "estimate"
    # stands for a matrix that only training will give
    begin = np.eye(task.num_classes) if estimate else None
    build_class_loss(job.loss, task.num_classes, transition=begin)
    if estimate:
        check_estimable(task.rows("train").labels, task.classes)


def check_estimable(labels: Tensor, classes: Sequence[Any]) -> None:
    """Check that every class has rows enough to estimate how its labels go wrong.

    Raises:
        DataError: If a class has fewer than two; the message names it.
    """
    counts = torch.bincount(labels, minlength=len(classes))
    fewest = int(counts.argmin())
    if counts[fewest] < 2:
        raise DataError(
            "every class needs two rows of training at least to estimate the noise; got "
            f"{int(counts[fewest])} of class {str(classes[fewest])!r}. Give the matrix, leave the "
            "class out, or use the loss smoothing."
        )


def labelled_task(job: TrainJob) -> LabelledTask:
    """Build the task of a job on labelled rows."""
    options = {key: value for key, value in job.task.items() if key not in ("name", "facts")}
    return build_labelled_task(job.task["name"], **options)


def build_classifier(job: TrainJob, task: LabelledTask) -> MultiLayerPerceptron:
    """Build the model of a job on labelled rows, with weights drawn from the seed."""
    options: dict[str, Any] = dict(job.model)
    check_choice(str(options.pop("name", "mlp")), ("mlp",), "model for labelled rows")
    check_keys(options, ("hidden_dims",), "[model]")
    return seeded_mlp(job.seed, int(np.prod(task.shape)), task.num_classes, **options)


def seeded_mlp(
    seed: int, num_features: int, num_classes: int, **options: Any
) -> MultiLayerPerceptron:
    """Build an untrained network whose weights are drawn from a seed; no global state changes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MultiLayerPerceptron(num_features, num_classes, **options)


def load_labelled_run(
    folder: str | os.PathLike[str], *, device: str = "cpu"
) -> tuple[MultiLayerPerceptron, Mapping[str, Any]]:
    """Return the classifier of a run folder and the table of its task, with what it was told.

    Args:
        folder: What `train_labelled` wrote.
        device: Where the weights go. Default `"cpu"`.

    Raises:
        DataError: If a file is missing or broken, or the run is of another kind.
    """
    path = Path(folder)
    values = read_toml(path / "config.toml", "Give a run folder of `gossamer train`.")
    task = values.get("task", {})
    check_given(task, "name", f"[task] of {path / 'config.toml'}")
    if task["name"] not in LABELLED_NAMES:
        raise DataError(
            f"{path} must be a run on a table or on images; got one on {task['name']!r}. Use "
            "load_run."
        )
    model = MultiLayerPerceptron.from_pretrained(path)
    return model.to(pick_device(device)), task
