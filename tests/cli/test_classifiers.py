"""`gossamer train` and `gossamer solve` on tables and images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gossamer.cli import main
from gossamer.files import read_json

FAST = ["--steps", "120", "--lr", "0.005", "--quiet", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def write_table(name: str = "my.csv", size: int = 240, *, wrong: float = 0.0) -> Path:
    random = np.random.default_rng(0)
    x = random.standard_normal((size, 2))
    truth = (x[:, 0] + x[:, 1] > 0) ^ (random.random(size) < wrong)
    lines = [f"{a:.4f},{b:.4f},{'yes' if t else 'no'}" for (a, b), t in zip(x, truth, strict=True)]
    path = Path(name)
    path.write_text("\n".join(["a,b,answer", *lines]))
    return path


def test_a_table_from_training_to_answers(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(wrong=0.2)
    task = ["--task", "table:my.csv,target=answer"]
    assert run("train", *task, "--loss", "forward", "--noise-matrix", "estimate", *FAST) == 0
    said = capsys.readouterr().out
    assert "rows held out are given their label (2 classes" in said
    assert "next: gossamer solve runs/train FILE.csv" in said
    summary = read_json("runs/train/summary.json")
    matrix = np.array(summary["transition"])
    assert "both figures suffer" in said
    assert matrix.sum(1) == pytest.approx([1.0, 1.0])
    assert 0.05 < matrix[0, 1] < 0.4
    assert summary["classes"] == ["no", "yes"]
    page = Path("runs/train/report.html").read_text()
    for text in ("Reliability: accuracy against confidence", "calibration error", "Training loss"):
        assert text in page
    # rows held out are not trained on, and what is measured is explained
    for text in ("(trained)", "(ours)", "Here and paper", "over the n seeds", "(n = 1)"):
        assert text not in page
    for text in ("<dt>Cross-entropy</dt>", "<dt>Calibration error</dt>", "95 % interval"):
        assert text in page

    # rows without labels, and rows with the true ones
    Path("new.csv").write_text("b,a\n3,3\n-3,-3")
    assert run("solve", "runs/train", "new.csv", "--out", "answers") == 0
    assert capsys.readouterr().out.split() == ["yes", "no"]
    answers = [json.loads(line) for line in Path("answers/answers.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in answers] == ["yes", "no"]
    assert all(row["probability"] > 0.5 and "correct" not in row for row in answers)
    write_table("true.csv")
    assert run("solve", "runs/train", "true.csv") == 1
    captured = capsys.readouterr()
    right = float(captured.err.split("(")[1].split(" %")[0])
    assert right > 85
    assert run("solve", "runs/train", "true.csv", "--no-check") == 0

    assert run("train", "--config", "runs/train/config.toml", "--out", "again", "--quiet") == 0
    assert read_json("again/summary.json")["cells"] == summary["cells"]


def test_images_and_their_answers(capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    labels = np.arange(200) % 2
    images = np.clip(random.normal(60 + 120 * labels[:, None, None], 30, (200, 6, 6)), 0, 255)
    np.savez("dots.npz", images=images.astype(np.uint8), labels=np.array(["dark", "light"])[labels])
    assert run("train", "--task", "images:dots.npz", "--loss", "smoothing", *FAST, "--json") == 0
    cell = json.loads(capsys.readouterr().out)["cells"][0]
    assert (cell["accuracy"], cell["num_samples"]) == (100, 40)
    assert run("solve", "runs/train", "dots.npz", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["answer"] for row in rows] == ["dark", "light"] * 100
    assert rows[3]["where"] == "dots.npz, image 3"
    assert all(row["correct"] for row in rows)
    Path("flat").mkdir()
    for number in (0, 1):
        pixels = images[number].astype(np.uint8)
        Image.fromarray(pixels).save(f"flat/{number}.png")
    assert run("solve", "runs/train", "flat") == 0
    captured = capsys.readouterr()
    assert captured.out.split() == ["dark", "light"]
    assert "labels of the file" not in captured.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "table:my.csv"], "target must be a column of my.csv; got 'label'"),
        (["--task", "table:no.csv"], "no.csv does not exist"),
        (["--task", "table:my.csv,target=answer", "--positions", "rope"], "--positions belongs to"),
        (["--task", "table:my.csv,target=answer", "--coupling", "none"], "--coupling belongs to"),
        (["--task", "table:my.csv,target=answer", "--loss", "focal"], "unknown loss 'focal'"),
        (["--task", "table:my.csv,target=answer", "--alpha", "0.1"], "--alpha belongs to"),
        (
            ["--task", "table:my.csv,target=answer", "--noise-matrix", "estimate"],
            "--noise-matrix belongs to --loss forward or backward",
        ),
        (["--task", "table:my.csv,target=answer", "--neighbors", "n.npz"], "got 'n.npz' with"),
        (["--task", "table:my.csv,target=answer", "--model", "vit"], "unknown model for labelled"),
        (["--task", "copy", "--loss", "forward", "--noise-matrix", "estimate"], "table or images"),
        (["--task", "copy", "--optimizer", "scale_invariant_sgd"], "got Decoder"),
        (
            ["--task", "table:my.csv,target=answer", "--optimizer", "scale_invariant_sgd"],
            "belongs to the model scale_invariant, on sequences",
        ),
        (["--task", "images:my.csv"], "a file of another kind"),
        (
            ["--task", "copy", "--loss", "forward", "--noise-matrix", "no.npy"],
            "no.npy: it does not exist",
        ),
        (["--task", "copy", "--optimizer", "lion"], "unknown optimizer 'lion'"),
    ],
)
def test_bad_options_begin_no_folder(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    write_table()
    assert run("train", *options, *FAST[:2], "--quiet") == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()


def test_bad_files_for_answers(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(size=60)
    assert run("train", "--task", "table:my.csv,target=answer", *FAST) == 0
    assert run("solve", "runs/train") == 2
    assert "a classifier needs a file of rows" in capsys.readouterr().err
    Path("new.csv").write_text("a\n1")
    assert run("solve", "runs/train", "new.csv") == 2
    assert "no column 'b'" in capsys.readouterr().err


def test_a_scale_invariant_model_of_a_text() -> None:
    Path("song.txt").write_text("la li la lo li " * 60)
    options = ["--model", "scale_invariant", "--optimizer", "scale_invariant_sgd"]
    assert run("train", "--task", "text:song.txt,length=16", *options, *FAST[:2], "--quiet") == 0
    assert read_json("runs/train/summary.json")["cells"][0]["cross_entropy"] < 1.5
    assert run("solve", "runs/train", "la li") == 0
