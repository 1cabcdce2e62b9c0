"""A dual encoder as an estimator of scikit-learn: texts in, labels out."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.preprocessing import MultiLabelBinarizer
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import nn

from gossamer.checks import check_choice, check_range
from gossamer.errors import DataError, ShapeError
from gossamer.models import BagEncoder, DualEncoder, TextEncoder
from gossamer.retrieval.dense import search_top_k
from gossamer.retrieval.fit import RetrieverConfig, build_loss, fit_retriever
from gossamer.retrieval.training_rows import TrainingRows

__all__ = ["DualEncoderClassifier"]

LOSSES = ("decoupled", "coupled", "soft_top_k")
_MOST_LABELS = 100  # of a row that `predict` looks at


class DualEncoderClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    r"""Texts to labels, of which there may be very many and several for a text.

    One encoder embeds texts and the texts of labels; a text's labels are the nearest ones. There
    are no weights for each label, so that labels share what they have in common, and rare ones
    learn from others.

    Parameters
    ----------
    encoder : str, path or torch.nn.Module, default="bag"
        `"bag"`, a `BagEncoder` of width 96 that trains in seconds; a folder of a model of
        transformers, or `"packaged:minilm"`; or a module that maps a list of texts to `(n, D)`,
        of which `fit` trains a copy. The peak learning rate is 0.002, and 0.00005 for a model of
        transformers.
    loss : {"decoupled", "coupled", "soft_top_k"}, default="decoupled"
        Over all labels.
    temperature : float, default=0.05
        Divides the cosines. Range: > 0.
    max_epochs : int, default=6
        Passes over the rows. Range: >= 1.
    batch_size : int, default=512
        Rows for each step. Range: >= 1.
    random_state : int, RandomState or None, default=None
        Of start, order and draws. The same number gives the same model on one machine.

    Attributes:
    ----------
    classes_ : ndarray of shape (C,)
        Labels, in the order of the columns.
    model_ : DualEncoder
        The trained model.
    label_vectors_ : Tensor of shape (C, D)
        Embeddings of the labels.
    threshold_ : float
        Cosine from which a label is predicted, where rows have several: best micro F1 on the
        training rows.
    n_iter_ : int
        Steps taken.

    Raises:
    ------
    ConfigError
        If an option is unknown or out of its range.
    ShapeError
        If there are not as many texts as rows of Y, or label texts as columns.
    DataError
        If texts are no texts, or no row has a label.

    Notes:
    -----
    Source: Gupta et al., *Dual-Encoders for Extreme Multi-Label Classification*, ICLR 2024.

    Deviations: the threshold, the bag, and the cosine decay of `fit_retriever`.

    Examples:
    --------
    >>> texts = ["red shoes", "blue lamp", "red lamp", "blue shoes"] * 8
    >>> labels = [["red", "shoes"], ["blue", "lamp"], ["red", "lamp"], ["blue", "shoes"]] * 8
    >>> model = DualEncoderClassifier(max_epochs=30, batch_size=8, random_state=0)
    >>> scores, names = model.fit(texts, labels).top_k(["a red boat"], 1)
    >>> names.tolist()
    [['red']]
    """

    def __init__(
        self,
        *,
        encoder: str | os.PathLike[str] | nn.Module = "bag",
        loss: str = "decoupled",
        temperature: float = 0.05,
        max_epochs: int = 6,
        batch_size: int = 512,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.encoder = encoder
        self.loss = loss
        self.temperature = temperature
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, texts: Any, Y: Any, label_texts: Sequence[str] | None = None) -> Self:
        """Train on texts and their labels.

        Args:
            texts: One for each row.
            Y: An array or sparse matrix `(n, C)` of 0 and 1; a list of lists of label names (equal
                lists of 0 and 1 alone are a matrix); or one label for each row. Rows without a
                label teach nothing.
            label_texts: What each label says, in the order of the columns (or of the sorted
                names). Default its name; a column number says nothing, and is then learned like a
                weight vector of its own.
        """
        check_choice(self.loss, LOSSES, "loss")
        check_range(self.max_epochs, "max_epochs", low=1, integer=True)
        check_range(self.batch_size, "batch_size", low=1, integer=True)
        loss = build_loss(self.loss, temperature=self.temperature)
        rows = _texts(texts, "texts")
        labels = self._read(Y)
        names = [str(name) for name in self.classes_]
        if label_texts is not None:
            names = _texts(label_texts, "label_texts")
        if labels.shape[0] != len(rows):
            raise ShapeError(
                f"Y must have one row for each of the {len(rows)} texts; got {labels.shape[0]}. "
                "Give both for the same rows."
            )
        if len(names) != labels.shape[1]:
            raise ShapeError(
                f"label_texts must hold one text for each of the {labels.shape[1]} labels; got "
                f"{len(names)}. Add the missing texts."
            )
        if not labels.nnz:
            raise DataError("Y must hold at least one label; got none. Check the columns.")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        kept = np.flatnonzero(np.diff(labels.indptr))
        data = TrainingRows([rows[i] for i in kept], names, labels[kept])
        with _own_random_numbers(seed):
            encoder, lr = self._build()
            model = DualEncoder(encoder)
            config = RetrieverConfig(
                epochs=self.max_epochs, batch_size=self.batch_size, lr=lr, seed=seed
            )
            result = fit_retriever(model, data, loss=loss, config=config, quiet=True)
        self.model_ = model.eval()
        self.n_iter_ = result.steps
        self.label_vectors_ = model.encode_documents(names)
        self.threshold_ = 0.0 if self._one_label else self._best_threshold(data)
        return self

    def predict(self, texts: Any) -> Any:
        """Return labels: a matrix of 0 and 1 like `Y`, or one label for each text.

        At most 100 labels of a text are predicted.
        """
        check_is_fitted(self)
        if self._one_label:
            return self.classes_[self._ranked(texts, 1)[1][:, 0]]
        values, columns = self._ranked(texts, _MOST_LABELS)
        chosen = values >= self.threshold_
        found = csr_matrix(
            (np.ones(chosen.sum(), np.int64), columns[chosen], np.r_[0, chosen.sum(1).cumsum()]),
            shape=(len(values), len(self.classes_)),
        )
        found.sort_indices()
        return found if self._sparse else found.toarray()

    def predict_proba(self, texts: Any) -> NDArray[np.float32]:
        """Return a number between 0 and 1 for each text and label, `(n, C)`.

        With one label a row it is the softmax over the labels, and rows sum to 1. With several it
        is the logistic function of the cosine above the threshold, divided by the temperature: 1/2
        where `predict` changes its mind; an order, not a calibrated probability.
        """
        check_is_fitted(self)
        queries = self.model_.encode_queries(_texts(texts, "texts"))
        scores = (queries @ self.label_vectors_.T - self.threshold_) / self.temperature
        found = scores.softmax(1) if self._one_label else scores.sigmoid()
        return found.numpy()

    def top_k(self, texts: Any, k: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Return cosines and names of the k nearest labels of each text, best first.

        Args:
            texts: Any number.
            k: How many; cut to the number of labels. Range: >= 1.

        Returns:
            Two arrays `(n, k)`.

        Raises:
            ConfigError: If k is below 1.
        """
        check_is_fitted(self)
        scores, columns = self._ranked(texts, k)
        return scores, self.classes_[columns]

    def score(self, texts: Any, Y: Any, sample_weight: Any = None) -> float:
        """Return the share of texts whose labels are all right, and no others."""
        check_is_fitted(self)
        if not self._one_label and _is_lists(Y):
            Y = MultiLabelBinarizer(classes=self.classes_).fit_transform(Y)
        return float(super().score(texts, Y, sample_weight))

    def __sklearn_tags__(self) -> Any:
        """Say that rows are texts, and that they may have several labels."""
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        tags.input_tags.one_d_array = True
        tags.classifier_tags.multi_label = True
        return tags

    def _read(self, labels: Any) -> csr_matrix:
        """Return the labels as a matrix; the names of its columns go to `classes_`."""
        self._sparse = issparse(labels)
        self._one_label = False
        if _is_lists(labels):
            binarizer = MultiLabelBinarizer(sparse_output=True)
            matrix = csr_matrix(binarizer.fit_transform(labels))
            self.classes_ = binarizer.classes_
            return matrix
        if not self._sparse:
            labels = np.asarray(labels)
            if labels.ndim == 1:
                self._one_label = True
                self.classes_, columns = np.unique(labels, return_inverse=True)
                each = np.arange(len(labels) + 1)
                shape = len(labels), len(self.classes_)
                return csr_matrix((np.ones(len(labels)), columns, each), shape=shape)
            if labels.ndim != 2:
                raise ShapeError(
                    f"Y must be one label for each text, or a matrix (n, C); got {labels.shape}. "
                    "Reshape it."
                )
        matrix = csr_matrix(labels, dtype=np.float32, copy=True)
        matrix.eliminate_zeros()
        if not (matrix.data == 1).all():
            raise DataError("Y must hold 0 and 1 alone; got other values. Use Y > 0.")
        self.classes_ = np.arange(matrix.shape[1])
        return matrix

    def _build(self) -> tuple[nn.Module, float]:
        """Return the encoder to train and its peak learning rate."""
        if isinstance(self.encoder, nn.Module):
            encoder: nn.Module = copy.deepcopy(self.encoder)
        elif self.encoder == "bag":
            encoder = BagEncoder(96)
        else:
            encoder = TextEncoder(self.encoder)
        return encoder, 5e-5 if isinstance(encoder, TextEncoder) else 2e-3

    def _ranked(self, texts: Any, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return cosines and columns of the k nearest labels."""
        check_range(k, "k", low=1, integer=True)
        queries = self.model_.encode_queries(_texts(texts, "texts"))
        return search_top_k(queries.numpy(), self.label_vectors_.numpy(), k)

    def _best_threshold(self, data: TrainingRows) -> float:
        values, columns = self._ranked(data.texts, _MOST_LABELS)
        right = np.asarray(data.labels[np.arange(len(values))[:, None], columns].todense()) > 0
        order = np.argsort(-values, axis=None)
        hits = right.ravel()[order].cumsum()
        f1 = 2 * hits / (np.arange(1, len(hits) + 1) + data.labels.nnz)
        best = int(f1.argmax())
        # halfway to the next score, so that rounding changes nothing
        return float(values.ravel()[order[best : best + 2]].mean())


def _is_lists(labels: Any) -> bool:
    """Whether labels are lists of names, which are neither numbers in rows nor single names."""
    if not isinstance(labels, (list, tuple)):
        return False
    rows = [row for row in labels if isinstance(row, (list, tuple, set, frozenset))]
    names = next((row for row in rows if len(row)), None)
    if len(rows) != len(labels) or names is None:
        return False
    same = len({len(row) for row in rows}) == 1
    numbers = all(value in (0, 1) for row in rows for value in row)
    return not (same and numbers)


def _texts(texts: Any, name: str) -> list[str]:
    """Return any column of texts as a list."""
    found = texts.tolist() if hasattr(texts, "tolist") else texts
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise DataError(
            f"{name} must be a list or a column of texts; got {type(texts).__name__}. Put a single "
            "text in a list."
        )
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise DataError(
                f"{name} must hold texts; got {type(text).__name__} at index {number}. Convert or "
                "drop it."
            )
    if not found:
        raise DataError(f"{name} must hold at least one text; got none. Give some.")
    return list(found)


@contextmanager
def _own_random_numbers(seed: int) -> Iterator[None]:
    """Draw from a seed inside, and go on afterwards as if nothing had been drawn."""
    # training seeds the global generators of all three libraries
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)  # noqa: NPY002
