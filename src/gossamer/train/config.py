"""Settings of a training run; torch-free, so that the command line can read it."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError

__all__ = ["OPTIMIZERS", "TrainConfig"]

OPTIMIZERS = ("adamw", "scale_invariant_sgd", "sgd")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run.

    Args:
        steps: Optimiser steps. Range: >= 1.
        lr: Learning rate at its peak. Range: > 0.
        optimizer: `"adamw"`, `"sgd"` (the first of `betas` is its momentum) or
            `"scale_invariant_sgd"`, for a model that names its `variant_parts`; those are trained
            by AdamW. Default `"adamw"`.
        head_lr: Of that AdamW. Range: > 0. Default 0.003.
        betas: Of AdamW. Default (0.9, 0.98).
        weight_decay: On matrices only; for a scale-invariant body on all of it. Range: >= 0.
            Default 0.
        clip: Largest norm of the gradient; for a scale-invariant body the multiple of the usual
            relative norm, > 1. 0 turns clipping off. Default 1.
        warmup: Share of the steps with a rising rate. Range: 0 to 1. Default 0.05. A
            scale-invariant body has no warm-up and no cosine, its rate falls in two steps.
        floor: Share of the rate at the end of the cosine. Range: 0 to 1. Default 0.1.
        precision: `"float32"`, `"bfloat16"` or `"float16"` (autocast). Default `"float32"`.
        device: `"auto"`, `"cpu"`, `"cuda"` or `"mps"`. Default `"auto"`.
        log_every: Unit: steps. Range: >= 1. Default 50.
        checkpoint_every: Unit: steps; 0 writes none. Default 200.

    Raises:
        ConfigError: If a value is out of its range.

    Example:
        >>> TrainConfig(steps=100).lr
        0.001
    """

    steps: int = 1000
    lr: float = 1e-3
    optimizer: str = "adamw"
    head_lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup: float = 0.05
    floor: float = 0.1
    precision: str = "float32"
    device: str = "auto"
    log_every: int = 50
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        check_range(self.steps, "steps", low=1, integer=True)
        for name in ("lr", "head_lr"):
            check_range(getattr(self, name), name, low=0.0, open_low=True)
        check_choice(self.optimizer, OPTIMIZERS, "optimizer")
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise ConfigError(f"betas must be two numbers; got {self.betas!r}. Change betas.")
        for beta in self.betas:
            check_range(beta, "betas", low=0.0, high=0.999999)
        for name in ("weight_decay", "clip"):
            check_range(getattr(self, name), name, low=0.0)
        check_range(self.checkpoint_every, "checkpoint_every", low=0, integer=True)
        for name in ("warmup", "floor"):
            check_range(getattr(self, name), name, low=0.0, high=1.0)
        check_choice(self.precision, ("float32", "bfloat16", "float16"), "precision")
        check_choice(self.device, ("auto", "cpu", "cuda", "mps"), "device")
        check_range(self.log_every, "log_every", low=1, integer=True)
