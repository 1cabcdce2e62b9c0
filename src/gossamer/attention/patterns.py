"""Sparse attention patterns, never spread out: as lists of keys, masks, blocks and functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gossamer.attention import _pattern_rules as rules
from gossamer.attention._pattern_rules import Indices, KeyLists, Rule
from gossamer.checks import check_choice, check_given, check_keys, check_range, check_table
from gossamer.errors import ConfigError, DtypeError, ShapeError

if TYPE_CHECKING:
    from scipy.sparse import csr_array
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["AttentionPattern"]

# queries looked at together; bounds the memory while a pattern is read
_ROWS = 1024


class AttentionPattern:
    """Which keys each query attends to, for one length; made by the constructors below.

    A pattern is a rule: it takes no memory of n x n until `mask()` is asked for, and everything
    else costs time and memory by the number of pairs. `a + b` is the union, whose `parts` are a
    and b. Queries and keys count from 0; all patterns go both ways until `causal()`.

    Args:
        length: Tokens n. Range: >= 1.
        rows: The keys of each query, one sequence for each; or a rule of the library.

    Raises:
        ConfigError: If a number is out of range.
        ShapeError: If there is not one row for each query.

    Example:
        >>> pattern = AttentionPattern.sliding(6, 1) + AttentionPattern.star(6)
        >>> pattern.mask()[1].int().tolist()
        [1, 1, 1, 0, 0, 1]
        >>> AttentionPattern(2, [[0], [0, 1]]).num_pairs
        3

    Source: Yun et al., *O(n) Connections are Expressive Enough*, NeurIPS 2020; strided and fixed:
        Child et al., *Generating Long Sequences with Sparse Transformers*, 2019.
    Deviations: the last token of an incomplete stretch of `fixed` is a summary token too
        (`pad_tail`), since else nobody would attend to it.
    """

    def __init__(self, length: int, rows: Sequence[Sequence[int]] | Rule) -> None:
        check_range(length, "length", low=1, integer=True)
        self.length = length
        self.rule: Rule = rows if isinstance(rows, Rule) else _listed(length, rows)

    # --- constructors ---

    @classmethod
    def full(cls, length: int) -> AttentionPattern:
        """Every query sees every key."""
        check_range(length, "length", low=1, integer=True)
        return cls(length, rules.Offsets(length, length - 1))

    @classmethod
    def sliding(cls, length: int, window: int) -> AttentionPattern:
        """Keys up to `window` tokens away, on both sides."""
        check_range(length, "length", low=1, integer=True)
        check_range(window, "window", low=0, integer=True)
        return cls(length, rules.Offsets(length, window))

    @classmethod
    def dilated(cls, length: int, window: int | None, rate: int) -> AttentionPattern:
        """Every `rate`-th key, up to `window` of them on each side; `None` for all of them."""
        check_range(length, "length", low=1, integer=True)
        check_range(rate, "rate", low=1, integer=True)
        if window is None:
            window = (length - 1) // rate
        check_range(window, "window", low=0, integer=True)
        return cls(length, rules.Offsets(length, window, rate))

    @classmethod
    def strided(cls, length: int, stride: int) -> AttentionPattern:
        """`sliding(stride)` and every `stride`-th key; the parts are the two sets of the paper."""
        _check_stride(length, stride)
        return cls.sliding(length, stride) + cls.dilated(length, None, stride)

    @classmethod
    def fixed(
        cls, length: int, stride: int, num_summary: int, pad_tail: bool = True
    ) -> AttentionPattern:
        """Stretches of `stride` tokens, and the last `num_summary` of each for all queries.

        The parts are the two sets of the paper. With `pad_tail` the last token of an incomplete
        stretch is a summary token too; without it that stretch is never seen from outside.
        """
        own = cls.block_diagonal(length, stride)
        return own + cls.summary(length, stride, num_summary, pad_tail)

    @classmethod
    def summary(
        cls, length: int, stride: int, num_summary: int, pad_tail: bool = True
    ) -> AttentionPattern:
        """The second part of `fixed`: summary tokens, and each query itself."""
        _check_stride(length, stride)
        check_range(num_summary, "num_summary", low=1, high=stride, integer=True)
        return cls(length, rules.SummaryHubs(length, stride, num_summary, pad_tail))

    @classmethod
    def star(cls, length: int, relay: int | None = None) -> AttentionPattern:
        """A relay token sees all and is seen by all; the others see it and themselves.

        The relay is the last token unless given.
        """
        check_range(length, "length", low=1, integer=True)
        relay = length - 1 if relay is None else relay
        check_range(relay, "relay", low=0, high=length - 1, integer=True)
        return cls(length, rules.OneHub(length, relay))

    @classmethod
    def star_ring(cls, length: int, relay: int | None = None) -> AttentionPattern:
        """A star whose tokens also see their two neighbours."""
        return cls.star(length, relay) + cls.sliding(length, 1)

    @classmethod
    def global_local(cls, length: int, window: int, num_global: int) -> AttentionPattern:
        """A sliding window, and `num_global` first tokens that see all and are seen by all."""
        local = cls.sliding(length, window)
        check_range(num_global, "num_global", low=0, high=length, integer=True)
        return local + cls(length, rules.FirstHubs(length, num_global))

    @classmethod
    def bigbird(
        cls,
        length: int,
        window: int = 1,
        num_global: int = 1,
        num_random: int = 1,
        *,
        block_size: int = 64,
        seed: int = 0,
    ) -> AttentionPattern:
        """Window, global and random blocks; all three numbers count blocks of `block_size`."""
        check_range(block_size, "block_size", low=1, integer=True)
        check_range(length, "length", low=1, integer=True)
        blocks = -(-length // block_size)
        inner = cls.global_local(blocks, window, min(num_global, blocks))
        check_range(num_random, "num_random", low=0, integer=True)
        inner += cls.random(blocks, min(num_random + 1, blocks), seed)
        return cls(length, rules.Blocks(length, block_size, inner.rule))

    @classmethod
    def random(cls, length: int, num_keys: int, seed: int = 0) -> AttentionPattern:
        """`num_keys` keys for each query: itself and others drawn evenly."""
        check_range(length, "length", low=1, integer=True)
        check_range(num_keys, "num_keys", low=1, high=length, integer=True)
        draw = np.random.default_rng(seed)
        others = np.stack(
            [draw.choice(length - 1, num_keys - 1, replace=False) for _ in range(length)]
        )
        own = np.arange(length)[:, None]
        keys = np.sort(np.concatenate((own, others + (others >= own)), axis=1), axis=1)
        return cls(length, rules.Listed(np.arange(length + 1) * num_keys, keys.ravel()))

    @classmethod
    def block_diagonal(cls, length: int, block_size: int) -> AttentionPattern:
        """Tokens see their own block of `block_size`."""
        check_range(length, "length", low=1, integer=True)
        check_range(block_size, "block_size", low=1, integer=True)
        own = rules.Offsets(-(-length // block_size), 0)
        return cls(length, rules.Blocks(length, block_size, own))

    @classmethod
    def document(cls, ids: Sequence[int] | Indices | Tensor) -> AttentionPattern:
        """Tokens see those of the same document; `ids` names the document of each token."""
        numbers = np.asarray(ids)
        if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iu":
            raise ShapeError(
                f"ids must be whole numbers, one for each token, (n,); got {numbers.shape} of "
                f"{numbers.dtype}. Pass one document number for each token."
            )
        return cls(len(numbers), rules.Documents(numbers.astype(np.int64)))

    @classmethod
    def from_mask(cls, mask: Any) -> AttentionPattern:
        """Read a boolean matrix, True = takes part, rows are queries.

        Raises:
            ShapeError: If it is not square.
            DtypeError: If it is not boolean.
        """
        matrix = np.asarray(mask)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ShapeError(
                f"mask must be square, (n, n) with n >= 1; got {matrix.shape}. Pass one row and "
                "one column for each token."
            )
        if matrix.dtype != np.bool_:
            raise DtypeError(
                f"mask must be boolean, True = takes part; got {matrix.dtype}. Use mask > 0."
            )
        row, keys = np.nonzero(matrix)
        pointers = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=len(matrix)))))
        return cls(len(matrix), rules.Listed(pointers, keys))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> AttentionPattern:
        """Build a pattern from plain values: `{"kind": "strided", "length": 25, "stride": 5}`.

        Raises:
            ConfigError: If the kind or an option is unknown or missing.
        """
        check_table(options, "pattern")
        check_given(options, "kind", "pattern")
        kind = options["kind"]
        check_choice(kind, _KINDS, "kind of pattern")
        make = getattr(cls, kind)
        given = {key: value for key, value in options.items() if key != "kind"}
        parameters = inspect.signature(make).parameters
        check_keys(given, parameters, f"pattern {kind!r}")
        for name, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty:
                check_given(given, name, f"pattern {kind!r}")
        made: AttentionPattern = make(**given)
        return made

    # --- made of others ---

    def __add__(self, other: AttentionPattern) -> AttentionPattern:
        if other.length != self.length:
            raise ShapeError(
                f"patterns of a union must have one length; got {self.length} and "
                f"{other.length}. Build them for the same number of tokens."
            )
        both = (part.rule for part in (*self.parts, *other.parts))
        return AttentionPattern(self.length, rules.Union(tuple(both)))

    @property
    def parts(self) -> tuple[AttentionPattern, ...]:
        """The patterns that a union is made of; the pattern itself where it is none."""
        if not isinstance(self.rule, rules.Union):
            return (self,)
        return tuple(AttentionPattern(self.length, rule) for rule in self.rule.rules)

    def causal(self) -> AttentionPattern:
        """Return the pattern without the keys after each query; parts stay parts."""
        if isinstance(self.rule, rules.Union):
            kept: Rule = rules.Union(tuple(rules.Causal(rule) for rule in self.rule.rules))
        else:
            kept = rules.Causal(self.rule)
        return AttentionPattern(self.length, kept)

    # --- forms ---

    def keys(self, queries: Indices) -> KeyLists:
        """Return the sorted keys of some queries: where each list begins and ends, and the keys."""
        return self.rule.keys(queries)

    def mask(self, device: torch.device | str | None = None) -> Tensor:
        """Return the boolean matrix `(n, n)`, True = takes part."""
        mask = np.zeros((self.length, self.length), dtype=np.bool_)
        for queries, (pointers, keys) in self._chunks():
            mask[np.repeat(queries, np.diff(pointers)), keys] = True
        return torch.from_numpy(mask).to(device)

    def mask_mod(
        self, device: torch.device | str = "cpu"
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return FlexAttention's mask function `(batch, head, query, key) -> seen`."""
        seen = self.rule.predicate(torch.device(device))
        return lambda batch, head, query, key: seen(query, key)

    def block_mask(self, block_size: int = 128, device: torch.device | str = "cpu") -> BlockMask:
        """Return FlexAttention's block mask, built from block indices.

        Keys are counted block by block; no matrix over pairs of tokens is made.
        """
        from torch.nn.attention.flex_attention import BlockMask

        check_range(block_size, "block_size", low=1, integer=True)
        counts = self._block_counts(block_size)
        whole = counts == block_size**2
        lists = (*_block_lists((counts > 0) & ~whole), *_block_lists(whole))
        some, some_keys, full, full_keys = (
            torch.from_numpy(part)[None, None].to(device) for part in lists
        )
        return BlockMask.from_kv_blocks(
            some,
            some_keys,
            full,
            full_keys,
            BLOCK_SIZE=block_size,
            mask_mod=self.mask_mod(device),
            seq_lengths=(self.length, self.length),
        )

    def to_csr(self) -> csr_array:
        """Return the pattern as a sparse boolean matrix of SciPy."""
        from scipy.sparse import csr_array

        begins, keys = [np.zeros(1, dtype=np.int64)], []
        for _, (pointers, part) in self._chunks():
            begins.append(pointers[1:] + begins[-1][-1])
            keys.append(part.astype(np.int32))
        indices, pointers = np.concatenate(keys), np.concatenate(begins)
        ones = np.ones(len(indices), dtype=np.bool_)
        return csr_array((ones, indices, pointers), shape=(self.length, self.length))

    @cached_property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        chunks = np.array_split(np.arange(self.length), -(-self.length // _ROWS))
        return sum(int(self.rule.counts(queries).sum()) for queries in chunks)

    @property
    def density(self) -> float:
        """Share of all n x n pairs."""
        return self.num_pairs / self.length**2

    def __repr__(self) -> str:
        return f"AttentionPattern(length={self.length}, num_pairs={self.num_pairs})"

    def _chunks(self) -> Iterator[tuple[Indices, KeyLists]]:
        for begin in range(0, self.length, _ROWS):
            queries = np.arange(begin, min(begin + _ROWS, self.length))
            yield queries, self.keys(queries)

    def _block_counts(self, size: int) -> Indices:
        """Return the pairs in each block of queries and block of keys."""
        number = -(-self.length // size)
        counts = np.zeros((number, number), dtype=np.int64)
        for block in range(number):
            queries = np.arange(block * size, min((block + 1) * size, self.length))
            counts[block] = np.bincount(self.keys(queries)[1] // size, minlength=number)
        return counts


_KINDS = (
    "full", "sliding", "dilated", "strided", "fixed", "summary", "star", "star_ring",
    "global_local", "bigbird", "random", "block_diagonal", "document",
)  # fmt: skip


def _check_stride(length: int, stride: int) -> None:
    check_range(length, "length", low=1, integer=True)
    check_range(stride, "stride", low=1, high=length, integer=True)


def _block_lists(chosen: Any) -> tuple[Any, Any]:
    """Return how many blocks each row has, and their numbers first in a row of all numbers."""
    order = np.argsort(~chosen, axis=1, kind="stable")
    return chosen.sum(1).astype(np.int32), order.astype(np.int32)


def _listed(length: int, rows: Sequence[Sequence[int]]) -> rules.Listed:
    if len(rows) != length:
        raise ShapeError(
            f"rows must hold the keys of each of {length} queries; got {len(rows)} rows. Add or "
            "remove rows, or change length."
        )
    lists = [np.unique(np.asarray(row, dtype=np.int64)) for row in rows]
    for query, keys in enumerate(lists):
        if len(keys) and not 0 <= keys[0] <= keys[-1] < length:
            raise ConfigError(
                f"keys in rows must be 0 to {length - 1}; got {keys[0]} to {keys[-1]} in row "
                f"{query}. Change that row."
            )
    pointers = np.concatenate(([0], np.cumsum([len(keys) for keys in lists])))
    return rules.Listed(pointers, np.concatenate(lists))
