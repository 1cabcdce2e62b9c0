"""Scale-invariant layers: formulas, degrees, chunks, masks, gradients, and bad input."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossamer.errors import ConfigError, DtypeError, ShapeError
from gossamer.layers import (
    ExactNorm,
    ScaleInvariantAttention,
    ScaleInvariantEncoderLayer,
    scale_invariant,
)
from gossamer.layers.scale_invariant import _ChunkedAttention, relu_attention


def scaled(module: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)
    return module


# --- the norm ---


def test_norm_is_its_formula() -> None:
    norm = ExactNorm(6, affine=True).double()
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    x = 3 + 2 * torch.randn(4, 5, 6, dtype=torch.float64)
    spread = x.var(-1, correction=0, keepdim=True).sqrt()
    expected = (x - x.mean(-1, keepdim=True)) / spread * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [1e-35, 1e-20, 1e-3, 1e20, 1e34])
def test_norm_forgets_the_scale_over_the_range_of_float32(factor: float) -> None:
    norm, x = ExactNorm(16), torch.randn(8, 16)
    torch.testing.assert_close(norm(x * factor), norm(x), rtol=1e-5, atol=1e-5)


def test_a_layer_norm_with_epsilon_does_not_forget_it() -> None:
    x = torch.randn(8, 16)
    gap = (F.layer_norm(x * 1e-3, (16,), eps=1e-5) - F.layer_norm(x, (16,), eps=1e-5)).abs().max()
    assert gap > 0.5


@pytest.mark.parametrize("value", [0.0, 0.1, -1e-30, 1e30])
def test_equal_entries_give_zero_and_no_gradient(value: float) -> None:
    x = torch.full((2, 7), value, requires_grad=True)
    out = ExactNorm(7)(x)
    out.square().sum().backward()
    (grad,) = torch.autograd.grad(ExactNorm(7)(x)[:, 0].sum(), x)
    assert not out.any()
    assert not x.grad.any()
    assert not grad.any()


def test_norm_of_half_precision_is_that_of_float32() -> None:
    x = torch.randn(3, 8).bfloat16()
    out = ExactNorm(8, affine=True).bfloat16()(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, ExactNorm(8)(x.float()).bfloat16())


def test_norm_gradients() -> None:
    norm = ExactNorm(5, affine=True).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))


# --- attention ---


def heads(length: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 3, length, 4, dtype=dtype, requires_grad=True) for _ in range(3))


def masks(length: int) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    drop = torch.rand(2, 1, length, length, generator=generator) < 0.6
    padding = (
        torch.arange(length)[None, None, None] < torch.tensor([length, 2])[:, None, None, None]
    )
    return {"none": None, "padding": padding, "pairs": drop, "one": torch.tensor(True)}


def test_attention_is_its_formula_row_by_row() -> None:
    q, k, v = (x.detach() for x in heads(6))
    out = relu_attention(q, k, v, causal=True)
    for batch, head, row in ((0, 0, 0), (1, 2, 3), (0, 1, 5)):
        scores = [max(0.0, float(q[batch, head, row] @ k[batch, head, j])) for j in range(row + 1)]
        total = sum(scores)
        expected = torch.zeros(4, dtype=torch.float64)
        for j, score in enumerate(scores):
            expected += score / total * v[batch, head, j] if total else 0.0
        torch.testing.assert_close(out[batch, head, row], expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "padding", "pairs", "one"])
@pytest.mark.parametrize("step", [1, 4, 11, 99])
def test_chunks_equal_the_plain_form(causal: bool, kind: str, step: int) -> None:
    inputs, mask = heads(11), masks(11)[kind]
    plain = relu_attention(*inputs, mask, causal=causal)
    fast = _ChunkedAttention.apply(*inputs, mask, causal, step)
    torch.testing.assert_close(fast, plain)
    weight = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * weight).sum(), inputs)
    for got, wanted in zip(
        torch.autograd.grad((fast * weight).sum(), inputs), expected, strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_rows_sum_to_one_or_zero() -> None:
    q, k, v = heads(9)
    total = relu_attention(q, k, torch.ones_like(v), causal=True)[..., 0]
    assert bool(((total - 1).abs() < 1e-12).logical_or(total == 0).all())
    assert bool((total == 0).any())


def test_a_row_that_sees_nothing_gives_zero_without_nan() -> None:
    q, k, v = heads(5)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    for out in (relu_attention(q, k, v, mask), _ChunkedAttention.apply(q, k, v, mask, False, 2)):
        grads = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        assert not out[:, :, 2].any()
        assert not grads[0][:, :, 2].any()
        assert all(torch.isfinite(grad).all() for grad in grads)


def test_causal_tokens_see_nothing_that_follows() -> None:
    layer, x = ScaleInvariantAttention(8, 2, causal=True, chunk_size=3), torch.randn(1, 8, 8)
    changed = x.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(layer(changed)[:, :5], layer(x)[:, :5])
    assert not torch.allclose(layer(changed)[:, 5:], layer(x)[:, 5:])


def test_padding_does_not_matter() -> None:
    layer, x = ScaleInvariantAttention(8, 2), torch.randn(2, 6, 8)
    mask = torch.arange(6)[None, None, None] < torch.tensor([6, 4])[:, None, None, None]
    changed = x.clone()
    changed[1, 4:] = 7.0
    torch.testing.assert_close(layer(changed, mask)[1, :4], layer(x, mask)[1, :4])
    torch.testing.assert_close(layer(x[1:, :4])[0], layer(x, mask)[1, :4])


def test_attention_gradients() -> None:
    layer = ScaleInvariantAttention(4, 2, causal=True, chunk_size=2).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))


def test_no_array_has_more_than_a_chunk_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plain = scale_invariant._weights

    def watched(*args: object) -> torch.Tensor:
        made = plain(*args)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(scale_invariant, "_weights", watched)
    layer = ScaleInvariantAttention(8, 2, chunk_size=5)
    layer(torch.randn(3, 32, 8)).sum().backward()
    assert len(sizes) == 14  # forward and backward
    assert max(sizes) == 3 * 2 * 5 * 32


def test_second_derivatives_are_refused() -> None:
    q, k, v = heads(3)
    out = _ChunkedAttention.apply(q, k, v, None, False, 2)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# --- degrees ---


@pytest.mark.parametrize("factor", [1e-3, 0.1, 10.0, 1e3])
def test_degrees_of_the_layers(factor: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8)
    attention = ScaleInvariantAttention(8, 2)
    layer = ScaleInvariantEncoderLayer(8, 2, 16)
    with torch.no_grad():
        layer.up.bias.normal_(std=0.02)
    once, h = attention(x), layer(x)
    torch.testing.assert_close(scaled(attention, factor)(x), once * factor**2, rtol=1e-4, atol=0.0)
    # a stream of degree 2 goes in, one of degree 2 comes out
    torch.testing.assert_close(
        scaled(layer, factor)(x * factor**2) / factor**2, h, rtol=1e-4, atol=1e-6
    )


def test_encoder_layer_starts_as_said() -> None:
    layer = ScaleInvariantEncoderLayer(64, 4, 256, init_std=0.05)
    weights = [p.detach() for p in layer.parameters() if p.dim() == 2]
    assert len(weights) == 6
    assert all(float(w.abs().max()) <= 0.1 for w in weights)
    # a normal cut at two deviations has .88 of the deviation
    assert all(abs(float(w.std()) / 0.05 - 0.88) < 0.03 for w in weights)
    assert not layer.up.bias.any()
    assert layer.down.bias is None


# --- bad input ---


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="multiple of num_heads; got 10 and 4"):
        ScaleInvariantAttention(10, 4)
    with pytest.raises(ConfigError, match="num_heads"):
        ScaleInvariantAttention(8, 0)
    with pytest.raises(ConfigError, match="chunk_size"):
        ScaleInvariantAttention(8, 2, chunk_size=0)
    with pytest.raises(ConfigError, match="hidden_dim"):
        ScaleInvariantEncoderLayer(8, 2, 0)
    with pytest.raises(ConfigError, match="init_std"):
        ScaleInvariantEncoderLayer(8, 2, 8, init_std=0.0)
    with pytest.raises(ConfigError, match="dim"):
        ExactNorm(0)
    with pytest.raises(ShapeError, match="x"):
        ExactNorm(4)(torch.ones(2, 5))
    with pytest.raises(ShapeError, match="x"):
        ScaleInvariantAttention(8, 2)(torch.ones(2, 8))
    with pytest.raises(DtypeError, match="boolean"):
        ScaleInvariantAttention(8, 2)(torch.ones(1, 2, 8), torch.ones(2, 2))
