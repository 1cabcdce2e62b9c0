"""Rounded attention: the paper's example to the bit, neutrality, ties, gradients, bad input."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossamer.attention import low_precision_attention, precision, softmax_shift
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError, UnsupportedError

DOUBLE = torch.float64
BETAS = (1.5, 2.0, 4.0, 7.0, 8.0)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def from_scores(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys whose scaled products are the given scores, `(rows, S)`."""
    size = scores.shape[-1]
    return scores[None, None] * size**0.5, torch.eye(size, dtype=scores.dtype)[None, None]


# --- reference values ---


def test_the_worked_example_of_the_paper_bit_by_bit() -> None:
    """-2.40625 and a value of the same binade: the sum falls between two bfloat16 numbers."""
    small = 0.000335693359375  # a bfloat16 weight; times the third value it leaves the residue
    v = torch.tensor([-2.40625, -2.296875, -2.578125])
    assert torch.equal(v.bfloat16().float(), v)
    score = torch.tensor([0.0, 0.0, math.log(small)])
    parts = [score]  # the score as a sum of bfloat16 numbers
    for _ in range(3):
        parts[-1:] = [parts[-1].bfloat16().float(), parts[-1] - parts[-1].bfloat16().float()]
    k = 2 * torch.stack(parts, -1)[None, None]
    q, values = torch.ones(1, 1, 1, 4), v[None, None, :, None]
    exact = v[:2].sum() + torch.tensor(small) * v[2]
    assert exact.item() == -4.703990459442139
    rounded = low_precision_attention(q, k, values) * torch.tensor(2 + small)
    assert rounded.item() == -4.71875
    assert rounded.item() - exact.item() == -0.014759540557861328
    exact_sum = low_precision_attention(q, k, values, dtype=torch.float32) * (2 + small)
    assert exact_sum.item() == pytest.approx(exact.item(), rel=1e-6)


def test_two_tied_keys_round_away_from_zero_and_the_shift_does_not() -> None:
    """A tail of e^-15 turns the tie of two odd last bits into a step away from zero."""
    values = torch.tensor([-2.40625, -2.296875, -2.0])[None, None, :, None]
    q, k = from_scores(torch.tensor([[3.0, 3.0, -12.0]]))
    plain = low_precision_attention(q, k, values)
    weights = torch.softmax(torch.tensor([3.0, 3.0, -12.0], dtype=DOUBLE), 0)
    exact = float(weights @ values.flatten().double())
    tail = math.exp(-15)
    total = 2 + float(torch.tensor(tail).bfloat16())
    assert plain.item() == np.float32(-4.71875) / np.float32(total)
    shifted = low_precision_attention(q, k, values, shift="beta")
    assert abs(shifted.item() - exact) < abs(plain.item() - exact)


@pytest.mark.parametrize("shift", ["max", "beta", "bounded"])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tile", [None, 3])
def test_in_exact_arithmetic_every_shift_is_softmax(shift, beta, tile) -> None:
    q, k, v = (draw(2, 3, 9, 4, seed=s, dtype=DOUBLE) for s in range(3))
    k[:, :, 4] = k[:, :, 2]  # ties wherever key 2 is the largest
    mask = draw(2, 1, 9, 9, seed=4) > -0.5
    mask[..., 0] = True
    out = low_precision_attention(q, k, v, mask, dtype=DOUBLE, shift=shift, beta=beta, tile=tile)
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, exact, atol=1e-12, rtol=0)


