"""A character model trained on windows of 64: as good as RoPE there, better on longer ones.

Settings were measured on two CPU cores; the bars were fixed before the runs on record. Every arm is
the same network with another position encoding and gets the same steps on the same text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.recipes._sequences import measure_grid, train_model
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

OURS = "fire"


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        text: A UTF-8 text file; empty for the packaged plays of Shakespeare.
        length: Length of the trained windows. Unit: tokens.
        times: Lengths tested, in multiples of the trained one; the claims are about 1, 2, 4 and 8.
        test_tokens: Tokens measured at each length.
        dim: Model width; the plain feed-forward block has four times as many.
        layers: Of every arm.
        batch_size: Windows for each step.
        steps: Of every arm.
        lr: Of every arm.
        weight_decay: Of every arm.
        init_length: FIRE's threshold L0; below the trained length. Unit: tokens.
        gain: Factor on FIRE's network.
    """

    text: str = ""
    length: int = 64
    times: tuple[int, ...] = (1, 2, 4, 8, 16)
    test_tokens: int = 65_536
    dim: int = 96
    layers: int = 3
    batch_size: int = 16
    steps: int = 700
    lr: float = 2e-3
    weight_decay: float = 0.01
    init_length: float = 16.0
    gain: float = 10.0


def positions_of(arm: str, config: Config) -> dict[str, Any]:
    """Return the `positions` entry of an arm's model; a bias is shared by all layers."""
    if arm == OURS:
        return {
            "name": arm,
            "share": True,
            "init_length": config.init_length,
            "gain": config.gain,
        }
    return {"name": arm} if arm in ("rope", "none", "alibi") else {"name": arm, "share": True}


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Train one model on windows of one length and measure it on longer ones."""
    from gossamer.files import packaged_data
    from gossamer.models import Decoder
    from gossamer.tasks import TextTask

    path = config.text or packaged_data("tiny_shakespeare/input.txt")
    task = TextTask(path, length=config.length)
    encoding = positions_of(arm, config)
    model = Decoder(task.vocab_size, config.dim, config.layers, 4, positions=encoding)
    train = {
        "steps": config.steps,
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "warmup": 0.07,
    }
    train_model(model, task, train, batch_size=config.batch_size, seed=seed, log=log)
    rows = [{"form": "plain", **row} for row in measure(model, task, config, seed)]
    scalars: dict[str, float] = {"parameters": model.num_parameters(), **scalars_of(rows)}
    if arm != "rope":
        return Outcome(scalars, rows)
    squeezed = measure(model, task, config, seed, interpolate=True)
    rows += [{"form": "interpolated", **row} for row in squeezed]
    return Outcome(scalars, rows, {"positions interpolated": scalars_of(squeezed)})


def measure(
    model: Any, task: Any, config: Config, seed: int, *, interpolate: bool = False
) -> list[dict[str, Any]]:
    """Return the loss at every length, RoPE's angles squeezed into the trained range if asked."""
    rows = []
    for times in config.times:
        length = times * config.length
        if interpolate:
            model.positions[0].scale = 1 / times
        windows = max(1, config.test_tokens // length)
        grid = {"length": [length]}
        for row in measure_grid(model, task, grid, num_samples=windows, seed=seed):
            rows.append({"times": times, **row})
    return rows


def scalars_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the losses by name."""
    return {f"loss_{row['times']}x": row["cross_entropy"] for row in rows}


def _claim(times: int, bar: float, baselines: tuple[str, ...], words: str) -> Claim:
    return Claim(
        text=words,
        metric=f"loss_{times}x",
        unit="nats a token",
        ours=OURS,
        baselines=baselines,
        better="lower",
        rule="paired",
        bar=bar,
    )


RECIPE = Recipe(
    name="fire",
    method="fire",
    title="FIRE: as good as RoPE in length, better beyond it",
    what=(
        "A small character model is trained on windows of 64 characters and then read on windows "
        "up to 16 times as long. Nothing differs between the arms but the position encoding. Does "
        "FIRE keep its loss where RoPE, T5 and no positions lose theirs? Kerple and ALiBi, which "
        "let attention decay with distance, stand beside it: no claim is made against them."
    ),
    claims=(
        _claim(1, -0.03, ("rope",), "At the trained length FIRE is within .03 nats of RoPE"),
        *(
            _claim(
                times,
                0.05,
                ("rope", "t5", "none"),
                f"At {times} times the trained length FIRE is at least .05 nats better than the "
                "best of RoPE, T5 and NoPE",
            )
            for times in (2, 4, 8)
        ),
    ),
    arms=(
        Arm(OURS, "FIRE", "ours"),
        Arm("rope", "RoPE", "baseline"),
        Arm("t5", "T5 bias", "baseline"),
        Arm("none", "NoPE (no positions)", "baseline"),
        Arm("kerple_log", "Kerple, logarithm", "baseline", max_seeds=1),
        Arm("kerple_power", "Kerple, power", "baseline", max_seeds=1),
        Arm("alibi", "ALiBi", "baseline", max_seeds=1),
    ),
    scales={
        "small": Config(),
        "medium": Config(
            length=256, dim=256, layers=6, steps=20_000, init_length=64.0, lr=1e-3, gain=1.0
        ),
    },
    run=run,
    columns=(
        Column("parameters", "Parameters", ""),
        Column("loss_1x", "1x (trained)", "nats a token", in_domain=True),
        *(Column(f"loss_{times}x", f"{times}x", "nats a token") for times in (2, 4, 8, 16)),
    ),
    figures=(
        Figure(
            "curve",
            "loss-by-length",
            "Loss by length of the window",
            "Mean loss in nats for each character against the length of the window, one line for "
            "each position encoding; the trained length is the leftmost point.",
            "length",
            "cross_entropy",
            {
                "where": {"form": "plain"},
                "log_x": True,
                "x_label": "length of the window (characters)",
                "y_label": "loss (nats a character)",
            },
        ),
    ),
    budget={"small": 10, "medium": 600},
)
