"""Mined neighbours against brute force, hand-made corpora, and every guard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from gossamer.errors import ConfigError, DataError
from gossamer.measures import sentence_bleu
from gossamer.retrieval import NeighborTable, mine_neighbors, neighbors
from gossamer.retrieval._bleu_rerank import GramIndex
from gossamer.retrieval._neighbor_search import nearest
from gossamer.retrieval._neighbor_vectors import encode

# cosines and BLEU disagree: vectors are given by hand
TARGET = "the cat sat on the mat"
CORPUS = [
    "a dog ran",  # nearest, no shared n-gram but none
    "the cat sat on the rug",  # second nearest, shares most
    "the cat lay on a mat",
    "The  CAT sat on the mat",  # equal to the target but for case and spaces
    "the cat sat",
    "rain",
]
COSINES = [0.99, 0.9, 0.8, 1.0, 0.7, 0.6]


def by_hand(texts: list[str]) -> list[list[float]]:
    cosines = dict(zip(CORPUS, COSINES, strict=True))
    return [[c := cosines.get(text, 1.0), (1 - c * c) ** 0.5] for text in texts]


def made_up(count: int, seed: int = 0, words: int = 12) -> list[str]:
    rng = np.random.default_rng(seed)
    vocabulary = [f"w{i}" for i in range(words)]
    return [" ".join(rng.choice(vocabulary, size=rng.integers(1, 12))) for _ in range(count)]


def random_vectors(texts: list[str]) -> np.ndarray:
    return np.stack(
        [np.random.default_rng(list(text.encode())).standard_normal(8) for text in texts]
    )


def brute_force(
    queries: np.ndarray, corpus: np.ndarray, own: np.ndarray, groups: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    rows, cosines = np.full((len(queries), k), -1), np.zeros((len(queries), k))
    for i, query in enumerate(queries.astype(np.float64)):
        scores = [float(query @ vector) for vector in corpus.astype(np.float64)]
        order = sorted(
            (j for j in range(len(corpus)) if groups[j] != own[i]), key=lambda j: (-scores[j], j)
        )[:k]
        rows[i, : len(order)], cosines[i, : len(order)] = order, [scores[j] for j in order]
    return rows, cosines


def unit(rows: int, dim: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((rows, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


# --- search: reference values and ties ---


@pytest.mark.parametrize(("dim", "k"), [(1, 1), (3, 7), (16, 5), (63, 100)])
def test_search_equals_brute_force(dim: int, k: int) -> None:
    queries, corpus = unit(40, dim, 1), unit(63, dim, 2)
    own, groups = np.arange(40) % 7, np.arange(63) % 9
    if dim == 1:
        groups[0] = 100  # all cosines are 1 or -1 here
    expected = brute_force(queries, corpus, own, groups, k)
    for block_size in (1, 10, 63, 1000):
        rows, cosines = nearest(queries, corpus, own, groups, k, block_size=block_size)
        np.testing.assert_array_equal(rows, expected[0])
        np.testing.assert_allclose(cosines, expected[1], atol=1e-12)


@pytest.mark.parametrize("block_size", [1, 7, 2048])
def test_equal_cosines_go_by_the_lower_row(block_size: int) -> None:
    few = unit(5, 16, 3)
    corpus = few[np.random.default_rng(4).integers(5, size=90)]  # many equal vectors
    nothing = np.full(5, -1), np.arange(90)
    for k in (1, 4, 30):
        rows, _ = nearest(few, corpus, *nothing, k, block_size=block_size)
        for query in range(5):
            equal = np.flatnonzero((corpus == few[query]).all(axis=1))
            top = rows[query][: min(k, len(equal))]
            np.testing.assert_array_equal(top, equal[: len(top)])


def test_near_ties_do_not_depend_on_blocks_threads_or_the_number_of_queries() -> None:
    """Vectors closer to each other than the rounding of float32 products."""
    base = unit(1, 128, 5)
    corpus = base + np.float32(3e-8) * unit(3000, 128, 6)
    queries = np.concatenate([base, base + np.float32(1e-4) * unit(20, 128, 7)])
    own, groups = np.full(21, -1), np.zeros(3000, dtype=np.int64)
    expected = nearest(queries, corpus, own, groups, 50)[0]
    for threads in (1, 2):
        with threadpool_limits(threads):
            for block_size in (1, 13, 999, 4096):
                found = nearest(queries, corpus, own, groups, 50, block_size=block_size)[0]
                np.testing.assert_array_equal(found, expected)
            alone = [nearest(queries[i : i + 1], corpus, own, groups, 50)[0][0] for i in range(21)]
            np.testing.assert_array_equal(np.stack(alone), expected)


def test_results_do_not_depend_on_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = made_up(90)
    whole = mine_neighbors(texts, min_bleu=0.1)
    monkeypatch.setattr(neighbors, "_ROWS", 7)
    part = mine_neighbors(texts, min_bleu=0.1)
    for name in ("indices", "bleu", "cosine"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name))
    with threadpool_limits(2):
        two = mine_neighbors(texts, min_bleu=0.1)
    np.testing.assert_array_equal(two.indices, whole.indices)
    assert two.fingerprint == whole.fingerprint


# --- BLEU: compiled equals plain ---


@pytest.mark.parametrize("max_order", [1, 4, 5])
def test_compiled_bleu_equals_the_plain_one(max_order: int) -> None:
    texts = [*made_up(60, words=4), "w0", "x y z", "w0 w0 w0 w0 w0 w0"]
    grams = GramIndex(texts, max_order)
    every = np.arange(len(texts))
    pairs = np.tile(every, (len(texts), 1))
    pairs[0, 0] = -1
    found = grams.scores(every, pairs)
    for i, reference in enumerate(texts):
        for j, hypothesis in enumerate(texts):
            expected = sentence_bleu(hypothesis, reference, max_order=max_order)
            if (i, j) == (0, 0):
                expected = -1.0
            assert found[i, j] == pytest.approx(expected, abs=1e-14)


# --- mining: hand-made corpora ---


def mine(**options: Any) -> NeighborTable:
    given = {"corpus": CORPUS, "encoder": by_hand, "min_bleu": 0.0, "num_retrieved": 5}
    return mine_neighbors([TARGET], **{**given, **options})


def test_order_by_bleu() -> None:
    table = mine()
    scores = {i: sentence_bleu(text, TARGET) for i, text in enumerate(CORPUS) if i != 3}
    expected = sorted(scores, key=lambda i: (-scores[i], -COSINES[i]))
    assert table.indices[0].tolist() == expected
    assert expected[:3] == [1, 4, 2]
    assert table.bleu[0] == pytest.approx([scores[i] for i in expected])
    assert table.cosine[0] == pytest.approx([COSINES[i] for i in expected], abs=1e-6)
    assert table.texts(0)[0] == "the cat sat on the rug"


def test_order_by_cosine() -> None:
    assert mine(rerank=None).indices[0].tolist() == [0, 1, 2, 4, 5]
    # what BLEU alone would choose is beyond the nearest two
    assert mine(num_neighbors=2, num_retrieved=2).indices[0].tolist() == [1, 0]


@pytest.mark.parametrize("rerank", ["bleu", "bleu5", None])
def test_the_least_bleu_holds_for_every_order(rerank: str | None) -> None:
    table = mine(rerank=rerank, min_bleu=0.3)
    bleu = [sentence_bleu(t, TARGET, max_order=5 if rerank == "bleu5" else 4) for t in CORPUS]
    expected = {i for i in range(6) if bleu[i] >= 0.3 and i != 3}
    found = [i for i in table.indices[0].tolist() if i >= 0]
    assert set(found) == expected
    assert table.indices[0].tolist()[len(found) :] == [-1] * (5 - len(found))
    assert not table.bleu[0, len(found) :].any()
    assert not table.cosine[0, len(found) :].any()


def test_more_neighbours_than_the_corpus_has() -> None:
    table = mine(num_neighbors=8, num_retrieved=9)
    assert table.indices.shape == (1, 8)
    assert table.indices.dtype == np.int32
    assert table.bleu.dtype == table.cosine.dtype == np.float32
    assert (table.indices[0] >= 0).sum() == 5
    assert table.indices[0, 5:].tolist() == [-1] * 3


def test_a_target_and_its_duplicates_are_never_neighbours() -> None:
    twins = ["A b c d", "a b  c d", "a b c e", "ａ b c d", "a b c f", "A B C E"]  # full-width a
    for deduplicate in (True, False):
        table = mine_neighbors(twins, min_bleu=0.0, deduplicate=deduplicate)
        for row in (0, 1, 3):
            found = set(table.indices[row].tolist()) - {-1}
            assert found == ({2, 4} if deduplicate else {2, 4, 5})
        assert set(table.indices[2].tolist()) - {-1} == ({0, 4} if deduplicate else {0, 1, 3, 4})


def test_all_duplicates_have_no_neighbour() -> None:
    with pytest.warns(UserWarning, match="3 of 3 targets have no neighbour"):
        table = mine_neighbors(["a b", "A b", "a  b"])
    assert (table.indices == -1).all()
    assert table.to_dict()["share_without"] == 1


def test_kept_tokens_are_equal_sets() -> None:
    texts = ["table for 2 at 7", "table for 7 at 2", "table for 2 at 9", "table for 2 or 7 at 7"]
    table = mine_neighbors(texts, min_bleu=0.0, keep_tokens=r"\d+")
    digits = [set(re.findall(r"\d+", text)) for text in texts]
    for row in range(4):
        found = set(table.indices[row].tolist()) - {-1}
        assert found == {i for i in range(4) if i != row and digits[i] == digits[row]}
    both = mine_neighbors(texts, min_bleu=0.0, keep_tokens=re.compile(r"\D(\d+)$"))
    assert set(both.indices[0].tolist()) - {-1} == {3}  # groups do not matter: the whole match


def test_held_out_texts_are_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"1 of 6 texts of the corpus equal a held-out.*in row 1"):
        table = mine(held_out=["The cat  sat on the RUG", "something else"])
    assert 1 not in table.indices
    assert table.to_dict()["settings"]["left_out"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine(held_out=["something else"])


def test_few_neighbours_are_warned_of() -> None:
    texts = ["a b c", "a b d", "x y z", "p q r", "s t u"]
    with pytest.warns(UserWarning, match="3 of 5 targets have no neighbour.*parted by spaces"):
        mine_neighbors(texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine_neighbors([*texts[:2], "a b e", *texts[2:4]])


def test_texts_without_words_have_no_neighbours() -> None:
    texts = ["a b c", "a b d", "? !", "a b", "! ?"]
    table = mine_neighbors(texts, min_bleu=0.0)
    assert (table.indices[[2, 4]] == -1).all()
    assert not np.isin(table.indices, [2, 4]).any()
    assert np.isfinite(table.cosine).all()


def test_a_corpus_apart_from_the_targets() -> None:
    targets, corpus = made_up(20, 1), made_up(70, 2)
    table = mine_neighbors(targets, corpus=corpus, min_bleu=0.0, encoder=random_vectors)
    vectors = {text: random_vectors([text])[0] for text in [*targets, *corpus]}
    for row, target in enumerate(targets):
        first: dict[str, int] = {}
        for place, text in enumerate(corpus):
            first.setdefault(text, place)
        a = vectors[target] / np.linalg.norm(vectors[target])
        cosine = {
            place: float(a @ vectors[text] / np.linalg.norm(vectors[text]))
            for text, place in first.items()
            if text != target
        }
        bleu = {place: sentence_bleu(corpus[place], target) for place in cosine}
        expected = sorted(bleu, key=lambda p: (-bleu[p], -cosine[p]))[:5]
        assert table.indices[row].tolist() == expected
        assert table.cosine[row] == pytest.approx([cosine[p] for p in expected], abs=1e-6)


def test_built_in_vectors_are_the_cosines_of_tfidf_where_nothing_is_cut() -> None:
    """With fewer features than dimensions the decomposition turns vectors and no more."""
    texts = ["red cat", "red dog", "a dog", "a red cat sat"]
    vectors = encode(texts, "tfidf", texts)
    words = [[*t.split(), *zip(t.split(), t.split()[1:], strict=False)] for t in texts]
    vocabulary = sorted({str(w): w for own in words for w in own}.values(), key=str)
    counts = np.array([[own.count(w) for w in vocabulary] for own in words], dtype=float)
    idf = np.log((1 + 4) / (1 + (counts > 0).sum(0))) + 1
    weighed = counts * idf  # no word occurs twice, so that log counts are counts
    weighed /= np.linalg.norm(weighed, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors @ vectors.T, weighed @ weighed.T, atol=1e-5)


@pytest.mark.parametrize("kind", ["array", "tensor", "list", "half"])
def test_an_encoder_of_the_users_own(kind: str) -> None:
    def encoder(texts: list[str]) -> Any:
        assert isinstance(texts, list)
        assert len(texts) <= 1024
        found = random_vectors(texts)
        return {
            "array": lambda: found,
            "tensor": lambda: torch.tensor(found, requires_grad=True),
            "list": found.tolist,
            "half": lambda: torch.tensor(found, dtype=torch.bfloat16),
        }[kind]()

    texts = made_up(30)
    table = mine_neighbors(texts, encoder=encoder, min_bleu=0.0)
    if kind != "half":
        expected = mine_neighbors(texts, encoder=random_vectors, min_bleu=0.0)
        np.testing.assert_array_equal(table.indices, expected.indices)
    assert table.settings["encoder"].endswith("encoder")


def test_long_encoding_comes_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []

    def encoder(texts: list[str]) -> Any:
        sizes.append(len(texts))
        return np.ones((len(texts), 2))

    encode([str(i) for i in range(1030)], encoder, [])
    assert sizes == [1024, 6]
    assert "encoding: 100 %" in capsys.readouterr().err


def test_long_work_shows_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine_neighbors(["a b", "a c"], min_bleu=0.0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(neighbors, "_LONG", 0)
    mine_neighbors(["a b", "a c"], min_bleu=0.0)
    assert "neighbours: 100 %" in capsys.readouterr().err


# --- the table ---


def test_file_round_trip(tmp_path: Path) -> None:
    for corpus in (None, ["ü red cat", "a  red\ndog", "\ud800 a red", "a red"]):
        table = mine_neighbors(["a red cat", "a red dog"], corpus=corpus, min_bleu=0.0)
        table.save(tmp_path / "nb.npz")
        again = NeighborTable.load(tmp_path / "nb.npz")
        for name in ("indices", "bleu", "cosine"):
            np.testing.assert_array_equal(getattr(again, name), getattr(table, name))
            assert getattr(again, name).dtype == getattr(table, name).dtype
        assert again.targets == table.targets
        assert again.corpus == table.corpus
        assert again.fingerprint == table.fingerprint
        assert again.to_dict() == table.to_dict()
    with np.load(tmp_path / "nb.npz", allow_pickle=False) as file:
        assert {"indices", "bleu", "cosine", "fingerprint"} <= set(file)


def test_fingerprint_tells_texts_and_settings_apart() -> None:
    texts = ["a red cat", "a red dog", "a red hat"]
    tables = [
        mine_neighbors(texts, min_bleu=0.0),
        mine_neighbors(texts[::-1], min_bleu=0.0),
        mine_neighbors(texts, corpus=[*texts, "x y"], min_bleu=0.0),
        mine_neighbors(texts, min_bleu=0.1),
        mine_neighbors(texts, min_bleu=0.0, rerank=None),
    ]
    assert len({table.fingerprint for table in tables}) == len(tables)
    assert tables[0].fingerprint == mine_neighbors(texts, min_bleu=0.0).fingerprint


def test_summary() -> None:
    table = mine_neighbors(["a b c d", "a b c e", "x y"], min_bleu=0.2, num_neighbors=2)
    found = table.to_dict()
    assert found["share_without"] == pytest.approx(1 / 3)
    assert found["mean_neighbors"] == pytest.approx(2 / 3)
    assert found["mean_bleu"] == pytest.approx(sentence_bleu("a b c d", "a b c e"))
    assert json.loads(json.dumps(found)) == found
    assert [row["share"] for row in table.rows()] == [pytest.approx(2 / 3), 0]
    assert len(table) == 3
    assert table.show(2).endswith("no neighbour")
    assert "1: a b c e" in table.show(0)


# --- draws ---


def wide_table(rows: int = 400) -> NeighborTable:
    indices = np.tile(np.arange(4, dtype=np.int32), (rows, 1))
    bleu = np.tile(np.array([0.8, 0.6, 0.4, 0.2], dtype=np.float32), (rows, 1))
    indices[:, 3] = -1
    return NeighborTable(("t",) * rows, ("a", "b", "c", "d"), indices, bleu, bleu, {}, "")


@pytest.mark.parametrize("temperature", [float("inf"), 0.2, 0.01])
def test_draws_have_the_chances_that_they_should(temperature: float) -> None:
    table = wide_table()
    drawn = np.concatenate(
        [table.sample(range(400), epoch=e, temperature=temperature) for e in range(10)]
    )
    weights = np.exp((np.array([0.8, 0.6, 0.4]) - 0.8) / temperature)
    expected = weights / weights.sum()
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    assert shares[3] == 0
    # five standard errors of 4000 draws
    np.testing.assert_array_less(
        np.abs(shares[:3] - expected), 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-12
    )


def test_the_mean_of_drawn_losses_is_the_mean_over_neighbours() -> None:
    table, losses = wide_table(), np.array([1.0, 4.0, 2.5, np.nan])
    drawn = np.concatenate([table.sample(range(400), epoch=e) for e in range(25)])
    error = losses[:3].std() / np.sqrt(len(drawn))
    assert abs(losses[drawn].mean() - losses[:3].mean()) < 5 * error


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 1.0])
def test_the_chance_of_a_draw(chance: float) -> None:
    table = wide_table()
    drawn = np.concatenate([table.sample(range(400), epoch=e, chance=chance) for e in range(10)])
    share = (drawn >= 0).mean()
    assert abs(share - chance) <= 5 * np.sqrt(chance * (1 - chance) / 4000)
    rest = drawn[drawn >= 0]
    if len(rest):  # which neighbour is drawn does not depend on whether one is
        np.testing.assert_allclose(np.bincount(rest, minlength=4)[:3] / len(rest), 1 / 3, atol=0.1)


def test_draws_depend_on_seed_epoch_and_row_alone() -> None:
    table = wide_table()
    whole = table.sample(range(400), epoch=3, random_state=5)
    order = np.random.default_rng(0).permutation(400)
    np.random.seed(1)  # noqa: NPY002
    np.testing.assert_array_equal(table.sample(order, epoch=3, random_state=5), whole[order])
    single = [table.sample([row], epoch=3, random_state=5)[0] for row in range(400)]
    np.testing.assert_array_equal(single, whole)
    assert (table.sample(range(400), epoch=4, random_state=5) != whole).any()
    assert (table.sample(range(400), epoch=3, random_state=6) != whole).any()


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": []}, "targets must hold at least one text"),
        ({"corpus": []}, "corpus must hold at least one text"),
        ({"targets": "a b"}, "targets must be a list of texts"),
        ({"targets": ["a", "", "b", " \n"]}, r"targets must not be empty texts; got 2 .* row 1, 3"),
        ({"corpus": ["a", ""]}, "corpus must not be empty texts; got 1 .* row 1"),
        ({"targets": ["a", 3]}, "targets must be texts; got 3 in row 1"),
        ({"held_out": "a b"}, "held_out must be a list of texts"),
        ({"targets": ["?", "!"]}, "corpus must hold words for encoder='tfidf'"),
        ({"encoder": lambda t: np.full((len(t), 3), np.nan)}, "vectors of the encoder must be fin"),
        ({"encoder": lambda t: np.ones((len(t) + 1, 3))}, r"encoder must return one vector for"),
        ({"encoder": lambda t: np.ones(len(t))}, r"encoder must return one vector for"),
    ],
)
def test_bad_data(options: dict[str, Any], message: str) -> None:
    given = {"targets": ["a red cat", "a red dog"], **options}
    with pytest.raises(DataError, match=message):
        mine_neighbors(given.pop("targets"), **given)


@pytest.mark.filterwarnings("ignore:.*held-out")
def test_a_corpus_that_is_all_held_out() -> None:
    with pytest.raises(DataError, match="corpus must hold a text that is not held out"):
        mine_neighbors(["a b"], held_out=["A B"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_neighbors": 0}, "num_neighbors must be >= 1"),
        ({"num_neighbors": 5, "num_retrieved": 4}, "num_retrieved must be >= 5"),
        ({"rerank": "bleu4"}, "unknown rerank 'bleu4'; did you mean 'bleu'"),
        ({"min_bleu": 1.5}, "min_bleu must be >= 0 and <= 1"),
        ({"encoder": "bert"}, "unknown encoder 'bert'"),
        ({"keep_tokens": "("}, "keep_tokens must be a regular expression"),
        ({"keep_tokens": 3}, "keep_tokens must be a regular expression"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mine_neighbors(["a red cat", "a red dog"], **options)


def test_rows_outside_the_table() -> None:
    table = wide_table(3)
    for call in (table.show, table.texts, lambda row: table.sample([0, row])):
        for row in (3, -1):
            with pytest.raises(DataError, match=f"row must lie in 0 to 2, .*got {row}"):
                call(row)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epoch": -1}, "epoch must be >= 0"),
        ({"random_state": -1}, "random_state must be >= 0"),
        ({"temperature": 0}, "temperature must be > 0"),
        ({"temperature": float("nan")}, "temperature must be > 0"),
        ({"chance": 1.1}, "chance must be >= 0"),
    ],
)
def test_bad_draws(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wide_table(2).sample([0], **options)


def test_indices_outside_the_corpus() -> None:
    ok = wide_table(2)
    with pytest.raises(DataError, match=r"places in a corpus of 2 texts.*got -1 to 2"):
        NeighborTable(ok.targets, ("a", "b"), ok.indices, ok.bleu, ok.cosine, {}, "")
    with pytest.raises(DataError, match=r"shape \(n, k\), k >= 1, with n = 3"):
        NeighborTable(("t",) * 3, ok.corpus, ok.indices, ok.bleu, ok.cosine, {}, "")


def test_a_table_of_other_data(tmp_path: Path) -> None:
    texts = ["a red cat", "a red dog", "a red hat"]
    table = mine_neighbors(texts, min_bleu=0.0)
    path = tmp_path / "nb.npz"
    table.save(path)
    assert NeighborTable.load(path, targets=texts, corpus=texts).fingerprint == table.fingerprint
    for other, row in (
        ([*texts[:1], "a blue dog", texts[2]], 1), (texts[:2], 2), ([*texts, "x"], 3)
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"these targets; got {len(other)}.*from row {row} on"):
            NeighborTable.load(path, targets=other)
        with pytest.raises(DataError, match=f"these corpus; got {len(other)}.*from row {row} on"):
            table.check_data(texts, other)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        NeighborTable.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no table")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    for name in ("text.npz", "empty.npz", "other.npz"):
        with pytest.raises(DataError, match=f"{name} must be a table of neighbours"):
            NeighborTable.load(tmp_path / name)
    mine_neighbors(["a red cat", "a red dog"], min_bleu=0.0).save(tmp_path / "nb.npz")
    arrays = dict(np.load(tmp_path / "nb.npz"))
    for change, message in (
        ({"indices": arrays["indices"] + 9}, "places in a corpus"),
        ({"indices": arrays["indices"].astype(float)}, "must be a table of neighbours"),
        ({"settings": np.array("{}")}, "The file was changed"),
        ({"targets_bytes": arrays["targets_bytes"][::-1]}, "The file was changed"),
    ):
        np.savez(tmp_path / "bad.npz", **{**arrays, **change})
        with pytest.raises(DataError, match=message):
            NeighborTable.load(tmp_path / "bad.npz")


@pytest.mark.slow
def test_loads_no_torch() -> None:
    code = (
        "import sys; from gossamer.retrieval import mine_neighbors; "
        "mine_neighbors(['a b', 'a c'], min_bleu=0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
