"""The runner: folder, determinism, resume after interruption, sabotage, several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from gossamer.errors import ConfigError, DataError, GossamerError
from gossamer.files import read_json
from gossamer.recipes import find_recipe, list_recipes, run_recipe

TOY = str(Path(__file__).with_name("toy.py"))
FILES = {
    "config.toml", "metrics.jsonl", "summary.json", "table.csv", "report.md", "report.html",
    "figures", "environment.json", "page.json", "rows.csv", "arms",
}  # fmt: skip


def run(out: Path, **options: object) -> dict:
    return run_recipe(TOY, out=out, jobs=1, quiet=True, **options).summary  # type: ignore[arg-type]


def test_the_run_folder_is_complete(tmp_path: Path) -> None:
    summary = run(tmp_path / "r")
    assert {p.name for p in (tmp_path / "r").iterdir()} == FILES
    assert list(summary) == [
        "recipe",
        "scale",
        "seeds",
        "verdict",
        "claims",
        "table",
        "seconds",
        "version",
    ]
    assert summary == read_json(tmp_path / "r" / "summary.json")
    assert summary["verdict"] == "held"
    assert [c["verdict"] for c in summary["claims"]] == ["held", "held"]
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4 * (3 + 1 + 3)
    assert json.loads(lines[0]) == {"arm": "plain", "seed": 0, "step": 1, "progress": 0.25}


def test_the_table_says_what_must_be_said(tmp_path: Path) -> None:
    table = {(row["arm"], row["variant"]): row for row in run(tmp_path / "r")["table"]}
    assert set(table) == {(a, v) for a in ("plain", "slow", "ours") for v in ("", "harder")}
    assert table["slow", ""]["note"] == "1 seed only; did not fit the trained range"
    assert table["plain", ""]["note"] == "did not fit the trained range"
    assert table["ours", ""]["note"] == ""
    assert table["ours", ""]["seeds"] == 3
    row = table["ours", ""]
    assert row["score_low_here"] <= row["score_here"] <= row["score_high_here"]
    assert "half_here" not in table["ours", "harder"]


def test_same_seeds_same_summary_whatever_the_processes(tmp_path: Path) -> None:
    def stable(summary: dict) -> dict:
        table = [{k: v for k, v in row.items() if k != "seconds_here"} for row in summary["table"]]
        return {**summary, "seconds": 0, "table": table}

    alone = run(tmp_path / "a")
    together = run_recipe(TOY, out=tmp_path / "b", jobs=2, quiet=True).summary
    assert stable(alone) == stable(together)
    rows = (tmp_path / "b" / "rows.csv").read_text().splitlines()
    assert len({line.split(",")[-1] for line in rows[1:]}) == 2  # two processes did the work
    other = run(tmp_path / "c", first_seed=5)
    assert other["seeds"] == [5, 6, 7]
    assert other["claims"][0]["ours"]["values"] != alone["claims"][0]["ours"]["values"]


def test_a_sabotaged_recipe_does_not_hold(tmp_path: Path) -> None:
    summary = run(tmp_path / "r", config={"gain": 0.0})
    assert summary["verdict"] == "not held"
    assert {c["verdict"] for c in summary["claims"]} == {"not held"}
    assert "not held" in (tmp_path / "r" / "report.md").read_text()


def test_one_seed_is_undecided(tmp_path: Path) -> None:
    summary = run(tmp_path / "r", seeds=1)
    assert [c["verdict"] for c in summary["claims"]] == ["undecided", "held"]
    assert summary["verdict"] == "undecided"


def test_a_configuration_repeats_a_run(tmp_path: Path) -> None:
    first = run(tmp_path / "a", config={"gain": 3.0}, seeds=2, first_seed=4)
    saved = tmp_path / "a" / "config.toml"
    assert tomllib.loads(saved.read_text()) == {
        "recipe": "toy", "scale": "small", "seeds": [4, 5],
        "config": {"gain": 3.0, "slow": 0.0, "fail": ""},
    }  # fmt: skip
    again = run(tmp_path / "b", config=saved)
    assert [c["ours"] for c in again["claims"]] == [c["ours"] for c in first["claims"]]
    command = read_json(tmp_path / "a" / "page.json")["command"]
    assert command.endswith(f"--config {tmp_path}/a/config.toml")


def test_a_failing_arm_keeps_what_is_done_and_resumes(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="ours, seed 0: ValueError: this arm fails on purpose"):
        run(tmp_path / "r", config={"fail": "ours"})
    done = sorted(p.parent.name for p in (tmp_path / "r").glob("arms/*/outcome.json"))
    assert done == ["plain-seed0", "plain-seed1", "plain-seed2", "slow-seed0"]
    with pytest.raises(DataError, match="begun with other settings"):
        run(tmp_path / "r", resume=True)
    with pytest.raises(DataError, match="has content"):
        run(tmp_path / "r", config={"fail": "ours"})


def test_finished_jobs_are_not_run_again(tmp_path: Path) -> None:
    run(tmp_path / "r")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "r").glob("arms/*/outcome.json")}
    (tmp_path / "r" / "arms" / "ours-seed1" / "outcome.json").unlink()
    summary = run(tmp_path / "r", resume=True)
    changed = [p.parent.name for p, stamp in stamps.items() if p.stat().st_mtime_ns != stamp]
    assert changed == ["ours-seed1"]
    assert summary["verdict"] == "held"


@pytest.mark.slow
@pytest.mark.timeout(240)  # three processes that import torch, on a machine that may be busy
def test_interrupt_and_resume_for_real(tmp_path: Path) -> None:
    """The command is interrupted by a signal as from Ctrl-C, and goes on with --resume."""
    (tmp_path / "slow.toml").write_text('recipe = "toy"\n[config]\nslow = 2.0\n')
    command = [
        sys.executable,
        "-m",
        "gossamer",
        "reproduce",
        TOY,
        "--config",
        "slow.toml",
        "--out",
        "r",
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell starts what it runs in the background with the signal ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with process:
        before = time.monotonic()
        while not list(tmp_path.glob("r/arms/*/outcome.json")) and time.monotonic() < before + 40:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        errors = process.stderr.read()
        process.wait(timeout=30)
    assert process.returncode == 130, errors
    assert "continues with --resume" in errors
    assert "Traceback" not in errors
    done, begun = (list(tmp_path.glob(f"r/arms/*/{name}")) for name in ("outcome.json", ""))
    assert 1 <= len(done) <= 3
    assert len(begun) <= len(done) + 2  # nothing began after the signal
    finished = subprocess.run(
        [*command, "--resume", "--jobs", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert read_json(tmp_path / "r" / "summary.json")["verdict"] == "held"


@pytest.mark.slow
def test_kill_leaves_no_workers_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text("[config]\nslow = 2.0\n")
    command = [
        sys.executable, "-m", "gossamer", "reproduce", TOY, "--config", "slow.toml",
        "--out", "r", "--jobs", "2",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 40
        while not list(tmp_path.glob("r/arms/*/outcome.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.kill()
    time.sleep(2.5)  # longer than a worker needs to see that its parent is gone
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("r/arms/*/*")}
    time.sleep(2.5)
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.glob("r/arms/*/*")}
    assert 1 <= len(list(tmp_path.glob("r/arms/*/outcome.json"))) < 7
    fast = run_recipe(
        TOY, out=tmp_path / "r", config=tmp_path / "slow.toml", resume=True, jobs=2, quiet=True
    )
    assert fast.summary["verdict"] == "held"


def test_a_torn_line_and_a_recipe_without_a_method(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(Path(TOY).read_text().replace('method="position-coupling"', 'method=""'))
    run_recipe(str(own), out=tmp_path / "r", jobs=1, quiet=True)
    assert "Paper:" not in (tmp_path / "r" / "report.md").read_text()
    job = tmp_path / "r" / "arms" / "ours-seed1"
    (job / "outcome.json").unlink()
    with (job / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "los')
    run_recipe(str(own), out=tmp_path / "r", jobs=1, quiet=True, resume=True)
    assert len((job / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_run_leaves_the_caller_alone(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(11)
    state = torch.get_rng_state()
    run(tmp_path / "r", seeds=1, threads=2)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == 1


def test_an_error_of_ours_names_arm_and_seed(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    text = Path(TOY).read_text().replace(
        'raise ValueError("this arm fails on purpose")',
        'from gossamer.errors import DataError\n        raise DataError("no data")',
    )  # fmt: skip
    own.write_text(text)
    with pytest.raises(GossamerError, match="plain, seed 0: no data"):
        run_recipe(str(own), out=tmp_path / "r", jobs=1, quiet=True, config={"fail": "plain"})


# --- names and files ---


def test_folders_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [run_recipe(TOY, seeds=1, jobs=1, quiet=True).folder for _ in range(2)]
    assert [str(f) for f in folders] == ["runs/toy", "runs/toy-2"]
    assert str(run_recipe(TOY, seeds=1, jobs=1, quiet=True, resume=True).folder) == "runs/toy-2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe = 'fire'", "must belong to the recipe 'toy'; got 'fire'"),
        ("sede = 3", "did you mean 'seeds'"),
        ("[config]\ngian = 3.0", "did you mean 'gain'"),
        ("[config]\ngain = 'a'", "must be of type float"),
        ("scale = 'paper'", "unknown scale of toy 'paper'"),
        ("a = ", "not valid TOML"),
        ("seeds = 3", "seeds must be a list of integers; got 3"),
        ("seeds = []", r"seeds must be a list of integers; got \[\]"),
        ("seeds = ['a']", "seed must be an integer; got 'a'"),
        ("config = 3", "must be a table of options; got 3"),
    ],
)
def test_bad_configurations(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(GossamerError, match=message):
        run(tmp_path / "r", config=path)
    assert not (tmp_path / "r").exists()


def test_bad_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'position-coupling'"):
        find_recipe("position-couplin")
    with pytest.raises(DataError, match="does not exist"):
        find_recipe(str(tmp_path / "none.py"))
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(DataError, match="expected a `RECIPE"):
        find_recipe(str(tmp_path / "empty.py"))
    (tmp_path / "broken.py").write_text("x = 1\ny = (\n")
    with pytest.raises(DataError, match=r"broken\.py, line 2: .*got SyntaxError"):
        find_recipe(str(tmp_path / "broken.py"))
    (tmp_path / "fails.py").write_text("x = 1\nimport nothing_of_that_name\n")
    with pytest.raises(DataError, match=r"fails\.py, line 2: .*ModuleNotFoundError"):
        find_recipe(str(tmp_path / "fails.py"))


@pytest.mark.parametrize("name", list_recipes())
def test_recipes_are_sound_and_load_no_torch(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.name == name
    code = (
        f"import sys; from gossamer.recipes import find_recipe; find_recipe({name!r}); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_quickstart_sabotaged_does_not_hold(tmp_path: Path) -> None:
    """With a handful of steps the real recipe must say so."""
    config = {
        "steps": 4, "rope_steps": 4, "other_steps": 2, "num_samples": 4, "table": 64,
        "test_digits": (10, 11), "baseline_layers": 1,
    }  # fmt: skip
    summary = run_recipe(
        "position-coupling", out=tmp_path / "r", jobs=1, seeds=1, quiet=True, config=config
    ).summary
    assert summary["verdict"] == "not held"
    notes = {row["arm"]: row["note"] for row in summary["table"] if not row["variant"]}
    assert set(notes.values()) == {"did not fit the trained range"}
    assert {row["variant"] for row in summary["table"]} == {"", "carry chains"}
