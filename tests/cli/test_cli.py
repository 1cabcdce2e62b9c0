"""Every command as a user runs it: output, exit codes, one line for an error, a light start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.files import read_json

COMMANDS = (
    "list", "info", "doctor", "reproduce", "report", "view", "train", "solve", "train-retriever",
    "retrieve", "evaluate",
)  # fmt: skip
TOY = str(Path(__file__).parents[1] / "recipes" / "toy.py")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a model too small to be right."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = folder.parent / "job.toml"
    config.write_text(
        '[task]\nname = "addition"\ndigits = [1, 2]\n'
        '[model]\ndim = 16\nnum_heads = 2\nfeed_forward = "gelu"\n'
        "[train]\nsteps = 10\nlog_every = 5\n"
    )
    assert (
        run("train", "--config", str(config), "--out", str(folder), "--quiet", "--device", "cpu")
        == 0
    )
    return folder


# --- start ---


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["reproduce", "--help"], ["list"], ["info", "fire"]]
)
def test_nothing_heavy_is_loaded(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom gossamer.cli import main\n"
        f"try:\n    main({arguments!r})\n"
        "except SystemExit as stopped:\n    assert not stopped.code\n"
        "heavy = {'torch', 'sklearn', 'matplotlib', 'scipy', 'numba'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_the_common_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--help") == 0
    out = capsys.readouterr().out
    assert f"Example: gossamer {command}" in " ".join(out.split())
    for option in ("--seed", "--device", "--threads", "--out", "--json", "--quiet", "--debug"):
        assert option in out


def test_help_lists_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    marks = ["─ Evidence", "│ reproduce", "─ Sequences", "│ train", "─ Retrieval", "│ evaluate"]
    assert [out.index(mark) for mark in marks] == sorted(out.index(mark) for mark in marks)
    assert all(command in out for command in COMMANDS)
    for line in ("Train a small exact model on a task", "Answer queries with a trained model"):
        assert line in out


def test_the_modules_run(capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("gossamer", "gossamer.cli"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "0.1.0"


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["reproduc"], 2, 'Did you mean "reproduce"'),
        (["reproduce", "position-couplin"], 2, "did you mean 'position-coupling'"),
        (["reproduce", "position-coupling", "--scale", "smal"], 2, 'Did you mean "small"'),
        (
            ["reproduce", "position-coupling", "--scale", "paper"],
            2,
            "unknown scale of position-coupling",
        ),
        (["reproduce", "position-coupling", "--sede", "3"], 2, "--seed"),
        (["reproduce", TOY, "--seeds", "0"], 2, "seeds must be >= 1; got 0"),
        (["reproduce", TOY, "--config", "none.toml"], 2, "none.toml does not exist"),
        (["info", "fir"], 2, "did you mean 'fire'"),
        (["info", "minesweeper"], 2, "gossamer info position-coupling"),
        (["reproduce", "alibi"], 2, "'alibi' is a method without a recipe of its own name"),
        (["list", "--theme", "position"], 2, "did you mean 'positions'"),
        (["train"], 2, "needs --task or a --config"),
        (["train", "--resume"], 2, "needs --task or a --config"),
        (["train", "--resume", "--out", "none"], 2, "config.toml does not exist"),
        (["train", "--task", "addition:digits=5-2"], 2, "1 <= lo <= hi; got 5-2"),
        (["train", "--task", "adition"], 2, "did you mean 'addition'"),
        (["train", "--task", "addition", "--positions", "ropee"], 2, "did you mean 'rope'"),
        (["train", "--task", "addition", "--steps", "0"], 2, "steps must be >= 1; got 0"),
        (["solve", "none", "1+2"], 2, "none is no folder"),
        (["report", "none"], 2, "is not a run folder"),
        (["reproduce", TOY, "--seed", "-1"], 2, "seed must be >= 0"),
        (["reproduce", TOY, "--jobs", "0"], 2, "jobs must be >= 1"),
        (["reproduce", TOY, "--threads", "0"], 2, "threads must be >= 1"),
        (["reproduce", TOY, "--out", __file__], 2, "is a file"),
        (["reproduce", TOY, "--out", "/proc/nothing"], 2, "/proc/nothing"),
        (["train", "--task", "addition", "--seed", "99999999999999999999"], 2, "seed must be"),
        (["train", "--task", "addition:digits=1-99999999999999999999"], 2, "digits must be"),
        (["train", "--task", "addition", "--positions", "coupled"], 2, "needs the option 'max_pos"),
    ],
)
def test_user_errors_are_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == code
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("gossamer: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in captured.err


def test_debug_shows_the_error() -> None:
    from gossamer.errors import ConfigError

    with pytest.raises(ConfigError):
        main(["info", "fir", "--debug"])


def test_a_missing_extra_and_an_internal_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gossamer import registry
    from gossamer.errors import MissingDependencyError

    def missing(name: str) -> None:
        raise MissingDependencyError("transformers", "hf")

    monkeypatch.setattr(registry, "get_method", missing)
    assert run("info", "fire") == 3
    assert 'pip install "gossamer[hf]"' in capsys.readouterr().err

    def broken(name: str) -> None:
        raise RuntimeError("oh")

    monkeypatch.setattr(registry, "get_method", broken)
    assert run("info", "fire") == 4
    assert "internal fault: RuntimeError: oh" in capsys.readouterr().err


# --- evidence ---


def test_list_and_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    fire = next(method for method in methods if method["method"] == "fire")
    assert fire["theme"] == "positions"
    assert run("list", "--recipes") == 0
    assert "position-coupling-table" in capsys.readouterr().out
    assert run("info", "position-coupling") == 0
    out = capsys.readouterr().out
    assert "gossamer reproduce position-coupling-table" in out
    assert "arXiv 2405.20671" in out
    assert run("info", "fire", "--bibtex") == 0
    bibtex = capsys.readouterr().out
    assert bibtex.startswith("@inproceedings{li2024,")
    assert "eprint = {2310.04418}" in bibtex


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"]
    assert facts["writable"] == "yes"
    assert facts["warnings"] == [] or "CUDA" in facts["warnings"][0]


@pytest.mark.parametrize(("gain", "code", "verdict"), [(1.0, 0, "held"), (0.0, 1, "not held")])
def test_reproduce(
    gain: float, code: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.toml").write_text(f"[config]\ngain = {gain}\n")
    assert run("reproduce", TOY, "--config", "c.toml", "--jobs", "1") == code
    captured = capsys.readouterr()
    assert f"verdict: {verdict}" in captured.out
    assert "about 1 min on 2 cores" in captured.err
    assert Path("runs/toy/report.html").exists()
    assert (
        run("reproduce", TOY, "--config", "c.toml", "--jobs", "1", "--resume", "--json", "--quiet")
        == code
    )
    captured = capsys.readouterr()
    assert json.loads(captured.out) == read_json("runs/toy/summary.json")
    assert captured.err == ""


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    for out in ("a", "b"):
        run("reproduce", TOY, "--jobs", "1", "--seeds", "2", "--out", out)
    page = Path("a/report.html")
    before = page.read_bytes()
    page.unlink()
    assert run("report", "a") == 0
    assert page.read_bytes() == before
    assert run("report", "a", "b", "--json") == 0
    assert Path("runs/report/report.html").exists()


# --- sequences ---


def test_train_leaves_a_run_folder(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        "config.toml", "metrics.jsonl", "summary.json", "table.csv", "report.md", "report.html",
        "figures", "environment.json", "model.safetensors", "config.json", "checkpoint.safetensors",
        "rows.csv", "page.json",
    }  # fmt: skip
    assert {p.name for p in trained.iterdir()} == expected
    summary = read_json(trained / "summary.json")
    assert list(summary)[:5] == ["command", "version", "seconds", "seed", "files"]
    assert [cell["digits"] for cell in summary["cells"]] == [2, 4, 6, 10, 20]
    assert run("report", str(trained)) == 0
    html = (trained / "report.html").read_text()
    assert "Training run: addition" in html
    assert "verdict" not in html.split("</style>")[1].split("<footer")[0].lower()


def test_train_by_options_and_resume(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--task",
        "addition:digits=1-2,carry_chains=0.5",
        "--positions",
        "rope",
        "--steps",
        "6",
    ]
    common = ["--batch-size", "4", "--seed", "3", "--lr", "0.01", "--quiet", "--device", "cpu"]
    assert run("train", *options, *common) == 0
    first = read_json("runs/train/summary.json")
    assert run("train", *options, *common, "--resume", "--json") == 0
    assert read_json("runs/train/summary.json")["cells"] == first["cells"]
    assert not Path("runs/train-2").exists()
    assert run("train", "--resume", "--quiet") == 0  # the run's own settings
    assert run("train", "--task", "addition", "--positions", "coupled") == 2
    assert not Path("runs/train-2").exists()
    text = Path("runs/train/config.toml").read_text()
    for line in (
        "carry_chains = 0.5",
        'positions = "rope"',
        "lr = 0.01",
        "batch_size = 4",
        "seed = 3",
    ):
        assert line in text
    assert run("train", *options, *common[:4], "--resume", "--quiet", "--lr", "0.02") == 2
    assert "begun with other settings" in capsys.readouterr().err


def test_solve(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("solve", str(trained), "1+2=") == 1  # a model of ten steps is wrong
    captured = capsys.readouterr()
    assert "1 of 1 answers are wrong" in captured.err
    assert len(captured.out.splitlines()) == 1
    assert run("solve", str(trained), "1+2=", "--no-check") == 0
    assert capsys.readouterr().err == ""

    Path("q.txt").write_text("1+2\n\n30+4\n")
    assert run("solve", str(trained), "q.txt", "--json", "--out", "answers") == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["query"] for row in rows] == ["1+2", "30+4"]
    assert rows == [
        json.loads(line) for line in Path("answers/answers.jsonl").read_text().splitlines()
    ]
    assert all(row["correct"] == (row["answer"] == str(eval(row["query"]))) for row in rows)

    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("1+2\n3+4\n"))
    assert run("solve", str(trained), "-", "--no-check") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


BAD_JOBS = [
    '[model]\ndim = "a"', "[model]\ndim = 16.5", "[model]\npositions = 3", "[model]\nattention = 3",
    "[model]\nattention = {head_dim = -4}", "[model]\nattention = {num_kv_heads = -2}", "model = 3",
    "train = 3", "batch_size = 2.5", 'seed = "x"', "[train]\nsteps = 2.5", "[train]\nbetas = 3",
    "[train]\nbetas = [0.9]", "[train]\nbetas = [0.9, 1.0]", "[train]\nlr = inf",
    "[train]\ncheckpoint_every = 1.5", '[model]\npositions = {name = "fire", share = "no"}',
    '[model]\npositions = {name = "fire", init_c = nan}', "[model]\npositions = {name = 5}",
]  # fmt: skip
BAD_TASKS = [
    "task = 3", 'task = "addition"', "[task]\nname = 5", '[task]\nname = "addition"\ndigits = 3.7',
    '[task]\nname = "addition"\ndigits = true', '[task]\nname = "addition"\ndigits = [1.5, 2.5]',
    '[task]\nname = "addition"\nmax_position = "a"', '[task]\nname = "addition"\noperands = 2.5',
    '[task]\nname = "addition"\ncarry_chains = "x"',
]  # fmt: skip


@pytest.mark.parametrize(
    "text", [*(f'{t}\n[task]\nname = "addition"' for t in BAD_JOBS), *BAD_TASKS]
)
def test_wrong_types_in_a_job_are_user_errors(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.toml").write_text(text + "\n")
    assert run("train", "--config", "job.toml", "--quiet") == 2, text
    assert "must be" in capsys.readouterr().err
    assert not Path("runs").exists() or not list(Path("runs").glob("*/*"))


def test_solve_takes_long_numbers_and_named_folders(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("solve", str(trained), "9" * 200 + "+" + "8" * 200, "--no-check") == 0
    run("reproduce", TOY, "--jobs", "1", "--seeds", "1", "--out", "toy")
    capsys.readouterr()
    assert run("solve", "toy", "1+2") == 2
    assert "is one of `gossamer reproduce`, which keeps no model" in capsys.readouterr().err
    Path("binary.txt").write_bytes(b"1+2\n\xff\xfe\n")
    assert run("solve", str(trained), "binary.txt") == 2
    assert "expected UTF-8 text" in capsys.readouterr().err


def test_json_of_one_seed_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    run("reproduce", TOY, "--jobs", "1", "--seeds", "1", "--json", "--quiet")
    out = capsys.readouterr().out
    assert "NaN" not in out
    assert json.loads(out)["claims"][0]["interval"] == [None, None]


def test_a_table_limits_what_is_tested(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text(
        '[task]\nname = "addition"\ndigits = [1, 3]\n[model]\ndim = 16\nnum_heads = 2\n'
        'positions = {name = "learned", max_position = 30}\n[train]\nsteps = 2\n'
    )
    assert run("train", "--config", "job.toml", "--quiet", "--device", "cpu") == 0
    cells = read_json("runs/train/summary.json")["cells"]
    assert [cell["digits"] for cell in cells] == [3, 6]


def test_the_option_wins_over_the_seed_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.toml").write_text("seeds = [7, 9]\n")
    assert run("reproduce", TOY, "--config", "c.toml", "--jobs", "1", "--out", "a") == 0
    assert read_json("a/summary.json")["seeds"] == [7, 9]
    assert read_json("a/page.json")["command"].endswith("--config a/config.toml")
    assert (
        run("reproduce", TOY, "--config", "c.toml", "--jobs", "1", "--out", "b", "--seed", "3") == 0
    )
    assert read_json("b/summary.json")["seeds"] == [3, 4, 5]


def test_solve_names_the_bad_line(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("q.txt").write_text("1+2\n\n\n1+b\n")
    assert run("solve", str(trained), "q.txt") == 2
    captured = capsys.readouterr()
    assert "q.txt, line 4: query must hold digits" in captured.err
    assert captured.out == ""
    Path("empty.txt").write_text("\n")
    assert run("solve", str(trained), "empty.txt") == 2
    assert "must hold one query a line" in capsys.readouterr().err
