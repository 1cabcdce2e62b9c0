"""What the generalization measures work on: a copy of the model in float64, and its data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gossamer.checks import check_finite
from gossamer.errors import DataError, DtypeError, ShapeError, UnsupportedError

__all__ = ["Batches", "call_for_logits", "exact_copy", "read_logits"]

_ROWS = 1000
"""Rows of a pair of arrays that are computed at once."""


def exact_copy(model: nn.Module) -> nn.Module:
    """Return a copy in float64 and evaluation mode, with parametrized weights written out.

    Raises:
        UnsupportedError: If the model cannot be copied, or holds no parameters.
    """
    plain = getattr(model, "_orig_mod", model)  # of a compiled model
    try:
        found: nn.Module = copy.deepcopy(plain)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"the model must be one that copy.deepcopy can copy; got {type(model).__name__} and "
            f"the error {error}. Remove weight norms of the old kind, hooks and open handles."
        ) from error
    found.eval()
    first = next(found.parameters(), None)
    if first is None:
        raise UnsupportedError(
            f"the model must have parameters; got {type(model).__name__} without any. Pass a "
            "trained network."
        )
    if first.device.type == "mps":  # which has no float64
        found.cpu()
    found.double()
    for module in found.modules():
        if parametrize.is_parametrized(module):
            _write_out(module)
    return found.requires_grad_(False)


@torch.no_grad()
def _write_out(module: nn.Module) -> None:
    """Replace computed weights by their values.

    Not by torch's own function, which takes them from the class, and that is the original's too.
    """
    values = {name: getattr(module, name) for name in module.parametrizations}  # type: ignore[union-attr]
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value.detach().clone()))


class Batches:
    """The whole data set as batches `(x, y)` on one device; read once, in the order given.

    Args:
        loader: Batches of two tensors or arrays, or one pair of arrays `(x, y)`.
        device: Where batches are computed.

    Raises:
        DataError: If there are no rows, or a batch is no pair.
        ShapeError: If x and y differ in length.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.device = device
        self._pairs = [_pair(x, y) for x, y in _parts(loader)]
        self._pairs = [pair for pair in self._pairs if len(pair[0])]
        self.num_examples = sum(len(x) for x, _ in self._pairs)
        if not self.num_examples:
            raise DataError("loader must hold at least one training example; got none. Add some.")
        for x, _ in self._pairs:
            if x.is_floating_point():
                check_finite(x, "x of loader")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self._pairs:
            wide = x.double() if x.is_floating_point() else x
            yield wide.to(self.device), y.to(self.device)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self._pairs[0][0].shape[1:])


def _parts(loader: Any) -> Iterator[tuple[Any, Any]]:
    arrays = (Tensor, np.ndarray)
    if isinstance(loader, tuple | list) and len(loader) == 2:
        x, y = loader
        if isinstance(x, arrays) and isinstance(y, arrays):
            if len(x) != len(y):
                raise ShapeError(
                    f"x and y must have one row for each example; got {len(x)} and {len(y)} rows "
                    "in loader. Pass a pair (x, y), or batches of pairs."
                )
            for begin in range(0, len(x), _ROWS):
                yield x[begin : begin + _ROWS], y[begin : begin + _ROWS]
            return
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            got = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
            raise DataError(
                f"each batch of loader must be a pair (x, y); got {got}. Wrap the loader, for "
                "example ((b['pixels'], b['label']) for b in loader)."
            )
        yield batch[0], batch[1]


def _pair(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    pair = torch.as_tensor(x), torch.as_tensor(y)
    if not pair[0].dim() or not pair[1].dim() or len(pair[0]) != len(pair[1]):
        raise ShapeError(
            f"x and y of a batch must have one row for each example; got {tuple(pair[0].shape)} "
            f"and {tuple(pair[1].shape)} in loader. Make them agree."
        )
    return pair


def call_for_logits(model: nn.Module, x: Tensor) -> Any:
    """Return what a model gives: its first output, or its `logits`."""
    out = model(x)
    if hasattr(out, "logits"):
        return out.logits
    return out[0] if isinstance(out, tuple | list) else out


def read_logits(model: nn.Module, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Return logits and labels of each batch, checked.

    Raises:
        ShapeError: If the logits are not `(B, C)` with C >= 2, or the labels not `(B,)`.
        DtypeError: If labels are no integers.
        DataError: If a label is no class, or a logit not finite.
    """
    for x, y in batches:
        logits = call_for_logits(model, x)
        check_classes(logits, y)
        check_finite(logits.detach(), "logits of the model")
        yield logits, y.long()


def check_classes(logits: Any, labels: Tensor) -> None:
    """Check that logits are rows of classes and labels are among them."""
    shape = tuple(getattr(logits, "shape", ()))
    if len(shape) != 2 or shape[1] < 2 or shape[0] != len(labels):
        raise ShapeError(
            f"the model must give logits (B, C) with B = {len(labels)} and C >= 2; got {shape}. "
            "For one logit, return its negative beside it."
        )
    if labels.dim() != 1:
        raise ShapeError(
            f"labels must have the shape (B,) = ({len(labels)},); got {tuple(labels.shape)}. Pass "
            "class indices."
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise DtypeError(
            f"labels must be integers, one class index for each row; got {labels.dtype}. Convert "
            "them with .long()."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= shape[1]:
        raise DataError(
            f"labels must lie between 0 and {shape[1] - 1}, the classes of the model; got "
            f"{low if low < 0 else high}. Remove or renumber such rows."
        )
