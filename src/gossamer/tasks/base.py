"""What every task offers: seeded batches, text in and out, ids by rule, a grid to test on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError, UnsupportedError

__all__ = [
    "EOS",
    "PAD",
    "Batch",
    "BatchStream",
    "Example",
    "GridCell",
    "Task",
    "collate",
    "parse_range",
    "parse_two_ranges",
]

PAD, EOS = 0, 1
IGNORED = -100


@dataclass(frozen=True)
class Example:
    """One sequence with the true answer in place.

    Args:
        tokens: `(T,)`, integers.
        position_ids: `(T,)` or `(T, levels)`, integers, 0 = no position.
        loss_mask: `(T,)`, boolean, True on the answer and the final end token.
    """

    tokens: Tensor
    position_ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences of one length, padded on the right where they differ.

    Args:
        tokens: `(B, T)`, integers.
        position_ids: `(B, T)` or `(B, T, levels)`, integers, 0 = no position.
        loss_mask: `(B, T)`, boolean, True on the answer and the final end token.
    """

    tokens: Tensor
    position_ids: Tensor
    loss_mask: Tensor

    @property
    def labels(self) -> Tensor:
        """The tokens, with -100 wherever no loss is taken, `(B, T)`."""
        return torch.where(self.loss_mask, self.tokens, IGNORED)

    def to(self, device: torch.device | str) -> Batch:
        """Move the batch to a device."""
        return Batch(
            self.tokens.to(device), self.position_ids.to(device), self.loss_mask.to(device)
        )

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class GridCell:
    """One cell of an evaluation grid: its coordinates and the task restricted to it."""

    coordinates: dict[str, Any]
    task: Task


