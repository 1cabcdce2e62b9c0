"""A training job as data: what `gossamer train` runs, keeps in `config.toml` and reads back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.checks import check_choice, check_given, check_keys, check_range, check_table
from gossamer.errors import ConfigError, DataError
from gossamer.files import begin_folder, read_toml
from gossamer.train._defaults import defaults_of
from gossamer.train.config import TrainConfig

if TYPE_CHECKING:
    from gossamer.models import Decoder, Encoder, ScaleInvariantTransformer, Seq2Seq

    AnyModel = Decoder | Encoder | ScaleInvariantTransformer | Seq2Seq
    from gossamer.tasks import GridCell, Task
    from gossamer.train.evaluation import GridResult
    from gossamer.train.pairs import Neighbors

__all__ = ["TrainJob", "load_run", "reachable_cells", "train_task"]

_MOST_ROWS = 1000
"""Rows of a cell of a user's file that are measured."""


@dataclass(frozen=True)
class TrainJob:
    """Everything that decides a training run; `from_dict` fills in what suits the task.

    Args:
        task: `{"name": ..., option: ...}` as `build_task` takes it.
        model: Keywords of the model without the vocabulary, and its `name`: `"decoder"` (default),
            `"encoder"`, `"scale_invariant"`, or `"seq2seq"` for pairs. Default one layer of width
            64 with coupled relative ids.
        train: Settings of the loop.
        loss: `{"name": ...}` as `build_class_loss` takes it, or with a teacher as `taught_loss`;
            for `"seq2seq"` as `train_pairs` takes it. Default cross-entropy.
        batch_size: Samples for each step. Range: >= 1. Default 64.
        seed: Of weights and samples. Range: >= 0. Default 0.

    Raises:
        ConfigError: If a value is unknown or out of range.

    Example:
        >>> TrainJob({"name": "addition", "digits": [1, 5]}).model["dim"]
        64
    """

    task: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=lambda: defaults_of({})["model"])
    train: TrainConfig = field(default_factory=lambda: TrainConfig(steps=1200, lr=3e-3))
    loss: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_given(self.task, "name", "[task]")
        if not isinstance(self.task["name"], str):
            raise ConfigError(f"the name in [task] must be text; got {self.task['name']!r}.")
        check_range(self.batch_size, "batch_size", low=1, integer=True)
        check_range(self.seed, "seed", low=0, high=2**32 - 1, integer=True)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], name: str) -> TrainJob:
        """Build a job from the tables of a TOML file; unknown keys are errors.

        Args:
            values: Tables `task`, `model`, `train`, `loss` and the keys `batch_size`, `seed`.
            name: Where they come from, for messages.
        """
        check_keys(values, [f.name for f in dataclasses.fields(cls)], name)
        if "task" not in values:
            raise ConfigError(f"{name} needs a table [task] with a name; got none. Add one.")
        for table in ("task", "model", "train", "loss"):
            check_table(values.get(table, {}), f"[{table}] of {name}")
        parts = dict(values)
        train = dict(parts.pop("train", {}))
        check_keys(train, [f.name for f in dataclasses.fields(TrainConfig)], f"[train] of {name}")
        task = _found(parts["task"])
        defaults = defaults_of(task, parts.get("model", {}), train)
        parts["task"] = defaults["task"] | task
        parts["model"] = defaults["model"] | dict(parts.get("model", {}))
        train = {**defaults["train"], **train}
        parts["train"] = TrainConfig(**{**train, **_betas(train)})
        parts.setdefault("batch_size", defaults["batch_size"])
        return cls(**parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as they stand in `config.toml`."""
        values = dataclasses.asdict(self)
        values["train"]["betas"] = list(self.train.betas)
        return values

    def build_task(self) -> Task:
        """Build the task."""
        from gossamer.tasks import build_task

        options = {key: value for key, value in self.task.items() if key != "name"}
        return build_task(self.task["name"], **options)

    def build_model(self, task: Task) -> AnyModel:
        """Build the model, with weights drawn from the seed."""
        import inspect

        import torch

        options = {key: value for key, value in self.model.items() if value is not None}
        kind = _model_class(options.pop("name", "decoder"))
        _check_pairs(kind, task)
        known = [p for p in inspect.signature(kind).parameters if p != "vocab_size"]
        check_keys(options, [*known, "name"], "[model]")
        for needed in ("dim", "num_layers", "num_heads"):
            check_given(options, needed, "[model]")
        if "positions" in options and task.levels > 1:
            options["positions"] = _with_levels(options["positions"], task.levels)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return kind(task.vocab_size, **options)

    def check(self, task: Task) -> None:
        """Build model, loss and optimiser once, so that a wrong option is found at once.

        Raises:
            ConfigError: If an option of one of them is unknown, or they do not fit each other.
            DataError: If a file that the loss names is wrong.
        """
        import torch

        from gossamer.models import Seq2Seq
        from gossamer.train.class_losses import build_class_loss
        from gossamer.train.optimizers import build_optimizers
        from gossamer.train.taught import has_teacher, load_teacher, taught_loss

        if has_teacher(self.loss):
            taught_loss(self.loss)
            load_teacher(self.loss["teacher"], task)
        elif _model_class(self.model.get("name", "decoder")) is not Seq2Seq:
            build_class_loss(self.loss, task.vocab_size)
        build_optimizers(self.build_model(task), self.train, torch.device("cpu"))


def _betas(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pair as the configuration takes it; TOML knows lists only."""
    return {"betas": tuple(train["betas"])} if isinstance(train.get("betas"), list) else {}


def _found(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a task, for a user's file with what is found in it."""
    values = dict(task)
    if values.get("name") == "file" and "facts" not in values:
        from gossamer.tasks import build_task

        return build_task(values.pop("name"), **values).config
    return values


def _model_class(name: Any) -> type[AnyModel]:
    from gossamer.models import Decoder, Encoder, ScaleInvariantTransformer, Seq2Seq

    kinds: dict[str, Any] = {
        "decoder": Decoder,
        "encoder": Encoder,
        "scale_invariant": ScaleInvariantTransformer,
        "seq2seq": Seq2Seq,
    }
    check_choice(str(name), kinds, "model")
    found: type[AnyModel] = kinds[name]
    return found


def _check_pairs(kind: type, task: Task) -> None:
    from gossamer.models import Seq2Seq
    from gossamer.tasks import PairsTask

    if issubclass(kind, Seq2Seq) and not isinstance(task, PairsTask):
        raise ConfigError(
            f"the model seq2seq needs pairs of texts; got the task {task.config['name']!r}. Give "
            "--task pairs:FILE.tsv, or choose a decoder."
        )


def _with_levels(positions: Any, levels: int) -> Any:
    """Return an entry of positions that reads as many levels as the task has, unless it says so."""
    entry = {"name": positions} if isinstance(positions, str) else positions
    leveled = isinstance(entry, Mapping) and entry.get("name") in ("coupled", "coupled_relative")
    return {**entry, "levels": levels} if leveled and "levels" not in entry else positions


def train_task(
    job: TrainJob,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    num_samples: int = 200,
    quiet: bool = False,
    task: Task | None = None,
    neighbors: Neighbors | None = None,
) -> GridResult:
    """Train the job's model, keep it in a run folder, and measure it beyond the trained length.

    The folder then holds `config.toml`, `metrics.jsonl`, `model.safetensors` and `config.json`.
    The last step is kept: nothing is chosen by looking at test lengths.

    Args:
        job: What to train.
        folder: Run folder.
        resume: Go on from the folder's checkpoint, if there is one.
        num_samples: Test samples in each cell. Default 200. A user's file has its own rows: all
            of a cell, up to 1000.
        quiet: Show no progress. Default false.
        task: What `job.build_task()` gave, so that a long file is not read again. Default: built.
        neighbors: For `"seq2seq"`, the table that `job.loss` names.

    Raises:
        DataError: If the folder was begun with other settings.
        GossamerError: If the loss is not finite; the message names the step.
    """
    import tomli_w

    from gossamer.train.class_losses import build_class_loss
    from gossamer.train.distill import distill
    from gossamer.train.logging import FileLogger
    from gossamer.train.loop import Trainer
    from gossamer.train.losses import AnswerLoss
    from gossamer.train.seeding import seed_all
    from gossamer.train.taught import has_teacher, load_teacher, taught_loss

    path = Path(folder)
    task = task or job.build_task()
    if job.model.get("name") == "seq2seq":
        from gossamer.train.pairs import train_pairs

        return train_pairs(job, path, resume=resume, quiet=quiet, task=task, neighbors=neighbors)
    model: Any = job.build_model(task)
    # built before the folder is made, so that a wrong option leaves none
    loss: Any
    if has_teacher(job.loss):
        loss, teacher = taught_loss(job.loss), load_teacher(job.loss["teacher"], task)
    else:
        loss, teacher = build_class_loss(job.loss, task.vocab_size), None
    # all options, so that the run is known by its folder alone
    job = dataclasses.replace(job, task=task.config)
    cells = reachable_cells(model, task)
    seed_all(job.seed)  # what dropout and random starts draw from
    begin_folder(path, tomli_w.dumps(job.to_dict()), resume=resume)
    stream, logger = task.stream(job.batch_size, seed=job.seed), FileLogger(path)
    if teacher is not None:
        distill(
            teacher, model, stream,
            loss=loss, config=job.train, logger=logger, resume=resume, quiet=quiet,
        )  # fmt: skip
    else:
        trainer = Trainer(model, AnswerLoss(loss), job.train, logger=logger, quiet=quiet)
        trainer.fit(stream, resume=resume)
    model.save_pretrained(path)
    return _measure(model, task, cells, num_samples)


def _measure(model: Any, task: Task, cells: list[GridCell], num_samples: int) -> GridResult:
    """Measure cell by cell: `num_samples` fresh ones, or the rows that a file has."""
    import torch

    from gossamer.tasks import FileTask
    from gossamer.train.evaluation import GridResult, evaluate_task

    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, Any]] = []
    for cell in cells:
        file = isinstance(cell.task, FileTask)
        count = min(cell.coordinates["rows"], _MOST_ROWS) if file else num_samples
        result = evaluate_task(model, task, [cell], num_samples=count, generator=generator)
        rows += result.rows()
    return GridResult(tuple(rows))


