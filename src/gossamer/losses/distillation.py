"""The loss of a student: soft targets of a teacher beside the labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.losses._classes import in_chunks
from gossamer.losses.teachers import TopKLogits, coarse_divergence, soft_loss

__all__ = ["DistillationLoss"]

REDUCTIONS = ("batchmean", "sum", "none")
_LOOKED_AT = 16  # rows that tell logits from probabilities


class DistillationLoss(nn.Module):
    r"""Train a student on the softened probabilities of a teacher, and on labels.

    $$L = (1 - a)\,\mathrm{CE}(s, y) + a\,\tau^2\,
      \mathrm{KL}\!\left(\mathrm{softmax}(t / \tau) \,\|\, \mathrm{softmax}(s / \tau)\right)$$

    The sum goes over the classes, the mean over the rows alone. (The framework's
    `reduction="mean"` also divides by the number of classes, which makes the term C times too
    small.) The gradient of the second term is $a \tau (p_s - p_t)$, the same as that of a
    cross-entropy with the teacher's probabilities; the value here is 0 where student and teacher
    agree. As $\tau$ grows it becomes the squared distance of logits centred in each row,
    $\frac{a}{2C} \sum_j (\bar s_j - \bar t_j)^2$. At a large $\tau$ the value is a small number
    times $\tau^2$: it is known to about $10^{-7} \tau^2$ in float32, the gradient to
    $10^{-7} \tau$.

    Chunk by chunk of rows in float32 or better: nothing of the size of the logits is built but
    their gradient, and with a mask a copy of the rows that count. The second term costs one to
    three times a cross-entropy.

    Args:
        temperature: $\tau$, of student and teacher. Range: > 0. Default 4.
        alpha: Share a of the teacher: a number from 0 to 1, or a function from the step to one,
            such as `gossamer.optim.switch_at(1000, 1.0, 0.0)`. Default 0.9.
        reduction: `"batchmean"`, the mean over the rows that count; `"sum"`, to divide by the
            count of several batches; `"none"`. Default `"batchmean"`.

    Shape:
        - logits: `(N, C)`, or `(N, T, C)` for tokens; floating.
        - teacher_logits: the same shape, or `TopKLogits` of the same rows.
        - labels: `(N,)` or `(N, T)`, classes; may be left out only if alpha is 1. Nothing is
          shifted: `logits[:, t]` is for `labels[:, t]`.
        - mask: `(N,)` or `(N, T)`, boolean, True where a row counts. Default everywhere. Labels are
          not looked at elsewhere.
        - step: of the training, where alpha is a function of it.
        - output: scalar, or the shape of the mask for `reduction="none"`, 0 where masked.

    Raises:
        ConfigError: If an option is out of its range, labels or step are missing, or the top k were
            kept for another temperature.
        ShapeError: If shapes or numbers of classes differ.
        DtypeError: If logits or labels are of the wrong kind.
        DataError: If no row counts, a label is outside, or a logit is NaN.

    Example:
        >>> loss = DistillationLoss(temperature=2.0, alpha=1.0)
        >>> s, t = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[2.0, 0.0, 0.0]])
        >>> round(float(loss(s, t)), 5)
        0.09142

    Source: Hinton et al., *Distilling the Knowledge in a Neural Network*, 2015, sections 2 and
        2.1; as used by Nagarajan et al., NeurIPS 2023.
    Deviations: the mixing weight multiplies the squared temperature (Hinton et al. leave weights
        open; those of Nagarajan et al. are unconfirmed).
    """

    def __init__(
        self,
        *,
        temperature: float = 4.0,
        alpha: float | Callable[[int], float] = 0.9,
        reduction: str = "batchmean",
    ) -> None:
        super().__init__()
        check_range(temperature, "temperature", low=0.0, open_low=True)
        if not callable(alpha):
            check_range(alpha, "alpha", low=0.0, high=1.0)
        check_choice(reduction, REDUCTIONS, "reduction")
        self.temperature = temperature
        self.alpha = alpha
        self.reduction = reduction

    def forward(
        self,
        logits: Tensor,
        teacher_logits: Tensor | TopKLogits,
        labels: Any = None,
        mask: Tensor | None = None,
        *,
        step: int | None = None,
    ) -> Tensor:
        """Return the loss."""
        alpha = self._share(step)
        _check_logits(logits)
        teacher = self._teacher(logits, teacher_logits)
        kept = _checked_mask(mask, logits)
        targets = list(teacher) if alpha > 0 else []
        if alpha < 1:
            targets.append(_checked_labels(labels, logits))
        rows = logits.flatten(0, -2)
        if kept is not None:
            rows, targets = rows[kept], [target[kept] for target in targets]
        if alpha < 1:
            _check_classes(targets[-1], logits.shape[-1])
        with torch.autocast(logits.device.type, enabled=False):
            if alpha > 0 and len(teacher) == 1:
                labels = targets[1] if alpha < 1 else None
                values = soft_loss(rows, targets[0], labels, self.temperature, alpha)
            else:
                values = in_chunks(self._rows(alpha), rows, *targets)
        _check_values(values, rows)
        if self.reduction != "none":
            return values.sum() if self.reduction == "sum" else values.mean()
        if kept is not None:
            values = values.new_zeros(len(kept)).masked_scatter(kept, values)
        return values.reshape(logits.shape[:-1])

    def _share(self, step: int | None) -> float:
        """Return alpha at a step."""
        if not callable(self.alpha):
            return self.alpha
        if step is None:
            raise ConfigError(
                "alpha is a function of the step, so the loss needs the step; got none. Call it "
                "with step=..., or give a number as alpha."
            )
        alpha = self.alpha(step)
        check_range(alpha, f"alpha at step {step}", low=0.0, high=1.0)
        return alpha

    def _rows(self, alpha: float) -> Callable[..., Tensor]:
        """Return the loss of rows from logits, the teacher's top k if these count, and labels."""

        def of(logits: Tensor, *targets: Tensor) -> Tensor:
            logits = _exact(logits)
            if alpha == 0:
                return F.cross_entropy(logits, targets[0], reduction="none")
            top, indices, rest = (
                t.to(logits.dtype) if t.is_floating_point() else t for t in targets[:3]
            )
            values = coarse_divergence(logits, top, indices, rest, self.temperature)
            values = alpha * self.temperature**2 * values
            if alpha < 1:
                own = F.cross_entropy(logits, targets[3], reduction="none")
                values = values + (1 - alpha) * own
            return values

        return of

    def _teacher(self, logits: Tensor, teacher: Tensor | TopKLogits) -> tuple[Tensor, ...]:
        """Return what the teacher says of all rows, without gradients."""
        if isinstance(teacher, TopKLogits):
            return self._top_k(logits, teacher)
        if teacher.shape != logits.shape:
            hint = (
                "Student and teacher must have the same classes in the same order, as only models "
                "with the same labels or tokenizer do."
                if teacher.shape[:-1] == logits.shape[:-1]
                else "Shapes are never broadcast here."
            )
            raise ShapeError(
                f"teacher_logits must have the shape of the logits, {tuple(logits.shape)}; got "
                f"{tuple(teacher.shape)}. {hint}"
            )
        if not teacher.is_floating_point():
            raise DtypeError(
                f"teacher_logits must be floating point; got {teacher.dtype}. Use .float()."
            )
        if teacher.requires_grad:
            warnings.warn(
                "teacher_logits require a gradient, which they do not get here. Run the teacher "
                "under torch.no_grad(), which also takes less memory.",
                stacklevel=5,
            )
        _warn_of_probabilities(teacher, "teacher_logits")
        return (teacher.detach().flatten(0, -2),)

    def _top_k(self, logits: Tensor, top: TopKLogits) -> tuple[Tensor, ...]:
        if top.values.shape[:-1] != logits.shape[:-1]:
            raise ShapeError(
                f"teacher_logits must have the rows of the logits, {tuple(logits.shape[:-1])}; got "
                f"{tuple(top.values.shape[:-1])}. Take the same rows of both."
            )
        outside = (top.indices < 0) | (top.indices >= logits.shape[-1])
        if top.values.shape[-1] > logits.shape[-1] or bool(outside.any()):
            raise ShapeError(
                f"the teacher's classes must be 0 to {logits.shape[-1] - 1}, those of the student; "
                f"got {top.values.shape[-1]} of them up to {int(top.indices.max())}. Student and "
                "teacher must have the same classes in the same order."
            )
        if top.temperature != self.temperature and top.values.shape[-1] < logits.shape[-1]:
            raise ConfigError(
                f"the teacher's top classes were kept for temperature {top.temperature:g}, at which"
                f" the rest was summed; got a loss at {self.temperature:g}. Use that temperature, "
                "or keep them again."
            )
        return (
            top.values.detach().flatten(0, -2),
            top.indices.long().flatten(0, -2),
            top.rest.detach().flatten(),
        )

    def extra_repr(self) -> str:
        """Show the options."""
        alpha = "a function of the step" if callable(self.alpha) else f"{self.alpha:g}"
        return f"temperature={self.temperature:g}, alpha={alpha}, reduction={self.reduction!r}"


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _check_logits(logits: Tensor) -> None:
    if logits.dim() not in (2, 3) or logits.shape[-1] < 2:
        raise ShapeError(
            "logits must have the shape (N, C) or (N, T, C) with 2 classes or more; got "
            f"{tuple(logits.shape)}. Reshape them."
        )
    if not logits.is_floating_point():
        raise DtypeError(f"logits must be floating point; got {logits.dtype}. Use .float().")
    _warn_of_probabilities(logits, "logits")


