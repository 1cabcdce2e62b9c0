"""The ranking loss teaches attention to find the relevant document of a prompt.

A small decoder is trained from nothing on prompts of random tokens. All arms of one seed see the
same prompts and share all settings, the two losses that stand in for pre-training among them.
Settings were looked for before, the bars were fixed before the run on record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

OURS, FULL, PLAIN = "block_aux", "full_aux", "block_ntp"


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        documents: Documents of a prompt in training, stage by stage.
        begins: Share of the steps at which each stage begins.
        layer: Whose attention is read and trained, from 0.
        dim: Model width.
        layers: Of the decoder.
        heads: Of each layer.
        hidden_dim: Of the feed-forward blocks.
        aux_weight: Of the ranking loss; the answer's loss has weight 1.
        stand_in_weight: Of the loss on the repeated query and of that on each closing id.
        temperature: Of the ranking loss.
        batch_size: Prompts for each step.
        steps: Of every arm.
        lr: Of every arm.
        warmup: Steps with a rising rate.
        num_samples: Test prompts of each size.
        every: Steps between points of the curve.
        curve_samples: Test prompts of a point.
    """

    documents: tuple[int, ...] = (1, 2, 4, 8)
    begins: tuple[float, ...] = (0.0, 0.12, 0.25, 0.4)
    layer: int = 2
    dim: int = 64
    layers: int = 4
    heads: int = 4
    hidden_dim: int = 128
    aux_weight: float = 1.0
    stand_in_weight: float = 0.3
    temperature: float = 0.05
    batch_size: int = 32
    steps: int = 1200
    lr: float = 3e-3
    warmup: int = 50
    num_samples: int = 1024
    every: int = 100
    curve_samples: int = 256


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Train one model, and measure how often it puts the relevant document first."""
    import torch

    from gossamer.recipes._ranking import measure_prompts

    model, rows = trained(config, arm, seed, log)
    scalars: dict[str, float] = {"parameters": model.num_parameters()}
    for documents in (8, 24):
        generator = torch.Generator().manual_seed(10_000 * (seed + 1) + documents)
        layers, decoded = measure_prompts(model, documents, config.num_samples, generator)
        read = reading(layers, arm, config)
        scalars |= {f"attention_{documents}": read, f"decoded_{documents}": decoded}
        rows += [
            {"what": "layer", "documents": documents, "layer": number, "percent": percent}
            for number, percent in enumerate(layers)
        ]
        rows += [
            {"what": "test", "how": f"{how}, {documents} documents", "percent": percent}
            for how, percent in (("attention", read), ("decoded", decoded))
        ]
    return Outcome(scalars, rows)


def reading(layers: list[float], arm: str, config: Config) -> float:
    """Return the trained layer's percent; of an arm that trains none, that of its best layer."""
    return layers[config.layer] if arm.endswith("_aux") else max(layers)


def trained(config: Config, arm: str, seed: int, log: Logger) -> tuple[Any, list[dict[str, Any]]]:
    """Return a trained model, and the points of its curve."""
    import torch

    from gossamer.recipes._ranking import (
        PromptDecoder,
        PromptStream,
        measure_prompts,
        prompt_loss,
    )
    from gossamer.train import TrainConfig, Trainer

    torch.manual_seed(seed)
    model = PromptDecoder(
        arm.startswith("block"),
        dim=config.dim,
        num_layers=config.layers,
        num_heads=config.heads,
        hidden_dim=config.hidden_dim,
    )
    points: list[dict[str, Any]] = []
    largest = config.documents[-1]

    def measure(step: int) -> None:
        generator = torch.Generator().manual_seed(20_000 + seed)
        layers, decoded = measure_prompts(model, largest, config.curve_samples, generator)
        found = (("attention", reading(layers, arm, config)), ("decoded", decoded))
        points.extend({"what": how, "step": step, "percent": percent} for how, percent in found)

    def loss(model: Any, prompts: Any) -> Any:
        if prompts.number % config.every == 0:
            measure(prompts.number)
        return prompt_loss(
            model,
            prompts,
            layer=config.layer,
            aux_weight=config.aux_weight if arm.endswith("_aux") else 0.0,
            stand_in_weight=config.stand_in_weight,
            temperature=config.temperature,
        )

    settings = TrainConfig(
        steps=config.steps,
        lr=config.lr,
        weight_decay=0.01,
        warmup=min(1.0, config.warmup / config.steps),
        device="cpu",
        checkpoint_every=0,  # the curve is kept in memory, so a broken run begins anew
    )
    stages = tuple(zip(config.begins, config.documents, strict=True))
    stream = PromptStream(config.batch_size, stages, config.steps, seed=seed)
    Trainer(model, loss, settings, logger=log, quiet=True).fit(stream)
    measure(config.steps)
    return model, points


