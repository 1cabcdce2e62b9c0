import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest

from gossamer.errors import ConfigError, DataError
from gossamer.report import plot_bars, plot_curves, plot_heatmap
from gossamer.report._data import summarise
from gossamer.report._svg import COLOURS, INK, prefix_ids

SVG = "{http://www.w3.org/2000/svg}"


def curve(rows, path, **options):
    plot_curves(rows, path, x="digits", y="exact_match", group="arm", **options)
    return path.read_text()


def heatmap(rows, path, **options):
    plot_heatmap(rows, path, x="digits", y="seed", value="exact_match", **options)
    return path.read_text()


def bars(rows, path, **options):
    plot_bars(rows, path, x="arm", y="exact_match", **options)
    return path.read_text()


DRAW = pytest.mark.parametrize("draw", [curve, heatmap, bars])


def texts(svg):
    return ["".join(e.itertext()) for e in ET.fromstring(svg).iter(f"{SVG}text")]


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_median_and_range_over_seeds_agree_with_numpy():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 5))
    rows = [
        {"arm": "a", "seed": s, "x": x, "y": float(values[s, x])}
        for s in range(4)
        for x in range(5)
    ]
    found = summarise(rows, ("arm", "x"), "y")
    for x in range(5):
        spread = found["a", x]
        assert spread.middle == pytest.approx(np.median(values[:, x]), abs=1e-15)
        assert (spread.low, spread.high) == (values[:, x].min(), values[:, x].max())
        assert spread.seeds == 4


def test_rows_of_one_seed_are_averaged_before_the_median():
    rows = [{"seed": s, "x": 1, "y": y} for s, y in [(0, 0.0), (0, 1.0), (1, 0.8), (2, 0.9)]]
    spread = summarise(rows, ("x",), "y")[(1,)]
    assert (spread.low, spread.middle, spread.high, spread.seeds) == (0.5, 0.8, 0.9, 3)


def test_rows_without_seed_count_one_each_and_empty_cells_are_left_out():
    rows = [{"x": 1, "y": y} for y in (1.0, "", None, float("nan"), 3.0)] + [{"x": 1.0, "y": True}]
    spread = summarise(rows, ("x",), "y")[(1,)]
    assert (spread.low, spread.middle, spread.high, spread.seeds) == (1.0, 1.0, 3.0, 3)


@DRAW
def test_svg_is_valid_and_has_role_title_and_description(draw, parts, tmp_path):
    root = ET.fromstring(
        draw(parts["rows"], tmp_path / "figure.svg", title="A & B", alt="What <it> shows")
    )
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    label, description = (root.find(f"{SVG}{name}") for name in ("title", "desc"))
    assert (label.text, description.text) == ("A & B", "What <it> shows")
    assert root.get("aria-labelledby").split() == [label.get("id"), description.get("id")]


@DRAW
def test_the_same_rows_give_the_same_bytes(draw, parts, tmp_path):
    first = draw(parts["rows"], tmp_path / "one" / "figure.svg")
    assert draw(parts["rows"], tmp_path / "two" / "figure.svg") == first
    assert not re.search(r"\d{4}-\d\d-\d\dT", first)


@DRAW
def test_ink_follows_the_page_and_the_background_is_transparent(draw, parts, tmp_path):
    svg = draw(parts["rows"], tmp_path / "figure.svg")
    root = ET.fromstring(svg)
    assert "currentColor" in svg
    assert INK not in svg
    fills = [re.search(r"fill: ([^;]+)", e.get("style", "")) for e in root.iter(f"{SVG}text")]
    cells = {"#111111", "#ffffff"} if draw is heatmap else set()
    assert {match[1] for match in fills if match} - cells == {"currentColor"}
    assert all(fills), "text without a colour would stay black in dark mode"
    ground = next(e for e in root.iter(f"{SVG}path"))
    assert ground.get("style").startswith("fill: none")


@DRAW
def test_ids_do_not_collide_and_references_hold(draw, parts, tmp_path):
    one = draw(parts["rows"], tmp_path / "one.svg", title="t")
    two = draw(parts["rows"], tmp_path / "two.svg", title="t")
    again = prefix_ids(one, "again")
    ids = [re.findall(r'\bid="([^"]+)"', svg) for svg in (one, two, again)]
    merged = [name for names in ids for name in names]
    assert len(set(merged)) == len(merged)
    for svg, names in zip((one, two, again), ids, strict=True):
        wanted = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg)
        assert {a or b for a, b in wanted} <= set(names)


