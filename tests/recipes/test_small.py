"""Every recipe at small scale; minutes each, run by `make test-all`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.recipes import list_recipes, run_recipe


@pytest.mark.recipe
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list_recipes())
def test_recipe_holds_at_small_scale(name: str, tmp_path: Path) -> None:
    assert run_recipe(name, out=tmp_path / name, quiet=True).summary["verdict"] == "held"
