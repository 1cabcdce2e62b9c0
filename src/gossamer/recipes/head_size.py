"""With d/h heads, more heads cannot say what one of them should; a fixed head size can.

Two parts: how near one head comes to random attention weights, by its size; and one layer that
learns to mix random contents by fixed weights, for several numbers of heads. The bars were fixed
before the run on record.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

SIZES = (2, 4, 8, 12, 14, 15, 16, 32)
HEADS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        fit_length: Tokens of the first part.
        fit_dim: Their width.
        head_dims: Head sizes of the first part.
        starts: Random starts of each fit, besides one from the best logits of the rank.
        max_iter: Most steps of L-BFGS from each start.
        length: Tokens of the second part; also the fixed head size.
        content: Width of a content.
        sharpness: Standard deviation of the logits that weights are drawn from.
        steps: Of Adam.
        batch_size: Samples for each step.
        lr: Of Adam, falling to 0 along a cosine.
    """

    fit_length: int = 16
    fit_dim: int = 32
    head_dims: tuple[int, ...] = SIZES
    starts: int = 1
    max_iter: int = 400
    length: int = 32
    content: int = 32
    sharpness: float = 2.0
    steps: int = 700
    batch_size: int = 32
    lr: float = 5e-3


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Measure one part, or one family of layers over its numbers of heads."""
    return fit(config, seed) if arm == "representation" else learn(config, arm, seed)


def fit(config: Config, seed: int) -> Outcome:
    """Fit one head of each size to random attention weights."""
    import torch

    from gossamer.recipes._mixing import fit_head

    generator = torch.Generator().manual_seed(seed)
    n = config.fit_length
    x = torch.randn(config.fit_dim, n, generator=generator, dtype=torch.float64)
    logits = torch.randn(n, n, generator=generator, dtype=torch.float64)
    target = (config.sharpness * logits).softmax(0)
    found = {
        size: fit_head(
            x,
            target,
            size,
            starts=config.starts,
            max_iter=config.max_iter,
            generator=generator,
        )
        for size in config.head_dims
    }
    values = list(found.values())
    rises = [b - a for a, b in pairwise(values)]
    scalars = {f"divergence_{size}": value for size, value in found.items()}
    enough = [value for size, value in found.items() if size >= n - 1]
    rows = [
        {"what": "fit", "head_dim": size, "divergence": max(value, 1e-12)}
        for size, value in found.items()
    ]
    return Outcome({**scalars, "largest_rise": max(rises), "enough": max(enough)}, rows)


def layers_of(arm: str, config: Config) -> list[tuple[int, int]]:
    """Return heads and head size of each layer of a family."""
    dim = config.content + config.length
    families = {
        "standard": [(h, dim // h) for h in (1, 4, 8, 16, 32)],
        "fixed": [(h, config.length) for h in (1, 2, 4, 8, 16)],
        "grouped": [(16, config.length)],
        "talking": [(16, dim // 16)],
    }
    return families[arm]


def learn(config: Config, arm: str, seed: int) -> Outcome:
    """Train the layers of one family on the same weights and samples."""
    import torch

    from gossamer.attention import min_head_dim
    from gossamer.recipes._mixing import mixing_layer, train_mixing

    generator = torch.Generator().manual_seed(1000 + seed)
    n, dim = config.length, config.content + config.length
    target = (config.sharpness * torch.randn(n, n, generator=generator)).softmax(-1)
    rows: list[dict[str, Any]] = []
    for num_heads, head_dim in layers_of(arm, config):
        torch.manual_seed(seed)
        layer = mixing_layer(arm, dim, config.content, num_heads, head_dim)
        measured = train_mixing(
            layer,
            target,
            steps=config.steps,
            batch_size=config.batch_size,
            lr=config.lr,
            generator=torch.Generator().manual_seed(2000 + seed),
        )
        size = {
            "parameters": sum(p.numel() for p in layer.parameters()),
            "flops": flops(layer, n),
            "enough": min_head_dim(n).generic_head_dim <= head_dim,
        }
        rows.append(
            {"what": "learn", "num_heads": num_heads, "head_dim": head_dim, **measured, **size}
        )
    errors = {row["num_heads"]: row["error"] for row in rows}
    return Outcome({f"error_{h}": e for h, e in errors.items()} | summary(arm, errors), rows)


def flops(layer: Any, length: int) -> int:
    """Return the operations of one pass over one sequence, two for each multiplication."""
    weights = sum(p.numel() for p in layer.parameters())
    widths = layer.head_dim + layer.value_dim
    return int(2 * length * weights + 2 * length**2 * layer.num_heads * widths)


def summary(arm: str, errors: dict[int, float]) -> dict[str, float]:
    """Return what the claims are about."""
    if arm == "standard":
        values = list(errors.values())
        steps = [b / a for a, b in pairwise(values)]
        return {"growth": values[-1] / values[0], "least_step": min(steps), "equal": errors[4]}
    if arm == "fixed":
        values = [error for heads, error in errors.items() if heads >= 2]
        steps = [a / b for a, b in pairwise(values)]
        return {"least_step": min(steps), "equal": errors[2]}
    return {}


def _claim(
    text: str, metric: str, unit: str, ours: str, better: Any, bar: float, statistic: str
) -> Claim:
    return Claim(
        text=text,
        metric=metric,
        unit=unit,
        ours=ours,
        better=better,
        rule="bar",
        bar=bar,
        statistic=statistic,
    )


RECIPE = Recipe(
    name="head-size",
    method="head-size",
    title="Head size: d/h heads lose with more heads, a fixed size gains",
    what=(
        "First, one head is fitted to random attention weights over 16 tokens, by head size. Then "
        "one attention layer over 32 tokens learns to mix random contents by fixed weights: with "
        "heads of d/h, where more heads mean smaller ones, and with heads of the fixed size 32."
    ),
    claims=(
        _claim(
            "A head of size 4 stays more than .05 nats from random weights over 16 tokens",
            "divergence_4",
            "nats",
            "representation",
            "higher",
            0.05,
            "min",
        ),
        _claim(
            "A head of size 15 or more comes within 1e-6 nats",
            "enough",
            "nats",
            "representation",
            "lower",
            1e-6,
            "max",
        ),
        _claim(
            "The divergence falls with the size, within 1e-6 nats",
            "largest_rise",
            "nats",
            "representation",
            "lower",
            1e-6,
            "max",
        ),
        _claim(
            "Heads of d/h: the error grows by 20 times or more from 1 to 32 heads",
            "growth",
            "times",
            "standard",
            "higher",
            20.0,
            "min",
        ),
        _claim(
            "Heads of d/h: the error grows at every step from 1 to 32 heads",
            "least_step",
            "times",
            "standard",
            "higher",
            1.0,
            "min",
        ),
        _claim(
            "Heads of size 32: the error falls at every step from 2 to 16 heads",
            "least_step",
            "times",
            "fixed",
            "higher",
            1.0,
            "min",
        ),
        Claim(
            text="At 14,336 parameters, 2 heads of 32 beat 4 heads of 16",
            metric="equal",
            unit="error",
            ours="fixed",
            baselines=("standard",),
            better="lower",
            rule="paired",
            bar=0.0,
        ),
    ),
    arms=(
        Arm("representation", "one head, fitted", "ours", cost=2.0),
        Arm("fixed", "heads of size 32", "ours", cost=3.0),
        Arm("standard", "heads of d/h", "baseline", cost=3.0),
        Arm("grouped", "heads of size 32, a quarter of the keys", "baseline", max_seeds=1),
        Arm("talking", "talking heads of d/h", "baseline", max_seeds=1),
    ),
    scales={"small": Config()},
    run=run,
    columns=(
        Column("error_1", "1 head", "error", in_domain=True),
        *(Column(f"error_{h}", f"{h} heads", "error") for h in HEADS[1:]),
        Column("growth", "Growth, 1 to 32 heads", "times"),
        Column("least_step", "Least step", "times"),
        Column("equal", "At 14,336 parameters", "error"),
        *(Column(f"divergence_{size}", f"Fit, size {size}", "nats") for size in SIZES),
        Column("largest_rise", "Fit, largest rise", "nats"),
        Column("enough", "Fit, size 15 or more", "nats"),
    ),
    figures=(
        Figure(
            "curve",
            "error-by-heads",
            "Error of the learned mixture by number of heads",
            "Relative squared error against the number of heads, one line for each family of "
            "layers; both axes are logarithmic.",
            "num_heads",
            "error",
            {
                "where": {"what": "learn"},
                "log_x": True,
                "log_y": True,
                "x_label": "heads",
                "y_label": "relative error",
            },
        ),
        Figure(
            "curve",
            "divergence-by-size",
            "Least divergence from random attention weights by head size",
            "Mean Kullback-Leibler divergence of the fitted head against its size, on two "
            "logarithmic axes; values below 1e-12 are shown there.",
            "head_dim",
            "divergence",
            {
                "where": {"what": "fit"},
                "log_x": True,
                "log_y": True,
                "x_label": "head size",
                "y_label": "divergence, nats",
            },
        ),
    ),
    budget={"small": 8},
)
