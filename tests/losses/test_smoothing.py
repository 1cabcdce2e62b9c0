"""Label smearing against the framework's loss, hand values and formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.losses import LabelSmoothingLoss, SmearedLoss, SymmetricNoise, _classes

HAND = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
INF = float("inf")


def example(rows: int = 6, classes: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (rows,), generator=generator)


def soft(rows: int = 6, classes: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(rows, classes, generator=generator, dtype=torch.float64).softmax(1)


@pytest.mark.parametrize(
    ("alpha", "label", "expected"),
    [(0.1, 0, 0.336513), (0.1, 2, 3.036513), (0.3, 0, 0.669846), (0.3, 2, 2.769846)],
)
def test_hand_values(alpha: float, label: int, expected: float) -> None:
    labels = torch.tensor([label])
    noise = SymmetricNoise.from_alpha(3, alpha)
    for loss in (LabelSmoothingLoss(alpha), SmearedLoss(noise), SmearedLoss(noise.matrix())):
        assert float(loss(HAND, labels)) == pytest.approx(expected, abs=1e-6)


def test_the_regulariser_of_the_paper_is_the_even_part() -> None:
    omega = 3 * LabelSmoothingLoss(1.0)(HAND, torch.tensor([1]))
    assert float(omega) == pytest.approx(5.509538, abs=1e-6)
    assert float(omega) == pytest.approx(float(3 * HAND.logsumexp(1) - HAND.sum()))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 1.0])
def test_equal_to_the_framework(alpha: float, weighted: bool, reduction: str) -> None:
    weight = torch.tensor([1.0, 10.0, 1.0, 0.0, 0.5], dtype=torch.float64) if weighted else None
    ours = LabelSmoothingLoss(alpha, weight=weight, weight_mode="class", reduction=reduction)
    matrix = SmearedLoss(
        SymmetricNoise.from_alpha(5, alpha).matrix(),
        weight=weight,
        weight_mode="class",
        reduction=reduction,
    )
    theirs = torch.nn.CrossEntropyLoss(weight, label_smoothing=alpha, reduction=reduction)
    logits, labels = example()
    labels[2] = -100
    images = torch.randn(2, 5, 3, 2, dtype=torch.float64)
    cases = [
        (logits, labels),
        (logits, soft()),
        (images, torch.randint(5, (2, 3, 2))),
        (images, images.detach().softmax(1)),
        (logits[:1].T.reshape(1, 5), labels[:1]),
    ]
    for scores, target in cases:
        for loss in (ours, matrix):
            x, y = (scores.clone().requires_grad_() for _ in range(2))
            a, b = loss(x, target), theirs(y, target)
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
            a.sum().backward()
            b.sum().backward()
            torch.testing.assert_close(x.grad, y.grad, atol=1e-12, rtol=1e-12)


def test_equal_to_the_framework_in_float32() -> None:
    logits, labels = example(50, 30)
    for alpha in (0.0, 0.1, 0.3, 1.0):
        ours = LabelSmoothingLoss(alpha)(logits.float(), labels)
        theirs = F.cross_entropy(logits.float(), labels, label_smoothing=alpha)
        assert float(ours) == pytest.approx(float(theirs), abs=1e-6)


def test_weights_of_rows() -> None:
    logits, labels = example()
    labels[1] = -100
    weight = [1.0, 10.0, 1.0, 0.0, 0.5]
    rows = LabelSmoothingLoss(0.2, reduction="none")(logits, labels)
    w = torch.tensor([weight[i] if i >= 0 else 0.0 for i in labels.tolist()], dtype=torch.float64)
    for reduction, expected in (
        ("none", w * rows), ("sum", (w * rows).sum()), ("mean", (w * rows).sum() / w.sum()),
    ):  # fmt: skip
        loss = LabelSmoothingLoss(0.2, weight=weight, reduction=reduction)
        torch.testing.assert_close(loss(logits, labels), expected)
    one_hot = F.one_hot(labels.clamp(min=0), 5).double()[labels >= 0]
    hard = LabelSmoothingLoss(0.2, weight=weight)(logits, labels)
    as_soft = LabelSmoothingLoss(0.2, weight=weight)(logits[labels >= 0], one_hot)
    torch.testing.assert_close(hard, as_soft)
    nothing = LabelSmoothingLoss(weight=[0.0] * 5)(logits, labels)
    assert float(nothing) == 0


@pytest.mark.parametrize("numbers", [1, 12, 10_000])
def test_chunks_change_nothing(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_classes, "_CHUNK_NUMBERS", numbers)
    logits, labels = example()
    labels[3] = -100
    for target in (labels, soft()):
        x, y = (logits.clone().requires_grad_() for _ in range(2))
        loss = LabelSmoothingLoss(0.3)
        value = loss(x, target)
        log_p = y.log_softmax(1)
        own = (
            log_p[torch.arange(6), target.clamp(min=0)]
            if target.dim() == 1
            else (target * log_p).sum(1)
        )
        rows = -0.7 * own - 0.3 * log_p.mean(1)
        naive = rows[target != -100].mean() if target.dim() == 1 else rows.mean()
        torch.testing.assert_close(value, naive)
        value.backward(retain_graph=True)
        first = x.grad.clone()
        naive.backward()
        torch.testing.assert_close(first, y.grad)
        value.backward()  # the kept graph gives the same again
        torch.testing.assert_close(x.grad, 2 * first)
        with torch.no_grad():
            assert float(loss(x, target)) == pytest.approx(float(naive))


@pytest.mark.parametrize("numbers", [1, 10_000])
def test_gradients_of_both_orders(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_classes, "_CHUNK_NUMBERS", numbers)
    logits, labels = example(3, 4)
    labels[1] = -100
    matrix = torch.randn(4, 4, dtype=torch.float64)
    for loss in (LabelSmoothingLoss(0.3), SmearedLoss(matrix)):
        for target in (labels, soft(3, 4)):
            x = logits.clone().requires_grad_()
            assert torch.autograd.gradcheck(lambda x, t=target, f=loss: f(x, t), (x,))
            assert torch.autograd.gradgradcheck(lambda x, t=target, f=loss: f(x, t), (x,))
    target = soft(3, 4).requires_grad_()
    x = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(LabelSmoothingLoss(0.3, reduction="sum")(x, target), target)
    torch.testing.assert_close(grad, -0.7 * logits.log_softmax(1))  # soft labels may be learned


@pytest.mark.parametrize("numbers", [1, 10_000])
def test_ignored_rows_count_nowhere(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_classes, "_CHUNK_NUMBERS", numbers)
    logits, labels = example()
    kept = torch.tensor([0, 2, 3, 5])
    dirty = logits.clone()
    dirty[1], dirty[4] = float("nan"), -INF
    labels[1] = labels[4] = -1
    for loss in (
        LabelSmoothingLoss(0.1, ignore_index=-1),
        SmearedLoss(torch.eye(5), ignore_index=-1),
    ):
        x = dirty.clone().requires_grad_()
        value = loss(x, labels)
        torch.testing.assert_close(value, loss(logits[kept], labels[kept]))
        value.backward()
        assert (x.grad[[1, 4]] == 0).all()
        assert torch.isfinite(x.grad).all()
        nothing = loss(x, torch.full((6,), -1))
        nothing.backward()
        assert float(nothing.detach()) == 0
        assert float(loss(logits[:0], labels[:0])) == 0


def test_masked_classes_take_no_part() -> None:
    logits, labels = example()
    labels = labels % 3
    masked = logits.clone()
    masked[:, 3:] = -INF
    for alpha in (0.1, 1.0):
        expected = LabelSmoothingLoss(alpha)(logits[:, :3], labels)
        noise = SymmetricNoise.from_alpha(5, alpha)
        for loss in (LabelSmoothingLoss(alpha), SmearedLoss(noise), SmearedLoss(noise.matrix())):
            for target in (labels, F.one_hot(labels, 5).double()):
                x = masked.clone().requires_grad_()
                value = loss(x, target)
                torch.testing.assert_close(value, expected)
                value.backward()
                assert torch.isfinite(x.grad).all()
                assert (x.grad[:, 3:] == 0).all()
    weighted = LabelSmoothingLoss(0.1, weight=[1.0, 2.0, 3.0, 4.0, 0.0], weight_mode="class")
    few = LabelSmoothingLoss(0.1, weight=[1.0, 2.0, 3.0], weight_mode="class")
    torch.testing.assert_close(weighted(masked, labels), few(logits[:, :3], labels))
    assert float(LabelSmoothingLoss(0.1)(masked, labels + 2).max()) == INF  # a masked label


@pytest.mark.parametrize("numbers", [1, 10_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(
    dtype: torch.dtype, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_classes, "_CHUNK_NUMBERS", numbers)
    logits = torch.tensor([[100.0, -100.0, 0.0], [-100.0, 100.0, 99.0]], dtype=dtype)
    logits.requires_grad_()
    labels = torch.tensor([1, 0])
    matrix = SmearedLoss(SymmetricNoise(3, 0.2).matrix()).to(dtype)
    for loss in (LabelSmoothingLoss(0.3), matrix):
        value = loss(logits, labels)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, loss(logits.detach().float(), labels))
        (grad,) = torch.autograd.grad(value, logits)
        assert grad.dtype == dtype
        mixed = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]], dtype=dtype)
        assert torch.isfinite(loss(logits, mixed))
        assert torch.isfinite(grad).all()


def test_training_after_evaluation_and_under_autocast() -> None:
    logits, labels = (t.float() if t.is_floating_point() else t for t in example())
    weight = [1.0, 2.2, 0.7, 3.3, 0.1]
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    for target in (labels, soft().float()):
        for kind in (LabelSmoothingLoss, lambda **k: SmearedLoss(matrix, **k)):
            loss = kind(weight=weight, weight_mode="class")
            with torch.inference_mode():
                expected = loss(logits, target).clone()
            x = logits.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(x, target)
            value.backward()
            torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-6)


def test_least_squares_on_smoothed_labels_is_a_pure_shrinkage() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 6))
    x -= x.mean(0)
    one_hot = np.eye(4)[generator.integers(0, 4, 40)]
    smoothed = one_hot @ SymmetricNoise.from_alpha(4, 0.3).matrix().numpy()
    plain, shrunk = (np.linalg.lstsq(x, t, rcond=None)[0] for t in (one_hot, smoothed))
    np.testing.assert_allclose(shrunk, 0.7 * plain, atol=1e-12)


def test_permuted_classes() -> None:
    logits, labels = example()
    order = torch.tensor([3, 0, 4, 1, 2])
    matrix = torch.randn(5, 5, dtype=torch.float64)
    place = order.argsort()
    value = SmearedLoss(matrix[order][:, order])(logits[:, order], place[labels])
    torch.testing.assert_close(value, SmearedLoss(matrix)(logits, labels))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, y: LabelSmoothingLoss(-0.1), ConfigError, r"alpha must be >= 0 and <= 1"),
        (lambda x, y: LabelSmoothingLoss(1.1), ConfigError, r"alpha must be >= 0 and <= 1"),
        (lambda x, y: LabelSmoothingLoss(weight_mode="row"), ConfigError, "weight_mode"),
        (lambda x, y: LabelSmoothingLoss(reduction="avg"), ConfigError, "reduction"),
        (lambda x, y: LabelSmoothingLoss(weight=[-1.0, 1.0]), ConfigError, "weight must be finite"),
        (lambda x, y: LabelSmoothingLoss(weight=torch.eye(2)), ShapeError, r"must be \(C,\)"),
        (lambda x, y: LabelSmoothingLoss(weight=[1.0])(x, y), ShapeError, "each of the 1 classes"),
        (lambda x, y: SmearedLoss(torch.ones(2, 3)), ShapeError, "matrix must be square"),
        (lambda x, y: SmearedLoss(torch.full((2, 2), INF)), DataError, "matrix must be finite"),
        (lambda x, y: SmearedLoss(torch.eye(4))(x, y), ShapeError, r"the 4 classes.*\(6, 5\)"),
        (lambda x, y: SmearedLoss(torch.eye(3), weight=[1.0]), ShapeError, "each of 3 classes"),
        (lambda x, y: SmearedLoss(torch.eye(9), max_classes=8), ConfigError, "max_classes=9"),
        (lambda x, y: LabelSmoothingLoss()(x[0], y), ShapeError, r"\(N, C\)"),
        (lambda x, y: LabelSmoothingLoss()(x.long(), y), DtypeError, "floating"),
        (lambda x, y: LabelSmoothingLoss()(x, y[:, None]), ShapeError, r"\(6,\); got \(6, 1\)"),
        (lambda x, y: LabelSmoothingLoss()(x, x.long()), ShapeError, r"Use .float\(\)"),
        (lambda x, y: LabelSmoothingLoss()(x, y > 1), DtypeError, "torch.bool"),
        (lambda x, y: LabelSmoothingLoss()(x, y + 5), DataError, "0 to 4, or be ignore_index"),
        (lambda x, y: LabelSmoothingLoss()(x, y.float()), ShapeError, "soft labels"),
        (lambda x, y: LabelSmoothingLoss()(x, 2 * soft()), DataError, "a sum of 2 in row"),
        (lambda x, y: LabelSmoothingLoss()(x, soft() * math.nan), DataError, "sum of nan"),
        (lambda x, y: LabelSmoothingLoss()(x * math.nan, y), DataError, "no NaN"),
        (lambda x, y: LabelSmoothingLoss()(x - INF, y), DataError, "-inf alone in a row"),
    ],
)  # fmt: skip
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(*example())
