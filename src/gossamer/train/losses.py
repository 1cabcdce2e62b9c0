"""The loss of sequence tasks: cross-entropy on the answer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.tasks import Batch

__all__ = ["answer_loss"]


def answer_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the answer tokens and the end token.

    Args:
        model: Called as `model(tokens, position_ids)`, returns logits of the next token.
        batch: A batch of a task.

    Returns:
        A scalar. Unit: nats for each token.

    Example:
        >>> import torch
        >>> from gossamer.models import Decoder
        >>> from gossamer.tasks import AdditionTask
        >>> batch = AdditionTask().stream(4, seed=0).batch(0)
        >>> bool(answer_loss(Decoder(14, 16, 1, 2), batch) > 0)
        True

    Source: Cho et al., NeurIPS 2024, section 3: loss on the answer only.
    Deviations: none
    """
    logits = model(batch.tokens[:, :-1], batch.position_ids[:, :-1])
    wanted = batch.loss_mask[:, 1:]
    return F.cross_entropy(logits[wanted], batch.tokens[:, 1:][wanted])
