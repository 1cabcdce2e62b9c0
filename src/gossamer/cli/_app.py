"""The tree of commands; their modules are light and load what is heavy inside."""

from __future__ import annotations

import importlib

from cyclopts import App, Group

from gossamer._version import __version__

__all__ = ["build_app"]

_EVIDENCE, _SEQUENCES = Group("Evidence", sort_key=1), Group("Sequences", sort_key=2)
_RETRIEVAL, _NETWORKS = Group("Retrieval", sort_key=3), Group("Networks", sort_key=6)

# name, module and group; the function is `run` in that module, its docstring the help. A module
# named `list` would hide the built-in in this package.
_COMMANDS = (
    ("list", "listing", _EVIDENCE),
    ("info", "info", _EVIDENCE),
    ("doctor", "doctor", _EVIDENCE),
    ("reproduce", "reproduce", _EVIDENCE),
    ("report", "report", _EVIDENCE),
    ("view", "view", _EVIDENCE),
    ("train", "train", _SEQUENCES),
    ("solve", "solve", _SEQUENCES),
    ("train-retriever", "train_retriever", _RETRIEVAL),
    ("retrieve", "retrieve", _RETRIEVAL),
    ("rank", "rank", _RETRIEVAL),
    ("evaluate", "evaluate", _RETRIEVAL),
    ("serve", "serve", _RETRIEVAL),
    ("audit", "audit", _NETWORKS),
)


def build_app() -> App:
    """Return the application."""
    app = App(
        name="gossamer",
        help=(
            "Research on big models and big matrices: claims checked on your machine. "
            "Start with: gossamer reproduce position-coupling"
        ),
        version=__version__,
        suppress_keyboard_interrupt=False,
        help_format="plaintext",
        group_commands=Group("Other", sort_key=8),
    )
    for name, module, group in _COMMANDS:
        command = importlib.import_module(f"gossamer.cli.{module}").run
        app.command(command, name=name, group=group)
    return app
