"""A training job as data: what `gossamer train` runs, keeps in `config.toml` and reads back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.checks import check_given, check_keys, check_range, check_table
from gossamer.errors import ConfigError, DataError
from gossamer.files import begin_folder, read_toml
from gossamer.train.config import TrainConfig

if TYPE_CHECKING:
    from gossamer.models import Decoder
    from gossamer.tasks import GridCell, Task
    from gossamer.train.evaluation import GridResult

__all__ = ["TrainJob", "load_run", "train_task"]

# measured to be exact at ten times the trained length after half a minute on one core
_DECODER = {
    "dim": 64,
    "num_layers": 1,
    "num_heads": 4,
    "positions": "coupled_relative",
    "feed_forward": {"name": "gated", "hidden_dim": 256},
    "norm": "pre_post",
}
_TASK_DEFAULTS: dict[str, dict[str, Any]] = {"addition": {"carry_chains": 0.3}}


@dataclass(frozen=True)
class TrainJob:
    """Everything that decides a training run.

    Args:
        task: `{"name": ..., option: ...}` as `build_task` takes it.
        model: Keywords of `Decoder` without the vocabulary. Default one layer of width 64 with
            coupled relative ids.
        train: Settings of the loop.
        batch_size: Samples for each step. Range: >= 1. Default 64.
        seed: Of weights and samples. Range: >= 0. Default 0.

    Raises:
        ConfigError: If a value is unknown or out of range.

    Example:
        >>> TrainJob({"name": "addition", "digits": [1, 5]}).model["dim"]
        64
    """

    task: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=lambda: dict(_DECODER))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(steps=1200, lr=3e-3))
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
            values: Tables `task`, `model`, `train` and the keys `batch_size`, `seed`.
            name: Where they come from, for messages.
        """
        check_keys(values, [f.name for f in dataclasses.fields(cls)], name)
        if "task" not in values:
            raise ConfigError(f"{name} needs a table [task] with a name; got none. Add one.")
        for table in ("task", "model", "train"):
            check_table(values.get(table, {}), f"[{table}] of {name}")
        parts = dict(values)
        train = dict(parts.pop("train", {}))
        check_keys(train, [f.name for f in dataclasses.fields(TrainConfig)], f"[train] of {name}")
        if isinstance(train.get("betas"), list):
            train["betas"] = tuple(train["betas"])
        parts["model"] = _DECODER | dict(parts.get("model", {}))
        parts["train"] = dataclasses.replace(TrainConfig(steps=1200, lr=3e-3), **train)
        task = parts["task"]
        parts["task"] = _TASK_DEFAULTS.get(task.get("name", ""), {}) | dict(task)
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

    def build_model(self, task: Task) -> Decoder:
        """Build the model, with weights drawn from the seed."""
        import inspect

        import torch

        from gossamer.models import Decoder

        known = [p for p in inspect.signature(Decoder).parameters if p != "vocab_size"]
        check_keys(self.model, known, "[model]")
        for needed in ("dim", "num_layers", "num_heads"):
            check_given(self.model, needed, "[model]")
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return Decoder(task.vocab_size, **self.model)


def train_task(
    job: TrainJob,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    num_samples: int = 200,
    quiet: bool = False,
) -> GridResult:
    """Train the job's model, keep it in a run folder, and measure it beyond the trained length.

    The folder then holds `config.toml`, `metrics.jsonl`, `model.safetensors` and `config.json`.
    The last step is kept: nothing is chosen by looking at test lengths.

    Args:
        job: What to train.
        folder: Run folder.
        resume: Go on from the folder's checkpoint, if there is one.
        num_samples: Test samples in each cell. Default 200.
        quiet: Show no progress. Default false.

    Raises:
        DataError: If the folder was begun with other settings.
        GossamerError: If the loss is not finite; the message names the step.
    """
    import tomli_w

    from gossamer.train.evaluation import evaluate_task
    from gossamer.train.logging import FileLogger
    from gossamer.train.loop import Trainer
    from gossamer.train.losses import answer_loss
    from gossamer.train.seeding import seed_all

    path = Path(folder)
    task = job.build_task()
    model = job.build_model(task)
    cells = _reachable(model, task)
    seed_all(job.seed)  # what dropout and random starts draw from
    begin_folder(path, tomli_w.dumps(job.to_dict()), resume=resume)
    trainer = Trainer(model, answer_loss, job.train, logger=FileLogger(path), quiet=quiet)
    trainer.fit(task.stream(job.batch_size, seed=job.seed), resume=resume)
    model.save_pretrained(path)
    return evaluate_task(model, task, cells, num_samples=num_samples)


def _reachable(model: Decoder, task: Task) -> list[GridCell]:
    """Return the cells of the task's grid whose samples the model can take, found before training.

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


def load_run(folder: str | os.PathLike[str]) -> tuple[Decoder, Task]:
    """Return the model and the task of a run folder that `train_task` or `gossamer train` wrote.

    Raises:
        DataError: If a file is missing or broken.
    """
    from gossamer.models import Decoder

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
    return Decoder.from_pretrained(path), job.build_task()
