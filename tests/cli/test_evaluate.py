"""`gossamer evaluate` as a user runs it: one run, two runs, where judgements are found."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.report import read_table
from gossamer.retrieval import evaluate_run, write_qrels, write_run

QRELS = {"q1": {"a": 3, "b": 2, "c": 1}, "q2": {"x": 1}, "q3": {"z": 0}, "a": {"b": 1}}
ONE = {"q1": {"a": 0.1, "b": 0.9}, "q2": {"y": 1.0}, "q3": {"z": 1.0}, "a": {"a": 2.0, "b": 1.0}}
TWO = {"q1": {"a": 0.9, "b": 0.1}, "q2": {"x": 1.0}, "q9": {"z": 1.0}}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    write_qrels(QRELS, "qrels.txt")
    write_run(ONE, "one.trec")
    write_run(TWO, "two.trec.gz")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", *arguments])
    return int(stopped.value.code or 0)


def test_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("one.trec", "--qrels", "qrels.txt", "--per-query", "--metrics", "ndcg_cut_10, map") == 0
    )
    out = capsys.readouterr().out
    expected = evaluate_run(QRELS, ONE, ["ndcg@10", "map"], per_query=True)
    assert f"one: ndcg@10 {expected['ndcg@10']:.4f}, map {expected['map']:.4f}" in out
    assert "3 queries, 0 missing in the run, 1 without a relevant document left out" in out
    folder = tmp_path / "runs" / "evaluate"
    (row,) = read_table(folder / "table.csv")
    assert row["run"] == "one"
    assert row["ndcg@10"] == expected["ndcg@10"]
    rows = read_table(folder / "per_query.csv")
    assert {r["query"]: r["map"] for r in rows} == {
        query: values["map"] for query, values in expected.per_query.items()
    }


def test_two_runs_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("one.trec", "two.trec.gz", "--qrels", "qrels.txt", "--metrics", "mrr@10")
    assert run(*arguments, "--json", "--out", "out") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads(Path("out/summary.json").read_text())
    assert [row["run"] for row in summary["table"]] == ["one", "two"]
    assert [row["num_missing"] for row in summary["table"]] == [0, 1]
    (pair,) = summary["pairs"]
    assert (pair["wins"], pair["losses"], pair["ties"]) == (1, 1, 1)
    assert run(*arguments, "--out", "again") == 0
    assert "mrr@10: one - two = -0.1667" in capsys.readouterr().out


def test_options_reach_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    def value(*options: str) -> float:
        assert run(*options, "--qrels", "qrels.txt", "--metrics", "mrr", "--json") == 0
        found: float = json.loads(capsys.readouterr().out)["table"][0]["mrr"]
        return found

    assert value("one.trec") == pytest.approx((1 + 0 + 0.5) / 3)
    assert value("one.trec", "--drop-self") == pytest.approx((1 + 0 + 1) / 3)
    assert value("two.trec.gz", "--missing", "skip") == 1.0


def test_a_run_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("one.trec").read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert run("-", "--qrels", "qrels.txt", "--metrics", "P@1") == 0
    assert "-: precision@1 0.3333" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["qrels/dev.tsv", "qrels.dev.tsv.gz", "qrels/dev.trec"])
def test_judgements_of_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data" / "set" / name
    path.parent.mkdir(parents=True)
    write_qrels(QRELS, path)
    assert run("one.trec", "--data", "data/set", "--split", "dev") == 0
    assert run("one.trec", "--data", "set", "--split", "dev") == 2
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path / "data"))
    assert run("one.trec", "--data", "set", "--split", "dev") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--qrels", "qrels.txt"], "evaluate needs at least one run"),
        (["one.trec"], "either --qrels FILE or --data DIR; got neither"),
        (["one.trec", "--qrels", "qrels.txt", "--data", "x"], "got both"),
        (["one.trec", "--data", "x"], "x must hold judgements of the split 'test' as one of"),
        (["one.trec", "one.trec", "--qrels", "qrels.txt"], "runs must be different files"),
        (["one.trec", "two.trec.gz", "--qrels", "qrels.txt", "--missing", "skip"], "must count ze"),
        (["one.trec", "--qrel", "qrels.txt"], "evaluate '--qrel'; did you mean '--qrels'?"),
        (["none.trec", "--qrels", "qrels.txt"], "none.trec cannot be read"),
        (["one.trec", "--qrels", "one.trec"], "one.trec, line 1, column"),
        (["one.trec", "--qrels", "qrels.txt", "--metrics", "ndgc@10"], "did you mean 'ndcg'"),
        (["one.trec", "--qrels", "qrels.txt", "--metrics", "P@0"], "must be >= 1; got 0"),
    ],
)
def test_user_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()