def reachable_cells(model: Any, task: Task) -> list[GridCell]:
    """Return the cells of the task's grid whose samples the model can take.

    Args:
        model: Is left in evaluation mode.
        task: What it is trained on.

    Raises:
        DataError: If it cannot take even the trained length.
    """
    import torch

    cells: list[GridCell] = []
    for cell in task.grid():
        sample = cell.task.sample(1, generator=torch.Generator().manual_seed(0), split="test")
        try:
            with torch.no_grad():
                model.eval()(sample.tokens, sample.position_ids)
        except DataError:
            if not cells:
                raise
            break
        cells.append(cell)
    return cells


def load_run(folder: str | os.PathLike[str]) -> tuple[AnyModel, Task]:
    """Return the model and the task of a run folder that `train_task` or `gossamer train` wrote.

    Raises:
        DataError: If a file is missing or broken.
    """
    from gossamer.tasks import LABELLED_NAMES

    path = Path(folder)
    if not path.is_dir():
        raise DataError(
            f"expected a run folder of `gossamer train`; {path} is no folder. Check the path."
        )
    values = read_toml(path / "config.toml", "Give a run folder of `gossamer train`.")
    if "recipe" in values:
        raise DataError(
            f"expected a run folder of `gossamer train`; {path} is one of `gossamer reproduce`, "
            "which keeps no model. Train one: gossamer train --task addition."
        )
    job = TrainJob.from_dict(values, str(path / "config.toml"))
    if job.task["name"] in LABELLED_NAMES:
        raise DataError(
            f"expected a run on sequences; {path} is a classifier of {job.task['name']}. Use "
            "load_labelled_run."
        )
    model = _model_class(job.model.get("name", "decoder"))
    return model.from_pretrained(path), job.build_task()
