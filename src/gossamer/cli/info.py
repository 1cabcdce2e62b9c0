"""`gossamer info`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts import Parameter

from gossamer.cli._common import COMMON, Common, print_json

__all__ = ["run"]


def run(
    name: str,
    /,
    *,
    bibtex: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> None:
    """Show one method: paper, names to import, recipes, deviations.

    Example: gossamer info position-coupling --bibtex

    Args:
        name: A method, as `gossamer list` prints it.
        bibtex: Print the paper's BibTeX entry alone.
    """
    from gossamer.errors import ConfigError
    from gossamer.recipes import find_recipe, list_recipes
    from gossamer.registry import get_method, list_methods

    methods = [method.name for method in list_methods()]
    if name not in methods and name in list_recipes():
        raise ConfigError(
            f"{name!r} is a recipe; got it where a method is expected. See `gossamer info "
            f"{find_recipe(name).method}`, or check it with `gossamer reproduce {name}`."
        )
    method = get_method(name)
    if bibtex:
        print(method.paper.bibtex())
    elif common.json:
        print_json({"command": "info", **dataclasses.asdict(method)})
    else:
        print(f"{method.title}\n")
        print(f"paper       {method.paper.title}\n            {method.paper.cite()}")
        print(f"status      {method.status}")
        print(f"import      from gossamer.{method.theme} import {', '.join(method.symbols)}")
        for recipe in method.recipes:
            print(f"check       gossamer reproduce {recipe}")
        for number, deviation in enumerate(method.deviations):
            print(f"{'deviations' if number == 0 else '':12}{deviation}")
