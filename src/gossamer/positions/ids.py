"""Rules that turn structure into position ids; plain functions on integer tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import DataError, ShapeError
from gossamer.positions.base import check_ids

__all__ = ["abacus_ids", "couple_groups", "shift_ids"]


def couple_groups(groups: Sequence[Sequence[int]], length: int, *, start: int = 1) -> Tensor:
    """Return ids that give equal-role tokens of several groups the same id.

    The n-th index of every group plays the n-th role: it gets id `start + n`. Tokens outside all
    groups get 0.

    Args:
        groups: One list of token indices (0-based) for each group, in the order of their roles.
        length: Number of tokens.
        start: First id. Range: >= 1. Default 1.

    Returns:
        Integers `(length,)`.

    Raises:
        DataError: If an index is outside the sequence or stands in two places.

    Example:
        >>> couple_groups([[2, 1, 0], [6, 5, 4]], 7).tolist()    # units first in "653+049"
        [3, 2, 1, 0, 3, 2, 1]

    Source: Cho et al., *Position Coupling*, NeurIPS 2024, section 3.
    Deviations: none
    """
    check_range(start, "start", low=1, integer=True)
    ids = torch.zeros(length, dtype=torch.long)
    for group in groups:
        for role, index in enumerate(group):
            if not 0 <= index < length:
                raise DataError(
                    f"groups must hold indices in 0..{length - 1}; got {index}. "
                    "Indices count the tokens of query and answer together, from 0."
                )
            if ids[index]:
                raise DataError(
                    f"groups must name every token once; got index {index} twice. Remove one "
                    "of them."
                )
            ids[index] = start + role
    return ids


def shift_ids(
    ids: Tensor, max_position: int | Sequence[int], *, generator: torch.Generator | None = None
) -> Tensor:
    """Shift the non-zero ids of every sample, and level, by its own uniform random offset.

    This is the random start of training: with it the table rows are trained that short samples
    would never reach. Afterwards the largest id of a level is at most `max_position`.

    Args:
        ids: `(B, T)` or `(B, T, levels)`, integers; 0 stays 0.
        max_position: Largest id, one number or one for each level.
        generator: Source of randomness; default PyTorch's global one.

    Raises:
        DataError: If an id is already larger than `max_position`.

    Example:
        >>> shift_ids(torch.tensor([[0, 2, 1]]), 2).tolist()
        [[0, 2, 1]]

    Source: Cho et al., *Position Coupling*, NeurIPS 2024, section 3, random starting position.
    Deviations: none
    """
    levels = 1 if ids.dim() == 2 else ids.shape[-1]
    limits = [max_position] * levels if isinstance(max_position, int) else list(max_position)
    if len(limits) != levels:
        raise ShapeError(
            f"max_position must have one entry for each of {levels} levels; got {len(limits)}. "
            "Give one number or a list of that many."
        )
    check_ids(ids, levels, max_position=tuple(limits))
    grid = ids.unsqueeze(-1) if ids.dim() == 2 else ids
    room = torch.tensor(limits, device=ids.device) - grid.amax(1) + 1  # (B, levels)
    draw = torch.rand(room.shape, generator=generator, device=ids.device, dtype=torch.float64)
    offset = (draw * room).long().clamp(max=room - 1)
    return torch.where(grid > 0, grid + offset.unsqueeze(1), 0).reshape(ids.shape)


def abacus_ids(tokens: Tensor, digit_tokens: Tensor | Sequence[int], *, start: int = 1) -> Tensor:
    """Return the index of each digit inside its run of digits; other tokens get 0.

    Args:
        tokens: `(B, T)` or `(T,)`, integers.
        digit_tokens: The token ids that are digits.
        start: Id of the first digit of a run. Range: >= 1. Default 1.

    Returns:
        Integers of the shape of `tokens`.

    Example:
        >>> abacus_ids(torch.tensor([1, 2, 10, 3, 4, 5, 11]), range(10)).tolist()   # 12+345=
        [1, 2, 0, 1, 2, 3, 0]

    Source: McLeish et al., *Transformers Can Do Arithmetic with the Right Embeddings*, NeurIPS
        2024.
    Deviations: the random offset of training is left to `shift_ids`, one draw for each sample; the
        public module draws one for each batch.
    """
    check_range(start, "start", low=1, integer=True)
    digits = torch.as_tensor(list(digit_tokens), device=tokens.device)
    is_digit = torch.isin(tokens, digits)
    steps = torch.arange(1, tokens.shape[-1] + 1, device=tokens.device).expand_as(tokens)
    last_other = torch.where(is_digit, 0, steps).cummax(-1).values
    return torch.where(is_digit, steps - last_other + start - 1, 0)