def test_the_rule() -> None:
    scores = torch.tensor(
        [[2.0, 1.0, 0.0], [2.0, 2.0, 0.0], [-3.0, -3.0, -4.0], [-3.0, -5.0, -4.0], [0.0, 0.0, -1.0]]
    )
    assert softmax_shift(scores, beta=4).flatten().tolist() == [2.0, 8.0, 0.0, -3.0, 1.0]
    near = torch.tensor([[2.0, 1.9995]])
    assert softmax_shift(near).item() == 2.0
    assert softmax_shift(near, tie_tol=1e-3).item() == 14.0
    hidden = torch.tensor([[True, False]])
    assert softmax_shift(torch.tensor([[2.0, 2.0]]), mask=hidden).item() == 2.0
    blind = torch.tensor([[-math.inf, -math.inf]])
    assert softmax_shift(blind).item() == 0.0


def test_running_bfloat16_sum_against_numpy() -> None:
    """One rounding after each key, in float32 products."""

    def bf16(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float32).bfloat16())

    q, k, v = (draw(1, 1, 4, 6, seed=s).bfloat16().float() for s in range(3))
    out = low_precision_attention(q, k, v, accumulate="bfloat16")
    scores = (q[0, 0] @ k[0, 0].T * 6**-0.5).numpy()
    for t, d in np.ndindex(4, 6):
        weights = [bf16(x) for x in np.exp(scores[t] - scores[t].max())]
        total = 0.0
        for weight, value in zip(weights, v[0, 0, :, d].tolist(), strict=True):
            total = bf16(np.float32(total) + np.float32(weight) * np.float32(value))
        assert out[0, 0, t, d].item() == pytest.approx(total / sum(weights), rel=1e-6)


# --- limits and invariances ---


@pytest.mark.parametrize("shift", ["beta", "bounded"])
@pytest.mark.parametrize("accumulate", ["float32", "bfloat16"])
def test_without_ties_nothing_changes(shift, accumulate) -> None:
    q, k, v = (draw(2, 3, 65, 16, seed=s) for s in range(3))
    options = {"accumulate": accumulate}
    plain = low_precision_attention(q, k, v, **options)
    assert torch.equal(plain, low_precision_attention(q, k, v, shift=shift, **options))


TOPS = (0.0, 1e-6, 1e-4, 2.0**-9, 0.3, 1.0, 12.5, 29.0, 87.0, 200.0, 1e4)


@pytest.mark.parametrize("beta", [1.001, *BETAS, 100.0])
@pytest.mark.parametrize("shift", ["beta", "bounded"])
@pytest.mark.parametrize("top", [*TOPS, *(-t for t in TOPS[1:])])
def test_tied_weights_are_below_one_and_nothing_overflows(top, shift, beta) -> None:
    scores = torch.full((1, 6), float(top))
    scores[0, 3:] -= torch.tensor([0.5, 4.0, 30.0])
    m = precision.shift_rows(scores[:, :1], torch.tensor([[True]]), shift, beta)
    if shift == "beta":
        assert torch.equal(m, softmax_shift(scores, beta=beta))
    weights = torch.exp(scores - m).bfloat16()
    assert 0 < weights.max() < 1
    q, k = scores[None, None].double(), torch.eye(6, dtype=DOUBLE)[None, None]
    v = draw(1, 1, 6, 5, seed=1, dtype=DOUBLE)
    q = q * 6**0.5
    out = low_precision_attention(q, k, v, shift=shift, beta=beta)
    assert torch.isfinite(out).all()
    largest = v.abs().amax()
    exact = F.scaled_dot_product_attention(q, k, v)
    # near 1e4 the scores themselves are apart by 2^-6 in bfloat16 inputs: no bound on them
    if abs(top) <= 1:
        assert (out - exact).abs().max() <= 0.05 * largest


@pytest.mark.parametrize("shift", ["max", "beta", "bounded"])
@pytest.mark.parametrize("tile", [1, 5, 64, 100])
def test_tiles_change_at_most_the_last_bit(shift, tile) -> None:
    q, k, v = (draw(1, 2, 33, 16, seed=s) for s in range(3))
    k[:, :, 30] = k[:, :, 1]  # a tie whose members lie in different tiles
    q[:, :, :8] = 3 * k[:, :, 1, None]
    whole = low_precision_attention(q, k, v, shift=shift)
    parts = low_precision_attention(q, k, v, shift=shift, tile=tile)
    unit = 2.0 ** (whole.abs().clamp(min=1e-30).log2().floor() - 7)
    assert ((whole - parts).abs() <= unit * 1.01).all()


