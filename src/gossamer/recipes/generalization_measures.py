"""Norms tell a network that learned from one that memorised; sharpness alone does not.

The bars, all of them 0 in every seed, were fixed before the run on record, after a trial with one
seed. What is printed without a verdict: width, 2,000 added examples, sharpness, PAC-Bayes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

NORMS = {"l2": "l2", "l1_path": "l1-path", "l2_path": "l2-path", "spectral": "spectral"}


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        data: A folder with the files of MNIST, here or in `GOSSAMER_DATA`; where it is missing, the
            digits of scikit-learn stand in, with a quarter of each size.
        sizes: Training examples with true or random labels.
        confusion: Examples with random labels added to the largest true set, for the claims.
        more_confusion: The same, printed alone, at a rate of its own.
        widths: Of networks with one hidden layer on the largest true set.
        hidden: Widths of all other networks; no layer has a bias.
        lr: Of SGD.
        confusion_lr: Of SGD with `more_confusion`, which does not get down at `lr`.
        momentum: Of SGD.
        batch_size: Rows for each step.
        stop_loss: Training ends when the mean loss of an epoch is no larger. Unit: nats.
        max_epochs: Or here.
        margin_quantile: Share of the margins below the one that norms are divided by.
        sigma: Deviation of the noise of the table.
        sigmas: Deviations of the curve.
    """

    data: str = "mnist_10k"
    sizes: tuple[int, ...] = (500, 1000, 2000)
    confusion: tuple[int, ...] = (500, 1000)
    more_confusion: int = 2000
    widths: tuple[int, ...] = (32, 128, 512, 1024)
    hidden: tuple[int, ...] = (256, 256)
    lr: float = 0.05
    confusion_lr: float = 0.02
    momentum: float = 0.9
    batch_size: int = 64
    stop_loss: float = 0.01
    max_epochs: int = 400
    margin_quantile: float = 0.05
    sigma: float = 0.01
    sigmas: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05)


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Train the networks of one arm and measure them."""
    from gossamer.recipes._generalization import curve, load, measure, taus

    largest, share = max(config.sizes), load(config.data).share

    if arm == "labels":
        true, random = (
            {n // share: measure(config, seed, kind, n, bound=n == largest) for n in config.sizes}
            for kind in ("true", "random")
        )
        outcome = named(random, "random labels", largest // share)
        outcome.variants.update({f"{n} true labels": values for n, values in true.items()})
        outcome.scalars.update(gaps(true, random))
        for kind, found in (("true", true), ("random", random)):
            outcome.rows.extend(
                {"what": "size", "labels": kind, "size": size, **values}
                for size, values in found.items()
            )
            outcome.rows.extend(curve(config, seed, kind))
        outcome.rows.extend(taus(config, seed))
        return outcome
    if arm == "confusion":
        found = {0: measure(config, seed, "true", largest)}
        for added in config.confusion:
            found[added // share] = measure(config, seed, "confusion", added)
        outcome = named(
            {k: v for k, v in found.items() if k}, "added", max(config.confusion) // share
        )
        outcome.scalars.update(rises(found))
        outcome.rows.extend(
            {"what": "confusion", "added": added, **values} for added, values in found.items()
        )
        return outcome
    if arm == "more_confusion":
        return Outcome(measure(config, seed, "confusion", config.more_confusion))
    by_width = {w: measure(config, seed, "true", largest, width=w) for w in config.widths}
    return named(by_width, "units", max(config.widths))


def named(found: dict[int, dict[str, float]], what: str, main: int) -> Outcome:
    """Return an outcome whose main network is one of them, the others by their number."""
    others = {f"{number} {what}": v for number, v in found.items() if number != main}
    return Outcome(dict(found[main]), [], others)


def gaps(
    true: dict[int, dict[str, float]], random: dict[int, dict[str, float]]
) -> dict[str, float]:
    """Return how far norms of random labels lie above, at the size where it is least."""
    found = {
        f"gap_{name}": least(random[size][name] - true[size][name] for size in true)
        for name in NORMS
    }
    l2 = [random[size]["l2"] - true[size]["l2"] for size in sorted(true)]
    found["gap_growth"] = least(b - a for a, b in pairwise(l2))
    agreeing = [random[size]["sharpness"] > true[size]["sharpness"] for size in true]
    return {**found, "sharpness_agrees": 100.0 * sum(agreeing) / len(agreeing)}


def rises(found: dict[int, dict[str, float]]) -> dict[str, float]:
    """Return the least step of each quantity over the sizes of the confusion set."""
    steps = list(pairwise(found[added] for added in sorted(found)))
    rise = {
        f"rise_{name}": least(b[name] - a[name] for a, b in steps)
        for name in ("test_error", "l2", "l1_path", "l2_path")
    }
    start = found[0]["spectral"]
    rise["rise_spectral"] = least(v["spectral"] - start for k, v in found.items() if k)
    agreeing = [b["sharpness"] > a["sharpness"] for a, b in steps]
    return {**rise, "sharpness_agrees": 100.0 * sum(agreeing) / len(agreeing)}


def least(values: Iterable[float]) -> float:
    """Return the least value, NaN if one is undefined."""
    known = list(values)
    return math.nan if any(math.isnan(value) for value in known) else min(known)


def _claim(arm: str, metric: str, text: str, unit: str = "nats") -> Claim:
    return Claim(
        text=text,
        metric=metric,
        unit=unit,
        ours=arm,
        better="higher",
        rule="bar",
        bar=0.0,
        statistic="min",
    )


def _by_size(name: str, title: str) -> Figure:
    return Figure(
        "curve",
        f"{name.replace('_', '-')}-by-size",
        f"The {title} norm over the size of the training set",
        f"Natural logarithm of the {title} norm over the squared margin, against the number of "
        "training examples: one line for true labels, one for random labels.",
        "size",
        name,
        {
            "where": {"what": "size"},
            "group": "labels",
            "x_label": "training examples",
            "y_label": f"ln {title}",
        },
    )


RECIPE = Recipe(
    name="generalization-measures",
    method="generalization-measures",
    title="Margin-normalised norms tell learning from memorising",
    what=(
        "Small networks are trained to almost no loss on images with true labels, with random "
        "labels, and with both. Those that memorise should have larger norms over their squared "
        "margin, and the more so the more they memorise. Sharpness and the PAC-Bayes bound are "
        "printed beside, without a verdict; so is width, where the paper's trend is not seen at "
        "this size."
    ),
    claims=(
        *(
            _claim(
                "labels",
                f"gap_{name}",
                f"At each size the {title} norm is larger for random labels, in every seed",
            )
            for name, title in NORMS.items()
        ),
        _claim("labels", "gap_growth", "The gap of the l2 norm grows with the size, in every seed"),
        _claim(
            "confusion",
            "rise_test_error",
            "The test error rises with each set of random labels added, in every seed",
            "share",
        ),
        *(
            _claim(
                "confusion",
                f"rise_{name}",
                f"The {NORMS[name]} norm rises with each set of random labels, in every seed",
            )
            for name in ("l2", "l1_path", "l2_path")
        ),
        _claim(
            "confusion",
            "rise_spectral",
            "With random labels added the spectral norm is above its value without, in every seed",
        ),
    ),
    arms=(
        Arm("labels", "random labels, largest set", "ours", cost=8.0),
        Arm("confusion", "true and random labels, most added", "ours", cost=6.0),
        Arm("more_confusion", "as many random as true", "baseline", max_seeds=1, cost=4.0),
        Arm("width", "one hidden layer, widest", "baseline", max_seeds=1, cost=6.0),
    ),
    scales={"small": Config()},
    run=run,
    columns=(
        Column("test_error", "Test error", "share", in_domain=True),
        *(Column(name, f"ln {title}", "") for name, title in NORMS.items()),
        Column("sharpness", "Max sharpness", ""),
        Column("expected", "Expected sharpness", "nats"),
        Column("kl", "KL at the same noise", "nats"),
        Column("margin", "Margin", "logits"),
        Column("weight_norm", "Norm of all weights", ""),
        Column("distance", "Distance from the start", ""),
        Column("train_error", "Training error", "share"),
        Column("epochs", "Epochs", ""),
        Column("bound", "PAC-Bayes bound (vacuous from 1 on)", "share"),
        Column("bound_sigma", "Its sigma", ""),
        *(Column(f"gap_{name}", f"Least gap, {title}", "nats") for name, title in NORMS.items()),
        Column("gap_growth", "Least growth of the l2 gap", "nats"),
        Column("rise_test_error", "Least rise, test error", "share"),
        *(Column(f"rise_{name}", f"Least rise, {title}", "nats") for name, title in NORMS.items()),
        Column("sharpness_agrees", "Steps at which max sharpness agrees", "%"),
    ),
    figures=(
        *(_by_size(name, title) for name, title in NORMS.items()),
        Figure(
            "curve",
            "expected-by-kl",
            "Expected sharpness over KL",
            "Expected sharpness against KL while the noise shrinks, for true and random labels "
            "on the largest set, one line for each seed; both axes are logarithmic.",
            "kl",
            "expected",
            {
                "where": {"what": "curve"},
                "group": "network",
                "log_x": True,
                "log_y": True,
                "x_label": "KL, nats",
                "y_label": "rise of the loss, nats",
            },
        ),
        Figure(
            "curve",
            "confusion",
            "The l2 norm over the size of the confusion set",
            "Natural logarithm of the l2 norm over the squared margin, against the number of "
            "examples with random labels that were added.",
            "added",
            "l2",
            {
                "where": {"what": "confusion"},
                "group": "arm",
                "x_label": "examples with random labels",
                "y_label": "ln l2",
            },
        ),
        Figure(
            "bars",
            "tau",
            "Rank correlation with the test error",
            "Kendall's tau between measure and test error over six networks: three sizes, true and "
            "random labels. 1 orders them all as the error does.",
            "measure",
            "tau",
            {"where": {"what": "tau"}, "x_label": "measure", "y_label": "Kendall's tau"},
        ),
    ),
    budget={"small": 5},
)