def _warn_of_probabilities(logits: Tensor, name: str) -> None:
    """Warn if the first rows look like probabilities."""
    rows = logits.detach().flatten(0, -2)[:_LOOKED_AT].float()
    if len(rows) and bool((rows >= 0).all() and ((rows.sum(1) - 1).abs() < 1e-3).all()):
        warnings.warn(
            f"{name} look like probabilities: they are >= 0 and sum to 1 in each row. This loss "
            f"takes logits, before the softmax; give those, or {name}.log().",
            stacklevel=6,
        )


def _checked_mask(mask: Tensor | None, logits: Tensor) -> Tensor | None:
    """Return which rows count, `None` if all."""
    expected = logits.shape[:-1]
    if mask is not None:
        if mask.shape != expected:
            raise ShapeError(
                f"mask must have one entry for each row of the logits, {tuple(expected)}; got "
                f"{tuple(mask.shape)}. Shapes are never broadcast here."
            )
        if mask.dtype != torch.bool:
            raise DtypeError(
                f"mask must be boolean, True where a row counts; got {mask.dtype}. Use .bool()."
            )
        mask = mask.flatten()
    if not (expected.numel() if mask is None else bool(mask.any())):
        raise DataError(
            "at least one row must count; got none. Leave out a batch without rows, or look at "
            "the mask, which is True where a row counts."
        )
    return None if mask is None or bool(mask.all()) else mask


