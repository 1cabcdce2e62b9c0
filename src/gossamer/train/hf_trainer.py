"""Losses of this library inside the trainer of Hugging Face transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from gossamer.errors import ConfigError, ShapeError

__all__ = ["as_trainer_loss"]


def as_trainer_loss(loss: nn.Module, *, shift: bool = False) -> Callable[..., Tensor]:
    """Return a loss as `compute_loss_func` of `transformers.Trainer`.

    With gradient accumulation or several devices the trainer counts the labels of all batches of a
    step; the result is the sum of the losses over that count, which is the mean over all of them
    and not a mean of means. Without a count, as in evaluation, it is the mean of the batch.

    Args:
        loss: Called with logits `(N, C)` and labels `(N,)`; it has the options `reduction` and
            `ignore_index`, as all class losses here and in the framework. Leave `ignore_index` at
            -100, by which the trainer counts. With class weights the count ignores the weights.
        shift: True for causal language models: the logits of a token belong to the next label.
            Default false, for classifiers of sequences and of tokens.

    Raises:
        ConfigError: If the loss has no `reduction`.

    Example:
        >>> import torch
        >>> compute = as_trainer_loss(torch.nn.CrossEntropyLoss())
        >>> outputs, labels = {"logits": torch.zeros(2, 4)}, torch.tensor([1, 3])
        >>> round(float(compute(outputs, labels, num_items_in_batch=4)), 4)  # half of the labels
        0.6931

    Source: `Trainer.compute_loss` of transformers, argument `compute_loss_func`.
    Deviations: none
    """
    if not hasattr(loss, "reduction"):
        raise ConfigError(
            f"loss must have the option reduction; got {type(loss).__name__}. Use a loss of "
            "gossamer.losses or of torch.nn."
        )
    parts: dict[str, Any] = {}
    for reduction in ("mean", "sum"):
        parts[reduction] = copy.copy(loss)
        parts[reduction].reduction = reduction

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits
        if shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if labels.shape not in (logits.shape, logits.shape[:-1]):
            raise ShapeError(
                f"labels must have the shape of the logits, {tuple(logits.shape)}, with or without "
                f"the last axis; got {tuple(labels.shape)}. Look at the data collator."
            )
        flat = logits.reshape(-1, logits.shape[-1])
        targets = labels.reshape(-1) if labels.dim() < logits.dim() else labels.reshape(flat.shape)
        if num_items_in_batch is None:
            mean: Tensor = parts["mean"](flat, targets)
            return mean
        total: Tensor = parts["sum"](flat, targets) / num_items_in_batch
        return total

    return compute
