"""The distillation loss against hand values, the framework's divergence, and its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.losses import DistillationLoss, TopKLogits, _classes
from gossamer.optim import switch_at

S = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
T = torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64)
INF = float("inf")


def example(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (6, 5)
    s, t = (2 * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return s, t, torch.randint(shape[-1], shape[:-1], generator=generator)


def reference(
    s: torch.Tensor, t: torch.Tensor, y: torch.Tensor, tau: float, alpha: float
) -> torch.Tensor:
    """Return the loss of each row by the framework's KL form."""
    kl = F.kl_div(
        (s / tau).log_softmax(-1), (t / tau).log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    own = -s.log_softmax(-1).gather(-1, y[..., None])[..., 0]
    return (1 - alpha) * own + alpha * tau**2 * kl


# --- values ---


@pytest.mark.parametrize(
    ("tau", "kl", "scaled"),
    [(1.0, 0.061554, 0.061554), (2.0, 0.022854, 0.091417), (4.0, 0.006444, 0.103107)],
)
def test_hand_values(tau: float, kl: float, scaled: float) -> None:
    value = float(DistillationLoss(temperature=tau, alpha=1.0)(S, T))
    assert value == pytest.approx(scaled, abs=1e-6)
    assert value / tau**2 == pytest.approx(kl, abs=1e-6)


def test_the_limit_is_the_distance_of_centred_logits() -> None:
    value = float(DistillationLoss(temperature=1000.0, alpha=1.0)(S, T))
    assert value == pytest.approx(0.111086, abs=1e-6)
    gap = (S - S.mean()) - (T - T.mean())
    assert float(gap.square().sum() / 6) == pytest.approx(0.111111, abs=1e-6)
    s, t, _ = example()
    centred = (s - t) - (s - t).mean(1, keepdim=True)
    value = DistillationLoss(temperature=1e4, alpha=1.0)(s, t)
    torch.testing.assert_close(value, centred.square().sum(1).mean() / 10, rtol=1e-3, atol=0)


@pytest.mark.parametrize("numbers", [1, 7, 10_000])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_equal_to_the_framework(
    alpha: float, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_classes, "_CHUNK_NUMBERS", numbers)
    for shape in ((6, 5), (3, 4, 7), (1, 2), (1, 1, 2)):
        s, t, y = example(*shape)
        for tau in (0.5, 1.0, 4.0):
            for reduction in ("batchmean", "sum", "none"):
                a, b = (s.clone().requires_grad_() for _ in range(2))
                value = DistillationLoss(temperature=tau, alpha=alpha, reduction=reduction)(a, t, y)
                rows = reference(b, t, y, tau, alpha)
                expected = {"batchmean": rows.mean(), "sum": rows.sum(), "none": rows}[reduction]
                torch.testing.assert_close(value, expected, atol=1e-12, rtol=1e-10)
                value.square().sum().backward()
                expected.square().sum().backward()
                torch.testing.assert_close(a.grad, b.grad, atol=1e-11, rtol=1e-9)


def test_the_mean_does_not_divide_by_the_classes() -> None:
    s, t, _ = example(4, 50)
    trap = (t.softmax(1) * (t.log_softmax(1) - s.log_softmax(1))).mean()
    ours = DistillationLoss(temperature=1.0, alpha=1.0)(s, t)
    torch.testing.assert_close(ours, 50 * trap)


# --- invariances ---


def test_constants_on_rows_change_nothing_and_agreement_gives_zero() -> None:
    s, t, _ = example()
    loss = DistillationLoss(alpha=1.0)
    shift = torch.linspace(-30, 30, 6, dtype=torch.float64)[:, None]
    torch.testing.assert_close(loss(s + shift, t), loss(s, t))
    torch.testing.assert_close(loss(s, t + shift), loss(s, t))
    x = (t + shift).requires_grad_()
    value = loss(x, t)
    value.backward()
    assert abs(float(value.detach())) < 1e-12
    assert float(x.grad.abs().max()) < 1e-14
    assert float(loss(t, t)) == 0


def test_gradient_is_the_gap_of_the_probabilities() -> None:
    s, t, _ = example()
    x = s.clone().requires_grad_()
    DistillationLoss(temperature=4.0, alpha=1.0, reduction="sum")(x, t).backward()
    torch.testing.assert_close(x.grad, 4 * ((s / 4).softmax(1) - (t / 4).softmax(1)))


def test_masked_tokens_equal_packed_tokens() -> None:
    s, t, y = example(3, 4, 7)
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) > 0.4
    dirty = s.clone()
    dirty[~mask] = float("nan")
    labels = torch.where(mask, y, -100)
    for teacher in (t, TopKLogits.of(t, 2)):
        packed = teacher[mask]
        for alpha in (0.0, 0.9, 1.0):
            for reduction in ("batchmean", "sum"):
                loss = DistillationLoss(alpha=alpha, reduction=reduction)
                a, b = dirty.clone().requires_grad_(), s.clone().requires_grad_()
                one, two = loss(a, teacher, labels, mask), loss(b[mask], packed, y[mask])
                torch.testing.assert_close(one, two)
                one.backward()
                two.backward()
                torch.testing.assert_close(a.grad, b.grad)
            rows = DistillationLoss(alpha=alpha, reduction="none")(dirty, teacher, labels, mask)
            assert (rows[~mask] == 0).all()
            torch.testing.assert_close(rows.sum(), two.detach())


