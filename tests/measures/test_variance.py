"""Variance of attention outputs: uniform attention in closed form, known models, bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer.attention import MultiHeadAttention
from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.measures import VarianceReport, variance_report
from gossamer.models import Decoder
from gossamer.tasks import LookupTask

LENGTHS = (4, 16, 64, 256)


def uniform_attention(out_norm: str = "none", bias: bool = False) -> MultiHeadAttention:
    """Return attention that spreads evenly and whose values are its inputs."""
    attention = MultiHeadAttention(32, 2, out_norm=out_norm, bias=bias)
    nn.init.zeros_(attention.to_q.weight)
    nn.init.eye_(attention.to_v.weight)
    return attention


def inputs(generator: torch.Generator, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return [torch.randn(200, n, 32, generator=generator) for n in lengths]


# --- reference values ---


def test_uniform_attention_over_independent_unit_values(generator: torch.Generator) -> None:
    """The mean of N such values has std 1 / sqrt(N); a norm makes it 1 at any N."""
    report = variance_report(uniform_attention("layer"), inputs(generator))
    for n in LENGTHS:
        assert report.stds["out_norm"][n] == pytest.approx(n**-0.5, rel=0.05)
        assert report.stds["to_out"][n] == pytest.approx(1.0, rel=0.05)
        assert report.num_samples[n] == 200
    assert report.slopes["out_norm"] == pytest.approx(-0.5, abs=0.02)
    assert report.slopes["to_out"] == pytest.approx(0.0, abs=0.02)
    plain = variance_report(uniform_attention(), inputs(generator))
    assert list(plain.stds) == ["to_out"]  # a norm that does nothing is not shown
    assert plain.slopes["to_out"] == pytest.approx(-0.5, abs=0.02)


def test_figures_are_those_of_numpy(generator: torch.Generator) -> None:
    batches = inputs(generator, (3, 7))
    report = variance_report(uniform_attention(), batches)
    stds = []
    for batch in batches:
        means = batch.double().numpy().mean(1)
        stds.append(np.sqrt(means.var(0, ddof=1).mean()))
        assert report.stds["to_out"][batch.shape[1]] == pytest.approx(stds[-1], rel=1e-5)
    slope = np.polyfit(np.log([3, 7]), np.log(stds), 1)[0]
    assert report.slopes["to_out"] == pytest.approx(slope, rel=1e-5)


def test_rows_and_plain_values(generator: torch.Generator) -> None:
    report = variance_report(uniform_attention("rms"), inputs(generator, (4, 16)))
    assert [(row["module"], row["length"]) for row in report.rows()] == [
        ("to_out", 4), ("to_out", 16), ("out_norm", 4), ("out_norm", 16),
    ]  # fmt: skip
    assert report.to_dict()["num_samples"] == {4: 200, 16: 200}
    assert VarianceReport(**report.to_dict()) == report


# --- limits and invariances ---


def test_batches_may_be_split_and_come_in_any_order(generator: torch.Generator) -> None:
    model = uniform_attention("layer")
    batches = inputs(generator, (4, 16))
    whole = variance_report(model, batches)
    parts = [part for batch in reversed(batches) for part in batch.split(64)]
    split = variance_report(model, parts)
    for name, by_length in whole.stds.items():
        assert list(split.stds[name]) == [4, 16]
        for n, std in by_length.items():
            assert split.stds[name][n] == pytest.approx(std, rel=1e-9)


def test_a_large_common_mean_costs_no_digits(generator: torch.Generator) -> None:
    """Outputs near 1e6 with a spread of 0.1: squares alone would lose all of it."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_out = nn.Linear(8, 8).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.to_out(x.double() * 0.1 + 1e6)

    draws = torch.randn(500, 2, 8, generator=generator)
    wanted = 0.1 * draws[:, -1].double().var(0).mean().sqrt()
    report = variance_report(Shifted(), [draws])
    assert report.stds["to_out"][2] == pytest.approx(float(wanted), rel=1e-6)
    assert math.isnan(report.slopes["to_out"])  # one length has no slope


