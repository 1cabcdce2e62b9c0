"""Do sparse patterns meet the conditions under which sparse transformers approximate anything?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gossamer.attention._hamiltonian import PathAnswer, SeenGraph, find_path
from gossamer.attention._pattern_reach import count_steps, count_steps_plainly, hop_counts
from gossamer.attention._pattern_rules import Indices, KeyLists
from gossamer.attention.patterns import AttentionPattern
from gossamer.checks import check_range
from gossamer.errors import ConfigError, ShapeError

__all__ = ["PatternReport", "check_patterns"]

# below this length the plain form is as fast as compiling the other
_PLAIN_LENGTH = 512
_Entry = tuple[int, int, int]


@dataclass(frozen=True)
class PatternReport:
    """The answer for each condition, with what proves it.

    Conditions answer `"satisfied"`, `"violated"` or `"unknown"`. They are sufficient only: patterns
    that violate one may still be expressive.

    Args:
        self_loops: Whether every query sees itself in every pattern.
        hamiltonian: Whether there is an order of all tokens in which each one sees the one before
            it in some pattern.
        certificate: That order, where it was found.
        reach: Whether each token reaches every other through the layers.
        reach_steps: The layers that takes, `None` where it never does or is not known.
        causal_reach_steps: For causal patterns, layers until each query has all tokens before it;
            the conditions do not cover those.
        repair: Entries `(pattern, query, key)` whose addition meets all conditions (for causal
            patterns: those a causal pattern can meet); empty where nothing is to be repaired.
        notes: Reasons, in words.
        patterns: What was checked.

    Example:
        >>> report = check_patterns([AttentionPattern.sliding(4, 1)])
        >>> report.verdict, report.certificate, report.reach_steps
        ('satisfied', (0, 1, 2, 3), 3)

    Source: Yun et al., *O(n) Connections are Expressive Enough*, NeurIPS 2020, assumption 1.
    Deviations: none
    """

    self_loops: str
    hamiltonian: str
    certificate: tuple[int, ...] | None
    reach: str
    reach_steps: int | None
    causal_reach_steps: int | None
    repair: tuple[_Entry, ...]
    notes: tuple[str, ...]
    patterns: tuple[AttentionPattern, ...] = field(repr=False, compare=False)

    @property
    def verdict(self) -> str:
        """The worst of the three conditions."""
        answers = (self.self_loops, self.hamiltonian, self.reach)
        return next((a for a in ("violated", "unknown") if a in answers), "satisfied")

    def hops(self, k: int, j: int) -> int | None:
        """Return the layers after which query k first has token j, `None` for never.

        Layer 1 uses the first pattern, and so on in turn.
        """
        n = self.patterns[0].length
        for name, token in (("k", k), ("j", j)):
            check_range(token, name, low=0, high=n - 1, integer=True)
        return int(self._hops_to(j)[k]) or None

    def _hops_to(self, j: int) -> Indices:
        lists = [_lists(pattern) for pattern in self.patterns]
        return hop_counts(lists, j)

    def repaired(self) -> tuple[AttentionPattern, ...]:
        """Return the patterns with the entries of `repair` added."""
        return tuple(
            _with_entries(pattern, [e for e in self.repair if e[0] == number])
            for number, pattern in enumerate(self.patterns)
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return one plain row for each condition."""
        answers = {
            "every query sees itself": self.self_loops,
            "path through all tokens": self.hamiltonian,
            "every token reaches every other": self.reach,
        }
        return [{"condition": name, "answer": answer} for name, answer in answers.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            "verdict": self.verdict,
            "self_loops": self.self_loops,
            "hamiltonian": self.hamiltonian,
            "certificate": None if self.certificate is None else list(self.certificate),
            "reach": self.reach,
            "reach_steps": self.reach_steps,
            "causal_reach_steps": self.causal_reach_steps,
            "repair": [list(entry) for entry in self.repair],
            "notes": list(self.notes),
        }


