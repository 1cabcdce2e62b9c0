import json

import pytest

from gossamer.report import write_comparison, write_page, write_scoreboard
from tests.report.conftest import CONTRAST

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("browser")]


@pytest.fixture(scope="module")
def pages(writer, tmp_path_factory):
    """A page of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = writer(folder / "one"), writer(folder / "two")
    return {
        "run": write_page(one),
        "comparison": write_comparison(one, two, folder / "out"),
        "scoreboard": write_scoreboard([one, two], folder / "scoreboard.html"),
    }


def inner_width(browser):
    return browser.execute_script("return document.scrollingElement.scrollWidth")


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_no_page_scrolls_sideways(show, pages, width):
    for path in pages.values():
        assert inner_width(show(path, width)) <= width


def test_the_widest_table_scrolls_in_its_own_box(show, pages):
    browser = show(pages["run"], 390)
    inside, outside = browser.execute_script(
        "const box = document.querySelector('.scroll'); return [box.scrollWidth, box.clientWidth]"
    )
    assert inside > outside


@pytest.mark.parametrize("width", [1280, 390])
def test_the_verdict_is_seen_without_scrolling(show, pages, width):
    box = show(pages["run"], width).execute_script(
        "return document.getElementById('verdict').getBoundingClientRect().toJSON()"
    )
    assert box["top"] >= 0
    assert box["bottom"] <= 844
    assert box["width"] > 200


@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_has_a_size_and_legible_text(show, pages, width):
    sizes = show(pages["run"], width).execute_script("""
        return [...document.querySelectorAll('figure svg')].map(s => {
          const b = s.getBoundingClientRect(), scale = b.width / s.viewBox.baseVal.width;
          return [b.width, b.height, scale * 11.5]; })""")
    assert len(sizes) == 3
    for figure_width, height, text in sizes:
        assert figure_width > 300
        assert height > 80
        assert 9.5 <= text <= 18


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_figures_follow_the_page(show, pages, scheme):
    for path in pages.values():
        browser = show(path, scheme=scheme)
        low = [
            (where, round(ratio, 2))
            for where, ratio in browser.execute_script(CONTRAST)
            if ratio < 4.5
        ]
        assert low == []
    browser = show(pages["run"], scheme=scheme)
    body, ground, inks = browser.execute_script("""
        const style = getComputedStyle(document.body);
        return [style.color, style.backgroundColor,
          [...document.querySelectorAll('figure svg text')]
            .filter(t => t.style.fill == 'currentcolor').map(t => getComputedStyle(t).fill)];""")
    assert len(inks) > 20
    assert set(inks) == {body}
    assert (ground == "rgb(255, 255, 255)") is (scheme == "light")


def test_print_shows_the_whole_table_and_the_environment(show, pages):
    browser = show(pages["run"], 700, "dark", "print")
    wide, ground = browser.execute_script("""
        const box = document.querySelector('.scroll'), table = box.querySelector('table');
        return [table.getBoundingClientRect().right - document.body.getBoundingClientRect().right,
          getComputedStyle(document.body).backgroundColor]""")
    assert wide <= 1
    assert ground == "rgb(255, 255, 255)"


def test_nothing_is_loaded_and_nothing_complains(show, pages):
    for path in pages.values():
        browser = show(path)
        browser.get_log("browser")
        browser.refresh()
        assert json.dumps(browser.get_log("browser")) == "[]"
        assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_a_figure_alone_takes_the_readers_scheme(show, pages):
    path = pages["run"].parent / "figures" / "exact-match-by-length.svg"
    colours = {
        scheme: show(path, scheme=scheme).execute_script(
            "return getComputedStyle(document.querySelector('text')).fill"
        )
        for scheme in ("light", "dark")
    }
    assert colours == {"light": "rgb(28, 33, 39)", "dark": "rgb(230, 233, 237)"}
