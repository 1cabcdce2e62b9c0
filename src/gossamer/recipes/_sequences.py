"""What recipes on sequence tasks share: train one model, measure exact match over a grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossamer.train.logging import Logger

__all__ = ["measure_grid", "train_decoder"]


def train_decoder(
    task: Any,
    model: Mapping[str, Any],
    train: Mapping[str, Any],
    *,
    batch_size: int,
    seed: int,
    log: Logger,
) -> Any:
    """Train a `Decoder` on a task, from a checkpoint if the folder of `log` holds one.

    Args:
        task: A `Task`.
        model: Keywords of `Decoder`, without the vocabulary.
        train: Keywords of `TrainConfig`.
        batch_size: Samples for each step.
        seed: Of the stream of batches.
        log: From the runner.
    """
    from gossamer.models import Decoder
    from gossamer.train import TrainConfig, Trainer, answer_loss

    decoder = Decoder(task.vocab_size, **model)
    trainer = Trainer(decoder, answer_loss, TrainConfig(**train), logger=log, quiet=True)
    trainer.fit(task.stream(batch_size, seed=seed), resume=True)
    return decoder.eval()


def measure_grid(
    model: Any,
    task: Any,
    grid: Mapping[str, Any],
    *,
    num_samples: int,
    seed: int,
    answer_only: bool = False,
) -> list[dict[str, Any]]:
    """Return one row for each cell of a task's grid, with its coordinates and `exact_match`.

    Test samples depend on `seed` and are the same for every arm.

    Args:
        model: A trained model.
        task: What it was trained on.
        grid: Axes for `task.grid`.
        num_samples: Samples in each cell.
        seed: Of the run.
        answer_only: Also decode, and report the share of right final answers as `answer_match`.
    """
    import torch

    from gossamer.train import evaluate_task

    def measure(only: bool) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(10_000 + seed)
        options: dict[str, Any] = {"num_samples": num_samples, "answer_only": only}
        return evaluate_task(model, task, grid, generator=generator, **options).rows()

    rows = measure(False)
    if answer_only:
        for row, decoded in zip(rows, measure(True), strict=True):
            row["answer_match"] = decoded["exact_match"]
    return rows
