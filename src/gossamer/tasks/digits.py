"""What tasks on numbers share: digit arrays, carries, and numbers in text."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.errors import DataError

__all__ = [
    "DIGIT",
    "carry",
    "draw_digits",
    "draw_size",
    "read_numbers",
    "to_digits",
    "write_number",
]

DIGIT = 2
"""Token of digit 0; those of the others follow."""

_LIMB = 15


def carry(columns: Tensor, width: int) -> Tensor:
    """Carry column sums, `(..., w)`, units first, into `width` digits, `(..., width)`.

    Fifteen digits at a time make one number that fits in an int64, so that the loop over carries is
    a fifteenth as long as the sum. A column may hold up to 8,000.

    Example:
        >>> carry(torch.tensor([[18, 4]]), 3).tolist()    # 18 + 40 = 58
        [[8, 5, 0]]
    """
    limbs = -(-width // _LIMB)
    powers = 10 ** torch.arange(_LIMB)
    padded = torch.nn.functional.pad(columns, (0, limbs * _LIMB - columns.shape[-1]))
    values = (padded.reshape(*columns.shape[:-1], limbs, _LIMB) * powers).sum(-1)
    for limb in range(limbs - 1):
        values[..., limb + 1] += values[..., limb] // 10**_LIMB
    digits = values.unsqueeze(-1) // powers % 10
    flat: Tensor = digits.flatten(-2)[..., :width]
    return flat


def draw_digits(lengths: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Return random numbers of given lengths as digits, `(*lengths.shape, width)`, units first.

    A leading digit is not 0, except in a number of one digit.
    """
    shape = (*lengths.shape, width)
    digits = torch.randint(0, 10, shape, generator=generator)
    leading = torch.randint(1, 10, lengths.shape, generator=generator)
    place = torch.arange(width)
    top = lengths.unsqueeze(-1) - 1
    digits = torch.where((place == top) & (top > 0), leading.unsqueeze(-1), digits)
    return torch.where(place > top, 0, digits)


def draw_size(limits: tuple[int, int], generator: torch.Generator) -> int:
    """Return the larger of two uniform draws: long samples are more frequent than short ones."""
    lo, hi = limits
    return int(torch.randint(lo, hi + 1, (2,), generator=generator).max())


def to_digits(number: str, width: int) -> Tensor:
    """Return a number in text as `width` digits, units first.

    Example:
        >>> to_digits("49", 3).tolist()
        [9, 4, 0]
    """
    digits = [int(c) for c in reversed(number)]
    return torch.tensor(digits + [0] * (width - len(digits)))


def write_number(reversed_digits: str) -> str:
    """Return a number written units first as a person writes it; `""` stays `""`.

    Example:
        >>> write_number("2070")
        '702'
    """
    return reversed_digits[::-1].lstrip("0") or ("0" if reversed_digits else "")


def read_numbers(query: str, operator: str, example: str) -> list[str]:
    """Return the numbers of a query such as `12+345=`, without leading zeros.

    Args:
        query: Digits and the operator; spaces, and a `=` at the end, are allowed.
        operator: One character.
        example: A good query, for messages.

    Raises:
        DataError: If another character or an empty operand is there; the message has the column.

    Example:
        >>> read_numbers("12 + 045=", "+", "1+2=")
        ['12', '45']
    """
    text = query.strip()
    body = text[:-1] if text.endswith("=") else text
    for column, character in enumerate(body, start=1):
        if character not in f"0123456789{operator} ":
            hint = " Negative numbers are not supported." if character == "-" else ""
            raise DataError(
                f"query must hold digits and '{operator}' such as {example}; got {character!r} "
                f"at column {column} of {text!r}.{hint} Remove it."
            )
    numbers = [part.strip() for part in body.split(operator)]
    if any(not part or " " in part for part in numbers):
        raise DataError(
            f"query must have a number on each side of '{operator}'; got {text!r}. Fill it in."
        )
    return [number.lstrip("0") or "0" for number in numbers]
