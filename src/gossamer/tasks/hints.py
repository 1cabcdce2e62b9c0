"""Index hints: a token before each digit that says which place it has."""

from __future__ import annotations

import torch

from gossamer.checks import check_range
from gossamer.errors import DataError
from gossamer.tasks.base import Example

__all__ = ["add_index_hints"]


def add_index_hints(
    example: Example,
    *,
    first_hint: int,
    num_hints: int,
    generator: torch.Generator | None = None,
) -> Example:
    """Put a hint token before each digit; digits of equal significance get the same hint.

    `$653+049=2070$` becomes `$c6b5a3+c0b4a9=a2b0c7d0$`, where `a`, `b`, ... are the tokens
    `first_hint`, `first_hint + 1`, ...: tokens of their own, beyond the task's vocabulary. So a
    model for it has `task.vocab_size + num_hints` tokens. The hints of the answer are part of it:
    the model has to produce them.

    Args:
        example: Of a task whose ids say the place of a digit in a number, such as `AdditionTask`:
            the smallest id that is not 0 stands for signs, the one after it for units.
        first_hint: Number of the first hint token; `task.vocab_size` is free.
        num_hints: Hints there are; the longest number has at most so many digits. Range: >= 1.
        generator: Draws the first hint used, as in training. Default `None`: hint 0 for units.

    Returns:
        The longer example. Its ids are 1 to T, since the hints take the place of coupled ids.

    Raises:
        ConfigError: If `first_hint` or `num_hints` is out of range.
        DataError: If a number has more digits than there are hints, the ids have levels, or a
            token is one of the hints already.

    Example:
        >>> from gossamer.tasks import AdditionTask
        >>> task = AdditionTask()
        >>> hinted = add_index_hints(task.example("5+17"), first_hint=14, num_hints=26)
        >>> "".join((*task.vocab, *"abcdefghijklmnopqrstuvwxyz")[token] for token in hinted.tokens)
        '$b0a5+b1a7=a2b2c0$'

    Source: Zhou et al., *What Algorithms can Transformers Learn?*, ICLR 2024, section 5; as a
        baseline of Cho et al., *Position Coupling*, NeurIPS 2024.
    Deviations: hints are consecutive tokens from a random start; the paper draws a random
        subset of hints in order for some of its tasks.
    """
    check_range(first_hint, "first_hint", low=2, integer=True)
    check_range(num_hints, "num_hints", low=1, integer=True)
    ids, tokens = example.position_ids, example.tokens
    if ids.dim() != 1:
        raise DataError(
            f"position_ids must have one level, (T,), to say the place of a digit; got "
            f"{tuple(ids.shape)}. Use an example of AdditionTask."
        )
    if int(tokens.max()) >= first_hint:
        raise DataError(
            f"tokens must be below first_hint = {first_hint}; got {int(tokens.max())}. "
            "Use first_hint=task.vocab_size."
        )
    sign = int(ids[ids > 0].min())
    place = ids - sign - 1  # 0 for units, negative for signs and ends
    needed = int(place.max()) + 1
    if needed > num_hints:
        raise DataError(
            f"num_hints must be at least the digits of the longest number, {needed}; got "
            f"{num_hints}. Use more hints."
        )
    start = 0
    if generator is not None:
        start = int(torch.randint(0, num_hints - needed + 1, (), generator=generator))
    # a column of hints before the column of tokens, and the empty ones dropped
    pairs = torch.stack((first_hint + start + place, tokens), dim=1)
    kept = torch.stack((place >= 0, torch.ones_like(place, dtype=torch.bool)), dim=1)
    mask = example.loss_mask[:, None].expand(-1, 2)[kept]
    longer = pairs[kept]
    return Example(longer, torch.arange(1, len(longer) + 1), mask)
