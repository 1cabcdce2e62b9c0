"""Coupled ids on N x 2 multiplication without working: twice as long as in training.

Settings were measured on two CPU cores; the bars were fixed before the runs on record. The
baseline reads the same tokens with plain positions, with as many layers and steps. Small scale ends
before the trained lengths are learned, and says so; medium scale goes on.
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
        digits: Trained digits of the first factor, fewest and most.
        test_digits: Digits tested; the claims are about 5 and 10.
        num_samples: Test samples at each length.
        dim: Model width.
        hidden_dim: Width of the gated feed-forward block.
        layers: Of every arm.
        batch_size: Samples for each step.
        steps: Of every arm.
        lr: Of every arm.
    """

    digits: tuple[int, int] = (1, 5)
    test_digits: tuple[int, ...] = (3, 5, 7, 10, 15)
    num_samples: int = 500
    dim: int = 96
    hidden_dim: int = 384
    layers: int = 4
    batch_size: int = 64
    steps: int = 2400
    lr: float = 2e-3


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Train one model and measure it at every length of the first factor."""
    from gossamer.tasks import FixedMultiplicationTask

    positions: dict[str, Any] = {"name": arm}
    task = FixedMultiplicationTask(config.digits, second=2)
    model = gated_decoder(
        task,
        positions,
        dim=config.dim,
        hidden_dim=config.hidden_dim,
        layers=config.layers,
    )
    train = {"steps": config.steps, "lr": config.lr}
    train_model(model, task, train, batch_size=config.batch_size, seed=seed, log=log)
    grid = {"digits": config.test_digits}
    rows = measure_grid(model, task, grid, num_samples=config.num_samples, seed=seed)
    scalars: dict[str, float] = {"parameters": model.num_parameters(), "steps": config.steps}
    for row in rows:
        scalars[f"exact_match_{row['digits']}"] = row["exact_match"]
        scalars[f"token_accuracy_{row['digits']}"] = row["token_accuracy"]
    return Outcome(scalars, rows)


RECIPE = Recipe(
    name="nx2-multiplication",
    method="position-coupling",
    title="N x 2 multiplication: products twice as long as in training",
    what=(
        "A small transformer multiplies a number of 1 to 5 digits by a number of 2 digits and "
        "writes the product at once, units first. Digits of equal significance share an id. Is it "
        "as good on numbers of 10 digits as on those it was trained on, and what does RoPE do?"
    ),
    claims=(
        Claim(
            text="Trained on 1 to 5 digits, the coupled model is exact for 10 digits times 2 "
            "(twice the length)",
            metric="exact_match_10",
            unit="exact match",
            ours=OURS,
            better="higher",
            rule="bar",
            bar=0.90,
        ),
        Claim(
            text="RoPE on plain positions is lost at 10 digits (whether it fitted the trained "
            "lengths stands in the table)",
            metric="exact_match_10",
            unit="exact match",
            ours="rope",
            better="lower",
            rule="bar",
            bar=0.05,
        ),
    ),
    arms=(
        Arm(OURS, "Coupled relative ids", "ours"),
        Arm("rope", "RoPE on plain positions", "baseline", max_seeds=1),
    ),
    scales={
        "small": Config(),
        "medium": Config(steps=12_000),
    },
    run=run,
    columns=(
        Column("parameters", "Parameters", ""),
        Column("steps", "Training steps", ""),
        Column("exact_match_5", "5 digits", "exact match", in_domain=True, fit=0.9),
        *(Column(f"exact_match_{n}", f"{n} digits", "exact match") for n in (7, 10, 15)),
        *(Column(f"token_accuracy_{n}", f"{n}, tokens", "share right") for n in (5, 10)),
    ),
    figures=(
        Figure(
            "curve",
            "exact-match-by-length",
            "Products right, by length of the first factor",
            "Share of wholly right products against the digits of the first factor, one line for "
            "each model; the trained range is shaded.",
            "digits",
            "exact_match",
            {
                "shade": "config.digits",
                "x_label": "digits of the first factor",
                "y_label": "exact match",
            },
        ),
        Figure(
            "curve",
            "tokens-by-length",
            "Digits right, by length of the first factor",
            "Share of single digits right, given the true ones before them.",
            "digits",
            "token_accuracy",
            {
                "shade": "config.digits",
                "x_label": "digits of the first factor",
                "y_label": "digits right",
            },
        ),
    ),
    budget={"small": 8, "medium": 90},
)