def test_legend_names_groups_seeds_range_and_paper(parts, tmp_path):
    svg = curve(
        parts["rows"], tmp_path / "c.svg", band="minmax", shade=(1, 10), paper={"at 100": 0.957},
        x_label="digits $n$", y_label="exact match",
    )  # fmt: skip
    shown = texts(svg)
    for wanted in (
        "coupled_relative (n = 3)",
        "trained range",
        "paper: at 100 (0.957)",
        "digits $n$",
    ):
        assert wanted in shown
    assert [t for t in shown if t.isdigit()][:10] == [str(n) for n in range(10, 101, 10)]


def test_lines_differ_in_colour_marker_and_dashes(parts, tmp_path):
    svg = curve(parts["rows"], tmp_path / "c.svg")
    drawn = re.findall(r'style="fill: none; (stroke-dasharray[^"]*|stroke: [^"]*)"', svg)
    styles = {style for style in drawn if any(colour in style for colour in COLOURS[:3])}
    dashes = {re.sub(r"stroke: #\w+;?|stroke-width: [\d.]+;?", "", style) for style in styles}
    assert len(dashes) == 3
    assert len({re.search(r"stroke: (#\w+)", style)[1] for style in styles}) == 3


@pytest.mark.parametrize("colour", [colour for colour in COLOURS if colour != INK])
def test_data_colours_are_legible_on_white_and_on_near_black(colour):
    own = luminance(colour) + 0.05
    assert 1.05 / own >= 3
    assert own / (luminance("#14171a") + 0.05) >= 3


def test_heatmap_writes_numbers_and_outlines_the_trained_region(parts, tmp_path):
    rows = [row for row in parts["rows"] if row["arm"] == "random_start"]
    svg = heatmap(rows, tmp_path / "h.svg", box=[[10, 30], [0, 1]])
    value = next(r["exact_match"] for r in rows if r["digits"] == 10 and r["seed"] == 1)
    assert f"{value:.2f}" in texts(svg)
    assert "trained range" in texts(svg)
    assert "<image" not in svg


def test_heatmap_too_fine_for_numbers_gets_a_key(tmp_path):
    rows = [{"a": a, "b": b, "v": a * b / 576} for a in range(25) for b in range(25)]
    plot_heatmap(rows, tmp_path / "h.svg", x="a", y="b", value="v")
    shown = texts((tmp_path / "h.svg").read_text())
    assert shown[-5:] == ["0.00", "0.25", "0.50", "0.75", "1.00"]
    assert len(shown) < 60


def test_bars_show_values_and_groups(parts, tmp_path):
    rows = [row for row in parts["rows"] if row["digits"] in (10, 20)]
    plot_bars(rows, tmp_path / "b.svg", x="digits", y="exact_match", group="arm", y_label="match")
    shown = texts((tmp_path / "b.svg").read_text())
    assert {"coupled_relative", "random_start", "none", "match", "10", "20"} <= set(shown)
    assert "0.996" in shown


def test_bars_of_negative_and_logarithmic_values(tmp_path):
    rows = [
        {"arm": a, "seed": s, "v": v - s} for a, v in (("up", 3.0), ("down", -4.0)) for s in (0, 1)
    ]
    plot_bars(rows, tmp_path / "n.svg", x="arm", y="v")
    assert "−4.50" in texts((tmp_path / "n.svg").read_text())
    rows = [{"arm": "a", "v": 1e-6}, {"arm": "b", "v": 10.0}]
    plot_bars(rows, tmp_path / "l.svg", x="arm", y="v", log_y=True)
    assert {"1.00e−6", "10.0"} <= set(texts((tmp_path / "l.svg").read_text()))


def test_logarithmic_axes_tick_in_plain_numbers(tmp_path):
    rows = [{"arm": "a", "step": 2**k, "loss": 10.0**-k} for k in range(9)] + [
        {"arm": "a", "step": 512, "loss": 0.0}
    ]
    plot_curves(rows, tmp_path / "l.svg", x="step", y="loss", group="arm", log_x=True, log_y=True)
    shown = texts((tmp_path / "l.svg").read_text())
    assert {"1", "256", "0.01", "1e−6"} <= set(shown)
    assert not any("$" in text for text in shown)


