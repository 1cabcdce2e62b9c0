"""Multi-label data sets: every form is read alike, and every malformed entry is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix, random, save_npz

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.retrieval import XmcData, read_xmc, write_xmc

DATA = "5 4 3\n0,2 1:0.5 3:2\n 0:1\n1\n\n2 3:-1e-3\n"
LABELS = [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]]
FEATURES = [[0, 0.5, 0, 2], [1, 0, 0, 0], [0] * 4, [0] * 4, [0, 0, 0, -1e-3]]


def folder(tmp_path: Path, **files: str) -> Path:
    """Write files; two underscores in a name stand for a dot, three for a slash."""
    for name, text in files.items():
        path = tmp_path / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return tmp_path


def check(data: XmcData, *, features: bool = True) -> None:
    assert data.labels.toarray().tolist() == LABELS
    if features:
        assert data.features is not None
        np.testing.assert_array_equal(data.features.toarray(), np.float32(FEATURES))


# --- forms ---


def test_a_data_file(tmp_path: Path) -> None:
    check(read_xmc(folder(tmp_path, trn__txt=DATA)))
    check(read_xmc(folder(tmp_path, test__txt=DATA.replace("\n", "\r\n") + "\n\n"), split="test"))


def test_matrix_files_with_texts(tmp_path: Path) -> None:
    data = read_xmc(
        folder(
            tmp_path,
            trn_X_Y__txt="5 3\n0:1 2:1\n\n1:1\n\n2:1\n",
            trn_X_Xf__txt="5 4\n1:.5 3:2\n0:1\n\n\n3:-1e-3\n",
            raw___trn_X__txt="a\nb b\n\nd\ne\n",
            raw___Y__txt="x\ny\nz",
            filter_labels_train__txt="0 2\n4 1\n\n",
        )
    )
    check(data)
    assert data.texts == ["a", "b b", "", "d", "e"]
    assert data.label_texts == ["x", "y", "z"]
    assert data.exclude is not None
    assert data.exclude.tolist() == [[0, 2], [4, 1]]


def test_one_file_with_splits_counted_from_one(tmp_path: Path) -> None:
    files = folder(
        tmp_path, my_data__txt=DATA, my_trSplit__txt="1 5\n3 4\n", my_tstSplit__txt="5 1\n"
    )
    assert read_xmc(files).labels.toarray().tolist() == [LABELS[0], LABELS[2]]
    assert read_xmc(files, fold=1).labels.toarray().tolist() == [LABELS[4], LABELS[3]]
    assert read_xmc(files, split="test").labels.toarray().tolist() == [LABELS[4]]
    with pytest.raises(ConfigError, match=r"fold \(my_trSplit.txt has 2\) must be .* <= 1; got 2"):
        read_xmc(files, fold=2)


def test_json_lines(tmp_path: Path) -> None:
    rows = [
        {"uid": str(i), "title": f"t{i}", "content": "c" * (i % 2), "target_ind": found}
        for i, found in enumerate([[2, 0], [], [1], [], [2]])
    ]
    rows[4]["target_rel"] = [1.0]
    labels = [{"uid": "x", "title": name} for name in "xyz"]
    for name, items in (("trn", rows), ("lbl", labels)):
        text = "\n".join(map(json.dumps, items))
        (tmp_path / f"{name}.json.gz").write_bytes(gzip.compress(text.encode()))
    data = read_xmc(tmp_path)
    check(data, features=False)
    assert data.features is None
    assert data.texts == ["t0", "t1 c", "t2", "t3 c", "t4"]
    assert data.label_texts == ["x", "y", "z"]


def test_npz(tmp_path: Path) -> None:
    save_npz(tmp_path / "Y.tst.npz", csr_matrix(np.float32(LABELS)))
    save_npz(tmp_path / "X.tst.npz", csr_matrix(np.float32(FEATURES)))
    check(read_xmc(tmp_path, split="test"))


@pytest.mark.parametrize("name", ["trn.txt", "trn.txt.gz"])
def test_writing_round_trips_with_empty_rows(tmp_path: Path, name: str) -> None:
    draw = np.random.default_rng(0)
    features = random(50, 20, 0.05, format="csr", dtype=np.float32, random_state=0)
    labels = csr_matrix(draw.random((50, 9)) < 0.1)
    write_xmc(features, labels, tmp_path / name)
    data = read_xmc(tmp_path)
    assert data.features is not None
    np.testing.assert_array_equal(data.features.toarray(), features.toarray())
    np.testing.assert_array_equal(data.labels.toarray(), labels.toarray())
    assert (np.diff(data.labels.indptr) == 0).any()


def test_a_last_row_that_is_empty_round_trips(tmp_path: Path) -> None:
    write_xmc([[0.0], [1.0], [0.0]], [[0], [0], [0]], tmp_path / "trn.txt")
    assert (tmp_path / "trn.txt").read_text() == "3 1 1\n\n 0:1\n\n"
    assert read_xmc(tmp_path).labels.shape == (3, 1)


def test_unsorted_and_repeated_indices_are_merged_with_a_warning(tmp_path: Path) -> None:
    files = folder(tmp_path, trn__txt="2 4 3\n2,0,2 3:1 1:0.5 3:2\n1 0:1\n")
    with (
        pytest.warns(UserWarning, match="1 rows of features were not sorted and 1 held an index"),
        pytest.warns(UserWarning, match="1 rows of labels were not sorted and 1 held an index"),
    ):
        data = read_xmc(files)
    assert data.features is not None
    assert data.features.toarray()[0].tolist() == [0, 0.5, 0, 3]
    assert data.labels.toarray()[0].tolist() == [1, 0, 1]


# --- real files ---


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bibtex-xmc", {"train": (4880, 1836, 159), "test": (2515, 1836, 159)}),
        ("delicious-xmc", {"test": (3185, 500, 983)}),
    ],
)
def test_real_data_files(
    outside_data: Path, name: str, sizes: dict[str, tuple[int, int, int]]
) -> None:
    for split, (rows, features, labels) in sizes.items():
        data = read_xmc(outside_data / name, split=split)  # type: ignore[arg-type]
        assert data.labels.shape == (rows, labels)
        assert data.features is not None
        assert data.features.shape == (rows, features)
        assert data.label_texts is not None


def test_real_matrix_files(outside_data: Path) -> None:
    data = read_xmc(outside_data / "debtags-xmc", split="test")
    assert data.labels.shape == (3981, 581)
    assert data.texts is not None
    assert len(data.texts) == 3981
    assert data.label_texts is not None
    assert "role program" in data.label_texts


# --- bad input ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"trn\.txt, line 1, column 1: expected the header 'points features labels'"),
        ("5 4\n", r"got '5 4'"),
        ("5 4 x\n", r"got '5 4 x'"),
        ("3 4 3\n0 1:1\n1\n", r"line 1: the header counts 3 rows, .*; got 2"),
        ("1 4 3\n0 1:1\n\n1 1:1\n", r"line 4, column 1: expected the end of the file after 1 rows"),
        ("1 4 3\n0,3 1:1\n", r"line 2, column 1: expected a label in 0\.\.2, .*; got '3'"),
        ("1 4 3\n-1 1:1\n", r"expected a label in 0\.\.2, .*; got '-1'"),
        ("1 4 3\n0,,1 1:1\n", r"got ''"),
        ("1 4 3\n 0 1:1\n", r"line 2, column 2: expected index:value after a space, .*got '0'"),
        ("1 4 3\n0 1:1 4:1\n", r"line 2, column 7: expected a feature in 0\.\.3, .*; got '4'"),
        ("1 4 3\n0 1:nan\n", r"line 2, column 3: expected feature:value with a finite .*'1:nan'"),
        ("1 4 3\n0 1:1_0\n", r"got '1:1_0'"),
        ("1 4 3\n0 1\n", r"line 2, column 3: expected feature:value .*; got '1'"),
        ("1 4 3\n0 1:x\n", r"got '1:x'"),
    ],
)
def test_bad_data_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_xmc(folder(tmp_path, trn__txt=text))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"trn_X_Y__txt": "1 3\n3:1\n"}, r"line 2, column 1: expected a column in 0\.\.2"),
        ({"trn_X_Y__txt": "1 3 4\n"}, "expected the header 'rows columns'"),
        ({"trn_X_Y__txt": "1 3\n\n", "trn_X_Xf__txt": "2 3\n\n\n"}, "equally many rows; got 1 and"),
        ({"trn_X_Y__txt": "1 3\n\n", "trn_X__txt": "a\nb\n"}, "each of the 1 rows; got 2"),
        ({"trn_X_Y__txt": "1 3\n\n", "Y__txt": "a\nb\n"}, "each of the 3 labels; got 2"),
        (
            {"trn_X_Y__txt": "1 3\n\n", "filter_labels_train__txt": "0 3"},
            r"column 3: .*0\.\.2",
        ),
        ({"trn_X_Y__txt": "1 3\n\n", "filter_labels_train__txt": "0"}, "'row label', whole"),
        ({"a_data__txt": DATA}, r"must hold \*_trSplit.txt"),
        ({"a_data__txt": DATA, "a_trSplit__txt": "1\n6\n"}, r"line 2, column 1: .*1\.\.5; got 6"),
        ({"a_data__txt": DATA, "a_trSplit__txt": "0\n"}, r"1\.\.5; got 0"),
        ({"a_data__txt": DATA, "a_trSplit__txt": "1 x\n"}, "column 3: expected row numbers from 1"),
        ({"trn__json": "{}"}, "must hold lbl.json"),
        ({"trn__json": "{", "lbl__json": "{}"}, r"trn.json, line 1, column 2: .*not valid JSON"),
        ({"trn__json": "3", "lbl__json": "{}"}, "expected a JSON object; got '3'"),
        ({"trn__json": '{"target_ind": [1]}', "lbl__json": "{}"}, r"indices in 0\.\.0"),
        (
            {"trn__json": '{"target_ind": [0], "target_rel": []}', "lbl__json": "{}"},
            "as many numbers in target_rel",
        ),
        ({"Y__trn__npz": "text"}, "must be a matrix as scipy"),
        ({"other__txt": ""}, r"must hold the labels of the split 'train'.*it holds other\.txt"),
    ],
)
def test_bad_folders_are_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_xmc(folder(tmp_path, **files))


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown split 'dev'"):
        read_xmc(tmp_path, split="dev")  # type: ignore[arg-type]


def test_what_the_form_cannot_hold_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "trn.txt"
    with pytest.raises(ShapeError, match="one row for each of features, 2; got 1"):
        write_xmc([[1.0], [1.0]], [[1]], path)
    with pytest.raises(DataError, match="labels must be 0 or 1"):
        write_xmc([[1.0]], [[2]], path)
    with pytest.raises(DataError, match="features must be finite"):
        write_xmc([[np.inf]], [[1]], path)
    assert not path.exists()