def check_patterns(
    patterns: Sequence[AttentionPattern], *, max_seconds: float = 60.0
) -> PatternReport:
    r"""Check the conditions on patterns that layers use in turn, and suggest a repair.

    (1) Every query sees itself in every pattern. (2) In some order g of all tokens each one sees
    the one before it in the union of the patterns. (3) With $S^1_k = A^1_k$ and
    $S^t_k = \bigcup_{j \in A^t_k} S^{t-1}_j$ there is an s with $S^s_k$ = all tokens for all k.
    Then sparse transformers with two heads of size 1 and positions approximate every continuous
    function of sequences; a pattern is one of p, used by every p-th layer. For heads that use
    patterns side by side, check their union.

    Memory: about 110 bytes for each pair. Patterns of 16,384 tokens with a few hundred keys for
    each query take seconds.

    Args:
        patterns: In the order of the layers; of one length.
        max_seconds: Bound on search and counting; what is not settled by then is `"unknown"`, and
            steps that are not counted are `None`. Range: >= 0. Default 60.

    Returns:
        The answers, with certificate or reason, and entries that would repair what fails.

    Raises:
        ConfigError: If there is no pattern.
        ShapeError: If lengths differ.

    Example:
        >>> report = check_patterns([AttentionPattern.star(5)])
        >>> report.hamiltonian, report.notes[0]
        ('violated', 'path: without the tokens 4 the others fall into 4 parts')
        >>> check_patterns(report.repaired()).verdict
        'satisfied'

    Source: Yun et al., *O(n) Connections are Expressive Enough*, NeurIPS 2020, assumption 1 and
        theorem 1.
    Deviations: the causal analogue (all tokens up to the query) is the library's own.
    """
    patterns = _checked(patterns)
    check_range(max_seconds, "max_seconds", low=0.0)
    deadline = time.monotonic() + max_seconds
    lists = [_lists(pattern) for pattern in patterns]
    notes: list[str] = []

    blind = [(number, query) for number, part in enumerate(lists) for query in _blind(part)]
    if blind:
        number, query = blind[0]
        more = f" and {len(blind) - 1} more" if len(blind) > 1 else ""
        notes.append(f"self-loops: query {query} does not see itself in pattern {number}{more}")
    graph = SeenGraph(_lists(_union(patterns)))
    path = find_path(graph, time.monotonic() + max_seconds / 2)
    notes.append(f"path: {path.reason}")
    causal = len(graph.key) > 0 and not bool((graph.key > graph.query).any())
    reach, steps, why = _reach(lists, graph, bool(blind), causal=False, deadline=deadline)
    causal_steps = None
    if causal:
        why = "patterns are causal, so the first token never has the others; not covered here"
        causal_steps, causal_why = _reach(
            lists, graph, bool(blind), causal=True, deadline=deadline
        )[1:]
        notes.append(f"causal reach: {causal_why}")
    notes.append(f"reach: {why}")
    repair = _repair(graph, path, blind, causal)
    if repair and not causal:
        notes.append(f"repair: {len(repair)} entries, checked to meet all conditions")
    elif repair:
        notes.append(f"repair: {len(repair)} entries, checked for what causal patterns can meet")
    return PatternReport(
        self_loops="violated" if blind else "satisfied",
        hamiltonian=path.status,
        certificate=tuple(path.order.tolist()) if path.status == "satisfied" else None,
        reach=reach,
        reach_steps=steps,
        causal_reach_steps=causal_steps,
        repair=tuple(repair),
        notes=tuple(notes),
        patterns=patterns,
    )


def _checked(patterns: Sequence[AttentionPattern]) -> tuple[AttentionPattern, ...]:
    if isinstance(patterns, AttentionPattern) or not len(patterns):
        raise ConfigError(
            f"patterns must be a list of one or more patterns; got {patterns!r}. Pass [pattern], "
            "or pattern.parts to use the parts of a union in turn."
        )
    for pattern in patterns:
        if pattern.length != patterns[0].length:
            raise ShapeError(
                f"patterns must have one length; got {patterns[0].length} and {pattern.length}. "
                "Build them for the same number of tokens."
            )
    return tuple(patterns)


def _lists(pattern: AttentionPattern) -> KeyLists:
    matrix = pattern.to_csr()
    return matrix.indptr.astype(np.int64), matrix.indices


