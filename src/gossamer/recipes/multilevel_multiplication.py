"""Three levels of coupled ids and a scratchpad: trained on 5 x 5 digits, exact on 10 x 10.

Settings were measured on two CPU cores; the bars were fixed before the runs on record. The
baseline reads the same scratchpad and gets a deeper network.
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
        digits: Trained digits of both factors, fewest and most.
        test_digits: Digits of both factors tested; the claims are about 5 and 10.
        num_samples: Test samples in each cell.
        dim: Model width.
        hidden_dim: Width of the gated feed-forward block.
        batch_size: Samples for each step.
        steps: Of every arm.
        lr: Of the coupled model.
        layers: Of the coupled model.
        baseline_layers: Of the baseline.
        baseline_lr: Of the baseline.
    """

    digits: tuple[int, int] = (1, 5)
    test_digits: tuple[int, ...] = (5, 7, 10, 15)
    num_samples: int = 100
    dim: int = 64
    hidden_dim: int = 256
    batch_size: int = 32
    steps: int = 1500
    lr: float = 3e-3
    layers: int = 2
    baseline_layers: int = 3
    baseline_lr: float = 2e-3


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Train one model and measure it on factors of equal length, working and product apart."""
    from gossamer.tasks import MultiplicationTask

    ours = arm == OURS
    coupled = {"name": "coupled_relative", "levels": 3, "window": 2, "base_length": 64}
    positions: dict[str, Any] = coupled if ours else {"name": arm}
    task = MultiplicationTask(config.digits)
    model = gated_decoder(
        task,
        positions,
        dim=config.dim,
        hidden_dim=config.hidden_dim,
        layers=config.layers if ours else config.baseline_layers,
    )
    train = {"steps": config.steps, "lr": config.lr if ours else config.baseline_lr}
    train_model(model, task, train, batch_size=config.batch_size, seed=seed, log=log)
    rows = []
    for n in config.test_digits:
        rows += measure_grid(
            model,
            task,
            {"first": [n], "second": [n]},
            num_samples=config.num_samples,
            seed=seed,
            answer_only=True,
        )
    scalars: dict[str, float] = {"parameters": model.num_parameters(), "steps": config.steps}
    for row in rows:
        scalars[f"exact_match_{row['first']}"] = row["exact_match"]
        scalars[f"answer_match_{row['first']}"] = row["answer_match"]
    return Outcome(scalars, rows)


RECIPE = Recipe(
    name="multilevel-multiplication",
    method="multilevel-addition",
    title="Multiply numbers twice as long as in training",
    what=(
        "A two-layer transformer learns to multiply two numbers of up to 5 digits each by writing "
        "down every partial product and every running sum. Every token has three coupled ids. Is "
        "the whole working still right for two numbers of 10 digits, and what does RoPE do with "
        "the same scratchpad?"
    ),
    claims=(
        Claim(
            text="Trained up to 5 x 5 digits, the coupled model writes the whole working right "
            "for 10 x 10 digits",
            metric="exact_match_10",
            unit="exact match",
            ours=OURS,
            better="higher",
            rule="bar",
            bar=0.90,
        ),
        Claim(
            text="A RoPE network with the same scratchpad is lost at 10 x 10 digits (whether it "
            "fitted the trained sizes stands in the table)",
            metric="exact_match_10",
            unit="exact match",
            ours="rope",
            better="lower",
            rule="bar",
            bar=0.05,
        ),
    ),
    arms=(
        Arm(OURS, "Three levels of coupled relative ids, 2 layers", "ours"),
        Arm("rope", "RoPE, 3 layers, same scratchpad", "baseline", max_seeds=1, cost=1.4),
    ),
    scales={
        "small": Config(),
        "medium": Config(digits=(1, 10), test_digits=(10, 15, 20), steps=8_000, layers=4),
    },
    run=run,
    columns=(
        Column("parameters", "Parameters", ""),
        Column("steps", "Training steps", ""),
        Column("exact_match_5", "5 x 5", "exact match", in_domain=True, fit=0.9),
        *(Column(f"exact_match_{n}", f"{n} x {n}", "exact match") for n in (7, 10, 15)),
        *(Column(f"answer_match_{n}", f"{n} x {n}, product", "exact match") for n in (10, 15)),
    ),
    figures=(
        Figure(
            "curve",
            "exact-match-by-length",
            "Whole working right, by length of both factors",
            "Share of products with every digit of the working right against the digits of both "
            "factors, one line for each model; the trained range is shaded.",
            "first",
            "exact_match",
            {
                "shade": "config.digits",
                "x_label": "digits of both factors",
                "y_label": "exact match",
            },
        ),
        Figure(
            "curve",
            "product-by-length",
            "Product right, by length of both factors",
            "Share of products whose last number is right when the model decodes by itself.",
            "first",
            "answer_match",
            {
                "shade": "config.digits",
                "x_label": "digits of both factors",
                "y_label": "product right",
            },
        ),
    ),
    budget={"small": 9, "medium": 240},
)
