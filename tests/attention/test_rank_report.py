"""Ranks of a whole model against those of its heads by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossamer.attention import MultiHeadAttention, attention_rank, rank_report
from gossamer.errors import UnsupportedError
from gossamer.models import Decoder


def test_a_layer_alone_is_attention_rank_of_its_projections() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(24, 4, num_kv_heads=2).double()
    x = torch.randn(3, 20, 24, dtype=torch.float64)
    report = rank_report(layer, x)
    q = layer.to_q(x).view(3, 20, 4, 6).transpose(1, 2)
    k = layer.to_k(x).view(3, 20, 2, 6).transpose(1, 2)
    expected = attention_rank(q, k)
    assert report.layers[""]["logit_rank"] == [6.0] * 4
    for name, value in vars(expected).items():
        got = torch.tensor(report.layers[""][name], dtype=torch.float64)
        torch.testing.assert_close(got, value.double().mean(0))
    assert report.narrow() == [""]
    assert report.rows()[3] == {
        "layer": "",
        "head": 3,
        "head_dim": 6,
        "length": 20,
        **{name: values[3] for name, values in report.layers[""].items()},
    }


def test_a_low_rank_bias_lifts_the_rank_of_a_model() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(9, (2, 24))
    plain = rank_report(Decoder(9, 32, 2, 4, positions="none"), tokens, tol=1e-5)
    biased = rank_report(Decoder(9, 32, 2, 4, positions="alibi"), tokens, tol=1e-5)
    assert len(plain.layers) == 2
    for figures in plain.layers.values():
        assert max(figures["logit_rank"]) <= 8
    for figures in biased.layers.values():
        assert min(figures["logit_rank"]) > 8  # distances have rank 2 and more
    assert not rank_report(Decoder(9, 32, 1, 1), torch.randint(9, (1, 12))).narrow()


def test_models_of_transformers_and_models_that_cannot_be_seen() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    llama = transformers.LlamaForCausalLM(config)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, :5] = 0
    batch = {"input_ids": torch.randint(20, (2, 16)), "attention_mask": mask}
    report = rank_report(llama, batch)
    assert list(report.layers) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(0 < rank <= 8 for rank in report.layers["model.layers.0.self_attn"]["logit_rank"])
    with pytest.raises(UnsupportedError, match="MultiheadAttention"):
        rank_report(nn.MultiheadAttention(8, 2), (torch.zeros(1, 2, 8),) * 3)
