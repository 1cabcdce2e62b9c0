"""The paper's own form: a learned table of coupled ids holds at twice the trained length."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.recipes._sequences import measure_grid, train_model
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

MULTIPLES = {"1x": 1.0, "1.5x": 1.5, "2x": 2.0, "3x": 3.0}


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        digits: Trained lengths, fewest and most digits of an operand.
        max_position: Largest id; 22 are needed for 20 digits, a little more is better.
        carry_chains: Share of training samples with long carries.
        num_samples: Test samples at each length.
        dim: Model width; more than `max_position`, so that rows of the table can be orthogonal.
        num_layers: Layers.
        num_heads: Heads.
        head_dim: Width of a head; more than `max_position`, so that a head can tell rows apart.
        scale: Factor on the attention logits; larger than `1 / sqrt(head_dim)`, they learn faster.
        hidden_dim: Width of the gated feed-forward block.
        batch_size: Samples for each step.
        steps: Optimiser steps with coupled ids.
        baseline_steps: Optimiser steps of the baseline, which does not fit in either.
        lr: Learning rate.
    """

    digits: tuple[int, int] = (1, 10)
    max_position: int = 42
    carry_chains: float = 0.3
    num_samples: int = 500
    dim: int = 128
    num_layers: int = 1
    num_heads: int = 4
    head_dim: int = 128
    scale: float = 0.3
    hidden_dim: int = 128
    batch_size: int = 64
    steps: int = 1200
    baseline_steps: int = 500
    lr: float = 1.5e-3


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Train one model and measure it at 1 to 3 times the trained length."""
    from gossamer.models import Decoder
    from gossamer.tasks import AdditionTask

    longest = config.digits[1]
    lengths = {int(longest * factor): name for name, factor in MULTIPLES.items()}
    coupled = {"name": "coupled", "max_position": config.max_position}
    # the uncoupled table must hold every token of the longest test
    tokens = 4 * (3 * max(lengths) + 5) // 3
    learned = {"name": "learned", "max_position": tokens + 16, "random_start": True}
    steps = config.steps if arm == "coupled" else config.baseline_steps
    task = AdditionTask(
        config.digits, max_position=config.max_position, carry_chains=config.carry_chains
    )
    model = Decoder(
        task.vocab_size,
        config.dim,
        config.num_layers,
        config.num_heads,
        positions=coupled if arm == "coupled" else learned,
        feed_forward={"name": "gated", "hidden_dim": config.hidden_dim},
        attention={"head_dim": config.head_dim, "scale": config.scale},
        norm="pre_post",
    )
    train = {"steps": steps, "lr": config.lr, "device": "auto"}
    train_model(model, task, train, batch_size=config.batch_size, seed=seed, log=log)
    grid = {"digits": tuple(lengths)}
    rows = measure_grid(model, task, grid, num_samples=config.num_samples, seed=seed)
    scalars = {f"exact_match_{lengths[row['digits']]}": row["exact_match"] for row in rows}
    size = {"parameters": model.num_parameters(), "steps": steps}
    return Outcome({**size, **scalars}, rows)


RECIPE = Recipe(
    name="position-coupling-table",
    method="position-coupling",
    title="Position coupling with the paper's learned table",
    what=(
        "The additions of the recipe position-coupling, with the form that the paper describes: "
        "every coupled id has a learned vector, and ids start at random in training. Is it exact "
        "on numbers twice as long as any seen, and what does a table of plain positions do?"
    ),
    claims=(
        Claim(
            text="A learned table of coupled ids is exact at twice the trained length",
            metric="exact_match_2x",
            unit="exact match",
            ours="coupled",
            better="higher",
            rule="bar",
            bar=0.90,
        ),
    ),
    arms=(
        Arm("coupled", "Learned table on coupled ids", "ours"),
        Arm("learned", "Learned table on plain positions, random start", "baseline", max_seeds=1),
    ),
    scales={
        "small": Config(),
        "paper": Config(
            digits=(1, 30),
            max_position=202,
            dim=1024,
            head_dim=256,
            scale=1.0,
            hidden_dim=2048,
            batch_size=1000,
            steps=50_000,
            baseline_steps=50_000,
            lr=1e-4,
        ),
    },
    run=run,
    columns=(
        Column("parameters", "Parameters", ""),
        Column("steps", "Training steps", ""),
        Column("exact_match_1x", "trained length", "exact match", in_domain=True, fit=0.9),
        *(
            Column(f"exact_match_{name}", f"{name} length", "exact match")
            for name in list(MULTIPLES)[1:]
        ),
    ),
    figures=(
        Figure(
            "curve",
            "exact-match-by-length",
            "Exact match by length of the numbers",
            "Share of sums that are wholly right against the number of digits, for the learned "
            "table on coupled "
            "ids and on plain positions; the trained range is shaded.",
            "digits",
            "exact_match",
            {
                "shade": "config.digits",
                "x_label": "digits of each number",
                "y_label": "exact match",
            },
        ),
    ),
    budget={"small": 5, "paper": 2000},
)
