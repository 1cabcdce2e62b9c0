"""The soft statistical top-k of rows in one compiled loop, for inference on a CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["kept_of_row", "top_k_of_rows"]

# Entries that half precision widens at a time: 1 MiB in float32.
BLOCK_SIZE = 2**18


def top_k_of_rows(x: Tensor, scale: float, rounding: float) -> Tensor:
    """Return `max(x - theta, 0)` of every row; a row stays in the cache for its three passes.

    Args:
        x: Rows of any floating dtype, on the CPU, without a gradient.
        scale: theta is the row's mean plus this times the norm of the centred row.
        rounding: A row whose centred norm is at most this times its mean's size is constant.

    Shape:
        - x and output: `(n, d)`.
    """
    x = x.detach().contiguous()
    if x.dtype in (torch.float32, torch.float64):
        out = torch.empty_like(x)
        _loop()(x.numpy(), scale, rounding, out.numpy())
        return out
    out = torch.empty_like(x)
    step = max(1, BLOCK_SIZE // max(1, x.shape[1]))
    for begin in range(0, len(x), step):
        wide = x[begin : begin + step].float()
        _loop()(wide.numpy(), scale, rounding, wide.numpy())
        out[begin : begin + step] = wide
    return out


def kept_of_row(x: Tensor, scale: float, rounding: float) -> tuple[Tensor, Tensor]:
    """Return indices and values of the entries of one float32 row that the soft form keeps.

    Args:
        x: The row, `(d,)`, float32 on the CPU.
        scale: As in `top_k_of_rows`.
        rounding: As there.
    """
    units = torch.empty(len(x), dtype=torch.int64)
    values = torch.empty(len(x), dtype=torch.float32)
    count = _select()(x.detach().numpy(), scale, rounding, units.numpy(), values.numpy())
    return units[:count], values[:count]


@cache
def _threshold() -> Any:
    import numba

    # sums may be taken in any order; NaN and infinity keep their meaning
    @numba.njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True)
    def threshold(row, scale, rounding):  # type: ignore[no-untyped-def]
        """Return theta of one row, and whether the row is constant."""
        total = row[0] * 0
        for i in range(row.shape[0]):
            total += row[i]
        mean = total / row.shape[0]
        squares = row[0] * 0
        for i in range(row.shape[0]):
            squares += (row[i] - mean) * (row[i] - mean)
        norm = squares**0.5
        constant = norm <= rounding * abs(mean)
        return row[0] * 0 + (mean + scale * norm), constant

    return threshold


@cache
def _loop() -> Any:
    import numba

    threshold = _threshold()

    @numba.njit(nogil=True)
    def loop(x, scale, rounding, out):  # type: ignore[no-untyped-def]
        for n in range(x.shape[0]):
            row, target = x[n], out[n]
            theta, constant = threshold(row, scale, rounding)
            if constant:
                target[:] = 0
            else:
                for i in range(row.shape[0]):
                    value = row[i] - theta
                    target[i] = 0 if value <= 0 else value

    return loop


@cache
def _select() -> Any:
    import numba

    threshold = _threshold()

    @numba.njit(nogil=True)
    def select(row, scale, rounding, units, values):  # type: ignore[no-untyped-def]
        theta, constant = threshold(row, scale, rounding)
        count = 0
        if not constant:
            for i in range(row.shape[0]):
                value = row[i] - theta
                # written always, so that no branch has to be guessed
                units[count] = i
                values[count] = value
                count += not value <= 0
        return count

    return select
