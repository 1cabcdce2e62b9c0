"""The built wheel holds everything: it works outside the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOY = Path(__file__).with_name("recipes") / "toy.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and unpack it into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder / "site")
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for name in ("_style.css", "_viewer.css", "_viewer.js"):
        assert f"gossamer/report/{name}" in names
    return folder / "site"


def run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_commands_and_a_recipe_run_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "-c", "import gossamer; print(gossamer.__file__)")
    assert where.stdout.startswith(str(installed))
    listed = run(installed, tmp_path, "-m", "gossamer", "list", "--recipes")
    assert "position-coupling" in listed.stdout, listed.stderr
    done = run(
        installed, tmp_path, "-m", "gossamer", "reproduce", str(TOY), "--jobs", "1", "--quiet"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "toy" / "report.html").exists()
    assert (installed / "gossamer" / "py.typed").exists()
