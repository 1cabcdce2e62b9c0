"""Multiplication: of any two numbers with a scratchpad, and by a factor of fixed width."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError
from gossamer.tasks.base import EOS, GridCell, parse_range, parse_two_ranges
from gossamer.tasks.digits import (
    DIGIT,
    carry,
    draw_digits,
    draw_size,
    read_numbers,
    to_digits,
    write_number,
)
from gossamer.tasks.structured import Shape, StructuredTask

__all__ = ["FixedMultiplicationTask", "MultiplicationTask"]


def _read_factors(query: str) -> list[str]:
    numbers = read_numbers(query, "*", "123*45=")
    if len(numbers) != 2:
        raise DataError(
            f"query must multiply 2 numbers; got {len(numbers)} in {query.strip()!r}. Change it."
        )
    return numbers


def _fill(size: int, token: int) -> Tensor:
    return torch.full((size, 1), token)


class MultiplicationTask(StructuredTask):
    """Products with working, such as `$43*12=680+340=6800>6150$`, three ids for each token.

    The answer has two parts. First the partial products A b_k for the digits of B from the units
    up, each padded to N + 1 digits, written units first, joined by `+`. Then `=`, and the running
    sums of A b_k 10^k, each padded to N + M digits, units first, joined by `>`; the last one is the
    product. Level 1 of the ids is the significance inside A and inside a partial product, level 2
    the digit of B, partial product or running sum, level 3 the significance in the product: partial
    product k is moved by k. Id 0 means that a level does not apply.

    A batch has one shape N x M, each the larger of two uniform draws.

    Args:
        digits: Fewest and most digits of both factors, or a range for each, such as
            `((1, 5), (1, 8))` or `"1-5x1-8"`. Range: >= 1.
        max_position: Largest id of each level's table, one number or three. Ids then start at
            random in training, and in the middle of the table in tests. Default `None`: at 1.

    Raises:
        ConfigError: If a range is wrong, or the largest shape needs ids beyond `max_position`.

    Example:
        >>> task = MultiplicationTask()
        >>> task.symbols(task.example("43*12").tokens)
        '$43*12=680+340=6800>6150$'
        >>> task.answer("43*12")
        '516'

    Source: Cho et al., *Arithmetic Transformers Can Length-Generalize in Both Operand Length and
        Count*, ICLR 2025, section 5 and public data code.
    Deviations: one shape for each batch; tests start in the middle of the table (authors: at 1).
    """

    vocab = ("_", "$", *"0123456789", "*", "=", "+", ">")
    levels = 3
    _TIMES, _EQUALS, _PLUS, _NEXT = 12, 13, 14, 15

    def __init__(self, digits: Any = ((1, 5), (1, 5)), *, max_position: Any = None) -> None:
        self.digits = parse_two_ranges(digits, "digits")
        # a column of the running sums adds up to 81 for each digit of the second factor
        check_range(self.digits[1][1], "digits", high=90, integer=True)
        check_range(self.digits[0][1], "digits", high=10_000, integer=True)
        self._set_max_position(max_position)
        self._check_fits((self.digits[0][1], self.digits[1][1]), ConfigError)

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        digits = [list(self.digits[0]), list(self.digits[1])]
        return {"name": "multiplication", "digits": digits, **self._plain_max_position}

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the last running sum as a number, most significant digit first."""
        last = self.scratchpad(tokens).rpartition("=")[2].rpartition(">")[2]
        return write_number(last.rpartition("+")[2])

    def scratchpad(self, tokens: Tensor | Sequence[int]) -> str:
        """Return partial products and running sums as they were produced, units first."""
        return self.symbols(self._until_end(tokens))

    def grid(  # type: ignore[override]
        self, *, first: Iterable[int] | None = None, second: Iterable[int] | None = None
    ) -> list[GridCell]:
        """Return one cell for each pair of lengths.

        Args:
            first: Digits of the first factor. Default 1, 2 and 3 times the most trained.
            second: Digits of the second. Default likewise; without both, cells that `max_position`
                does not allow are left out.
        """
        (_, n_most), (_, m_most) = self.digits
        wanted = itertools.product(
            [n_most * k for k in (1, 2, 3)] if first is None else list(first),
            [m_most * k for k in (1, 2, 3)] if second is None else list(second),
        )
        return [
            GridCell(
                {"first": n, "second": m},
                MultiplicationTask(((n, n), (m, m)), **self._plain_max_position),
            )
            for n, m in wanted
            if first or second or self._fits((n, m))
        ]

    def _answer_length(self, shape: Shape) -> int:
        n, m = shape
        return m * (n + 2) + m * (n + m + 1)

    def _largest_ids(self, shape: Shape) -> Shape:
        n, m = shape
        return n + 2, m, n + m + 1

    def _describe(self, shape: Shape) -> str:
        return f"factors of {shape[0]} and {shape[1]} digits"

    def _smaller(self, shape: Shape) -> Shape | None:
        n, m = shape
        limits = self.max_position or (n, m, n)
        first, second, _ = self._largest_ids(shape)
        # the level that fails says which factor is too long; the third, about both, the longer
        if second > limits[1] or (first <= limits[0] and m > n):
            m -= 1
        else:
            n -= 1
        return (n, m) if n >= 1 and m >= 1 else None

    def _draw(
        self, batch_size: int, generator: torch.Generator
    ) -> tuple[Shape, tuple[Tensor, Tensor]]:
        n, m = draw_size(self.digits[0], generator), draw_size(self.digits[1], generator)
        first = draw_digits(torch.full((batch_size,), n), n, generator)
        return (n, m), (first, draw_digits(torch.full((batch_size,), m), m, generator))

    def _tokens(self, contents: tuple[Tensor, Tensor], shape: Shape) -> Tensor:
        (n, m), (first, second) = shape, contents
        size = len(first)
        columns = first[:, None, :] * second[:, :, None]  # (B, M, N)
        partial = carry(columns, n + 1)
        moved = torch.stack([pad(columns[:, k], (k, m - k)) for k in range(m)], dim=1)
        sums = carry(moved.cumsum(1), n + m)
        parts = [_fill(size, EOS), first.flip(-1) + DIGIT, _fill(size, self._TIMES)]
        parts.append(second.flip(-1) + DIGIT)
        for k in range(m):
            parts += [_fill(size, self._PLUS if k else self._EQUALS), partial[:, k] + DIGIT]
        for k in range(m):
            parts += [_fill(size, self._NEXT if k else self._EQUALS), sums[:, k] + DIGIT]
        return torch.cat([*parts, _fill(size, EOS)], dim=1)

    def _ids(self, shape: Shape) -> Tensor:
        n, m = shape
        rows = [(0, 0, 0)]
        rows += [(i, 0, 0) for i in range(n + 1, 1, -1)]
        rows += [(0, 0, 0)]
        rows += [(0, k, 0) for k in range(m, 0, -1)]
        for k in range(1, m + 1):  # the sign before a number belongs to it
            rows += [(i + 1, k, k + i) for i in range(n + 2)]
        for k in range(1, m + 1):
            rows += [(0, k, 1 + i) for i in range(n + m + 1)]
        return torch.tensor([*rows, (0, 0, 0)])

    def _parse(self, query: str) -> tuple[Shape, tuple[Tensor, Tensor]]:
        first, second = _read_factors(query)
        shape = (len(first), len(second))
        self._check_fits(shape, DataError)
        if len(second) > 90:
            raise DataError(
                f"the second factor must have at most 90 digits; got {len(second)}. Put the "
                "shorter factor second."
            )
        return shape, (to_digits(first, shape[0])[None], to_digits(second, shape[1])[None])


