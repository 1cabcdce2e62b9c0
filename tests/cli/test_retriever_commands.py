"""`gossamer train-retriever` and `gossamer retrieve` as a user runs them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from gossamer.cli import main
from gossamer.cli._common import silence_loading
from gossamer.retrieval import (
    BM25Index,
    fuse_runs,
    read_beir,
    read_qrels,
    read_run,
    read_xmc,
    write_xmc,
)

WORDS = ["red", "blue", "green", "shoe", "lamp", "boat", "wing", "slab"]
OPTIONS = ("--dim", "16", "--epochs", "12", "--batch-size", "16", "--lr", "0.01", "--device", "cpu")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def beir(folder: Path, *, splits: tuple[str, ...] = ("train", "test")) -> Path:
    """Documents that name two things each; queries that name them in another order."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    pairs = [(a, b) for a in WORDS[:4] for b in WORDS[4:]]
    rows = [{"_id": f"d{n}", "title": a, "text": f"with {b}"} for n, (a, b) in enumerate(pairs)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    queries = []
    for split in splits:
        (folder / "qrels").mkdir(exist_ok=True)
        lines = ["query-id\tcorpus-id\tscore"]
        for number in range(48):
            n = int(rng.integers(len(pairs)))
            queries.append(
                {"_id": f"{split}{number}", "text": f"a {pairs[n][1]} and {pairs[n][0]} please"}
            )
            lines.append(f"{split}{number}\td{n}\t1")
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines))
    if not splits:
        queries = [{"_id": "q", "text": "boat green"}]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    return folder


def xmc(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    folder.mkdir()
    for short, size in (("trn", 60), ("tst", 20)):
        labels = rng.random((size, 4)) < 0.4
        labels[:, 0] |= ~labels.any(1)
        if short == "trn":
            labels[3] = False  # a row without a label
        write_xmc(np.ones((size, 1)), labels, folder / f"{short}.txt")
        texts = [" ".join(WORDS[i] for i in np.flatnonzero(row)) or "none" for row in labels]
        (folder / f"{short}_X.txt").write_text("\n".join(texts) + "\n")
    (folder / "Y.txt").write_text("\n".join(f"about {word}" for word in WORDS[:4]) + "\n")
    return folder


def test_from_a_beir_folder_to_an_evaluated_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir(tmp_path / "toy")
    assert run("train-retriever", "toy", *OPTIONS) == 0
    captured = capsys.readouterr()
    assert "48 rows with 1.0 relevant of 16 each; negatives: all" in captured.err
    assert "next: gossamer retrieve toy --model runs/train-retriever" in captured.out
    summary = json.loads(Path("runs/train-retriever/summary.json").read_text())
    assert summary["test"]["ndcg@10"] > 0.9  # by chance about .3
    page = Path("runs/train-retriever/report.md").read_text()
    again = page.split("## Repeat it")[1]
    for option in ("toy", "--dim 16", "--epochs 12", "--batch-size 16", "--lr 0.01"):
        assert option in again
    for usual in ("--loss", "--encoder", "--seed"):  # the defaults
        assert usual not in again
    assert run("retrieve", "toy", "--model", "runs/train-retriever", "--top-k", "5") == 0
    out = capsys.readouterr().out
    assert "48 queries, 16 documents" in out
    found = read_run("runs/retrieve/run.trec")
    assert all(len(documents) == 5 for documents in found.values())
    command = out.split("next: gossamer ")[1].split()
    assert run(*command, "--metrics", "ndcg@10", "--json") == 0
    measured = json.loads(capsys.readouterr().out)["table"][0]["ndcg@10"]
    assert measured == pytest.approx(summary["test"]["ndcg@10"], abs=0.02)


def test_labels_of_a_multi_label_folder_are_its_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xmc(tmp_path / "tags")
    assert run("train-retriever", "tags", *OPTIONS, "--towers", "two", "--json", "--quiet") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["rows"], summary["labels"], summary["left_out"]) == (59, 4, 1)
    assert summary["test"]["P@1"] > 0.9
    assert {row["arm"] for row in summary["table"]} == {"model"}
    assert run("retrieve", "tags", "--model", "runs/train-retriever", "--quiet") == 0
    found = read_run("runs/retrieve/run.trec")
    assert set(next(iter(found.values()))) <= {"0", "1", "2", "3"}
    assert Path("runs/retrieve/qrels.trec").is_file()


