"""Optimisers by name, as the table [train] asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from gossamer.errors import ConfigError
from gossamer.layers import split_parameters
from gossamer.optim import ScaleInvariantSGD, step_decay, warmup_cosine
from gossamer.train.config import TrainConfig

__all__ = ["build_optimizers", "schedule_of"]

_MILESTONES = (0.6, 0.9)


def build_optimizers(
    model: nn.Module, config: TrainConfig, device: torch.device
) -> list[torch.optim.Optimizer]:
    """Return one optimiser, or for a scale-invariant body two: its own and AdamW for the rest.

    Each group of parameters keeps its peak rate under `"peak"`.

    Args:
        model: What is trained.
        config: Settings.
        device: Where the weights are.

    Raises:
        ConfigError: If the model does not say which part of it is scale invariant.
    """
    fused = device.type in ("cpu", "cuda")
    if config.optimizer == "sgd":
        found: list[torch.optim.Optimizer] = [
            torch.optim.SGD(
                _groups(model, config.weight_decay),
                lr=config.lr,
                momentum=config.betas[0],
                fused=fused,
            )
        ]
    elif config.optimizer == "scale_invariant_sgd":
        if not hasattr(model, "variant_parts"):
            raise ConfigError(
                "optimizer scale_invariant_sgd needs a model that says which part of it is scale "
                f"invariant; got {type(model).__name__}. Use model scale_invariant, or optimizer "
                "adamw."
            )
        body, rest = split_parameters(model)
        clip = config.clip or math.inf
        found = [ScaleInvariantSGD(body, config.lr, weight_decay=config.weight_decay, clip=clip)]
        if rest:
            head = torch.optim.AdamW(
                rest, lr=config.head_lr, betas=config.betas, weight_decay=0.0, fused=fused
            )
            found.append(head)
    else:
        groups = _groups(model, config.weight_decay)
        found = [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)]
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def schedule_of(config: TrainConfig) -> Callable[[int], float]:
    """Return the multiplier of the rate: warm-up and cosine, or steps for a scale-invariant body.

    A scale-invariant body needs no warm-up; its rate falls to a tenth at 60 % and 90 % of the
    steps, as in the paper.
    """
    if config.optimizer == "scale_invariant_sgd":
        return step_decay([round(share * config.steps) for share in _MILESTONES])
    return warmup_cosine(config.steps, warmup=config.warmup, floor=config.floor)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return matrices, which decay, and the rest, which does not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
