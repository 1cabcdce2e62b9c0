"""What losses over classes share: both kinds of labels, ignored rows, weights, rows in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.losses._rows import REDUCTIONS

__all__ = ["WEIGHT_MODES", "ClassLoss", "chunk_numbers", "in_chunks", "pick", "product"]

WEIGHT_MODES = ("class", "sample")
_SUM_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
_CHUNK_NUMBERS = 2**19  # 2 MiB of float32: a chunk and its copies stay in the cache
_DEVICE_CHUNK_NUMBERS = 2**25

RowLoss = Callable[..., Tensor]
"""From rows of logits and what belongs to the rows, such as labels, to the loss of each row."""


class ClassLoss(nn.Module):
    """A loss of log-probabilities and one label for each row; a subclass gives `of_rows`.

    Args:
        weight: One number >= 0 for each class, or `None`.
        weight_mode: `"sample"` or `"class"`; see `LabelSmoothingLoss`.
        ignore_index: Label of rows that do not count.
        reduction: `"mean"`, `"sum"` or `"none"`.
    """

    def __init__(
        self, weight: Any, ignore_index: int, reduction: str, *, weight_mode: str = "sample"
    ) -> None:
        super().__init__()
        check_choice(weight_mode, WEIGHT_MODES, "weight_mode")
        check_choice(reduction, REDUCTIONS, "reduction")
        check_range(ignore_index, "ignore_index", integer=True)
        self.weight_mode = weight_mode
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.num_classes: int | None = None
        # kept apart from the buffers: rounded to half precision, rows would not sum to 1
        self._exact: dict[str, Tensor] = {}
        self._moved: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}
        if weight is not None:
            self._exact["weight"] = _checked_weight(weight)
            self.num_classes = len(self._exact["weight"])

    def of_rows(self, log_p: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row, `(n,)`, from log-probabilities `(n, C)`.

        Labels are classes `(n,)` or distributions `(n, C)`.
        """
        raise NotImplementedError

    def of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row from logits `(n, C)` in float32 or better."""
        return self.of_rows(logits.log_softmax(1), labels)

    def constant(self, name: str, like: Tensor) -> Tensor:
        """Return a constant of the loss on the device and in the dtype of a tensor."""
        key = (name, like.device, like.dtype)
        if key not in self._moved:
            with torch.inference_mode(False):  # a later training step uses it too
                self._moved[key] = self._exact[name].to(like.device, like.dtype)
        return self._moved[key]

    def add_matrix(self, name: str, matrix: Tensor) -> None:
        """Keep a matrix with one row for each class."""
        self._exact[name] = matrix
        self.set_classes(len(matrix))

    def set_classes(self, count: int) -> None:
        """Fix the number of classes.

        Raises:
            ShapeError: If the weights are of another number.
        """
        if self.num_classes not in (None, count):
            raise ShapeError(
                f"weight must hold one number for each of {count} classes; got "
                f"{self.num_classes}. Add or remove some."
            )
        self.num_classes = count

    @property
    def class_weight(self) -> bool:
        """Whether every class term has its own weight."""
        return "weight" in self._exact and self.weight_mode == "class"

    def forward(self, logits: Tensor, labels: Any) -> Tensor:
        """Return the loss."""
        with torch.autocast(logits.device.type, enabled=False):
            return self._reduced(logits, labels)

    def _reduced(self, logits: Tensor, labels: Any) -> Tensor:
        rows = self._rows(logits)
        targets, kept = self._targets(labels, logits)
        values = self._values(rows, targets, kept)
        weights = self._row_weights(targets, kept, values)
        if not self.class_weight and weights is not None:
            values = values * weights
        if self.reduction == "none":
            return values.reshape(logits.shape[0], *logits.shape[2:])
        if self.reduction == "sum":
            return values.sum()
        if self.class_weight and targets.dim() == 2:
            weights = None  # as the framework does
        total = values.new_tensor(float(len(values))) if weights is None else weights.sum()
        return values.sum() / torch.where(total > 0, total, 1.0)

    def _rows(self, logits: Tensor) -> Tensor:
        if logits.dim() < 2:
            raise ShapeError(
                f"logits must have the shape (N, C) or (N, C, ...); got {tuple(logits.shape)}. "
                "Add an axis for the rows."
            )
        if not logits.is_floating_point():
            raise DtypeError(f"logits must be floating point; got {logits.dtype}. Use .float().")
        if self.num_classes not in (None, logits.shape[1]):
            raise ShapeError(
                f"logits must have one column for each of the {self.num_classes} classes of this "
                f"loss; got {tuple(logits.shape)}. The axis of the classes is the second one."
            )
        return _flat(logits)

    def _targets(self, labels: Any, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return labels of rows, and which rows count (`None` if all)."""
        labels = torch.as_tensor(labels, device=logits.device)
        if labels.is_floating_point():
            return _checked_soft(labels, logits), None
        expected = (logits.shape[0], *logits.shape[2:])
        if labels.dtype == torch.bool or labels.is_complex():
            raise DtypeError(f"labels must be classes or floats; got {labels.dtype}. Convert them.")
        if labels.shape != expected:
            hint = (
                "Use .float() for one distribution in each row."
                if labels.shape == logits.shape
                else "Shapes are never broadcast here."
            )
            raise ShapeError(
                f"labels must have the shape of the logits without the axis of the classes, "
                f"{expected}; got {tuple(labels.shape)}. {hint}"
            )
        flat = labels.reshape(-1).long()
        kept = flat != self.ignore_index
        if bool(kept.all()):
            _check_labels(flat, logits.shape[1], self.ignore_index)
            return flat, None
        _check_labels(flat[kept], logits.shape[1], self.ignore_index)
        return torch.where(kept, flat, 0), kept

    def _values(self, rows: Tensor, targets: Tensor, kept: Tensor | None) -> Tensor:
        def of(part: Tensor, labels: Tensor) -> Tensor:
            return self.of_logits(part if part.dtype == torch.float64 else part.float(), labels)

        if targets.requires_grad or rows.numel() <= chunk_numbers(rows):
            if kept is not None:  # whatever an ignored row holds
                rows = torch.where(kept[:, None], rows, 0.0)
            values = of(rows, targets)
        else:
            values = in_chunks(of, rows, targets, kept=kept)
        if kept is not None:
            values = torch.where(kept, values, 0.0)
        if bool(values.isnan().any()):
            row = int(values.isnan().nonzero()[0])
            raise DataError(
                "logits must hold no NaN and no +inf, and not -inf alone in a row; got such values "
                f"in row {row}. Lower the learning rate, or look at the mask."
            )
        return values

    def _row_weights(self, targets: Tensor, kept: Tensor | None, like: Tensor) -> Tensor | None:
        """Return the weight of each row, or `None` if all rows weigh 1."""
        if "weight" not in self._exact:
            return None if kept is None else kept.to(like.dtype)
        weight = self.constant("weight", like)
        weights = weight[targets] if targets.dim() == 1 else targets.to(like.dtype) @ weight
        return weights if kept is None else weights * kept

    def extra_repr(self) -> str:
        """Show the options."""
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"