def test_pairs_of_a_filter_file_are_neither_found_nor_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = xmc(tmp_path / "tags")
    labels = read_xmc(folder, split="test").labels
    own = int(labels[2].indices[0])  # a pair that is true, and one more of the same row
    other = (own + 1) % 4
    (folder / "filter_labels_test.txt").write_text(f"2 {own}\n2 {other}\n")
    assert run("train-retriever", "tags", *OPTIONS, "--quiet") == 0
    measured = json.loads(Path("runs/train-retriever/summary.json").read_text())["test"]
    found = ("retrieve", "tags", "--model", "runs/train-retriever", "--quiet")
    assert run(*found) == run(*found, "--top-k", "2", "--out", "short") == 0
    shown = read_run("runs/retrieve/run.trec")
    assert set(shown["2"]) == {"0", "1", "2", "3"} - {str(own), str(other)}
    assert {len(row) for name, row in shown.items() if name != "2"} == {4}
    assert {len(row) for row in read_run("short/run.trec").values()} == {2}
    assert str(own) not in read_qrels("runs/retrieve/qrels.trec").get("2", {})
    capsys.readouterr()
    files = ("runs/retrieve/run.trec", "--qrels", "runs/retrieve/qrels.trec", "--json")
    assert run("evaluate", *files, "--metrics", "P@1") == 0
    row = json.loads(capsys.readouterr().out)["table"][0]
    assert row["precision@1"] == pytest.approx(measured["P@1"], abs=1e-6)


def test_the_page_repeats_the_run(tmp_path: Path) -> None:
    beir(tmp_path / "toy")
    assert run("train-retriever", "toy", *OPTIONS, "--negatives", "mined", "--quiet") == 0
    page = json.loads(Path("runs/train-retriever/page.json").read_text())["command"]
    assert page == (
        "gossamer train-retriever toy --negatives mined --dim 16 --epochs 12 --batch-size 16 "
        "--lr 0.01 --device cpu"
    )


def test_words_and_vectors_are_fused_and_an_index_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = beir(tmp_path / "toy", splits=("test",))
    assert run("train-retriever", "toy", *OPTIONS, "--split", "test", "--quiet") == 0
    assert json.loads(Path("runs/train-retriever/summary.json").read_text())["test"] == {}
    both = ("--model", "bm25", "--model", "runs/train-retriever", "--index", "vectors")
    assert run("retrieve", "toy", *both, "--out", "one") == 0
    data = read_beir(folder)
    words = BM25Index(data.corpus).search(data.queries, 100)
    assert read_run("one/run-0-bm25.trec")["test0"].keys() == words["test0"].keys()
    parts = [read_run("one/run-0-bm25.trec"), read_run("one/run-1-train-retriever.trec")]
    fused = fuse_runs(parts)
    assert list(read_run("one/run.trec")["test3"]) == list(fused["test3"])
    with (folder / "corpus.jsonl").open("a") as file:
        file.write('\n{"_id": "new", "text": "a green boat"}')
    before = {path.name for path in Path("vectors").glob("*.npy")}
    assert run("retrieve", "toy", *both, "--out", "two") == 0
    assert "17 vectors in vectors" in capsys.readouterr().err
    assert len({path.name for path in Path("vectors").glob("*.npy")} - before) == 1


def test_queries_without_judgements_are_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir(tmp_path / "toy", splits=())
    assert run("retrieve", "toy", "--json") == 0
    assert json.loads(capsys.readouterr().out)["queries"] == 1  # and nothing else
    assert read_run("runs/retrieve/run.trec").keys() == {"q"}
    assert not Path("runs/retrieve/qrels.trec").exists()


def test_data_outside_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sets").mkdir()
    beir(tmp_path / "sets" / "toy")
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path / "sets"))
    assert run("retrieve", "toy", "--quiet") == 0


