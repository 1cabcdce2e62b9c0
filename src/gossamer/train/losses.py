"""The loss of sequence tasks: cross-entropy on the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.tasks import PAD, Batch

__all__ = ["AnswerLoss", "answer_logits", "answer_loss"]


def answer_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the answer tokens and the end token.

    Args:
        model: Called as `model(tokens, position_ids)`; a causal one returns logits of the next
            token, a bidirectional one (attribute `causal` false) logits of the token itself.
        batch: A batch of a task.

    Returns:
        A scalar. Unit: nats for each token.

    Example:
        >>> from gossamer.models import Decoder
        >>> from gossamer.tasks import AdditionTask
        >>> batch = AdditionTask().stream(4, seed=0).batch(0)
        >>> bool(answer_loss(Decoder(14, 16, 1, 2), batch) > 0)
        True

    Source: Cho et al., NeurIPS 2024, section 3: loss on the answer only.
    Deviations: none
    """
    return AnswerLoss(F.cross_entropy)(model, batch)


class AnswerLoss:
    """Any loss on classes, on the answer tokens and the end token.

    Args:
        loss: Called with logits `(N, V)` and tokens `(N,)`.

    Example:
        >>> from gossamer.losses import LabelSmoothingLoss
        >>> from gossamer.models import Decoder
        >>> from gossamer.tasks import AdditionTask
        >>> loss = AnswerLoss(LabelSmoothingLoss(0.1))
        >>> bool(loss(Decoder(14, 16, 1, 2), AdditionTask().stream(4, seed=0).batch(0)) > 0)
        True

    Source: as `answer_loss`.
    Deviations: none
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch, a scalar."""
        logits, targets, wanted = answer_logits(model, batch)
        return self.loss(logits[wanted], targets[wanted])


def answer_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, the tokens they are about, and where these count.

    A causal model is asked for each next token, given the true ones before it. A bidirectional
    model sees the whole sequence with blanks (token 0) in place of the answer and fills them in;
    it is told where padding follows (keyword `mask`) if any does.

    Args:
        model: As in `answer_loss`.
        batch: A batch of a task.

    Returns:
        Logits `(B, T, V)`, tokens `(B, T)` and a boolean mask `(B, T)`; T is one less for a causal
        model.

    Example:
        >>> from gossamer.models import Decoder
        >>> from gossamer.tasks import AdditionTask
        >>> batch = AdditionTask().stream(4, seed=0).batch(0)
        >>> logits, targets, wanted = answer_logits(Decoder(14, 16, 1, 2), batch)
        >>> bool(wanted.sum() == batch.loss_mask.sum())
        True

    Source: causal: Cho et al., NeurIPS 2024, section 3; blanks: Devlin et al., *BERT*, NAACL 2019.
    Deviations: every blank is token 0, none is kept or replaced at random.
    """
    if getattr(model, "causal", True):
        logits = model(batch.tokens[:, :-1], batch.position_ids[:, :-1])
        return logits, batch.tokens[:, 1:], batch.loss_mask[:, 1:]
    blanked = torch.where(batch.loss_mask, PAD, batch.tokens)
    # what follows the last token is padding; a blank before it is not
    real = (batch.tokens != PAD).flip(1).cummax(1).values.flip(1)
    mask = {} if bool(real.all()) else {"mask": real}
    return model(blanked, batch.position_ids, **mask), batch.tokens, batch.loss_mask
