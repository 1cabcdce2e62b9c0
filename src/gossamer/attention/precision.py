"""Attention as a low-precision kernel rounds it, and a softmax shift that removes its bias."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gossamer.attention.core import check_heads, check_mask
from gossamer.checks import check_choice, check_range
from gossamer.errors import DataError, DtypeError, ShapeError, UnsupportedError

__all__ = ["low_precision_attention", "softmax_shift"]

SHIFTS = ("max", "beta", "bounded")
# exp(-2^-7) is below 1 in bfloat16; a smaller shift may round back to 1
LEAST_SHIFT = 2.0**-7
# exp(-64) leaves weights down to exp(-23) of the largest in float32's normal range, and exp(-16)
# is all that it takes to get below 1
LIMITS = {"beta": 64.0, "bounded": 16.0}


def softmax_shift(
    scores: Tensor, *, beta: float = 7.0, tie_tol: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    r"""Return for each row the number m that softmax subtracts before it takes exponentials.

    With r the largest score of a row:

    $$m = \begin{cases} \beta r & r > 0,\ \text{tied} \\ 0 & r < 0,\ \text{tied} \\
      r & \text{else} \end{cases}$$

    Any m gives the same softmax in exact arithmetic. In bfloat16, several scores equal to the
    largest have weights of exactly 1 after the usual shift, and the sum of values of one sign then
    rounds to one side; a larger m makes these weights less than 1, so that rounding errors cancel.
    Weights must be summed after they are rounded, as `low_precision_attention` does: their common
    rounding error cancels only then.

    Args:
        scores: Scaled logits; -inf marks a key that takes no part.
        beta: Factor on positive tied maxima. Range: > 1; the paper advises 2 to 8. Default 7.
        tie_tol: Scores within this of the largest count as tied. Range: >= 0. Default 0, exact
            ties; 1e-3 is the value of the authors' code, 2^-9 takes all that round to a weight
            of 1.
        mask: Boolean, True = takes part. Default all.

    Shape:
        - scores: `(..., T, S)`; mask: broadcasts to it.
        - output: `(..., T, 1)`, at least float32, without gradient; 0 where a row sees no key.

    Raises:
        ConfigError: If `beta` or `tie_tol` is out of its range.
        DtypeError: If the scores are not floating or the mask is not boolean.
        DataError: If a score is NaN or +inf.
        ShapeError: If the mask does not fit.

    Example:
        >>> softmax_shift(torch.tensor([[3.0, 1.0], [3.0, 3.0], [-2.0, -2.0]])).tolist()
        [[3.0], [21.0], [0.0]]

    Source: Qiu and Yao, *Why Low-Precision Transformer Training Fails*, 2025, algorithm 1.
    Deviations: a shift below 2^-7, as for a tie at 0, becomes 1, since the weight would round to 1
        again; one above 64 becomes 64, since the row would underflow to 0 / 0.
    """
    check_range(beta, "beta", low=1.0, open_low=True)
    check_range(tie_tol, "tie_tol", low=0.0)
    check_floating(scores, "scores")
    scores = scores.detach()
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if mask is not None:
        scores = hide(scores, mask)
    check_scores(scores)
    top = scores.amax(-1, keepdim=True)
    tied = (scores >= top - tie_tol).sum(-1, keepdim=True) > 1
    return shift_rows(top, tied, "beta", beta)


def shift_rows(top: Tensor, tied: Tensor, shift: str, beta: float) -> Tensor:
    """Return m of each row from its largest score and whether that is tied."""
    if shift == "max":
        m = top
    else:
        distance = torch.where(top > 0, (beta - 1) * top, -top)
        distance = distance.clamp(max=LIMITS[shift])
        distance = torch.where(distance < LEAST_SHIFT, 1.0, distance)
        m = torch.where(tied, top + distance, top)
    return torch.where(top == -math.inf, 0.0, m)


def low_precision_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shift: str = "max",
    beta: float = 7.0,
    accumulate: str = "float32",
    tile: int | None = None,
) -> Tensor:
    r"""Attention with the roundings of a flash-type kernel, on any device.

    $$\bar P = \mathrm{exp}(S - m), \qquad O = \bar P V / \textstyle\sum \bar P$$

    Inputs and $\bar P$ are rounded to `dtype`, products are summed in float32, $\bar P V$ is
    rounded to `dtype`, the sums of $\bar P$ stay in float32. The backward pass is the usual one of
    such kernels, with $\delta = \mathrm{rowsum}(dO \circ O)$ of the rounded output. With
    `dtype=torch.float64` nothing is rounded and every shift gives the same. A reference to measure
    with, not a fast kernel: 5 to 10 times slower than `attend`.

    Args:
        q: Queries.
        k: Keys; with fewer heads than queries, each serves a group.
        v: Values.
        mask: Boolean, True = takes part. Default all.
        dtype: `torch.bfloat16`, `torch.float32` or `torch.float64`. Default bfloat16.
        shift: `"max"`, the usual one; `"beta"`, that of `softmax_shift`; or `"bounded"`, the same
            with a distance of at most 16 from the largest score. Default `"max"`.
        beta: Of the latter two. Range: > 1. Default 7.
        accumulate: `"float32"`, or `"bfloat16"` for a running sum that is rounded after each key.
            Default `"float32"`.
        tile: Keys at a time; the shift is found over all keys first. Unit: keys. Default all.

    Shape:
        - q: `(B, H, T, D)`; k: `(B, H_kv, S, D)`; v: `(B, H_kv, S, D_v)`, H a multiple of H_kv.
        - mask: broadcasts to `(B, H, T, S)`.
        - output: `(B, H, T, D_v)`, dtype of `q`; 0 for a query that sees nothing.

    Raises:
        ConfigError: If an option is unknown or out of its range.
        DtypeError: If inputs are integers or 8-bit floats, or `dtype` is another.
        DataError: If a score is NaN or infinite.
        ShapeError: If the shapes do not fit.
        UnsupportedError: If bfloat16 sums are asked for on a device without them.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> a = low_precision_attention(q, k, v)
        >>> torch.equal(a, low_precision_attention(q, k, v, shift="beta"))  # no ties, no change
        True

    Source: Qiu and Yao 2025, sections 2 and 4; the running sum and `"bounded"` are additions.
    Deviations: ties are looked for over whole rows, not inside one tile; row sums are never
        clamped; `softmax_shift`'s rules for very small and very large shifts.
    """
    check_choice(shift, SHIFTS, "shift")
    check_choice(accumulate, ("float32", "bfloat16"), "accumulate")
    check_range(beta, "beta", low=1.0, open_low=True)
    if tile is not None:
        check_range(tile, "tile", low=1, integer=True)
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise DtypeError(
            "dtype must be torch.bfloat16, torch.float32 or torch.float64; got "
            f"{dtype}. The shift needs the range of float32: change dtype."
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(x, name)
    check_heads(q, k, v)
    if accumulate == "bfloat16":
        check_bfloat16(q.device)
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    if mask is not None:
        shape = (*q.shape[:3], k.shape[2])
        mask = fitting_mask(mask, torch.Size(shape))
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            _warn_of_blind_rows(mask)
    settings = Settings(dtype, shift, beta, accumulate, tile or k.shape[2])
    out: Tensor = _Rounded.apply(q, k, v, mask, settings)  # type: ignore[no-untyped-call]
    return out


class Settings(NamedTuple):
    """What `low_precision_attention` hands to its two passes."""

    dtype: torch.dtype
    shift: str
    beta: float
    accumulate: str
    tile: int


class _Rounded(torch.autograd.Function):
    """The forward pass with its roundings, and the backward pass of a flash-type kernel."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Settings
    ) -> Tensor:
        out, log_sum = rounded_forward(q, k, v, mask, settings)
        ctx.save_for_backward(q, k, v, mask, out, log_sum)
        ctx.dtype = settings.dtype
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, log_sum = ctx.saved_tensors
        grads = rounded_backward(q, k, v, mask, out, log_sum, grad, ctx.dtype)
        return *grads, None, None