class FixedMultiplicationTask(StructuredTask):
    """Products by a number of fixed width, such as `$653*49=79913$`, answer units first.

    The first factor has N digits, unpadded, the second exactly `second` digits, zeros in front
    allowed; the answer has N + M. Ids grow from left to right and agree at equal significance: the
    units of both factors have e - 1, `*` and `=` have e = s + N + M, the answer e - 1 down to s.

    A batch has one N, drawn uniformly.

    Args:
        digits: Fewest and most digits of the first factor. Range: >= 1.
        second: Digits of the second factor, M. Range: >= 1. Default 2.
        max_position: Largest id of a model's table. Ids then start at random in training, and in
            the middle of the table in tests. Default `None`: ids start at 1.

    Raises:
        ConfigError: If a range is wrong, or the largest shape needs ids beyond `max_position`.

    Example:
        >>> task = FixedMultiplicationTask()
        >>> task.symbols(task.example("653*49").tokens)
        '$653*49=79913$'
        >>> task.position_ids("653*49").tolist()
        [0, 3, 4, 5, 6, 4, 5, 6, 5, 4, 3, 2, 1, 0]

    Source: Cho et al., *Position Coupling*, NeurIPS 2024, section 5 and public data code.
    Deviations: ids stay within `max_position` (the public sampler goes M - 1 beyond it); tests
        start in the middle of the table (authors: at 1).
    """

    vocab = ("_", "$", *"0123456789", "*", "=")
    _TIMES, _EQUALS = 12, 13

    def __init__(
        self, digits: Any = (1, 40), *, second: int = 2, max_position: int | None = None
    ) -> None:
        self.digits = parse_range(digits, "digits")
        check_range(second, "second", low=1, high=90, integer=True)
        check_range(self.digits[1], "digits", high=100_000, integer=True)
        self.second = second
        self._set_max_position(max_position)
        self._check_fits((self.digits[1],), ConfigError)

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        options = {"digits": list(self.digits), "second": self.second}
        return {"name": "fixed_multiplication", **options, **self._plain_max_position}

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return produced answer tokens as a number, most significant digit first."""
        return write_number(self.symbols(self._until_end(tokens)))

    def grid(self, *, digits: Iterable[int] | None = None) -> list[GridCell]:  # type: ignore[override]
        """Return one cell for each number of digits of the first factor.

        Args:
            digits: Lengths to test. Default 1, 1.5, 2 and 3 times the most trained, as far as
                `max_position` allows.
        """
        if digits is None:
            wanted = sorted({int(self.digits[1] * k) for k in (1, 1.5, 2, 3)})
            digits = [n for n in wanted if self._fits((n,))]
        options: dict[str, Any] = {"second": self.second, **self._plain_max_position}
        return [GridCell({"digits": n}, FixedMultiplicationTask((n, n), **options)) for n in digits]

    def _answer_length(self, shape: Shape) -> int:
        return shape[0] + self.second + 1

    def _largest_ids(self, shape: Shape) -> Shape:
        return (shape[0] + self.second + 1,)

    def _describe(self, shape: Shape) -> str:
        return f"factors of {shape[0]} and {self.second} digits"

    def _smaller(self, shape: Shape) -> Shape | None:
        n = min(shape[0] - 1, self.max_position[0] if self.max_position else shape[0])
        return (n,) if n >= 1 else None

    def _draw(
        self, batch_size: int, generator: torch.Generator
    ) -> tuple[Shape, tuple[Tensor, Tensor]]:
        lo, hi = self.digits
        n = int(torch.randint(lo, hi + 1, (1,), generator=generator))
        first = draw_digits(torch.full((batch_size,), n), n, generator)
        return (n,), (first, torch.randint(0, 10, (batch_size, self.second), generator=generator))

    def _tokens(self, contents: tuple[Tensor, Tensor], shape: Shape) -> Tensor:
        (n,), (first, second) = shape, contents
        size = len(first)
        rows = [pad(first * second[:, k : k + 1], (k, self.second - k)) for k in range(self.second)]
        product = carry(torch.stack(rows).sum(0), n + self.second)
        parts = [_fill(size, EOS), first.flip(-1) + DIGIT, _fill(size, self._TIMES)]
        parts += [second.flip(-1) + DIGIT, _fill(size, self._EQUALS), product + DIGIT]
        return torch.cat([*parts, _fill(size, EOS)], dim=1)

    def _ids(self, shape: Shape) -> Tensor:
        n, m = shape[0], self.second
        end = n + m + 1
        query = [*range(end - n, end + 1), *range(end - m, end + 1)]
        return torch.tensor([0, *query, *range(end - 1, 0, -1), 0])

    def _parse(self, query: str) -> tuple[Shape, tuple[Tensor, Tensor]]:
        first, second = _read_factors(query)
        if len(second) > self.second:
            raise DataError(
                f"the second factor must have at most {self.second} digits, as this task was "
                f"built; got {len(second)} in {query.strip()!r}. Change the query or `second`."
            )
        self._check_fits((len(first),), DataError)
        digits = to_digits(first, len(first))[None], to_digits(second, self.second)[None]
        return (len(first),), digits
