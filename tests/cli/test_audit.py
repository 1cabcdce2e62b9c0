"""`gossamer audit` on tables, saved outputs and models: findings, pages, resume, bad targets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.attention import AttentionPattern, check_patterns, rank_report
from gossamer.cli import main
from gossamer.files import read_json
from gossamer.layers import sparsity_report
from gossamer.measures import calibration_error, deviation_report, generalization_report
from gossamer.report import read_table
from gossamer.train import load_run

FAST = ["--quiet", "--quick"]
MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 8, bias=False), nn.ReLU(), nn.Linear(8, 2))

def other():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.LayerNorm(4), nn.Linear(4, 2))

def nothing():
    return 3

made = build()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def write_table(size: int = 200) -> list[int]:
    """Write a table in which every tenth label is wrong; return the lines of those."""
    random = np.random.default_rng(0)
    x = random.standard_normal((size, 2)) + 4 * (np.arange(size) % 2)[:, None]
    rows, wrong = [], []
    for n, (a, b) in enumerate(x):
        odd = n % 2
        if n % 10 == 0:
            odd, wrong = 1 - odd, [*wrong, n + 2]
        rows.append(f"{a:.3f},{b:.3f},{('even', 'odd')[odd]}")
    Path("my.csv").write_text("\n".join(["a,b,kind", *rows]))
    return wrong


def write_outputs(name: str, logits: np.ndarray, **more: np.ndarray) -> str:
    np.savez(name, logits=logits, **more)
    return name


def write_images() -> str:
    random = np.random.default_rng(0)
    labels = np.arange(120) % 2
    images = np.clip(random.normal(60 + 120 * labels[:, None, None], 10, (120, 3, 3)), 0, 255)
    np.savez("dots.npz", images=images.astype(np.uint8), labels=labels)
    return "dots.npz"


def test_wrong_labels_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = write_table()
    assert run("audit", "my.csv,target=kind", *FAST) == 0
    said = capsys.readouterr().out
    rows = [row for row in read_table("runs/audit/rows.csv") if row["kind"] == "label"]
    lines = [int(row["where"].rpartition("line ")[2]) for row in rows]
    assert len(set(lines) & set(wrong)) >= 0.5 * len(wrong)
    assert len(set(lines) - set(wrong)) <= 0.05 * len(wrong)  # chance: nine times as many
    assert f"labels: {len(rows)} of 200 rows are suspicious" in said
    assert f"  my.csv, line {lines[0]}: {rows[0]['given']} -> {rows[0]['suggested']}" in said
    page = Path("runs/audit/report.html").read_text()
    assert "Rows whose label is probably wrong" in page
    assert "<dt>Estimated wrong labels</dt>" in page
    for text in ("Each method", "(ours)", "Here and paper", "(trained)"):
        assert text not in page
    assert f"my.csv, line {lines[0]}" in page
    assert f"my.csv, line {lines[0]}" in Path("runs/audit/report.md").read_text()
    details = read_json("runs/audit/summary.json")["checks"]["labels"]
    assert details["num_suspicious"] == len(rows)


def test_saved_outputs_with_teacher_and_control(capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    teacher = 3 * random.standard_normal((300, 4))
    labels = teacher.argmax(1)
    student = 2 * teacher
    control = teacher + random.standard_normal((300, 4))
    for name, logits in (("s", student), ("t", teacher), ("c", control)):
        write_outputs(f"{name}.npz", logits, labels=labels, ids=np.arange(300))
    files = ["s.npz", "--teacher", "t.npz", "--control", "c.npz"]
    assert run("audit", *files, "--quiet") == 0
    said = capsys.readouterr().out
    checks = read_json("runs/audit/summary.json")["checks"]
    p = torch.tensor(student).softmax(1)
    assert checks["calibration"] == pytest.approx(calibration_error(p, labels).to_dict())
    expected = deviation_report(teacher, student, labels=labels, control_logits=control)
    assert checks["deviations"]["student"]["slope"] == pytest.approx(expected.slope)
    assert "deviations of the student: slope" in said
    assert "deviations of the control: slope" in said
    drawn = [row for row in read_table("runs/audit/rows.csv") if row["kind"] == "decile"]
    assert {row["arm"] for row in drawn} == {"audited", "control", "equal"}
    tenths = [row for row in drawn if row["arm"] == "audited"]
    assert [row["mean"] for row in tenths] == pytest.approx(
        [one["mean"] for one in expected.student.deciles]
    )
    assert Path("runs/audit/figures/deviations.svg").exists()
    table = read_json("runs/audit/summary.json")["table"]
    assert [row["arm"] for row in table] == ["audited", "control"]
    assert table[1]["slope_here"] == pytest.approx(expected.control.slope)  # not on the screen only
    assert run("audit", *files, "--quiet", "--seed", "4", "--checks", "calibration") == 0
    assert read_json("runs/audit-2/page.json")["command"].endswith("--checks calibration --seed 4")

    # rows in another order are not compared
    write_outputs("t.npz", teacher, labels=labels, ids=np.arange(300)[::-1])
    assert run("audit", *files, "--quiet") == 2
    assert "same order" in capsys.readouterr().err
    assert run("audit", "s.npz", "--teacher", "t.npz", "--checks", "calibration", "--quiet") == 0
    assert "deviations" not in capsys.readouterr().out


def test_why_norms_are_undefined_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    images, labels = random.random((60, 3, 3), dtype=np.float32), random.integers(0, 2, 60)
    np.savez("noise.npz", images=images, labels=labels)
    Path("mine.py").write_text(MODEL)
    assert run("audit", "mine.py:build", "--data", "noise.npz", *FAST) == 0
    said = capsys.readouterr().out
    assert said.count("undefined:") == 1
    assert "l2 norm, l1 path norm, l2 path norm, spectral norm: undefined" in said
    assert "are given another class than their label" in said


def test_no_control_is_said_on_terminal_and_page(capsys: pytest.CaptureFixture[str]) -> None:
    teacher = np.random.default_rng(0).standard_normal((100, 3))
    write_outputs("s.npz", 2 * teacher)
    write_outputs("t.npz", teacher)
    assert run("audit", "s.npz", "--teacher", "t.npz", "--quiet") == 0
    assert "No control was given" in capsys.readouterr().out
    assert "No control was given" in Path("runs/audit/report.html").read_text()


def test_a_run_is_measured_on_its_own_rows_and_not_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = write_images()
    train = ["--steps", "150", "--lr", "0.005", "--quiet"]
    assert run("train", "--task", f"images:{images}", *train) == 0
    before = Path("runs/train/model.safetensors").read_bytes()
    cell = read_json("runs/train/summary.json")["cells"][0]
    capsys.readouterr()
    assert run("audit", "runs/train", *FAST) == 0
    said = capsys.readouterr().out
    assert Path("runs/train/model.safetensors").read_bytes() == before
    checks = read_json("runs/audit/summary.json")["checks"]
    assert checks["calibration"]["num_rows"] == cell["num_samples"] == 24
    assert checks["calibration"]["error"] == pytest.approx(cell["ece"])
    assert checks["generalization"]["num_examples"] == 96
    assert set(checks["generalization"]["values"]) == {"l2", "l1_path", "l2_path", "spectral"}
    assert "generalization, on 96 training rows: l2 norm" in said
    with np.load(images) as arrays:
        changed = {"images": arrays["images"], "labels": arrays["labels"] + 1}
    np.savez(images, **changed)
    assert run("audit", "runs/train", *FAST) == 2
    assert "they were changed since then" in capsys.readouterr().err
    for text in ("Measures, and simple figures beside them", "Layers", "hidden.0", "vacuous"):
        assert text in Path("runs/audit/report.html").read_text()


def test_a_model_of_a_function_with_data(capsys: pytest.CaptureFixture[str]) -> None:
    images = write_images()
    Path("mine.py").write_text(MODEL)
    for name in ("build", "made"):
        options = ["--data", images, "--checks", "generalization", *FAST]
        assert run("audit", f"mine.py:{name}", *options) == 0
    assert "undefined: the margin" in capsys.readouterr().out
    space: dict = {}
    exec(MODEL, space)
    with np.load(images) as arrays:
        x = torch.tensor(arrays["images"][:, None] / 255, dtype=torch.float32)
        y = torch.tensor(arrays["labels"])
    expected = generalization_report(space["build"](), (x, y), measures=["l2"])
    found = read_json("runs/audit/summary.json")["checks"]["generalization"]
    assert found["norms"]["l2"] == pytest.approx(expected.norms["l2"])


def test_a_model_that_the_norms_do_not_know_has_the_other_measures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = write_images()
    Path("mine.py").write_text(MODEL)
    options = ["--data", images, "--checks", "generalization", *FAST]
    assert run("audit", "mine.py:other", *options) == 0
    said = capsys.readouterr().out
    assert "The norms have no rule for this model" in said
    assert "LayerNorm" in said
    found = read_json("runs/audit/summary.json")["checks"]["generalization"]["values"]
    assert set(found) == {"sharpness", "pac_bayes"}
    assert all(value > 0 for value in found.values())


def test_another_table_is_read_with_the_columns_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_table()
    train = ["--steps", "60", "--quiet"]
    assert run("train", "--task", "table:my.csv,target=kind", *train) == 0
    Path("new.csv").write_text("b,a,kind\n4,4,odd\n0,0,even\n4,3,odd")
    data = ["--data", "table:new.csv,target=kind", "--checks", "calibration", "--quiet"]
    assert run("audit", "runs/train", *data) == 0
    assert read_json("runs/audit/summary.json")["checks"]["calibration"]["accuracy"] == 1.0
    Path("new.csv").write_text("b,a,kind\n4,4,odd\n0,0,strange")
    assert run("audit", "runs/train", *data) == 2
    assert "classes must be those of the run; got 'strange'" in capsys.readouterr().err


def test_a_sequence_model_and_a_classifier_have_their_own_checks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = ["--steps", "3", "--batch-size", "4", "--quiet"]
    assert run("train", "--task", "copy:length=2-4", *train) == 0
    capsys.readouterr()
    assert run("audit", "runs/train", "--quiet") == 0
    said = capsys.readouterr().out
    for text in ("variance: the spread", "precision: 0 of", "head_size:", "active"):
        assert text in said
    checks = read_json("runs/audit/summary.json")["checks"]
    model, task = load_run("runs/train")
    draw = torch.Generator().manual_seed(0)
    batch = task.grid()[0].task.sample(64, generator=draw, split="test")
    assert checks["sparsity"]["rows"] == sparsity_report(model.eval(), [batch]).rows()
    assert checks["head_size"]["rows"] == rank_report(model, batch).rows()
    lengths = checks["variance"]["num_samples"]
    assert len(lengths) > 1
    assert run("audit", "runs/train", "--data", "x.npz", "--quiet") == 2
    assert "--data gives rows to a classifier" in capsys.readouterr().err


def test_a_pattern_of_attention(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("band.npy", np.abs(np.subtract.outer(range(6), range(6))) <= 1)
    assert run("audit", "band.npy", "--quiet") == 0
    assert "pattern of 6 tokens, 16 pairs: satisfied" in capsys.readouterr().out
    star = np.eye(5, dtype=bool)
    star[0] = star[:, 0] = True
    np.save("star.npy", star)
    assert run("audit", "star.npy", "--quiet") == 0
    assert "violated" in capsys.readouterr().out
    assert "Entries that would repair it" in Path("runs/audit-2/report.html").read_text()
    details = read_json("runs/audit-2/summary.json")["checks"]["pattern"]
    assert details == check_patterns([AttentionPattern.from_mask(star)]).to_dict()
    np.save("odd.npy", np.ones((2, 3), bool))
    assert run("audit", "odd.npy", "--quiet") == 2
    assert "must be square" in capsys.readouterr().err


def test_a_broken_off_audit_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    images = write_images()
    Path("mine.py").write_text(MODEL)
    audit = ["audit", "mine.py:build", "--data", images, *FAST]
    calls = {"calibration": 0}

    def broken(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    from gossamer.cli import _audit_checks, _audit_model

    plain, kept = _audit_checks.calibration, _audit_model.generalization

    def counted(*args: object, **kwargs: object) -> object:
        calls["calibration"] += 1
        return plain(*args, **kwargs)

    monkeypatch.setattr(_audit_checks, "calibration", counted)
    monkeypatch.setattr(_audit_model, "generalization", broken)
    assert run(*audit) == 130
    assert not Path("runs/audit/summary.json").exists()
    monkeypatch.setattr(_audit_model, "generalization", kept)
    assert run(*audit, "--resume") == 0
    assert calls["calibration"] == 1
    assert set(read_json("runs/audit/summary.json")["checks"]) == {"calibration", "generalization"}
    whole = read_json("runs/audit/summary.json")["checks"]
    assert run(*audit, "--out", "again") == 0
    assert json.dumps(read_json("again/summary.json")["checks"]) == json.dumps(whole)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "TARGET must be a run folder"),
        (["none.csv"], "none.csv does not exist"),
        (["my.csv"], "target must be a column of my.csv"),
        (["my.csv,target=kind", "--checks", "lables"], "did you mean 'labels'"),
        (["my.csv,target=kind", "--data", "x.npz"], "a table has its own rows"),
        (["my.csv,target=kind", "--teacher", "t.npz"], "--teacher and --control go with"),
        (["none.npz"], "none.npz must be an .npz with logits"),
        (["dots.npz"], "must hold the array logits"),
        (["bare.npz"], "must hold labels"),
        (["bare.npz", "--control", "bare.npz"], "Give --teacher too"),
        (["mine.py:build"], "got no --data"),
        (["mine.py:nothing", "--data", "dots.npz"], "must return a torch.nn.Module; got int"),
        (["mine.py:absent", "--data", "dots.npz"], "has no function 'absent'"),
        (["other.py:build", "--data", "dots.npz"], "there is no file other.py"),
        (["no_such_module:build", "--data", "dots.npz"], "cannot be imported"),
    ],
)
def test_bad_targets(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    write_table()
    write_images()
    write_outputs("bare.npz", np.zeros((3, 2)))
    Path("mine.py").write_text(MODEL)
    assert run("audit", *arguments, *FAST) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()
