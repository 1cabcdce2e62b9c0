import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError, DataError
from gossamer.report import read_table, write_table
from gossamer.report.tables import _restore


def test_csv_brings_back_every_bit_and_every_letter(tmp_path):
    path = tmp_path / "table.csv"
    rows = [
        {"name": 'Größe, "a"\nb\rc', "share": 0.1 + 0.2, "steps": 12, "tiny": 5e-324},
        {"name": "日本 | <b>", "share": 1 / 3, "steps": -7, "tiny": -1.7976931348623157e308},
        {"name": "", "share": 1e-7, "steps": 10**20, "tiny": 2.0},
    ]  # fmt: skip
    write_table(rows, path)
    back = read_table(path)
    assert back == rows
    assert [[type(v) for v in row.values()] for row in back] == [
        [type(v) for v in row.values()] for row in rows
    ]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "text": st.text().filter(lambda text: _restore(text) == text),
                "number": st.floats(allow_nan=False),
                "count": st.integers(),
            }
        )
    )
)
def test_any_table_comes_back_equal(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("tables") / "table.csv"
    write_table(rows, path)
    assert read_table(path) == rows


def test_columns_are_the_union_in_first_seen_order(tmp_path):
    path = tmp_path / "table.csv"
    write_table([{"b": 1}, {"a": 2, "b": None}, {"c": 3}], path)
    assert path.read_text() == "b,a,c\n1,,\n,2,\n,,3\n"
    assert read_table(path)[0] == {"b": 1, "a": "", "c": ""}


def test_numpy_scalars_are_written_as_plain_numbers(tmp_path):
    path = tmp_path / "table.csv"
    write_table([{"x": np.float64(0.1), "n": np.int64(3), "f": np.float32(0.5)}], path)
    assert path.read_text() == "x,n,f\n0.1,3,0.5\n"


def test_what_only_looks_like_a_number_stays_text(tmp_path):
    path = tmp_path / "table.csv"
    texts = ["007", "1_000", "1e", "0x10", " 5", "٣", "-", ".", "True", "nano"]
    write_table([{"text": text} for text in texts], path)
    assert [row["text"] for row in read_table(path)] == texts


def test_values_that_are_not_finite_come_back(tmp_path):
    path = tmp_path / "table.csv"
    write_table([{"x": math.inf}, {"x": -math.inf}, {"x": math.nan}], path)
    first, second, third = (row["x"] for row in read_table(path))
    assert (first, second) == (math.inf, -math.inf)
    assert math.isnan(third)


def test_no_rows_give_an_empty_file_and_no_rows_back(tmp_path):
    path = tmp_path / "table.csv"
    write_table([], path)
    assert path.read_bytes() == b""
    assert read_table(path) == []


def test_markdown_shows_three_significant_digits_and_escapes(tmp_path):
    path = tmp_path / "table.md"
    values = [0.98765, 12.3456, 1234.5, 0.000012345, 1.0, 0.0, 3.2e9]
    write_table([{"a|b": "x|y <i>", "v": v} for v in values], path)
    lines = path.read_text().splitlines()
    assert lines[:2] == ["| a\\|b | v |", "| --- | ---: |"]
    assert lines[2] == "| x\\|y &lt;i> | 0.988 |"
    shown = [line.split("|")[-2].strip() for line in lines[2:]]
    assert shown == ["0.988", "12.3", "1234", "1.23e-5", "1.00", "0.00", "3.20e9"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    class Unprintable:
        def __str__(self):
            raise RuntimeError("broken")

    path = tmp_path / "table.csv"
    write_table([{"a": 1}], path)
    with pytest.raises(RuntimeError):
        write_table([{"a": Unprintable()}], path)
    assert path.read_text() == "a\n1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,2,3\n", r"t\.csv, line 3: expected 2 cells .* got 3: '1,2,3'"),
        ("a,a\n1,2\n", r"t\.csv, line 1: .* 'a' occurs 2 times"),
        ('a,b\n1,"2\n', r"t\.csv, line 2: not valid CSV"),
        (b"a\n\xff\n", r"t\.csv, line 2, column 1: expected UTF-8 text"),
    ],
    ids=["ragged", "double", "quote", "encoding"],
)
def test_a_broken_table_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        read_table(path)


def test_missing_file_and_unknown_ending(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv does not exist"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match=r"'.cvs'; did you mean '.csv'\?"):
        write_table([{"a": 1}], tmp_path / "t.cvs")
