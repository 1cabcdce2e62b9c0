"""Sets of items: the class of the largest, or of the one with a given key."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import DataError
from gossamer.tasks.base import EOS, GridCell, Task, parse_range
from gossamer.tasks.structured import Shape, StructuredTask

__all__ = ["ArgmaxTask", "LookupTask"]

_FIRST = 2
"""Token of class 0; the other classes follow, then signs, then items."""
_Items = tuple[Tensor, Tensor, Tensor]


class _SetTask(StructuredTask):
    """What tasks on sets share: one token for each item, no position, a class as the answer."""

    name: str
    num_items: tuple[int, int]
    num_classes: int
    num_marks: int
    first_item: int

    @abstractmethod
    def _options(self) -> dict[str, Any]:
        """Return the options but the number of items."""

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        return {"name": self.name, "num_items": list(self.num_items), **self._options()}

    def grid(  # type: ignore[override]
        self, *, num_items: Iterable[int] | None = None
    ) -> list[GridCell]:
        """Return one cell for each size of the set.

        Args:
            num_items: Items. Default 1, 4, 16 and 64 times the most trained.
        """
        if num_items is None:
            num_items = [self.num_items[1] * k for k in (1, 4, 16, 64)]
        return [GridCell({"num_items": n}, self._only(n)) for n in num_items]

    @abstractmethod
    def _only(self, num_items: int) -> Task:
        """Return this task with sets of one size."""

    def _answer_length(self, shape: Shape) -> int:
        return 2

    def _largest_ids(self, shape: Shape) -> Shape:
        return (0,)

    def _describe(self, shape: Shape) -> str:
        return f"sets of {shape[0]} items"

    def _smaller(self, shape: Shape) -> Shape | None:
        return None

    def _ids(self, shape: Shape) -> Tensor:
        return torch.zeros(shape[0] + 4, dtype=torch.long)

    def _draw(self, batch_size: int, generator: torch.Generator) -> tuple[Shape, _Items]:
        lo, hi = self.num_items
        n = int(torch.randint(lo, hi + 1, (), generator=generator))
        classes = torch.randint(0, self.num_classes, (batch_size, n), generator=generator)
        place = torch.randint(0, n, (batch_size, 1), generator=generator)
        return (n,), (self._marks(place, (batch_size, n), generator), classes, place)

    @abstractmethod
    def _marks(self, place: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Draw priorities or keys, `(B, N)`, such that the item at `place` is the one asked for."""

    @abstractmethod
    def _question(self, marks: Tensor, place: Tensor) -> Tensor:
        """Return the token that asks, `(B, 1)`."""

    def _tokens(self, contents: _Items, shape: Shape) -> Tensor:
        marks, classes, place = contents
        end = torch.full_like(place, EOS)
        items = self.first_item + marks * self.num_classes + classes
        answer = classes.gather(1, place) + _FIRST
        return torch.cat((end, items, self._question(marks, place), answer, end), dim=1)

    def _item_names(self) -> list[str]:
        labels = range(self.num_classes)
        return [f"{mark}:{label} " for mark in range(self.num_marks) for label in labels]

    def _items(self, words: Sequence[str], what: str) -> tuple[list[int], list[int]]:
        """Read words such as `17:3` as marks and classes."""
        marks, classes = [], []
        for number, word in enumerate(words, start=1):
            mark, colon, label = word.partition(":")
            marks.append(self._number(mark, self.num_marks, f"{what} of item {number}", word))
            if not colon:
                raise DataError(
                    f"item {number} must be a {what} and a class, such as 3:1; got {word!r}. "
                    "Write both."
                )
            classes.append(self._number(label, self.num_classes, f"class of item {number}", word))
        if not words:
            raise DataError("query must hold at least one item, such as 3:1; got none. Add one.")
        return marks, classes

    @staticmethod
    def _number(text: str, count: int, what: str, word: str) -> int:
        # a longer text is no number below the largest count, and Python reads no endless ones
        if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) < count):
            raise DataError(
                f"{what} must be a number from 0 to {count - 1}; got {word!r}. Change it."
            )
        return int(text)


