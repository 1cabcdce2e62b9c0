"""Copy, reverse and parity of a string, with coupled position ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError
from gossamer.tasks.base import EOS, GridCell, parse_range
from gossamer.tasks.structured import Shape, StructuredTask

__all__ = ["CopyTask", "ParityTask", "ReverseTask"]

_FIRST = 2
"""Token of the first symbol; those of the others follow, then `=`."""


class _StringTask(StructuredTask):
    """What tasks on one string share: `$`, the string, `=`, what is made of it, `$`."""

    name: str
    alphabet: str

    def __init__(self, length: Any = (1, 20), *, max_position: int | None = None) -> None:
        self.length = parse_range(length, "length")
        check_range(self.length[1], "length", high=1_000_000, integer=True)
        self._set_max_position(max_position)
        self._check_fits((self.length[1],), ConfigError)

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        return {"name": self.name, "length": list(self.length), **self._options()}

    def _options(self) -> dict[str, Any]:
        return self._plain_max_position

    def grid(  # type: ignore[override]
        self, *, length: Iterable[int] | None = None
    ) -> list[GridCell]:
        """Return one cell for each length.

        Args:
            length: Lengths to test. Default 1, 2, 3, 5 and 10 times the longest trained, as far as
                `max_position` allows.
        """
        if length is None:
            length = [n for n in (self.length[1] * k for k in (1, 2, 3, 5, 10)) if self._fits((n,))]
        return [GridCell({"length": n}, type(self)((n, n), **self._options())) for n in length]

    @abstractmethod
    def _made(self, contents: Tensor) -> Tensor:
        """Return what the answer says, as numbers of symbols, `(B, n)` or `(B, 1)`."""

    def _answer_length(self, shape: Shape) -> int:
        return shape[0] + 1

    def _largest_ids(self, shape: Shape) -> Shape:
        return (shape[0] + 1,)

    def _describe(self, shape: Shape) -> str:
        return f"strings of {shape[0]} symbols"

    def _smaller(self, shape: Shape) -> Shape | None:
        n = min(shape[0] - 1, self.max_position[0] if self.max_position else shape[0])
        return (n,) if n >= 1 else None

    def _draw(self, batch_size: int, generator: torch.Generator) -> tuple[Shape, Tensor]:
        lo, hi = self.length
        n = int(torch.randint(lo, hi + 1, (), generator=generator))
        size = (batch_size, n)
        return (n,), torch.randint(0, len(self.alphabet), size, generator=generator)

    def _tokens(self, contents: Tensor, shape: Shape) -> Tensor:
        ends = torch.full((len(contents), 1), EOS)
        equals = torch.full_like(ends, _FIRST + len(self.alphabet))
        parts = [ends, contents + _FIRST, equals, self._made(contents) + _FIRST, ends]
        return torch.cat(parts, dim=1)

    def _parse(self, query: str) -> tuple[Shape, Tensor]:
        text = query.strip().removesuffix("=").rstrip()
        for column, character in enumerate(text, start=1):
            if character not in self.alphabet:
                raise DataError(
                    f"query must hold the symbols {self.alphabet}, such as {self.alphabet[:2]}=; "
                    f"got {character!r} at column {column} of {text!r}. Remove it."
                )
        if not text:
            raise DataError(
                f"query must hold at least one symbol, such as {self.alphabet[:2]}=; got "
                f"{query!r}. Add one."
            )
        return (len(text),), torch.tensor([[self.alphabet.index(c) for c in text]])


class CopyTask(_StringTask):
    """Copies such as `$314=314$`: the same digits again.

    A digit and its copy share an id: the first s + 1, the next s + 2, and so on; `=` has id s, the
    `$` at both ends 0. All samples of a batch have one length, drawn uniformly.

    Args:
        length: Fewest and most digits, `(lo, hi)` or `"lo-hi"`. Range: >= 1. Default 1 to 20.
        max_position: Largest id of a model's table. Ids then start at random in training, and in
            the middle of the table in tests. Default `None`: ids start at 1.

    Raises:
        ConfigError: If a range is wrong, or `hi` digits need ids beyond `max_position`.

    Example:
        >>> task = CopyTask()
        >>> task.symbols(task.example("314").tokens)
        '$314=314$'
        >>> task.position_ids("314").tolist()
        [0, 2, 3, 4, 1, 2, 3, 4, 0]

    Source: Cho et al., *Position Coupling*, NeurIPS 2024, public data code.
    Deviations: one length for each batch; tests start in the middle of the table (authors: at 1).
    """

    name = "copy"
    alphabet = "0123456789"
    vocab = ("_", "$", *alphabet, "=")

    def _made(self, contents: Tensor) -> Tensor:
        return contents

    def _ids(self, shape: Shape) -> Tensor:
        digits = range(2, shape[0] + 2)
        return torch.tensor([0, *digits, 1, *digits, 0])


class ReverseTask(_StringTask):
    """Reversals such as `$314=413$`.

    A digit and its image share an id: the first s, the next s + 1, and so on to `=`, which has
    s + n; from there the ids of the answer fall to s. The `$` at both ends have 0. All samples of a
    batch have one length, drawn uniformly.

    Args:
        length: Fewest and most digits, `(lo, hi)` or `"lo-hi"`. Range: >= 1. Default 1 to 20.
        max_position: Largest id of a model's table. Ids then start at random in training, and in
            the middle of the table in tests. Default `None`: ids start at 1.

    Raises:
        ConfigError: If a range is wrong, or `hi` digits need ids beyond `max_position`.

    Example:
        >>> task = ReverseTask()
        >>> task.symbols(task.example("314").tokens)
        '$314=413$'
        >>> task.position_ids("314").tolist()
        [0, 1, 2, 3, 4, 3, 2, 1, 0]

    Source: Cho et al., *Position Coupling*, NeurIPS 2024, public data code.
    Deviations: one length for each batch; tests start in the middle of the table (authors: at 1).
    """

    name = "reverse"
    alphabet = "0123456789"
    vocab = ("_", "$", *alphabet, "=")

    def _made(self, contents: Tensor) -> Tensor:
        return contents.flip(-1)

    def _ids(self, shape: Shape) -> Tensor:
        n = shape[0]
        return torch.tensor([0, *range(1, n + 2), *range(n, 0, -1), 0])


class ParityTask(_StringTask):
    """Parities such as `$0110=0100$`: whether the ones seen so far are odd in number.

    With the scratchpad the answer is every running parity, and the last bit is the parity of the
    whole; a bit and the parity up to it share an id: the first s + 1, the next s + 2; `=` has s.
    Without it the answer is one bit, and all bits share the id s + 1, for which no model is known
    that holds on longer strings.

    Args:
        length: Fewest and most bits, `(lo, hi)` or `"lo-hi"`. Range: >= 1. Default 1 to 20.
        scratchpad: Write the running parities. Default true.
        max_position: Largest id of a model's table. Ids then start at random in training, and in
            the middle of the table in tests. Default `None`: ids start at 1.

    Raises:
        ConfigError: If a range is wrong, or `hi` bits need ids beyond `max_position`.

    Example:
        >>> task = ParityTask()
        >>> task.symbols(task.example("0110").tokens), task.answer("0110")
        ('$0110=0100$', '0')
        >>> task.position_ids("0110").tolist()
        [0, 2, 3, 4, 5, 1, 2, 3, 4, 5, 0]

    Source: Cho et al., *Position Coupling*, NeurIPS 2024, public data code.
    Deviations: one length for each batch; tests start in the middle of the table (authors: at 1).
    """

    name = "parity"
    alphabet = "01"
    vocab = ("_", "$", *alphabet, "=")

    def __init__(
        self,
        length: Any = (1, 20),
        *,
        scratchpad: bool = True,
        max_position: int | None = None,
    ) -> None:
        if not isinstance(scratchpad, bool):
            raise ConfigError(f"scratchpad must be true or false; got {scratchpad!r}. Change it.")
        self.has_scratchpad = scratchpad
        super().__init__(length, max_position=max_position)

    def _options(self) -> dict[str, Any]:
        return {"scratchpad": self.has_scratchpad, **self._plain_max_position}

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the last produced bit, `""` where there is none."""
        return self.symbols(self._until_end(tokens))[-1:]

    def scratchpad(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the running parities as they were produced, `""` for a task without them."""
        return self.symbols(self._until_end(tokens)) if self.has_scratchpad else ""

    def _made(self, contents: Tensor) -> Tensor:
        running = contents.cumsum(1) % 2
        return running if self.has_scratchpad else running[:, -1:]

    def _answer_length(self, shape: Shape) -> int:
        return shape[0] + 1 if self.has_scratchpad else 2

    def _largest_ids(self, shape: Shape) -> Shape:
        return (shape[0] + 1,) if self.has_scratchpad else (2,)

    def _ids(self, shape: Shape) -> Tensor:
        n = shape[0]
        if not self.has_scratchpad:
            return torch.tensor([0, *[2] * n, 1, 2, 0])
        bits = range(2, n + 2)
        return torch.tensor([0, *bits, 1, *bits, 0])