def test_outputs_that_do_not_vary_have_no_slope() -> None:
    same = [torch.ones(3, n, 32) for n in (2, 4)]
    report = variance_report(uniform_attention(), same)
    assert set(report.stds["to_out"].values()) == {0.0}
    assert math.isnan(report.slopes["to_out"])


def test_the_model_is_left_as_it_was(generator: torch.Generator) -> None:
    model = Decoder(14, 16, 2, 2, positions="none", attention={"out_norm": "layer"})
    model.train()
    model.layers[0].eval()
    report = variance_report(model, [torch.randint(0, 14, (5, n)) for n in (3, 9)])
    assert list(report.stds) == [
        f"layers.{n}.attention.{part}" for n in (0, 1) for part in ("to_out", "out_norm")
    ]
    assert model.training
    assert not model.layers[0].training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hooks_are_gone_after_an_error(generator: torch.Generator) -> None:
    model = uniform_attention()
    with pytest.raises(RuntimeError):
        variance_report(model, [torch.ones(2, 3, 5)])
    assert not model.to_out._forward_pre_hooks


# --- what models are called with ---


def test_batches_of_tasks_tuples_and_keywords(generator: torch.Generator) -> None:
    task = LookupTask()
    model = Decoder(task.vocab_size, 16, 1, 2, positions="none")
    batch = task.sample(8, generator=generator)
    one = variance_report(model, [batch])
    two = variance_report(model, [(batch.tokens, batch.position_ids)])
    three = variance_report(model, [{"tokens": batch.tokens, "position_ids": batch.position_ids}])
    assert one.stds == two.stds == three.stds


def test_named_modules(generator: torch.Generator) -> None:
    model = Decoder(14, 16, 2, 2, positions="none")
    batches = [torch.randint(0, 14, (5, n), generator=generator) for n in (3, 9)]
    report = variance_report(
        model, batches, modules=["feed_forward.down", "layers.0.attention.to_q"]
    )
    assert list(report.stds) == [
        "layers.0.feed_forward.down", "layers.1.feed_forward.down", "layers.0.attention.to_q",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="'to_qq' fits none"):
        variance_report(model, batches, modules=["to_qq"])


def hugging_face(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    return transformers.BertModel(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ending"),
    [("gpt2", "attn.c_proj"), ("llama", "self_attn.o_proj"), ("bert", "attention.output.dense")],
)
def test_hugging_face_models(kind: str, ending: str, generator: torch.Generator) -> None:
    model = hugging_face(kind)
    batches = [
        {"input_ids": torch.randint(0, 20, (40, n), generator=generator)} for n in (4, 16, 64)
    ]
    report = variance_report(model, batches)
    assert len(report.stds) == 2
    assert all(name.endswith(ending) for name in report.stds)
    # at the start attention is nearly uniform, so the outputs average what they see
    assert all(-0.6 < slope < -0.2 for slope in report.slopes.values())


# --- bad input ---


def test_what_cannot_be_measured() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with pytest.raises(UnsupportedError, match=r"nn\.MultiheadAttention applies its output"):
        variance_report(layer, [torch.ones(2, 3, 8)])
    with pytest.raises(UnsupportedError, match="no module has a name that is known"):
        variance_report(nn.Linear(2, 2), [torch.ones(2, 3, 2)])
    with pytest.raises(UnsupportedError, match=r"self_attn\.out_proj .* never called"):
        variance_report(layer, [torch.ones(2, 3, 8)], modules=["out_proj"])


def test_too_few_inputs() -> None:
    with pytest.raises(DataError, match="at least one batch"):
        variance_report(uniform_attention(), [])
    with pytest.raises(DataError, match="at least 2 inputs of each length; got 1 of length 3"):
        variance_report(uniform_attention(), [torch.ones(1, 3, 32)])