class ArgmaxTask(_SetTask):
    """Sets such as `$17:3 42:7 5:1 =7$`: the class of the item with the highest priority.

    An item is one token, a pair of priority and class, so a model has to learn the order of the
    priorities. One item has the highest priority; the others are independent, with priorities
    uniform below it, classes uniform. There is no order among the items: all ids are 0.

    Args:
        num_items: Fewest and most items of a training sample. Range: >= 1. Default 2 to 16.
        num_classes: Range: 2 to 1000. Default 10.
        num_priorities: Different priorities. Range: 2 to 100,000. Default 64.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> task = ArgmaxTask()
        >>> task.answer("17:3 42:7 5:1")
        '7'
        >>> task.symbols(task.example("17:3 42:7 5:1").tokens)
        '$17:3 42:7 5:1 =7$'

    Source: Li et al., *On Vanishing Variance in Transformer Length Generalization*, 2025.
    Deviations: items are tokens (authors: vectors), so priorities are whole numbers.
    """

    name = "argmax"

    def __init__(
        self, num_items: Any = (2, 16), *, num_classes: int = 10, num_priorities: int = 64
    ) -> None:
        self.num_items = parse_range(num_items, "num_items")
        check_range(num_classes, "num_classes", low=2, high=1000, integer=True)
        check_range(num_priorities, "num_priorities", low=2, high=100_000, integer=True)
        self.num_classes = num_classes
        self.num_marks = num_priorities
        self.first_item = _FIRST + num_classes + 1
        items = self._item_names()
        self.vocab = ("_", "$", *map(str, range(num_classes)), "=", *items)

    def _options(self) -> dict[str, Any]:
        return {"num_classes": self.num_classes, "num_priorities": self.num_marks}

    def _only(self, num_items: int) -> Task:
        return ArgmaxTask(num_items, **self._options())

    def _marks(self, place: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
        draws = torch.randint(0, self.num_marks, size, generator=generator)
        highest = draws.amax(1, keepdim=True).clamp(min=1)
        below = (torch.rand(size, generator=generator, dtype=torch.float64) * highest).long()
        return below.scatter(1, place, highest)

    def _question(self, marks: Tensor, place: Tensor) -> Tensor:
        return torch.full_like(place, _FIRST + self.num_classes)

    def _parse(self, query: str) -> tuple[Shape, _Items]:
        words = query.strip().removesuffix("=").split()
        marks, classes = self._items(words, "priority")
        if marks.count(max(marks)) > 1:
            raise DataError(
                f"one item must have the highest priority; got {max(marks)} "
                f"{marks.count(max(marks))} times. Change one."
            )
        place = torch.tensor([[marks.index(max(marks))]])
        return (len(words),), (torch.tensor([marks]), torch.tensor([classes]), place)


class LookupTask(_SetTask):
    """Dictionaries such as `$7:3 12:7 5:1 ?12=7$`: the class that stands with a key.

    An item is one token, a pair of key and class; one more token asks for a key. The key asked for
    stands once; the others are independent and uniform, so some of them may stand several times
    with different classes, and sets can be far larger than the number of keys. There is no order
    among the items: all ids are 0.

    Args:
        num_items: Fewest and most items of a training sample. Range: >= 1. Default 2 to 16.
        num_classes: Range: 2 to 1000. Default 10.
        num_keys: Different keys. Range: 2 to 100,000. Default 16.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> task = LookupTask()
        >>> task.answer("7:3 12:7 5:1 ?12")
        '7'
        >>> task.symbols(task.example("7:3 12:7 5:1 ?12").tokens)
        '$7:3 12:7 5:1 ?12=7$'

    Source: Li et al., *On Vanishing Variance in Transformer Length Generalization*, 2025.
    Deviations: items are tokens (authors: vectors); keys that are not asked for may repeat.
    """

    name = "lookup"

    def __init__(
        self, num_items: Any = (2, 16), *, num_classes: int = 10, num_keys: int = 16
    ) -> None:
        self.num_items = parse_range(num_items, "num_items")
        check_range(num_classes, "num_classes", low=2, high=1000, integer=True)
        check_range(num_keys, "num_keys", low=2, high=100_000, integer=True)
        self.num_classes = num_classes
        self.num_marks = num_keys
        self.first_item = _FIRST + num_classes + num_keys
        asked = [f"?{key}=" for key in range(num_keys)]
        items = self._item_names()
        self.vocab = ("_", "$", *map(str, range(num_classes)), *asked, *items)

    def _options(self) -> dict[str, Any]:
        return {"num_classes": self.num_classes, "num_keys": self.num_marks}

    def _only(self, num_items: int) -> Task:
        return LookupTask(num_items, **self._options())

    def _marks(self, place: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
        asked = torch.randint(0, self.num_marks, (size[0], 1), generator=generator)
        others = torch.randint(0, self.num_marks - 1, size, generator=generator)
        others += others >= asked  # every key but the one asked for
        return others.scatter(1, place, asked)

    def _question(self, marks: Tensor, place: Tensor) -> Tensor:
        return marks.gather(1, place) + _FIRST + self.num_classes

    def _parse(self, query: str) -> tuple[Shape, _Items]:
        text, mark, asked = query.strip().removesuffix("=").partition("?")
        if not mark:
            raise DataError(
                f"query must end with the key that it asks for, such as 3:1 7:0 ?7; got "
                f"{query.strip()!r}. Add ? and a key."
            )
        words = text.split()
        keys, classes = self._items(words, "key")
        key = self._number(asked.strip(), self.num_marks, "key asked for", f"?{asked}")
        if keys.count(key) != 1:
            raise DataError(
                f"the key asked for must stand once; got {key} {keys.count(key)} times. "
                "Change the items or the key."
            )
        place = torch.tensor([[keys.index(key)]])
        return (len(words),), (torch.tensor([keys]), torch.tensor([classes]), place)
