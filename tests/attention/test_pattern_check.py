"""The pattern checker against tables, boolean products and all permutations."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest

from gossamer.attention import AttentionPattern, check_patterns
from gossamer.attention._hamiltonian import SeenGraph, _cover, _refutation, path_by_subsets
from gossamer.attention._pattern_reach import count_steps, count_steps_plainly, pack_rows
from gossamer.attention.pattern_check import _lists
from gossamer.errors import ConfigError, ShapeError
from tests.conftest import DATA

ROWS = json.loads((DATA / "attention-patterns" / "patterns.json").read_text())


def read(n: int, text: str) -> list[AttentionPattern]:
    """Build the patterns of a row."""
    kind, *words = text.split()
    number = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    if kind == "sliding":
        return [AttentionPattern.sliding(n, int(number["w"]))]
    if kind == "strided":
        union = AttentionPattern.strided(n, int(number["l"]))
        return list(union.parts) if words[-1] == "sequential" else [union]
    if kind == "fixed":
        return list(AttentionPattern.fixed(n, int(number["l"]), 1, pad_tail=False).parts)
    if kind == "block_diagonal":
        return [AttentionPattern.block_diagonal(n, int(words[0]))]
    simple = {
        "star": AttentionPattern.star,
        "star_ring": AttentionPattern.star_ring,
        "identity": lambda n: AttentionPattern.sliding(n, 0),
    }
    return [simple[kind](n)]


def draw(n: int, share: float, rng, *, loops: bool) -> np.ndarray:
    mask = rng.random((n, n)) < share
    if loops:
        np.fill_diagonal(mask, True)
    return mask


def by_product(masks) -> tuple[int | None, np.ndarray]:
    """Return the steps and the first step of every pair, by boolean products."""
    sets, first = masks[0].astype(int), np.zeros(masks[0].shape, dtype=int)
    steps = None
    for step in range(1, 2 * len(sets) * len(masks) + 40):
        first[(sets > 0) & (first == 0)] = step
        if steps is None and sets.all():
            steps = step
        sets = (masks[step % len(masks)].astype(int) @ sets > 0).astype(int)
    return steps, first


# --- reference values ---


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['n']} {r['pattern']}")
def test_table(row) -> None:
    patterns = read(row["n"], row["pattern"])
    assert [pattern.num_pairs for pattern in patterns] == row["keys_total"]
    report = check_patterns(patterns)
    assert report.reach_steps == row["reach_steps"]
    assert report.reach == ("violated" if row["reach_steps"] is None else "satisfied")
    assert report.hamiltonian == ("satisfied" if row["hamiltonian_path"] else "violated")
    assert report.self_loops == "satisfied"
    assert (report.certificate is not None) == row["hamiltonian_path"]
    repaired = check_patterns(report.repaired())
    assert repaired.verdict == "satisfied"
    assert (len(report.repair) == 0) == (report.verdict == "satisfied")


def test_steps_by_formula() -> None:
    for n, w in ((20, 1), (20, 3), (33, 8), (256, 16)):
        assert check_patterns([AttentionPattern.sliding(n, w)]).reach_steps == -(-(n - 1) // w)
    assert check_patterns([AttentionPattern.star(30)]).reach_steps == 2
    assert check_patterns([AttentionPattern.full(30)]).reach_steps == 1
    assert check_patterns([AttentionPattern.sliding(9, 1)]).certificate == tuple(range(9))
    one = check_patterns([AttentionPattern.sliding(1, 0)])
    assert (one.verdict, one.reach_steps, one.certificate) == ("satisfied", 1, (0,))


def test_fixed_needs_its_tail() -> None:
    literal = AttentionPattern.fixed(17, 4, 1, pad_tail=False)
    report = check_patterns(literal.parts)
    assert report.reach == "violated"
    assert any("never has token 16" in note for note in report.notes)
    assert check_patterns(AttentionPattern.fixed(17, 4, 1).parts).reach_steps == 2
    assert check_patterns(AttentionPattern.fixed(16, 4, 1, pad_tail=False).parts).reach_steps == 2


@pytest.mark.slow
def test_exact_search_equals_all_permutations() -> None:
    rng = np.random.default_rng(0)
    orders = {n: np.array(list(itertools.permutations(range(n)))) for n in range(1, 6)}
    found = 0
    for trial in range(2000):
        n = int(rng.integers(1, 6))
        mask = draw(n, (0.2, 0.35, 0.5)[trial % 3], rng, loops=trial % 2 == 0)
        graph = SeenGraph(_lists(AttentionPattern.from_mask(mask)))
        truth = bool(mask[orders[n][:, 1:], orders[n][:, :-1]].all(1).any())
        path = path_by_subsets(graph)
        assert (path is not None) == truth
        if trial % 10 == 0:
            assert not (truth and _refutation(graph))
            cover = _cover(graph, trial % 20, time.monotonic() + 5, 0)
            assert sorted(cover.tolist()) == list(range(n))
            assert truth or graph.missing(cover).any()
        if path is not None:
            found += 1
            assert sorted(path.tolist()) == list(range(n))
            assert all(mask[b, a] for a, b in itertools.pairwise(path))
    assert 500 < found < 1800


@pytest.mark.slow  # compiles at the first call
def test_reach_and_hops_equal_boolean_products() -> None:
    rng = np.random.default_rng(1)
    for trial in range(50):
        n, loops = int(rng.integers(1, 8)), trial % 3 > 0
        masks = [draw(n, 0.3, rng, loops=loops) for _ in range(1 + trial % 3)]
        patterns = [AttentionPattern.from_mask(mask) for mask in masks]
        report = check_patterns(patterns)
        steps, first = by_product(masks)
        assert report.reach_steps == steps
        k, j = (int(x) for x in rng.integers(n, size=2))
        assert (report.hops(k, j) or 0) == first[k, j]
        lists = [_lists(pattern) for pattern in patterns]
        deadline = time.monotonic() + 5
        assert count_steps_plainly(lists, causal=False, deadline=deadline) == steps
        if loops and steps:
            assert count_steps(lists, causal=False, deadline=deadline) == steps


@pytest.mark.slow  # compiles at the first call
@pytest.mark.parametrize("n", [63, 64, 65, 130])
def test_fast_steps_equal_the_plain_ones_around_whole_words(n: int) -> None:
    deadline = time.monotonic() + 20
    for patterns in (
        [AttentionPattern.sliding(n, 3)],
        AttentionPattern.strided(n, 8).parts,
        [AttentionPattern.sliding(n, 1), AttentionPattern.random(n, 2), AttentionPattern.star(n)],
    ):
        for causal in (False, True):
            used = [p.causal() for p in patterns] if causal else patterns
            lists = [_lists(pattern) for pattern in used]
            plain = count_steps_plainly(lists, causal=causal, deadline=deadline)
            if plain is not None:
                assert count_steps(lists, causal=causal, deadline=deadline) == plain


def test_sets_are_made_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = AttentionPattern(7, [[1], [2, 3], [], [3], [0, 1, 2, 3, 4, 5], [6], [5]])
    other = AttentionPattern.sliding(7, 1)
    whole = check_patterns([other, pattern])
    monkeypatch.setattr("gossamer.attention._pattern_reach._WORDS_AT_ONCE", 4)
    assert check_patterns([other, pattern]) == whole


def test_packed_rows() -> None:
    mask = draw(130, 0.3, np.random.default_rng(2), loops=False)
    words = pack_rows(_lists(AttentionPattern.from_mask(mask)))
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :130]
    assert np.array_equal(bits.astype(bool), mask)


# --- answers ---


def test_star_is_refuted_by_its_relay() -> None:
    report = check_patterns([AttentionPattern.star(40)])
    assert (report.self_loops, report.hamiltonian, report.reach) == (
        "satisfied", "violated", "satisfied",
    )  # fmt: skip
    assert any("without the tokens 39 the others fall into 39 parts" in n for n in report.notes)
    assert check_patterns([AttentionPattern.star_ring(40)]).verdict == "satisfied"
    assert check_patterns([AttentionPattern.star(3)]).hamiltonian == "satisfied"


@pytest.mark.parametrize("n", [12, 40])
def test_cliques_that_do_not_see_each_other(n: int) -> None:
    report = check_patterns([AttentionPattern.document([0] * (n // 2) + [1] * (n // 2))])
    assert (report.hamiltonian, report.reach) == ("violated", "violated")
    assert any("fall into 2 parts" in note for note in report.notes)
    # one entry each way makes them one
    assert len(report.repair) == 2


@pytest.mark.parametrize("n", [6, 30])
def test_refutations_by_arcs_and_by_order(n: int) -> None:
    mask = np.eye(n, dtype=bool)
    mask[:, 0] = True  # all see token 0, which sees none
    assert check_patterns([AttentionPattern.from_mask(mask)]).hamiltonian == "violated"
    assert "seen by no other" in _refutation(SeenGraph(_lists(AttentionPattern.from_mask(mask))))
    assert "see no other" in _refutation(SeenGraph(_lists(AttentionPattern.from_mask(mask.T))))
    # two groups that both follow a first one and do not see each other
    groups = np.zeros((9, 9), dtype=bool)
    for begin in (0, 3, 6):
        groups[begin : begin + 3, begin : begin + 3] = True
        groups[begin, 0] = True
    reason = _refutation(SeenGraph(_lists(AttentionPattern.from_mask(groups))))
    assert reason is not None


def test_a_shuffled_ring_is_found_and_two_rings_are_not() -> None:
    n = 400
    order = np.random.default_rng(3).permutation(n)
    rows: list[list[int]] = [[] for _ in range(n)]
    for a, b in zip(order, np.roll(order, -1), strict=True):
        rows[b] += [int(a), int(b)]
    report = check_patterns([AttentionPattern(n, rows)])
    assert report.verdict == "satisfied"
    assert report.reach_steps == n - 1
    graph = SeenGraph(_lists(AttentionPattern(n, rows)))
    assert not graph.missing(np.array(report.certificate)).any()


@pytest.mark.parametrize("seed", range(4))
def test_paths_of_random_patterns_are_found_by_search(seed: int) -> None:
    pattern = AttentionPattern.random(300, 12, seed=seed)
    report = check_patterns([pattern])
    assert report.hamiltonian == "satisfied"
    assert sorted(report.certificate) == list(range(300))
    mask = pattern.mask()
    assert all(mask[b, a] for a, b in itertools.pairwise(report.certificate))


def test_what_cannot_be_settled_is_unknown_and_repaired() -> None:
    """With no time left, a path is not looked for; what would settle it is still said."""
    pattern = AttentionPattern.random(300, 12, seed=0)
    report = check_patterns([pattern], max_seconds=0.0)
    assert report.hamiltonian == "unknown"
    assert report.certificate is None
    assert (report.reach, report.reach_steps) == ("satisfied", None)
    assert report.verdict == "unknown"
    assert report.repair
    repaired = check_patterns(report.repaired())
    assert repaired.verdict == "satisfied"


def test_the_order_of_patterns_matters_for_the_steps() -> None:
    near, far = AttentionPattern.strided(12, 5).parts
    one, two = check_patterns([near, far]), check_patterns([far, near])
    expected = [by_product([p.mask().numpy() for p in ps])[0] for ps in ([near, far], [far, near])]
    assert [one.reach_steps, two.reach_steps] == expected
    first = AttentionPattern(3, [[0, 1], [1], [2, 0, 1]])
    second = AttentionPattern(3, [[0], [1, 2], [2]])
    orders = ([first, second], [second, first])
    assert check_patterns(orders[0]).hops(0, 2) == 3
    assert check_patterns(orders[1]).hops(0, 2) == 2


def test_a_missing_diagonal_is_named_and_repaired() -> None:
    mask = np.ones((5, 5), dtype=bool)
    mask[3, 3] = False
    report = check_patterns([AttentionPattern.full(5), AttentionPattern.from_mask(mask)])
    assert report.self_loops == "violated"
    assert report.notes[0] == "self-loops: query 3 does not see itself in pattern 1"
    assert report.repair == ((1, 3, 3),)
    assert check_patterns(report.repaired()).verdict == "satisfied"
    empty = AttentionPattern(3, [[], [], []])
    report = check_patterns([empty])
    assert report.verdict == "violated"
    assert check_patterns(report.repaired()).verdict == "satisfied"


def test_causal_patterns_have_their_own_reach() -> None:
    report = check_patterns([AttentionPattern.sliding(9, 2).causal()])
    assert (report.reach, report.reach_steps, report.causal_reach_steps) == ("violated", None, 4)
    assert report.repair == ()
    assert any("causal" in note and "not covered" in note for note in report.notes)
    strided = AttentionPattern.strided(16, 4).causal()
    assert check_patterns(strided.parts).causal_reach_steps == 2
    broken = AttentionPattern.dilated(9, None, 2).causal()
    report = check_patterns([broken])
    assert report.causal_reach_steps is None
    assert len(report.repair) == 8
    repaired = check_patterns(report.repaired())
    assert repaired.causal_reach_steps is not None
    assert repaired.hamiltonian == "satisfied"


def test_hops() -> None:
    report = check_patterns([AttentionPattern.sliding(25, 7)])
    assert [report.hops(13, j) for j in (13, 6, 5, 0, 24)] == [1, 1, 2, 2, 2]
    assert check_patterns([AttentionPattern.block_diagonal(8, 4)]).hops(0, 5) is None
    with pytest.raises(ConfigError, match="j must be >= 0 and <= 24; got 25"):
        report.hops(0, 25)


def test_report_is_plain() -> None:
    report = check_patterns([AttentionPattern.star(30)])
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["verdict"] == "violated"
    assert plain["certificate"] is None
    assert len(plain["repair"]) == len(report.repair) > 20
    assert [row["answer"] for row in report.rows()] == ["satisfied", "violated", "satisfied"]


def test_the_state_of_the_random_numbers_is_left_alone() -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    check_patterns([AttentionPattern.random(200, 6)])
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002


# --- bad input ---


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="list of one or more patterns"):
        check_patterns([])
    with pytest.raises(ConfigError, match=r"Pass \[pattern\]"):
        check_patterns(AttentionPattern.full(3))
    with pytest.raises(ShapeError, match="one length; got 3 and 4"):
        check_patterns([AttentionPattern.full(3), AttentionPattern.full(4)])
    with pytest.raises(ConfigError, match="max_seconds"):
        check_patterns([AttentionPattern.full(3)], max_seconds=-1.0)
