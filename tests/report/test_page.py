import json
import re
import shutil
import xml.etree.ElementTree as ET

import pytest

from gossamer.errors import DataError
from gossamer.report import read_table, write_page


def page_of(folder):
    return write_page(folder).read_text(encoding="utf-8")


def test_it_writes_page_markdown_table_and_figures(run, parts):
    assert write_page(str(run)) == run / "report.html"
    names = {str(p.relative_to(run)) for p in run.rglob("*")}
    figures = {f"figures/{f['name']}.svg" for f in parts["page"]["figures"]}
    assert {"report.html", "report.md", "table.csv"} | figures <= names
    assert not [name for name in names if name.endswith(".tmp")]
    back = read_table(run / "table.csv")
    assert [{k: v for k, v in row.items() if v != ""} for row in back] == [
        {k: v for k, v in row.items() if v != ""} for row in parts["summary"]["table"]
    ]
    for name in figures:
        ET.parse(run / name)


def test_it_is_a_function_of_the_files_alone(run, tmp_path):
    outputs = ("report.html", "report.md", "table.csv", "figures/by-seed.svg")
    write_page(run)
    first = [(run / name).read_bytes() for name in outputs]
    write_page(run)
    assert [(run / name).read_bytes() for name in outputs] == first
    moved = tmp_path / "elsewhere"
    shutil.copytree(run, moved)
    write_page(moved)
    assert [(moved / name).read_bytes() for name in outputs] == first


def test_the_page_needs_nothing_from_outside(run, outline):
    html = page_of(run)
    for tag, name, value in outline(html).attributes:
        assert tag not in ("script", "iframe", "object", "img")
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href", "action"):
            assert re.match(r"#|data:,$|[\w./-]+$", value), (tag, name, value)
    assert "@import" not in html
    assert "url(http" not in html


def test_structure_is_semantic_and_ids_are_unique(run, outline):
    html = page_of(run)
    parsed = outline(html)
    assert parsed.headings[0] == "h1"
    assert parsed.headings.count("h1") == 1
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    labels = [v for _, n, v in parsed.attributes if n == "aria-labelledby"]
    assert {name for label in labels for name in label.split()} <= set(ids)
    assert html.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert "<main>" in html
    assert html.count("<table") == html.count("<caption>") == 3
    assert ("th", "scope", "col") in parsed.attributes
    assert ("th", "scope", "row") in parsed.attributes


def test_parts_come_in_the_order_of_reading(run):
    html = page_of(run)
    marks = [
        "<h1>", 'id="verdict"', 'id="claims"', 'id="figures"', 'id="results"', 'id="reading"',
        'id="deviations"', 'id="notes"', 'id="environment"', 'id="repeat"', 'id="files"',
    ]  # fmt: skip
    places = [html.index(mark) for mark in marks]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("verdict", "each", "symbol", "sentence"),
    [
        ("held", ("held", "held", "held"), "✓", "All 3 claims held."),
        (
            "not held",
            ("held", "not held", "undecided"),
            "✗",
            "1 of 3 claims held; 1 did not; 1 is undecided.",
        ),
        (
            "undecided",
            ("undecided", "undecided", "held"),
            "?",
            "1 of 3 claims held; 2 are undecided.",
        ),
    ],
)
def test_the_verdict_is_said_in_word_and_symbol(
    make_run, parts, verdict, each, symbol, sentence, words
):
    summary = parts["summary"] | {"verdict": verdict}
    for claim, own in zip(summary["claims"], each, strict=True):
        claim["verdict"] = own
    folder = make_run(summary=summary)
    text = words(page_of(folder))
    assert f"{symbol} {verdict.capitalize()} {sentence}" in text
    assert f"**{symbol} {verdict.capitalize()}.** {sentence}" in (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        ("held", "The one claim held."),
        ("not held", "The one claim did not hold."),
        ("undecided", "The one claim is undecided."),
    ],
)
def test_a_single_claim_has_its_own_sentence(make_run, parts, verdict, sentence, words):
    claim = parts["summary"]["claims"][0] | {"verdict": verdict}
    summary = parts["summary"] | {"verdict": verdict, "claims": [claim]}
    assert sentence in words(page_of(make_run(summary=summary)))


def test_claims_show_both_sides_difference_and_paper(run, words):
    text = words(page_of(run))
    for wanted in (
        "0.996 exact match Coupled relative bias (ours); median of 3 seeds: 1.000, 0.996, 0.992",
        "≥ 0.99 bar, fixed before the run",
        "bar for each seed; 3 of 3 seeds reach it",
        "0.320 Random starting position; median of 3 seeds: 0.321, 0.320, 0.318",
        "ours must be better by more than 0.5",
        "+0.672 95 % interval +0.660 to +0.690",
        "100 digits: 0.957",
    ):
        assert wanted in text