def test_tie_over_two_tiles_is_found() -> None:
    q, k = from_scores(torch.tensor([[3.0, -9.0, 3.0, -12.0]]))
    v = torch.tensor([-2.40625, -2.1, -2.296875, -2.0])[None, None, :, None]
    for tile in (1, 2, 3):
        out = low_precision_attention(q, k, v, shift="beta", tile=tile)
        whole = low_precision_attention(q, k, v, shift="beta")
        torch.testing.assert_close(out, whole, rtol=1e-6, atol=0)
        assert (out - low_precision_attention(q, k, v)).abs() > 1e-3


def test_blind_rows_give_zeros_and_hidden_keys_do_not_tie() -> None:
    q, k, v = (draw(1, 2, 4, 8, seed=s) for s in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)  # the first query sees nothing
    for shift in ("max", "beta", "bounded"):
        out = low_precision_attention(q, k, v, mask, shift=shift)
        assert torch.equal(out[:, :, 0], torch.zeros(1, 2, 8))
        assert torch.isfinite(out).all()
        # a query that sees one key gets its value
        torch.testing.assert_close(out[:, :, 1], v[:, :, 0].bfloat16().float())


def test_grouped_keys_and_dtypes() -> None:
    q, k, v = draw(2, 4, 5, 8), draw(2, 2, 7, 8, seed=1), draw(2, 2, 7, 3, seed=2)
    out = low_precision_attention(q, k, v)
    each = low_precision_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    assert torch.equal(out, each)
    assert low_precision_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16
    close = low_precision_attention(q, k, v, dtype=torch.float32)
    exact = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(close, exact)
    torch.testing.assert_close(out, exact, atol=0.05, rtol=0.05)


# --- gradients ---


@pytest.mark.parametrize("shift", ["max", "beta", "bounded"])
def test_gradients_are_those_of_attention(shift) -> None:
    inputs = [draw(1, 4, 5, 3, seed=s, dtype=DOUBLE) for s in range(3)]
    inputs[1], inputs[2] = inputs[1][:, :2], inputs[2][:, :2]
    inputs[1][:, :, 3] = inputs[1][:, :, 1]
    for x in inputs:
        x.requires_grad_()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()

    def run(*x: torch.Tensor) -> torch.Tensor:
        return low_precision_attention(*x, mask, dtype=DOUBLE, shift=shift, tile=2)

    assert torch.autograd.gradcheck(run, inputs)
    exact = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    cotangent = draw(1, 4, 5, 3, seed=9, dtype=DOUBLE)
    ours = torch.autograd.grad(run(*inputs), inputs, cotangent)
    theirs = torch.autograd.grad(exact, inputs, cotangent)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


def test_bfloat16_gradients_are_near_and_blind_rows_have_none() -> None:
    precision._warn_once.cache_clear()
    inputs = [draw(1, 2, 6, 8, seed=s).requires_grad_() for s in range(3)]
    mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    with pytest.warns(UserWarning, match="show each query at least one key"):
        out = low_precision_attention(*inputs, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low_precision_attention(*inputs, mask)  # said once
    cotangent = draw(1, 2, 6, 8, seed=9)
    ours = torch.autograd.grad(out, inputs, cotangent)
    assert torch.equal(ours[0][:, :, 0], torch.zeros(1, 2, 8))
    exact = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    theirs = torch.autograd.grad(exact[:, :, 1:], inputs, cotangent[:, :, 1:])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.05)


