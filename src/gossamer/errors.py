"""The exceptions of the library: one root, one class for each kind of fault.

Every message has four parts: what was expected (with its symbols), what came, which argument,
and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "ConvergenceWarning",
    "DataError",
    "DtypeError",
    "GossamerError",
    "MissingDependencyError",
    "ShapeError",
    "UnsupportedError",
]


class GossamerError(Exception):
    """Root of all errors raised on purpose; the command line prints one line and exits with 2."""


class ShapeError(GossamerError, ValueError):
    """A tensor or array has the wrong shape."""


class DtypeError(GossamerError, TypeError):
    """A tensor or array has the wrong dtype."""


class ConfigError(GossamerError, ValueError):
    """An option, a keyword or a line of a configuration file is wrong."""


class DataError(GossamerError, ValueError):
    """A value, a query or a file is wrong; for a file the message names file, line and column."""


class UnsupportedError(GossamerError, NotImplementedError):
    """The request is meaningful but this library cannot do it."""


class MissingDependencyError(GossamerError, ImportError):
    """An optional dependency is not installed; the command line exits with code 3.

    Args:
        package: Name to import, for example `"transformers"`.
        extra: The extra of this library that brings it, for example `"hf"`.
    """

    def __init__(self, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(
            f"this needs the package {package!r}, which is not installed; "
            f'run: pip install "gossamer[{extra}]"'
        )


class ConvergenceWarning(UserWarning):
    """An iteration ended before it reached its tolerance."""
