"""Two levels of coupled ids, column and row: boards larger than any seen in training.

Settings were measured on two CPU cores; the bars were fixed before the runs on record. The
baseline reads the same tokens with plain positions, with as many layers and steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.recipes._sequences import gated_decoder, measure_grid, train_model
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

OURS = "coupled_relative"


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        size: Trained rows and columns, fewest and most.
        test_sizes: Sides of the square boards tested; the claims are about 12.
        num_samples: Test samples for each size.
        dim: Model width.
        hidden_dim: Width of the gated feed-forward block.
        layers: Of every arm.
        batch_size: Samples for each step.
        steps: Of every arm.
        lr: Of every arm.
    """

    size: tuple[int, int] = (3, 8)
    test_sizes: tuple[int, ...] = (8, 9, 10, 12, 16)
    num_samples: int = 100
    dim: int = 64
    hidden_dim: int = 256
    layers: int = 3
    batch_size: int = 32
    steps: int = 1800
    lr: float = 2e-3


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Train one model and measure it on square boards."""
    from gossamer.tasks import MinesweeperTask

    coupled = {"name": "coupled_relative", "levels": 2, "window": 3, "base_length": 64}
    positions: dict[str, Any] = coupled if arm == OURS else {"name": arm}
    task = MinesweeperTask(config.size)
    model = gated_decoder(
        task,
        positions,
        dim=config.dim,
        hidden_dim=config.hidden_dim,
        layers=config.layers,
    )
    train = {"steps": config.steps, "lr": config.lr}
    train_model(model, task, train, batch_size=config.batch_size, seed=seed, log=log)
    rows = measure_grid(
        model, task, {"height": config.test_sizes}, num_samples=config.num_samples, seed=seed
    )
    scalars: dict[str, float] = {"parameters": model.num_parameters(), "steps": config.steps}
    for row in rows:
        scalars[f"exact_match_{row['height']}"] = row["exact_match"]
        scalars[f"token_accuracy_{row['height']}"] = row["token_accuracy"]
    return Outcome(scalars, rows)


RECIPE = Recipe(
    name="minesweeper",
    method="position-coupling",
    title="Minesweeper: boards half as wide and high again as any in training",
    what=(
        "A small transformer reads a board row by row and writes down, for every cell, how many "
        "of its 8 neighbours are mines. Every token has the number of its column and of its row as "
        "coupled ids. Trained on sides of 3 to 8, does it solve boards of 12 x 12, and what does "
        "RoPE on plain positions do?"
    ),
    claims=(
        Claim(
            text="Trained on boards of sides 3 to 8, the coupled model solves whole boards of "
            "12 x 12 (1.5 times the side)",
            metric="exact_match_12",
            unit="exact match",
            ours=OURS,
            better="higher",
            rule="bar",
            bar=0.90,
        ),
        Claim(
            text="RoPE on plain positions, with as many layers and steps, solves no boards of "
            "12 x 12 (whether it fitted the trained sides stands in the table)",
            metric="exact_match_12",
            unit="exact match",
            ours="rope",
            better="lower",
            rule="bar",
            bar=0.05,
        ),
    ),
    arms=(
        Arm(OURS, "Coupled relative ids of column and row", "ours"),
        Arm("rope", "RoPE on plain positions", "baseline", max_seeds=1),
    ),
    scales={
        "small": Config(),
        "medium": Config(
            size=(5, 9), test_sizes=(9, 10, 12, 14), steps=10_000, batch_size=64, lr=1e-3
        ),
    },
    run=run,
    columns=(
        Column("parameters", "Parameters", ""),
        Column("steps", "Training steps", ""),
        Column("exact_match_8", "8 x 8", "exact match", in_domain=True, fit=0.9),
        *(Column(f"exact_match_{n}", f"{n} x {n}", "exact match") for n in (9, 12, 16)),
        *(Column(f"token_accuracy_{n}", f"{n} x {n}, cells", "share right") for n in (8, 12)),
    ),
    figures=(
        Figure(
            "curve",
            "exact-match-by-side",
            "Whole boards right, by side",
            "Share of boards with every cell right against the side of the board, one line for "
            "each model; the trained range is shaded.",
            "height",
            "exact_match",
            {"shade": "config.size", "x_label": "rows and columns", "y_label": "exact match"},
        ),
        Figure(
            "curve",
            "cells-by-side",
            "Cells right, by side",
            "Share of single cells right, given the true ones before them.",
            "height",
            "token_accuracy",
            {"shade": "config.size", "x_label": "rows and columns", "y_label": "cells right"},
        ),
    ),
    budget={"small": 8, "medium": 240},
)