def test_error_of_the_query_weights_is_the_papers_formula() -> None:
    """dQ and dW_Q of a wrong O differ by the error of delta, times P K and (P K)^T X."""
    x = draw(1, 1, 12, 10, dtype=DOUBLE)
    to_q = draw(10, 4, seed=1, dtype=DOUBLE)
    q, k, v = x @ to_q, draw(1, 1, 12, 4, seed=2, dtype=DOUBLE), draw(1, 1, 12, 4, seed=3).double()
    settings = precision.Settings(DOUBLE, "max", 7.0, "float32", 12)
    out, log_sum = precision.rounded_forward(q, k, v, None, settings)
    grad = draw(1, 1, 12, 4, seed=5, dtype=DOUBLE)
    wrong = out + 0.01 * draw(1, 1, 12, 4, seed=4, dtype=DOUBLE)
    exact = precision.rounded_backward(q, k, v, None, out, log_sum, grad, DOUBLE)
    other = precision.rounded_backward(q, k, v, None, wrong, log_sum, grad, DOUBLE)
    weights = torch.softmax(q @ k.mT / 2, -1)
    # the identity that the backward pass rests on
    delta = (grad * out).sum(-1, keepdim=True)
    torch.testing.assert_close(delta, (weights * (grad @ v.mT)).sum(-1, keepdim=True))
    error = (grad * wrong).sum(-1, keepdim=True) - delta
    scale = 4**-0.5
    torch.testing.assert_close(exact[0] - other[0], scale * error * (weights @ k))
    rank_one = [error[0, 0, t] * torch.outer((weights @ k)[0, 0, t], x[0, 0, t]) for t in range(12)]
    difference = (x.mT @ (exact[0] - other[0]))[0, 0].T
    torch.testing.assert_close(difference, scale * sum(rank_one))


# --- bad input ---


def test_bad_input() -> None:
    q = draw(1, 2, 3, 4)
    for beta in (1.0, 0.5, math.nan):
        with pytest.raises(ConfigError, match="beta must be"):
            softmax_shift(q, beta=beta)
        with pytest.raises(ConfigError, match="beta must be"):
            low_precision_attention(q, q, q, beta=beta)
    with pytest.raises(ConfigError, match="tie_tol must be >= 0"):
        softmax_shift(q, tie_tol=-1.0)
    with pytest.raises(DataError, match="got 1 entries of NaN"):
        softmax_shift(torch.tensor([[math.nan, 1.0]]))
    with pytest.raises(DataError, match="scores must be finite"):
        low_precision_attention(q.masked_fill(q > 1, math.nan), q, q)
    with pytest.raises(DtypeError, match=r"q must be floating; got torch\.int64"):
        low_precision_attention(q.long(), q, q)
    with pytest.raises(DtypeError, match=r"k must be .* without their scale"):
        low_precision_attention(q, q.to(torch.float8_e4m3fn), q)
    with pytest.raises(DtypeError, match=r"dtype must be torch\.bfloat16"):
        low_precision_attention(q, q, q, dtype=torch.float16)
    with pytest.raises(ConfigError, match="unknown shift 'betta'; did you mean 'beta'"):
        low_precision_attention(q, q, q, shift="betta")
    with pytest.raises(ConfigError, match="unknown accumulate"):
        low_precision_attention(q, q, q, accumulate="fp32")
    with pytest.raises(ConfigError, match="tile must be >= 1"):
        low_precision_attention(q, q, q, tile=0)
    with pytest.raises(ShapeError, match="mask must broadcast"):
        low_precision_attention(q, q, q, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(DtypeError, match="mask must be boolean"):
        softmax_shift(q, mask=torch.ones(3, 4))
    with pytest.raises(ShapeError, match="q must have the shape"):
        low_precision_attention(q[0], q, q)


def test_device_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old card")
    with pytest.raises(UnsupportedError, match=r"needs a device with bfloat16; got Old card"):
        precision.check_bfloat16(torch.device("cuda"))
    precision.check_bfloat16(torch.device("cpu"))
