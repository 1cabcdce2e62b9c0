"""`gossamer rank` as a user runs it: folders and files, what is written, going on after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.retrieval import BlockRanker, read_run, write_run

from ..retrieval.ranking_models import DOCUMENTS, saved

QUERIES = {"q1": "what carries lift?", "q2": "heat"}
RUN = {"q1": {"d1": 1.0, "d2": 4.0, "d3": 2.0, "d4": 3.0}, "q2": {"d1": 0.5, "d2": 0.1}}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    folder = Path("data")
    folder.mkdir()
    rows = [{"_id": d["id"], **{k: v for k, v in d.items() if k != "id"}} for d in DOCUMENTS]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"_id": name, "text": text} for name, text in QUERIES.items()]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    write_run(RUN, "first.trec")
    saved(Path("model"))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["rank", *arguments, "--run", "first.trec", "--model", "model", "--device", "cpu"])
    return int(stopped.value.code or 0)


def corpus() -> dict[str, str]:
    return {d["id"]: f"{d.get('title', '')} {d['text']}".strip() for d in DOCUMENTS}


@pytest.mark.filterwarnings("ignore:1 documents were longer:UserWarning")
def test_a_folder_is_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "--top-k", "3", "--max-document-length", "60") == 0
    out = capsys.readouterr().out
    assert "2 queries, 5 documents ranked at layer 2" in out
    assert "1 documents cut at 60 tokens" in out
    assert "next: gossamer evaluate first.trec runs/rank/run.trec --data data" in out
    found = read_run("runs/rank/run.trec")
    ranker = BlockRanker.from_pretrained("model", max_document_length=60)
    with pytest.warns(UserWarning, match="1 documents were longer"):
        expected = ranker.rank_run(QUERIES, corpus(), RUN, top_k=3, quiet=True)
    assert {name: list(scores) for name, scores in found.items()} == {
        name: list(scores) for name, scores in expected.items()
    }
    assert found["q1"] == pytest.approx(expected["q1"], abs=1e-6)
    assert set(found["q1"]) == set(RUN["q1"])
    summary = json.loads(Path("runs/rank/summary.json").read_text())
    assert (summary["num_queries"], summary["num_documents"], summary["num_cut"]) == (2, 5, 1)
    assert -1 <= summary["length_bias"] <= 1
    assert summary["query_position_offset"] == 1536


def test_files_engines_and_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    Path("q.tsv").write_text("".join(f"{name}\t{text}\n" for name, text in QUERIES.items()))
    files = ("--corpus", "data/corpus.jsonl", "--queries", "q.tsv", "--layer", "1", "--json")
    assert run(*files, "--engine", "mask4d", "--out", "one") == 0
    assert json.loads(capsys.readouterr().out)["layer"] == 1
    assert run(*files, "--cache", "cache", "--aggregate", "mean", "--out", "two") == 0
    assert json.loads(capsys.readouterr().out)["query_in_prefix"] is False
    assert run(*files, "--cache", "cache", "--aggregate", "mean", "--out", "three") == 0
    assert Path("two/run.trec").read_text() == Path("three/run.trec").read_text()
    assert len(list(Path("cache").glob("states-*.npy"))) == 1


def test_data_may_lie_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    Path("data").rename(tmp_path / "shared" / "other")
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path / "shared"))
    assert run("other", "--quiet") == 0


def test_an_interrupted_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("data", "--out", "whole") == 0
    plain, asked = BlockRanker.rank, []

    def stops(self: BlockRanker, query: str, *arguments: object, **options: object) -> object:
        asked.append(query)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return plain(self, query, *arguments, **options)

    monkeypatch.setattr(BlockRanker, "rank", stops)
    assert run("data") == 130
    assert "--resume" in capsys.readouterr().err
    with Path("runs/rank/results.jsonl").open("a") as file:
        file.write('{"query": "q2", "sco')  # a line that was cut short
    assert run("data", "--resume") == 0
    assert asked == ["what carries lift?", "heat", "heat"]
    assert Path("runs/rank/run.trec").read_text() == Path("whole/run.trec").read_text()
    assert run("data", "--resume", "--layer", "0") == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either a folder DATA or both --corpus FILE and --queries FILE"),
        (("data", "--corpus", "data/corpus.jsonl"), "Give one or the other"),
        (("none",), "none must hold documents as one of corpus.jsonl"),
        (("data", "--top-k", "0"), "top_k"),
        (("data", "--layer", "9"), "layer must be >= 0 and <= 2; got 9"),
        (("data", "--engine", "two_pass"), "two_pass"),
        (("data", "--cache", "c", "--engine", "block"), "query_in_prefix=False"),
        (("data", "--query-position-offset", "9999"), "below the end of the model's 2048"),
    ],
)
def test_bad_arguments(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model/config.json").unlink()
    assert run("data") == 2
    assert "must hold a causal language model" in capsys.readouterr().err
    Path("model/config.json").write_text('{"model": "DualEncoder"}')
    assert run("data") == 2
    err = capsys.readouterr().err
    assert "got 'DualEncoder'" in err
    assert "gossamer retrieve" in err
