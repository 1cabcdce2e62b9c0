"""Tables that a page declares: what is shown, how much of it, and what is refused."""

import json

import pytest

from gossamer.errors import DataError
from gossamer.report import write_page, write_table


def with_list(run, rows, columns, **spec):
    """Write rows of their own kind and a page that lists them."""
    page = json.loads((run / "page.json").read_text())
    page["figures"] = []
    page["lists"] = [
        {"name": "odd", "title": "Odd rows", "columns": columns, "where": {"kind": "odd"}, **spec}
    ]
    (run / "page.json").write_text(json.dumps(page))
    write_table([{"kind": "odd", **row} for row in rows] + [{"kind": "even"}], run / "rows.csv")
    html = write_page(run).read_text()
    return html, (run / "report.md").read_text()


def test_rows_are_shown_in_their_order_with_their_units(run):
    rows = [
        {"where": "a|b", "score": 0.5, "note": ""},
        {"where": "c", "score": 0.25, "note": float("nan")},
    ]
    columns = [
        {"name": "where", "label": "place"},
        {"name": "score", "unit": "nats"},
        {"name": "note"},
    ]
    html, markdown = with_list(run, rows, columns)
    assert "Odd rows" in html
    assert "score (nats)" in html
    assert html.index(">a|b<") < html.index(">c<")
    assert "| place | score (nats) | note |" in markdown
    assert "| a\\|b | 0.50 | – |\n| c | 0.25 | – |" in markdown


def test_values_of_unlike_sizes_keep_their_own_digits(run):
    rows = [{"value": 269322.0}, {"value": 0.0609}]
    _, markdown = with_list(run, rows, [{"name": "value"}])
    assert "| 0.0609 |" in markdown


def test_a_long_list_is_cut_and_says_so(run):
    html, markdown = with_list(run, [{"n": n} for n in range(60)], [{"name": "n"}])
    assert "The first 50 of 60; all are in rows.csv." in html
    assert "The first 50 of 60" in markdown
    assert "| 49 |" in markdown
    assert "| 50 |" not in markdown


def test_wrong_entries_are_named(run):
    with pytest.raises(DataError, match="needs the column 'other'"):
        with_list(run, [{"n": 1}], [{"name": "other"}])
    with pytest.raises(DataError, match="no row of rows"):
        with_list(run, [{"n": 1}], [{"name": "n"}], where={"kind": "none"})
    with pytest.raises(DataError, match="colums"):
        with_list(run, [{"n": 1}], [{"name": "n"}], colums=[])
