"""Forward and backward correction and the robust losses against their formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.losses import (
    BackwardCorrectionLoss,
    ForwardCorrectionLoss,
    GeneralizedCrossEntropyLoss,
    LabelSmoothingLoss,
    SmearedLoss,
    SymmetricCrossEntropyLoss,
    SymmetricNoise,
    _classes,
)

HAND = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
UNEVEN = torch.tensor([[0.8, 0.2, 0.0], [0.1, 0.9, 0.0], [0.0, 0.3, 0.7]], dtype=torch.float64)
INF = float("inf")
KINDS = [ForwardCorrectionLoss, BackwardCorrectionLoss]


def example(rows: int = 6, classes: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (rows,), generator=generator)


def random_transition(classes: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(classes, classes, generator=generator, dtype=torch.float64)
    return 0.6 * torch.eye(classes, dtype=torch.float64) + 0.4 * noise / noise.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("alpha", "label", "forward", "backward"),
    [
        (0.1, 0, 0.232249, -0.015339),
        (0.1, 2, 2.643072, 3.317994),
        (0.3, 0, 0.370113, -0.544440),
        (0.3, 2, 2.044792, 3.741275),
    ],
)
def test_hand_values_for_symmetric_noise(
    alpha: float, label: int, forward: float, backward: float
) -> None:
    noise = SymmetricNoise.from_alpha(3, alpha)
    labels = torch.tensor([label])
    for transition in (noise, noise.matrix()):
        value = ForwardCorrectionLoss(transition)(HAND, labels)
        assert float(value) == pytest.approx(forward, abs=1e-6)
        value = BackwardCorrectionLoss(transition)(HAND, labels)
        assert float(value) == pytest.approx(backward, abs=1e-6)


def test_hand_values_for_an_uneven_matrix() -> None:
    labels = torch.arange(3)
    logits = HAND.expand(3, 3)
    forward = ForwardCorrectionLoss(UNEVEN, reduction="none")(logits, labels)
    backward = BackwardCorrectionLoss(UNEVEN, reduction="none")(logits, labels)
    assert forward.tolist() == pytest.approx([0.376214, 1.258296, 3.526521], abs=1e-6)
    assert backward.tolist() == pytest.approx([-0.401583, 2.455560, 3.475968], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_it_is_cross_entropy(kind: Any) -> None:
    logits, labels = example()
    for x in (logits, logits.float()):
        for transition in (torch.eye(5), SymmetricNoise(5, 0.0)):
            value = kind(transition, reduction="none")(x, labels)
            expected = F.cross_entropy(x, labels, reduction="none")
            torch.testing.assert_close(value, expected, atol=1e-14, rtol=1e-6)


def test_backward_correction_is_unbiased() -> None:
    for transition in (random_transition(), SymmetricNoise(5, 0.3)):
        loss = BackwardCorrectionLoss(transition, reduction="none")
        logits, _ = example(40)
        each = torch.stack([loss(logits, torch.full((40,), y)) for y in range(5)])
        matrix = transition.matrix() if isinstance(transition, SymmetricNoise) else transition
        assert (matrix @ each + logits.log_softmax(1).T).abs().max() < 1e-10


def test_gradient_of_forward_correction() -> None:
    logits, labels = example()
    matrix = random_transition()
    x = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ForwardCorrectionLoss(matrix, reduction="sum")(x, labels), x)
    p = logits.softmax(1)
    columns = matrix.T[labels]
    expected = p - p * columns / (p * columns).sum(1, keepdim=True)
    torch.testing.assert_close(grad, expected)


LOSSES = [
    ForwardCorrectionLoss(random_transition()),
    ForwardCorrectionLoss(SymmetricNoise(5, 0.3)),
    BackwardCorrectionLoss(random_transition()),
    BackwardCorrectionLoss(SymmetricNoise(5, 0.3)),
    GeneralizedCrossEntropyLoss(),
    SymmetricCrossEntropyLoss(),
]


@pytest.mark.parametrize("numbers", [1, 10_000])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: type(f).__name__)
def test_gradients_and_kinds_of_labels(
    loss: torch.nn.Module, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_classes, "_CHUNK_NUMBERS", numbers)
    logits, labels = example(4)
    one_hot = F.one_hot(labels, 5).double()
    torch.testing.assert_close(loss(logits, labels), loss(logits, one_hot))
    soft = logits.roll(1, 0).softmax(1)
    for target in (labels, soft):
        x = logits.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, t=target: loss(x, t), (x,))
        assert torch.autograd.gradgradcheck(lambda x, t=target: loss(x, t), (x,))
    spatial = loss(logits.T.reshape(1, 5, 2, 2), labels.reshape(1, 2, 2))
    torch.testing.assert_close(spatial, loss(logits, labels))


def test_soft_labels_mean_over_their_labels() -> None:
    logits, _ = example(4)
    soft = logits.roll(1, 0).softmax(1)
    for loss in LOSSES[:5]:  # the symmetric cross-entropy is not linear in the label
        loss.reduction = "none"
        each = torch.stack([loss(logits, torch.full((4,), y)) for y in range(5)], 1)
        torch.testing.assert_close(loss(logits, soft), (soft * each).sum(1))
        loss.reduction = "mean"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_finite_in_half_precision(dtype: torch.dtype) -> None:
    logits = torch.tensor([[100.0, -100, 0, 50, 1], [-100, 100, 99, 0, 2]], dtype=dtype)
    logits.requires_grad_()
    labels = torch.tensor([1, 0])
    for loss in LOSSES:
        value = loss(logits, labels)
        assert torch.isfinite(value)
        torch.testing.assert_close(value, loss(logits.detach().float(), labels))
        assert torch.isfinite(torch.autograd.grad(value, logits)[0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_closed_form_equals_the_matrix(kind: Any) -> None:
    logits, labels = example()
    masked = logits.clone()
    masked[:, 4] = -INF
    noise = SymmetricNoise(5, 0.3)
    weight = [1.0, 2.0, 0.5, 3.0, 0.0]
    for scores, target in ((logits, labels), (masked, labels % 4), (logits, logits.softmax(1))):
        for options in ({}, {"weight": weight}, {"reduction": "sum"}, {"ignore_index": 1}):
            x, y = (scores.clone().requires_grad_() for _ in range(2))
            one = kind(noise, **options)(x, target)
            two = kind(noise.matrix(), **options)(y, target)
            torch.testing.assert_close(one, two)
            one.backward()
            two.backward()
            torch.testing.assert_close(x.grad, y.grad)
            assert torch.isfinite(x.grad).all()


def test_chances_too_small_for_float32_are_summed_as_logarithms() -> None:
    logits = torch.tensor([[0.0, -100.0, -105.0]], requires_grad=True)
    apart = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]])
    value = ForwardCorrectionLoss(apart)(logits, torch.tensor([1]))
    exact = 100 + math.log(2) - math.log1p(math.exp(-5))
    assert float(value.detach()) == pytest.approx(exact, rel=1e-6)
    (grad,) = torch.autograd.grad(value, logits)
    share = 1 / (1 + math.exp(-5))
    assert grad[0].tolist() == pytest.approx([1.0, -share, share - 1], abs=1e-5)
    soft = ForwardCorrectionLoss(apart)(logits, torch.tensor([[0.0, 1.0, 0.0]]))
    assert float(soft.detach()) == pytest.approx(exact, rel=1e-6)


def test_smoothing_and_backward_correction_differ_by_a_sign() -> None:
    logits, labels = example()
    losses = -logits.log_softmax(1)
    own, even = losses[torch.arange(6), labels].mean(), losses.mean()
    noise = SymmetricNoise.from_alpha(5, 0.3)
    torch.testing.assert_close(
        LabelSmoothingLoss(0.3)(logits, labels), 0.7 * (own + 0.3 / 0.7 * even)
    )
    torch.testing.assert_close(
        BackwardCorrectionLoss(noise)(logits, labels), (own - 0.3 * even) / 0.7
    )
    inverse = torch.linalg.inv(noise.matrix())
    torch.testing.assert_close(
        BackwardCorrectionLoss(noise)(logits, labels), SmearedLoss(inverse)(logits, labels)
    )


def test_permuted_classes() -> None:
    logits, labels = example()
    order = torch.tensor([3, 0, 4, 1, 2])
    matrix = random_transition()
    for kind in KINDS:
        value = kind(matrix[order][:, order])(logits[:, order], order.argsort()[labels])
        torch.testing.assert_close(value, kind(matrix)(logits, labels))


def test_many_classes_need_no_matrix() -> None:
    noise = SymmetricNoise(300_000, 0.2)  # its matrix would take 720 GB
    logits = torch.zeros(2, 300_000, requires_grad=True)
    for kind in KINDS:
        value = kind(noise)(logits, torch.tensor([0, 299_999]))
        assert float(value.detach()) == pytest.approx(math.log(300_000), rel=1e-5)
        value.backward()


def test_backward_correction_is_unbounded_below() -> None:
    loss = BackwardCorrectionLoss(SymmetricNoise(3, 0.2))
    values = [float(loss(s * HAND, torch.tensor([0]))) for s in (1.0, 10.0, 100.0)]
    assert values[0] > values[1] > values[2]
    assert values[2] < -10


def test_robust_losses_in_numpy() -> None:
    logits, labels = example()
    p = np.exp(logits.numpy())
    p = (p / p.sum(1, keepdims=True))[np.arange(6), labels.numpy()]
    for q in (0.3, 0.7, 1.0):
        expected = ((1 - p**q) / q).mean()
        assert float(GeneralizedCrossEntropyLoss(q)(logits, labels)) == pytest.approx(expected)
    plain = float(F.cross_entropy(logits, labels))
    assert float(GeneralizedCrossEntropyLoss(1e-9)(logits, labels)) == pytest.approx(plain)
    both = SymmetricCrossEntropyLoss(0.5, 2.0)(logits, labels)
    assert float(both) == pytest.approx(0.5 * plain + 2.0 * 4 * (1 - p).mean())
    assert float(SymmetricCrossEntropyLoss(1.0, 0.0)(logits, labels)) == pytest.approx(plain)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BackwardCorrectionLoss(SymmetricNoise(4, 0.75)), ConfigError, "condition number"),
        (lambda: BackwardCorrectionLoss(torch.full((2, 2), 0.5)), ConfigError, r"got .*inf|got 9e"),
        (lambda: ForwardCorrectionLoss(torch.ones(2, 3) / 3), ShapeError, "square"),
        (lambda: ForwardCorrectionLoss([[0.9, 0.2], [0.1, 0.9]]), DataError, "sum to 1"),
        (lambda: BackwardCorrectionLoss([[1.2, -0.2], [0.0, 1.0]]), DataError, "negative"),
        (lambda: ForwardCorrectionLoss("estimate"), ConfigError, "estimate_transition"),
        (lambda: ForwardCorrectionLoss(UNEVEN)(*example()), ShapeError, "the 3 classes"),
        (lambda: LOSSES[1](torch.zeros(1, 4), [0]), ShapeError, "the 5 classes"),
        (lambda: ForwardCorrectionLoss(torch.eye(9), max_classes=8), ConfigError, "SymmetricNoise"),
        (lambda: ForwardCorrectionLoss(UNEVEN, weight=[1.0]), ShapeError, "each of 3 classes"),
        (lambda: GeneralizedCrossEntropyLoss(0.0), ConfigError, "q must be > 0"),
        (lambda: GeneralizedCrossEntropyLoss(1.5), ConfigError, "q must be"),
        (lambda: SymmetricCrossEntropyLoss(-1.0), ConfigError, "alpha must be >= 0"),
        (lambda: SymmetricCrossEntropyLoss(beta=-1.0), ConfigError, "beta must be >= 0"),
    ],
)  # fmt: skip
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
