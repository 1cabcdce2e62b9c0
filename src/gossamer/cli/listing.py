"""`gossamer list`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from gossamer.cli._common import COMMON, Common, print_json

__all__ = ["run"]


def run(
    *,
    theme: str | None = None,
    recipes: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> None:
    """List methods, or recipes.

    Example: gossamer list --recipes

    Args:
        theme: Only the methods of one theme, such as positions.
        recipes: List recipes, with their budgets, in place of methods.
    """
    from rich.console import Console
    from rich.table import Table

    rows = _recipes() if recipes else _methods(theme)
    if common.json:
        print_json({"command": "list", "recipes" if recipes else "methods": rows})
        return
    table = Table(box=None, pad_edge=False)
    for head in rows[0]:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def _methods(theme: str | None) -> list[dict[str, str]]:
    from gossamer.registry import list_methods

    return [
        {"method": m.name, "theme": m.theme, "status": m.status, "title": m.title}
        for m in list_methods(theme)
    ]


def _recipes() -> list[dict[str, str]]:
    from gossamer.recipes import find_recipe, list_recipes

    rows = []
    for name in list_recipes():
        recipe = find_recipe(name)
        scales = ", ".join(f"{scale} {recipe.budget[scale]:g} min" for scale in recipe.scales)
        rows.append({"recipe": name, "scales on 2 cores": scales, "title": recipe.title})
    return rows
