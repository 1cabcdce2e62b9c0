"""Numbers as a reader wants them: few digits, but no rounding that changes what they say."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

__all__ = ["DASH", "as_given", "decimals", "duration", "is_number", "show", "signed", "significant"]

DASH = "–"


def is_number(value: Any) -> bool:
    """Say whether a cell holds a number; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _typeset(text: str) -> str:
    # 1.20e-05 becomes 1.20e−5, with the minus sign of text.
    return re.sub(r"e([-+])0*", lambda m: "e-" if m[1] == "-" else "e", text).replace("-", "−")


def significant(value: float, digits: int = 3) -> str:
    """Write a number with so many significant digits; integers are written in full."""
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    exponent = int(f"{value:.{digits - 1}e}".split("e")[1]) if value else 0
    if not -5 < exponent < 6:
        return re.sub(r"e([-+])0*", r"e\1", f"{value:.{digits - 1}e}").replace("e+", "e")
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def as_given(value: Any) -> str:
    """Write a number that a person chose or a paper printed with the digits it was given with."""
    if not is_number(value) or not math.isfinite(value):
        return show(value)
    return _typeset(f"{value:,.10g}")


def _misread(value: float, places: int) -> bool:
    # 0.998 printed as 1.00 would claim perfection.
    return 1 - abs(value) >= 1e-4 and round(abs(value), places) == 1.0


def decimals(values: Iterable[float | None]) -> int | None:
    """Choose one number of decimals for values that are shown together.

    Two for numbers up to 10, fewer for larger ones, more for smaller ones, and more when a value
    would otherwise read as 1 without being it. `None` where no number of decimals fits: values over
    more than four powers of ten, or all tiny.
    """
    known = [v for v in values if v is not None and math.isfinite(v)]
    if all(isinstance(v, int) for v in known):
        return 0
    sizes = [abs(v) for v in known if v != 0]
    top, bottom = max(sizes, default=1.0), min(sizes, default=1.0)
    if top < 1e-4 or top >= 1e7 or top > 1e4 * bottom:
        return None
    magnitude = math.floor(math.log10(top))
    places = max(0, 2 - magnitude) if magnitude >= 0 else max(2, 1 - magnitude)
    while places < 4 and any(_misread(v, places) for v in known):
        places += 1
    return places


def show(value: Any, places: int | None = None) -> str:
    """Write one cell: a dash for nothing, digits grouped by thousands, a true minus sign.

    Without `places` a number gets three significant digits. What would round to zero is shown as
    less than the last digit.
    """
    if value is None or value == "":
        return DASH
    if not is_number(value):
        return str(value)
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if places is None:
        return _typeset(significant(value))
    if value != 0 and round(value, places) == 0:
        return f"<{10**-places:.{places}f}" if value > 0 else f">−{10**-places:.{places}f}"
    return _typeset(f"{value:,.{places}f}")


def signed(value: float | None, places: int | None) -> str:
    """Write a difference with its sign."""
    text = show(value, places)
    return f"+{text}" if value is not None and value > 0 and text[0].isdigit() else text


def duration(seconds: Any) -> str:
    """Write a time in the unit a person would use."""
    if not is_number(seconds) or not math.isfinite(seconds):
        return DASH
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
