"""What the recipe on generalization measures trains, and what it measures of each network."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import DataError
from gossamer.measures import (
    GeneralizationReport,
    compare_measures,
    expected_sharpness,
    generalization_report,
)
from gossamer.recipes._outside import outside_images

if TYPE_CHECKING:
    from gossamer.recipes.generalization_measures import Config

__all__ = ["CLASSES", "Data", "Network", "curve", "fit", "load", "measure", "taus"]

CLASSES = 10
DIGITS_SHARE = 4
"""Sizes are divided by this where the small digits stand in for MNIST."""


@dataclass(frozen=True)
class Data:
    """Examples to train from and examples to test on; `share` divides all sizes."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    share: int


@dataclass(frozen=True, eq=False)
class Network:
    """A trained network, what it was before, and its training set."""

    trained: nn.Module
    start: nn.Module
    x: Tensor
    labels: Tensor
    epochs: int
    test_error: float


@cache
def load(name: str) -> Data:
    """Return the first half of the images to train from and the second to test on.

    Where the folder is missing, the digits of scikit-learn stand in, with a warning: 1,078 to train
    from and 719 to test on.
    """
    try:
        x, y = outside_images(name)
        half, share = len(x) // 2, 1
    except DataError as error:
        from sklearn.datasets import load_digits

        warnings.warn(
            f"{error} The digits of scikit-learn stand in, sizes a quarter.", stacklevel=2
        )
        x, y = load_digits(return_X_y=True)
        x, half, share = x / 16, 3 * len(x) // 5, DIGITS_SHARE
    images, labels = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y).long()
    return Data(images[:half], labels[:half], images[half:], labels[half:], share)


@cache
def fit(config: Config, seed: int, kind: str, size: int, width: int = 0) -> Network:
    """Train a network to a small loss.

    Args:
        config: Of the recipe.
        seed: Of rows, labels, network and batches.
        kind: `"true"` or `"random"` labels; `"confusion"`: the largest true set and `size` more
            rows with random labels.
        size: Examples, before the division by the data's share.
        width: Of the one hidden layer; 0 for the recipe's own two.
    """
    data = load(config.data)
    true, size = max(config.sizes) // data.share, size // data.share
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.x), generator=draw)
    random = torch.randint(CLASSES, (len(data.x),), generator=draw)
    count = true + size if kind == "confusion" else size
    if count > len(order):
        raise DataError(
            f"sizes must add up to at most {len(order)}, the images to train from; got {count}. "
            "Change sizes or confusion."
        )
    rows = order[:count]
    labels = random[:count] if kind == "random" else data.y[rows].clone()
    if kind == "confusion":
        labels[true:] = random[true:count]
    large = kind == "confusion" and size > max(config.confusion) // data.share
    lr = config.confusion_lr if large else config.lr
    torch.manual_seed(seed)
    sizes = [data.x.shape[1], *((width,) if width else config.hidden), CLASSES]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after, bias=False), nn.ReLU()]
    network = nn.Sequential(*layers[:-1])
    start = copy.deepcopy(network)
    epochs = train(network, data.x[rows], labels, config, lr, draw)
    with torch.no_grad():
        wrong = network(data.x_test).argmax(1) != data.y_test
    return Network(network, start, data.x[rows], labels, epochs, float(wrong.float().mean()))


def train(
    network: nn.Module, x: Tensor, labels: Tensor, config: Config, lr: float, draw: torch.Generator
) -> int:
    """Train until the mean loss of an epoch is small; return the number of epochs."""
    optimizer = torch.optim.SGD(network.parameters(), lr, momentum=config.momentum)
    for epoch in range(config.max_epochs):
        total = 0.0
        order = torch.randperm(len(x), generator=draw)
        for begin in range(0, len(x), config.batch_size):
            rows = order[begin : begin + config.batch_size]
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x[rows]), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach()) * len(rows)
        if total / len(x) <= config.stop_loss:
            return epoch + 1
    return config.max_epochs


@cache
def report(
    config: Config, seed: int, kind: str, size: int, width: int = 0, bound: bool = False
) -> GeneralizationReport:
    """Return the report of one network, with the PAC-Bayes bound where it is asked for."""
    found = fit(config, seed, kind, size, width)
    names = ["l2", "l1_path", "l2_path", "spectral", "sharpness"] + ["pac_bayes"] * bound
    return generalization_report(
        found.trained,
        (found.x, found.labels),
        measures=names,
        init_model=found.start,
        margin_quantile=config.margin_quantile,
        random_state=seed,
    )


def measure(
    config: Config, seed: int, kind: str, size: int, *, width: int = 0, bound: bool = False
) -> dict[str, float]:
    """Return the scalars of one network."""
    network = fit(config, seed, kind, size, width)
    found = report(config, seed, kind, size, width, bound)
    noisy = shaken(config, seed, kind, size, width, config.sigma)
    scalars = {
        "test_error": network.test_error,
        "epochs": float(network.epochs),
        **{name: value for name, value in found.values.items() if name != "pac_bayes"},
        "expected": noisy["expected"],
        "kl": noisy["kl"],
        "margin": found.margin,
        "weight_norm": found.baselines["weight_norm"],
        "distance": found.baselines["distance"],
        "train_error": found.baselines["train_error"],
    }
    if bound:
        scalars["bound"] = found.values["pac_bayes"]
        scalars["bound_sigma"] = found.details["pac_bayes"]["sigma"]
    return scalars


@cache
def shaken(
    config: Config, seed: int, kind: str, size: int, width: int, sigma: float
) -> dict[str, float]:
    """Return expected sharpness and KL of one network at one sigma."""
    network = fit(config, seed, kind, size, width)
    found = expected_sharpness(
        network.trained, (network.x, network.labels), sigma=sigma, random_state=seed
    )
    return {"sigma": sigma, "kl": found.kl, "expected": found.value}


def curve(config: Config, seed: int, kind: str) -> list[dict[str, Any]]:
    """Return expected sharpness and KL over sigma, for the largest set."""
    size, name = max(config.sizes), f"{kind} labels, seed {seed}"
    return [
        {"what": "curve", "network": name, **shaken(config, seed, kind, size, 0, sigma)}
        for sigma in config.sigmas
    ]


def taus(config: Config, seed: int) -> list[dict[str, Any]]:
    """Return for each measure its rank correlations with the test error over sizes and labels."""
    each = [(size, kind) for size in config.sizes for kind in ("true", "random")]
    compared = compare_measures(
        [report(config, seed, kind, size, 0, size == max(config.sizes)) for size, kind in each],
        [fit(config, seed, kind, size).test_error for size, kind in each],
        groups={"size": [size for size, _ in each], "labels": [kind for _, kind in each]},
    )
    return [
        {"what": "tau", **row}
        for row in compared.rows()
        if row["measure"] not in ("pac_bayes", "parameters", "train_loss", "train_error")
    ]
