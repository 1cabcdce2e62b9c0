import csv
import re

import pytest

from gossamer.errors import ConfigError, DataError
from gossamer.report import read_table, write_comparison, write_scoreboard


@pytest.fixture
def pair(make_run, parts):
    first = make_run("first-run")
    summary = parts["summary"] | {"verdict": "not held"}
    summary["claims"][0]["verdict"] = "not held"
    summary["claims"] = summary["claims"][:2]
    for row in summary["table"]:
        row["exact_match_10_here"] = 0.25
    summary["table"] = summary["table"][:2]
    second = make_run("second run", summary=summary)
    (second / "config.toml").write_text(
        'scale = "small"\n[train]\nsteps = 4000\nlr = 0.001\nwarmup = 5\n'
    )
    return first, second


def test_two_runs_stand_side_by_side(pair, tmp_path, words):
    out = tmp_path / "out"
    assert write_comparison(*pair, out) == out / "report.html"
    html = (out / "report.html").read_text(encoding="utf-8")
    text = words(html)
    assert "First: first-run ✓ held All 3 claims held." in text
    assert "Second: second run ✗ not held 1 of 2 claims held; 1 did not." in text
    assert 'href="../second%20run/report.html"' in html
    assert "At 100 digits every seed stays exact 0.996 exact match ✓ held –" in text
    assert "Only in the first run: No positions" in text
    assert "train.steps 2000 4000" in text
    assert "train.warmup – 5" in text
    assert "train.lr" not in text
    assert "0.250 (0.992–1.000) −0.746" in text


def test_runs_without_claims_have_no_section_of_claims(make_run, parts, tmp_path):
    summary = {k: v for k, v in parts["summary"].items() if k not in ("claims", "verdict")}
    summary = {**summary, "recipe": "", "command": "audit"}
    runs = [make_run(name, summary=summary) for name in ("one", "two")]
    html = write_comparison(*runs, tmp_path / "out").read_text(encoding="utf-8")
    for text in (html, (tmp_path / "out" / "report.md").read_text(encoding="utf-8")):
        assert "Claims" not in text
        assert "Method" not in text


def test_audits_of_two_things_name_both(make_run, parts, tmp_path):
    def audit(name, target, result):
        summary = {"command": "audit", "table": [{"arm": "audited", result: 0.5}]}
        arms = [{"name": "audited", "title": target, "role": "ours"}]
        page = {"title": target, "arms": arms}
        return make_run(name, summary=summary, page=page)

    first = audit("one", "a.csv", "suspicious_here")
    write_comparison(first, audit("two", "b.csv", "suspicious_here"), tmp_path / "out")
    assert "| a.csv and b.csv |" in (tmp_path / "out" / "report.md").read_text()
    write_comparison(first, audit("three", "c.npz", "slope_here"), tmp_path / "out")
    assert "no result in common" in (tmp_path / "out" / "report.html").read_text()


def test_figures_stand_beside_each_other_without_equal_ids(pair, tmp_path, outline):
    html = write_comparison(*pair, tmp_path / "out").read_text()
    ids = [value for _, name, value in outline(html).attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    heads = re.findall(r"<h3>(.*?)</h3>", html)
    assert heads[:2] == ["Exact match by length (first run)", "Exact match by length (second run)"]
    assert html.count("<svg") == 6


def test_the_table_has_a_pair_of_columns_and_the_difference(pair, tmp_path):
    write_comparison(*pair, tmp_path / "out")
    rows = read_table(tmp_path / "out" / "table.csv")
    assert [row["arm"] for row in rows] == ["coupled_relative", "random_start"]
    for row in rows:
        there, here = row["exact_match_10_second"], row["exact_match_10_first"]
        assert row["exact_match_10_difference"] == there - here


def test_the_markdown_holds_the_same_facts(pair, tmp_path):
    write_comparison(*pair, tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "[second run](../second%20run/report.html), ✗ not held." in text
    assert "| train.steps | 2000 | 4000 |" in text


def test_it_is_a_function_of_the_files_alone(pair, tmp_path):
    out = tmp_path / "out"
    names = ("report.html", "report.md", "table.csv")
    write_comparison(*pair, out)
    first = [(out / name).read_bytes() for name in names]
    write_comparison(*pair, out)
    assert [(out / name).read_bytes() for name in names] == first


def test_a_run_compared_with_itself_differs_in_nothing(run, tmp_path, words):
    text = words(write_comparison(run, run, tmp_path / "out").read_text())
    assert text.count("No difference.") == 2


def test_a_broken_configuration_is_named_with_its_line(pair, tmp_path):
    (pair[1] / "config.toml").write_text("steps = \n")
    with pytest.raises(DataError, match=r"config\.toml: not valid TOML, .*line 1"):
        write_comparison(*pair, tmp_path / "out")


def test_the_scoreboard_lists_every_claim_by_recipe(
    pair, make_run, parts, tmp_path, words, outline
):
    other = make_run(
        "other", summary=parts["summary"] | {"recipe": "fire", "claims": [], "seconds": None}
    )
    path = tmp_path / "board" / "scoreboard.html"
    assert write_scoreboard([*pair, other], path) == path
    html = path.read_text(encoding="utf-8")
    text = words(html)
    assert "3 runs: 2 held, 1 did not hold." in text
    assert text.index("fire") < text.index("position-coupling")
    assert 'href="../second%20run/report.html"' in html
    assert html.count("<tbody>") == 3
    outline(html)
    rows = list(csv.DictReader(path.with_suffix(".csv").read_text().splitlines()))
    assert [row["recipe"] for row in rows] == ["fire", *["position-coupling"] * 5]
    assert [row["verdict"] for row in rows[1:]] == ["held", "held", "held", "not held", "held"]
    assert (rows[1]["here"], rows[1]["baseline"], rows[1]["minutes"]) == ("0.996", "0.99", "6.9")
    assert rows[3]["paper"] == "100 digits: 0.957"
    markdown = path.with_suffix(".md").read_text()
    assert "| [position-coupling](../first-run/report.html) (small) |" in markdown
    assert markdown.count("✗ not held") == 1


def test_the_scoreboard_needs_run_folders_and_an_html_name(tmp_path):
    with pytest.raises(DataError, match="at least one run folder"):
        write_scoreboard([], tmp_path / "s.html")
    with pytest.raises(DataError, match="is not a run folder"):
        write_scoreboard([tmp_path], tmp_path / "s.html")
    with pytest.raises(ConfigError, match=r"'\.htm'; did you mean '\.html'"):
        write_scoreboard([tmp_path], tmp_path / "s.htm")


def test_figures_of_two_runs_share_the_range_of_their_values(make_run, parts, tmp_path):
    figure = parts["page"]["figures"][0] | {"name": "loss", "where": {"arm": "none"}, "paper": {}}
    page = parts["page"] | {"figures": [figure]}
    low = [row | {"exact_match": 2 + row["exact_match"]} for row in parts["rows"]]
    high = [row | {"exact_match": 9 + row["exact_match"]} for row in parts["rows"]]
    runs = [make_run(name, page=page, rows=rows) for name, rows in (("low", low), ("high", high))]
    html = write_comparison(*runs, tmp_path / "out").read_text()
    ticks = [re.findall(r">(\d+)</text>", svg) for svg in re.findall(r"(?s)<svg.*?</svg>", html)]
    assert ticks[0] == ticks[1]
    assert {"3", "9"} <= set(ticks[0])
