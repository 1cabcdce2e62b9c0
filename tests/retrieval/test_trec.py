"""TREC files: what is read, what is written, and every way in which a line can be wrong."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import DataError
from gossamer.retrieval import read_qrels, read_run, write_qrels, write_run

RUN = "q1 Q0 a 1 0.1 x\nq1 Q0 b 2 0.9 x\nq1\tQ0\tc\t3\t9e-1\tx\nq2 Q0 y 1 1 x\n"


def write(tmp_path: Path, text: str | bytes, name: str = "file.trec") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- runs ---


def test_a_run_is_ordered_by_score_and_ties_by_later_id(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, RUN))
    assert run == {"q1": {"a": 0.1, "b": 0.9, "c": 0.9}, "q2": {"y": 1.0}}
    assert list(run["q1"]) == ["c", "b", "a"]


def test_mark_carriage_returns_and_blank_last_lines_do_not_matter(tmp_path: Path) -> None:
    text = "\ufeff" + RUN.replace("\n", "\r\n") + "\r\n\n"
    assert read_run(write(tmp_path, text)) == read_run(write(tmp_path, RUN, "other"))


@pytest.mark.parametrize("name", ["run.trec", "run.trec.gz"])
def test_a_run_round_trips(tmp_path: Path, name: str) -> None:
    run = {"q1": {"b": 0.5, "a": 0.25}, "ü": {"x\u2028y".replace("\u2028", "-"): -3.5e-7}}
    write_run(run, tmp_path / name)
    again = read_run(tmp_path / name)
    assert again == run
    assert list(again["q1"]) == ["b", "a"]
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_packed_files_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("one.gz", "two.gz"):
        write_run({"q": {"d": 1.0}}, tmp_path / name)
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()
    assert gzip.decompress((tmp_path / "one.gz").read_bytes()) == b"q Q0 d 1 1 gossamer\n"


@pytest.mark.parametrize("base", [0.5, 1.0, 123.0])
def test_gaps_of_1e_9_survive(tmp_path: Path, base: float) -> None:
    run = {"q": {name: base + 1e-9 * place for place, name in enumerate("bca")}}
    write_run(run, tmp_path / "run")
    assert list(read_run(tmp_path / "run")["q"]) == ["a", "c", "b"]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_writing_never_changes_the_order(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float]
) -> None:
    path = tmp_path_factory.mktemp("order") / "run"
    run = {"q": {f"d{place:02}": score for place, score in enumerate(scores)}}
    write_run(run, path)
    write_run(read_run(path), path.with_name("again"))
    expected = sorted(run["q"], key=lambda d: (run["q"][d], d), reverse=True)
    assert list(read_run(path)["q"]) == expected
    assert path.with_name("again").read_bytes() == path.read_bytes()


def test_standard_input_and_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run({"q": {"d": 1 / 3}}, "-", tag="mine")
    text = capsys.readouterr().out
    assert text == "q Q0 d 1 0.333333333 mine\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert read_run("-") == {"q": {"d": 0.333333333}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"file\.trec must hold a run, .*it is empty"),
        ("q Q0 d 1 0.5\n", r"file\.trec, line 1, column 13: expected six columns .*got 5"),
        (RUN + "q Q0 d 1 0.5 x y\n", r"line 5, column 16: expected six columns .*got 7"),
        ("q Q0 d 1 nan x\n", r"line 1, column 10: expected a finite score for document 'd' of"),
        ("q Q0 d 1 -inf x\n", r"document 'd' of query 'q'; got '-inf'"),
        ("q Q0 d 1 1_0 x\n", r"got '1_0'"),
        (RUN + "q1 Q0 a 9 5 x\n", r"line 5, column 7: .*document 'a' of query 'q1' a second time"),
        (b"q Q0 d\xff 1 1 x\n", r"line 1, column 7: expected utf-8 text; got the byte 0xff"),
    ],
)
def test_bad_runs_are_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_run(write(tmp_path, text))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.trec cannot be read"):
        read_run(tmp_path / "none.trec")
    with pytest.raises(DataError, match=r"a\.gz must be a whole file"):
        read_run(write(tmp_path, RUN, "a.gz"))
    with pytest.raises(DataError, match=r"b\.gz must be a whole file"):
        read_run(write(tmp_path, gzip.compress(RUN.encode())[:-9], "b.gz"))


@pytest.mark.parametrize(
    ("run", "tag", "message"),
    [
        ({"q": {"d 1": 1.0}}, "t", "document id must be one word, .*got 'd 1'"),
        ({"q 1": {"d": 1.0}}, "t", "query id must be one word"),
        ({"q": {"": 1.0}}, "t", "document id must be one word"),
        ({"q": {"d": 1.0}}, "my tag", "tag must be one word"),
        ({"q": {"d": float("nan")}}, "t", "finite scores; got nan for document 'd' of query 'q'"),
        ({"q": ["d"]}, "t", r"run\['q'\] must map documents"),
        ([1], "t", "run must map queries"),
    ],
)
def test_what_a_file_cannot_hold_is_not_written(
    tmp_path: Path, run: object, tag: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        write_run(run, tmp_path / "run", tag=tag)
    assert not list(tmp_path.iterdir())


# --- judgements ---


@pytest.mark.parametrize(
    "text",
    [
        "q1 0 a 2\nq1 0 b -1\nq2 0 a 0\n",
        "q1\ta\t2\nq1\tb\t-1\nq2\ta\t0\n",
        "query-id\tcorpus-id\tscore\nq1\ta\t2\nq1\tb\t-1\nq2\ta\t0\n\n",
        "score\tdoc_id\tquery_id\r\n2\ta\tq1\r\n-1\tb\tq1\r\n0\ta\tq2\r\n",
    ],
)
def test_all_forms_of_judgements_are_read_alike(tmp_path: Path, text: str) -> None:
    assert read_qrels(write(tmp_path, text)) == {"q1": {"a": 2, "b": -1}, "q2": {"a": 0}}


def test_a_first_line_of_numbers_is_no_header(tmp_path: Path) -> None:
    assert read_qrels(write(tmp_path, "1\t184\t3\n")) == {"1": {"184": 3}}


def test_ids_with_spaces_are_read_between_tabs(tmp_path: Path) -> None:
    assert read_qrels(write(tmp_path, "q 1\td 1\t3\n")) == {"q 1": {"d 1": 3}}


@pytest.mark.parametrize("name", ["qrels", "qrels.gz"])
def test_judgements_round_trip(tmp_path: Path, name: str) -> None:
    qrels = {"q2": {"a": 0, "b": -1}, "q1": {"x": 3}}
    write_qrels(qrels, tmp_path / name)
    assert read_qrels(tmp_path / name) == qrels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "must hold judgements, .*it has none"),
        ("query-id\tcorpus-id\tscore\n", "it has none"),
        ("q 0 d 1.0\n", r"line 1, column 7: expected an integer grade for document 'd' of query"),
        ("q 0 d 1_0\n", "got '1_0'"),
        ("question\tpassage\tgood\nq\td\t1\n", "got 'good'.*a header has names"),
        ("q 0 d 1\nq d 1\n", r"line 2, column 6: expected 'qid iter docid rel'.*got 3"),
        ("q 0 d 1 x\n", r"line 1, column 9: .*got 5"),
        ("q 0 d 1\nq 0 d 1\n", r"line 2, column 5: .*document 'd' of query 'q' a second time"),
    ],
)
def test_bad_judgements_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_qrels(write(tmp_path, text))


@pytest.mark.parametrize("grade", [1.5, True, "1"])
def test_grades_are_integers(tmp_path: Path, grade: object) -> None:
    with pytest.raises(DataError, match=r"integer grades; got .* for document 'd' of query 'q'"):
        write_qrels({"q": {"d": grade}}, tmp_path / "qrels")


def test_a_real_file_in_both_forms(outside_data: Path) -> None:
    folder = outside_data / "vaswani" / "qrels"
    one, two = read_qrels(folder / "test.trec"), read_qrels(folder / "test.tsv")
    assert one == two
    assert sum(map(len, one.values())) == 2083
