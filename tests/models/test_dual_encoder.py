"""Text encoders and the scores of two of them."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.losses import DecoupledSoftmaxLoss
from gossamer.models import BagEncoder, DualEncoder, TextEncoder
from gossamer.models.text_encoder import _positions

TEXTS = ["Red shoes", "a lamp", "shoes, red!", "red"]


# --- bag ---


def test_a_bag_is_the_mean_of_its_grams() -> None:
    words = BagEncoder(6, num_buckets=50_000, ngram=0)
    with torch.no_grad():
        words.down.weight.zero_()
        words.down.bias.zero_()
        one, two, both = words(["red", "shoes", "Red SHOES"])
        torch.testing.assert_close(both, (one + two) / 2)
        torch.testing.assert_close(words(["shoes red"])[0], both)  # no order
        assert not words(["... !"]).any()
    encoder = BagEncoder(6, num_buckets=97, ngram=3)
    rows = [zlib.crc32(gram.encode()) % 97 for gram in ("reds", "<re", "red", "eds", "ds>")]
    x = encoder.table.weight[rows].mean(0)
    expected = x + encoder.down(F.gelu(encoder.up(x)))
    torch.testing.assert_close(encoder(["Reds"])[0], expected)


def test_hashes_are_those_of_any_other_process() -> None:
    code = (
        "from gossamer.models.text_encoder import _buckets\nprint(_buckets('Größe 12', 16384, 4))\n"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outs) == 1


def test_a_bag_is_saved_and_loaded(tmp_path: Path) -> None:
    encoder = BagEncoder(5, num_buckets=100, ngram=2).eval()
    encoder.save_pretrained(tmp_path)
    again = BagEncoder.from_pretrained(tmp_path)
    assert torch.equal(again(TEXTS), encoder(TEXTS))


def test_a_bag_learns_which_texts_belong_together() -> None:
    torch.manual_seed(0)
    colours, things = ["red", "blue", "green", "black"], ["shoe", "lamp", "table", "door"]
    queries = [f"{c} {t}" for c in colours for t in things]
    labels = [[n // 4, 4 + n % 4] for n in range(16)]
    documents = [f"colour {c}" for c in colours] + [f"thing {t}" for t in things]
    model = DualEncoder(BagEncoder(16, num_buckets=2000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loss = DecoupledSoftmaxLoss()
    for _ in range(40):
        optimizer.zero_grad()
        loss(model(queries, documents), labels).backward()
        optimizer.step()
    top = (model.encode_queries(queries) @ model.encode_documents(documents).T).topk(2).indices
    assert [sorted(row) for row in top.tolist()] == labels


# --- dual encoder ---


def test_scores_are_cosines_of_the_two_sides() -> None:
    torch.manual_seed(0)
    a, b = BagEncoder(7), BagEncoder(7)
    for model, other in ((DualEncoder(a), a), (DualEncoder(a, document_encoder=b), b)):
        expected = F.cosine_similarity(a(TEXTS)[:, None], other(TEXTS)[None], dim=-1)
        torch.testing.assert_close(model(TEXTS, TEXTS), expected)
        q = model.encode_queries(TEXTS, batch_size=3)
        torch.testing.assert_close(q @ model.encode_documents(TEXTS, batch_size=1).T, expected)
        assert not q.requires_grad
    plain = DualEncoder(a, normalize=False)
    torch.testing.assert_close(plain(TEXTS, TEXTS), a(TEXTS) @ a(TEXTS).T)
    assert plain.encode_queries([]).shape == (0, 7)


def test_encoding_leaves_the_mode_as_it_was() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.drop = BagEncoder(7), nn.Dropout(0.5)

        def forward(self, texts: Any) -> torch.Tensor:
            return self.drop(self.bag(texts))

    model = DualEncoder(Drops()).train()
    assert torch.equal(model.encode_queries(TEXTS), model.encode_queries(TEXTS))
    assert model.encoder.training
    assert model.encoder.drop.training


# --- models of transformers ---


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "shoes", "a", "lamp"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]",
        cls_token="[CLS]", sep_token="[SEP]",
    ).save_pretrained(folder)  # fmt: skip
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_pooling(bert: Path) -> None:
    texts = ["red shoes", "a red lamp a red lamp"]
    mean = TextEncoder(bert, normalize=False).eval()
    alone = torch.cat([mean([text]) for text in texts])
    torch.testing.assert_close(mean(texts), alone, atol=1e-5, rtol=0)  # padding moves nothing
    tokens = mean.tokenizer(["red shoes"], return_tensors="pt")
    hidden = mean.model(**tokens).last_hidden_state
    torch.testing.assert_close(mean(["red shoes"])[0], hidden[0].mean(0))
    first = TextEncoder(bert, pooling="cls", normalize=False).eval()
    torch.testing.assert_close(first(["red shoes"])[0], hidden[0, 0])
    unit = TextEncoder(bert).eval()(texts)
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(2))
    cut = TextEncoder(bert, max_length=4, normalize=False).eval()
    torch.testing.assert_close(cut(["red shoes a lamp"]), cut(["red shoes"]))
    assert TextEncoder(bert)([]).shape == DualEncoder(cut).encode_queries([]).shape == (0, 16)
    assert DualEncoder(unit_encoder := TextEncoder(bert))(texts, texts).shape == (2, 2)
    assert any(p.requires_grad for p in unit_encoder.parameters())


def test_a_model_of_transformers_is_saved_and_loaded(bert: Path, tmp_path: Path) -> None:
    encoder = TextEncoder(bert, pooling="cls").eval()
    encoder.save_pretrained(tmp_path)
    again = TextEncoder.from_pretrained(tmp_path, pooling="cls")
    assert not again.training
    torch.testing.assert_close(again(["red shoes"]), encoder(["red shoes"]))


def test_no_more_tokens_than_the_model_has_positions(bert: Path) -> None:
    encoder = TextEncoder(bert, max_length=1000).eval()
    assert encoder.max_length == encoder.config["max_length"] == 32
    words = "red shoes a lamp " * 20
    torch.testing.assert_close(encoder([words]), encoder([words[:200]]))
    encoder.set_max_length(4)
    torch.testing.assert_close(encoder([words]), encoder(["red shoes"]))
    with pytest.raises(ConfigError, match="max_length"):
        encoder.set_max_length(0)
    counted = SimpleNamespace(
        model_type="roberta", max_position_embeddings=514, pad_token_id=1
    )  # its positions begin behind that of padding
    assert _positions(counted) == 512
    assert _positions(SimpleNamespace(model_type="t5")) is None


# --- bad input ---


def test_bad_input(tmp_path: Path) -> None:
    encoder = BagEncoder(4)
    with pytest.raises(DataError, match="must be a list of texts; got str"):
        encoder("a text")
    with pytest.raises(DataError, match="got int at index 1"):
        encoder(["a", 3])
    for options, message in [
        ({"dim": 0}, "dim"),
        ({"dim": 4, "num_buckets": 0}, "num_buckets"),
        ({"dim": 4, "ngram": -1}, "ngram"),
    ]:
        with pytest.raises(ConfigError, match=message):
            BagEncoder(**options)
    with pytest.raises(ShapeError, match="one width; got 4 and 5"):
        DualEncoder(encoder, document_encoder=BagEncoder(5))(["a"], ["b"])
    with pytest.raises(ConfigError, match="batch_size"):
        DualEncoder(encoder).encode_queries(["a"], batch_size=0)
    pytest.importorskip("transformers")
    with pytest.raises(DataError, match=r"with config\.json; it does not"):
        TextEncoder(tmp_path)
    with pytest.raises(ConfigError, match="pooling"):
        TextEncoder(tmp_path, pooling="max")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="must hold a model and its tokenizer"):
        TextEncoder(tmp_path)


# --- saving ---


@pytest.mark.parametrize("towers", [1, 2])
def test_a_dual_encoder_of_bags_is_saved_and_loaded(tmp_path: Path, towers: int) -> None:
    second = BagEncoder(5, num_buckets=50) if towers == 2 else None
    model = DualEncoder(BagEncoder(5), document_encoder=second, normalize=False).eval()
    model.save_pretrained(tmp_path)
    again = DualEncoder.from_pretrained(tmp_path)
    assert torch.equal(again.encode_queries(TEXTS), model.encode_queries(TEXTS))
    assert torch.equal(again.encode_documents(TEXTS), model.encode_documents(TEXTS))
    assert (again.document_encoder is None) == (towers == 1)


def test_one_encoder_given_twice_is_one_tower(tmp_path: Path) -> None:
    bag = BagEncoder(6)
    DualEncoder(bag, document_encoder=bag).save_pretrained(tmp_path)
    assert DualEncoder.from_pretrained(tmp_path).document_encoder is None


def test_an_encoder_of_another_class_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BagEncoder, TextEncoder; got Linear"):
        DualEncoder(nn.Linear(1, 1)).save_pretrained(tmp_path)


def test_a_folder_of_another_model_is_named(tmp_path: Path) -> None:
    BagEncoder(4).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="must describe a DualEncoder"):
        DualEncoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model": "DualEncoder", "encoder": {"model": "X"}}')
    with pytest.raises(DataError, match="must name an encoder"):
        DualEncoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model": "DualEncoder"}')
    with pytest.raises(DataError, match="must describe an encoder"):
        DualEncoder.from_pretrained(tmp_path)