class Task(ABC):
    """Base of all tasks.

    A task is a source of seeded batches, and a rule that turns a query written as text into tokens
    and position ids, and tokens back into an answer.

    Attributes:
        vocab: One string for each token; 0 is padding, 1 is start and end of a sequence.
        levels: Position ids for each token.
        pad, eos: The tokens for padding and for both ends.

    Example:
        >>> from gossamer.tasks import AdditionTask
        >>> AdditionTask().answer("7+8")
        '15'

    Source: formats of Cho et al., NeurIPS 2024 and ICLR 2025, public data code.
    Deviations: a batch holds samples of one width where the task allows, so that it needs no
        padding.
    """

    vocab: tuple[str, ...]
    levels: int = 1
    pad: int = PAD
    eos: int = EOS

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.vocab)

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Name and options from which `build_task` makes the task again; plain values."""

    @abstractmethod
    def sample(self, batch_size: int, *, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw a batch; ids start at random with `split="train"`, at a fixed place else."""

    @abstractmethod
    def encode(self, query: str) -> Tensor:
        """Return the tokens of a query up to where the answer begins, `(T,)`."""

    @abstractmethod
    def position_ids(self, query: str, *, start: int | None = None) -> Tensor:
        """Return the ids of query and answer, `(T,)` or `(T, levels)`; start as in tests."""

    def prompt(self, query: str) -> tuple[Tensor, Tensor]:
        """Return the tokens of a query, and the ids of query and answer."""
        return self.encode(query), self.position_ids(query)

    @abstractmethod
    def answer(self, query: str) -> str:
        """Return the true answer; a task that knows none raises `UnsupportedError`."""

    @abstractmethod
    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return produced answer tokens, up to the end token, as a person writes the answer."""

    @abstractmethod
    def example(self, query: str, *, start: int | None = None) -> Example:
        """Return query and true answer as one sequence."""

    @abstractmethod
    def grid(self, **axes: Any) -> list[GridCell]:
        """Return the cells of an evaluation grid; the keywords are the task's kinds of length."""

    def scratchpad(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the working that produced answer tokens hold, `""` where a task has none."""
        return ""

    def check(self, query: str, text: str) -> bool | None:
        """Whether `text` is the true answer to `query`; `None` where the task knows no truth."""
        try:
            return text.strip() == self.answer(query)
        except UnsupportedError:
            return None

    def symbols(self, tokens: Tensor | Sequence[int]) -> str:
        """Return tokens as the strings of the vocabulary, padding left out."""
        return "".join(self.vocab[int(token)] for token in tokens if int(token) != PAD)

    def stream(self, batch_size: int, *, seed: int, split: str = "train") -> BatchStream:
        """Return an endless stream of batches of which each is a function of seed and number."""
        return BatchStream(self, batch_size, seed, split)


@dataclass(frozen=True)
class BatchStream:
    """Batches by number: batch n depends on the seed and n alone.

    So the stream is the same for any number of workers, and a resumed run goes on at any step
    without replaying the steps before.

    Args:
        task: What to draw from.
        batch_size: Samples for each batch. Range: >= 1.
        seed: Any integer >= 0.
        split: `"train"` or `"test"`.

    Example:
        >>> from gossamer.tasks import AdditionTask
        >>> stream = AdditionTask().stream(2, seed=0)
        >>> bool((stream.batch(5).tokens == stream.batch(5).tokens).all())
        True
    """

    task: Task
    batch_size: int
    seed: int
    split: str = "train"

    def __post_init__(self) -> None:
        check_range(self.batch_size, "batch_size", low=1, integer=True)
        check_range(self.seed, "seed", low=0, integer=True)

    def batch(self, number: int) -> Batch:
        """Return batch `number`, from 0."""
        state = np.random.SeedSequence((self.seed, number)).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(state) >> 1)
        return self.task.sample(self.batch_size, generator=generator, split=self.split)

    def __iter__(self) -> Iterator[Batch]:
        number = 0
        while True:
            yield self.batch(number)
            number += 1


def collate(examples: Sequence[Example]) -> Batch:
    """Stack examples, padded on the right with token 0, id 0 and no loss.

    Raises:
        DataError: If there is no example.

    Example:
        >>> from gossamer.tasks import AdditionTask
        >>> task = AdditionTask()
        >>> collate([task.example("1+2"), task.example("10+2")]).tokens.shape
        torch.Size([2, 11])
    """
    if not examples:
        raise DataError("examples must hold at least one example; got none. Add one.")
    pad = torch.nn.utils.rnn.pad_sequence
    return Batch(
        pad([e.tokens for e in examples], batch_first=True, padding_value=PAD),
        pad([e.position_ids for e in examples], batch_first=True, padding_value=0),
        pad([e.loss_mask for e in examples], batch_first=True, padding_value=False),
    )


def parse_range(value: Any, name: str, *, low: int = 1) -> tuple[int, int]:
    """Turn `(lo, hi)`, `"lo-hi"` or one number into a checked pair.

    Raises:
        ConfigError: If it is neither, or `lo > hi`, or `lo < low`.

    Example:
        >>> parse_range("1-10", "digits")
        (1, 10)
    """
    parts: Sequence[Any]
    if isinstance(value, str):
        parts = value.split("-")
    elif isinstance(value, list | tuple):
        parts = value
    else:
        parts = [value]
    try:
        numbers = [int(part) for part in parts]
    except (TypeError, ValueError):
        numbers = []
    if any(isinstance(part, bool | float) for part in parts):
        numbers = []
    if len(numbers) not in (1, 2):
        raise ConfigError(
            f"{name} must be a number or a range such as 1-10; got {value!r}. Change {name}."
        )
    lo, hi = numbers[0], numbers[-1]
    if lo > hi or lo < low:
        raise ConfigError(
            f"{name} must be a range lo-hi with {low} <= lo <= hi; got {lo}-{hi}. Change {name}."
        )
    return lo, hi


def parse_two_ranges(value: Any, name: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Turn one range for two lengths, or one for each, into two checked pairs.

    Args:
        value: As in `parse_range`; or a pair of those, or text such as `"1-5x1-8"`.
        name: The argument, for messages.

    Raises:
        ConfigError: If it is neither.

    Example:
        >>> parse_two_ranges("1-5x1-8", "digits")
        ((1, 5), (1, 8))
        >>> parse_two_ranges((1, 5), "digits")
        ((1, 5), (1, 5))
    """
    parts: Sequence[Any] = [value]
    if isinstance(value, str):
        parts = value.split("x")
    elif isinstance(value, list | tuple) and any(isinstance(v, list | tuple | str) for v in value):
        parts = value
    if len(parts) not in (1, 2):
        raise ConfigError(
            f"{name} must be one range or two such as 1-5x1-8; got {value!r}. Change {name}."
        )
    return parse_range(parts[0], name), parse_range(parts[-1], name)
