"""Every recipe at small scale; minutes each, run by `make test-all`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gossamer.recipes import list_recipes, run_recipe

PAGES = Path(__file__).parents[2] / "docs" / "methods"


def verdict_on_record(name: str) -> str | None:
    """Return the verdict that the recipe's page prints for the run on record."""
    text = (PAGES / f"{name}.md").read_text()
    found = re.search(rf"gossamer reproduce {name} --scale small[^`]*`, [^*]*\*\*(.+?)\*\*", text)
    return found[1] if found else None


@pytest.mark.parametrize("name", list_recipes())
def test_a_page_prints_a_verdict_or_says_that_there_is_none(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    assert verdict_on_record(name) in ("held", "not held", "undecided") or "not run" in text


@pytest.mark.recipe
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list_recipes())
def test_recipe_repeats_the_verdict_on_its_page(name: str, tmp_path: Path) -> None:
    expected = verdict_on_record(name)
    if expected is None:
        pytest.skip(f"the page of {name} has no run on record")
    assert run_recipe(name, out=tmp_path / name, quiet=True).summary["verdict"] == expected
