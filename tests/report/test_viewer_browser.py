"""The attention viewer in a real browser, as its user points, clicks and types."""

import json
import re

import numpy as np
import pytest

from gossamer.attention import AttentionMaps, LayerMaps
from gossamer.report import write_attention_page
from tests.report.conftest import CONTRAST

pytestmark = pytest.mark.slow

WORDS = ["<s>", "The", " fox", "<script>alert(1)</script>", " sees", "."]


def layer(stack, number, heads, queries, keys, causal=False):
    draw = np.random.default_rng([heads, queries, keys, number])
    visible = np.tri(queries, keys, dtype=bool) if causal else np.ones((queries, keys), dtype=bool)
    logits = np.where(visible, 2 * draw.standard_normal((1, heads, queries, keys)), -np.inf)
    weights = np.exp(logits)
    weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    return LayerMaps(stack, number, weights, visible[None])


@pytest.fixture(scope="module")
def maps():
    """Maps of a decoder, of an encoder-decoder model, and of a wide and deep model."""
    pair = [("encoder", 4, 4, False), ("decoder", 3, 3, True), ("cross", 3, 4, False)]
    long = [f" w{n}" for n in range(60)]
    return {
        "decoder": AttentionMaps(
            tuple(layer("layer", n, 4, 6, 6, causal=True) for n in range(2)),
            {"input": WORDS},
            {"model": "Decoder in runs/train", "text": "".join(WORDS)},
        ),
        "pair": AttentionMaps(
            tuple(layer(s, n, 2, q, k, causal=c) for s, q, k, c in pair for n in range(2)),
            {"input": WORDS[:4], "output": ["<pad>", "a", "b"]},
        ),
        "large": AttentionMaps(
            tuple(layer("layer", n, 12, 60, 60) for n in range(12)), {"input": long}
        ),
    }


@pytest.fixture(scope="module")
def pages(maps, tmp_path_factory):
    """Their pages."""
    folder = tmp_path_factory.mktemp("viewer")
    return {name: write_attention_page(one, folder / f"{name}.html") for name, one in maps.items()}


def number(text):
    """The weight at the end of what the page says."""
    return float(re.search(r"[-\d.e]+$", text)[0])


def cells(browser):
    return browser.find_elements("css selector", "#heads .cell")


def text(browser, selector):
    return browser.find_element("css selector", selector).text


def point_at(browser, query, key):
    """Move the mouse to a cell of the heat map."""
    box, side = browser.execute_script("""
        const f = document.querySelector('#map .field');
        f.scrollIntoView({block: 'center'});
        return [f.getBoundingClientRect().toJSON(),
          parseFloat(getComputedStyle(f).getPropertyValue('--cell'))];""")
    place = {"x": box["x"] + (key + 0.5) * side, "y": box["y"] + (query + 0.5) * side}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **place})
    return text(browser, "#readout")


def press(browser, selector, *keys):
    from selenium.webdriver.common.keys import Keys

    browser.execute_script(f"document.querySelector({json.dumps(selector)}).focus()")
    for key in keys:
        browser.switch_to.active_element.send_keys(getattr(Keys, key))


@pytest.mark.parametrize("name", ["decoder", "pair", "large"])
def test_one_cell_for_each_head_and_nothing_complains(show, pages, maps, name):
    browser = show(pages[name])
    browser.get_log("browser")
    browser.refresh()
    layers = [one for one in maps[name].layers if one.stack == maps[name].layers[0].stack]
    assert len(cells(browser)) == sum(one.weights.shape[1] for one in layers)
    assert json.dumps(browser.get_log("browser")) == "[]"
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_a_click_selects_and_a_hover_shows_the_weight(show, pages, maps):
    browser = show(pages["decoder"])
    cells(browser)[6].click()
    assert text(browser, "#head") == "layer 1, head 2"
    pressed = [cell.get_attribute("aria-pressed") for cell in cells(browser)]
    assert pressed == ["true" if n == 6 else "false" for n in range(8)]
    weights = maps["decoder"].layers[1].weights[0, 2]
    for query, key in ((0, 0), (3, 1), (5, 2), (2, 5)):
        shown = point_at(browser, query, key)
        assert shown.startswith(f"query {query} “{WORDS[query].replace(' ', '␣')}” reads key {key}")
        assert number(shown) == pytest.approx(weights[query, key], rel=0.05, abs=6e-4)
        assert number(text(browser, ".tip")) == number(shown)
    row = maps["decoder"].layers[1].rows()[2]
    assert f"entropy {row['entropy']:.3f} bits" in text(browser, "#facts")


def test_tokens_are_text(show, pages):
    browser = show(pages["decoder"])
    found = browser.execute_script(
        "return [...document.querySelectorAll('#lines .token')].map(t => t.textContent)"
    )
    expected = [word.replace(" ", "␣") for word in WORDS]
    assert found == expected * 2
    assert browser.execute_script("return document.scripts.length") == 2


