"""Tasks whose samples of one shape are made together: tokens from contents, ids from the shape."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError
from gossamer.tasks.base import EOS, Batch, Example, Task

__all__ = ["Shape", "StructuredTask"]

Shape = tuple[int, ...]


class StructuredTask(Task):
    """Base of tasks in which the kinds of length of a sample decide its layout and its ids.

    A subclass says how contents are drawn or read from text, and what tokens and ids a shape has;
    seeded batches, masks, random starts and the limits of a table follow from that. Ids depend on
    the shape alone, so they are known before the first answer token is produced.

    Attributes:
        max_position: Largest id of a model's table, one for each level, or `None` for no table.
            With one, ids start at random in training, each level for itself, and in the middle of
            the table in tests.

    Example:
        >>> from gossamer.tasks import AdditionTask
        >>> isinstance(AdditionTask(), StructuredTask)
        True

    Source: formats of Cho et al., NeurIPS 2024 and ICLR 2025, public data code.
    Deviations: tests start in the middle of the table (authors: at 1).
    """

    max_position: tuple[int, ...] | None = None

    @abstractmethod
    def _draw(self, batch_size: int, generator: torch.Generator) -> tuple[Shape, Any]:
        """Draw one shape, and contents of that shape."""

    @abstractmethod
    def _parse(self, query: str) -> tuple[Shape, Any]:
        """Read a query as contents of a batch of one, and their shape."""

    @abstractmethod
    def _tokens(self, contents: Any, shape: Shape) -> Tensor:
        """Return whole sequences with their answers, `(B, T)`."""

    @abstractmethod
    def _ids(self, shape: Shape) -> Tensor:
        """Return the ids for start 1, `(T,)` or `(T, levels)`."""

    @abstractmethod
    def _answer_length(self, shape: Shape) -> int:
        """Return the number of answer tokens, with the end token."""

    @abstractmethod
    def _largest_ids(self, shape: Shape) -> Shape:
        """Return the largest id of each level for start 1, without building the ids."""

    @abstractmethod
    def _describe(self, shape: Shape) -> str:
        """Return the shape in words, for messages."""

    @abstractmethod
    def _smaller(self, shape: Shape) -> Shape | None:
        """Return a shape that is a little smaller, or `None` below the smallest."""

    def sample(self, batch_size: int, *, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw samples of one shape."""
        check_choice(split, ("train", "test"), "split")
        shape, contents = self._draw(batch_size, generator)
        tokens = self._tokens(contents, shape)
        starts = self._starts(batch_size, shape, generator if split == "train" else None)
        return Batch(tokens, self._placed(shape, starts), self._mask(tokens, shape))

    def example(self, query: str, *, start: int | Sequence[int] | None = None) -> Example:
        """Return query and true answer as one sequence."""
        shape, contents = self._parse(query)
        self._check_fits(shape, DataError)
        tokens = self._tokens(contents, shape)
        if start is None:
            starts = self._starts(1, shape, None)
        else:
            starts = torch.tensor([self._given_starts(start, shape)])
        mask = self._mask(tokens, shape)
        return Example(tokens[0], self._placed(shape, starts)[0], mask[0])

    def encode(self, query: str) -> Tensor:
        """Return the tokens of a query up to where the answer begins."""
        return self.prompt(query)[0]

    def prompt(self, query: str) -> tuple[Tensor, Tensor]:
        """Return the tokens of a query, and the ids of query and answer."""
        example = self.example(query)
        return example.tokens[~example.loss_mask], example.position_ids

    def position_ids(self, query: str, *, start: int | Sequence[int] | None = None) -> Tensor:
        """Return the ids of query and answer."""
        return self.example(query, start=start).position_ids

    def answer(self, query: str) -> str:
        """Return the true answer."""
        example = self.example(query)
        return self.decode(example.tokens[example.loss_mask])

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return produced answer tokens, up to the end token, as text."""
        return self.symbols(self._until_end(tokens))

    @staticmethod
    def _until_end(tokens: Tensor | Sequence[int]) -> list[int]:
        produced = [int(token) for token in tokens]
        return produced[: produced.index(EOS)] if EOS in produced else produced

    def _mask(self, tokens: Tensor, shape: Shape) -> Tensor:
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, -self._answer_length(shape) :] = True
        return mask

    def _placed(self, shape: Shape, starts: Tensor) -> Tensor:
        """Return the ids that begin at `starts`, `(B, levels)`; 0 stays 0."""
        ids = self._ids(shape)
        grid = ids.unsqueeze(-1) if self.levels == 1 else ids
        moved = torch.where(grid > 0, grid - 1 + starts[:, None, :], 0)
        return moved.squeeze(-1) if self.levels == 1 else moved

    def _last_starts(self, shape: Shape) -> list[int] | None:
        if self.max_position is None:
            return None
        largest = self._largest_ids(shape)
        return [limit - need + 1 for limit, need in zip(self.max_position, largest, strict=True)]

    def _starts(self, batch_size: int, shape: Shape, generator: torch.Generator | None) -> Tensor:
        last = self._last_starts(shape)
        if last is None:
            return torch.ones(batch_size, self.levels, dtype=torch.long)
        if generator is None:
            return torch.tensor([(1 + end) // 2 for end in last]).expand(batch_size, -1)
        draws = [torch.randint(1, end + 1, (batch_size,), generator=generator) for end in last]
        return torch.stack(draws, dim=1)

    def _given_starts(self, start: int | Sequence[int], shape: Shape) -> list[int]:
        starts = [start] * self.levels if isinstance(start, int) else list(start)
        if len(starts) != self.levels:
            raise ConfigError(
                f"start must be one number or one for each of {self.levels} levels; got "
                f"{len(starts)}. Change start."
            )
        last = self._last_starts(shape)
        for level, value in enumerate(starts):
            check_range(value, "start", low=1, high=last[level] if last else None, integer=True)
        return starts

    def _set_max_position(self, value: Any) -> None:
        """Check and keep `max_position`: one number, or one for each level."""
        if value is None:
            return
        limits = list(value) if isinstance(value, list | tuple) else [value] * self.levels
        if len(limits) != self.levels:
            raise ConfigError(
                f"max_position must be one number or one for each of {self.levels} levels; got "
                f"{len(limits)}. Change max_position."
            )
        for limit in limits:
            check_range(limit, "max_position", low=1, integer=True)
        self.max_position = tuple(limits)

    @property
    def _plain_max_position(self) -> dict[str, Any]:
        """`max_position` as it stands in `config`, left out when there is no table."""
        if self.max_position is None:
            return {}
        one = self.max_position[0] if self.levels == 1 else list(self.max_position)
        return {"max_position": one}

    def _fits(self, shape: Shape) -> bool:
        last = self._last_starts(shape)
        return last is None or min(last) >= 1

    def _check_fits(self, shape: Shape, error: type[ConfigError] | type[DataError]) -> None:
        if self.max_position is None or self._fits(shape):
            return
        needs = zip(self._largest_ids(shape), self.max_position, strict=True)
        level, need, limit = next((n, a, b) for n, (a, b) in enumerate(needs, start=1) if a > b)
        where = f" at level {level}" if self.levels > 1 else ""
        smaller: Shape | None = shape
        while smaller is not None and not self._fits(smaller):
            smaller = self._smaller(smaller)
        most = f"the largest that fit: {self._describe(smaller)}" if smaller else "nothing fits"
        raise error(
            f"{self._describe(shape)} need ids up to {need}{where}, more than max_position = "
            f"{limit}; {most}. Use shorter inputs or a larger max_position."
        )
