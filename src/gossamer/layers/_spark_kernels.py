"""Compiled loops over active rows: numba for float32, C++ for float32 and bfloat16."""

from __future__ import annotations

import ctypes
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import UnsupportedError

__all__ = ["Library", "can_compile", "compiled", "gather_numba"]

_SOURCE = Path(__file__).with_name("_spark_kernels.cpp")


def gather_numba(units: Tensor, weights: Tensor, rows: Tensor, rest: Tensor) -> Tensor:
    """Return the weighted sum of what active units add, float32 on the CPU."""
    out = _floats(rows.shape[1] - len(rest))
    _numba_loop()(*(t.numpy() for t in (units, weights, rows, rest, out)))
    return out


@cache
def _numba_loop() -> Any:
    import numba

    @numba.njit(fastmath=True, nogil=True)
    def loop(units, weights, rows, rest, out):  # type: ignore[no-untyped-def]
        # four units at a time: four streams of memory, and a quarter of the passes over `out`
        count, width = units.shape[0], rest.shape[0]
        whole = count - count % 4
        for n in range(0, whole, 4):
            p, q = rows[units[n]], rows[units[n + 1]]
            r, s = rows[units[n + 2]], rows[units[n + 3]]
            a = b = c = d = rest[0] * 0
            for i in range(width):
                a += p[i] * rest[i]
                b += q[i] * rest[i]
                c += r[i] * rest[i]
                d += s[i] * rest[i]
            a, b = a * weights[n], b * weights[n + 1]
            c, d = c * weights[n + 2], d * weights[n + 3]
            p, q, r, s = p[width:], q[width:], r[width:], s[width:]
            for i in range(out.shape[0]):
                out[i] += a * p[i] + b * q[i] + c * r[i] + d * s[i]
        for n in range(whole, count):
            row = rows[units[n]]
            total = rest[0] * 0
            for i in range(width):
                total += row[i] * rest[i]
            total *= weights[n]
            for i in range(out.shape[0]):
                out[i] += total * row[width + i]

    return loop


def can_compile() -> bool:
    """Return whether the C++ kernel can be built, or was."""
    try:
        compiled()
    except UnsupportedError:
        return False
    return True


@cache
def compiled() -> Library:
    """Build the C++ kernel, or take it from PyTorch's folder of built extensions.

    Raises:
        UnsupportedError: If compiler or ninja are missing or the build fails.
    """
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    if shutil.which(compiler) is None or shutil.which("ninja") is None:
        raise UnsupportedError(
            "engine 'cpp' needs a C++ compiler and ninja; one of them was not found. Install them "
            "(`pip install ninja`) or use engine='torch'."
        )
    try:
        path = cpp_extension.load(
            "gossamer_spark",
            [str(_SOURCE)],
            extra_cflags=["-O3", "-march=native", "-ffast-math"],
            is_python_module=False,
        )
    except (RuntimeError, OSError) as error:
        raise UnsupportedError(
            f"engine 'cpp' could not be built: {str(error).splitlines()[0]}. Use engine='torch'."
        ) from error
    return Library(path)


class Library:
    """The built functions, on tensors.

    Args:
        path: The shared library.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def matvec(self, matrix: Tensor, x: Tensor) -> Tensor:
        """Return the product of a matrix and a vector, in float32."""
        out = _floats(len(matrix))
        x = x.float()  # a name of its own, so that it lives as long as its pointer
        self._call("matvec", matrix.dtype, *_pointers(matrix, x, out), *_sizes(matrix.shape))
        return out

    def gather(self, units: Tensor, weights: Tensor, rows: Tensor, rest: Tensor) -> Tensor:
        """Return the weighted sum of what active units add, in float32."""
        out = _floats(rows.shape[1] - len(rest))
        weights, rest = weights.float(), rest.float()  # alive as long as their pointers
        sizes = _sizes((len(units), len(rest), len(out)))
        self._call("gather", rows.dtype, *_pointers(units, weights, rows, rest, out), *sizes)
        return out

    def _call(self, name: str, dtype: torch.dtype, *args: Any) -> None:
        suffix = "bf16" if dtype == torch.bfloat16 else "f32"
        getattr(self._library, f"gossamer_{name}_{suffix}")(*args)


def _floats(size: int) -> Tensor:
    """Return zeros as the loops write them, whatever the defaults of PyTorch are just now."""
    return torch.zeros(size, dtype=torch.float32, device="cpu")


def _pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise UnsupportedError(
                f"the compiled loops need contiguous tensors on the CPU; got {tensor.device} and "
                f"strides {tensor.stride()}. Use engine='torch'."
            )
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


def _sizes(sizes: Any) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(n) for n in sizes]
