"""The page of the attention viewer, without a browser."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re

import numpy as np
import pytest

from gossamer.attention import AttentionMaps, LayerMaps
from gossamer.errors import ConfigError, DataError
from gossamer.report import write_attention_page


def make_maps(layers=2, heads=3, length=4, **fields):
    weights = np.random.default_rng(0).random((layers, 1, heads, length, length))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    visible = np.ones((1, length, length), dtype=bool)
    return AttentionMaps(
        tuple(LayerMaps("layer", n, one, visible) for n, one in enumerate(weights)), **fields
    )


def data_of(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def test_the_page_holds_the_weights(tmp_path):
    maps = make_maps()
    page = write_attention_page(maps, tmp_path / "a.html").read_text("utf-8")
    data = data_of(page)
    assert data["tokens"]["input"] == ["0", "1", "2", "3"]
    for layer, packed in zip(maps.layers, data["stacks"][0]["layers"], strict=True):
        numbers = np.frombuffer(base64.b64decode(packed["weights"]), "<f2").reshape(packed["shape"])
        np.testing.assert_allclose(numbers, layer.weights[0], rtol=1e-3)
    for row in maps.rows():
        assert f"{row['entropy']:.3f}" in page


def test_only_the_pages_own_script_may_run(tmp_path, outline):
    page = write_attention_page(make_maps(), tmp_path / "a.html").read_text("utf-8")
    code = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(code) == 1
    digest = base64.b64encode(hashlib.sha256(code[0].encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src &#x27;none&#x27;")
    assert f"script-src &#x27;sha256-{digest}&#x27;" in policy
    assert "http:" not in page
    assert "https:" not in page
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "on" not in {name[:2] for _, name, _ in outline(markup).attributes}


def test_texts_are_text(tmp_path):
    tokens = ["</script><script>alert(1)</script>", "\u202egnp.exe", "", " a\n"]
    maps = make_maps(tokens={"input": tokens}, about={"model": "<b>x</b>", "text": "<i>\udcff"})
    page = write_attention_page(maps, tmp_path / "a.html").read_text("utf-8")
    assert page.count("<script") == 2
    assert "<b>x" not in page
    assert "<i>" not in page
    assert data_of(page)["tokens"]["input"] == [
        tokens[0], "\\u202egnp.exe", "∅", "␣a⏎",
    ]  # fmt: skip


def test_what_cannot_be_measured_is_a_dash(tmp_path):
    maps = make_maps(layers=1)
    layer = dataclasses.replace(maps.layers[0], weights=np.zeros_like(maps.layers[0].weights))
    page = write_attention_page(AttentionMaps((layer,)), tmp_path / "a.html").read_text("utf-8")
    assert data_of(page)["stacks"][0]["layers"][0]["measures"][0] == [None, None, None]
    assert "<td>–</td>" in page


def test_bad_input(tmp_path):
    maps = make_maps()
    with pytest.raises(ConfigError, match="ending of a page's file"):
        write_attention_page(maps, tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"one text for each place of the maps, 4; got 3"):
        write_attention_page(
            dataclasses.replace(maps, tokens={"input": list("abc")}), tmp_path / "a.html"
        )
    two = AttentionMaps(
        tuple(
            dataclasses.replace(one, weights=one.weights.repeat(2, axis=0)) for one in maps.layers
        )
    )
    with pytest.raises(ConfigError, match=r"of one sample; got 2\. Choose one: maps\.sample\(0\)"):
        write_attention_page(two, tmp_path / "a.html")
    large = np.broadcast_to(np.float32(0), (1, 12, 900, 900))
    layer = LayerMaps("layer", 0, large, np.ones((1, 900, 900), dtype=bool))
    with pytest.raises(ConfigError, match=r"at most 20 MB; got 26 MB .* 1 layers\. Keep fewer"):
        write_attention_page(AttentionMaps((layer,)), tmp_path / "a.html")
    assert list(tmp_path.iterdir()) == []