def in_chunks(of: RowLoss, rows: Tensor, *targets: Tensor, kept: Tensor | None = None) -> Tensor:
    """Return the loss of each row, `of(rows, *targets)`, some rows at a time.

    Args:
        of: Called with some rows of the logits and the same rows of each target.
        rows: Logits, `(M, C)`.
        targets: Tensors of M rows; no gradient reaches them.
        kept: Which rows get a gradient, `(M,)`. Default all.
    """
    values: Tensor = _InChunks.apply(rows, kept, of, *targets)  # type: ignore[no-untyped-call]
    return values


class _InChunks(torch.autograd.Function):
    """A loss of many rows, chunk by chunk, with the gradient of each while it is in the cache.

    Beside the gradient nothing of the size of the logits is built, also for half precision, which
    becomes float32 in chunks.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, kept: Tensor | None, of: RowLoss, *targets: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, *targets)
        ctx.kept, ctx.of = kept, of
        if not ctx.needs_input_grad[0]:
            return torch.cat([of(*parts) for parts in _chunks(rows, *targets)])
        values, ctx.gradient = _with_gradient(of, rows, *targets)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *targets = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is asked for
            (result,) = torch.autograd.grad(ctx.of(rows, *targets), rows, grad, create_graph=True)
        else:
            # given away, since it is scaled in place; a second pass makes it again
            result, ctx.gradient = ctx.gradient, None
            if result is None:
                _, result = _with_gradient(ctx.of, rows, *targets)
            result = result.mul_(grad[:, None])
        if ctx.kept is not None:
            result = torch.where(ctx.kept[:, None], result, 0.0)
        return result, None, None, *(None for _ in targets)


def _with_gradient(of: RowLoss, rows: Tensor, *targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and its gradient by the logits of the row."""
    gradient = torch.empty_like(rows)
    values = []
    for place, part, *others in _chunks(gradient, rows, *targets):
        leaf = part.detach().requires_grad_()
        with torch.enable_grad():
            value = of(leaf, *others)
        place.copy_(torch.autograd.grad(value, leaf, torch.ones_like(value))[0])
        values.append(value.detach())
    return torch.cat(values), gradient


