"""How many layers information needs: sets of reached tokens as bits, plain and fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.attention._compiled import compiled
from gossamer.attention._pattern_rules import Indices, KeyLists

__all__ = ["count_steps", "count_steps_plainly", "hop_counts", "pack_rows"]

Bits = NDArray[np.uint64]
# words of sets that are fetched together: 128 MiB
_WORDS_AT_ONCE = 2**24


def pack_rows(lists: KeyLists) -> Bits:
    """Return one bit for each pair, `(n, ceil(n / 64))`: bit j of row k says that k sees j.

    Example:
        >>> pack_rows((np.array([0, 2, 3]), np.array([0, 1, 1]))).tolist()
        [[3], [2]]
    """
    pointers, keys = lists
    n = len(pointers) - 1
    words = -(-n // 64)
    row = np.repeat(np.arange(n), np.diff(pointers))
    table = np.zeros(n * words, dtype=np.uint64)
    bits = np.left_shift(np.uint64(1), (keys % 64).astype(np.uint64))
    np.bitwise_or.at(table, row * words + keys // 64, bits)
    return table.reshape(n, words)


def _targets(n: int, causal: bool) -> Indices:
    """Return how many tokens each query is to reach."""
    return np.arange(1, n + 1) if causal else np.full(n, n)


def count_steps_plainly(
    patterns: Sequence[KeyLists], *, causal: bool, deadline: float
) -> int | None:
    r"""Return the first s at which every set is complete, `None` for never.

    $S^t_k = \bigcup_{j \in A^t_k} S^{t-1}_j$, word by word, for any patterns; what the fast form
    is tested against.

    Raises:
        TimeoutError: At the deadline, a value of `time.monotonic`.
    """
    n = len(patterns[0][0]) - 1
    target = _targets(n, causal)
    sets = pack_rows(patterns[0])
    met: set[tuple[int, bytes]] = set()
    step = 1
    while not np.array_equal(_sizes(sets), target):
        if time.monotonic() > deadline:
            raise TimeoutError
        # what comes back at the same place of the cycle comes back for ever
        state = (step % len(patterns), blake2b(sets.tobytes(), digest_size=16).digest())
        if state in met:
            return None
        met.add(state)
        sets, step = _next_sets(sets, patterns[step % len(patterns)]), step + 1
    return step


def _next_sets(sets: Bits, lists: KeyLists) -> Bits:
    """Return the union of the sets of each query's keys, some queries at a time."""
    pointers, keys = lists
    n, words = sets.shape
    rows = max(1, _WORDS_AT_ONCE * n // (words * max(1, len(keys))))
    new = np.zeros_like(sets)
    for begin in range(0, n, rows):
        part = pointers[begin : begin + rows + 1]
        some = np.flatnonzero(np.diff(part))
        if len(some):
            fetched = sets[keys[part[0] : part[-1]]]
            new[begin + some] = np.bitwise_or.reduceat(fetched, part[some] - part[0], axis=0)
    return new


def _sizes(sets: Bits) -> Indices:
    """Return how many bits each row has."""
    sizes: Indices = np.unpackbits(sets.view(np.uint8), axis=1).sum(1, dtype=np.int64)
    return sizes


def count_steps(patterns: Sequence[KeyLists], *, causal: bool, deadline: float) -> int:
    """Return the same for patterns that hold every query itself and that do reach everything.

    Sets then only grow. For 64 tokens at a time, the queries that they reach spread from those
    that were new since the same pattern was last used; so the cost does not grow with the steps.

    Raises:
        TimeoutError: At the deadline, a value of `time.monotonic`.
    """
    reverse = [_transposed(lists) for lists in patterns]
    pointers = np.stack([part[0] for part in reverse])
    begins = np.concatenate(([0], np.cumsum([len(part[1]) for part in reverse])[:-1]))
    queries = np.concatenate([part[1] for part in reverse])
    n = pointers.shape[1] - 1
    spread = _spread()
    steps = 1
    for first in range(0, n, 64):
        if time.monotonic() > deadline:
            raise TimeoutError
        tokens = np.arange(first, min(first + 64, n))
        wanted = int((n - tokens).sum()) if causal else n * len(tokens)
        steps = max(steps, spread(pointers, begins, queries, first, len(tokens), wanted))
    return steps


def _transposed(lists: KeyLists) -> KeyLists:
    """Return the queries that see each key."""
    pointers, keys = lists
    n = len(pointers) - 1
    query = np.repeat(np.arange(n, dtype=np.int32), np.diff(pointers))
    seen = np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=n))))
    return seen, query[np.argsort(keys, kind="stable")]


@cache
def _spread() -> Callable[..., int]:
    def spread(
        pointers: Any, begins: Any, queries: Any, first: int, count: int, wanted: int
    ) -> int:
        """Return the steps until `wanted` pairs of a query and one of `count` tokens are there."""
        period, n = pointers.shape[0], pointers.shape[1] - 1
        have = np.zeros(n, dtype=np.uint64)
        gains = np.zeros((period + 1, n), dtype=np.uint64)
        active = np.empty((period + 1, n), dtype=np.int32)
        sizes = np.zeros(period + 1, dtype=np.int64)
        for bit in range(count):
            for e in range(pointers[0, first + bit], pointers[0, first + bit + 1]):
                k = queries[e]
                if gains[0, k] == 0:
                    active[0, sizes[0]] = k
                    sizes[0] += 1
                gains[0, k] |= np.uint64(1) << np.uint64(bit)
                wanted -= 1
        have[:] = gains[0]
        step = 1
        while wanted > 0:
            pattern, slot = step % period, step % (period + 1)
            for i in range(sizes[slot]):
                gains[slot, active[slot, i]] = 0
            size = 0
            for s in range(period + 1):
                if s == slot:
                    continue
                for i in range(sizes[s]):
                    x = active[s, i]
                    for e in range(pointers[pattern, x], pointers[pattern, x + 1]):
                        k = queries[begins[pattern] + e]
                        new = gains[s, x] & ~have[k]
                        if new == 0:
                            continue
                        if gains[slot, k] == 0:
                            active[slot, size] = k
                            size += 1
                        gains[slot, k] |= new
                        have[k] |= new
                        while new:
                            new &= new - np.uint64(1)
                            wanted -= 1
            sizes[slot] = size
            step += 1
        return step

    return compiled(spread)


def hop_counts(patterns: Sequence[KeyLists], key: int) -> Indices:
    """Return the layers after which each query first has a token, 0 for never.

    Example:
        >>> chain = (np.array([0, 1, 3, 5]), np.array([0, 0, 1, 1, 2]))
        >>> hop_counts([chain], 0).tolist()
        [1, 1, 2]
    """
    n = len(patterns[0][0]) - 1
    first = np.zeros(n, dtype=np.int64)
    pointers, keys = patterns[0]
    reached = np.zeros(n, dtype=np.bool_)
    reached[np.repeat(np.arange(n), np.diff(pointers))[keys == key]] = True
    states: list[NDArray[np.bool_]] = []
    # a walk through tokens and places of the cycle that repeats none is no longer than this
    for step in range(1, n * len(patterns) + 1):
        first[reached & (first == 0)] = step
        states.append(reached)
        if first.all() or not reached.any():
            break
        pointers, keys = patterns[step % len(patterns)]
        some = np.flatnonzero(np.diff(pointers))
        reached = np.zeros_like(reached)
        reached[some] = np.bitwise_or.reduceat(states[-1][keys], pointers[some])
        if len(states) >= len(patterns) and np.array_equal(reached, states.pop(0)):
            break
    return first
