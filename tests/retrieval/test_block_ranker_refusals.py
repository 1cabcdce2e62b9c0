"""What in-context ranking refuses, and how it says so."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import BertConfig, BertModel, BloomConfig, BloomModel

from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.retrieval import BlockRanker

from .ranking_models import DOCUMENTS, language_model, tokenizer

ENGINES = ("three_pass", "mask4d", "block")
MODEL = language_model()
QUERY = "what carries lift?"


def make(**options) -> BlockRanker:
    return BlockRanker(options.pop("model", MODEL), tokenizer(), **options)


@pytest.mark.parametrize(
    ("query", "documents", "message"),
    [
        ("  ", ["a"], "query must be a text that is not blank"),
        (None, ["a"], "query must be a text"),
        ("q", ["a", None], "must have text; got None for '1'"),
        ("q", [{"id": "x", "text": None}], "must have text; got None for 'x'"),
        ("q", [{"id": "x", "text": "a"}, {"id": "x", "text": "b"}], "each id once; got 'x'"),
        ("q", "one text", "documents must be a list"),
    ],
)
def test_bad_queries_and_documents(query, documents, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make().rank(query, documents)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "layer must be >= 0 and <= 2; got 3"),
        ({"layer": "best"}, "layer must be a number from 0 or 'auto'; got 'best'"),
        ({"engine": "three-pass"}, "unknown engine 'three-pass'; did you mean 'three_pass'"),
        ({"aggregate": "median"}, "unknown aggregate"),
        ({"query_position_offset": 2048}, "below the end of the model's 2048 positions"),
        ({"query_position_offset": 0}, "query_position_offset must be >= 1"),
        ({"query_position_offset": "far"}, "must be a position or 'auto'; got 'far'"),
        ({"max_document_length": 0}, "max_document_length must be >= 1"),
    ],
)
def test_bad_options(options, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make(**options)


@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_that_do_not_fit_the_positions(engine: str) -> None:
    with pytest.raises(ConfigError, match="after the instruction and the longest document"):
        make(engine=engine, query_position_offset=200).rank(QUERY, DOCUMENTS)
    with pytest.raises(ConfigError, match="room for the last block"):
        make(engine=engine, query_position_offset=2000).rank(QUERY, DOCUMENTS)
    with pytest.raises(ConfigError, match="after the instruction"):
        make(engine=engine).rank("word " * 300, DOCUMENTS)


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_that_are_not_numbers(engine: str) -> None:
    model = language_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"scores must be finite.*bfloat16"):
        make(model=model, engine=engine).rank(QUERY, DOCUMENTS)


def test_models_that_cannot_be_read() -> None:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    bert = BertModel(BertConfig(**small, intermediate_size=8))
    with pytest.raises(UnsupportedError, match=r"BertModel must be a causal.*'bert', an encoder"):
        make(model=bert)
    bloom = BloomModel(BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=9))
    with pytest.raises(UnsupportedError, match="ALiBi"):
        make(model=bloom)
    window = language_model("mistral", sliding_window=64)
    with pytest.raises(UnsupportedError, match="sliding_window = 64"):
        make(model=window)
    with pytest.raises(UnsupportedError, match="causal decoder"):
        make(model=torch.nn.Linear(2, 2))
    learned = language_model("gpt2")
    with pytest.raises(ConfigError, match="below the end of the model's 2048 positions"):
        make(model=learned, query_position_offset=8192)


def test_a_folder_without_a_model(tmp_path) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        BlockRanker.from_pretrained(tmp_path)