@pytest.mark.parametrize("name", ["_hidden", "5 $ and 6 $", "名前", "<b>&"])
def test_group_names_are_shown_as_they_are(name, tmp_path):
    rows = [{"arm": name, "x": x, "y": x} for x in (1, 2)]
    plot_curves(rows, tmp_path / "c.svg", x="x", y="y", group="arm")
    assert f"{name} (n = 1)" in [
        t.lstrip("\u200b") for t in texts((tmp_path / "c.svg").read_text())
    ]


def test_the_users_matplotlib_settings_neither_count_nor_change(parts, tmp_path):
    plain = curve(parts["rows"], tmp_path / "one" / "c.svg")
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert curve(parts["rows"], tmp_path / "two" / "c.svg") == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_drawing_loads_neither_pyplot_nor_torch(tmp_path):
    code = (
        "import sys; from gossamer.report import plot_bars, write_table; "
        "assert 'matplotlib' in sys.modules; "
        f"plot_bars([{{'a': 'x', 'v': 1.0}}], {str(tmp_path / 'b.svg')!r}, x='a', y='v'); "
        "sys.exit('matplotlib.pyplot' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tables_do_not_load_matplotlib():
    code = (
        "import sys; from gossamer.report import write_table; sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@DRAW
def test_no_rows_are_an_error(draw, tmp_path):
    with pytest.raises(DataError, match="at least one row"):
        draw([], tmp_path / "figure.svg")
    assert not list(tmp_path.iterdir())


def test_bad_requests_name_column_value_and_remedy(parts, tmp_path):
    path = tmp_path / "c.svg"
    with pytest.raises(ConfigError, match=r"unknown column 'digit'; did you mean 'digits'\?"):
        plot_curves(parts["rows"], path, x="digit", y="exact_match", group="arm")
    with pytest.raises(ConfigError, match=r"unknown ending of a figure's file '.png'"):
        curve(parts["rows"], tmp_path / "c.png")
    with pytest.raises(ConfigError, match="unknown band 'std'"):
        curve(parts["rows"], path, band="std")
    with pytest.raises(DataError, match="column 'exact_match' must hold numbers; got 'high'"):
        curve([{"arm": "a", "digits": 1, "exact_match": "high"}], path)
    with pytest.raises(DataError, match="column 'digits' must hold numbers; got 'ten'"):
        curve([{"arm": "a", "digits": "ten", "exact_match": 1.0}], path)
    with pytest.raises(DataError, match="column 'exact_match' must hold at least one number"):
        curve([{"arm": "a", "digits": 1, "exact_match": ""}], path)


def test_labels_that_look_like_markup_of_the_figure_stay_as_they_are(tmp_path):
    rows = [{"arm": 'id="x" url(#y) #010203 font-family: a', "x": x, "y": x} for x in (1, 2)]
    plot_curves(rows, tmp_path / "c.svg", x="x", y="y", group="arm")
    shown = texts((tmp_path / "c.svg").read_text())
    assert 'id="x" url(#y) #010203 font-family: a (n = 1)' in shown


def test_a_trained_range_from_zero_fits_a_logarithmic_axis(tmp_path):
    rows = [{"arm": "a", "x": x, "y": x} for x in (1, 10, 100)]
    plot_curves(rows, tmp_path / "c.svg", x="x", y="y", group="arm", log_x=True, shade=(0, 10))
    assert {"1", "10", "100", "trained range"} <= set(texts((tmp_path / "c.svg").read_text()))


def test_long_names_are_wrapped_inside_the_figure(tmp_path):
    rows = [{"arm": "a long name of a method " * 5, "x": x, "y": x} for x in (1, 2)]
    plot_curves(
        rows,
        tmp_path / "c.svg",
        x="x",
        y="y",
        group="arm",
        title="long title " * 12,
        x_label="axis " * 30,
    )
    assert max(len(text) for text in texts((tmp_path / "c.svg").read_text())) <= 52


def test_ticks_are_short_where_the_data_are_not(tmp_path):
    rows = [{"arm": "a", "x": x, "y": x} for x in (0.0, 0.3832, 0.70561, 1.0)]
    plot_curves(rows, tmp_path / "c.svg", x="x", y="y", group="arm")
    shown = texts((tmp_path / "c.svg").read_text())
    assert not [t for t in shown if t.startswith(("0.38", "0.70"))]
    rows = [{"arm": "a", "x": x, "y": 1} for x in (1, 470, 1024)]  # lengths stay as they are
    plot_curves(rows, tmp_path / "c.svg", x="x", y="y", group="arm")
    assert "470" in texts((tmp_path / "c.svg").read_text())
