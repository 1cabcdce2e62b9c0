"""What recipes on sequence tasks share: train one model, measure exact match by length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossamer.train.logging import Logger

__all__ = ["measure_lengths", "train_decoder"]


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


def measure_lengths(
    model: Any, task: Any, lengths: tuple[int, ...], *, num_samples: int, seed: int, **axes: Any
) -> list[dict[str, Any]]:
    """Return one row for each length, with `digits` and `exact_match`.

    Test samples depend on `seed` and are the same for every arm.
    """
    import torch

    from gossamer.train import evaluate_task

    generator = torch.Generator().manual_seed(10_000 + seed)
    grid = {"digits": lengths, **axes}
    return evaluate_task(model, task, grid, num_samples=num_samples, generator=generator).rows()
