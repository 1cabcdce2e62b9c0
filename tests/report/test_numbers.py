import math

import pytest

from gossamer.report._numbers import as_given, decimals, duration, show, signed, significant


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ([1.0, 0.25, 0.0], 2),
        ([12.5, 3.25], 1),
        ([450.0, 3.0], 0),
        ([0.0123, 0.02], 3),
        ([0.25, 0.998], 3),
        ([0.9996], 4),
        ([3, 4], 0),
        ([1.0, 1e-6], None),
        ([3e-7], None),
        ([None, math.nan], 0),
    ],
)
def test_decimals_fit_values_shown_together(values, places):
    assert decimals(values) == places


def test_rounding_never_claims_perfection_or_zero():
    assert show(0.998, decimals([0.998, 1.0])) == "0.998"
    assert show(0.0001, 2) == "<0.01"
    assert show(-0.0001, 2) == ">−0.01"
    assert show(0.0, 2) == "0.00"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ("", "–"),
        ("word", "word"),
        (math.nan, "not a number"),
        (-math.inf, "−∞"),
        (-0.5, "−0.500"),
        (1.5e-7, "1.50e−7"),
        (12, "12"),
    ],
)
def test_show_without_places(value, text):
    assert show(value) == text


def test_signs_thousands_and_given_digits():
    assert signed(0.5, 2) == "+0.50"
    assert signed(-0.5, 2) == "−0.50"
    assert signed(0.0, 2) == "0.00"
    assert show(12345.6, 0) == "12,346"
    assert as_given(0.957) == "0.957"
    assert as_given(98.0) == "98"
    assert significant(999.9) == "1000"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.25, "1.2 s"), (83.2, "83 s"), (412.6, "6.9 min"), (7300.0, "2.0 h"), (None, "–")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