def _checked_labels(labels: Any, logits: Tensor) -> Tensor:
    if labels is None:
        raise ConfigError(
            "a loss with alpha below 1 needs labels; got none. Give labels, or set alpha=1."
        )
    found: Tensor = torch.as_tensor(labels, device=logits.device)
    if found.is_floating_point() or found.dtype == torch.bool:
        raise DtypeError(f"labels must be classes, integers; got {found.dtype}. Convert them.")
    if found.shape != logits.shape[:-1]:
        raise ShapeError(
            "labels must have the shape of the logits without the classes, "
            f"{tuple(logits.shape[:-1])}; got {tuple(found.shape)}. Shapes are never broadcast."
        )
    return found.flatten().long()


def _check_classes(labels: Tensor, count: int) -> None:
    outside = (labels < 0) | (labels >= count)
    if bool(outside.any()):
        raise DataError(
            f"labels must lie in 0 to {count - 1} where the mask is True; got "
            f"{int(labels[outside][0])}. For ignored labels give mask=labels != -100."
        )


def _check_values(values: Tensor, rows: Tensor) -> None:
    wrong = values.detach().isnan()
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        name = "logits" if not bool(_exact(rows[row]).logsumexp(0).isfinite()) else "teacher_logits"
        raise DataError(
            f"{name} must hold no NaN and no +inf, and not -inf alone in a row; got such values in "
            f"row {row} of those that count. Lower the learning rate, or look at the mask."
        )
