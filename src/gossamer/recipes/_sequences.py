"""What recipes on sequence tasks share: train one model, measure exact match over a grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossamer.train.logging import Logger

__all__ = ["gated_decoder", "measure_grid", "train_model"]


def gated_decoder(
    task: Any, positions: dict[str, Any], *, dim: int, hidden_dim: int, layers: int
) -> Any:
    """Return the untrained network of the arithmetic recipes: gated layers, normed on both sides.

    Args:
        task: Names the vocabulary.
        positions: Entry of `Decoder`.
        dim: Model width.
        hidden_dim: Width of the gated feed-forward block.
        layers: Blocks of 4 heads.
    """
    from gossamer.models import Decoder

    return Decoder(
        task.vocab_size,
        dim,
        layers,
        4,
        positions=positions,
        feed_forward={"name": "gated", "hidden_dim": hidden_dim},
        norm="pre_post",
    )


def train_model(
    model: Any,
    task: Any,
    train: Mapping[str, Any],
    *,
    batch_size: int,
    seed: int,
    log: Logger,
) -> None:
    """Train a model on a task, from a checkpoint if the folder of `log` holds one.

    Args:
        model: A decoder or an encoder; left in evaluation mode.
        task: A `Task`.
        train: Keywords of `TrainConfig`; the device is the CPU where none is named.
        batch_size: Samples for each step.
        seed: Of the stream of batches.
        log: From the runner.
    """
    from gossamer.train import TrainConfig, Trainer, answer_loss

    settings = TrainConfig(**{"device": "cpu", **train})
    trainer = Trainer(model, answer_loss, settings, logger=log, quiet=True)
    trainer.fit(task.stream(batch_size, seed=seed), resume=True)
    model.eval()


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
