"""The check of scale invariance: what it finds, what it names, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.attention import MultiHeadAttention
from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.layers import (
    ExactNorm,
    ScaleInvariantAttention,
    ScaleInvariantEncoderLayer,
    check_scale_invariance,
    homogeneity_degrees,
    split_parameters,
)


def stack(norm: nn.Module | None = None) -> nn.Sequential:
    """An invariant encoder: degree 2 at its layers, degree 0 behind the last norm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(10, 8),
        nn.Linear(8, 8, bias=False),
        ScaleInvariantEncoderLayer(8, 2, 16),
        norm or ExactNorm(8),
    )


TOKENS = torch.arange(10).view(2, 5)


# --- invariant networks ---


@pytest.mark.parametrize("scales", [(1e-3, 1e-2, 0.1), (10.0, 100.0, 1e3)])
def test_an_invariant_network_holds(scales: tuple[float, ...]) -> None:
    report = check_scale_invariance(stack(), TOKENS, scales=scales)
    assert report.holds
    assert report.error < 1e-4
    assert report.breaks == ()
    assert str(report).startswith("scale invariant")
    double = check_scale_invariance(stack().double(), TOKENS, scales=scales, tol=1e-10)
    assert double.holds


def test_epsilon_breaks_it() -> None:
    report = check_scale_invariance(stack(nn.LayerNorm(8, eps=1e-5)), TOKENS, scales=(1e-2,))
    assert not report.holds
    assert report.breaks[0].module == "3"
    assert "eps = 1e-05" in report.breaks[0].reason
    assert "ExactNorm" in str(report)


def test_degrees_follow_the_rules() -> None:
    degrees = homogeneity_degrees(stack(), TOKENS)
    assert degrees["0"] == 1
    assert degrees["1"] == 2
    assert degrees["2.norm_attention"] == 0
    assert degrees["2.attention.to_q"] == 1
    assert degrees["2.attention.to_out"] == 2
    assert degrees["2.up"] == 1
    assert degrees["2.down"] == 2
    assert degrees["2"] == 2
    assert degrees["3"] == degrees[""] == 0


def test_euler_and_the_gradient_at_another_scale() -> None:
    model = stack().double()
    target = torch.randn(2, 5, 8, dtype=torch.float64)

    def gradient(factor: float) -> tuple[Tensor, Tensor]:
        scaled = stack().double()
        scaled.load_state_dict({k: factor * v for k, v in model.state_dict().items()})
        F.mse_loss(scaled(TOKENS), target).backward()
        return (
            torch.cat([p.grad.flatten() for p in scaled.parameters()]),
            torch.cat([p.detach().flatten() for p in scaled.parameters()]),
        )

    grad, x = gradient(1.0)
    assert float((x @ grad).abs() / (x.norm() * grad.norm())) < 1e-10
    torch.testing.assert_close(gradient(8.0)[0], grad / 8, rtol=1e-8, atol=1e-12)


# --- what breaks it, by name ---


class Added(nn.Module):
    """Adds a table of positions, degree 1, to a stream of degree 2."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(5, 8))
        self.body = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8, bias=False))
        self.norm = ExactNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.body(tokens) + self.place)


class Hidden(nn.Module):
    """Uses GELU as a function, so that no module shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def test_a_bias_that_starts_at_zero_is_found() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), ExactNorm(8))
    nn.init.zeros_(model[2].bias)
    report = check_scale_invariance(model, torch.randn(3, 8))
    assert report.breaks[0].parameter == "2.bias"
    assert "degree 1 where 2 is needed" in report.breaks[0].reason
    assert not model[2].bias.any()  # the module's own weights are left alone


def test_a_parameter_of_a_parent_is_found() -> None:
    report = check_scale_invariance(Added(), TOKENS)
    assert [part.parameter for part in report.breaks] == ["place"]


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.Softmax(-1)])
def test_an_activation_is_found(activation: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 8), nn.LayerNorm(8))
    report = check_scale_invariance(model, torch.randn(3, 8))
    assert report.breaks[0].module == "1"
    assert report.breaks[0].measured
    assert report.breaks[1].kind == "LayerNorm"
    assert not report.breaks[1].measured
    assert len(report.rows()) == len(report.to_dict()["breaks"]) == 2


