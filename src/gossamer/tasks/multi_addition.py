"""Addition of many numbers with a scratchpad of running sums, two ids for each token."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError
from gossamer.tasks.base import EOS, GridCell, parse_range
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

__all__ = ["MultiAdditionTask"]

_PLUS, _EQUALS, _NEXT = 12, 13, 14


class MultiAdditionTask(StructuredTask):
    """Sums of many numbers, such as `$57+48+96=000>75>501>102$` with zeros in front.

    The answer is a scratchpad: the running sums 0, x1, x1 + x2, up to the total, each padded to the
    width W of the largest possible total and written units first, joined by `>`. Level 1 of the ids
    is the significance of a digit (`+`, `=`, `>` have s, units s + 1), level 2 the number of the
    operand: operand i and the sign after it have t + i - 1, running sum j and the sign before it
    t + j. So the digits that make a new digit share one id of each level with it or differ by one.

    A batch has one shape (digits n, operands m), each the larger of two uniform draws. In half of
    the samples every operand has n digits, in the others lengths are uniform up to n, and one
    operand has n.

    Args:
        digits: Fewest and most digits of an operand. Range: >= 1.
        operands: Fewest and most operands. Range: 2 to 900.
        max_position: Largest id of each level's table, one number or two. Ids then start at random
            in training, and in the middle of the table in tests. Default `None`: ids start at 1.
        padding: Pad the operands to W. Default true; without, the ids of level 1 in operands and
            running sums still agree, but samples of one shape differ in length.

    Raises:
        ConfigError: If a range is wrong, or the largest shape needs ids beyond `max_position`.

    Example:
        >>> task = MultiAdditionTask()
        >>> task.symbols(task.example("57+48+96").tokens)
        '$057+048+096=000>750>501>102$'
        >>> task.position_ids("1+2").tolist()[:6]
        [[0, 0], [3, 1], [2, 1], [1, 1], [3, 2], [2, 2]]

    Source: Cho et al., *Arithmetic Transformers Can Length-Generalize in Both Operand Length and
        Count*, ICLR 2025, section 4 and public data code.
    Deviations: one shape for each batch; tests start in the middle of the table (authors: at 1).
    """

    vocab = ("_", "$", *"0123456789", "+", "=", ">")
    levels = 2

    def __init__(
        self,
        digits: Any = (1, 5),
        operands: Any = (2, 5),
        *,
        max_position: Any = None,
        padding: bool = True,
    ) -> None:
        self.digits = parse_range(digits, "digits")
        self.operands = parse_range(operands, "operands", low=2)
        check_range(self.operands[1], "operands", high=900, integer=True)
        check_range(self.digits[1], "digits", high=100_000, integer=True)
        self.padding = padding
        if not padding:
            warnings.warn(
                "padding=False writes operands in their own lengths, so the ids of level 1 do not "
                "begin at one place; coupling was measured with padding.",
                stacklevel=2,
            )
        self._set_max_position(max_position)
        self._check_fits(self._shape(self.digits[1], self.operands[1]), ConfigError)

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        return {
            "name": "multi_addition",
            "digits": list(self.digits),
            "operands": list(self.operands),
            **self._plain_max_position,
            "padding": self.padding,
        }

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the last running sum as a number, most significant digit first."""
        return write_number(self.scratchpad(tokens).rpartition(">")[2])

    def scratchpad(self, tokens: Tensor | Sequence[int]) -> str:
        """Return all running sums as they were produced, units first."""
        return self.symbols(self._until_end(tokens))

    def grid(  # type: ignore[override]
        self,
        *,
        digits: Iterable[int] | None = None,
        operands: Iterable[int] | None = None,
    ) -> list[GridCell]:
        """Return one cell for each number of digits and of operands.

        Args:
            digits: Digits of every operand. Default 1, 2 and 3 times the most trained.
            operands: Operands. Default 1, 2 and 3 times the most trained; without both, cells that
                `max_position` does not allow are left out.
        """
        wanted = itertools.product(
            [self.digits[1] * k for k in (1, 2, 3)] if digits is None else list(digits),
            [self.operands[1] * k for k in (1, 2, 3)] if operands is None else list(operands),
        )
        options: dict[str, Any] = {**self._plain_max_position, "padding": self.padding}
        return [
            GridCell({"digits": n, "operands": m}, MultiAdditionTask((n, n), (m, m), **options))
            for n, m in wanted
            if digits or operands or self._fits(self._shape(n, m))
        ]

    def _shape(self, n: int, m: int) -> Shape:
        """Return the shape of m operands that all have n digits: n, then the written widths."""
        return (n, *[self._width(n, m) if self.padding else n] * m)

    @staticmethod
    def _width(n: int, m: int) -> int:
        small = min(n, 20)
        return len(str(m * (10**small - 1))) + n - small

    def _sum_width(self, shape: Shape) -> int:
        return self._width(shape[0], len(shape) - 1)

    def _answer_length(self, shape: Shape) -> int:
        return len(shape) * (self._sum_width(shape) + 1)

    def _largest_ids(self, shape: Shape) -> Shape:
        return self._sum_width(shape) + 1, len(shape)

    def _describe(self, shape: Shape) -> str:
        return f"{len(shape) - 1} operands of {shape[0]} digits"

    def _smaller(self, shape: Shape) -> Shape | None:
        n, m = shape[0], len(shape) - 1
        limits = self.max_position or (n, m)
        if self._largest_ids(shape)[0] > limits[0]:
            n = min(n - 1, limits[0])
        else:
            m = min(m - 1, limits[1])
        return self._shape(n, m) if n >= 1 and m >= 2 else None

    def _draw(self, batch_size: int, generator: torch.Generator) -> tuple[Shape, Tensor]:
        n = draw_size(self.digits, generator)
        m = draw_size(self.operands, generator)
        rows = batch_size if self.padding else 1  # unpadded samples of one shape share lengths
        own = torch.randint(self.digits[0], n + 1, (rows, m), generator=generator)
        longest = torch.randint(0, m, (rows, 1), generator=generator)
        own.scatter_(1, longest, n)
        common = torch.rand((rows, 1), generator=generator) < 0.5
        lengths = torch.where(common, n, own).expand(batch_size, m)
        width = self._width(n, m)
        shape = (n, *([width] * m if self.padding else lengths[0].tolist()))
        return shape, draw_digits(lengths, width, generator)

    def _tokens(self, contents: Tensor, shape: Shape) -> Tensor:
        size, width = len(contents), self._sum_width(shape)
        sums = carry(contents.cumsum(1), width)  # (B, m, W)

        def fill(token: int) -> Tensor:
            return torch.full((size, 1), token)

        parts = [fill(EOS)]
        for row, written in enumerate(shape[1:]):
            parts += [contents[:, row, :written].flip(-1) + DIGIT, fill(_PLUS)]
        parts[-1] = fill(_EQUALS)
        parts.append(torch.full((size, width), DIGIT))
        for row in range(len(shape) - 1):
            parts += [fill(_NEXT), sums[:, row] + DIGIT]
        return torch.cat([*parts, fill(EOS)], dim=1)

    def _ids(self, shape: Shape) -> Tensor:
        width, m = self._sum_width(shape), len(shape) - 1
        first: list[int] = [0]
        second: list[int] = [0]
        for operand, written in enumerate(shape[1:], start=1):
            first += [*range(written + 1, 1, -1), 1]
            second += [operand] * (written + 1)
        # the sign before a running sum belongs to the sum, also the "=" before the first one
        second[-1] = 1
        for entry in range(m + 1):
            first += [*([1] if entry else []), *range(2, width + 2)]
            second += [entry + 1] * (width + bool(entry))
        return torch.tensor([[*first, 0], [*second, 0]]).T.contiguous()

    def _parse(self, query: str) -> tuple[Shape, Tensor]:
        numbers = read_numbers(query, "+", "123+45+678=")
        n, m = max(map(len, numbers)), len(numbers)
        if m < 2:
            raise DataError(
                f"query must add at least 2 numbers; got {m} in {query.strip()!r}. Add another."
            )
        width = self._width(n, m)
        widths = [width] * m if self.padding else [len(number) for number in numbers]
        shape = (n, *widths)
        self._check_fits(shape, DataError)
        return shape, torch.stack([to_digits(number, width) for number in numbers])[None]