def rounded_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Return the output, not yet in the dtype of `q`, and the log of each row's sum."""
    dtype = settings.dtype
    q, k, v = (_rounded(x, dtype) for x in (q, k, v))
    ends = range(0, k.shape[2], settings.tile)
    tiles = [slice(begin, begin + settings.tile) for begin in ends]
    # first pass: the largest score of each row, and how many keys share it
    top = q.new_full((*q.shape[:3], 1), -math.inf)
    count = torch.zeros_like(top)
    for tile in tiles:
        scores = _scores(q, k, mask, tile)
        check_scores(scores)
        largest = scores.amax(-1, keepdim=True)
        new = torch.maximum(top, largest)
        equal = (scores == new).sum(-1, keepdim=True)
        count, top = torch.where(top == new, count, 0) + equal, new
    m = shift_rows(top, count > 1, settings.shift, settings.beta)
    # second pass: weights and their products with the values
    total = torch.zeros_like(top)
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for tile in tiles:
        weights = _rounded(torch.exp(_scores(q, k, mask, tile) - m), dtype)
        total = total + weights.sum(-1, keepdim=True)
        values = v[..., tile, :]
        if settings.accumulate == "float32":
            out = out + weights @ values
            continue
        for key in range(values.shape[-2]):
            out = _rounded(
                out + weights[..., key, None] * values[..., key, None, :], torch.bfloat16
            )
    seen = total > 0
    total = torch.where(seen, total, 1.0)
    return torch.where(seen, _rounded(out, dtype) / total, 0.0), m + total.log()


