"""The estimator: what it learns, every form of labels, scikit-learn's own checks."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix, issparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import GridSearchCV
from sklearn.utils import estimator_checks as checks
from sklearn.utils.estimator_checks import check_estimator

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.models import BagEncoder
from gossamer.retrieval import DualEncoderClassifier

WORDS = ["boat", "lamp", "red", "shoe"]
torch.manual_seed(0)
ENCODER = BagEncoder(16, num_buckets=512)
SMALL: dict[str, Any] = {"encoder": ENCODER, "max_epochs": 40, "batch_size": 16, "random_state": 0}


def toy(rows: int = 48) -> tuple[list[str], list[list[str]]]:
    rng = np.random.default_rng(0)
    names = [sorted(rng.choice(WORDS, size=1 + n % 2, replace=False).tolist()) for n in range(rows)]
    return [f"a {' '.join(row)} no{n}" for n, row in enumerate(names)], names


def indicator(names: list[list[str]]) -> np.ndarray:
    return np.array([[int(word in row) for word in WORDS] for row in names])


@pytest.fixture(scope="module")
def fitted() -> DualEncoderClassifier:
    texts, names = toy()
    return DualEncoderClassifier(**SMALL).fit(texts, names)


@pytest.mark.parametrize("loss", ["decoupled", "coupled"])
def test_learns_which_labels_a_text_has(loss: str) -> None:
    texts, names = toy()
    y = indicator(names)
    model = DualEncoderClassifier(loss=loss, **SMALL).fit(texts, y, WORDS)
    assert f1_score(y, model.predict(texts), average="micro") > 0.95
    assert model.score(texts, y) == accuracy_score(y, model.predict(texts))
    assert model.n_iter_ == 120


def test_soft_top_k_needs_more_labels_than_k() -> None:
    texts = [f"word{n} here" for n in range(8)]
    model = DualEncoderClassifier(loss="soft_top_k", **{**SMALL, "batch_size": 4})
    model.fit(texts, np.eye(8, dtype=int), [f"word{n}" for n in range(8)])
    assert model.top_k(texts, 1)[1][:, 0].tolist() == list(range(8))
    with pytest.raises(ConfigError, match="below the number of labels"):
        model.fit(texts[:4], np.eye(4, dtype=int))


def test_lists_dense_and_sparse_labels_give_the_same(fitted: DualEncoderClassifier) -> None:
    texts, names = toy()
    y = indicator(names)
    assert fitted.classes_.tolist() == WORDS
    dense = DualEncoderClassifier(**SMALL).fit(texts, y, WORDS)
    sparse = DualEncoderClassifier(**SMALL).fit(texts, csr_matrix(y), WORDS)
    assert dense.classes_.tolist() == [0, 1, 2, 3]
    expected = fitted.predict_proba(texts)
    for model in (dense, sparse):
        np.testing.assert_array_equal(model.predict_proba(texts), expected)
    assert issparse(sparse.predict(texts))
    np.testing.assert_array_equal(sparse.predict(texts).toarray(), dense.predict(texts))
    assert sparse.score(texts, csr_matrix(y)) == dense.score(texts, y)
    assert fitted.score(texts, names) == dense.score(texts, y)


def test_probabilities_and_nearest_labels(fitted: DualEncoderClassifier) -> None:
    texts, _ = toy()
    p = fitted.predict_proba(texts)
    assert p.shape == (48, 4)
    np.testing.assert_array_equal(p >= 0.5, fitted.predict(texts) > 0)
    scores, found = fitted.top_k(texts, 9)
    assert found.shape == (48, 4)  # cut to the number of labels
    assert (np.diff(scores, axis=1) <= 0).all()
    np.testing.assert_array_equal(found[:, 0], fitted.classes_[p.argmax(1)])
    assert np.abs(scores).max() <= 1 + 1e-6
    with pytest.raises(ConfigError, match=r"^k must be >= 1; got 0"):
        fitted.top_k(texts, 0)


def test_one_label_a_row() -> None:
    texts = [f"{word} no{n}" for n in range(10) for word in WORDS]
    labels = np.array(WORDS * 10)
    model = DualEncoderClassifier(**SMALL).fit(texts, labels)
    assert model.score(texts, labels) > 0.95
    p = model.predict_proba(texts)
    np.testing.assert_allclose(p.sum(1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(model.classes_[p.argmax(1)], model.predict(texts))


def test_a_number_gives_the_same_model_and_leaves_the_generators_alone() -> None:
    texts, names = toy(16)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[index]  # noqa: NPY002
    one = DualEncoderClassifier(max_epochs=2, random_state=3).fit(texts, names)
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])  # type: ignore[index]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    torch.rand(5)
    two = DualEncoderClassifier(max_epochs=2, random_state=3).fit(texts, names)
    other = DualEncoderClassifier(max_epochs=2, random_state=4).fit(texts, names)
    np.testing.assert_array_equal(one.predict_proba(texts), two.predict_proba(texts))
    assert not np.array_equal(one.predict_proba(texts), other.predict_proba(texts))


def test_an_encoder_of_the_user_is_copied() -> None:
    texts, names = toy(16)
    encoder = BagEncoder(8, num_buckets=64)
    before = copy.deepcopy(encoder.state_dict())
    model = DualEncoderClassifier(encoder=encoder, max_epochs=3, random_state=0).fit(texts, names)
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, before[name])
    assert model.label_vectors_.shape == (4, 8)
    twin = copy.deepcopy(model)
    np.testing.assert_array_equal(twin.predict_proba(texts), model.predict_proba(texts))


def test_parameters_clone_and_search() -> None:
    model = DualEncoderClassifier(loss="coupled", temperature=0.1)
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(max_epochs=2).max_epochs == 2
    texts = [f"{word} no{n}" for n in range(4) for word in WORDS]
    search = GridSearchCV(
        DualEncoderClassifier(max_epochs=2, random_state=0), {"temperature": [0.05, 0.2]}, cv=2
    )
    assert search.fit(texts, WORDS * 4).best_params_["temperature"] in (0.05, 0.2)


def test_scikit_learns_checks() -> None:
    """Its checks of behaviour feed matrices: for texts `check_estimator` itself leaves them out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Can't test estimator")
        results = check_estimator(DualEncoderClassifier(), on_fail=None, on_skip=None)
    assert {result["status"] for result in results} == {"passed"}
    for check in (
        checks.check_estimator_cloneable,
        checks.check_estimator_repr,
        checks.check_estimator_tags_renamed,
        checks.check_get_params_invariance,
        checks.check_no_attributes_set_in_init,
        checks.check_parameters_default_constructible,
        checks.check_set_params,
        checks.check_valid_tag_types,
    ):
        check("DualEncoderClassifier", DualEncoderClassifier())
    tags = DualEncoderClassifier().__sklearn_tags__()
    assert tags.input_tags.string
    assert not tags.input_tags.two_d_array
    assert tags.classifier_tags.multi_label


