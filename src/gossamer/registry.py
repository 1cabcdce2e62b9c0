"""What exists: one `MethodInfo` per method, found without importing torch.

Each theme folder keeps its methods in a torch-free file `_info.py` under the name `METHODS`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from gossamer.checks import check_choice

__all__ = ["MethodInfo", "Paper", "get_method", "list_methods"]


@dataclass(frozen=True)
class Paper:
    """Where a method comes from.

    Args:
        authors: As cited, for example `"Li et al."`.
        title: Title of the paper.
        year: Year of publication.
        venue: Conference or journal.
        arxiv: arXiv identifier, or `""`.

    Example:
        >>> Paper("Li et al.", "Functional Interpolation", 2024, "ICLR", "2310.04418").cite()
        'Li et al., ICLR 2024, arXiv 2310.04418'
    """

    authors: str
    title: str
    year: int
    venue: str
    arxiv: str = ""

    def cite(self) -> str:
        """Return the paper in one line."""
        arxiv = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f"{self.authors}, {self.venue} {self.year}{arxiv}"

    def bibtex(self) -> str:
        """Return a BibTeX entry built from the fields."""
        key = re.sub(r"\W", "", self.authors.split()[0].lower()) + str(self.year)
        fields = {"author": self.authors.replace(" et al.", " and others"), "title": self.title}
        fields |= {"year": str(self.year), "booktitle": self.venue}
        if self.arxiv:
            fields |= {"eprint": self.arxiv, "archivePrefix": "arXiv"}
        body = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items())
        return f"@inproceedings{{{key},\n{body}}}"


@dataclass(frozen=True)
class MethodInfo:
    """One method of the library.

    Args:
        name: Kebab-case name, unique; also the name of its doc page.
        theme: The sub-package that holds it, for example `"positions"`.
        title: One line for people.
        paper: Where it comes from.
        symbols: Public names exported by the sub-package.
        recipes: Names of the recipes that check its claims; may be empty.
        status: `"checked"` (a recipe ran and its verdict is on the doc page), `"partial"` or
            `"experimental"`.
        deviations: How the code differs from the paper; never empty, `("none",)` if it does not.

    Example:
        >>> get_method("fire").theme
        'positions'
    """

    name: str
    theme: str
    title: str
    paper: Paper
    symbols: tuple[str, ...]
    recipes: tuple[str, ...]
    status: Literal["checked", "partial", "experimental"]
    deviations: tuple[str, ...]


@cache
def _all_methods() -> dict[str, MethodInfo]:
    package = importlib.import_module("gossamer")
    found: dict[str, MethodInfo] = {}
    for theme in pkgutil.iter_modules(package.__path__):
        name = f"gossamer.{theme.name}._info"
        if theme.ispkg and importlib.util.find_spec(name):
            for info in importlib.import_module(name).METHODS:
                found[info.name] = info
    return dict(sorted(found.items()))


def list_methods(theme: str | None = None) -> list[MethodInfo]:
    """Return all methods, or those of one theme, sorted by name.

    Args:
        theme: A sub-package such as `"positions"`; default all.

    Raises:
        ConfigError: If no method has that theme.

    Example:
        >>> [m.name for m in list_methods("positions")][:2]
        ['alibi', 'diet']
    """
    methods = list(_all_methods().values())
    if theme is None:
        return methods
    check_choice(theme, {m.theme for m in methods}, "theme")
    return [m for m in methods if m.theme == theme]


def get_method(name: str) -> MethodInfo:
    """Return one method by name.

    Args:
        name: Kebab-case name.

    Raises:
        ConfigError: If it does not exist; the message suggests the nearest.

    Example:
        >>> get_method("position-coupling").paper.year
        2024
    """
    methods = _all_methods()
    check_choice(name, methods, "method")
    return methods[name]
