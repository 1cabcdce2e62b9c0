"""Several relevant labels: should they compete with each other in the softmax?

One small text encoder for rows and labels, one schedule, one data set; arms differ in the loss and
in the pool of labels that a row is scored against, crossed, so that the reader sees which of the
two makes the difference. The bars were fixed before the run on record.
"""

from __future__ import annotations

from typing import Any

from gossamer.recipes._base import Arm, Claim, Outcome, Recipe
from gossamer.recipes._multi_label import (
    COLUMNS,
    FIGURES,
    MultiLabelConfig,
    measure_count,
    train_arm,
)
from gossamer.train.logging import Logger

__all__ = ["RECIPE"]

# arm -> loss and pool of labels
TRAINED = {
    "decoupled_all": ("decoupled", "all"),
    "coupled_all": ("coupled", "all"),
    "summed_all": ("summed", "all"),
    "bce_all": ("bce", "all"),
    "decoupled_batch": ("decoupled", "in_batch"),
    "coupled_batch": ("coupled", "in_batch"),
    "pairs_masked": ("in_batch", "in_batch"),
    "pairs_plain": ("in_batch", "in_batch"),
}


def run(config: MultiLabelConfig, arm: str, seed: int, log: Logger) -> Outcome:
    """Train one arm, or measure a baseline that is not trained by this loop."""
    if arm not in TRAINED:
        return measure_count(config, arm)
    name, negatives = TRAINED[arm]
    return train_arm(config, loss_of(arm, name, config), negatives, seed, log)


def loss_of(arm: str, name: str, config: MultiLabelConfig) -> Any:
    """Return the loss of an arm."""
    from gossamer.losses import InBatchSoftmaxLoss
    from gossamer.retrieval import build_loss

    if arm == "pairs_plain":
        return InBatchSoftmaxLoss(temperature=config.temperature, mask_positives=False)
    return build_loss(name, temperature=config.temperature)


def _claim(text: str, metric: str, bar: float, baseline: str = "") -> Claim:
    return Claim(
        text=text,
        metric=metric,
        unit="points",
        ours="decoupled_all",
        baselines=(baseline,) if baseline else (),
        better="higher",
        rule="paired" if baseline else "bar",
        bar=bar,
        statistic="mean",
    )


def _arm(name: str, title: str, max_seeds: int | None = None, cost: float = 1.0) -> Arm:
    return Arm(name, title, "ours" if name == "decoupled_all" else "baseline", max_seeds, cost)


RECIPE = Recipe(
    name="decoupled-softmax",
    method="decoupled-softmax",
    title="Decoupled softmax: relevant labels that do not compete",
    what=(
        "A bag encoder shared by rows and labels learns which of a few hundred labels belong to a "
        "short text; a row has about five. Losses and pools of negatives are crossed under one "
        "schedule, beside a linear model, nearest neighbours and popularity. Percent on test rows."
    ),
    claims=(
        _claim("Decoupled softmax over all labels: P@1 of at least 85 %", "p1", 85.0),
        _claim("Decoupled softmax over all labels: P@5 of at least 51 %", "p5", 51.0),
        _claim(
            "It beats the coupled softmax over all labels by at least 2 points of P@1",
            "p1",
            2.0,
            "coupled_all",
        ),
        _claim(
            "It beats the coupled softmax over all labels by at least .3 points of P@5",
            "p5",
            0.3,
            "coupled_all",
        ),
        _claim(
            "It beats pairs in the batch, known positives masked, by at least 5 points of P@5",
            "p5",
            5.0,
            "pairs_masked",
        ),
    ),
    arms=(
        _arm("decoupled_all", "Decoupled softmax, all labels", cost=3),
        _arm("coupled_all", "Coupled softmax, all labels", cost=2),
        _arm("summed_all", "Log of summed positives, all labels", 1, 2),
        _arm("bce_all", "Binary cross-entropy, all labels", 1, 2),
        _arm("decoupled_batch", "Decoupled softmax, labels of the batch", cost=2),
        _arm("coupled_batch", "Coupled softmax, labels of the batch", cost=2),
        _arm("pairs_masked", "Pairs in the batch, known positives masked", cost=2),
        _arm("pairs_plain", "Pairs in the batch, plain", 1, 2),
        _arm("linear", "Ridge regression on TF-IDF", 1),
        _arm("neighbours", "Nearest neighbours by TF-IDF", 1),
        _arm("popularity", "Most frequent labels", 1),
    ),
    scales={
        "small": MultiLabelConfig(),
        "medium": MultiLabelConfig(data="bibtex-xmc", epochs=10, batch_size=64),
    },
    run=run,
    columns=COLUMNS,
    figures=FIGURES,
    budget={"small": 3, "medium": 10},
)