def test_lower_is_better_turns_the_bar(make_run, parts, words):
    claim = parts["summary"]["claims"][2]
    bar = {"name": "bar", "value": 0.993}
    claim |= {"better": "lower", "bar": 0.993, "baseline": bar, "needed": 2}
    text = words(page_of(make_run(summary=parts["summary"] | {"claims": [claim]})))
    assert "≤ 0.993 bar for each seed; 1 of 3 seeds reach it, 2 are needed" in text


def test_one_seed_has_no_interval_and_no_spread(make_run, parts, words):
    summary = parts["summary"] | {"seeds": [0], "verdict": "undecided"}
    claim = summary["claims"][0] | {"interval": [None, None], "verdict": "undecided"}
    claim["ours"] = claim["ours"] | {"values": [claim["ours"]["value"]]}
    summary["claims"] = [claim]
    for row in summary["table"]:
        row["seeds"] = 1
    text = words(page_of(make_run(summary=summary)))
    assert "no interval" in text
    assert "one seed: 0.996" in text
    assert "(0.992–" not in text


def test_a_value_just_below_its_bar_does_not_read_like_the_bar(make_run, parts, words):
    claim = parts["summary"]["claims"][0]
    claim["ours"] |= {"value": 0.98997, "values": [0.98997, 1.0, 0.5]}
    claim["verdict"] = "not held"
    text = words(page_of(make_run(summary=parts["summary"] | {"verdict": "not held"})))
    assert "0.98997 exact match" in text


def test_the_table_says_where_each_number_comes_from(run, words):
    html = page_of(run)
    table = words(html[html.index('id="results"') : html.index('id="reading"')])
    assert "10 digits (trained)" in table
    assert "20 digits (trained)" not in table
    assert table.count("exact match, here") == 10
    assert table.count("exact match, paper") == 1
    assert "0.957" in table
    assert "0.996 (0.992–1.000)" in table
    assert "No positions did not fit the trained range 3" in table
    assert '<tr class="ours"><th scope="row">Coupled relative bias (ours)</th>' in html


def test_the_markdown_holds_the_same_facts(run, parts):
    write_page(run)
    text = (run / "report.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {parts['page']['title']}\n")
    for claim in parts["summary"]["claims"]:
        assert claim["text"] in text
    for figure in parts["page"]["figures"]:
        assert f"![{figure['alt']}](figures/{figure['name']}.svg)" in text
    assert "| **Coupled relative bias (ours)** | 3 | 0.996 (0.992–1.000) |" in text
    assert "did not fit the trained range |" in text
    assert parts["page"]["deviations"][0] in text
    assert f"```\n{parts['page']['command']}\n```" in text


def test_text_of_the_user_is_never_markup(make_run, parts, outline):
    evil = "<script>alert('x')</script> & \"q\""
    for claim in parts["summary"]["claims"]:
        claim["text"] = evil
    for key in ("title", "what", "paper", "command"):
        parts["page"][key] = evil
    parts["page"]["notes"] = parts["page"]["deviations"] = [evil]
    for figure in parts["page"]["figures"]:
        figure |= {"title": evil, "alt": evil}
    parts["page"]["arms"][0]["title"] = evil
    folder = make_run(summary=parts["summary"], page=parts["page"])
    html = page_of(folder)
    assert "<script" not in html
    assert not [a for a in outline(html).attributes if a[0] == "script"]
    assert html.count("&lt;script&gt;") > 10
    outside = (folder / "report.md").read_text().split("```")
    assert "<script" not in outside[0] + outside[2]


def test_figures_follow_the_arms_of_the_page(run, parts):
    write_page(run)
    svg = (run / "figures" / "exact-match-by-length.svg").read_text()
    titles = [arm["title"] for arm in parts["page"]["arms"]]
    places = [svg.index(f">{title} (n = 3)</text>") for title in titles]
    assert places == sorted(places)
    assert "trained range" in svg
    html = (run / "report.html").read_text()
    assert "Shown: Coupled relative bias (ours)." in html
    assert svg in html


def test_a_filter_takes_one_value_or_several(make_run, parts):
    figure = parts["page"]["figures"][0]
    figure["where"] = {"arm": ["none", "random_start"], "digits": [10, 20, 30]}
    folder = make_run(page=parts["page"] | {"figures": [figure]})
    write_page(folder)
    svg = (folder / "figures" / f"{figure['name']}.svg").read_text()
    assert "Coupled" not in svg
    assert ">40</text>" not in svg


