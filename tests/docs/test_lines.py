"""Every command line that README and docs show is understood by the command itself."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gossamer.cli._app import build_app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def command_lines(page: Path) -> list[str]:
    """Return the lines of unmarked and shell blocks that call `gossamer`."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    shell = [text for language, text in blocks if language in ("", "bash", "console")]
    lines = [line.removeprefix("$ ").strip() for text in shell for line in text.splitlines()]
    return [line for line in lines if line.startswith("gossamer ")]


LINES = [(page.name, line) for page in PAGES for line in command_lines(page)]


def test_there_are_lines() -> None:
    assert len(LINES) > 10


@pytest.mark.parametrize(("page", "line"), LINES)
def test_line_parses(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    words = words[: next((i for i, w in enumerate(words) if w in ("|", ">", "<")), len(words))]
    command, *_ = build_app().parse_args(words[1:], exit_on_error=False, print_error=False)
    assert callable(command)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