def test_accumulated_gradients_equal_one_big_batch() -> None:
    s, t, y = example(6, 4, 7)
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)) > 0.3
    whole = s.clone().requires_grad_()
    DistillationLoss()(whole, t, y).backward()
    parts = s.clone().requires_grad_()
    for rows in torch.arange(6).chunk(3):
        (DistillationLoss()(parts[rows], t[rows], y[rows]) / 3).backward()
    torch.testing.assert_close(parts.grad, whole.grad)
    masked, uneven = (s.clone().requires_grad_() for _ in range(2))
    DistillationLoss()(masked, t, y, mask).backward()
    total = DistillationLoss(reduction="sum")
    for rows in torch.arange(6).chunk(3):  # with unequal counts: sums over the whole count
        (total(uneven[rows], t[rows], y[rows], mask[rows]) / mask.sum()).backward()
    torch.testing.assert_close(uneven.grad, masked.grad)


def test_half_precision_and_autocast() -> None:
    s, t, y = example(5, 9)
    expected = float(DistillationLoss()(s.bfloat16().float(), t.half().float(), y))
    x = s.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = DistillationLoss()(x, t.half(), y)
    assert value.dtype == torch.float32
    assert float(value.detach()) == pytest.approx(expected, rel=1e-6)
    value.backward()
    assert x.grad.dtype == torch.bfloat16
    far = torch.tensor([[500.0, -500.0, 0.0], [-500.0, 500.0, 499.0]])
    near = DistillationLoss(temperature=1.0, alpha=1.0)(far, far.flip(1))
    assert torch.isfinite(near)


def test_classes_that_are_masked_out_take_no_part() -> None:
    s, t, y = example()
    out = torch.tensor([False, False, False, True, True])
    loss = DistillationLoss()
    x = s.masked_fill(out, -INF).requires_grad_()
    value = loss(x, t.masked_fill(out, -INF), y % 3)
    torch.testing.assert_close(value, loss(s[:, :3], t[:, :3], y % 3))
    value.backward()
    assert torch.isfinite(x.grad).all()


def test_a_student_that_allows_the_top_classes_alone() -> None:
    s, t, y = example()
    out = torch.tensor([False, False, True, True, True])
    x = s.masked_fill(out, -INF).requires_grad_()
    top = TopKLogits.of(t.masked_fill(out, -INF), 2, temperature=4.0)
    value = DistillationLoss()(x, top, y % 2)
    torch.testing.assert_close(value, DistillationLoss()(s[:, :2], t[:, :2], y % 2))
    value.backward()
    z = s[:, :2].clone().requires_grad_()
    DistillationLoss()(z, t[:, :2], y % 2).backward()
    torch.testing.assert_close(x.grad[:, :2], z.grad)
    assert (x.grad[:, 2:] == 0).all()