def test_a_function_inside_a_module_is_found() -> None:
    report = check_scale_invariance(nn.Sequential(Hidden(), ExactNorm(8)), torch.randn(3, 8))
    assert report.breaks[0].module == "0"
    assert "the code of Hidden itself" in report.breaks[0].reason


@pytest.mark.parametrize(
    "attention",
    [MultiHeadAttention(8, 2), nn.MultiheadAttention(8, 2, batch_first=True)],
    ids=["ours", "torch"],
)
def test_softmax_attention_is_found(attention: nn.Module) -> None:
    x = torch.randn(1, 5, 8)
    inputs = (x,) if isinstance(attention, MultiHeadAttention) else (x, x, x)
    report = check_scale_invariance(attention, inputs)
    assert report.breaks[-1].module == ""
    assert "ScaleInvariantAttention" in report.breaks[-1].remedy


def test_a_framework_encoder_is_taken_apart() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu", dropout=0.5)
    report = check_scale_invariance(layer, torch.randn(2, 5, 8))
    assert not report.holds
    assert {"self_attn", "norm1", "norm2"} <= {part.module for part in report.breaks}
    assert layer.training
    assert layer.dropout.training


def test_an_output_of_another_degree_names_its_last_rise() -> None:
    model = nn.Sequential(stack(), nn.Linear(8, 3))
    report = check_scale_invariance(model, TOKENS)
    assert not report.holds
    assert report.breaks[0].parameter == "1.weight"
    assert "of degree 1" in report.breaks[0].reason
    model.variant_parts = ("1",)
    assert check_scale_invariance(model, TOKENS).holds


def test_repeated_calls_are_numbered() -> None:
    shared = nn.Linear(8, 8, bias=False)
    degrees = homogeneity_degrees(nn.Sequential(shared, nn.ReLU(), shared), torch.randn(2, 8))
    assert degrees == {"0": 1.0, "1": 1.0, "0#2": 2.0, "": 2.0}


def test_inputs_by_keyword_and_tuples() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    layer = ScaleInvariantAttention(8, 2)
    x = torch.randn(1, 5, 8)
    assert homogeneity_degrees(layer, (x, mask))[""] == 2
    assert homogeneity_degrees(layer, {"x": x, "mask": mask})[""] == 2


def test_the_random_state_is_left_alone() -> None:
    module, x = Hidden(), torch.ones(2, 8)
    before = torch.get_rng_state()
    check_scale_invariance(module, x)
    assert torch.equal(torch.get_rng_state(), before)


# --- groups of parameters ---


def test_groups() -> None:
    model = nn.Sequential()
    model.add_module("body", stack())
    model.add_module("head", nn.Linear(8, 3))
    model.variant_parts = ("head",)
    body, head = split_parameters(model)
    assert [id(p) for p in head] == [id(p) for p in model.head.parameters()]
    assert {id(p) for p in body} == {id(p) for p in model.body.parameters()}


def test_bad_groups() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ConfigError, match="variant_parts"):
        split_parameters(model)
    model.variant_parts = ("tail",)
    with pytest.raises(ConfigError, match="'tail'"):
        split_parameters(model)
    model.variant_parts = ("1",)
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match="must not share a parameter"):
        split_parameters(model)


@pytest.mark.parametrize("part", [nn.GELU(), nn.Softmax(-1)])
def test_groups_warn_of_what_cannot_be_invariant(part: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), part)
    model.variant_parts = ()
    with pytest.warns(UserWarning, match=f"1 is a {type(part).__name__}"):
        split_parameters(model)


# --- bad input ---


def test_bad_input() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(UnsupportedError, match="got none for '1' \\(GELU\\)"):
        homogeneity_degrees(nn.Sequential(nn.Linear(8, 8), nn.GELU()), x)
    with pytest.raises(ConfigError, match="parameters to scale"):
        check_scale_invariance(nn.ReLU(), x)
    with pytest.raises(ConfigError, match="scales"):
        check_scale_invariance(Hidden(), x, scales=())
    with pytest.raises(ConfigError, match="scales"):
        check_scale_invariance(Hidden(), x, scales=(0.0,))
    with pytest.raises(ConfigError, match="tol"):
        check_scale_invariance(Hidden(), x, tol=0.0)
    with pytest.raises(DataError, match="finite"):
        check_scale_invariance(Hidden(), x * float("nan"))
