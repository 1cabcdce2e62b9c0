"""The one training loop: over Accelerate, resumable to the bit, with progress."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError, DataError, GossamerError
from gossamer.progress import progress
from gossamer.train.checkpoint import (
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from gossamer.train.config import TrainConfig
from gossamer.train.devices import check_device
from gossamer.train.logging import Logger, NoLogger
from gossamer.train.optimizers import build_optimizers, schedule_of

__all__ = ["NumberedBatches", "TrainResult", "Trainer", "numbered"]


@runtime_checkable
class NumberedBatches(Protocol):
    """Batches by number, such as `task.stream(...)`: a resumed run goes on without replaying."""

    def batch(self, number: int) -> Any:
        """Return batch `number`, from 0."""


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Args:
        steps: Steps done.
        loss: Mean loss over the last logged window.
        seconds: Wall time of this call, an earlier part of a resumed run left out.
    """

    steps: int
    loss: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)


class Trainer:
    """Trains a model: optimiser, schedule, clipping, checkpoints, resume, any device.

    Every process of `accelerate launch` runs the same code; process r of w takes batches r, r + w,
    and so on. The run stops at the first loss that is not finite and names the step. An
    interruption (Ctrl-C) ends the current step, writes a checkpoint and is raised again.

    Args:
        model: Any module.
        loss: `loss(model, batch) -> scalar tensor`.
        config: Settings.
        logger: Where numbers and checkpoints go; default nowhere.
        quiet: Show no progress. Default false.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> loss = lambda m, x: m(x).square().mean()
        >>> trainer = Trainer(model, loss, TrainConfig(steps=2, device="cpu"), quiet=True)
        >>> trainer.fit([torch.ones(1, 1)]).steps
        2

    Source: standard practice.
    Deviations: weight decay acts on matrices only, not on vectors and scalars.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        config: TrainConfig,
        *,
        logger: Logger | None = None,
        quiet: bool = False,
    ) -> None:
        self.model = model
        self.loss = loss
        self.config = config
        self.logger = logger or NoLogger()
        self.quiet = quiet

    def fit(self, batches: NumberedBatches | Iterable[Any], resume: bool = False) -> TrainResult:
        """Train to the last step.

        Args:
            batches: An object with `batch(number)`, or an iterable that is started anew when it
                ends. A resumed run replays an iterable up to its step; that is equal to the bit
                where the iterable gives the same items each time, as a shuffling loader does not.
            resume: Go on from the checkpoint in the logger's folder, if there is one.

        Raises:
            ConfigError: If the checkpoint belongs to other settings, or the optimiser does not
                fit the model.
            DataError: If the checkpoint is damaged, or of an earlier version.
            GossamerError: If a loss is not finite; the message names the step.
        """
        accelerator = _accelerator(self.config)
        optimizers = build_optimizers(self.model, self.config, accelerator.device)
        model, *optimizers = accelerator.prepare(self.model, *optimizers)
        run = _Run(accelerator, model, optimizers, schedule_of(self.config))
        first = self._restore(run) if resume else 0
        if accelerator.is_main_process:
            self.logger.rewind(first)
        source = numbered(batches)
        started = time.perf_counter()
        model.train()
        quiet = self.quiet or not accelerator.is_main_process
        with (
            progress("training", self.config.steps, quiet=quiet) as bar,
            _gentle_interrupt() as interrupted,
        ):
            for step in range(first, self.config.steps):
                number = step * accelerator.num_processes + accelerator.process_index
                self._step(run, source(number), step)
                done = step + 1
                if done % self.config.log_every == 0 or done == self.config.steps:
                    bar.update(done, f"loss {self._log(run, done, started):.4f}")
                if interrupted() or self._checkpoint_due(done):
                    self._save(run, done)
                if interrupted():
                    raise KeyboardInterrupt
        # what `prepare` wrapped around the model for mixed precision must not outlive the training
        accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
        return TrainResult(self.config.steps, run.last_mean, time.perf_counter() - started)

    def _step(self, run: _Run, batch: Any, step: int) -> None:
        accelerator, config = run.accelerator, self.config
        if hasattr(batch, "to"):
            batch = batch.to(accelerator.device)
        for group in run.groups():
            group["lr"] = group["peak"] * run.schedule(step)
        with accelerator.autocast():
            loss = self.loss(run.model, batch)
        self._check_loss(accelerator, loss, step)
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        accelerator.backward(loss)
        if config.clip and config.optimizer != "scale_invariant_sgd":  # which clips by itself
            run.norm = float(accelerator.clip_grad_norm_(run.model.parameters(), config.clip))
        for optimizer in run.optimizers:
            optimizer.step()
        run.losses.append(loss.detach())

    def _check_loss(self, accelerator: Any, loss: Tensor, step: int) -> None:
        bad = (~torch.isfinite(loss.detach())).float()
        # every process must stop, or the others would wait for it for ever
        if float(accelerator.reduce(bad, "sum") if accelerator.num_processes > 1 else bad):
            raise GossamerError(
                f"the loss must be finite; got {float(loss.detach())} at step {step + 1} of "
                f"{self.config.steps}. "
                "Lower `lr`, raise `warmup`, or train in float32."
            )

    def _log(self, run: _Run, done: int, started: float) -> float:
        run.last_mean = float(torch.stack(run.losses).mean())
        run.losses.clear()
        if run.accelerator.is_main_process:
            self.logger.log(
                done,
                {
                    "progress": done / self.config.steps,
                    "loss": run.last_mean,
                    "lr": next(run.groups())["lr"],
                    "grad_norm": run.norm,
                    "seconds": round(time.perf_counter() - started, 3),
                },
            )
        return run.last_mean

    def _checkpoint_due(self, done: int) -> bool:
        every = self.config.checkpoint_every
        return bool(every) and (done % every == 0 or done == self.config.steps)

    def _save(self, run: _Run, done: int) -> None:
        if self.logger.folder is None or not run.accelerator.is_main_process:
            return
        losses = torch.stack(run.losses).cpu() if run.losses else torch.empty(0)
        state = {
            "step": done,
            "config": self._resumable_config(),
            "processes": run.accelerator.num_processes,
            "model": self.model.state_dict(),
            "optimizers": {
                str(number): _optimizer_state(optimizer)
                for number, optimizer in enumerate(run.optimizers)
            },
            "random": random_state(),
            "scaler": scaler.state_dict() if (scaler := run.accelerator.scaler) else {},
            "window": {"losses": losses, "norm": run.norm, "mean": run.last_mean},
        }
        save_checkpoint(self.logger.folder, state)

    def _restore(self, run: _Run) -> int:
        state = None if self.logger.folder is None else load_checkpoint(self.logger.folder)
        if state is None:
            return 0
        processes = run.accelerator.num_processes
        for name, now in {**self._resumable_config(), "processes": processes}.items():
            then = state["processes"] if name == "processes" else state["config"].get(name)
            if then != now:
                raise ConfigError(
                    f"a run resumes only with the settings it began with: {name} was {then}; "
                    f"got {now}. "
                    f"Set {name} back, or start a new run in another folder."
                )
        if "optimizers" not in state:
            raise DataError(
                f"the checkpoint in {self.logger.folder} must be of this version; got one of an "
                "earlier version. Start a new run in another folder."
            )
        self.model.load_state_dict(state["model"])
        for number, optimizer in enumerate(run.optimizers):
            # one without state, as plain SGD, leaves nothing in the file
            _load_optimizer_state(optimizer, state["optimizers"].get(str(number), {}))
        restore_random_state(state["random"])
        if run.accelerator.scaler and state["scaler"]:
            run.accelerator.scaler.load_state_dict(state["scaler"])
        device = run.accelerator.device
        run.losses = list(state["window"]["losses"].to(device).unbind())
        run.norm, run.last_mean = state["window"]["norm"], state["window"]["mean"]
        return int(state["step"])

    def _resumable_config(self) -> dict[str, Any]:
        config = dataclasses.asdict(self.config) | {"betas": list(self.config.betas)}
        # where it runs and how often it saves may change between the parts of a run
        return {k: v for k, v in config.items() if k not in ("device", "checkpoint_every")}


class _Run:
    """What one call of `fit` carries from step to step."""

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        optimizers: list[Any],
        schedule: Callable[[int], float],
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.optimizers = optimizers
        self.schedule = schedule
        self.losses: list[Tensor] = []
        self.norm = math.nan
        self.last_mean = math.nan

    def groups(self) -> Iterator[dict[str, Any]]:
        """Yield the groups of parameters of all optimisers."""
        for optimizer in self.optimizers:
            yield from optimizer.param_groups


def _accelerator(config: TrainConfig) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    check_device(config.device)
    launched = PartialState._shared_state != {} and PartialState().num_processes > 1
    # the library keeps one global state and refuses other settings later in the same process
    AcceleratorState._reset_state(reset_partial_state=not launched)
    precision = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[config.precision]
    return Accelerator(mixed_precision=precision, cpu=config.device == "cpu")


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    return {str(number): dict(state) for number, state in optimizer.state_dict()["state"].items()}


def _load_optimizer_state(optimizer: Any, saved: dict[str, Any]) -> None:
    whole = optimizer.state_dict()
    whole["state"] = {int(number): state for number, state in saved.items()}
    optimizer.load_state_dict(whole)


def numbered(batches: NumberedBatches | Iterable[Any]) -> Callable[[int], Any]:
    """Return a function from the number of a batch to it; numbers rise from call to call."""
    if isinstance(batches, NumberedBatches):
        return batches.batch
    endless = _endless(batches)
    position = 0

    def batch(number: int) -> Any:
        nonlocal position
        while position < number:
            next(endless)
            position += 1
        position += 1
        return next(endless)

    return batch


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for item in batches:
            empty = False
            yield item
        if empty:
            raise ConfigError(
                "batches must hold a batch each time they are started; got none. "
                "Give a list or a loader, not a generator that can run only once."
            )


@contextmanager
def _gentle_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a question that the loop asks; a second one interrupts at once."""
    asked = False

    def handle(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
