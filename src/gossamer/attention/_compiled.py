"""Loops that NumPy cannot express, compiled on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["compiled"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with numba, kept on disk where a folder can be written."""
    from numba import njit

    made: Callable[..., Any]
    try:
        made = njit(cache=True)(function)
    except RuntimeError:  # no folder for the cache
        made = njit(function)
    return made