def test_a_run_that_is_complete_resumes_to_the_same_model(tmp_path: Path) -> None:
    xmc(tmp_path / "tags")
    options = (*OPTIONS, "--quiet", "--out", "run")
    assert run("train-retriever", "tags", *options) == 0
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert run("train-retriever", "tags", *options, "--resume") == 0
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_a_run_does_not_go_on_with_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir(tmp_path / "toy")
    options = (*OPTIONS, "--quiet", "--out", "run")
    assert run("train-retriever", "toy", *options) == 0
    queries = tmp_path / "toy" / "queries.jsonl"
    queries.write_text(queries.read_text().replace("please", "thanks"))
    assert run("train-retriever", "toy", *options, "--resume") == 2
    assert "begun with other settings" in capsys.readouterr().err


def test_the_next_command_of_a_folder_with_a_space_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir(tmp_path / "my toy")
    assert run("retrieve", "my toy", "--out", "a run", "--quiet") == 0
    command = shlex.split(capsys.readouterr().out.split("next: gossamer ")[1])
    assert run(*command, "--json") == 0


def test_no_bar_of_transformers_is_drawn() -> None:
    silence_loading()
    logging = pytest.importorskip("transformers.utils.logging")
    assert not logging.is_progress_bar_enabled()


def test_options_have_no_second_form_that_means_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("retrieve", "serve"):
        assert run(command, "--help") == 0
        shown = capsys.readouterr().out
        assert "--empty" not in shown
        assert "[default: ()]" not in shown


# --- bad input ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["retrieve", "nowhere"], "must be a folder in BEIR"),
        (["train-retriever", "nowhere"], "must be a folder in BEIR"),
        (["retrieve", "toy", "--model", "bm25", "--model", "bm25"], "models must be different"),
        (["retrieve", "toy", "--index", "x"], "keeps the vectors of one model; got 0"),
        (["retrieve", "toy", "--top-k", "0"], "top_k"),
        (["retrieve", "toy", "--split", "dev"], "the judgements of the split 'dev'"),
        (["retrieve", "toy", "--model", "missing"], "config.json"),
        (["train-retriever", "toy", "--loss", "in_batch", "--negatives", "all"], "in_batch"),
        (["train-retriever", "toy", "--encoder", "missing"], "config.json"),
        (["train-retriever", "toy", "--encoder", "x", "--dim", "8"], "--dim belongs to --encoder"),
        (["train-retriever", "toy", "--num-negatives", "2"], "belongs to --negatives mined"),
        (["train-retriever", "toy", "--dim", "0"], "dim"),
        (["train-retriever", "toy", "--temperature", "0"], "temperature"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir(tmp_path / "toy")
    assert run(*arguments, "--quiet") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err


def test_an_id_that_no_run_can_hold_is_found_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = beir(tmp_path / "toy")
    with (folder / "corpus.jsonl").open("a") as file:
        file.write('\n{"_id": "two words", "text": "nothing that is asked for"}')
    assert run("retrieve", "toy", "--quiet") == 2
    assert "document id must be one word" in capsys.readouterr().err


def test_a_folder_of_no_form_is_told_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "queries.jsonl").touch()
    assert run("train-retriever", "empty") == 2
    err = capsys.readouterr().err
    for words in ("corpus.jsonl (BEIR)", "collection.tsv", "trn.txt", "it holds queries.jsonl"):
        assert words in err


def test_an_index_of_another_model_is_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir(tmp_path / "toy")
    for number in ("1", "2"):
        arguments = ("--epochs", "1", "--seed", number, "--out", f"run{number}", "--quiet")
        assert run("train-retriever", "toy", *arguments, "--device", "cpu") == 0
    assert run("retrieve", "toy", "--model", "run1", "--index", "vectors", "--quiet") == 0
    assert run("retrieve", "toy", "--model", "run2", "--index", "vectors", "--quiet") == 2
    assert "must hold vectors of this model; got those of run1" in capsys.readouterr().err
    lines = (tmp_path / "toy" / "corpus.jsonl").read_text().splitlines()
    (tmp_path / "toy" / "corpus.jsonl").write_text("\n".join(lines[1:]))
    assert run("retrieve", "toy", "--model", "run1", "--index", "vectors", "--quiet") == 2
    assert "got 'd0', which is not in it" in capsys.readouterr().err