def _chunks(rows: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield some rows at a time of tensors with the same rows."""
    size = max(1, chunk_numbers(rows) // rows.shape[1])
    for begin in range(0, len(rows), size):
        yield tuple(tensor[begin : begin + size] for tensor in (rows, *others))


def chunk_numbers(rows: Tensor) -> int:
    """Return how many numbers of the logits are looked at at a time."""
    return _CHUNK_NUMBERS if rows.device.type == "cpu" else _DEVICE_CHUNK_NUMBERS


def pick(values: Tensor, labels: Tensor) -> Tensor:
    """Return the value of each row's label, the mean over its labels where they are soft."""
    if labels.dim() == 1:
        return values.gather(1, labels[:, None])[:, 0]
    return product(labels.to(values.dtype), values).sum(1)


def product(weights: Tensor, values: Tensor) -> Tensor:
    """Return the products, 0 where the weight is 0 and the value infinite."""
    return torch.where(weights != 0, weights * values, 0.0)


def _flat(x: Tensor) -> Tensor:
    """Return `(N, C, ...)` as rows `(M, C)`."""
    return x if x.dim() == 2 else x.movedim(1, -1).reshape(-1, x.shape[1])


def _checked_weight(weight: Any) -> Tensor:
    found = torch.as_tensor(weight).detach().to("cpu", torch.float64)
    if found.dim() != 1:
        raise ShapeError(
            f"weight must be (C,), one number for each class; got {tuple(found.shape)}. Flatten it."
        )
    if not bool((torch.isfinite(found) & (found >= 0)).all()):
        raise ConfigError("weight must be finite and >= 0; got other numbers. Change them.")
    return found


def _check_labels(labels: Tensor, count: int, ignore_index: int) -> None:
    outside = (labels < 0) | (labels >= count)
    if bool(outside.any()):
        raise DataError(
            f"labels must lie in 0 to {count - 1}, or be ignore_index, {ignore_index}; got "
            f"{int(labels[outside][0])}. Check the number of classes."
        )


def _checked_soft(labels: Tensor, logits: Tensor) -> Tensor:
    if labels.shape != logits.shape:
        raise ShapeError(
            f"soft labels must have the shape of the logits, {tuple(logits.shape)}; got "
            f"{tuple(labels.shape)}. For classes use .long()."
        )
    flat = _flat(labels)
    sums = flat.sum(1, dtype=torch.float32)
    tolerance = _SUM_TOLERANCE.get(labels.dtype, 1e-3)
    if not bool(((sums - 1).abs() <= tolerance).all()) or bool((flat < 0).any()):
        row = int((sums - 1).abs().nan_to_num(nan=torch.inf).argmax())
        raise DataError(
            f"soft labels must be >= 0 and sum to 1 over the classes; got a sum of "
            f"{float(sums[row]):.4g} in row {row}, or a negative number. Normalise them."
        )
    return flat
