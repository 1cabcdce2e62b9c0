"""Linear operators of a network: exact norms, and the sums over the windows of a pooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.nn import functional as F

from gossamer.errors import UnsupportedError

__all__ = ["adaptive_counts", "circular_norm", "operator_norm", "window_sum"]

_DENSE = 64
"""Inputs up to which the operator is written out as a matrix."""


def operator_norm(apply: Callable[[Tensor], Tensor], like: Tensor) -> float:
    r"""Return the largest singular value of a linear operator.

    Lanczos on $A^\top A$, one pass forward and one backward for each step: power iteration that
    keeps its steps orthogonal, since the leading singular values of a convolution lie so close
    together that the plain one has no 4 digits after 100 steps.

    Args:
        apply: A, linear; takes a batch.
        like: A tensor of the input's shape, a batch of one; gives dtype and device.
    """
    shape = tuple(like.shape[1:])
    size = math.prod(shape)
    if size <= _DENSE:
        eye = torch.eye(size, dtype=like.dtype, device=like.device).reshape(size, *shape)
        return float(torch.linalg.matrix_norm(apply(eye).flatten(1), 2))

    def squared(vector: Any) -> Any:
        with torch.enable_grad():
            x = torch.as_tensor(vector, dtype=like.dtype, device=like.device)
            x = x.reshape(1, *shape).requires_grad_()
            y = apply(x)
            (back,) = torch.autograd.grad(y, x, y.detach())
        return back.reshape(-1).cpu().numpy()

    start = np.random.default_rng(0).standard_normal(size)
    if not np.abs(squared(start)).max() > 0:
        return 0.0
    operator = LinearOperator((size, size), matvec=squared, dtype=np.float64)
    value = eigsh(operator, k=1, v0=start, tol=1e-10, return_eigenvectors=False)[0]
    return math.sqrt(max(float(value), 0.0))


def circular_norm(weight: Tensor, shape: Sequence[int], groups: int, dilation: Any) -> float:
    r"""Return the norm of a convolution of stride 1 whose borders wrap around.

    By Fourier transform: each frequency is a matrix of channels, and the largest of their norms
    is that of the whole.

    Args:
        weight: `(out, in / groups, *kernel)`.
        shape: Of the input in space.
        groups: Of the channels.
        dilation: Steps between the entries of the kernel, one number or one for each axis.

    Raises:
        UnsupportedError: If the kernel reaches further than the input.
    """
    axes = len(shape)
    steps = (dilation,) * axes if isinstance(dilation, int) else tuple(dilation)
    kernel = weight.shape[2:]
    reach = [step * (k - 1) + 1 for step, k in zip(steps, kernel, strict=True)]
    if any(r > s for r, s in zip(reach, shape, strict=True)):
        raise UnsupportedError(
            f"a convolution that wraps around needs inputs no smaller than its kernel, "
            f"{tuple(reach)}; got {tuple(shape)}. Use convolution='exact'."
        )
    spread = weight.new_zeros((*weight.shape[:2], *shape))
    where = tuple(slice(0, r, step) for r, step in zip(reach, steps, strict=True))
    spread[(slice(None), slice(None), *where)] = weight
    space = tuple(range(2, 2 + axes))
    frequencies = torch.fft.fftn(spread, dim=space).permute(*space, 0, 1)
    blocks = frequencies.chunk(groups, dim=-2)
    return max(float(torch.linalg.matrix_norm(block, 2).max()) for block in blocks)


def window_sum(
    x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, size: Sequence[int]
) -> Tensor:
    """Return the sum over each window of a pooling; padding counts nothing.

    Args:
        x: `(B, C, *space)`.
        kernel: Of the pooling, one number or one for each axis; so are stride, padding, dilation.
        stride: Between windows.
        padding: On both sides.
        dilation: Between the entries of a window.
        size: Of the output in space, which says what became of windows over the edge.
    """
    axes = x.dim() - 2
    k, s, p, d = (
        (v,) * axes if isinstance(v, int) else tuple(v) * (axes if len(v) == 1 else 1)
        for v in (kernel, stride, padding, dilation)
    )
    sides = [side for q, t in zip(reversed(p), reversed(s), strict=True) for side in (q, q + t)]
    wide = F.pad(x.reshape(-1, 1, *x.shape[2:]), sides)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    summed = convolve(wide, x.new_ones(1, 1, *k), stride=s, dilation=d)
    summed = summed[(slice(None), slice(None), *(slice(0, n) for n in size))]
    return summed.reshape(*x.shape[:2], *summed.shape[2:])


def adaptive_counts(before: Sequence[int], after: Sequence[int], like: Tensor) -> Tensor:
    """Return how many entries each window of an adaptive pooling has, `(1, 1, *after)`."""
    counts = like.new_ones(())
    for n, m in zip(before, after, strict=True):
        sizes = [-(-(i + 1) * n // m) - i * n // m for i in range(m)]
        counts = counts.unsqueeze(-1) * like.new_tensor(sizes)
    return counts.reshape(1, 1, *after)