def _union(patterns: Sequence[AttentionPattern]) -> AttentionPattern:
    whole = patterns[0]
    for pattern in patterns[1:]:
        whole = whole + pattern
    return whole


def _blind(lists: KeyLists) -> list[int]:
    """Return the queries that do not see themselves."""
    pointers, keys = lists
    query = np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))
    own = np.zeros(len(pointers) - 1, dtype=np.bool_)
    own[query[query == keys]] = True
    return np.flatnonzero(~own).tolist()


def _reach(
    lists: list[KeyLists], graph: SeenGraph, blind: bool, *, causal: bool, deadline: float
) -> tuple[str, int | None, str]:
    """Return answer, steps and reason for sets that are to hold all tokens, or all up to k."""
    # where all see themselves, sets can wait, so what counts is who is reached in the union
    if not blind:
        never = _never_causal(graph) if causal else _never(graph)
        if never is not None:
            return "violated", None, never
    try:
        if blind or graph.n <= _PLAIN_LENGTH:
            steps = count_steps_plainly(lists, causal=causal, deadline=deadline)
        else:
            steps = count_steps(lists, causal=causal, deadline=deadline)
    except TimeoutError:
        # with self-loops it is proven above that some number of steps is enough
        return ("unknown" if blind else "satisfied"), None, "the steps were not counted in time"
    if steps is None:
        return "violated", None, "sets of reached tokens repeat before they are complete"
    return "satisfied", steps, f"complete after {steps} layers"


def _never(graph: SeenGraph) -> str | None:
    from scipy.sparse.csgraph import connected_components

    groups, label = connected_components(graph.matrix(), directed=True, connection="strong")
    if groups == 1:
        return None
    before, after = label[graph.key], label[graph.query]
    # a group that sees no other one never gets anything from outside
    closed = np.ones(groups, dtype=np.bool_)
    closed[after[before != after]] = False
    inside = np.flatnonzero(label == np.flatnonzero(closed)[0])
    outside = np.flatnonzero(label != label[inside[0]])[0]
    return (
        f"never: tokens fall into {groups} groups, and query {inside[0]} never has token "
        f"{outside}; its group of {len(inside)} sees no token outside"
    )


def _never_causal(graph: SeenGraph) -> str | None:
    gaps = np.flatnonzero(graph.missing(np.arange(graph.n)))
    if not len(gaps):
        return None
    return f"never: query {gaps[0] + 1} does not see token {gaps[0]}, and no other way leads there"


def _repair(
    graph: SeenGraph, path: PathAnswer, blind: list[tuple[int, int]], causal: bool
) -> list[_Entry]:
    """Return entries that complete diagonals and the path, and close it to a circle if need be.

    Checked on the completed graph: the diagonals by construction, the path arc by arc, and reach
    by strong connection, which with the diagonals is the same as some number of steps.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    added = [(number, query, query) for number, query in blind]
    order = np.arange(graph.n) if causal else path.order
    gaps = np.flatnonzero(graph.missing(order))
    added += [(0, int(order[gap + 1]), int(order[gap])) for gap in gaps]
    if causal or graph.n == 1:
        return added

    def closed() -> bool:
        arcs = np.array(added, dtype=np.int64).reshape(-1, 3)
        query = np.concatenate((graph.query, arcs[:, 1]))
        key = np.concatenate((graph.key, arcs[:, 2]))
        ones = np.ones(len(query), dtype=np.int32)
        whole = csr_array((ones, (query, key)), shape=(graph.n, graph.n))
        parts: int = connected_components(whole, connection="strong", return_labels=False)
        return parts == 1

    if not closed():
        added.append((0, int(order[0]), int(order[-1])))
        if not closed():
            return []
    return added


def _with_entries(pattern: AttentionPattern, entries: list[_Entry]) -> AttentionPattern:
    if not entries:
        return pattern
    rows: list[list[int]] = [[] for _ in range(pattern.length)]
    for _, query, key in entries:
        rows[query].append(key)
    return pattern + AttentionPattern(pattern.length, rows)
