"""Exact search in blocks, and an index on disk that survives interruptions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import (
    ConfigError,
    DataError,
    GossamerError,
    MissingDependencyError,
    ShapeError,
)
from gossamer.retrieval import DenseIndex, search_top_k

VECTORS = np.random.default_rng(0).integers(-3, 4, (37, 5)).astype(np.float32)
QUERIES = np.random.default_rng(1).integers(-3, 4, (6, 5)).astype(np.float32)


def by_sorting(queries: np.ndarray, documents: np.ndarray, k: int) -> list[list[int]]:
    """Whole products, sorted; ties by the lower index."""
    return [
        sorted(range(len(documents)), key=lambda i: (-row[i], i))[:k]
        for row in queries @ documents.T
    ]


# --- search ---


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 40))
def test_blocks_give_what_sorting_gives(k: int, block_size: int, documents: int) -> None:
    some = VECTORS[:documents]
    scores, indices = search_top_k(QUERIES, some, k, block_size=block_size)
    assert indices.tolist() == by_sorting(QUERIES, some, k)
    np.testing.assert_array_equal(scores, np.take_along_axis(QUERIES @ some.T, indices, axis=1))


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [("float64", "float64", "float64"), ("float32", "float16", "float32"),
     ("float64", "float32", "float32"), ("int64", "float32", "float32")],
)  # fmt: skip
def test_precision(first: str, second: str, result: str) -> None:
    scores, indices = search_top_k(QUERIES.astype(first), VECTORS.astype(second), 3)
    assert scores.dtype == result
    assert indices.tolist() == by_sorting(QUERIES, VECTORS, 3)


def test_many_queries_are_searched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search_top_k(QUERIES, VECTORS, 4)
    monkeypatch.setattr("gossamer.retrieval.dense._QUERIES", 4)
    for one, two in zip(whole, search_top_k(QUERIES, VECTORS, 4, block_size=8), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_memory_mapped_array_will_do(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", VECTORS)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert search_top_k(QUERIES, mapped, 3)[1].tolist() == by_sorting(QUERIES, VECTORS, 3)


@pytest.mark.parametrize(
    ("queries", "documents", "k", "message"),
    [
        (QUERIES, VECTORS, 0, "top_k must be >= 1; got 0"),
        (QUERIES[:, :2], VECTORS, 1, r"queries must be vectors, \(at least 1, 5\); got \(6, 2\)"),
        (QUERIES, VECTORS[:0], 1, r"documents must be vectors, .*got \(0, 5\)"),
        (QUERIES[0], VECTORS, 1, r"got \(5,\)"),
        (QUERIES * np.nan, VECTORS, 1, "queries must be finite"),
        (QUERIES, VECTORS * np.nan, 1, "scores of documents 0 to 36 must be finite"),
        ([["a"] * 5], VECTORS, 1, "queries must be real numbers"),
    ],
)
def test_bad_searches_are_refused(queries: object, documents: object, k: int, message: str) -> None:
    with pytest.raises(GossamerError, match=message):
        search_top_k(queries, documents, k)


# --- other engines ---


@pytest.mark.parametrize("engine", ["torch", "faiss"])
@settings(deadline=None, derandomize=True, max_examples=40)
@given(k=st.integers(1, 40), block_size=st.integers(1, 50), documents=st.integers(1, 40))
def test_engines_give_the_same_also_at_ties(
    engine: str, k: int, block_size: int, documents: int
) -> None:
    """Whole numbers: equal scores are many, and exact everywhere."""
    if engine == "faiss":
        pytest.importorskip("faiss")
    some = VECTORS[:documents]
    expected = search_top_k(QUERIES, some, k)
    found = search_top_k(QUERIES, some, k, block_size=block_size, engine=engine)
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, np.ndarray)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_against_the_flat_index_of_faiss() -> None:
    faiss = pytest.importorskip("faiss")
    rng = np.random.default_rng(3)
    documents = rng.standard_normal((500, 16)).astype(np.float32)
    queries = rng.standard_normal((40, 16)).astype(np.float32)
    index = faiss.IndexFlatIP(16)
    index.add(documents)
    scores, places = index.search(queries, 20)
    for engine in ("numpy", "torch", "faiss"):
        ours = search_top_k(queries, documents, 20, block_size=64, engine=engine)
        np.testing.assert_array_equal(ours[1], places)
        np.testing.assert_allclose(ours[0], scores, rtol=1e-5, atol=1e-5)


def test_tensors_are_searched_with_torch_and_come_back(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", VECTORS.astype(np.float16))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    expected = search_top_k(QUERIES, VECTORS, 5)
    q, d = torch.from_numpy(QUERIES), torch.from_numpy(VECTORS)
    learned = q.clone().requires_grad_()
    for queries, documents in ((q, d), (q, VECTORS), (q, mapped), (learned, d.bfloat16())):
        scores, places = search_top_k(queries, documents, 5, block_size=8)
        assert isinstance(places, torch.Tensor)
        assert not scores.requires_grad
        assert scores.dtype == torch.float32
        np.testing.assert_array_equal(places.numpy(), expected[1])
        np.testing.assert_array_equal(scores.numpy(), expected[0])
    assert isinstance(search_top_k(q, d, 5, engine="numpy")[1], torch.Tensor)
    assert isinstance(search_top_k(QUERIES, d, 5)[1], np.ndarray)
    assert search_top_k(q.double(), d.double(), 5)[0].dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device() -> None:
    q, d = torch.from_numpy(QUERIES).cuda(), torch.from_numpy(VECTORS)
    scores, places = search_top_k(q, d, 5, block_size=8)
    assert places.device == scores.device == q.device
    np.testing.assert_array_equal(places.cpu().numpy(), search_top_k(QUERIES, VECTORS, 5)[1])


@pytest.mark.parametrize("engine", ["torch", "faiss"])
def test_other_engines_refuse_what_numpy_refuses(engine: str) -> None:
    if engine == "faiss":
        pytest.importorskip("faiss")
    with pytest.raises(DataError, match="queries must be finite"):
        search_top_k(QUERIES * np.nan, VECTORS, 1, engine=engine)
    broken = VECTORS.copy()
    broken[9] = np.inf
    with pytest.raises(DataError, match="scores of documents 8 to 15 must be finite"):
        search_top_k(QUERIES, broken, 1, block_size=8, engine=engine)
    with pytest.raises(ShapeError, match=r"queries must be vectors, .* got \(6, 2\)"):
        search_top_k(torch.from_numpy(QUERIES[:, :2]), VECTORS, 1, engine=engine)


def test_unknown_and_missing_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown engine 'fais'; did you mean 'faiss'"):
        search_top_k(QUERIES, VECTORS, 1, engine="fais")
    pytest.importorskip("faiss")
    with pytest.raises(ConfigError, match="'numpy' or 'torch' for float64"):
        search_top_k(QUERIES.astype(float), VECTORS.astype(float), 1, engine="faiss")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependencyError, match=r"gossamer\[retrieval\]"):
        search_top_k(QUERIES, VECTORS, 1, engine="faiss")


def test_torch_is_not_loaded_for_arrays() -> None:
    code = (
        "import sys, numpy as np\n"
        "from gossamer.retrieval import DenseIndex, search_top_k\n"
        "search_top_k(np.ones((2, 3)), np.ones((4, 3)), 1)\n"
        "assert not {'torch', 'faiss'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- index on disk ---


def built(folder: Path, dtype: str = "float32") -> DenseIndex:
    index = DenseIndex(folder)
    for start in (0, 10, 30):
        part = VECTORS[start : {0: 10, 10: 30, 30: 37}[start]].astype(dtype)
        index.add([f"d{start + i}" for i in range(len(part))], part, about={"model": "toy"})
    return index


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_an_index_finds_the_same_as_the_vectors(tmp_path: Path, dtype: str) -> None:
    built(tmp_path / "index", dtype)
    index = DenseIndex(tmp_path / "index")
    run = index.search({f"q{i}": row for i, row in enumerate(QUERIES)}, 7, block_size=8)
    expected = by_sorting(QUERIES, VECTORS, 7)
    assert [[int(doc[1:]) for doc in found] for found in run.values()] == expected
    assert (len(index), index.dim, index.about) == (37, 5, {"model": "toy"})
    assert index.dtype == ("float16" if dtype == "float16" else "float32")
    assert "d36" in index
    assert "d37" not in index
    assert "37 vectors of 5" in repr(index)


def test_the_files_are_the_field_s_own(tmp_path: Path) -> None:
    built(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["emb-00000.npy", "emb-00001.npy", "emb-00002.npy", "ids.txt", "meta.json"]
    assert (tmp_path / "ids.txt").read_text().split() == [f"d{i}" for i in range(37)]
    np.testing.assert_array_equal(
        np.load(tmp_path / "emb-00001.npy", allow_pickle=False), VECTORS[10:30]
    )


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("where", ["write_json", "np.load"])
def test_an_interrupted_add_leaves_the_index_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, same: bool
) -> None:
    index = built(tmp_path)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"gossamer.retrieval.dense.{where}", stop)
        with pytest.raises(KeyboardInterrupt):
            index.add(["new"], VECTORS[:1])
    assert (tmp_path / "emb-00003.npy").exists()
    again = DenseIndex(tmp_path)
    assert len(again) == 37
    assert "new" not in again
    (index if same else again).add(["other"], VECTORS[1:2] * 100)
    opened = DenseIndex(tmp_path)
    assert opened.ids == [*(f"d{i}" for i in range(37)), "other"]
    assert (tmp_path / "ids.txt").read_text().split() == opened.ids
    assert list(opened.search({"q": VECTORS[1]}, 1)["q"]) == ["other"]


def test_no_queries_find_nothing(tmp_path: Path) -> None:
    assert built(tmp_path).search({}, 3) == {}


@pytest.mark.parametrize(
    ("ids", "vectors", "about", "message"),
    [
        (["x"], VECTORS[:2], None, "one row for each of 1 ids; got 2"),
        (["x"], VECTORS[:1, :2], None, r"vectors must be vectors, \(at least 1, 5\)"),
        (["d3"], VECTORS[:1], None, "must be new to the index and different; got 'd3' again"),
        (["x", "x"], VECTORS[:2], None, "got 'x' again"),
        (["a\nb"], VECTORS[:1], None, r"texts of one line; got 'a\\nb'"),
        ([""], VECTORS[:1], None, "texts of one line; got ''"),
        (["a\n"], VECTORS[:1], None, r"texts of one line; got 'a\\n'"),
        ([7], VECTORS[:1], None, "texts of one line; got 7"),
        (["x"], VECTORS[:1] * np.nan, None, "vectors must be finite"),
        (["x"], VECTORS[:1].astype("float16"), None, "must be float32 as those of the index"),
        (["x"], VECTORS[:1], {"model": "other"}, "different models do not mix"),
        (["x"], VECTORS[:1], {"sizes": (1, 2)}, "about must be plain values"),
        ([], VECTORS[:0], None, r"got \(0, 5\)"),
    ],
)
def test_what_does_not_fit_is_not_added(
    tmp_path: Path, ids: list[str], vectors: np.ndarray, about: dict[str, object], message: str
) -> None:
    index = built(tmp_path)
    with pytest.raises(GossamerError, match=message):
        index.add(ids, vectors, about=about)
    assert len(DenseIndex(tmp_path)) == len(index) == 37
    assert len(list(tmp_path.iterdir())) == 5


def test_an_empty_index_says_so(tmp_path: Path) -> None:
    index = DenseIndex(tmp_path / "new")
    assert len(index) == 0
    with pytest.raises(DataError, match="must hold vectors to search; it is empty"):
        index.search({"q": [1.0]}, 1)
    assert not (tmp_path / "new").exists()


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    built(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "ids.txt").write_text("d0\n")
    with pytest.raises(DataError, match=r"ids\.txt must hold the 37 ids .*; got 1"):
        DenseIndex(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "shards": [11, 20, 7]}))
    with pytest.raises(DataError, match=r"emb-00000\.npy must hold 11 x 5 float32 .*got \(10, 5\)"):
        DenseIndex(tmp_path)
    (tmp_path / "emb-00000.npy").write_bytes(b"not numpy")
    with pytest.raises(DataError, match=r"emb-00000\.npy must be a NumPy file of numbers"):
        DenseIndex(tmp_path)
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(DataError, match=r"meta\.json must have dim, dtype"):
        DenseIndex(tmp_path)


def test_bad_options_are_refused(tmp_path: Path) -> None:
    index = built(tmp_path)
    with pytest.raises(DataError, match="ids must be a list of texts; got str"):
        index.add("cd", VECTORS[:2])
    with pytest.raises(ConfigError, match="block_size must be >= 1"):
        index.search({"q": VECTORS[0]}, 1, block_size=0)
    with pytest.raises(ConfigError, match="block_size must be >= 1"):
        search_top_k(QUERIES, VECTORS, 1, block_size=0)
    with pytest.raises(ShapeError, match="queries must be vectors"):
        index.search({"q": VECTORS[0, :3]}, 1)
