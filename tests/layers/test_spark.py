"""Spark feed-forward: reference values, the decoding form, what it reports."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError, UnsupportedError
from gossamer.layers import (
    FeedForward,
    GatedFeedForward,
    PackedSparkFeedForward,
    SparkFeedForward,
    sparsity_report,
)
from gossamer.layers import _spark_kernels as kernels

ENGINES = ["torch", "numba", "cpp"]


def usable(engine: str) -> None:
    if engine == "cpp" and not kernels.can_compile():
        pytest.skip("no C++ compiler or ninja: the engine cpp cannot be built")


def layer(dtype: torch.dtype = torch.float32, **options: Any) -> SparkFeedForward:
    torch.manual_seed(0)
    return SparkFeedForward(48, 300, predictor_dim=20, **{"k": 24, **options}).to(dtype).eval()


@pytest.mark.parametrize("unbiased", [False, True])
def test_reference_values(outside_data: Path, unbiased: bool) -> None:
    data = np.load(outside_data / "attention_reference" / "spark_ffn.npz")
    block = SparkFeedForward(
        48, 144, predictor_dim=int(data["r"]), k=int(data["k"]), unbiased=unbiased
    ).double()
    with torch.no_grad():
        block.predictor.weight.copy_(torch.from_numpy(data["K1"].T))
        block.up.weight.copy_(torch.from_numpy(data["K2"].T))
        block.down.weight.copy_(torch.from_numpy(data["V"]))
        kind = "sample" if unbiased else "population"
        q = torch.from_numpy(data["q"])
        np.testing.assert_allclose(block(q).numpy(), data[f"y_{kind}"], atol=1e-12)
        active = block.top_k(block.predictor(q[:, :20])) > 0
        assert active.sum(-1).tolist() == data[f"nnz_{kind}"].tolist()
        packed = block.eval().pack(engine="torch")
        np.testing.assert_allclose(packed(q).numpy(), data[f"y_{kind}"], atol=1e-12)


def test_all_units_give_a_gated_block_on_split_inputs() -> None:
    block = layer(k=300)
    x = torch.randn(5, 48)
    gate = F.gelu(x[:, :20] @ block.predictor.weight.T, approximate="tanh")
    expected = (gate * (x[:, 20:] @ block.up.weight.T)) @ block.down.weight.T
    torch.testing.assert_close(block(x), expected)


def test_as_many_parameters_as_a_gated_block() -> None:
    gated = GatedFeedForward(48, 200)
    spark = SparkFeedForward.like(gated, k=0.1)
    count = [sum(p.numel() for p in m.parameters()) for m in (gated, spark)]
    assert count[0] == count[1]
    assert spark.down.in_features == 300
    half = SparkFeedForward.like(GatedFeedForward(8, 12).bfloat16())
    assert half.up.weight.dtype == torch.bfloat16
    for bad, message in [
        (FeedForward(8, 8), "expected a gated block .* got FeedForward"),
        (GatedFeedForward(8, 8, bias=True), "must have no biases"),
    ]:
        with pytest.raises(ConfigError, match=message):
            SparkFeedForward.like(bad)


def test_gradients() -> None:
    torch.manual_seed(1)
    block = SparkFeedForward(6, 16, k=5).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,))


# --- the decoding form ---


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(48,), (1, 48), (2, 3, 48), (4, 9, 48), (0, 48)])
def test_packed_equals_the_training_form(engine: str, shape: tuple[int, ...]) -> None:
    usable(engine)
    block = layer()
    packed = block.pack(engine=engine)
    x = torch.randn(*shape)
    with torch.no_grad():
        got = packed(x)
        assert got.shape == x.shape
        torch.testing.assert_close(got, block(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", ["torch", "cpp"])
def test_packed_in_bfloat16(engine: str) -> None:
    usable(engine)
    block = layer(torch.bfloat16)
    packed = block.pack(engine=engine)
    x = torch.randn(3, 48).bfloat16()
    with torch.no_grad():
        got = packed(x)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, block(x), atol=1e-2, rtol=0)
        wide = copy.deepcopy(block).float()(x.float())
        torch.testing.assert_close(got.float(), wide, atol=1e-2, rtol=0)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu", "silu"])
def test_packed_with_every_activation_and_a_calibrated_threshold(activation: str) -> None:
    block = layer(activation=activation, calibrate=True).train()
    for _ in range(20):
        block(torch.randn(16, 48).exp())
    block.eval()
    x = torch.randn(2, 48).exp()
    with torch.no_grad():
        torch.testing.assert_close(block.pack(engine="torch")(x), block(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loops_over_any_number_of_units(count: int, dtype: torch.dtype) -> None:
    usable("cpp")
    units = torch.randperm(40)[:count]
    up, down = torch.randn(40, 13).to(dtype), torch.randn(40, 9).to(dtype)
    weights, rest = torch.randn(count), torch.randn(13).to(dtype)
    expected = (weights * (up[units].float() @ rest.float())) @ down[units].float()
    rows = torch.cat((up, down), dim=1)
    got = kernels.compiled().gather(units, weights, rows, rest)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    half = kernels.compiled().gather(units, weights.bfloat16(), rows, rest)
    torch.testing.assert_close(half, expected, atol=0.2, rtol=0.02)
    if dtype == torch.float32:
        loop = kernels.gather_numba(units, weights, rows, rest)
        torch.testing.assert_close(loop, expected, atol=1e-5, rtol=1e-5)


def test_nothing_active_gives_zeros() -> None:
    block = layer()
    for engine in ENGINES:
        usable(engine)
        with torch.no_grad():
            assert not block.pack(engine=engine)(torch.zeros(1, 48)).any()


def test_auto_takes_an_engine_that_runs() -> None:
    x = torch.randn(1, 48)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        block = layer(dtype)
        with torch.no_grad():
            got = block.pack()(x.to(dtype))
            torch.testing.assert_close(got, block(x.to(dtype)), atol=1e-2, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_loops_write_float32_whatever_the_default_is(engine: str) -> None:
    usable(engine)
    block = layer()
    packed, x = block.pack(engine=engine), torch.randn(1, 48)
    with torch.no_grad():
        expected = block(x)
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            try:
                got = packed(x)
            finally:
                torch.set_default_dtype(torch.float32)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_loops_refuse_what_they_cannot_read() -> None:
    usable("cpp")
    matrix = torch.randn(6, 4)
    with pytest.raises(UnsupportedError, match="contiguous tensors on the CPU"):
        kernels.compiled().matvec(matrix.T, torch.randn(6))


def test_a_threshold_that_moved_is_noticed() -> None:
    block = layer(calibrate=True)
    packed = block.pack(engine="torch")
    block.train()(torch.randn(9, 48).exp())
    with torch.no_grad(), pytest.raises(ConfigError, match="changed since"):
        packed(torch.randn(1, 48))


def test_without_a_compiler_auto_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels.compiled.cache_clear()
    try:
        block = layer(torch.bfloat16)
        x = torch.randn(1, 48).bfloat16()
        with torch.no_grad():
            torch.testing.assert_close(block.pack()(x), block(x), atol=1e-2, rtol=0)
            with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler and ninja"):
                block.pack(engine="cpp")(x)
    finally:
        kernels.compiled.cache_clear()


def test_pickled_and_saved_forms_give_the_same() -> None:
    block = layer()
    packed = block.pack(engine="torch")
    x = torch.randn(1, 48)
    with torch.no_grad():
        for other in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
            assert torch.equal(other(x), packed(x))
        fresh = layer(k=24).pack(engine="torch")
        fresh.load_state_dict(packed.state_dict())
        assert torch.equal(fresh(x), packed(x))


def test_bad_use_of_the_packed_form() -> None:
    block = layer()
    packed = block.pack(engine="torch")
    x = torch.randn(1, 48)
    with pytest.raises(UnsupportedError, match="got an input that requires a gradient"):
        packed(x.requires_grad_())
    x = x.detach()
    with pytest.raises(UnsupportedError, match="got training mode"):
        packed.train()(x)
    packed.eval()
    with pytest.raises(ShapeError, match="x must"):
        packed(torch.randn(1, 47))
    with pytest.raises(DtypeError, match=r"x must be torch\.float32 on cpu as the weights"):
        packed(x.double())
    with pytest.raises(DtypeError, match="on meta"):
        packed(x.to("meta"))
    with torch.no_grad():
        block.down.weight.mul_(2)
        with pytest.raises(ConfigError, match=r"changed since\. Call pack\(\) again"):
            packed(x)
    with pytest.raises(ConfigError, match="engine"):
        block.pack(engine="triton")
    with torch.no_grad(), pytest.raises(UnsupportedError, match="'numba' runs on a CPU in"):
        PackedSparkFeedForward(layer(torch.float64), engine="numba")(x.double())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predictor_dim": 0}, "predictor_dim must be"),
        ({"predictor_dim": 8}, "predictor_dim must be"),
        ({"k": 0}, r"k \(a count\)"),
        ({"k": 33}, r"k \(a count\)"),
        ({"k": 1.5}, r"k \(a share\)"),
        ({"activation": "sigmoid"}, "activation"),
        ({"hidden_dim": 1}, "hidden_dim"),
        ({"dim": 1}, "dim"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SparkFeedForward(**{"dim": 8, "hidden_dim": 32, **options})


# --- the report ---


def test_report_counts_what_is_active() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        SparkFeedForward(64, 2000, k=160), FeedForward(64, 500, activation="relu")
    )
    x = torch.randn(200, 64)
    report = sparsity_report(model, [x[:100], (x[100:],)])
    spark, plain = report.layers["0"], report.layers["1"]
    first = model[0]
    active = (first.top_k(first.predictor(x[:, :32])) > 0).double().mean()
    assert abs(spark.active - float(active)) < 1e-9
    assert spark.target == 0.08
    assert abs(spark.kurtosis) < 0.15  # random weights give nearly normal scores
    assert abs(spark.skew) < 0.15
    y = first(x) @ model[1].up.weight.T
    assert abs(plain.active - float((y > 0).double().mean())) < 1e-9
    assert (plain.target, plain.recall) == (None, None)
    assert "0.080" in str(report)
    assert [row["layer"] for row in report.rows()] == ["0", "1"]


def test_report_finds_the_recall_of_the_predictor() -> None:
    """Where the rest of the input weighs all units alike, the largest scores are the best units."""
    block = layer(k=30)
    with torch.no_grad():
        block.up.weight.fill_(0.1)
    exact = sparsity_report(block, [torch.randn(300, 48)]).layers[""]
    shuffled = layer(k=30)
    other = sparsity_report(shuffled, [torch.randn(300, 48)]).layers[""]
    assert exact.recall is not None
    assert other.recall is not None
    assert exact.recall > 0.9  # the count varies around k
    assert 0.2 < other.recall < exact.recall


def test_report_of_the_packed_form_is_that_of_its_layer() -> None:
    block = layer()
    x = torch.randn(40, 48)
    with torch.no_grad():
        packed = sparsity_report(block.pack(engine="torch"), [x]).layers[""]
    assert packed == sparsity_report(block, [x]).layers[""]


def test_report_moves_no_calibrated_threshold_and_names_bad_input() -> None:
    block = layer(calibrate=True).train()
    sparsity_report(block, [torch.randn(9, 48).exp()])
    assert float(block.top_k.offset) == 0.0
    assert block.top_k.training
    with pytest.raises(UnsupportedError, match="got Linear without any"):
        sparsity_report(nn.Linear(2, 2), [torch.zeros(1, 2)])
    with pytest.raises(DataError, match="at least one input"):
        sparsity_report(block, [])