def test_alpha_as_a_function_of_the_step() -> None:
    s, t, y = example()
    loss = DistillationLoss(alpha=switch_at(10, 1.0, 0.0))
    torch.testing.assert_close(loss(s, t, y, step=9), DistillationLoss(alpha=1.0)(s, t))
    torch.testing.assert_close(loss(s, t, y, step=10), F.cross_entropy(s, y))
    with pytest.raises(ConfigError, match="needs the step"):
        loss(s, t, y)
    with pytest.raises(ConfigError, match=r"alpha at step 3 must be >= 0 and <= 1; got 2"):
        DistillationLoss(alpha=lambda step: 2.0)(s, t, y, step=3)
    assert "a function of the step" in repr(loss)


# --- the top k of a teacher ---


def coarse(logits: np.ndarray, kept: np.ndarray, tau: float) -> np.ndarray:
    p = np.exp(logits / tau - np.max(logits / tau))
    p /= p.sum()
    rest = np.delete(p, kept).sum()
    return np.append(p[kept], rest)


@pytest.mark.parametrize("tau", [1.0, 4.0])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_top_k_is_exact_for_coarsened_distributions(k: int, tau: float) -> None:
    s, t, _ = example(4, 7)
    top = TopKLogits.of(t, k, temperature=tau)
    rows = DistillationLoss(temperature=tau, alpha=1.0, reduction="none")(s, top)
    for row in range(4):
        kept = np.argsort(-t[row].numpy())[:k]
        q, p = (coarse(x[row].numpy(), kept, tau) for x in (t, s))
        assert float(rows[row]) == pytest.approx(tau**2 * float((q * np.log(q / p)).sum()))
    full = DistillationLoss(temperature=tau, alpha=1.0, reduction="none")(s, t)
    assert (rows <= full + 1e-12).all()  # coarsening never adds


def test_all_classes_as_top_k_are_the_full_loss() -> None:
    s, t, y = example(2, 4, 7)
    top = TopKLogits.of(t, 7, temperature=1.0)  # no rest, hence any temperature
    torch.testing.assert_close(DistillationLoss()(s, top, y), DistillationLoss()(s, t, y))


def test_a_rest_without_weight() -> None:
    t = torch.tensor([[900.0, 0.0, 0.0]])
    loss = DistillationLoss(temperature=1.0, alpha=1.0)
    x = torch.zeros(1, 3, requires_grad=True)
    value = loss(x, TopKLogits.of(t, 1, temperature=1.0))
    value.backward()
    assert float(value.detach()) == pytest.approx(np.log(3))
    torch.testing.assert_close(x.grad, torch.tensor([[-2 / 3, 1 / 3, 1 / 3]]))
    only = TopKLogits(t[:, :1], torch.zeros(1, 1, dtype=torch.long), torch.tensor([-INF]), 1.0)
    torch.testing.assert_close(loss(x, only), value)


# --- gradients ---


@pytest.mark.parametrize("numbers", [1, 10_000])
def test_gradients_of_both_orders(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_classes, "_CHUNK_NUMBERS", numbers)
    s, t, y = example(3, 4)
    mask = torch.tensor([True, False, True])
    for teacher in (t, TopKLogits.of(t, 2, temperature=2.0)):
        loss = DistillationLoss(temperature=2.0, alpha=0.7)
        x = s.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, t=teacher, f=loss: f(x, t, y, mask), (x,))
        assert torch.autograd.gradgradcheck(lambda x, t=teacher, f=loss: f(x, t, y, mask), (x,))


def test_second_derivatives_with_a_teacher_in_half_precision() -> None:
    s, t, _ = example()
    x, half = s.float().requires_grad_(), t.half()
    found = []
    for teacher in (half, half.float()):
        (slope,) = torch.autograd.grad(
            DistillationLoss(alpha=1.0)(x, teacher), x, create_graph=True
        )
        found.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(found[0], found[1])


# --- bad input ---