def test_rows_without_labels_teach_nothing() -> None:
    texts, names = toy(16)
    plain = DualEncoderClassifier(max_epochs=2, random_state=0).fit(texts, names)
    more = DualEncoderClassifier(max_epochs=2, random_state=0).fit(
        [*texts, "no label"], [*names, []]
    )
    np.testing.assert_array_equal(plain.predict_proba(texts), more.predict_proba(texts))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "decopled"}, "did you mean 'decoupled'"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"max_epochs": 0}, "max_epochs must be >= 1"),
        ({"batch_size": 1.5}, "batch_size must be an integer"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DualEncoderClassifier(**options).fit(["a"], [["x"]])


@pytest.mark.parametrize(
    ("texts", "labels", "names", "error", "message"),
    [
        ("a", [["x"]], None, DataError, "texts must be a list or a column of texts; got str"),
        (["a", 3], [["x"], ["y"]], None, DataError, "got int at index 1"),
        ([], [], None, DataError, "texts must hold at least one text"),
        (["a"], [["x"], ["y"]], None, ShapeError, "one row for each of the 1 texts; got 2"),
        (["a"], [[0, 1]], ["x"], ShapeError, "each of the 2 labels; got 1"),
        (["a"], np.array([[0, 2]]), None, DataError, "Y must hold 0 and 1 alone"),
        (["a"], np.zeros((1, 3)), None, DataError, "at least one label; got none"),
        (["a"], np.zeros((1, 3, 2)), None, ShapeError, r"a matrix \(n, C\); got \(1, 3, 2\)"),
    ],
)
def test_bad_data(texts: Any, labels: Any, names: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        DualEncoderClassifier().fit(texts, labels, names)


def test_not_fitted() -> None:
    for method in ("predict", "predict_proba"):
        with pytest.raises(NotFittedError):
            getattr(DualEncoderClassifier(), method)(["a"])
