"""Where a command finds its data: a BEIR, MS MARCO or multi-label folder, here or outside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.cli._common import data_folders
from gossamer.errors import DataError

if TYPE_CHECKING:
    from gossamer.retrieval import Collection, XmcData

__all__ = [
    "data_folder",
    "has_test",
    "hidden_pairs",
    "is_collection",
    "read_data",
    "searchable",
    "usual_split",
]

_LABELLED = ("trn*", "tst*", "train*", "test*", "*_data.txt*", "Y.*.npz")
"""What a multi-label folder holds at least one of."""


def data_folder(path: Path) -> Path:
    """Return a folder, as it was given or below `GOSSAMER_DATA`.

    Raises:
        DataError: If neither is there.
    """
    for folder in data_folders(path):
        if folder.is_dir():
            return folder
    raise DataError(
        f"{path} must be a folder in BEIR, MS MARCO or XMC form, here or in GOSSAMER_DATA; there "
        "is none. Check the path."
    )


def is_collection(folder: Path) -> bool:
    """Whether a folder holds documents and queries, and not rows with labels."""
    names = ("corpus.jsonl", "collection.tsv")
    return any((folder / f"{name}{end}").is_file() for name in names for end in ("", ".gz"))


def has_test(folder: Path) -> bool:
    """Whether a folder has a split `test` beside the one that is trained on."""
    if is_collection(folder):
        return any((folder / "qrels" / f"test.tsv{end}").is_file() for end in ("", ".gz"))
    patterns = ("tst*", "test*", "*_tstSplit*", "Y.tst.npz")
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def usual_split(folder: Path) -> str | None:
    """Return the split that is searched where the user names none."""
    if any((folder / f"collection.tsv{end}").is_file() for end in ("", ".gz")):
        return "dev.small"
    return None if is_collection(folder) and not (folder / "qrels").is_dir() else "test"


def read_data(folder: Path, split: str | None) -> Collection | XmcData:
    """Read one split of a folder, whatever its form; `None` for all queries of a BEIR folder.

    Raises:
        DataError: If the split is missing or a file is malformed.
    """
    from gossamer.checks import check_choice
    from gossamer.retrieval import read_beir, read_msmarco, read_xmc

    if is_collection(folder):
        beir = any((folder / f"corpus.jsonl{end}").is_file() for end in ("", ".gz"))
        return read_beir(folder, split=split) if beir else read_msmarco(folder, split=str(split))
    if not any(True for pattern in _LABELLED for _ in folder.glob(pattern)):
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{folder} must hold documents as corpus.jsonl (BEIR) or collection.tsv (MS MARCO), "
            f"packed (.gz) or not, or rows with labels such as trn.txt or trn_X_Y.txt (XMC); it "
            f"holds {there}. Check the path."
        )
    check_choice(str(split), ("train", "test"), "split of a multi-label folder")
    return read_xmc(folder, split="train" if split == "train" else "test")


def searchable(data: Collection | XmcData) -> Collection:
    """Return documents, queries and judgements; of a multi-label folder, labels are documents.

    Pairs of a filter file are no judgements.

    Raises:
        DataError: If texts are missing.
    """
    from gossamer.retrieval import Collection, TrainingRows

    if isinstance(data, Collection):
        return data
    rows = TrainingRows.of(data)
    names = [str(number) for number in rows.row_numbers]
    hidden = hidden_pairs(data)
    qrels = {
        name: {
            str(label): 1
            for label in rows.labels[row].indices
            if str(label) not in hidden.get(name, ())
        }
        for row, name in enumerate(names)
    }
    queries = dict(zip(names, rows.texts, strict=True))
    corpus = {str(number): text for number, text in enumerate(rows.label_texts)}
    return Collection(corpus, queries, qrels)


def hidden_pairs(data: Collection | XmcData) -> dict[str, set[str]]:
    """Return for each query the documents that are neither found nor judged: a filter file's."""
    pairs: dict[str, set[str]] = {}
    exclude = getattr(data, "exclude", None)
    for row, label in () if exclude is None else exclude.tolist():
        pairs.setdefault(str(row), set()).add(str(label))
    return pairs