def _bar_claim(metric: str, bar: float, words: str) -> Claim:
    return Claim(
        text=f"Block attention with the ranking loss: {words} in at least {bar:g} % of the "
        "prompts, every seed",
        metric=metric,
        unit="% of prompts",
        ours=OURS,
        better="higher",
        rule="bar",
        bar=bar,
        statistic="min",
    )


def _paired_claim(baseline: str, bar: float, words: str) -> Claim:
    return Claim(
        text=words,
        metric="attention_8",
        unit="% of prompts",
        ours=OURS,
        baselines=(baseline,),
        better="higher",
        rule="paired",
        bar=bar,
    )


def _curve(what: str, title: str, label: str) -> Figure:
    return Figure(
        "curve",
        f"{what}-by-step",
        title,
        f"{title}, in percent of the test prompts with 8 documents against the training step, one "
        "line for each arm; chance is 12.5.",
        "step",
        "percent",
        {"where": {"what": what}, "x_label": "step", "y_label": label},
    )


RECIPE = Recipe(
    name="blockrank",
    method="blockrank",
    title="Ranking by attention: a loss on one layer makes it find the relevant document",
    what=(
        "A decoder of four layers learns from nothing, on prompts of random tokens, to name the "
        "document that shares three of four tokens with a query. Is the relevant document the one "
        "that the third layer looks at most, and the one that the decoded answer names, with 8 "
        "documents as in training and with 24? Compared are block and full causal attention, with "
        "and without the ranking loss. Without it nothing is learned here at all: this shows that "
        "the loss makes reading by attention learnable, not the paper's gain of 1.3 points on a "
        "model that can rank already. Its weight is 1.0, the paper's 0.1. A loss on the repeated "
        "query and one on the closing ids stand in for pre-training, in every arm. Full attention "
        "differs from block attention in its positions too."
    ),
    claims=(
        _bar_claim("attention_8", 95.0, "attention puts the relevant one of 8 documents first"),
        _bar_claim("attention_24", 90.0, "attention puts the relevant one of 24 documents first"),
        _bar_claim("decoded_8", 95.0, "the decoded answer names the relevant one of 8 documents"),
        _paired_claim(
            PLAIN, 50.0, "That is at least 50 points above the best layer without the ranking loss"
        ),
        _paired_claim(
            FULL, -2.0, "Block attention is at most 2 points below full attention, both with it"
        ),
    ),
    arms=(
        Arm(OURS, "Block attention, with the ranking loss", "ours", cost=1.3),
        Arm(FULL, "Full attention, with the ranking loss", "baseline", cost=1.2),
        Arm(PLAIN, "Block attention, answer alone", "baseline", cost=1.1),
        Arm("full_ntp", "Full attention, answer alone", "baseline"),
    ),
    scales={
        "small": Config(),
        "medium": Config(
            dim=128, hidden_dim=256, batch_size=64, steps=4000, lr=2e-3, num_samples=4096
        ),
    },
    run=run,
    columns=(
        Column("parameters", "Parameters", ""),
        Column("attention_8", "Attention, 8 documents", "% of prompts", in_domain=True, fit=95.0),
        Column("attention_24", "Attention, 24", "% of prompts"),
        Column("decoded_8", "Decoded, 8", "% of prompts"),
        Column("decoded_24", "Decoded, 24", "% of prompts"),
    ),
    figures=(
        _curve("attention", "Relevant document first, by attention", "attention P@1 (%)"),
        _curve("decoded", "Relevant document named, decoded", "decoded P@1 (%)"),
        Figure(
            "bars",
            "test",
            "Relevant document first, after training",
            "Percent of the test prompts with the relevant document first, by attention and "
            "decoded, with 8 and with 24 documents, one bar for each arm; chance is 12.5 and 4.2.",
            "how",
            "percent",
            {"where": {"what": "test"}, "group": "arm", "y_label": "P@1 (%)"},
        ),
        Figure(
            "curve",
            "layers",
            "Relevant document first, by the attention of each layer",
            "Percent of test prompts with 8 documents in which a layer looks most at the relevant "
            "one, against the number of the layer, one line for each arm.",
            "layer",
            "percent",
            {
                "where": {"what": "layer", "documents": 8},
                "x_label": "layer, from 0",
                "y_label": "attention P@1 (%)",
            },
        ),
    ),
    budget={"small": 10, "medium": 240},
)
