"""Addition of non-negative integers, digit by digit, with coupled position ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError
from gossamer.tasks.base import EOS, GridCell, parse_range
from gossamer.tasks.digits import DIGIT, carry, draw_digits, read_numbers, to_digits, write_number
from gossamer.tasks.structured import Shape, StructuredTask

__all__ = ["AdditionTask"]

_VOCAB = ("_", "$", *"0123456789", "+", "=")
_PLUS, _EQUALS = 12, 13


class AdditionTask(StructuredTask):
    """Sums such as `$653+049=2070$`: operands padded with zeros, answer with its units digit first.

    n is the length of the longest operand. Two operands are padded to n digits, the answer to
    n + 1. With more operands all are padded to the width of the largest possible sum. Digits of
    equal significance share an id: units s + 1, tens s + 2, and so on; `+` and `=` have id s, the
    `$` at both ends 0. All numbers are handled digit by digit, so any length works.

    A batch has one n, drawn as the largest of uniform operand lengths; within a batch the lengths
    follow their exact distribution given n, so samples are those of independent uniform lengths.

    Args:
        digits: Fewest and most digits of an operand, `(lo, hi)` or `"lo-hi"`. Range: >= 1.
        operands: How many numbers are added. Range: 2 to 900. Default 2.
        max_position: Largest id of a model's table. Ids then start at random in training, and in
            the middle of the table in tests. Default `None`: ids start at 1.
        carry_chains: Share of samples with `b = 9 - a` on a random span of the first two operands,
            so that a carry which enters the span runs through it. Range: 0 to 1. Default 0.

    Raises:
        ConfigError: If a range is wrong, or `hi` digits need ids beyond `max_position`.

    Example:
        >>> task = AdditionTask()
        >>> task.symbols(task.example("653+49").tokens)
        '$653+049=2070$'
        >>> task.position_ids("653+49").tolist()
        [0, 4, 3, 2, 1, 4, 3, 2, 1, 2, 3, 4, 5, 0]

    Source: Cho et al., *Position Coupling*, NeurIPS 2024, section 3 and public data code.
    Deviations: one n for each batch; tests start in the middle of the table (authors: at 1).
    """

    vocab = _VOCAB

    def __init__(
        self,
        digits: Any = (1, 10),
        *,
        operands: int = 2,
        max_position: int | None = None,
        carry_chains: float = 0.0,
    ) -> None:
        self.digits = parse_range(digits, "digits")
        check_range(operands, "operands", low=2, high=900, integer=True)
        check_range(carry_chains, "carry_chains", low=0.0, high=1.0)
        check_range(self.digits[1], "digits", high=1_000_000, integer=True)
        self.operands = operands
        self.carry_chains = carry_chains
        self._set_max_position(max_position)
        self._check_fits((self.digits[1],), ConfigError)

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        options = {"digits": list(self.digits), "operands": self.operands}
        return {
            "name": "addition",
            **options,
            **self._plain_max_position,
            "carry_chains": self.carry_chains,
        }

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return produced answer tokens as a number, most significant digit first."""
        return write_number(self.symbols(self._until_end(tokens)))

    def grid(  # type: ignore[override]
        self,
        *,
        digits: Iterable[int] | None = None,
        carry_chains: float | Iterable[float] = 0.0,
        unseen_only: bool = False,
    ) -> list[GridCell]:
        """Return one cell for each number of digits and share of carry chains.

        Args:
            digits: Lengths to test; every operand has exactly that many digits (with carry chains
                the second may begin with 0). Default 1, 2, 3, 5 and 10 times the longest trained,
                as far as `max_position` allows.
            carry_chains: One share or several.
            unseen_only: Leave out lengths inside the trained range.
        """
        if digits is None:
            digits = [n for n in (self.digits[1] * k for k in (1, 2, 3, 5, 10)) if self._fits((n,))]
        shares = [carry_chains] if isinstance(carry_chains, int | float) else list(carry_chains)
        cells = []
        for share in shares:
            for n in digits:
                if unseen_only and self.digits[0] <= n <= self.digits[1]:
                    continue
                task = AdditionTask(
                    (n, n),
                    operands=self.operands,
                    **self._plain_max_position,
                    carry_chains=share,
                )
                cells.append(GridCell({"digits": n, "carry_chains": share}, task))
        return cells

    def _operand_width(self, n: int) -> int:
        return n if self.operands == 2 else self._answer_width(n)

    def _answer_width(self, n: int) -> int:
        # digits of the largest sum; beyond 20 digits it grows by one a digit, no number is built
        small = min(n, 20)
        return len(str(self.operands * (10**small - 1))) + n - small

    def _answer_length(self, shape: Shape) -> int:
        return self._answer_width(shape[0]) + 1

    def _largest_ids(self, shape: Shape) -> Shape:
        return (self._answer_width(shape[0]) + 1,)

    def _describe(self, shape: Shape) -> str:
        return f"operands of {shape[0]} digits"

    def _smaller(self, shape: Shape) -> Shape | None:
        # an id for each digit is needed, so a far too long operand is cut at once
        n = min(shape[0] - 1, self.max_position[0] if self.max_position else shape[0])
        return (n,) if n >= 1 else None

    def _draw(self, batch_size: int, generator: torch.Generator) -> tuple[Shape, Tensor]:
        lengths = self._draw_lengths(batch_size, generator)
        n = int(lengths.max())
        digits = draw_digits(lengths, self._operand_width(n), generator)
        if self.carry_chains:
            self._add_carry_chains(digits, n, generator)
        return (n,), digits

    def _draw_lengths(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """Return `(B, operands)` uniform lengths, given that the largest of each row is one n."""
        lo, hi = self.digits
        count = self.operands
        n = int(torch.randint(lo, hi + 1, (count,), generator=generator).max())
        choices = n - lo + 1
        lengths = torch.randint(lo, n + 1, (batch_size, count), generator=generator)
        if choices == 1:
            return lengths
        # the first operand that reaches n is a truncated geometric variable; others before it are
        # shorter
        weights = torch.tensor([(1 - 1 / choices) ** i for i in range(count)], dtype=torch.float64)
        first = torch.multinomial(weights, batch_size, replacement=True, generator=generator)[
            :, None
        ]
        below = torch.randint(lo, n, (batch_size, count), generator=generator)
        place = torch.arange(count)
        lengths = torch.where(place < first, below, lengths)
        return torch.where(place == first, n, lengths)

    def _add_carry_chains(self, digits: Tensor, n: int, generator: torch.Generator) -> None:
        size = len(digits)
        begin = torch.randint(0, n, (size, 1), generator=generator)
        draw = torch.rand((size, 1), generator=generator)
        end = begin + 1 + (draw * (n - begin)).long().clamp(max=n - begin - 1)
        chosen = torch.rand((size, 1), generator=generator) < self.carry_chains
        place = torch.arange(digits.shape[-1])
        span = chosen & (place >= begin) & (place < end)
        digits[:, 1] = torch.where(span, 9 - digits[:, 0], digits[:, 1])

    def _tokens(self, contents: Tensor, shape: Shape) -> Tensor:
        size = len(contents)
        total = carry(contents.sum(1), self._answer_width(shape[0]))

        def fill(token: int) -> Tensor:
            return torch.full((size, 1), token)

        parts = [fill(EOS)]
        for row in range(self.operands):
            parts += [contents[:, row].flip(-1) + DIGIT, fill(_PLUS)]
        parts[-1] = fill(_EQUALS)
        return torch.cat([*parts, total + DIGIT, fill(EOS)], dim=1)

    def _ids(self, shape: Shape) -> Tensor:
        operand = [*range(self._operand_width(shape[0]) + 1, 1, -1), 1]
        answer = range(2, self._answer_width(shape[0]) + 2)
        return torch.tensor([0, *operand * self.operands, *answer, 0])

    def _parse(self, query: str) -> tuple[Shape, Tensor]:
        numbers = read_numbers(query, "+", "123+4567=")
        if len(numbers) != self.operands:
            raise DataError(
                f"query must add {self.operands} numbers, as this task was built; got "
                f"{len(numbers)} in {query.strip()!r}. "
                "Change the query or the task's `operands`."
            )
        n = max(map(len, numbers))
        # before the width of a very long operand is asked for digits
        self._check_fits((n,), DataError)
        width = self._operand_width(n)
        return (n,), torch.stack([to_digits(number, width) for number in numbers])[None]
