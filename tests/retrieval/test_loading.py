"""From the name of a model to an encoder, and from texts to an index that grows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.models import BagEncoder, DualEncoder
from gossamer.retrieval import index_texts, load_retriever
from gossamer.retrieval.loading import _sentence_options

TEXTS = {f"d{n}": f"text number {n} " + "long " * (n % 3) for n in range(7)}


def model(seed: int = 0) -> DualEncoder:
    torch.manual_seed(seed)
    return DualEncoder(BagEncoder(6, num_buckets=300)).eval()


def test_an_index_holds_the_vector_of_each_text(tmp_path: Path) -> None:
    index = index_texts(model(), TEXTS, tmp_path / "i", batch_size=2, quiet=True)
    assert index.ids == list(TEXTS)
    for name, text in TEXTS.items():
        expected = model().encode_documents([text])[0].numpy()
        assert index.search({"q": expected}, 1)["q"][name] == pytest.approx(1.0, abs=1e-5)


def test_an_interrupted_index_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.retrieval.loading._SHARD", 2)
    encoded: list[str] = []
    plain = DualEncoder.encode_documents

    def counted(self: DualEncoder, texts: list[str], *, batch_size: int = 256) -> torch.Tensor:
        if len(encoded) == 4:
            raise KeyboardInterrupt
        encoded.extend(texts)
        return plain(self, texts, batch_size=batch_size)

    with monkeypatch.context() as patch:
        patch.setattr(DualEncoder, "encode_documents", counted)
        with pytest.raises(KeyboardInterrupt):
            index_texts(model(), TEXTS, tmp_path, quiet=True)
    assert len(encoded) == 4
    index = index_texts(model(), TEXTS, tmp_path, quiet=True)
    assert index.ids == list(TEXTS)
    whole = index_texts(model(), TEXTS, tmp_path / "whole", quiet=True)
    query = {"q": np.ones(6, dtype=np.float32)}
    assert index.search(query, 7) == whole.search(query, 7)


def test_an_index_belongs_to_one_model_and_one_collection(tmp_path: Path) -> None:
    index_texts(model(), TEXTS, tmp_path, name="first", quiet=True)
    with pytest.raises(ConfigError, match="got those of first"):
        index_texts(model(1), TEXTS, tmp_path, quiet=True)
    other = model()
    other.normalize = False
    with pytest.raises(ConfigError, match="got those of first, with other settings"):
        index_texts(other, TEXTS, tmp_path, quiet=True)
    with pytest.raises(DataError, match="got 'd0', which is not in it"):
        index_texts(model(), {"d9": "x"}, tmp_path, quiet=True)
    with pytest.raises(ConfigError, match="batch_size"):
        index_texts(model(), TEXTS, tmp_path, batch_size=0)


def test_a_text_that_changed_is_noticed(tmp_path: Path) -> None:
    index_texts(model(), TEXTS, tmp_path, quiet=True)
    grown = index_texts(model(), {"new": "first", **TEXTS}, tmp_path, quiet=True)
    assert [len(ids) for ids, _ in grown.shards()] == [7, 1]
    with pytest.raises(DataError, match="got others for some of 'd0' to 'd6'"):
        index_texts(model(), {**TEXTS, "new": "first", "d3": "changed"}, tmp_path, quiet=True)


def test_an_encoder_of_the_user_s_own_is_indexed(tmp_path: Path) -> None:
    class Lengths(torch.nn.Module):
        def forward(self, texts: list[str]) -> torch.Tensor:
            return torch.tensor([[1.0, float(len(text))] for text in texts])

    own = DualEncoder(Lengths())
    assert len(index_texts(own, TEXTS, tmp_path, quiet=True)) == 7
    assert len(index_texts(own, {**TEXTS, "new": "x"}, tmp_path, quiet=True)) == 8


def test_a_saved_dual_encoder_is_loaded_by_its_folder(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    loaded = load_retriever(tmp_path)
    assert torch.equal(loaded.encode_queries(["a text"]), model().encode_queries(["a text"]))


def test_pooling_and_length_are_read_from_the_folder(tmp_path: Path) -> None:
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    (tmp_path / "1_Pooling").mkdir()
    pooling = tmp_path / "1_Pooling" / "config.json"
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    pooling.write_text(json.dumps(modes))
    assert _sentence_options(tmp_path) == {"max_length": 77, "pooling": "cls"}
    pooling.write_text(json.dumps({key: not value for key, value in modes.items()}))
    assert _sentence_options(tmp_path)["pooling"] == "mean"
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UnsupportedError, match="must pool the mean or the first token"):
        _sentence_options(tmp_path)


def test_a_folder_without_an_encoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        load_retriever(tmp_path)
    BagEncoder(4).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="got 'BagEncoder'"):
        load_retriever(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    )
    with pytest.raises(UnsupportedError, match="got a causal language model"):
        load_retriever(tmp_path)
