"""The optimiser without state: closed forms, equivalences, equilibrium, and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import ConfigError, UnsupportedError
from gossamer.optim import ScaleInvariantSGD, clip_grad_relative_, step_decay


def parameter(values: list[float], grad: list[float] | None = None) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values, dtype=torch.float64))
    made.grad = None if grad is None else torch.tensor(grad, dtype=torch.float64)
    return made


def invariant_loss(tensors: list[Tensor]) -> Tensor:
    """A loss that does not change when all tensors are multiplied by one number."""
    x = torch.cat([t.flatten() for t in tensors])
    unit = x / x.norm()
    place = torch.linspace(-1, 1, len(x), dtype=x.dtype)
    return ((unit - place).square() * (2 + place)).sum() + (3 * unit).sin().prod()


def path(
    lr: float, decay: float, *, scale: float = 1.0, loss: float = 1.0, clip: float = 1.1
) -> tuple[list[Tensor], ScaleInvariantSGD]:
    torch.manual_seed(0)
    start = [torch.randn(3, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
    tensors = [nn.Parameter(scale * x) for x in start]
    optimizer = ScaleInvariantSGD(tensors, lr, weight_decay=decay, clip=clip)
    for _ in range(50):
        optimizer.zero_grad()
        (loss * invariant_loss(list(tensors))).backward()
        optimizer.step()
    return [x.detach() for x in tensors], optimizer


# --- closed forms ---


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(("size", "clipped"), [(10.0, 0), (40.0, 1)])
def test_one_step_in_closed_form(foreach: bool | None, size: float, clipped: int) -> None:
    # the threshold is 2 sqrt(2 * 0.05 / 0.1) * 5 = 10
    x = parameter([3.0, 4.0], [0.0, size])
    optimizer = ScaleInvariantSGD([x], 0.1, weight_decay=0.05, foreach=foreach)
    optimizer.step()
    expected = torch.tensor([2.985, 2.98], dtype=torch.float64)
    torch.testing.assert_close(x.detach(), expected, rtol=1e-12, atol=0.0)
    assert optimizer.num_clipped == clipped
    assert optimizer.relative_norm == pytest.approx(size / 5)


def test_norms_are_over_all_parameters_and_groups() -> None:
    x, y = parameter([3.0], [0.0]), parameter([4.0], [40.0])
    groups = [{"params": [x]}, {"params": [y], "lr": 0.2}]
    ScaleInvariantSGD(groups, 0.1, weight_decay=0.05).step()
    # for y the threshold is 2 sqrt(2 * 0.05 / 0.2) * 5
    factor = 2 * math.sqrt(0.5) * 5 / 40
    assert float(x.detach()) == pytest.approx(0.995 * 3)
    assert float(y.detach()) == pytest.approx(0.99 * 4 - 0.2 * 40 * factor)


def test_without_clipping_it_is_sgd_with_weight_decay() -> None:
    ours, _ = path(0.3, 0.1, clip=math.inf)
    torch.manual_seed(0)
    start = [torch.randn(3, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
    theirs = [nn.Parameter(x) for x in start]
    optimizer = torch.optim.SGD(theirs, 0.3, weight_decay=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        invariant_loss(list(theirs)).backward()
        optimizer.step()
    torch.testing.assert_close(ours, [x.detach() for x in theirs], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [0.01, 9.0, 1e6])
def test_all_routes_take_the_same_step(size: float) -> None:
    made = []
    for foreach in (None, True, False):
        torch.manual_seed(0)
        tensors = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3, 7).T)]
        optimizer = ScaleInvariantSGD(tensors, 0.5, weight_decay=0.05, foreach=foreach)
        for x in tensors:
            x.grad = size * torch.randn_like(x)
        optimizer.step()
        assert optimizer.num_clipped == (size > 1)
        made.append([x.detach() for x in tensors])
    torch.testing.assert_close(made[0], made[2])
    torch.testing.assert_close(made[1], made[2])


# --- theory ---


def test_a_scaled_loss_is_a_scaled_rate() -> None:
    base, optimizer = path(0.3, 0.02)
    other, _ = path(0.3 / 7, 0.02 * 7, loss=7.0)
    assert 0 < optimizer.num_clipped < 50
    torch.testing.assert_close(base, other, rtol=1e-8, atol=0.0)


def test_a_scaled_start_is_a_scaled_rate_and_decay() -> None:
    base, _ = path(0.3, 0.02)
    other, _ = path(0.3 * 100, 0.02 / 100, scale=10.0)
    torch.testing.assert_close([10 * x for x in base], other, rtol=1e-8, atol=0.0)


def test_the_norm_finds_its_equilibrium() -> None:
    lr, decay, sigma = 0.1, 0.2, 3.0
    x = nn.Parameter(50 * F.normalize(torch.randn(40, dtype=torch.float64), dim=0))
    optimizer = ScaleInvariantSGD([x], lr, weight_decay=decay, clip=math.inf)
    generator = torch.Generator().manual_seed(0)
    norms = []
    for _ in range(int(20 / (lr * decay))):
        unit = F.normalize(x.detach(), dim=0)
        drawn = torch.randn(40, dtype=torch.float64, generator=generator)
        tangent = F.normalize(drawn - (drawn @ unit) * unit, dim=0)
        x.grad = sigma * tangent / x.detach().norm()  # the gradient of a loss of degree 0
        optimizer.step()
        norms.append(float(x.detach().norm()))
    assert norms[-1] ** 4 == pytest.approx(lr * sigma**2 / (decay * (2 - lr * decay)), rel=0.01)
    assert optimizer.relative_norm == pytest.approx(math.sqrt(2 * decay / lr), rel=0.02)


# --- an optimiser like any other ---


def test_it_keeps_no_state_and_its_settings_are_restored() -> None:
    x = parameter([1.0, 2.0], [0.1, 0.1])
    optimizer = ScaleInvariantSGD([x], 0.1, weight_decay=0.05)
    optimizer.step()
    assert not optimizer.state
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    other = ScaleInvariantSGD([x], 0.3, weight_decay=0.01, clip=3.0)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.1
    assert other.param_groups[0]["clip"] == 2.0


def test_schedules_and_closures() -> None:
    x = parameter([3.0, 4.0])
    optimizer = ScaleInvariantSGD([x], 0.1, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = invariant_loss([x])
        loss.backward()
        return loss

    before = float(invariant_loss([x]).detach())
    assert float(optimizer.step(closure).detach()) == before
    schedule.step()
    kept = x.detach().clone()
    optimizer.step(closure)  # the schedule has brought the rate to 0
    assert torch.equal(x.detach(), kept)


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    x = parameter([3.0, 4.0], [0.0, math.nan])
    optimizer = ScaleInvariantSGD([x], 0.1, weight_decay=0.05)
    optimizer.step()
    assert x.tolist() == [3.0, 4.0]
    assert (optimizer.num_skipped, optimizer.num_steps) == (1, 0)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("scale", "size"), [(1e25, 1e25), (1e-25, 1e-25), (1e10, 1e-10)])
def test_norms_beyond_the_squares_of_float32(foreach: bool, scale: float, size: float) -> None:
    x = nn.Parameter(scale * torch.tensor([3.0, 4.0]))
    x.grad = size * torch.tensor([0.0, 5.0])
    optimizer = ScaleInvariantSGD([x], 1.0, weight_decay=0.1, foreach=foreach)
    optimizer.step()
    assert optimizer.relative_norm == pytest.approx(size / scale, rel=1e-5)
    assert torch.isfinite(x).all()


def test_nothing_is_divided_by_zero() -> None:
    zero, still = parameter([0.0, 0.0], [1.0, 0.0]), parameter([3.0, 4.0], [0.0, 0.0])
    ScaleInvariantSGD([zero], 0.1, weight_decay=0.05).step()
    assert zero.tolist() == [-0.1, 0.0]
    ScaleInvariantSGD([still], 0.1, weight_decay=0.05).step()
    torch.testing.assert_close(still.tolist(), [0.995 * 3, 0.995 * 4])


def test_clipping_for_another_optimiser() -> None:
    x = parameter([3.0, 4.0], [0.0, 40.0])
    assert clip_grad_relative_([x], 0.1, 0.05) == pytest.approx(4.0)
    assert x.grad.tolist() == pytest.approx([0.0, 10.0])
    assert clip_grad_relative_(x, 0.1, 0.05) == pytest.approx(1.0)
    assert x.grad.tolist() == pytest.approx([0.0, 10.0])
    x.grad[0] = math.inf
    assert clip_grad_relative_([x], 0.1, 0.05) == math.inf
    assert x.grad.tolist() == pytest.approx([math.inf, 10.0])


def test_step_decay() -> None:
    schedule = step_decay((6, 9), factor=0.5)
    assert [schedule(step) for step in (0, 5, 6, 8, 9, 99)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    with pytest.raises(ConfigError, match="rise"):
        step_decay((9, 6))
    with pytest.raises(ConfigError, match="factor"):
        step_decay((6,), factor=0.0)


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"clip": 1.0}, "clip must be above 1"),
        ({"clip": math.nan}, "clip must be above 1"),
        ({"lr": 0.0}, "lr"),
        ({"lr": -1.0}, "lr"),
        ({"weight_decay": 0.0}, "weight_decay must be above 0 with clipping"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"lr": 2.0, "weight_decay": 0.5}, "must be below 1"),
    ],
)
def test_bad_settings(options: dict[str, float], match: str) -> None:
    x = parameter([1.0], [1.0])
    given = {"lr": 0.1, "weight_decay": 0.05, **options}
    with pytest.raises(ConfigError, match=match):
        ScaleInvariantSGD([x], given.pop("lr"), **given)
    given = {"lr": 0.1, "weight_decay": 0.05, **options}
    with pytest.raises(ConfigError, match=match):
        clip_grad_relative_([x], **given)
    with pytest.raises(ConfigError, match=match):
        ScaleInvariantSGD([{"params": [x], **options}], 0.1, weight_decay=0.05)


def test_other_bad_input() -> None:
    with pytest.raises(ConfigError, match="at least one parameter"):
        ScaleInvariantSGD([], 0.1, weight_decay=0.1)
    with pytest.raises(ConfigError, match="at least one parameter"):
        clip_grad_relative_([], 0.1, 0.1)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse"):
        ScaleInvariantSGD(table.parameters(), 0.1, weight_decay=0.1).step()
    with pytest.raises(UnsupportedError, match="sparse"):
        clip_grad_relative_(table.parameters(), 0.1, 0.1)
    x = parameter([1.0], [1.0])
    with pytest.raises(ValueError, match="more than one parameter group"):
        ScaleInvariantSGD([{"params": [x]}, {"params": [x]}], 0.1, weight_decay=0.1)


def test_warnings() -> None:
    used, unused = parameter([3.0], [0.0]), parameter([4.0])
    frozen = parameter([9.0]).requires_grad_(False)
    optimizer = ScaleInvariantSGD([used, unused, frozen], 0.1, weight_decay=0.05)
    with pytest.warns(UserWarning, match="1 of 2 parameters have no gradient"):
        optimizer.step()
    optimizer.step()  # says so once
    assert float(unused.detach()) == pytest.approx(4 * 0.995**2)
    assert frozen.item() == 9.0
    with pytest.warns(UserWarning, match="share of the weights"):
        ScaleInvariantSGD([used], 1.0, weight_decay=0.2)
