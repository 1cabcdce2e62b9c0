"""Rows of all processes, with the gradient on its way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ShapeError
from gossamer.losses._collectives import processes

__all__ = ["gather_with_grad"]


def gather_with_grad(tensor: Tensor) -> Tensor:
    r"""Return the rows of all processes, one below the other, in the order of their ranks.

    Parts may differ in length: nothing is padded in the result and nothing dropped. The gradient
    of a row is the sum over all processes of what they ask of it, so that the gradients of the
    parameters, summed over the processes, are those of one process with all rows. Without a group
    of `torch.distributed` the tensor comes back as it is.

    Args:
        tensor: Rows of this process; the other axes and the dtype are alike everywhere.

    Shape:
        - tensor: `(n, ...)`, n may differ between processes, 0 too; output: `(sum of n, ...)`.

    Raises:
        ShapeError: If there is no axis of rows.

    Example:
        >>> gather_with_grad(torch.arange(3.0))
        tensor([0., 1., 2.])

    Source: all-gather and its transpose, reduce-scatter.
    Deviations: the transpose is an all-reduce of which each process keeps its part, so that parts
        of different lengths work on every back-end.
    """
    if tensor.dim() == 0:
        raise ShapeError(
            "tensor must have an axis of rows; got a scalar. Use tensor[None] for one row."
        )
    out: Tensor = _Gather.apply(tensor)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        group = processes()
        lengths = group.lengths(len(tensor))
        begin = sum(lengths[: group.rank])
        ctx.part = slice(begin, begin + len(tensor))
        return group.cat(tensor) if group.size > 1 else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        total: Tensor = processes().sum(grads[0].contiguous())
        return total[ctx.part]
