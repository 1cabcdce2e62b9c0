"""One-line checks on what a user can get wrong; each raises an error of `gossamer.errors`.

They work on anything with a `shape` (NumPy, torch), so that this file imports neither.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gossamer.errors import ConfigError, DataError, ShapeError

__all__ = [
    "check_choice",
    "check_finite",
    "check_given",
    "check_keys",
    "check_range",
    "check_same_shape",
    "check_shape",
    "check_table",
]


def _suggest(value: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def check_shape(value: Any, expected: Sequence[int | None], name: str) -> None:
    """Check the shape of an array; `None` in `expected` stands for any size.

    Args:
        value: Anything with a `shape`.
        expected: One entry per axis, a size or `None`.
        name: The argument's name, for the message.

    Raises:
        ShapeError: If the number of axes or a size differs.

    Example:
        >>> import numpy as np
        >>> check_shape(np.zeros((2, 3)), (2, None), "x")
    """
    shape = tuple(value.shape)
    if len(shape) != len(expected) or any(
        e is not None and e != s for e, s in zip(expected, shape, strict=True)
    ):
        wanted = "(" + ", ".join("any" if e is None else str(e) for e in expected) + ")"
        raise ShapeError(
            f"{name} must have the shape {wanted}; got {shape}. Reshape {name} before the call."
        )


def check_same_shape(a: Any, b: Any, names: tuple[str, str]) -> None:
    """Check that two arrays have equal shapes; nothing is ever broadcast silently.

    Args:
        a: Anything with a `shape`.
        b: Anything with a `shape`.
        names: The two arguments' names, for the message.

    Raises:
        ShapeError: If the shapes differ.

    Example:
        >>> import numpy as np
        >>> check_same_shape(np.zeros(3), np.ones(3), ("logits", "labels"))
    """
    if tuple(a.shape) != tuple(b.shape):
        raise ShapeError(
            f"{names[1]} must have the shape of {names[0]}, {tuple(a.shape)}; got "
            f"{tuple(b.shape)}. "
            "Shapes are never broadcast here: reshape one of them."
        )


def check_choice(value: str, choices: Iterable[str], name: str) -> None:
    """Check that a name is among the known ones; the message suggests the nearest.

    Args:
        value: What the user gave.
        choices: The known names.
        name: What the name stands for, for example `"position encoding"`.

    Raises:
        ConfigError: If `value` is unknown.

    Example:
        >>> check_choice("fire", ["alibi", "fire"], "position encoding")
    """
    known = sorted(choices)
    if value not in known:
        raise ConfigError(
            f"unknown {name} {value!r}{_suggest(str(value), known)} Known: {', '.join(known)}."
        )


def check_keys(keys: Iterable[str], known: Iterable[str], name: str) -> None:
    """Check the keys of a table of options; unknown ones are errors, never ignored.

    Args:
        keys: The keys the user gave.
        known: The keys that exist.
        name: What the table is, for example `"[train] of run.toml"`.

    Raises:
        ConfigError: At the first unknown key, with the nearest known one.

    Example:
        >>> check_keys(["steps"], ["steps", "lr"], "config")
    """
    options = sorted(known)
    for key in keys:
        if key not in options:
            raise ConfigError(
                f"unknown key {key!r} in {name}{_suggest(key, options)} Known: "
                f"{', '.join(options)}."
            )


def check_given(options: Mapping[str, Any], key: str, name: str) -> None:
    """Check that a needed option is there.

    Args:
        options: What the user gave.
        key: The option that must be among them.
        name: What the options belong to, for the message.

    Raises:
        ConfigError: If it is missing.

    Example:
        >>> check_given({"max_position": 40}, "max_position", "position encoding 'learned'")
    """
    if key not in options:
        got = ", ".join(sorted(options)) or "none"
        raise ConfigError(f"{name} needs the option {key!r}; got {got}. Add {key}=...")


def check_range(
    value: float,
    name: str,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    integer: bool = False,
) -> None:
    """Check that a value is a finite number in a range.

    Args:
        value: The number; NaN and infinity lie in no range, truth values are no numbers.
        name: The argument's name, for the message.
        low: Least value, or `None`.
        high: Greatest value, or `None`.
        open_low: If true, `low` itself is refused.
        integer: If true, only integers are accepted.

    Raises:
        ConfigError: If the value is no such number, or outside.

    Example:
        >>> check_range(0.5, "dropout", low=0.0, high=1.0)
    """
    kind = int if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        wanted = "an integer" if integer else "a number"
        raise ConfigError(f"{name} must be {wanted}; got {value!r}. Change {name}.")
    too_low = low is not None and not (value > low if open_low else value >= low)
    too_high = high is not None and not value <= high
    if too_low or too_high or not math.isfinite(value):
        parts = ["finite"] if not math.isfinite(value) and low is None and high is None else []
        if low is not None:
            parts.append(f"{'>' if open_low else '>='} {low:g}")
        if high is not None:
            parts.append(f"<= {high:g}")
        raise ConfigError(f"{name} must be {' and '.join(parts)}; got {value}. Change {name}.")


def check_table(value: Any, name: str) -> None:
    """Check that a value is a table of options.

    Args:
        value: What the user gave.
        name: What it is, for example `"[model] of run.toml"`.

    Raises:
        ConfigError: If it is none.

    Example:
        >>> check_table({"dim": 64}, "[model]")
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a table of options; got {value!r}. Write it as a table.")


def check_finite(value: Any, name: str) -> None:
    """Check that an array or tensor holds no NaN and no infinity.

    Args:
        value: NumPy array, torch tensor or number.
        name: The argument's name, for the message.

    Raises:
        DataError: If any entry is not finite; the message counts them.

    Example:
        >>> import numpy as np
        >>> check_finite(np.ones(3), "x")
    """
    bad = (value != value) | (value == float("inf")) | (value == float("-inf"))
    count = int(bad.sum()) if hasattr(bad, "sum") else int(bad)
    if count:
        raise DataError(
            f"{name} must be finite; got {count} NaN or infinite entries. "
            f"Remove or replace them in {name} before the call."
        )
