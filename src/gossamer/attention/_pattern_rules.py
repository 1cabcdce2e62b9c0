"""Rules that say which keys a query sees: as lists of keys, and as a function of two indices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Blocks",
    "Causal",
    "Documents",
    "FirstHubs",
    "Listed",
    "Offsets",
    "OneHub",
    "Rule",
    "SummaryHubs",
    "Union",
    "distinct",
    "ranges",
]

Indices = NDArray[np.int64]
KeyLists = tuple[Indices, NDArray[Any]]
"""Where the keys of each query begin and end in one array, `(R + 1,)`, and that array."""
Predicate = Callable[[Tensor, Tensor], Tensor]


class Rule(ABC):
    """Which keys each of n queries sees.

    `keys` costs as much as it returns, so that a sparse pattern is never spread out; `predicate`
    works element by element on indices, as FlexAttention wants it.
    """

    length: int

    @abstractmethod
    def keys(self, queries: Indices) -> KeyLists:
        """Return the sorted keys of some queries, each once."""

    def counts(self, queries: Indices) -> Indices:
        """Return how many keys some queries have."""
        return np.diff(self.keys(queries)[0])

    @abstractmethod
    def predicate(self, device: torch.device) -> Predicate:
        """Return the function `(query, key) -> seen` on index tensors of a device."""


def ranges(starts: Indices, ends: Indices) -> KeyLists:
    """Return `starts[i], ..., ends[i] - 1` for each i, one after the other.

    Example:
        >>> ranges(np.array([3, 7]), np.array([5, 8]))[1].tolist()
        [3, 4, 7]
    """
    pointers = np.concatenate(([0], np.cumsum(ends - starts)))
    shift = np.repeat(starts - pointers[:-1], ends - starts)
    return pointers, np.arange(pointers[-1]) + shift


def distinct(codes: Indices) -> Indices:
    """Return the different numbers in order; fast where they come in ordered runs."""
    ordered = np.sort(codes, kind="stable")
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def _from_codes(codes: Indices, rows: int, length: int) -> KeyLists:
    """Return key lists from numbers `row * length + key` in any order, also repeated ones."""
    row, key = np.divmod(distinct(codes), length)
    return np.concatenate(([0], np.cumsum(np.bincount(row, minlength=rows)))), key


def _codes(lists: KeyLists, length: int) -> Indices:
    pointers, keys = lists
    return np.repeat(np.arange(len(pointers) - 1), np.diff(pointers)) * length + keys


@dataclass(frozen=True)
class Offsets(Rule):
    """Keys at distances 0, rate, 2 rate, ... window * rate on both sides."""

    length: int
    window: int
    rate: int = 1

    def keys(self, queries: Indices) -> KeyLists:
        before, after = self._reach(queries)
        pointers, steps = ranges(-before, after + 1)
        return pointers, np.repeat(queries, np.diff(pointers)) + self.rate * steps

    def counts(self, queries: Indices) -> Indices:
        before, after = self._reach(queries)
        return before + after + 1

    def _reach(self, queries: Indices) -> tuple[Indices, Indices]:
        """Return how many keys there are before and after each query."""
        before = np.minimum(queries // self.rate, self.window)
        return before, np.minimum((self.length - 1 - queries) // self.rate, self.window)

    def predicate(self, device: torch.device) -> Predicate:
        limit, rate = self.window * self.rate, self.rate
        if rate == 1:
            return lambda q, k: (q - k).abs() <= limit
        return lambda q, k: ((q - k).abs() <= limit) & ((q - k) % rate == 0)


@dataclass(frozen=True)
class _Hubs(Rule):
    """Some tokens are seen by all; with `both` they see all as well. Every token sees itself."""

    length: int

    @property
    def both(self) -> bool:
        return True

    @abstractmethod
    def is_hub(self, index: Any) -> Any:
        """Whether a token is seen by all; `index` is an array or a tensor."""

    def keys(self, queries: Indices) -> KeyLists:
        n, rows = self.length, np.arange(len(queries))
        hubs = np.flatnonzero(self.is_hub(np.arange(n)))
        parts = [rows * n + queries, (rows[:, None] * n + hubs).ravel()]
        if self.both:
            wide = rows[self.is_hub(queries)]
            parts.append((wide[:, None] * n + np.arange(n)).ravel())
        return _from_codes(np.concatenate(parts), len(queries), n)

    def predicate(self, device: torch.device) -> Predicate:
        if self.both:
            return lambda q, k: (q == k) | self.is_hub(k) | self.is_hub(q)
        return lambda q, k: (q == k) | self.is_hub(k)


@dataclass(frozen=True)
class OneHub(_Hubs):
    """The relay token of a star."""

    relay: int

    def is_hub(self, index: Any) -> Any:
        return index == self.relay


@dataclass(frozen=True)
class FirstHubs(_Hubs):
    """The first tokens are global."""

    count: int

    def is_hub(self, index: Any) -> Any:
        return index < self.count


@dataclass(frozen=True)
class SummaryHubs(_Hubs):
    """The last tokens of each stretch of `stride` are seen by all; they see only each other."""

    stride: int
    count: int
    pad_tail: bool

    @property
    def both(self) -> bool:
        return False

    def is_hub(self, index: Any) -> Any:
        found = index % self.stride >= self.stride - self.count
        return found | (index == self.length - 1) if self.pad_tail else found


@dataclass(frozen=True, eq=False)
class Documents(Rule):
    """Tokens see those with the same number."""

    ids: Indices

    @property
    def length(self) -> int:  # type: ignore[override]
        return len(self.ids)

    def keys(self, queries: Indices) -> KeyLists:
        order = np.argsort(self.ids, kind="stable")
        ordered = self.ids[order]
        own = self.ids[queries]
        starts, ends = (np.searchsorted(ordered, own, side=s) for s in ("left", "right"))
        pointers, places = ranges(starts, ends)
        return pointers, order[places]

    def predicate(self, device: torch.device) -> Predicate:
        table = torch.from_numpy(self.ids).to(device)
        return lambda q, k: table[q] == table[k]


@dataclass(frozen=True, eq=False)
class Listed(Rule):
    """Keys by list."""

    pointers: Indices
    all_keys: Indices

    @property
    def length(self) -> int:  # type: ignore[override]
        return len(self.pointers) - 1

    def keys(self, queries: Indices) -> KeyLists:
        pointers, places = ranges(self.pointers[queries], self.pointers[queries + 1])
        return pointers, self.all_keys[places]

    @cached_property
    def _bits(self) -> NDArray[np.uint8]:
        """One bit for each pair, rows padded to bytes: what a function of two indices looks up."""
        width = (self.length + 7) // 8
        row = np.repeat(np.arange(self.length), np.diff(self.pointers))
        table = np.zeros(self.length * width, dtype=np.uint8)
        bits = np.left_shift(1, self.all_keys % 8).astype(np.uint8)
        np.bitwise_or.at(table, row * width + self.all_keys // 8, bits)
        return table

    def predicate(self, device: torch.device) -> Predicate:
        width = (self.length + 7) // 8
        table = torch.from_numpy(self._bits).to(device)
        return lambda q, k: ((table[q * width + k // 8].long() >> (k % 8)) & 1) == 1


@dataclass(frozen=True)
class Blocks(Rule):
    """A rule on blocks of tokens: all pairs of two blocks are seen or none."""

    length: int
    size: int
    inner: Rule

    def keys(self, queries: Indices) -> KeyLists:
        pointers, blocks = self.inner.keys(queries // self.size)
        begins = blocks * self.size
        inside, keys = ranges(begins, np.minimum(begins + self.size, self.length))
        return inside[pointers], keys

    def predicate(self, device: torch.device) -> Predicate:
        inner, size = self.inner.predicate(device), self.size
        return lambda q, k: inner(q // size, k // size)


@dataclass(frozen=True)
class Union(Rule):
    """What any of several rules gives."""

    rules: tuple[Rule, ...]

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.rules[0].length

    def keys(self, queries: Indices) -> KeyLists:
        n = self.length
        parts = [_codes(rule.keys(queries), n) for rule in self.rules]
        return _from_codes(np.concatenate(parts), len(queries), n)

    def predicate(self, device: torch.device) -> Predicate:
        parts = [rule.predicate(device) for rule in self.rules]

        def any_of(q: Tensor, k: Tensor) -> Tensor:
            seen = parts[0](q, k)
            for part in parts[1:]:
                seen = seen | part(q, k)
            return seen

        return any_of


@dataclass(frozen=True)
class Causal(Rule):
    """A rule without the keys after the query."""

    rule: Rule

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.rule.length

    def keys(self, queries: Indices) -> KeyLists:
        pointers, keys = self.rule.keys(queries)
        kept = keys <= np.repeat(queries, np.diff(pointers))
        return np.concatenate(([0], np.cumsum(kept)))[pointers], keys[kept]

    def predicate(self, device: torch.device) -> Predicate:
        inner = self.rule.predicate(device)
        return lambda q, k: inner(q, k) & (k <= q)