def test_a_run_without_figures_notes_or_environment(make_run, parts, words):
    folder = make_run(page={"title": "Bare"})
    (folder / "environment.json").unlink()
    text = words(page_of(folder))
    assert "This run has no environment.json." in text
    assert "Figures" not in text
    assert "coupled_relative" in text
    assert "exact match 10" in text


@pytest.mark.parametrize("name", ["page.json", "rows.csv"])
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    with pytest.raises(DataError, match=rf"{re.escape(name)} does not exist.*--resume"):
        write_page(run)


def test_a_folder_without_summary_is_no_run_folder(tmp_path):
    with pytest.raises(DataError, match=r"is not a run folder: it holds no summary\.json"):
        write_page(tmp_path)


@pytest.mark.parametrize("name", ["summary.json", "page.json", "environment.json"])
def test_broken_json_is_named_with_line_and_column(run, name):
    (run / name).write_text('{"title": "a",\n "what": }\n')
    with pytest.raises(DataError, match=rf"{re.escape(name)}, line 2, column 10: not valid JSON"):
        write_page(run)


def test_json_that_is_no_object_is_named(run):
    (run / "page.json").write_text("[1]")
    with pytest.raises(DataError, match=r"page\.json must hold a JSON object; got a list"):
        write_page(run)


def test_a_ragged_rows_file_is_named_with_its_line(run):
    (run / "rows.csv").write_text("arm,seed\na,0\na\n")
    with pytest.raises(DataError, match=r"rows\.csv, line 3: expected 2 cells"):
        write_page(run)


def edit(run, name, change):
    path = run / name
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(verdict="hold"), "'hold'; did you mean 'held'"),
        (lambda d: d.pop("claims"), "has no 'claims'"),
        (lambda d: d["claims"][1].pop("ours"), r"claims\[1\] has no 'ours'"),
        (lambda d: d["claims"][0].update(interval=[1]), "interval must have 2 entries"),
        (lambda d: d["claims"][0].update(better="up"), "unknown direction 'better' 'up'"),
        (lambda d: d["table"][2].pop("arm"), r"table\[2\] has no 'arm'"),
    ],
)
def test_a_wrong_summary_is_named_with_the_place(run, change, message):
    edit(run, "summary.json", change)
    with pytest.raises(DataError, match=rf"summary\.json.*{message}"):
        write_page(run)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, {"kind": "pie"}, r"figures\[0\]: unknown kind of figure 'pie'"),
        (0, {"shaed": [1, 2]}, "'shaed'.*did you mean 'shade'"),
        (0, {"x": "digit"}, "figure 'exact-match-by-length'.*did you mean 'digits'"),
        (0, {"log_x": "yes"}, "log_x must be true or false; got 'yes'"),
        (1, {"name": "../x"}, r"figures\[1\].*got '../x'"),
        (1, {"name": "by-seed"}, r"figures\[2\].*be used once"),
        (1, {"where": {"digits": 11}}, r"no row of rows\.csv agrees with where = {'digits': 11}"),
        (2, {"value": None}, "heatmap needs the key 'value'"),
        (2, {"box": [[1, 2]]}, "box must have 2 entries; got 1"),
    ],
)
def test_a_wrong_figure_is_named_with_the_place(run, index, change, message):
    edit(run, "page.json", lambda d: d["figures"][index].update(change))
    with pytest.raises(DataError, match=message) as caught:
        write_page(run)
    assert "page.json" in str(caught.value)
    assert not (run / "report.html").exists()


def test_values_that_are_not_finite_are_left_out_and_counted(make_run, parts):
    for row in parts["rows"][:2]:
        row["exact_match"] = "nan" if row["digits"] == 10 else "inf"
    html = page_of(make_run(rows=parts["rows"]))
    assert "Left out: 2 of 90 rows, without a finite value." in html
    assert "Coupled relative bias (ours) (n = 2–3)" in html


def test_a_title_that_is_no_text_is_named(run):
    edit(run, "page.json", lambda d: d.update(title=3))
    with pytest.raises(DataError, match=r"page\.json, title must be a string; got 3"):
        write_page(run)


def test_unknown_keys_of_newer_versions_are_left_alone(run):
    edit(run, "summary.json", lambda d: d.update(future=1))
    edit(run, "page.json", lambda d: d.update(future=1))
    assert "future" not in write_page(run).read_text(encoding="utf-8")
