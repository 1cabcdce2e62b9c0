"""A path through all tokens, each of which sees the one before it: found, refuted or not known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.attention._compiled import compiled
from gossamer.attention._pattern_rules import Indices, KeyLists, distinct

__all__ = ["PathAnswer", "SeenGraph", "find_path", "path_by_subsets"]

# subsets of tokens that the exact search may hold: 4 MiB
_EXACT_LENGTH = 20
_STRIDES, _CUTS, _RESTARTS = 16, 8, 2
# moves of a path's end for each token, and a bound on moves x tokens
_MOVES, _MOVE_WORK = 64, 2**29
# seconds for a good repair where it is known that there is no path
_REPAIR_SECONDS = 5.0


class SeenGraph:
    """Who sees whom: an arc u -> v where query v sees key u, self-loops left out.

    Args:
        lists: Sorted keys of each query.
    """

    def __init__(self, lists: KeyLists) -> None:
        pointers, keys = lists
        self.n = len(pointers) - 1
        query = np.repeat(np.arange(self.n), np.diff(pointers))
        others = query != keys
        self.query, self.key = query[others], keys[others].astype(np.int64)
        self._codes = self.query * self.n + self.key

    def has(self, query: Indices, key: Indices) -> NDArray[np.bool_]:
        """Whether queries see keys, pair by pair."""
        if not len(self._codes):
            return np.zeros(len(query), dtype=np.bool_)
        codes = query * self.n + key
        place = np.searchsorted(self._codes, codes).clip(max=len(self._codes) - 1)
        found: NDArray[np.bool_] = self._codes[place] == codes
        return found

    def missing(self, order: Indices) -> NDArray[np.bool_]:
        """Return at which steps of an order the next token does not see the one before."""
        return ~self.has(order[1:], order[:-1])

    def matrix(self) -> Any:
        """Return the arcs as a sparse matrix, rows are queries."""
        from scipy.sparse import csr_array

        ones = np.ones(len(self.query), dtype=np.int8)
        return csr_array((ones, (self.query, self.key)), shape=(self.n, self.n))


@dataclass(frozen=True)
class PathAnswer:
    """Whether there is such a path.

    Args:
        status: `"satisfied"`, `"violated"` or `"unknown"`.
        order: The path; where none was found, the order with the fewest gaps that was seen.
        reason: In words.
    """

    status: str
    order: Indices
    reason: str


def find_path(graph: SeenGraph, deadline: float) -> PathAnswer:
    """Look for a path: plain orders, then refutations, then an exact or a bounded search.

    Args:
        graph: Who sees whom.
        deadline: Of the bounded search, a value of `time.monotonic`.
    """
    best, gaps = np.arange(graph.n), graph.n
    for name, order in _plain_orders(graph):
        count = int(graph.missing(order).sum())
        if count == 0:
            return PathAnswer("satisfied", order, f"the {name} is such a path")
        if count < gaps:
            best, gaps = order, count
    reason = _refutation(graph)
    if reason is None and graph.n <= _EXACT_LENGTH:
        found = path_by_subsets(graph)
        if found is not None:
            return PathAnswer("satisfied", found, "found among all subsets")
        reason = "no order of the tokens is such a path; all subsets were tried"
    moves = min(_MOVES * graph.n, _MOVE_WORK // graph.n)
    if reason is not None:
        moves = 0
        deadline = min(deadline, time.monotonic() + _REPAIR_SECONDS)
    for seed in range(_RESTARTS):
        order = _cover(graph, seed, deadline, moves)
        count = int(graph.missing(order).sum())
        if count == 0:
            return PathAnswer("satisfied", order, "found by joining cycles")
        if count < gaps:
            best, gaps = order, count
        if reason is not None or time.monotonic() > deadline:
            break
    if reason is not None:
        return PathAnswer("violated", best, reason)
    return PathAnswer("unknown", best, "neither found nor refuted within the bounds of the search")


def _plain_orders(graph: SeenGraph) -> Iterator[tuple[str, Indices]]:
    """Yield the orders that patterns of the library have paths along."""
    tokens = np.arange(graph.n)
    yield "order of the tokens", tokens
    yield "reversed order of the tokens", tokens[::-1].copy()
    middle = graph.query == graph.n // 2
    strides = np.unique(np.abs(graph.key[middle] - graph.n // 2))[:_STRIDES]
    for stride in {*strides.tolist(), math.isqrt(graph.n)} - {0, 1}:
        runs = [tokens[start::stride] for start in range(min(stride, graph.n))]
        yield f"order by residue modulo {stride}", np.concatenate(runs)
        snake = [run[::-1] if number % 2 else run for number, run in enumerate(runs)]
        yield f"snake by residue modulo {stride}", np.concatenate(snake)


def _refutation(graph: SeenGraph) -> str | None:
    """Return why there can be no path, or `None`."""
    from scipy.sparse.csgraph import maximum_bipartite_matching

    n = graph.n
    blind = np.flatnonzero(np.bincount(graph.query, minlength=n) == 0)
    if len(blind) > 1:
        return f"{len(blind)} tokens see no other, such as {blind[0]} and {blind[1]}; one may"
    hidden = np.flatnonzero(np.bincount(graph.key, minlength=n) == 0)
    if len(hidden) > 1:
        return (
            f"{len(hidden)} tokens are seen by no other, such as {hidden[0]} and {hidden[1]}; "
            "one may"
        )
    matrix = graph.matrix()
    cut = _cut(matrix) or _condensation(matrix, graph)
    if cut is not None:
        return cut
    matched = int((maximum_bipartite_matching(matrix, perm_type="column") >= 0).sum())
    if matched < n - 1:
        return f"the tokens fall into {n - matched} chains at least; one is wanted"
    return None


def _cut(matrix: Any) -> str | None:
    """Refute by removing the tokens with most arcs: c of them leave at most c + 1 parts."""
    from scipy.sparse.csgraph import connected_components

    n = matrix.shape[0]
    degree = matrix.sum(0) + matrix.sum(1)
    order = np.argsort(-degree, kind="stable")
    for count in range(min(_CUTS, n - 1) + 1):
        rest = np.sort(order[count:])
        part = matrix[rest][:, rest] if count else matrix
        parts = connected_components(part, directed=False, return_labels=False)
        if parts > count + 1:
            if count == 0:
                return f"the tokens fall into {parts} parts that do not see each other"
            names = ", ".join(map(str, sorted(order[:count].tolist())))
            return f"without the tokens {names} the others fall into {parts} parts"
    return None


def _condensation(matrix: Any, graph: SeenGraph) -> str | None:
    """Refute by the groups of tokens that reach each other: they must follow one another."""
    from scipy.sparse.csgraph import connected_components

    groups, label = connected_components(matrix, directed=True, connection="strong")
    if groups == 1:
        return None
    before, after = label[graph.key], label[graph.query]
    codes = before.astype(np.int64) * groups + after
    first, second = np.divmod(distinct(codes[before != after]), groups)
    # a path through all groups is a topological order without a choice
    waiting = np.bincount(second, minlength=groups)
    starts = np.searchsorted(first, np.arange(groups + 1))
    ready = np.flatnonzero(waiting == 0).tolist()
    while ready:
        if len(ready) > 1:
            sizes = np.bincount(label, minlength=groups)[ready[:2]].tolist()
            return (
                f"two groups of tokens, of {sizes[0]} and {sizes[1]}, see each other neither "
                "directly nor through others"
            )
        group = ready.pop()
        following = second[starts[group] : starts[group + 1]]
        waiting[following] -= 1
        ready.extend(following[waiting[following] == 0].tolist())
    return None


def path_by_subsets(graph: SeenGraph) -> Indices | None:
    """Return a path, or `None` when there is none: exact, 2^n subsets.

    For every set of tokens the possible last tokens are kept as bits, set size by set size.
    """
    n = graph.n
    before = np.zeros(n, dtype=np.int64)  # bits of the tokens that each one sees
    np.bitwise_or.at(before, graph.query, 1 << graph.key)
    subsets = np.arange(1 << n, dtype=np.int32)
    sizes = sum(((subsets >> token) & 1 for token in range(n)), np.zeros_like(subsets))
    ends = np.zeros(1 << n, dtype=np.int32)
    ends[1 << np.arange(n)] = 1 << np.arange(n)
    for size in range(1, n):
        own = subsets[(sizes == size) & (ends != 0)]
        for token in range(n):
            grown = own[((own >> token) & 1 == 0) & (ends[own] & before[token] != 0)]
            ends[grown | (1 << token)] |= 1 << token
    left = (1 << n) - 1
    if not ends[left]:
        return None
    path = [int(ends[left]).bit_length() - 1]
    while len(path) < n:
        left ^= 1 << path[-1]
        path.append((int(ends[left]) & int(before[path[-1]])).bit_length() - 1)
    return np.array(path[::-1])


def _cover(graph: SeenGraph, seed: int, deadline: float, moves: int) -> Indices:
    """Return an order made of few paths: a largest matching, with its cycles joined.

    A token more, n, follows every end and precedes every start, so that paths are cycles too.
    """
    n = graph.n
    pred = np.append(_matched(graph, seed), -1)
    succ = np.full(n + 1, -1)
    found = np.flatnonzero(pred >= 0)
    succ[pred[found]] = found
    starts = np.flatnonzero(pred[:n] < 0).tolist()
    if not starts:  # cycles only: open one of them
        starts = [0]
        succ[pred[0]] = -1
    end = n
    for start in starts:  # the chains one after the other, with a gap between two
        succ[end], pred[start] = start, end
        end = start
        while succ[end] >= 0:
            end = int(succ[end])
    succ[end], pred[n] = n, end
    _join(graph, succ, pred, deadline)
    if moves and time.monotonic() < deadline and _cycles(succ).any():
        by_key = np.argsort(graph.key, kind="stable")
        pointers = np.concatenate(([0], np.cumsum(np.bincount(graph.key, minlength=n))))
        _move_end()(pointers, graph.query[by_key], succ, pred, moves, seed)
    return _walk(succ, n)


def _matched(graph: SeenGraph, seed: int) -> Indices:
    """Return a key for as many queries as possible, each key once; -1 for those without.

    The numbering of the tokens, which decides between largest matchings, is drawn anew by seed.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    n = graph.n
    number = np.random.default_rng(seed).permutation(n) if seed else np.arange(n)
    ones = np.ones(len(graph.query), dtype=np.int8)
    matrix = csr_array((ones, (number[graph.query], number[graph.key])), shape=(n, n))
    key = maximum_bipartite_matching(matrix, perm_type="column")[number]
    return np.where(key >= 0, np.argsort(number)[key], -1)


