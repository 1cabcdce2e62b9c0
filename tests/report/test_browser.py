import json
import shutil

import pytest

from gossamer.report import write_comparison, write_page, write_scoreboard

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason=f"needs a browser: chromium: {CHROMIUM}, chromedriver: {DRIVER}",
    ),
]

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# Composes what is under a text before it takes the contrast, as the page paints tints.
CONTRAST = """
const parse = c => c.match(/[\\d.]+/g).map(Number);
const luminance = c => { const [r, g, b] = parse(c).map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = e => { for (; e; e = e.parentElement) {
  const c = getComputedStyle(e).backgroundColor;
  if (parse(c)[3] !== 0) return c; } return 'rgb(255, 255, 255)'; };
const texts = 'body, h1, p, th, td, .note, .verdict, a, code, dt, li';
return [...document.querySelectorAll(texts)].map(e => {
  const [a, b] = [luminance(getComputedStyle(e).color), luminance(ground(e))].sort((x, y) => y - x);
  return [e.tagName + '.' + e.className, (a + 0.05) / (b + 0.05)]; });
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser):
    """Open a file at a width in a colour scheme."""

    def run(path, width=1280, scheme="light", media=""):
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": media, "features": features}
        )
        browser.get(path.resolve().as_uri())
        return browser

    return run


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
