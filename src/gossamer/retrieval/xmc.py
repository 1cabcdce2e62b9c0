"""Data sets of extreme multi-label classification: sparse text, raw text, JSON lines, npz."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, load_npz

from gossamer.checks import check_choice, check_range
from gossamer.errors import DataError, ShapeError
from gossamer.retrieval._sparse_text import read_data, read_matrix
from gossamer.retrieval._streams import (
    PathLike,
    column_of,
    existing,
    line_error,
    stream_lines,
    whole_number,
    writing,
)

__all__ = ["XmcData", "read_xmc", "write_xmc"]

Split = Literal["train", "test"]
_SHORT = {"train": ("trn", "train"), "test": ("tst", "test")}


@dataclass(frozen=True)
class XmcData:
    """One split of a data set; what the folder lacks is `None`.

    Args:
        labels: Rows x labels, sparse; above 0 where a label is true.
        features: Rows x features, sparse.
        texts: One for each row.
        label_texts: One for each label.
        exclude: Pairs (row, label) that are neither predicted nor counted, shape (n, 2).

    Example:
        >>> XmcData(csr_matrix([[1.0, 0.0]])).labels.shape
        (1, 2)
    """

    labels: csr_matrix
    features: csr_matrix | None = None
    texts: list[str] | None = field(default=None, repr=False)
    label_texts: list[str] | None = field(default=None, repr=False)
    exclude: NDArray[np.int64] | None = field(default=None, repr=False)


def read_xmc(folder: PathLike, *, split: Split = "train", fold: int = 0) -> XmcData:
    r"""Read one split of a folder in the forms of the extreme classification repository.

    Labels come from the first of these that is there (`trn` for the split `train`, `tst` for
    `test`; text files may be packed, `.gz`):

    - `trn_X_Y.txt`: a sparse matrix (header `rows columns`, then `label:value` a line); features
      beside it in `trn_X_Xf.txt`;
    - `trn.txt` or `train.txt`: header `points features labels`, then `l1,l2 f1:v1 f2:v2` a line;
      a line that starts with a space has no labels;
    - `*_data.txt` of that form, with the row numbers of `*_trSplit.txt` or `*_tstSplit.txt`;
    - `trn.json`: rows with `title`, `content`, `target_ind`; the labels' rows in `lbl.json`;
    - `Y.trn.npz`, SciPy CSR; features beside it in `X.trn.npz`.

    Texts come from `raw/trn_X.txt` or `trn_X.txt`, those of labels from `raw/Y.txt`, `Y.txt` or
    `labels.txt`, one a line; pairs to leave out from `filter_labels_train.txt`.

    Args:
        folder: Of the data set.
        split: `"train"` or `"test"`. Default `"train"`.
        fold: Column of a split file, from 0. Range: >= 0. Default 0.

    Returns:
        The split.

    Raises:
        ConfigError: If the split is unknown, or there is no such fold.
        DataError: If labels are missing or a file is malformed (the message names file, line and
            column), or the files' sizes do not agree.

    Warns:
        UserWarning: If indices of a row are unsorted or repeated; they are sorted and merged:
            values of features are added, labels stay single.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "trn.txt").write_text("2 3 2\n0,1 2:0.5\n 0:1\n")
        >>> read_xmc(folder).labels.toarray().tolist()
        [[1.0, 1.0], [0.0, 0.0]]

    Source: Bhatia et al., *The Extreme Classification Repository*, 2016; its file formats.
    Deviations: none
    """
    check_choice(split, _SHORT, "split")
    check_range(fold, "fold", low=0, integer=True)
    root = Path(folder)
    data = _read_labels(root, split, fold)
    label_texts, texts = data.label_texts, data.texts
    for path in (root / "raw" / "Y.txt", root / "Y.txt", root / "labels.txt"):
        label_texts = label_texts or _read_texts(path, data.labels.shape[1], "labels")
    for name in _SHORT[split]:
        for path in (root / "raw" / f"{name}_X.txt", root / f"{name}_X.txt"):
            texts = texts or _read_texts(path, data.labels.shape[0], "rows")
    filters = existing(root / f"filter_labels_{split}.txt")
    exclude = None if filters is None else _read_pairs(filters, data.labels.shape)
    return XmcData(data.labels, data.features, texts, label_texts, exclude)


def write_xmc(features: Any, labels: Any, path: PathLike) -> None:
    """Write features and labels as one text file, empty rows too.

    Args:
        features: Rows x features; SciPy sparse or an array. Written with 9 significant digits,
            which keep float32.
        labels: Rows x labels, 0 or 1; SciPy sparse or an array.
        path: A file; `.gz` is packed; `-` is standard output. It appears whole or not at all.

    Raises:
        ShapeError: If there are not equally many rows.
        DataError: If a feature is not finite, or a label neither 0 nor 1, which the form cannot
            hold.

    Example:
        >>> write_xmc([[0.0, 0.5], [0.0, 0.0]], [[1, 1], [0, 0]], "-")
        2 2 2
        0,1 1:0.5
        <BLANKLINE>

    Source: Bhatia et al., *The Extreme Classification Repository*, 2016; its file formats.
    Deviations: none
    """
    x, y = _sparse(features, "features"), _sparse(labels, "labels")
    if x.shape[0] != y.shape[0]:
        raise ShapeError(
            f"labels must have one row for each of features, {x.shape[0]}; got {y.shape[0]}. Give "
            "both for the same rows."
        )
    if not np.isin(y.data, (0, 1)).all():
        raise DataError(
            "labels must be 0 or 1, the form holds no weights; got other values. Round them first."
        )
    y.eliminate_zeros()
    with writing(path) as file:
        file.write(f"{x.shape[0]} {x.shape[1]} {y.shape[1]}\n")
        for row in range(x.shape[0]):
            of_x, of_y = slice(*x.indptr[row : row + 2]), slice(*y.indptr[row : row + 2])
            names = ",".join(map(str, y.indices[of_y].tolist()))
            pairs = zip(x.indices[of_x].tolist(), x.data[of_x].tolist(), strict=True)
            line = " ".join([names, *(f"{index}:{value:.9g}" for index, value in pairs)])
            file.write(line.rstrip() + "\n")


def _read_labels(root: Path, split: Split, fold: int) -> XmcData:
    for name in _SHORT[split]:
        if path := existing(root / f"{name}_X_Y.txt"):
            features = existing(root / f"{name}_X_Xf.txt")
            return _matched(
                root,
                read_matrix(path, binary=True),
                None if features is None else read_matrix(features, binary=False),
            )
        if path := existing(root / f"{name}.txt"):
            features, labels = read_data(path)
            return XmcData(labels, features)
        if path := existing(root / f"{name}.json"):
            return _read_json(root, path)
        if (root / f"Y.{name}.npz").is_file():
            features = root / f"X.{name}.npz"
            return _matched(
                root,
                _load(root / f"Y.{name}.npz"),
                _load(features) if features.is_file() else None,
            )
    for path in sorted([*root.glob("*_data.txt"), *root.glob("*_data.txt.gz")]):
        features, labels = read_data(path)
        rows = _read_fold(root, split, fold, labels.shape[0])
        return XmcData(labels[rows], features[rows])
    short = _SHORT[split][0]
    there = ", ".join(sorted(file.name for file in root.glob("*"))[:8]) or "nothing"
    raise DataError(
        f"{root} must hold the labels of the split {split!r}: {short}_X_Y.txt, {short}.txt, "
        f"*_data.txt with a split file, {short}.json or Y.{short}.npz; it holds {there}. Check "
        "the path."
    )


def _matched(root: Path, labels: csr_matrix, features: csr_matrix | None) -> XmcData:
    if features is not None and features.shape[0] != labels.shape[0]:
        raise DataError(
            f"labels and features of {root} must have equally many rows; got {labels.shape[0]} "
            f"and {features.shape[0]}. Give files of one data set."
        )
    return XmcData(labels, features)


def _read_texts(path: Path, count: int, what: str) -> list[str] | None:
    file = existing(path)
    if file is None:
        return None
    lines = [line.strip() for _, line in stream_lines(file)]
    while len(lines) > count and not lines[-1]:
        lines.pop()
    if len(lines) != count:
        raise DataError(
            f"{file} must have one line for each of the {count} {what}; got {len(lines)}. Give "
            "files of one data set."
        )
    return lines


def _integers(file: Path, width: int | None, form: str) -> Iterator[tuple[int, str, list[int]]]:
    """Yield number, line and whole numbers of the lines that are not blank."""
    for number, line in stream_lines(file):
        fields = line.split()
        if not fields:
            continue
        numbers = [whole_number(text) for text in fields]
        wrong = next((i for i, found in enumerate(numbers) if found is None), None)
        if wrong is not None or (width is not None and len(fields) != width):
            column = column_of(line, wrong if wrong is not None else min(len(fields), width or 0))
            raise line_error(
                file, number, column, f"expected {form}, whole numbers; got {line[:40]!r}. Mend "
                "the line.",
            )  # fmt: skip
        yield number, line, [found for found in numbers if found is not None]


def _read_pairs(file: Path, shape: tuple[int, int]) -> NDArray[np.int64]:
    pairs = []
    for number, line, pair in _integers(file, 2, "'row label'"):
        for place, (index, limit) in enumerate(zip(pair, shape, strict=True)):
            if index >= limit:
                raise line_error(
                    file, number, column_of(line, place), f"expected a number in 0..{limit - 1}; "
                    f"got {index}. Give files of one data set.",
                )  # fmt: skip
        pairs.append(pair)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _read_fold(root: Path, split: Split, fold: int, rows: int) -> NDArray[np.int64]:
    name = {"train": "trSplit", "test": "tstSplit"}[split]
    found = sorted([*root.glob(f"*_{name}.txt"), *root.glob(f"*_{name}.txt.gz")])
    if not found:
        raise DataError(
            f"{root} must hold *_{name}.txt, which says the rows of the split; got none. Add it."
        )
    picked = []
    for number, line, numbers in _integers(found[0], None, "row numbers from 1"):
        check_range(fold, f"fold ({found[0].name} has {len(numbers)})", low=0,
                    high=len(numbers) - 1, integer=True)  # fmt: skip
        if not 1 <= numbers[fold] <= rows:
            raise line_error(
                found[0], number, column_of(line, fold), f"expected a row number in 1..{rows}; "
                f"got {numbers[fold]}. Give files of one data set.",
            )  # fmt: skip
        picked.append(numbers[fold] - 1)
    return np.array(picked, dtype=np.int64)


def _load(path: Path) -> csr_matrix:
    try:
        matrix = csr_matrix(load_npz(path))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} must be a matrix as scipy.sparse.save_npz writes it; got {error}. Write it "
            "again."
        ) from None
    return _sparse(matrix, str(path))


def _read_json(root: Path, path: Path) -> XmcData:
    label_file = existing(root / "lbl.json")
    if label_file is None:
        raise DataError(f"{root} must hold lbl.json, the labels of {path.name}; got none. Add it.")
    label_texts = [_text(row) for _, row in _json_rows(label_file)]
    texts: list[str] = []
    indices: list[int] = []
    values: list[float] = []
    starts = [0]
    for number, row in _json_rows(path):
        targets = _targets(row, len(label_texts))
        if targets is None:
            raise line_error(
                path, number, 1, f"expected target_ind, indices in 0..{len(label_texts) - 1}, and "
                f"as many numbers in target_rel; got {str(row.get('target_ind'))[:40]}. Mend the "
                "row.",
            )  # fmt: skip
        texts.append(_text(row))
        indices += targets
        values += targets.values()
        starts.append(len(indices))
    labels = csr_matrix((np.array(values, np.float32), indices, starts),
                        shape=(len(texts), len(label_texts)))  # fmt: skip
    return XmcData(_sparse(labels, str(path)), None, texts, label_texts)


def _targets(row: dict[str, Any], num_labels: int) -> dict[int, float] | None:
    """Return the weights of a row's labels; `None` if it is malformed."""
    found = row.get("target_ind", [])
    if not isinstance(found, list):
        return None
    weights = row.get("target_rel", [1.0] * len(found))
    if not isinstance(weights, list) or len(weights) != len(found):
        return None
    known = all(type(index) is int and 0 <= index < num_labels for index in found)
    numbers = all(type(weight) in (int, float) for weight in weights)
    return dict(zip(found, weights, strict=True)) if known and numbers else None


def _text(row: dict[str, Any]) -> str:
    return " ".join(str(row.get(key) or "") for key in ("title", "content")).strip()


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in stream_lines(path):
        if re.fullmatch(r"\s*", line):
            continue
        try:
            row = json.loads(line)
        except (RecursionError, ValueError) as error:
            column = error.colno if isinstance(error, json.JSONDecodeError) else 1
            raise line_error(
                path, number, column, f"expected a JSON object; not valid JSON ({error}). Mend "
                "the line.",
            ) from None  # fmt: skip
        if not isinstance(row, dict):
            raise line_error(
                path, number, 1, f"expected a JSON object; got {line[:40]!r}. Mend the line."
            )
        yield number, row


def _sparse(value: Any, name: str) -> csr_matrix:
    """Return a CSR copy, sorted, without repeated indices, with finite values."""
    matrix = csr_matrix(value, copy=True)
    if not np.isfinite(matrix.data).all():
        raise DataError(f"{name} must be finite; got NaN or infinity. Remove or replace them.")
    matrix.sum_duplicates()
    return matrix