def test_warnings_about_the_teacher() -> None:
    s, t, y = example()
    x = s.clone().requires_grad_()
    with pytest.warns(UserWarning, match="do not get here"):
        value = DistillationLoss()(x, t.clone().requires_grad_(), y)
    torch.testing.assert_close(value, DistillationLoss()(s, t, y))
    with pytest.warns(UserWarning, match="teacher_logits look like probabilities") as seen:
        DistillationLoss()(s, t.softmax(1), y)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="^logits look like probabilities"):
        DistillationLoss()(s.softmax(1), t, y)
    DistillationLoss()(s.log_softmax(1), t.log_softmax(1), y)  # logits too


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, t, y: DistillationLoss(temperature=0.0), ConfigError, "temperature must be > 0"),
        (lambda s, t, y: DistillationLoss(temperature=-1), ConfigError, "temperature must be > 0"),
        (lambda s, t, y: DistillationLoss(alpha=1.1), ConfigError, "alpha must be >= 0 and <= 1"),
        (lambda s, t, y: DistillationLoss(alpha=-0.1), ConfigError, "alpha must be >= 0 and <= 1"),
        (lambda s, t, y: DistillationLoss(reduction="mean"), ConfigError, "'batchmean'"),
        (lambda s, t, y: DistillationLoss()(s, t), ConfigError, "needs labels"),
        (lambda s, t, y: DistillationLoss()(s, t[:, :4], y), ShapeError, "same classes"),
        (lambda s, t, y: DistillationLoss()(s, t[:4], y), ShapeError, "never broadcast"),
        (lambda s, t, y: DistillationLoss()(s, t.long(), y), DtypeError, "teacher_logits must be"),
        (lambda s, t, y: DistillationLoss()(s.long(), t, y), DtypeError, "^logits must be"),
        (lambda s, t, y: DistillationLoss()(s[0], t[0], y), ShapeError, r"\(N, C\) or \(N, T, C\)"),
        (lambda s, t, y: DistillationLoss()(s[:, :1], t[:, :1], y), ShapeError, "2 classes"),
        (lambda s, t, y: DistillationLoss()(s, t, y[:3]), ShapeError, "labels must have the shape"),
        (lambda s, t, y: DistillationLoss()(s, t, y.float()), DtypeError, "labels must be classes"),
        (lambda s, t, y: DistillationLoss()(s, t, y + 5), DataError, "0 to 4 where the mask"),
        (lambda s, t, y: DistillationLoss()(s, t, y - 100), DataError, "mask=labels != -100"),
        (lambda s, t, y: DistillationLoss()(s, t, y, y > 9), DataError, "at least one row"),
        (lambda s, t, y: DistillationLoss()(s[:0], t[:0], y[:0]), DataError, "at least one row"),
        (lambda s, t, y: DistillationLoss()(s, t, y, y), DtypeError, "mask must be boolean"),
        (lambda s, t, y: DistillationLoss()(s, t, y, y[:3] > 0), ShapeError, "mask must have one"),
        (lambda s, t, y: DistillationLoss()(s * np.nan, t, y), DataError, "^logits must hold no"),
        (lambda s, t, y: DistillationLoss()(s, t * np.nan, y), DataError, "^teacher_logits must"),
        (lambda s, t, y: DistillationLoss()(s, t - INF, y), DataError, "^teacher_logits must"),
        (lambda s, t, y: DistillationLoss()(s, TopKLogits.of(t, 2)[:3], y), ShapeError, "the rows"),
        (lambda s, t, y: DistillationLoss()(s[:, :3], TopKLogits.of(t, 4), y), ShapeError, "to 2"),
        (lambda s, t, y: DistillationLoss(temperature=2.0)(s, TopKLogits.of(t, 2), y), ConfigError,
         "kept for temperature 4"),
        (lambda s, t, y: TopKLogits.of(t, 6), ConfigError, "k must be >= 1 and <= 5"),
        (lambda s, t, y: TopKLogits(t, t, t[:, 0]), DtypeError, "indices integers"),
        (lambda s, t, y: TopKLogits(t, t.long(), t), ShapeError, "rest that without"),
        (lambda s, t, y: TopKLogits(t, t.long(), t[:, 0], 0.0), ConfigError, "temperature"),
        (lambda s, t, y: switch_at(-1, 1.0, 0.0), ConfigError, "step must be >= 0"),
        (lambda s, t, y: switch_at(1, np.nan, 0.0), ConfigError, "before must be"),
    ],
)  # fmt: skip
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(*example())