def test_token_lines(show, pages, maps):
    browser = show(pages["decoder"])
    weights = maps["decoder"].layers[0].weights[0, 0]

    def shares():
        return browser.execute_script("""
            return [...document.querySelectorAll('#lines ul:last-child button')]
              .map(b => b.querySelector('.share')?.textContent.trim() ?? '')""")

    def drawn():
        return browser.execute_script("""
            const c = document.querySelector('#lines canvas');
            return c.getContext('2d').getImageData(0, 0, c.width, c.height).data
              .filter((v, i) => i % 4 == 3 && v > 0).length""")

    everything = drawn()
    assert shares() == [""] * 6
    browser.find_elements("css selector", "#lines ul:first-child button")[4].click()
    assert 0 < drawn() < everything
    for key, share in enumerate(shares()):
        if share:
            assert float(share) == pytest.approx(weights[4, key], rel=0.05, abs=6e-4)
        else:
            assert weights[4, key] < 0.06 * weights[4].max()
    asked = browser.find_elements("css selector", "#lines .asked")
    assert [button.get_attribute("aria-pressed") for button in asked] == ["true"]
    press(browser, "#lines ul:first-child button:nth-child(1)", "ESCAPE")
    browser.execute_script("document.activeElement.blur()")
    assert browser.find_elements("css selector", "#lines .asked") == []


def test_the_keyboard_is_enough(show, pages, maps):
    browser = show(pages["decoder"])
    tabs = browser.execute_script(
        "return document.querySelectorAll('#heads .cell[tabindex=\"0\"]').length"
    )
    assert tabs == 1
    press(browser, "#heads .cell", "ARROW_RIGHT", "ARROW_DOWN", "ENTER")
    assert text(browser, "#head") == "layer 1, head 1"
    press(browser, "#map .field", "ARROW_DOWN", "ARROW_DOWN", "ARROW_RIGHT")
    shown = text(browser, "#readout")
    assert shown.startswith("query 1 “The” reads key 1 “The”")
    expected = maps["decoder"].layers[1].weights[0, 1, 1, 1]
    assert number(shown) == pytest.approx(expected, rel=0.05, abs=6e-4)
    press(browser, "#lines ul:last-child button", "ARROW_DOWN")
    assert text(browser, "#lines .asked") == "The"


def test_measures_as_colours(show, pages, maps):
    browser = show(pages["decoder"])
    for measure in ("entropy", "sparsity", "distance"):
        browser.find_element("css selector", f"input[value={measure}]").click()
        values = [row[measure] for row in maps["decoder"].rows()]
        assert [cell.text for cell in cells(browser)] == [f"{value:.2f}" for value in values]
        colours = {cell.value_of_css_property("background-color") for cell in cells(browser)}
        assert len(colours) > 3
    browser.find_element("css selector", "input[value=maps]").click()
    assert len(browser.find_elements("css selector", "#heads canvas")) == 8
    assert len(browser.find_elements("css selector", ".measures tbody tr")) == 8


def test_parts_of_an_encoder_decoder_model(show, pages, maps):
    browser = show(pages["pair"])
    labels = [one.text for one in browser.find_elements("css selector", "#choices label")]
    assert labels[:3] == ["encoder", "decoder", "decoder to encoder"]
    browser.find_element("css selector", "input[name=stack][value='2']").click()
    assert text(browser, "#head") == "cross 0, head 0"
    shown = point_at(browser, 2, 3)
    assert shown.startswith("query 2 “b” reads key 3")
    weight = maps["pair"].layers[4].weights[0, 0, 2, 3]
    assert number(shown) == pytest.approx(weight, rel=0.05, abs=6e-4)
    browser.find_element("css selector", "input[value=distance]").click()
    assert {cell.text for cell in cells(browser)} == {"–"}
    assert "no distance" in text(browser, "#scale")


@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_scrolls_sideways(show, pages, width):
    for path in pages.values():
        browser = show(path, width)
        assert browser.execute_script("return document.scrollingElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(show, pages, scheme):
    browser = show(pages["decoder"], scheme=scheme)
    browser.find_element("css selector", "input[value=entropy]").click()
    browser.find_elements("css selector", "#lines ul:first-child button")[4].click()
    more = CONTRAST.replace("'body, ", "'.cell, .token, .title, label, legend, body, ")
    low = [(where, ratio) for where, ratio in browser.execute_script(more) if ratio < 4.5]
    assert low == []
    corner = browser.execute_script("""
        const c = document.querySelector('#map canvas');
        return [...c.getContext('2d').getImageData(c.width - 1, 0, 1, 1).data]""")
    assert corner == ([255, 255, 255, 255] if scheme == "light" else [20, 23, 26, 255])
