"""Which queries share their keys: groups that attend to gathered keys, at the cost of the pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.attention._pattern_rules import Indices
from gossamer.attention.patterns import AttentionPattern

__all__ = ["GatherPlan", "Group", "plan_gather"]

# queries in a group: more of them use a key that is fetched once, fewer waste less on the union
_SIZES = (1, 4, 16, 32, 64, 128, 256)
# fetching a key for a group costs about as much as attending to it from this many queries
_FETCH = 48
_SAMPLED = 16
# share of the work of plain attention from which on plain attention is taken
_WORTH = 0.7


@dataclass(frozen=True)
class Group:
    """Query blocks of one size with key lists of about one length.

    Args:
        queries: Tokens that ask, `(G, b)`; surplus places repeat a token and see nothing.
        keys: Tokens that are fetched, `(G, K)`; surplus places are seen by nobody.
        mask: Which query sees which fetched key, `(G, b, K)`.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor


@dataclass(frozen=True)
class GatherPlan:
    """How to attend along a pattern by fetched keys.

    Args:
        groups: The work.
        places: Where the result of each query stands among the results of all groups, `(n,)`.
    """

    groups: tuple[Group, ...]
    places: Tensor

    @property
    def num_pairs(self) -> int:
        """Pairs that are computed, with the surplus ones."""
        return sum(group.mask.numel() for group in self.groups)


def plan_gather(
    pattern: AttentionPattern, device: torch.device, *, always: bool = False
) -> GatherPlan | None:
    """Return the cheapest plan among those tried, or `None` where plain attention costs less.

    Tried are runs of queries in the order of the tokens, and in the order of the first key that
    they see (in a strided pattern those have all keys in common). Costs are estimated on a few
    runs, so that planning is linear in the pairs.

    Args:
        pattern: Square; queries may see nothing.
        device: Where the plan is kept.
        always: Return a plan also where it does not pay.
    """
    n = pattern.length
    if pattern.density > _WORTH and not always:
        return None
    tokens = np.arange(n)
    orders = [tokens]
    costs = {(0, size): _cost(pattern, tokens, size) for size in _SIZES if size <= n}
    ideal = _cost(pattern, tokens, 1)
    if min(costs.values()) > 0.5 * min(ideal, n):
        orders.append(np.lexsort((tokens, _first_keys(pattern))))
        costs |= {(1, size): _cost(pattern, orders[1], size) for size in _SIZES if size <= n}
    (order, size), cost = min(costs.items(), key=lambda item: item[1])
    if cost > _WORTH * n and not always:
        return None
    return _build(pattern, orders[order], size, device)


def _cost(pattern: AttentionPattern, order: Indices, size: int) -> float:
    """Return the estimated cost for each query, in pairs of plain attention."""
    runs = -(-len(order) // size)
    # a run with a token that sees all would stand for far too many: the median is of most runs
    chosen = np.unique(np.linspace(0, runs - 1, min(runs, _SAMPLED)).astype(np.int64))
    lengths = []
    for run in chosen:
        queries = order[run * size : (run + 1) * size]
        lengths.append(len(np.unique(pattern.keys(queries)[1])))
    return float(np.median(lengths)) * (1 + _FETCH / size)


def _first_keys(pattern: AttentionPattern) -> Indices:
    firsts = np.full(pattern.length, pattern.length)
    for begin in range(0, pattern.length, 1024):
        queries = np.arange(begin, min(begin + 1024, pattern.length))
        pointers, keys = pattern.keys(queries)
        some = np.diff(pointers) > 0
        firsts[queries[some]] = keys[pointers[:-1][some]]
    return firsts


def _build(
    pattern: AttentionPattern, order: Indices, size: int, device: torch.device
) -> GatherPlan:
    """Build the groups: runs of the order, put together by the length of their key lists."""
    buckets: dict[int, list[tuple[Indices, Indices, NDArray[np.bool_]]]] = {}
    for begin in range(0, len(order), size):
        queries = order[begin : begin + size]
        pointers, keys = pattern.keys(queries)
        union = np.unique(keys)
        seen = np.zeros((size, len(union)), dtype=np.bool_)
        row = np.repeat(np.arange(len(queries)), np.diff(pointers))
        seen[row, np.searchsorted(union, keys)] = True
        # steps of an eighth of a power of two: at most an eighth of surplus keys
        step = max(8, 1 << max(0, len(union).bit_length() - 3))
        width = max(1, -(-len(union) // step)) * step
        buckets.setdefault(width, []).append((queries, union, seen))
    groups: list[Group] = []
    places, done = np.empty(len(order), dtype=np.int64), 0
    for width, runs in sorted(buckets.items()):
        asked = np.zeros((len(runs), size), dtype=np.int64)
        fetched = np.zeros((len(runs), width), dtype=np.int64)
        mask = np.zeros((len(runs), size, width), dtype=np.bool_)
        for number, (own, union, seen) in enumerate(runs):
            asked[number, : len(own)], fetched[number, : len(union)] = own, union
            mask[number, :, : len(union)] = seen
            places[own] = done + number * size + np.arange(len(own))
        done += len(runs) * size
        groups.append(Group(*(torch.from_numpy(a).to(device) for a in (asked, fetched, mask))))
    return GatherPlan(tuple(groups), torch.from_numpy(places).to(device))
