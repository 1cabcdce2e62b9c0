"""Addition of non-negative integers, digit by digit, with coupled position ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError
from gossamer.tasks.base import EOS, Batch, Example, GridCell, Task, parse_range

__all__ = ["AdditionTask"]

_VOCAB = ("_", "$", *"0123456789", "+", "=")
_DIGIT, _PLUS, _EQUALS = 2, 12, 13  # token of digit 0, of "+", of "="
_LIMB = 15


def _add_columns(columns: Tensor, width: int) -> Tensor:
    """Carry column sums, `(B, w)`, units first, into `width` digits, `(B, width)`.

    Fifteen digits at a time make one number that fits in an int64, so that the loop over carries is
    a fifteenth as long as the sum.
    """
    limbs = -(-width // _LIMB)
    powers = 10 ** torch.arange(_LIMB)
    padded = torch.nn.functional.pad(columns, (0, limbs * _LIMB - columns.shape[1]))
    values = (padded.view(-1, limbs, _LIMB) * powers).sum(-1)
    for limb in range(limbs - 1):
        values[:, limb + 1] += values[:, limb] // 10**_LIMB
    digits = values.unsqueeze(-1) // powers % 10
    return digits.view(len(columns), -1)[:, :width]


class AdditionTask(Task):
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
        if max_position is not None:
            check_range(max_position, "max_position", low=1, integer=True)
        self.operands = operands
        self.max_position = max_position
        self.carry_chains = carry_chains
        self._check_fits(self.digits[1], ConfigError)

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        options = {"digits": list(self.digits), "operands": self.operands}
        if self.max_position is not None:
            options["max_position"] = self.max_position
        return {"name": "addition", **options, "carry_chains": self.carry_chains}

    def sample(self, batch_size: int, *, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw sums of one width."""
        check_choice(split, ("train", "test"), "split")
        lengths = self._draw_lengths(batch_size, generator)
        n = int(lengths.max())
        digits = self._draw_digits(lengths, generator)
        if self.carry_chains:
            self._add_carry_chains(digits, n, generator)
        tokens = self._tokens(digits, n)
        ids = self._ids(n)
        starts = self._starts(batch_size, n, generator if split == "train" else None)
        shifted = torch.where(ids > 0, ids - 1 + starts[:, None], 0)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, -(self._answer_width(n) + 1) :] = True
        return Batch(tokens, shifted, mask)

    def encode(self, query: str) -> Tensor:
        """Return the tokens of a query, padded, up to and with `=`."""
        example = self.example(query)
        return example.tokens[~example.loss_mask]

    def position_ids(self, query: str, *, start: int | None = None) -> Tensor:
        """Return the ids of query and answer."""
        return self.example(query, start=start).position_ids

    def example(self, query: str, *, start: int | None = None) -> Example:
        """Return query and true answer as one sequence."""
        numbers = self._parse(query)
        n = max(len(number) for number in numbers)
        self._check_fits(n, DataError)
        digits = torch.zeros(1, self.operands, self._operand_width(n), dtype=torch.long)
        for row, number in enumerate(numbers):
            digits[0, row, : len(number)] = torch.tensor([int(c) for c in reversed(number)])
        tokens = self._tokens(digits, n)[0]
        first = int(self._starts(1, n, None)) if start is None else start
        check_range(first, "start", low=1, high=self._last_start(n))
        ids = self._ids(n)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[-(self._answer_width(n) + 1) :] = True
        return Example(tokens, torch.where(ids > 0, ids - 1 + first, 0), mask)

    def answer(self, query: str) -> str:
        """Return the exact sum."""
        example = self.example(query)
        return self.decode(example.tokens[example.loss_mask])

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return produced answer tokens as a number, most significant digit first."""
        produced = [int(token) for token in tokens]
        if EOS in produced:
            produced = produced[: produced.index(EOS)]
        text = self.symbols(produced[::-1])
        return text.lstrip("0") or ("0" if text else "")

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
            digits = [n for n in (self.digits[1] * k for k in (1, 2, 3, 5, 10)) if self._fits(n)]
        shares = [carry_chains] if isinstance(carry_chains, int | float) else list(carry_chains)
        cells = []
        for share in shares:
            for n in digits:
                if unseen_only and self.digits[0] <= n <= self.digits[1]:
                    continue
                task = AdditionTask(
                    (n, n),
                    operands=self.operands,
                    max_position=self.max_position,
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

    def _last_start(self, n: int) -> int | None:
        return None if self.max_position is None else self.max_position - self._answer_width(n)

    def _fits(self, n: int) -> bool:
        last = self._last_start(n)
        return last is None or last >= 1

    def _check_fits(self, n: int, error: type[ConfigError] | type[DataError]) -> None:
        if not self._fits(n):
            reach = min(n, self.max_position or n)
            longest = next((m for m in range(reach, 0, -1) if self._fits(m)), 0)
            raise error(
                f"operands of {n} digits need ids up to {self._answer_width(n) + 1}, more than "
                f"max_position = {self.max_position}; at most {longest} digits fit. "
                "Use shorter operands or a larger max_position."
            )

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

    def _draw_digits(self, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """Return `(B, operands, width)` digits, units first; a leading digit is not 0."""
        n = int(lengths.max())
        shape = (*lengths.shape, self._operand_width(n))
        digits = torch.randint(0, 10, shape, generator=generator)
        leading = torch.randint(1, 10, lengths.shape, generator=generator)
        place = torch.arange(shape[-1])
        top = lengths.unsqueeze(-1) - 1
        digits = torch.where((place == top) & (top > 0), leading.unsqueeze(-1), digits)
        return torch.where(place > top, 0, digits)

    def _add_carry_chains(self, digits: Tensor, n: int, generator: torch.Generator) -> None:
        size = len(digits)
        begin = torch.randint(0, n, (size, 1), generator=generator)
        draw = torch.rand((size, 1), generator=generator)
        end = begin + 1 + (draw * (n - begin)).long().clamp(max=n - begin - 1)
        chosen = torch.rand((size, 1), generator=generator) < self.carry_chains
        place = torch.arange(digits.shape[-1])
        span = chosen & (place >= begin) & (place < end)
        digits[:, 1] = torch.where(span, 9 - digits[:, 0], digits[:, 1])

    def _tokens(self, digits: Tensor, n: int) -> Tensor:
        """Return whole sequences, `(B, T)`, from the operands' digits."""
        size = len(digits)
        total = _add_columns(digits.sum(1), self._answer_width(n))

        def fill(token: int) -> Tensor:
            return torch.full((size, 1), token)

        parts = [fill(EOS)]
        for row in range(self.operands):
            parts += [digits[:, row].flip(-1) + _DIGIT, fill(_PLUS)]
        parts[-1] = fill(_EQUALS)
        return torch.cat([*parts, total + _DIGIT, fill(EOS)], dim=1)

    def _ids(self, n: int) -> Tensor:
        """Return the ids for start 1, `(T,)`."""
        operand = [*range(self._operand_width(n) + 1, 1, -1), 1]
        answer = range(2, self._answer_width(n) + 2)
        return torch.tensor([0, *operand * self.operands, *answer, 0])

    def _starts(self, batch_size: int, n: int, generator: torch.Generator | None) -> Tensor:
        last = self._last_start(n)
        if last is None:
            return torch.ones(batch_size, dtype=torch.long)
        if generator is None:
            return torch.full((batch_size,), (1 + last) // 2)
        return torch.randint(1, last + 1, (batch_size,), generator=generator)

    def _parse(self, query: str) -> list[str]:
        text = query.strip()
        body = text[:-1] if text.endswith("=") else text
        for column, character in enumerate(body, start=1):
            if character not in "0123456789+ ":
                hint = " Negative numbers are not supported." if character == "-" else ""
                raise DataError(
                    f"query must hold digits and '+' such as 123+4567=; got {character!r} at "
                    f"column {column} "
                    f"of {text!r}.{hint} Remove it."
                )
        numbers = [part.strip() for part in body.split("+")]
        if any(not part or " " in part for part in numbers):
            raise DataError(
                f"query must have a number on each side of '+'; got {text!r}. Fill it in."
            )
        if len(numbers) != self.operands:
            raise DataError(
                f"query must add {self.operands} numbers, as this task was built; got "
                f"{len(numbers)} in {text!r}. "
                "Change the query or the task's `operands`."
            )
        return [number.lstrip("0") or "0" for number in numbers]
