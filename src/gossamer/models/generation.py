"""Greedy decoding with a key-value cache and position ids that follow a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.checks import check_range, check_shape
from gossamer.errors import DataError, ShapeError, UnsupportedError

__all__ = ["CausalModel", "generate"]

PositionRule = Tensor | Callable[[Tensor], Tensor] | None


class CausalModel(Protocol):
    """What decoding needs of a model."""

    ids: str
    """`"task"` when the model reads position ids, `"sequence"` when it counts."""
    training: bool
    """Whether it is in training mode."""

    @property
    def cacheable(self) -> bool:
        """Whether cached decoding equals the full pass."""

    def new_cache(self) -> Any:
        """Return an empty cache."""

    def train(self, mode: bool = True) -> Any:
        """Set the mode."""

    def __call__(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        *,
        mask: Any = None,
        cache: Any = None,
    ) -> Tensor:
        """Return the logits of the next token at every place."""


@torch.no_grad()
def generate(
    model: CausalModel,
    prompt: Tensor,
    position_ids: PositionRule = None,
    *,
    max_new_tokens: int,
    mask: Tensor | None = None,
    eos: int | None = None,
    use_cache: bool | None = None,
) -> Tensor:
    """Return the most likely continuation, token by token.

    The model is set to evaluation mode meanwhile. Decoding ends when every sample has produced
    `eos`; what a sample would say after its `eos` is replaced by `eos`.

    Args:
        model: Such as a `Decoder`.
        prompt: `(B, T)`, integers; shorter prompts are padded on the left.
        position_ids: Ids of prompt and answer, `(B or 1, T + max_new_tokens[, levels])`; or a
            function from all tokens so far `(B, t)` to the ids of all tokens so far; or `None` for
            models that count.
        max_new_tokens: Most tokens to produce. Range: >= 1.
        mask: `(B, T)`, boolean, True = a real token. Default all.
        eos: Token that ends a sample, or `None`.
        use_cache: Keep keys and values. Default: when that equals the full pass for the model's
            position encoding.

    Returns:
        The new tokens, `(B, n)` with n <= `max_new_tokens`.

    Raises:
        DataError: If a coupled model gets no ids, or ids for too few tokens.
        UnsupportedError: If `use_cache=True` would not equal the full pass.

    Example:
        >>> from gossamer.models import Decoder
        >>> Decoder(14, 32, 1, 4).generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape
        torch.Size([1, 3])

    Source: standard greedy decoding.
    Deviations: none
    """
    check_range(max_new_tokens, "max_new_tokens", low=1, integer=True)
    check_shape(prompt, (None, None), "prompt")
    if mask is not None and not bool(mask[:, -1].all()):
        raise DataError(
            "prompts must be padded on the left, so that every row of mask ends with True; "
            "got a row that ends with False. Move the padding to the left."
        )
    if use_cache and not model.cacheable:
        raise UnsupportedError(
            "cached decoding needs a position encoding that ignores the final length; "
            "got length_scale='sequence'. Use length_scale='query' or use_cache=False."
        )
    was_training = model.training
    model.train(False)
    try:
        return _decode(
            model,
            prompt,
            position_ids,
            max_new_tokens,
            mask,
            eos,
            model.cacheable and use_cache is not False,
        )
    finally:
        model.train(was_training)


def _decode(
    model: CausalModel,
    prompt: Tensor,
    position_ids: PositionRule,
    max_new_tokens: int,
    mask: Tensor | None,
    eos: int | None,
    use_cache: bool,
) -> Tensor:
    cache = model.new_cache() if use_cache else None
    tokens, start = prompt, 0
    done = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    for _ in range(max_new_tokens):
        ids = _ids_of(position_ids, tokens, prompt.shape[1] + max_new_tokens, model.ids == "task")
        new_ids = None if ids is None else ids[:, start : tokens.shape[1]]
        new_mask = None if mask is None else mask[:, start:]
        logits = model(tokens[:, start:], new_ids, mask=new_mask, cache=cache)
        token = logits[:, -1].argmax(-1)
        if eos is not None:
            token = torch.where(done, eos, token)
            done |= token == eos
        tokens = torch.cat((tokens, token[:, None]), dim=1)
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        if cache is not None:
            start = tokens.shape[1] - 1
        if eos is not None and bool(done.all()):
            break
    return tokens[:, prompt.shape[1] :]


def _ids_of(rule: PositionRule, tokens: Tensor, total: int, needed: bool) -> Tensor | None:
    if rule is None:
        if needed:
            raise DataError(
                "position_ids are needed to decode with a coupled model; got None. "
                "Pass the ids of prompt and answer, or a function from the tokens so far to "
                "their ids."
            )
        return None
    if callable(rule):
        return rule(tokens)
    if rule.dim() not in (2, 3):
        raise ShapeError(
            f"position_ids must have the shape (B, T) or (B, T, levels); got {tuple(rule.shape)}. "
            "Add the batch axis with position_ids[None]."
        )
    # the last produced token is never fed back, so its id is not needed
    if rule.shape[1] < total - 1:
        raise ShapeError(
            f"position_ids must cover prompt and answer, {total} tokens; got {rule.shape[1]}. "
            "Pass more ids or a smaller max_new_tokens."
        )
    return rule
