"""What a batch of a distillation holds, and how models are asked for their logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.checks import check_keys
from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.measures.variance import call_model
from gossamer.tasks import Batch, LabelledBatch
from gossamer.train.losses import answer_logits

__all__ = ["Given", "check_same_words", "given"]


@dataclass(frozen=True)
class Given:
    """One batch: what models are called with, and what belongs to its rows."""

    inputs: Any
    labels: Any = None
    ids: Any = None
    mask: Tensor | None = None

    def to(self, device: torch.device) -> Given:
        """Return the same on a device; ids stay where they are."""
        return Given(
            _moved(self.inputs, device),
            _moved(self.labels, device),
            self.ids,
            _moved(self.mask, device),
        )

    def logits(self, model: nn.Module) -> Tensor:
        """Return what a model says of the batch."""
        if isinstance(self.inputs, Batch):
            return answer_logits(model, self.inputs)[0]
        out = call_model(model, self.inputs)
        logits: Tensor = out if isinstance(out, Tensor) else out.logits
        return logits

    def targets(self, model: nn.Module) -> tuple[Any, Tensor | None]:
        """Return labels and mask; those of a task's batch depend on whether a model is causal."""
        if not isinstance(self.inputs, Batch):
            return self.labels, self.mask
        tokens, wanted = self.inputs.tokens, self.inputs.loss_mask
        if getattr(model, "causal", True):
            return tokens[:, 1:], wanted[:, 1:]
        return tokens, wanted


def given(batch: Any) -> Given:
    """Read a batch of a user.

    Raises:
        DataError: If it is of no known form.
        ConfigError: If a key is unknown.
    """
    if isinstance(batch, Given):
        return batch
    if isinstance(batch, Batch):
        return Given(batch)
    if isinstance(batch, LabelledBatch):
        return Given(batch.x, batch.labels)
    if isinstance(batch, Mapping):
        check_keys(batch, ("inputs", "labels", "ids", "mask"), "a batch")
        if "inputs" not in batch:
            raise ConfigError(
                f"a batch must have the key 'inputs'; got {', '.join(batch)}. Put what the model "
                "is called with under it: {'inputs': encoded, 'labels': labels}."
            )
        return Given(**batch)
    if isinstance(batch, tuple | list) and len(batch) in (2, 3):
        return Given(*batch)
    raise DataError(
        "a batch must be (inputs, labels), (inputs, labels, ids), a mapping with the keys inputs, "
        f"labels, ids, mask, or a batch of a task; got {type(batch).__name__}. Change the batches."
    )


def _moved(value: Any, device: torch.device) -> Any:
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_moved(item, device) for item in value)
    return value


def check_same_words(teacher: nn.Module, student: nn.Module) -> None:
    """Check what can be seen of the vocabularies of two models.

    Raises:
        UnsupportedError: If they differ.
    """
    remedy = (
        "Distillation compares probabilities class by class, so both must have one tokenizer. Take "
        "a student of the same family, or train it on texts that the teacher wrote."
    )
    words = [getattr(model, "tokenizer", None) for model in (teacher, student)]
    if all(hasattr(tokenizer, "get_vocab") for tokenizer in words):
        one, two = (tokenizer.get_vocab() for tokenizer in words if tokenizer is not None)
        if one != two:
            different = sum(two.get(word) != number for word, number in one.items())
            raise UnsupportedError(
                "teacher and student must have the same tokenizer; got vocabularies of "
                f"{len(one)} and {len(two)} tokens, {different} of the teacher's with another "
                f"number. {remedy}"
            )
    sizes = [_vocab_size(model) for model in (teacher, student)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise UnsupportedError(
            f"teacher and student must have the same tokenizer; got vocabularies of {sizes[0]} and "
            f"{sizes[1]}. {remedy}"
        )


def _vocab_size(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    size = getattr(model, "vocab_size", None) or getattr(config, "vocab_size", None)
    if isinstance(config, Mapping):
        size = size or config.get("vocab_size")
    return size if isinstance(size, int) else None
