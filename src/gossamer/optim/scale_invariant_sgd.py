"""SGD with weight decay and a gradient clipped relative to the norm of the weights; no state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from gossamer.checks import check_range
from gossamer.errors import ConfigError, UnsupportedError

__all__ = ["ScaleInvariantSGD", "clip_grad_relative_"]

# a stronger clipping is done in two passes, since the decay over the factor would lose digits
_LEAST_FUSED = 1e-3


class ScaleInvariantSGD(torch.optim.Optimizer):
    r"""SGD for weights whose common scale does not matter: weight decay, relative clipping.

    $$x \leftarrow (1 - \eta\lambda)\,x
      - \eta\, g\,\min\!\Big(1, \sqrt{2C\lambda/\eta}\;\|x\| / \|g\|\Big)$$

    Norms are over all parameters of the optimiser together. When the weights have found their
    scale, $\|g\| / \|x\|$ is about $\sqrt{2\lambda/\eta}$, so that `clip` $= \sqrt C = 2$ cuts
    spikes only. Only the product of rate and decay decides how fast the direction turns, about
    $\sqrt{2\eta\lambda}$ for each step, and an initial scale that is c times off is forgotten in
    about $\ln(c) / (\eta\lambda)$ steps: for T steps take $\eta\lambda$ of 3/T to 10/T.

    Nothing is kept between steps (AdamW keeps 8 bytes for each float32 weight). Give it all
    parameters of the invariant part, biases and gains too: a parameter without decay grows and
    slows all others down. Keep the weights in float32, since bfloat16 rounds the decay away. A
    step whose gradient is not finite is left out and counted.

    Args:
        params: Parameters or groups, as for any optimiser; see `gossamer.layers.split_parameters`.
        lr: Learning rate η. Range: > 0; a schedule may set it to 0 later.
        weight_decay: Factor λ. Range: > 0 with clipping, >= 0 without; `lr * weight_decay` < 1.
        clip: √C, the multiple of the usual relative gradient norm that is let through. Range: > 1;
            `math.inf` clips nothing. Default 2, as in the paper.
        foreach: True works on all tensors at once, false on one after the other; results are equal
            up to rounding. Default the fastest there is, one pass over weights and gradients.

    Attributes:
        num_steps: Steps taken.
        num_clipped: Steps whose gradient was clipped.
        num_skipped: Steps left out because the gradient was not finite.
        relative_norm: Norm of the last gradient over that of the weights.

    Raises:
        ConfigError: If a number is out of its range, or there is no parameter.
        UnsupportedError: In `step`, if a gradient is sparse.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> x.grad = torch.tensor([0.0, 40.0])
        >>> optimizer = ScaleInvariantSGD([x], lr=0.1, weight_decay=0.05)
        >>> optimizer.step()
        >>> [round(value, 4) for value in x.tolist()], optimizer.num_clipped
        ([2.985, 2.98], 1)

    Source: Li et al., *Robust Training of Neural Networks Using Scale Invariant Architectures*,
        ICML 2022, algorithm 1.
    Deviations: steps with a gradient that is not finite are left out; groups may have their own
        rate and decay, norms are over all groups.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        weight_decay: float,
        clip: float = 2.0,
        foreach: bool | None = None,
    ) -> None:
        given: list[Any] = list(params)
        if not given:
            raise ConfigError("params must hold at least one parameter; got none. Check the model.")
        defaults = {"lr": lr, "weight_decay": weight_decay, "clip": clip, "foreach": foreach}
        super().__init__(given, defaults)
        self.num_steps = 0
        self.num_clipped = 0
        self.num_skipped = 0
        self.relative_norm = math.nan
        self._warned = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with settings of its own where it names some."""
        settings = {**self.defaults, **param_group}
        check_range(settings["lr"], "lr", low=0.0, open_low=True)
        _check_settings(settings["lr"], settings["weight_decay"], settings["clip"])
        if settings["lr"] * settings["weight_decay"] > 0.1:
            warnings.warn(
                "lr * weight_decay is the share of the weights that each step forgets; got "
                f"{settings['lr'] * settings['weight_decay']:g}. Values of 3 to 10 over the "
                "number of steps are usual.",
                UserWarning,
                stacklevel=3,
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: Computes the loss and its gradients again, or `None`.

        Raises:
            UnsupportedError: If a gradient is sparse.
            ConfigError: If a schedule brought `lr * weight_decay` to 1 or more.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [[p for p in g["params"] if p.requires_grad] for g in self.param_groups]
        weights = [p for part in trained for p in part]
        grads = [p.grad for p in weights if p.grad is not None]
        self._check_grads(weights, grads)
        foreach = all(group["foreach"] is not False for group in self.param_groups)
        weight_norm, grad_norm = _norm(weights, foreach), _norm(grads, foreach)
        if not math.isfinite(grad_norm):
            self.num_skipped += 1
            return loss
        self.num_steps += 1
        self.relative_norm = grad_norm / weight_norm if weight_norm else math.inf
        clipped = False
        for group, part in zip(self.param_groups, trained, strict=True):
            lr, decay, clip = group["lr"], group["weight_decay"], group["clip"]
            _check_settings(lr, decay, clip)
            factor = min(1.0, 1.0 / _ratio(grad_norm, weight_norm, lr, decay, clip))
            clipped = clipped or factor < 1.0
            if part and lr:
                _update(part, lr, decay, factor, group["foreach"])
        self.num_clipped += clipped
        return loss

    def _check_grads(self, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        if any(grad.layout != torch.strided for grad in grads):
            raise UnsupportedError(
                "gradients must be dense, since weight decay acts on all weights; got a sparse "
                "one. Build the embedding with sparse=False."
            )
        if len(grads) < len(weights) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{len(weights) - len(grads)} of {len(weights)} parameters have no gradient; they "
                "decay, and their norm still counts. Leave unused parameters out.",
                UserWarning,
                stacklevel=4,
            )


def clip_grad_relative_(
    params: Tensor | Iterable[Tensor], lr: float, weight_decay: float, *, clip: float = 2.0
) -> float:
    r"""Clip gradients relative to the norm of the weights, in place, for any optimiser.

    $$g \leftarrow g\,\min\!\Big(1, \sqrt{2C\lambda/\eta}\;\|x\| / \|g\|\Big)$$

    Args:
        params: All parameters of the scale-invariant part.
        lr: Learning rate η of the optimiser. Range: > 0.
        weight_decay: Its weight decay λ. Range: > 0.
        clip: √C. Range: > 1. Default 2.

    Returns:
        The norm of the gradient over the threshold: above 1 it was clipped. A gradient that is not
        finite is left as it is; the ratio is then not finite either.

    Raises:
        ConfigError: If a number is out of its range, or there is no parameter.
        UnsupportedError: If a gradient is sparse.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> x.grad = torch.tensor([0.0, 40.0])
        >>> round(clip_grad_relative_([x], 0.1, 0.05), 6), round(float(x.grad[1]), 4)
        (4.0, 10.0)

    Source: Li et al., ICML 2022, algorithm 1.
    Deviations: none
    """
    weights = [params] if isinstance(params, Tensor) else list(params)
    if not weights:
        raise ConfigError("params must hold at least one parameter; got none. Check the model.")
    check_range(lr, "lr", low=0.0, open_low=True)
    _check_settings(lr, weight_decay, clip)
    grads = [p.grad for p in weights if p.grad is not None]
    if any(grad.layout != torch.strided for grad in grads):
        raise UnsupportedError(
            "gradients must be dense; got a sparse one. Build the embedding with sparse=False."
        )
    with torch.no_grad():
        grad_norm = _norm(grads, True)
        ratio = _ratio(grad_norm, _norm(weights, True), lr, weight_decay, clip)
        if 1.0 < ratio < math.inf:
            torch._foreach_mul_(grads, 1.0 / ratio)
    return ratio if math.isfinite(grad_norm) else grad_norm


def _check_settings(lr: float, weight_decay: float, clip: float) -> None:
    check_range(lr, "lr", low=0.0)
    check_range(weight_decay, "weight_decay", low=0.0)
    if not clip > 1.0:
        raise ConfigError(
            f"clip must be above 1, since 1 is the usual size of a gradient; got {clip}. Use 2, or "
            "math.inf for no clipping."
        )
    if weight_decay == 0.0 and math.isfinite(clip):
        raise ConfigError(
            "weight_decay must be above 0 with clipping, since the threshold is 0 without it and "
            f"nothing would move; got 0 and clip={clip}. Set it, or use clip=math.inf."
        )
    if lr * weight_decay >= 1.0:
        raise ConfigError(
            f"lr * weight_decay must be below 1; got {lr} * {weight_decay} = {lr * weight_decay:g}."
            " Lower one of them."
        )


def _ratio(
    grad_norm: float, weight_norm: float, lr: float, weight_decay: float, clip: float
) -> float:
    """Return the norm of the gradient over the threshold; tiny where there is nothing to clip."""
    least = 1e-300
    if lr == 0.0 or weight_norm == 0.0 or not math.isfinite(clip):
        return least
    return max(grad_norm / (clip * math.sqrt(2.0 * weight_decay / lr) * weight_norm), least)


def _norm(values: Sequence[Tensor], foreach: bool) -> float:
    """Return the norm of all numbers together, without overflow of their squares."""
    if not values:
        return 0.0
    norms = torch._foreach_norm(list(values)) if foreach else [x.norm() for x in values]
    total = _joined(norms)
    # squares in float32 end at 1e38 and fade below 1e-38; only such sums are done again, in float64
    if 1e-15 < total < math.inf:
        return total
    return _joined([x.double().norm() for x in values])


def _joined(norms: Sequence[Tensor]) -> float:
    device = norms[0].device
    return float(torch.stack([n.double().to(device) for n in norms]).norm())


def _update(
    weights: Sequence[Tensor], lr: float, decay: float, factor: float, foreach: bool | None
) -> None:
    """Take the step of one group, its gradients multiplied by `factor`."""
    with_grad = [p for p in weights if p.grad is not None]
    grads = [p.grad for p in with_grad if p.grad is not None]
    without = [p for p in weights if p.grad is None]
    keep = 1.0 - lr * decay
    if foreach is None and with_grad and factor > _LEAST_FUSED and _fusable(with_grad):
        # SGD with coupled decay is the same step: x - lr f (g + decay / f x), in one pass
        sgd(
            with_grad,
            grads,
            [None] * len(grads),
            fused=True,
            weight_decay=decay / factor,
            momentum=0.0,
            lr=lr * factor,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if without:
            torch._foreach_mul_(without, keep)
    elif foreach is not False:
        torch._foreach_mul_(list(weights), keep)
        if with_grad:
            torch._foreach_add_(with_grad, grads, alpha=-lr * factor)
    else:
        for weight in weights:
            weight.mul_(keep)
        for weight, grad in zip(with_grad, grads, strict=True):
            weight.add_(grad, alpha=-lr * factor)


def _fusable(weights: Sequence[Tensor]) -> bool:
    """Return whether the framework has one kernel for these tensors."""
    return all(p.device.type in ("cpu", "cuda") and p.is_contiguous() for p in weights)