def _join(graph: SeenGraph, succ: Indices, pred: Indices, deadline: float) -> None:
    """Join cycles in place: arcs u -> v and x -> y of two of them become u -> y and x -> v."""
    n = graph.n
    tokens = np.arange(n)
    key = np.concatenate((graph.key, np.full(n, n), tokens))
    query = np.concatenate((graph.query, tokens, np.full(n, n)))
    while time.monotonic() < deadline:
        label = _cycles(succ)
        across = label[key] != label[query]
        u, y = key[across], query[across]
        v, x = succ[u], pred[y]
        free = (v == n) | (x == n)
        fits = free.copy()
        fits[~free] = graph.has(v[~free], x[~free])
        u, y, v, x = u[fits], y[fits], v[fits], x[fits]
        if not len(u):
            return
        used: set[int] = set()
        for i in np.unique(label[u], return_index=True)[1].tolist():
            pair = {int(label[u[i]]), int(label[y[i]])}
            if not used & pair:
                used |= pair
                succ[u[i]], pred[y[i]] = y[i], u[i]
                succ[x[i]], pred[v[i]] = v[i], x[i]


@cache
def _move_end() -> Callable[..., None]:
    def move_end(pointers: Any, queries: Any, succ: Any, pred: Any, moves: int, seed: int) -> None:
        """Join cycles in place by moving the end of the path at random.

        The end e goes on to a token y that sees it, and the one before y becomes the end: in
        another cycle that adds the whole cycle; in the path it splits one off, which is likely to
        be met again.
        """
        state = np.uint64(seed)
        n = len(succ) - 1
        inside = np.empty(n + 1, dtype=np.bool_)
        for _ in range(moves):
            inside[:] = False
            size, token = 0, n
            while not inside[token]:
                inside[token] = True
                size += 1
                token = succ[token]
            if size == n + 1:
                return
            end = pred[n]
            first, count = pointers[end], pointers[end + 1] - pointers[end]
            if count == 0:
                return
            # Knuth's generator: that of NumPy would change the state of the caller's
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            y = queries[first + np.int64(state >> np.uint64(33)) % count]
            for i in range(count):
                if not inside[queries[first + i]]:
                    y = queries[first + i]
            x = pred[y]
            if x == n:
                continue
            succ[end], pred[y], succ[x], pred[n] = y, end, n, x

    return compiled(move_end)


def _cycles(succ: Indices) -> Indices:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    size = len(succ)
    ones = np.ones(size, dtype=np.int8)
    arcs = csr_array((ones, (np.arange(size), succ)), shape=(size, size))
    label: Indices = connected_components(arcs, directed=False)[1]
    return label


def _walk(succ: Indices, added: int) -> Indices:
    """Return the tokens cycle by cycle, the one with the added token first and opened there."""
    following, order = succ.tolist(), []
    seen = [False] * len(following)
    for start in (added, *range(added)):
        token = start
        while not seen[token]:
            seen[token] = True
            order.append(token)
            token = following[token]
    return np.array(order[1:])
