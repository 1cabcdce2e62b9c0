"""Feed-forward blocks and residual connections against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gossamer.errors import ConfigError
from gossamer.layers import FeedForward, GatedFeedForward, Residual


def test_plain_block_is_its_formula() -> None:
    block = FeedForward(4, 9, activation="relu", bias=True)
    x = torch.randn(3, 2, 4)
    expected = (x @ block.up.weight.T + block.up.bias).clamp(
        min=0
    ) @ block.down.weight.T + block.down.bias
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
def test_gated_block_is_its_formula(activation: str) -> None:
    functions = {
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu_tanh": lambda x: (
            0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
        ),
        "silu": lambda x: x / (1 + torch.exp(-x)),
        "relu": lambda x: x.clamp(min=0),
    }
    block = GatedFeedForward(4, 9, activation=activation)
    x = torch.randn(5, 4)
    gate = functions[activation](x @ block.gate.weight.T)
    torch.testing.assert_close(block(x), (gate * (x @ block.up.weight.T)) @ block.down.weight.T)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_residual_places_its_norms(kind: str) -> None:
    x = torch.randn(6, 8) * 3 + 1

    def norm(y: torch.Tensor) -> torch.Tensor:
        if kind == "layer":
            return F.layer_norm(y, (8,), eps=1e-6)
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def f(y: torch.Tensor) -> torch.Tensor:
        return y.cumsum(-1)

    expected = {"pre": x + f(norm(x)), "post": norm(x + f(x)), "pre_post": norm(x + f(norm(x)))}
    for name, value in expected.items():
        torch.testing.assert_close(Residual(8, name, kind=kind)(x, f), value)


def test_gradients() -> None:
    block = GatedFeedForward(3, 4).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,))


@pytest.mark.parametrize("block", [FeedForward, GatedFeedForward])
def test_bad_options(block: type) -> None:
    with pytest.raises(ConfigError, match="did you mean 'gelu'"):
        block(4, 4, activation="geluu")
    with pytest.raises(ConfigError, match="hidden_dim"):
        block(4, 0)
    with pytest.raises(ConfigError, match="norm"):
        Residual(4, "before")
