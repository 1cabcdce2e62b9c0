"""Monitors: planted ties are found, figures against direct computation, any model, bad input."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.attention import (
    MismatchMonitor,
    MultiHeadAttention,
    RoundingMonitor,
    ShawAttention,
    low_precision_attention,
    rounding_report,
)
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError, UnsupportedError
from gossamer.measures import spectral_report
from gossamer.models import Decoder


class Plain(nn.Module):
    """Attention on given queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)


def planted(generator: torch.Generator, rows: int = 1000) -> tuple[Tensor, Tensor, Tensor]:
    """Return three heads: ties and values of one sign, no ties, ties and values of both signs."""
    scores = 3.0 - torch.empty(1, 3, rows, 64).uniform_(14, 18, generator=generator)
    order = torch.rand(3, rows, 64, generator=generator).argsort(-1)
    scores[0].scatter_(-1, order[..., :2], 3.0)
    scores[0, 1].scatter_(-1, order[1, :, 1:2], 0.25)
    v = torch.empty(1, 3, 64, 8).uniform_(-2.9, -2.1, generator=generator)
    v[:, 2] = torch.empty(1, 64, 8).uniform_(-1, 1, generator=generator)
    return scores * 8, torch.eye(64).expand(1, 3, 64, 64), v


def both(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return rounded attention, and the exact one of the same rounded inputs."""
    inputs = [x.bfloat16().double() for x in (q, k, v)]
    return low_precision_attention(q, k, v, mask).double(), F.scaled_dot_product_attention(
        *inputs, attn_mask=mask
    )


# --- reference values ---


def test_the_head_with_ties_and_values_of_one_sign_is_at_risk(generator) -> None:
    q, k, v = planted(generator)
    report = rounding_report(Plain(), (q, k, v))
    assert report.at_risk() == [("", 0)]
    figures = report.layers[""]
    assert figures["tied_rows"] == [1.0, 0.0, 1.0]
    assert figures["sign_imbalance"][0] == 1.0
    assert figures["sign_imbalance"][2] < 0.7
    assert figures["largest_logit"] == [3.0, 3.0, 3.0]
    assert -0.8 < figures["bias"][0] < -0.2
    assert [row["at_risk"] for row in report.rows()] == [True, False, False]


@pytest.mark.parametrize("kind", ["causal", "mask", "bias", "grouped"])
def test_figures_are_those_of_direct_computation(kind, generator) -> None:
    q, k, v = (torch.randn(2, 4, 50, 8, generator=generator) for _ in range(3))
    k[:, :, 20] = k[:, :, 10]
    q[:, :, 25:40] = 4 * k[:, :, 10, None]
    model, mask, options = nn.Module(), None, {}
    if kind == "grouped":
        k, v, options = k[:, :2], v[:, :2], {"enable_gqa": True}
    if kind == "causal":
        mask, options = torch.ones(50, 50, dtype=torch.bool).tril(), {"is_causal": True}
    if kind in ("mask", "bias"):
        mask = torch.rand(2, 1, 50, 50, generator=generator) > 0.3
        mask[:, :, 3] = False
        given = mask if kind == "mask" else torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        options = {"attn_mask": given}
    model.forward = lambda: F.scaled_dot_product_attention(q, k, v, **options)
    report = rounding_report(model, ())
    if kind == "grouped":
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    rounded, exact = both(q, k, v, mask)
    if mask is not None:
        exact = torch.where(mask.any(-1, keepdim=True), exact, 0.0)
    scores = q.bfloat16().float() @ k.bfloat16().float().mT / 8**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().bfloat16()
    tied = (weights == 1).sum(-1) > 1
    seen = (scores.amax(-1) > -math.inf).sum((0, 2))
    for h in range(4):
        figures = {name: values[h] for name, values in report.layers[""].items()}
        assert figures["tied_rows"] == pytest.approx(float(tied[:, h].sum() / seen[h]))
        error, size = (rounded - exact)[:, h], exact[:, h].abs()
        biases = error.sum((0, 1)) / size.sum((0, 1)) * 256
        assert figures["bias"] == pytest.approx(float(biases[biases.abs().argmax()]), abs=2e-3)
        rows = tied[:, h]
        biases = error[rows].sum(0) / size[rows].sum(0) * 256
        assert abs(figures["tied_bias"]) == pytest.approx(float(biases.abs().max()), abs=2e-3)
        assert figures["largest_logit"] == pytest.approx(float(scores[:, h].max()))
        for name, x in (("q", q), ("k", k), ("v", v)):
            flat = x[:, h].bfloat16().flatten(0, 1)
            wanted = spectral_report(flat).stable_rank
            assert figures[f"{name}_stable_rank"] == pytest.approx(wanted)


@pytest.mark.filterwarnings("ignore:the query weights of")
def test_delta_sums_are_those_of_direct_computation(generator) -> None:
    q, k, v = (x[:, :, :40] for x in planted(generator, 40))
    g = torch.rand(1, 3, 40, 8, generator=generator)
    model = Plain()
    with RoundingMonitor(model, every=2) as monitor:
        for _ in range(3):  # the first and the third are checked
            (model(q.requires_grad_(), k, v) * g).sum().backward()
        model.eval()
        model(q, k, v)  # not training: not counted
    model.train()
    (model(q, k, v) * g).sum().backward()  # closed
    assert (monitor.num_passes, monitor.num_checks) == (3, 2)
    rounded, exact = both(q.detach(), k, v)
    once = (g * (rounded - exact)).sum((0, 2, 3))
    sums = torch.tensor(monitor.running_sums()[""], dtype=torch.float64)
    torch.testing.assert_close(sums, torch.stack((once, 2 * once)), rtol=1e-3, atol=1e-3)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not model.inner._forward_hooks


# --- limits and invariances ---


def test_blocks_of_rows_give_the_same_figures(generator, monkeypatch) -> None:
    inputs = planted(generator, 100)
    whole = rounding_report(Plain(), inputs).to_dict()
    monkeypatch.setattr("gossamer.attention._rounding.BLOCK_SIZE", 3 * 64 * 7)
    parts = rounding_report(Plain(), inputs).to_dict()
    for name, values in whole["layers"][""].items():
        assert parts["layers"][""][name] == pytest.approx(values, rel=1e-6, nan_ok=True), name


def test_alarm_needs_drift_and_growth(generator) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 2)
    x = torch.randn(2, 9, 16, generator=generator)
    monitor = RoundingMonitor(layer, every=1)
    for step in range(50):
        assert monitor.alarms() == []
        if step == 49:
            with torch.no_grad():
                layer.to_q.weight[:8] *= 3  # the first head only
        layer(x).sum().backward()
    assert monitor.alarms() == [("", 0)]
    assert monitor.summary()["rounding/alarms"] == 1
    norms = monitor.query_norms()[""]
    heads = layer.to_q.weight.detach().view(2, 8, 16)
    assert norms[-1] == pytest.approx([float(torch.linalg.matrix_norm(w, 2)) for w in heads])
    layer(x).sum().backward()
    monitor._deltas[""][10] = -1000 * monitor._deltas[""][-1]  # the sum changes its sign
    assert monitor.alarms() == []
    monitor.close()


def test_training_is_left_as_it_was(generator) -> None:
    torch.manual_seed(0)
    model = Decoder(14, 16, 2, 2, positions="fire")
    tokens = torch.randint(14, (3, 9), generator=generator)
    grads = []
    for watch in (False, True):
        model.zero_grad()
        monitor = RoundingMonitor(model, every=1) if watch else None
        model(tokens).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        if monitor is not None:
            assert list(monitor.running_sums()) == ["layers.0.attention", "layers.1.attention"]
            assert monitor.report is not None
            assert monitor.report.rows()[3]["layer"] == "layers.1.attention"
            monitor.close()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_of_the_model_passes_through(generator) -> None:
    layer = MultiHeadAttention(16, 2)
    with RoundingMonitor(layer, every=1) as monitor:
        with pytest.raises(RuntimeError):
            layer(torch.randn(2, 9, 15))
        layer(torch.randn(2, 9, 16))
        assert monitor.num_checks == 1
    assert not layer.to_q._forward_hooks


def test_report_is_plain(generator) -> None:
    report = rounding_report(MultiHeadAttention(16, 2), torch.randn(2, 9, 16))
    plain = json.loads(json.dumps(report.to_dict()))
    assert set(plain["spectra"]) == {"to_q", "to_k", "to_v", "to_out"}
    row = report.spectral_rows()[0]
    assert (row["module"], row["what"], row["shape"]) == ("to_q", "weight", [16, 16])
    assert RoundingMonitor(MultiHeadAttention(16, 2)).summary() == {}


# --- any model ---


def hugging_face(kind: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, **options)
        return transformers.GPT2LMHeadModel(config)
    sizes = {
        "vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, **options)
        return transformers.LlamaForCausalLM(config)
    config = transformers.DeepseekV3Config(
        **sizes, num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=6, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8, n_routed_experts=2, num_experts_per_tok=1, n_group=1,
        topk_group=1, first_k_dense_replace=2, moe_intermediate_size=8, **options,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layer", "projections"),
    [
        ("gpt2", "transformer.h.1.attn", {"c_attn", "c_proj"}),
        ("llama", "model.layers.1.self_attn", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (
            "deepseek",
            "model.layers.1.self_attn",
            {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
        ),
    ],
)
def test_hugging_face_models(kind, layer, projections, generator) -> None:
    model = hugging_face(kind)
    ids = torch.randint(20, (4, 12), generator=generator)
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    batch = {"input_ids": ids, "attention_mask": padding}
    report = rounding_report(model, batch)
    assert list(report.layers)[1] == layer
    assert len(report.layers) == 2
    assert len(report.layers[layer]["bias"]) == 2
    assert all(math.isfinite(norm) for norm in report.layers[layer]["query_norm"])
    assert {f"{layer}.{name}" for name in projections} <= set(report.spectra)
    model.train()
    with RoundingMonitor(model, every=1) as monitor:
        model(**batch, labels=ids).loss.backward()
        assert monitor.summary()["rounding/max_query_norm"] > 0
        assert any(x != 0 for x in monitor.running_sums()[layer][0])
    gap = MismatchMonitor(model, dtype=torch.bfloat16).check(batch, ids)
    assert 0 < gap.mean_abs_gap < 0.1
    assert gap.num_tokens == 48


@pytest.mark.slow
def test_trainer_of_transformers_reads_the_monitor(tmp_path, generator) -> None:
    transformers = pytest.importorskip("transformers")
    model = hugging_face("gpt2")
    monitor = RoundingMonitor(model, every=2)
    seen = []

    class Log(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(monitor.summary())

    ids = torch.randint(20, (8, 6), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = transformers.TrainingArguments(
        tmp_path, max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    transformers.Trainer(model, options, train_dataset=rows, callbacks=[Log()]).train()
    assert len(seen) == 4
    assert monitor.num_checks == 2
    assert all(values["rounding/max_query_norm"] > 0 for values in seen)


# --- two precisions of one model ---


def test_mismatch_against_direct_computation(generator) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 5).train()
    x = torch.randn(6, 7, 8, generator=generator)
    labels = torch.randint(5, (6, 7), generator=generator)
    labels[0, :3] = -100
    monitor = MismatchMonitor(model, dtype=torch.bfloat16)
    found = monitor.check(x, labels)
    full = model(x).double().log_softmax(-1).detach()
    low = F.linear(x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16())
    low = low.double().log_softmax(-1).detach()
    used = labels >= 0
    gaps = (low - full).gather(-1, labels.clamp(min=0)[..., None])[..., 0][used]
    assert found.mean_gap == pytest.approx(float(gaps.mean()))
    assert found.mean_abs_gap == pytest.approx(float(gaps.abs().mean()))
    assert found.max_abs_gap == pytest.approx(float(gaps.abs().max()))
    divergence = F.kl_div(low[used], full[used], log_target=True, reduction="batchmean")
    assert found.divergence == pytest.approx(float(divergence))
    assert found.num_tokens == 39
    assert model.training
    assert model.weight.dtype == torch.float32
    monitor.check((x,))
    assert [report.num_tokens for report in monitor.reports] == [39, 42]
    same = MismatchMonitor(model, dtype=torch.float32).check({"input": x})
    assert same.rows()[0]["max_abs_gap"] == 0.0


# --- bad input ---


def test_models_without_a_known_hook() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    for attach in (RoundingMonitor, lambda model: rounding_report(model, torch.ones(1, 2, 8))):
        with pytest.raises(UnsupportedError, match="got MultiheadAttention: it does not call"):
            attach(encoder)
    with pytest.raises(UnsupportedError, match="got Linear, which holds no attention class"):
        rounding_report(nn.Linear(2, 2), torch.ones(1, 2))
    shaw = ShawAttention(8, 2, max_distance=2)
    with pytest.raises(UnsupportedError, match="got ShawAttention: it never called it"):
        rounding_report(shaw, torch.ones(1, 3, 8))
    monitor = RoundingMonitor(shaw, every=1)
    with pytest.raises(UnsupportedError, match="got ShawAttention"):
        shaw(torch.ones(1, 3, 8))
    monitor.close()
    mixed = nn.Sequential(MultiHeadAttention(8, 2), shaw)
    assert rounding_report(mixed, torch.ones(1, 3, 8)).unseen == ("1 (ShawAttention)",)


@pytest.mark.slow
def test_another_implementation_of_transformers_is_named() -> None:
    model = hugging_face("gpt2", attn_implementation="eager")
    with pytest.raises(UnsupportedError, match=r"GPT2Attention: .*attn_implementation='eager'"):
        RoundingMonitor(model)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="every must be >= 1"):
        RoundingMonitor(MultiHeadAttention(8, 2), every=0)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(DtypeError, match="dtype must be a floating dtype"):
            MismatchMonitor(nn.Linear(2, 2), dtype=dtype)
    monitor = MismatchMonitor(nn.Linear(2, 3), dtype=torch.bfloat16)
    x = torch.ones(4, 2)
    with pytest.raises(ShapeError, match="labels must have the shape"):
        monitor.check(x, torch.zeros(3, dtype=torch.long))
    with pytest.raises(DataError, match="all are -100"):
        monitor.check(x, torch.full((4,), -100))
    with pytest.raises(DataError, match="log-probabilities must be finite"):
        monitor.check(x * math.nan)
    unfit = MismatchMonitor(nn.LSTM(2, 3), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"must return logits.* got tuple from LSTM"):
        unfit.check(x)
