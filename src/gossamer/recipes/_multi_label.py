"""One data set with many labels, one loss, one pool of negatives: what two recipes measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossamer.recipes._base import Column, Figure, Outcome
from gossamer.recipes._outside import outside_data
from gossamer.train.logging import Logger

__all__ = ["COLUMNS", "FIGURES", "METRICS", "MultiLabelConfig", "measure_count", "train_arm"]

METRICS = ("P@1", "P@3", "P@5", "R@10", "R@100", "PSP@1", "PSP@5")


@dataclass(frozen=True)
class MultiLabelConfig:
    """Settings of the recipes over many labels.

    Args:
        data: Data set: rows and labels with texts, or with named features.
        dim: Width of the bag encoder.
        epochs: Passes over the rows.
        batch_size: Rows for each step.
        lr: Peak learning rate.
        temperature: Divides the cosines.
        neighbours: Of the nearest-neighbour baseline.
        ridge: Penalty of the linear baseline.
    """

    data: str = "debtags-xmc"
    dim: int = 96
    epochs: int = 6
    batch_size: int = 512
    lr: float = 2e-3
    temperature: float = 0.05
    neighbours: int = 30
    ridge: float = 1.0


COLUMNS = tuple(
    Column(name.lower().replace("@", ""), name, "%", in_domain=name == "P@1") for name in METRICS
)
FIGURES = tuple(
    Figure(
        "bars",
        name.lower().replace("@", ""),
        f"{name} by method",
        f"One bar of {name} on the test rows for each method.",
        "arm",
        "value",
        {"where": {"metric": name}, "y_label": "%"},
    )
    for name in ("P@1", "P@5", "R@100")
)


def train_arm(
    config: MultiLabelConfig, loss: Any, negatives: str, seed: int, log: Logger
) -> Outcome:
    """Train the shared bag encoder with one loss, and measure it on the test rows."""
    import torch

    from gossamer.models import BagEncoder, DualEncoder
    from gossamer.retrieval import RetrieverConfig, fit_retriever

    train, test = _data(config, "train"), _data(config, "test")
    torch.manual_seed(seed)
    model = DualEncoder(BagEncoder(config.dim))
    settings = RetrieverConfig(
        epochs=config.epochs, batch_size=config.batch_size, lr=config.lr, device="cpu", seed=seed
    )
    fit_retriever(
        model, train, loss=loss, negatives=negatives, config=settings, quiet=True, logger=log
    )
    queries = model.encode_queries(test.texts)
    scores = (queries @ model.encode_documents(test.label_texts).T).numpy()
    return _measured(scores, train, test)


def measure_count(config: MultiLabelConfig, arm: str) -> Outcome:
    """Measure a baseline that is no encoder: `popularity`, `neighbours` or `linear`."""
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer

    train, test = _data(config, "train"), _data(config, "test")
    targets = train.labels
    if arm == "popularity":
        counts = np.asarray(targets.sum(axis=0)).ravel()
        return _measured(np.broadcast_to(counts, test.labels.shape), train, test)
    words = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    x, asked = words.fit_transform(train.texts), words.transform(test.texts)
    if arm == "linear":
        return _measured(_ridge(x, targets, config.ridge, asked), train, test)
    close = (asked @ x.T).toarray()
    weakest = np.partition(close, -config.neighbours, axis=1)[:, [-config.neighbours]]
    return _measured(np.where(close >= weakest, close, 0.0) @ targets.toarray(), train, test)


def _ridge(x: Any, targets: Any, penalty: float, asked: Any) -> Any:
    """Return the scores of one ridge regression for each label, without an intercept."""
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=penalty, fit_intercept=False, solver="sparse_cg", tol=1e-4)
    return model.fit(x, targets.toarray()).predict(asked)


def _measured(scores: Any, train: Any, test: Any) -> Outcome:
    import numpy as np

    from gossamer.retrieval import evaluate_xmc, propensities

    counts = np.asarray(train.labels.sum(axis=0)).ravel()
    weights = propensities(counts, train.labels.shape[0])
    report = evaluate_xmc(scores, test.labels, ks=(1, 3, 5, 10, 100), propensities=weights)
    values = {name: 100.0 * report[name] for name in METRICS}
    rows = [{"metric": name, "value": value} for name, value in values.items()]
    return Outcome({name.lower().replace("@", ""): value for name, value in values.items()}, rows)


def _data(config: MultiLabelConfig, split: Any) -> Any:
    """Return a split with texts; where a set has none, a row is the names of its features."""
    import dataclasses

    from gossamer.retrieval import read_xmc

    folder = outside_data(config.data)
    data = read_xmc(folder, split=split)
    if data.texts is not None or data.features is None:
        return data
    names = (folder / "features.txt").read_text(encoding="utf-8").splitlines()
    x = data.features
    texts = [
        " ".join(names[i] for i in x.indices[x.indptr[row] : x.indptr[row + 1]])
        for row in range(x.shape[0])
    ]
    return dataclasses.replace(data, texts=texts)
