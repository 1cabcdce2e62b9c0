"""Contrastive losses for several relevant labels against their formulas in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.losses import (
    CoupledSoftmaxLoss,
    DecoupledSoftmaxLoss,
    InBatchSoftmaxLoss,
    SoftTopKLoss,
    SummedSoftmaxLoss,
)

HAND = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
LOSSES = [DecoupledSoftmaxLoss, CoupledSoftmaxLoss, SummedSoftmaxLoss, SoftTopKLoss]
WHOLE: dict[Any, dict[str, Any]] = {SoftTopKLoss: {"k": "positives"}}  # draws nothing


def example(rows: int = 5, labels: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, labels, generator=generator, dtype=torch.float64)
    relevant = torch.rand(rows, labels, generator=generator) < 0.3
    relevant[:, 0] |= ~relevant.any(1)
    return scores, relevant


def in_numpy(name: str, scores: np.ndarray, relevant: np.ndarray) -> float:
    rows = []
    for s, p in zip(scores, relevant, strict=True):
        z = math.log(np.exp(s[~p]).sum())
        every = math.log(np.exp(s).sum())
        rows.append(
            {
                "decoupled": np.mean([math.log(math.exp(z) + math.exp(x)) - x for x in s[p]]),
                "coupled": np.mean(every - s[p]),
                "summed": every - math.log(np.exp(s[p]).sum()),
            }[name]
        )
    return float(np.mean(rows))


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("decoupled", DecoupledSoftmaxLoss(temperature=1.0)),
        ("coupled", CoupledSoftmaxLoss(temperature=1.0)),
        ("summed", SummedSoftmaxLoss(temperature=1.0)),
    ],
)
def test_the_formulas(name: str, loss: Callable[..., torch.Tensor]) -> None:
    scores, relevant = example()
    expected = in_numpy(name, scores.numpy(), relevant.numpy())
    assert math.isclose(float(loss(scores, relevant)), expected, rel_tol=1e-12)
    x = scores.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, relevant), (x,))


def test_hand_values() -> None:
    labels = [[0, 1]]
    assert math.isclose(
        float(DecoupledSoftmaxLoss(temperature=1.0)(HAND, labels)), 0.220095, abs_tol=1e-6
    )
    assert math.isclose(
        float(CoupledSoftmaxLoss(temperature=1.0)(HAND, labels)), 0.907606, abs_tol=1e-6
    )
    tau = DecoupledSoftmaxLoss(temperature=0.5)(HAND / 2, labels)
    assert math.isclose(float(tau), 0.220095, abs_tol=1e-6)
    whole = DecoupledSoftmaxLoss(temperature=1.0, normalize="sum")(HAND, labels)
    assert math.isclose(float(whole), 2 * 0.220095, abs_tol=2e-6)


def test_one_relevant_label_is_cross_entropy() -> None:
    scores, _ = example(6, 7)
    target = torch.arange(6)
    labels = [[int(n)] for n in target]
    for loss in (
        DecoupledSoftmaxLoss(temperature=1.0),
        CoupledSoftmaxLoss(temperature=1.0),
        SummedSoftmaxLoss(temperature=1.0),
        InBatchSoftmaxLoss(temperature=1.0),
    ):
        pair = isinstance(loss, InBatchSoftmaxLoss)
        x, y = (scores[:, :6].clone().requires_grad_() for _ in range(2)) if pair else (
            scores.clone().requires_grad_() for _ in range(2)
        )  # fmt: skip
        ours = loss(x) if pair else loss(x, labels)
        theirs = F.cross_entropy(y, target)
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
        a, b = torch.autograd.grad(ours, x)[0], torch.autograd.grad(theirs, y)[0]
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_a_likely_relevant_label_is_lowered_by_the_coupled_loss_alone() -> None:
    x = HAND.clone().requires_grad_()
    (coupled,) = torch.autograd.grad(CoupledSoftmaxLoss(temperature=1.0)(x, [[0, 1]]), x)
    assert math.isclose(2 * float(coupled[0, 0]), 0.3305, abs_tol=1e-4)  # the sum form of the paper
    for seed in range(20):
        scores, relevant = example(seed=seed)
        x = (3 * scores).requires_grad_()
        (grad,) = torch.autograd.grad(DecoupledSoftmaxLoss(temperature=1.0)(x, relevant), x)
        assert (grad[relevant] <= 0).all()
        assert (grad[~relevant] >= 0).all()


@pytest.mark.parametrize("kind", LOSSES)
def test_rows_shift_sum_and_order(kind: Callable[..., Any]) -> None:
    loss = kind(temperature=0.7, **WHOLE.get(kind, {}))
    scores, relevant = example(labels=12)
    x = scores.clone().requires_grad_()
    value = loss(x, relevant)
    (grad,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(grad.sum(1), torch.zeros(5).double(), atol=1e-9, rtol=0)
    moved = loss(scores + torch.arange(5.0)[:, None], relevant)
    torch.testing.assert_close(moved, value, atol=1e-6, rtol=0)
    order = torch.randperm(12)
    torch.testing.assert_close(loss(scores[:, order], relevant[:, order]), value)


def test_the_mean_over_drawn_positives_is_the_whole_loss() -> None:
    scores, relevant = example(1, 9, seed=3)
    full = DecoupledSoftmaxLoss(temperature=1.0)
    one = DecoupledSoftmaxLoss(temperature=1.0, sample_positives=1)
    torch.manual_seed(0)
    values = {round(float(one(scores, relevant)), 9) for _ in range(200)}
    assert len(values) == int(relevant.sum())  # each alone, with equal chances
    assert math.isclose(sum(values) / len(values), float(full(scores, relevant)), abs_tol=1e-6)


def test_drawn_negatives_are_right_in_the_mean() -> None:
    scores, relevant = example(1, 40, seed=2)
    few = DecoupledSoftmaxLoss(temperature=1.0, num_negatives=8, normalize="sum")
    torch.manual_seed(0)
    # softplus(z - s) = log(1 + exp(z) / exp(s)), and exp(z) is right in the mean
    first = relevant.nonzero()[0, 1]
    only = torch.zeros_like(relevant)
    only[0, first] = True
    hidden = scores.masked_fill(relevant & ~only, -math.inf)
    draws = torch.stack([few(hidden, only).exp() for _ in range(4000)])
    z = hidden.masked_fill(only, -math.inf).exp().sum()
    expected = 1 + float(z / hidden[0, first].exp())
    assert abs(float(draws.mean()) / expected - 1) < 0.05
    every = DecoupledSoftmaxLoss(temperature=1.0, num_negatives=99)
    torch.testing.assert_close(
        every(scores, relevant), DecoupledSoftmaxLoss(temperature=1.0)(scores, relevant)
    )


def test_a_row_of_relevant_labels_only_costs_nothing() -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    relevant = torch.tensor([[True, True, True], [True, False, False]])
    loss = DecoupledSoftmaxLoss(temperature=0.5, reduction="none")(scores, relevant)
    assert loss[0].item() == 0.0
    loss.sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert not scores.grad[0].any()
    assert scores.grad[1].any()


@pytest.mark.parametrize("kind", LOSSES)
def test_half_precision_is_computed_in_float32(kind: Callable[..., Any]) -> None:
    scores, relevant = example(labels=30)
    half = scores.bfloat16().requires_grad_()
    function = kind(temperature=0.5, **WHOLE.get(kind, {}))
    loss = function(half, relevant)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, function(half.float(), relevant))
    loss.backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_every_form_of_labels_gives_the_same() -> None:
    scores, relevant = example()
    loss = DecoupledSoftmaxLoss(temperature=0.5)
    expected = loss(scores, relevant)
    lists = [row.nonzero().flatten().tolist() for row in relevant]
    forms: list[Any] = [
        relevant.int(),
        relevant.numpy(),
        relevant.tolist(),
        lists,
        scipy.sparse.csr_matrix(relevant.numpy()),
        relevant.float().to_sparse_csr(),
        relevant.double().to_sparse(),
    ]
    for labels in forms:
        torch.testing.assert_close(loss(scores, labels), expected)


def test_weights_of_relevant_labels() -> None:
    scores, relevant = example()
    weights = relevant * torch.rand(relevant.shape)
    got = DecoupledSoftmaxLoss(temperature=1.0, reduction="none")(scores, weights)
    for s, w, value in zip(scores, weights, got, strict=True):
        z = s[w == 0].logsumexp(0)
        expected = (w * F.softplus(z - s)).sum() / w.sum()
        torch.testing.assert_close(value, expected)


def test_in_batch_leaves_known_positives_out() -> None:
    scores = torch.randn(4, 4, dtype=torch.float64)
    relevant = torch.eye(4, dtype=torch.bool)
    relevant[0, 2] = relevant[3, 1] = True
    masked = InBatchSoftmaxLoss(temperature=1.0)(scores, relevant)
    rows = []
    for i in range(4):
        kept = [j for j in range(4) if j == i or not relevant[i, j]]
        rows.append(scores[i, kept].logsumexp(0) - scores[i, i])
    torch.testing.assert_close(masked, torch.stack(rows).mean())
    plain = InBatchSoftmaxLoss(temperature=1.0, mask_positives=False)(scores, relevant)
    torch.testing.assert_close(plain, F.cross_entropy(scores, torch.arange(4)))


def test_reductions_and_empty_rows() -> None:
    scores, relevant = example()
    each = DecoupledSoftmaxLoss(temperature=0.5, reduction="none")(scores, relevant)
    assert each.shape == (5,)
    torch.testing.assert_close(
        DecoupledSoftmaxLoss(temperature=0.5, reduction="sum")(scores, relevant), each.sum()
    )
    relevant[2] = False
    with pytest.raises(DataError, match=r"got none in row 2 \(1 rows in all\)"):
        DecoupledSoftmaxLoss(temperature=0.5)(scores, relevant)
    skip = DecoupledSoftmaxLoss(temperature=0.5, empty="skip")(scores, relevant)
    torch.testing.assert_close(skip, each[[0, 1, 3, 4]].mean())


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (torch.zeros(3), [[0]], ShapeError, r"shape \(rows, labels\); got \(3,\)"),
        (torch.zeros(1, 3, dtype=torch.long), [[0]], DtypeError, "floating point; got"),
        (torch.tensor([[0.0, math.nan]]), [[0]], DataError, "must not hold NaN"),
        (torch.zeros(1, 3), torch.zeros(1, 4), ShapeError, r"\(1, 3\); got \(1, 4\)"),
        (torch.zeros(2, 3), [[0]], ShapeError, "one list for each row, 2; got 1"),
        (torch.zeros(2, 3), [0, 2], DataError, "a list of indices for each row; got 0 for row 0"),
        (torch.zeros(2, 3), [[0], [3]], DataError, "from 0 to 2; got 3 in row 1"),
        (torch.zeros(2, 3), [[0], [-1]], DataError, "got -1 in row 1"),
        (torch.zeros(1, 3), [[1, 2, 1]], DataError, "got 1 twice in row 0"),
        (torch.zeros(1, 3), [["a"]], DataError, "lists of indices; got .'a'. for row 0"),
        (torch.zeros(1, 3), [[0, 1.5]], DataError, "lists of indices; got .0, 1.5. for row 0"),
        (torch.zeros(1, 3), None, DataError, "a matrix of numbers or lists of indices; got None"),
        (torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 0.0]]), DataError, "negative or NaN"),
        (torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.complex64), DtypeError, "must be real"),
    ],
)
def test_bad_input(logits: Any, labels: Any, error: type, message: str) -> None:
    for kind in LOSSES:
        loss = kind(1) if kind is SoftTopKLoss else kind()
        with pytest.raises(error, match=message):
            loss(logits, labels)


@pytest.mark.parametrize("kind", [*LOSSES, InBatchSoftmaxLoss])
def test_warns_once_of_scores_that_are_no_cosines(kind: Callable[..., Any]) -> None:
    scores = torch.tensor([[7.5, -0.5, 0.0], [0.0, 1.0, -3.0], [0.0, 0.5, 1.0]])
    labels = [[0], [1], [2]]
    loss = kind(**WHOLE.get(kind, {}))
    message = r"temperature 0\.05 is for embeddings of length 1.* got scores from -3 to 7\.5"
    with pytest.warns(UserWarning, match=message):
        loss(scores, labels)
    loss(scores, labels)  # once
    kind(temperature=1.0, **WHOLE.get(kind, {}))(scores, labels)
    hidden = (scores / 8).index_put_((torch.tensor(0), torch.tensor(1)), torch.tensor(-math.inf))
    kind(**WHOLE.get(kind, {}))(hidden, labels)


def test_bad_options() -> None:
    for kind in (*LOSSES, InBatchSoftmaxLoss):
        with pytest.raises(ConfigError, match="temperature must be > 0"):
            kind(temperature=0.0)
    for options, message in [
        ({"normalize": "rows"}, "normalize"),
        ({"empty": "drop"}, "empty"),
        ({"reduction": "max"}, "reduction"),
        ({"sample_positives": 0}, "sample_positives"),
        ({"num_negatives": 0}, "num_negatives"),
    ]:
        with pytest.raises(ConfigError, match=message):
            DecoupledSoftmaxLoss(**options)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="must be square"):
        InBatchSoftmaxLoss()(torch.zeros(2, 3))


def test_a_loss_says_its_options() -> None:
    assert repr(CoupledSoftmaxLoss(temperature=0.1)) == (
        "CoupledSoftmaxLoss(temperature=0.1, reduction='mean')"
    )
    assert "mask_positives=False" in repr(InBatchSoftmaxLoss(mask_positives=False))
