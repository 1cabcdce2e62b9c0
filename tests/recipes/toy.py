"""A recipe of a second: a user's own file, as the tests run it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from gossamer.recipes import Arm, Claim, Column, Figure, Outcome, Recipe


@dataclass(frozen=True)
class Config:
    """Settings.

    Args:
        gain: Added to ours; 0 sabotages the claim.
        slow: Seconds that each job takes.
        fail: Arm that raises.
    """

    gain: float = 1.0
    slow: float = 0.0
    fail: str = ""


def run(config: Config, arm: str, seed: int, log: Any) -> Outcome:
    """Draw a number; ours is better by the gain."""
    import torch

    for step in range(1, 5):
        time.sleep(config.slow / 4)
        log.log(step, {"progress": step / 4})
    if arm == config.fail:
        raise ValueError("this arm fails on purpose")
    value = float(torch.rand(())) / 10 + (config.gain if arm == "ours" else 0.0)
    rows = [{"length": n, "score": value / n, "pid": os.getpid()} for n in (1, 2, 4)]
    return Outcome({"score": value, "half": value / 2}, rows, {"harder": {"score": value / 3}})


RECIPE = Recipe(
    name="toy",
    method="position-coupling",
    title="A toy",
    what="Ours draws a number and adds a gain.",
    claims=(
        Claim("Ours is better", "score", "points", "ours", "higher", "paired", 0.5, ("plain",)),
        Claim("Ours is above 0.9", "score", "points", "ours", "higher", "bar", 0.9),
    ),
    arms=(
        Arm("plain", "Plain", "baseline"),
        Arm("slow", "Slow", "baseline", max_seeds=1),
        Arm("ours", "Ours", "ours"),
    ),
    scales={"small": Config(), "medium": Config(gain=2.0)},
    run=run,
    columns=(
        Column("half", "half", "points", in_domain=True, fit=0.3),
        Column("score", "score", "points"),
    ),
    figures=(
        Figure("curve", "score", "Score", "Scores fall.", "length", "score", {"shade": (1, 2)}),
    ),
    budget={"small": 1, "medium": 1},
)
