"""A classifier of scikit-learn for rows whose labels are partly wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError
from gossamer.losses import SymmetricNoise, estimate_transition
from gossamer.measures import find_label_errors
from gossamer.models import MultiLayerPerceptron
from gossamer.train.class_losses import build_class_loss
from gossamer.train.config import TrainConfig
from gossamer.train.labelled import (
    FOLDS,
    check_estimable,
    fit_rows,
    out_of_fold,
    predict_rows,
    seeded_mlp,
)

__all__ = ["NoisyLabelClassifier"]

LOSSES = ("backward", "cross_entropy", "forward", "smoothing")


class NoisyLabelClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    r"""Classes of rows, learnt from labels of which some are wrong.

    A network of ReLU layers. By default the chances of wrong labels are estimated first, from
    models that did not see the row, and the loss is corrected for them; the probabilities are then
    those of the true classes.

    Parameters
    ----------
    loss : {"forward", "smoothing", "backward", "cross_entropy"}, default="forward"
        Forward and backward correction use `transition`, smoothing uses `alpha`.
    alpha : float, default=0.1
        Of smoothing. Range: 0 to 1.
    transition : "estimate", array of shape (C, C) or SymmetricNoise, default="estimate"
        Entry (i, j) is the chance that a row of class i has label j, classes sorted. To estimate it
        three more models are trained.
    hidden_dims : sequence of int, default=(256, 256)
        Widths of the hidden layers.
    max_epochs : int, default=60
        Passes over the rows. Range: >= 1.
    lr : float, default=0.001
        Learning rate of Adam, the same in all steps. Range: > 0.
    batch_size : int, default=64
        Rows for each step. Range: >= 1.
    random_state : int, RandomState or None, default=None
        Of start, order and folds. The same number gives the same model on one machine.

    Attributes:
    ----------
    classes_ : ndarray of shape (C,)
        Labels, sorted.
    model_ : MultiLayerPerceptron
        The trained network.
    transition_ : ndarray of shape (C, C) or None
        What the loss was corrected for.
    label_errors_ : LabelErrorReport or None
        Rows whose label is probably wrong, if the chances were estimated.
    n_iter_ : int
        Steps taken.
    n_features_in_ : int
        Columns of X.

    Raises:
    ------
    ConfigError
        If an option is unknown or out of its range.
    DataError
        If there are fewer than two classes, or fewer than two rows of a class where the chances are
        to be estimated.

    Notes:
    -----
    The columns are not scaled: put a `StandardScaler` before it. For forward correction with
    chances that are too low, and for smoothing, more noise than there is does better in the
    paper's and in our measurements.

    Source: Patrini et al., *Making Deep Neural Networks Robust to Label Noise*, CVPR 2017; Lukasik
    et al., *Does Label Smoothing Mitigate Label Noise?*, ICML 2020.

    Deviations: the chances are estimated by counting confident rows (Northcutt et al., JAIR 2021),
    which did better on small data than the one most certain row of each class.

    Examples:
    --------
    >>> x = np.random.default_rng(0).standard_normal((200, 2))
    >>> truth = (x[:, 0] > 0).astype(int)
    >>> labels = np.where(np.arange(200) % 5 == 0, 1 - truth, truth)
    >>> model = NoisyLabelClassifier(hidden_dims=(16,), lr=0.01, max_epochs=20, random_state=0)
    >>> bool(model.fit(x, labels).score(x, truth) > 0.9)
    True
    """

    def __init__(
        self,
        *,
        loss: str = "forward",
        alpha: float = 0.1,
        transition: Any = "estimate",
        hidden_dims: Sequence[int] = (256, 256),
        max_epochs: int = 60,
        lr: float = 1e-3,
        batch_size: int = 64,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.loss = loss
        self.alpha = alpha
        self.transition = transition
        self.hidden_dims = hidden_dims
        self.max_epochs = max_epochs
        self.lr = lr
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Train on rows and their labels.

        Args:
            X: `(N, F)`.
            y: `(N,)`, labels of any kind.
        """
        check_choice(str(self.loss), LOSSES, "loss")
        check_range(self.max_epochs, "max_epochs", low=1, integer=True)
        check_range(self.batch_size, "batch_size", low=1, integer=True)
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"y must hold two classes at least; got one class, {self.classes_[0]!r}. A "
                "classifier needs rows of each."
            )
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        x, labels = _as_tensor(X), torch.from_numpy(numbers.astype(np.int64))
        steps = self.max_epochs * -(-len(x) // self.batch_size)
        config = TrainConfig(
            steps=steps, lr=self.lr, betas=(0.9, 0.999), clip=0.0, warmup=0.0, floor=1.0,
            device="cpu", log_every=steps, checkpoint_every=0,
        )  # fmt: skip
        self._correct(x, labels, config, seed)
        table = {"name": self.loss, **({"alpha": self.alpha} if self.loss == "smoothing" else {})}
        # the closed form of symmetric noise, which costs no matrix
        symmetric = self.transition_ is not None and isinstance(self.transition, SymmetricNoise)
        transition = self.transition if symmetric else self.transition_
        loss = build_class_loss(table, len(self.classes_), transition=transition)
        model = self._build(seed)
        fit_rows(model, x, labels, loss, config, batch_size=self.batch_size, seed=seed)
        self.model_ = model
        self.n_iter_ = steps
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probabilities of the true classes, `(N, C)`.

        Args:
            X: `(N, F)`.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float32, reset=False)
        found: NDArray[np.float64] = predict_rows(self.model_, _as_tensor(X)).numpy()
        return found

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the likeliest class of each row, `(N,)`.

        Args:
            X: `(N, F)`.
        """
        best = self.predict_proba(X).argmax(1)
        found: NDArray[Any] = self.classes_[best]
        return found

    def _build(self, seed: int) -> MultiLayerPerceptron:
        size = len(self.classes_)
        return seeded_mlp(seed, self.n_features_in_, size, hidden_dims=self.hidden_dims)

    def _correct(
        self, x: torch.Tensor, labels: torch.Tensor, config: TrainConfig, seed: int
    ) -> None:
        """Set the chances that the loss is corrected for, and the list of suspicious rows."""
        self.transition_: Any = None
        self.label_errors_: Any = None
        if self.loss not in ("forward", "backward"):
            return
        if not isinstance(self.transition, str):
            matrix = getattr(self.transition, "matrix", None)
            self.transition_ = np.asarray(matrix() if matrix else self.transition, np.float64)
            return
        if self.transition != "estimate":
            raise ConfigError(
                f"transition must be 'estimate' or a matrix; got {self.transition!r}. Give one of "
                "them."
            )
        check_estimable(labels, self.classes_.tolist())
        probabilities = out_of_fold(
            lambda: self._build(seed), x, labels, config,
            batch_size=self.batch_size, seed=seed, folds=min(FOLDS, len(x)),
        )  # fmt: skip
        self.transition_ = estimate_transition(probabilities, labels, method="confident").numpy()
        self.label_errors_ = find_label_errors(probabilities, labels)


def _as_tensor(rows: NDArray[np.float32]) -> torch.Tensor:
    """Return rows as a tensor; of rows that are read-only, a copy, since torch warns of those."""
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())
