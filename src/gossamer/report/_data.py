"""From rows to what a figure shows: median, lowest and highest over seeds for each place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.checks import check_choice
from gossamer.errors import DataError

__all__ = ["Row", "Spread", "need_columns", "numeric", "ordered", "summarise"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """The values of one place in a figure, over its seeds."""

    middle: float
    low: float
    high: float
    seeds: int


def need_columns(rows: Sequence[Row], columns: Iterable[str]) -> None:
    """Check that there are rows and that the columns exist in them."""
    if not rows:
        raise DataError(
            "rows must hold at least one row to draw; got none. Check the filter or the run."
        )
    known = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        check_choice(column, known, "column")


def numeric(value: Any, column: str) -> float | None:
    """Read a cell as a number; an empty cell, NaN and infinity are no value."""
    if value is None or value == "":
        return None
    try:
        number = (
            {"True": 1.0, "False": 0.0}.get(str(value)) if not isinstance(value, float) else None
        )
        number = float(value) if number is None else number
    except (TypeError, ValueError):
        raise DataError(
            f"column {column!r} must hold numbers; got {value!r}. "
            "Filter this row out or name another column."
        ) from None
    return number if math.isfinite(number) else None


def _key(value: Any) -> Any:
    # 10, 10.0 and NumPy's 10 are one place on an axis.
    value = value.item() if isinstance(value, np.generic) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def summarise(
    rows: Sequence[Row], keys: Sequence[str], value: str
) -> dict[tuple[Any, ...], Spread]:
    """Take median, minimum and maximum over seeds of all rows that agree in `keys`.

    Several rows of one seed are averaged first, so that `seeds` counts seeds and not rows. Without
    a column `seed` each row counts as one.
    """
    need_columns(rows, (*keys, value))
    cells: dict[tuple[Any, ...], dict[Any, list[float]]] = {}
    for index, row in enumerate(rows):
        number = numeric(row.get(value), value)
        if number is not None:
            place = tuple(_key(row.get(key, "")) for key in keys)
            cells.setdefault(place, {}).setdefault(row.get("seed", index), []).append(number)
    if not cells:
        raise DataError(f"column {value!r} must hold at least one number; got none. Check the run.")
    return {
        place: _spread([float(np.mean(v)) for v in seeds.values()])
        for place, seeds in cells.items()
    }


def _spread(values: Sequence[float]) -> Spread:
    return Spread(float(np.median(values)), min(values), max(values), len(values))


def ordered(values: Iterable[Any]) -> list[Any]:
    """Order the places of an axis: numbers by size, anything else as first seen."""
    unique = list(dict.fromkeys(values))
    if all(isinstance(v, int | float) for v in unique):
        return sorted(unique)
    return unique
