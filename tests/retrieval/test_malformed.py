"""Readers on files with random damage: a table of the right form, or an error of ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError, DataError, GossamerError
from gossamer.retrieval import (
    read_beir,
    read_documents,
    read_qrels,
    read_run,
    read_topics,
    read_xmc,
    write_run,
)

BEIR = {
    "corpus.jsonl": b'{"_id": "d1", "title": "t", "text": "x"}\n{"_id": 2, "text": "y"}\n',
    "queries.jsonl": b'{"_id": "q1", "text": "?"}\n',
    "qrels/test.tsv": b"query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\t2\t0\n",
}
XMC = {"trn_X_Y.txt": b"2 3\n0:1 2:1\n\n", "trn_X_Xf.txt": b"2 9\n1:.5\n8:2e-3\n"}
READERS: dict[str, tuple[dict[str, bytes], Callable[[Path], object]]] = {
    "run": ({"f": b"q1 Q0 d1 1 0.5 t\nq1 Q0 d2 2 1e-3 t\n"}, lambda p: read_run(p / "f")),
    "qrels": ({"f": b"q1 0 d1 1\nq2 0 d2 -1\n"}, lambda p: read_qrels(p / "f")),
    "topics": ({"f": b"<top><num> 1\n<title> a &amp; b\n</top>"}, lambda p: read_topics(p / "f")),
    "documents": ({"f": b"<DOC>\n<DOCNO>1</DOCNO>a<b></DOC>"}, lambda p: read_documents(p / "f")),
    "beir": (BEIR, read_beir),
    "xmc data": ({"trn.txt": b"2 3 4\n0,3 1:1 2:.5\n 0:1\n"}, read_xmc),
    "xmc matrix": (XMC, read_xmc),
    "xmc json": ({"trn.json": b'{"title": "a", "target_ind": [0], "target_rel": [1]}\n',
                  "lbl.json": b'{"title": "x"}'}, read_xmc),
    "xmc folds": ({"a_data.txt": b"2 1 1\n0 0:1\n0 0:1\n", "a_trSplit.txt": b"1 2\n2 1\n"},
                  read_xmc),
}  # fmt: skip
PIECES = st.sampled_from(
    [b"", b" ", b"\n", b"\t", b"\r", b",", b":", b"-1", b"9" * 5000, b"99999999999", b"1e999",
     b"nan", b"\xff", b"\xef\xbb\xbf", b"\x00", b"1_0", b"{", b"[" * 3000, b"null", b"<top>",
     b"</DOC>", b'"', b"\xd9\xa3", b"\\ud800", b"0.5"]
)  # fmt: skip


@pytest.mark.parametrize("name", READERS)
@settings(deadline=None, derandomize=True, max_examples=30)
@given(data=st.data())
def test_damage_gives_a_table_or_our_error(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    files, read = READERS[name]
    folder = tmp_path_factory.mktemp("damaged")
    for file, whole in files.items():
        cut = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(whole[: cut[0]] + data.draw(PIECES) + whole[cut[1] :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        message = ""
        try:
            read(folder)
        except GossamerError as error:
            message = str(error)
    assert len(message) < 700


def test_half_a_surrogate_pair_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="half of a surrogate pair at character 2"):
        write_run({"q": {"d\ud800": 1.0}}, tmp_path / "run")


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="encoding must be one that Python knows"):
        read_topics(tmp_path / "topics", encoding="utf-9")


def test_an_empty_id_between_tabs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("q\td\t1\n\td\t1\n")
    with pytest.raises(DataError, match="line 2, column 1: expected a query and a document"):
        read_qrels(tmp_path / "f")


@pytest.mark.parametrize("text", ["1 1 3000000000\n\n", "1 2 2\n0 1:1e300\n"])
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trn.txt").write_text(text)
    with pytest.raises(DataError, match=r"trn\.txt, line [12], column"):
        read_xmc(tmp_path)