def rounded_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; `out` enters through delta alone."""
    dtypes = q.dtype, k.dtype, v.dtype
    q, k, v, grad = (_rounded(x, dtype) for x in (q, k, v, grad))
    scale = q.shape[-1] ** -0.5
    weights = torch.exp(_scores(q, k, mask, slice(None)) - log_sum)
    delta = (grad * out).sum(-1, keepdim=True)
    grad_scores = _rounded(weights * (grad @ v.mT - delta), dtype)
    grad_q = grad_scores @ k * scale
    grad_k = grad_scores.mT @ q * scale
    grad_v = _rounded(weights, dtype).mT @ grad
    return grad_q.to(dtypes[0]), grad_k.to(dtypes[1]), grad_v.to(dtypes[2])


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values that `dtype` can hold, in the dtype that sums are made in."""
    return x.to(dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, tile: slice) -> Tensor:
    scores: Tensor = q @ k[..., tile, :].mT * q.shape[-1] ** -0.5
    return scores if mask is None else scores.masked_fill(~mask[..., tile], -math.inf)


def hide(scores: Tensor, mask: Tensor) -> Tensor:
    """Return scores with -inf where the mask is false."""
    return scores.masked_fill(~fitting_mask(mask, scores.shape), -math.inf)


def fitting_mask(mask: Tensor, shape: torch.Size) -> Tensor:
    """Return a mask expanded to the shape of the scores."""
    check_mask(mask)
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.dim() > len(shape) or any(own not in (1, size) for own, size in sizes):
        raise ShapeError(
            f"mask must broadcast to the scores, {tuple(shape)}; got {tuple(mask.shape)}. "
            "Check the lengths of queries and keys against mask."
        )
    return mask.expand(shape)


def check_floating(x: Tensor, name: str) -> None:
    """Check that a tensor holds floating numbers of 16 bits or more."""
    if not x.is_floating_point():
        raise DtypeError(f"{name} must be floating; got {x.dtype}. Convert {name} with .float().")
    if x.dtype.itemsize == 1:
        raise DtypeError(
            f"{name} must be floating with 16 bits or more; got {x.dtype}, whose values mean "
            f"nothing without their scale. Multiply {name} by its scale in a wider dtype."
        )


def check_scores(scores: Tensor) -> None:
    """Check that scores hold numbers or -inf only."""
    bad = int((scores.isnan() | (scores == math.inf)).sum())
    if bad:
        raise DataError(
            f"scores must be finite, or -inf for a hidden key; got {bad} entries of NaN or +inf. "
            "Look for them in queries and keys before the call."
        )


def check_bfloat16(device: torch.device) -> None:
    """Check that a device computes in bfloat16."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UnsupportedError(
            "accumulate='bfloat16' needs a device with bfloat16; got "
            f"{torch.cuda.get_device_name(device)}. Move q, k and v to the CPU."
        )


def _warn_of_blind_rows(mask: Tensor) -> None:
    if not bool(mask.any(-1).all()):
        _warn_once()


@cache
def _warn_once() -> None:
    warnings.warn(
        "mask should show each query at least one key in training; some see none: their output "
        "and gradient are 0. Leave such rows out of the loss, or show them themselves.",
        stacklevel=5,
    )
