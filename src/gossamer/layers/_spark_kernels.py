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


def gather_numba(units: Tensor, weights: Tensor, up: Tensor, rest: Tensor, down: Tensor) -> Tensor:
    """Return the weighted sum of the rows of `down` for the active units, float32 on the CPU."""
    out = _floats(down.shape[1])
    _numba_loop()(*(t.numpy() for t in (units, weights, up, rest, down, out)))
    return out


@cache
def _numba_loop() -> Any:
    import numba

    @numba.njit(fastmath=True, nogil=True)
    def loop(units, weights, up, rest, down, out):  # type: ignore[no-untyped-def]
        # four units at a time: four streams of memory, and a quarter of the passes over `out`
        count = units.shape[0]
        whole = count - count % 4
        for n in range(0, whole, 4):
            u0, u1, u2, u3 = up[units[n]], up[units[n + 1]], up[units[n + 2]], up[units[n + 3]]
            a = b = c = d = rest[0] * 0
            for i in range(rest.shape[0]):
                a += u0[i] * rest[i]
                b += u1[i] * rest[i]
                c += u2[i] * rest[i]
                d += u3[i] * rest[i]
            a, b = a * weights[n], b * weights[n + 1]
            c, d = c * weights[n + 2], d * weights[n + 3]
            v0, v1 = down[units[n]], down[units[n + 1]]
            v2, v3 = down[units[n + 2]], down[units[n + 3]]
            for i in range(out.shape[0]):
                out[i] += a * v0[i] + b * v1[i] + c * v2[i] + d * v3[i]
        for n in range(whole, count):
            row, values = up[units[n]], down[units[n]]
            total = rest[0] * 0
            for i in range(rest.shape[0]):
                total += row[i] * rest[i]
            total *= weights[n]
            for i in range(out.shape[0]):
                out[i] += total * values[i]

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
        self._call("matvec", matrix.dtype, *_pointers(matrix, x, out), *_sizes(matrix.shape))
        return out

    def gather(
        self, units: Tensor, weights: Tensor, up: Tensor, rest: Tensor, down: Tensor
    ) -> Tensor:
        """Return the weighted sum of the rows of `down` for the active units, in float32."""
        out = _floats(down.shape[1])
        weights = weights.float()  # a name of its own, so that it lives as long as its pointer
        pointers = _pointers(units, weights, up, rest, down, out)
        sizes = _sizes((len(units), up.shape[1], down.shape[1]))
        self._call("gather", up.dtype, *pointers, *sizes)
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
