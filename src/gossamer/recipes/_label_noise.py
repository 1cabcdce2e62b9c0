"""What the recipe on label noise trains: one small network for each loss, students of some."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gossamer.losses import (
    BackwardCorrectionLoss,
    DistillationLoss,
    ForwardCorrectionLoss,
    GeneralizedCrossEntropyLoss,
    LabelSmoothingLoss,
    SymmetricCrossEntropyLoss,
    SymmetricNoise,
    estimate_transition,
    inject_noise,
)
from gossamer.measures import calibration_error
from gossamer.recipes._outside import outside_images

if TYPE_CHECKING:
    from gossamer.recipes.label_noise import Config

__all__ = [
    "Data",
    "Fitted",
    "fit",
    "load",
    "measure",
    "student",
]

CLASSES = 10
FOLDS = 2


@dataclass(frozen=True)
class Data:
    """Rows of training, with true and noisy labels, and of the clean test."""

    x: Tensor
    true: Tensor
    labels: Tensor
    flipped: Tensor
    x_test: Tensor
    y_test: Tensor


@dataclass(frozen=True)
class Fitted:
    """What a network says of the rows of training and test."""

    train: Tensor
    test: Tensor


@cache
def load(name: str, rate: float, seed: int) -> Data:
    """Return the data with labels of training replaced at random.

    Raises:
        DataError: If the files are not there.
    """
    if name == "digits":
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        parts = train_test_split(x / 16, y, test_size=0.4, stratify=y, random_state=seed)
        x_train, x_test, y_train, y_test = parts
    else:
        x, y = outside_images(name)
        half = len(x) // 2
        x_train, x_test, y_train, y_test = x[:half], x[half:], y[:half], y[half:]
    true = torch.as_tensor(y_train, dtype=torch.long)
    noise = SymmetricNoise(CLASSES, rate)
    labels, flipped = inject_noise(true, noise, random_state=seed)
    as_floats = [torch.as_tensor(v, dtype=torch.float32) for v in (x_train, x_test)]
    return Data(as_floats[0], true, labels, flipped, as_floats[1], torch.as_tensor(y_test).long())


def loss_of(kind: str, alpha: float, data: Data, config: Config, seed: int) -> nn.Module:
    """Return the loss of one arm."""
    noise = SymmetricNoise.from_alpha(CLASSES, alpha)
    if kind == "estimated":
        return ForwardCorrectionLoss(estimated(data, config, seed))
    kinds: dict[str, Any] = {
        "cross_entropy": lambda: LabelSmoothingLoss(0.0),
        "smoothing": lambda: LabelSmoothingLoss(alpha),
        "forward": lambda: ForwardCorrectionLoss(noise),
        "backward": lambda: BackwardCorrectionLoss(noise),
        "generalized": GeneralizedCrossEntropyLoss,
        "symmetric": SymmetricCrossEntropyLoss,
    }
    loss: nn.Module = kinds[kind]()
    return loss


def estimated(data: Data, config: Config, seed: int) -> Tensor:
    """Return the transition matrix estimated from out-of-fold predictions."""
    generator = torch.Generator().manual_seed(seed)
    folds = torch.randperm(len(data.x), generator=generator).chunk(FOLDS)
    probabilities = torch.empty(len(data.x), CLASSES)
    for fold in folds:
        rest = torch.ones(len(data.x), dtype=torch.bool)
        rest[fold] = False
        x, labels = data.x[rest], data.labels[rest]
        network = train(x, labels, LabelSmoothingLoss(0.0), config, seed)
        with torch.no_grad():
            probabilities[fold] = network(data.x[fold]).softmax(1)
    return estimate_transition(probabilities, data.labels, method="confident")


@cache
def fit(
    config: Config, seed: int, kind: str, alpha: float = 0.0, rate: float | None = None
) -> Fitted:
    """Train a network with a loss on the noisy labels.

    Args:
        config: Of the recipe.
        seed: Of data, noise, network and batches.
        kind: Name of the loss; `"weight_decay"` and `"early_stopping"` are cross-entropy with them.
        alpha: Of the loss.
        rate: Of the noise, if another than that of the recipe.
    """
    data = load(config.data, config.rate if rate is None else rate, seed)
    if kind == "early_stopping":
        clean = max(1, round(config.clean_share * len(data.x)))
        loss, held = LabelSmoothingLoss(0.0), (data.x[:clean], data.true[:clean])
        network = train(data.x[clean:], data.labels[clean:], loss, config, seed, held=held)
    elif kind == "weight_decay":
        decay = config.weight_decay
        network = train(data.x, data.labels, LabelSmoothingLoss(0.0), config, seed, decay=decay)
    else:
        network = train(data.x, data.labels, loss_of(kind, alpha, data, config, seed), config, seed)
    return _outputs(network, data)


@cache
def student(config: Config, seed: int, kind: str, alpha: float = 0.0) -> Fitted:
    """Train a student on the probabilities of a teacher alone; no label is seen."""
    data = load(config.data, config.rate, seed)
    said = fit(config, seed, kind, alpha).train
    loss = DistillationLoss(temperature=config.temperature, alpha=1.0)
    return _outputs(train(data.x, said, loss, config, 1000 + seed), data)


def train(
    x: Tensor,
    labels: Tensor,
    loss: nn.Module,
    config: Config,
    seed: int,
    *,
    decay: float = 0.0,
    held: tuple[Tensor, Tensor] | None = None,
) -> nn.Module:
    """Return a trained network of two hidden layers.

    Args:
        x: Rows.
        labels: Classes, or what a teacher says of the rows.
        loss: Called with logits and labels.
        config: Of the recipe.
        seed: Of network and batches.
        decay: Weight decay.
        held: Rows and labels whose best epoch is kept.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    width = config.hidden
    network = nn.Sequential(
        nn.Linear(x.shape[1], width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.Adam(network.parameters(), lr=config.lr, weight_decay=decay, fused=True)
    best, kept = -1.0, network.state_dict()
    for _ in range(config.epochs):
        order = torch.randperm(len(x), generator=generator)
        for begin in range(0, len(x), config.batch_size):
            rows = order[begin : begin + config.batch_size]
            optimizer.zero_grad()
            loss(network(x[rows]), labels[rows]).backward()
            optimizer.step()
        if held is not None:
            right = _accuracy(network, *held)
            if right > best:
                best, kept = right, {k: v.clone() for k, v in network.state_dict().items()}
    if held is not None:
        network.load_state_dict(kept)
    return network


def _accuracy(network: nn.Module, x: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((network(x).argmax(1) == labels).float().mean())


def _outputs(network: nn.Module, data: Data) -> Fitted:
    with torch.no_grad():
        return Fitted(network(data.x), network(data.x_test))


def measure(fitted: Fitted, data: Data) -> dict[str, float]:
    """Return accuracy and calibration on the clean test, and what became of wrong labels."""
    report = calibration_error(fitted.test.double().softmax(1), data.y_test, num_bootstrap=1)
    found = {
        "accuracy": 100 * report.accuracy,
        "ece": report.error,
        "confidence": report.confidence,
    }
    if bool(data.flipped.any()):
        wrong = data.flipped
        said = fitted.train[wrong].argmax(1) == data.true[wrong]
        found["repaired"] = 100 * float(said.float().mean())
    return found
