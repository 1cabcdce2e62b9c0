"""Sharpness and PAC-Bayes: closed forms, invariances, untouched models, bad input."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, ShapeError, UnsupportedError
from gossamer.measures import expected_sharpness, max_sharpness, pac_bayes_bound


class Weights(nn.Module):
    """A model whose output is its weights: any function of them is a loss."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        return self.values.expand(len(x), -1)


ONE = (torch.zeros(1, 1), torch.zeros(1))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data(rows: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=draw)
    return x, (x[:, :3]).argmax(1)


def trained() -> nn.Sequential:
    model = network()
    x, y = data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


# --- reference values ---


def test_expected_sharpness_of_a_quadratic_loss() -> None:
    rng = np.random.default_rng(0)
    root = torch.as_tensor(rng.standard_normal((6, 6)))
    matrix = root @ root.T

    def loss(out: Tensor, _: Tensor) -> Tensor:
        return 0.5 * out[0] @ matrix @ out[0]

    model = Weights(torch.zeros(6, dtype=torch.float64))
    found = expected_sharpness(model, ONE, sigma=0.3, num_draws=2000, loss=loss)
    expected = 0.3**2 * float(matrix.trace()) / 2
    assert found.value == pytest.approx(expected, abs=3 * found.standard_error)
    assert found.standard_error < 0.06 * expected
    # the variance of a quadratic form is sigma^4 tr(A^2) / 2
    spread = 0.3**2 * math.sqrt(float((matrix @ matrix).trace()) / 2) / math.sqrt(2000)
    assert found.standard_error == pytest.approx(spread, rel=0.1)


def test_kl_is_that_of_the_deviation() -> None:
    model = Weights(torch.tensor([3.0, 4.0]))
    start = Weights(torch.tensor([3.0, 1.0]))

    def loss(out: Tensor, _: Tensor) -> Tensor:
        return out.sum()

    assert expected_sharpness(model, ONE, sigma=0.5, loss=loss).kl == pytest.approx(50)
    found = expected_sharpness(model, ONE, sigma=0.5, init_model=start, loss=loss)
    assert found.kl == pytest.approx(18)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_max_sharpness_of_a_linear_loss(num_steps: int) -> None:
    rng = np.random.default_rng(0)
    slope, weights = (torch.as_tensor(rng.standard_normal(20)) for _ in range(2))

    def loss(out: Tensor, _: Tensor) -> Tensor:
        return out[0] @ slope

    found = max_sharpness(
        Weights(weights), ONE, radius=0.01, num_steps=num_steps, step_size=1.0, loss=loss
    )
    expected = 0.01 * float((slope.abs() * (weights.abs() + 1)).sum())
    assert found.increase == pytest.approx(expected, rel=1e-10)
    assert found.value == pytest.approx(expected / (1 + float(slope @ weights)), rel=1e-10)
    assert found.best_step == 1
    # three tenths of the way after one default step, all of it after four
    for steps, share in ((1, 0.3), (4, 1.0), (6, 1.0)):
        found = max_sharpness(Weights(weights), ONE, radius=0.01, num_steps=steps, loss=loss)
        assert found.increase == pytest.approx(share * expected, rel=1e-10)


def test_max_sharpness_keeps_the_best_of_the_path() -> None:
    # steps of .3 overshoot the peak at .05: the best point is the start
    def loss(out: Tensor, _: Tensor) -> Tensor:
        return -((out[0, 0] - 0.05) ** 2)

    model = Weights(torch.zeros(1, dtype=torch.float64))
    found = max_sharpness(model, ONE, radius=1.0, num_steps=1, loss=loss)
    assert (found.increase, found.best_step) == (0.0, 0)


def test_max_sharpness_bounds_random_points_of_a_network_from_below() -> None:
    model, (x, y) = trained(), data()
    found = max_sharpness(model, (x, y), radius=0.05, num_steps=30)
    double = copy.deepcopy(model).double()
    start = [p.detach().clone() for p in double.parameters()]
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = float(F.cross_entropy(double(x.double()), y))
        for _ in range(20):
            for p, w in zip(double.parameters(), start, strict=True):
                corner = torch.randint(2, w.shape, generator=draw) * 2.0 - 1
                p.copy_(w + 0.05 * (w.abs() + 1) * corner)
            rise = float(F.cross_entropy(double(x.double()), y)) - before
            assert rise <= found.increase
    assert found.loss == pytest.approx(before, rel=1e-12)
    assert found.value == pytest.approx(found.increase / (1 + before), rel=1e-12)


def test_the_bound_by_hand() -> None:
    model, pair = trained(), data()
    start = network()
    found = pac_bayes_bound(model, pair, init_model=start, delta=0.1)
    squares = sum(
        float((a.detach().double() - b.detach().double()).square().sum())
        for a, b in zip(model.parameters(), start.parameters(), strict=True)
    )
    kl = squares / (2 * found.sigma**2)
    complexity = 4 * math.sqrt((kl + math.log(2 * 60 / 0.1)) / 60)
    assert found.kl == pytest.approx(kl, rel=1e-10)
    assert found.complexity == pytest.approx(complexity, rel=1e-10)
    with torch.no_grad():
        error = float((model(pair[0]).argmax(1) != pair[1]).double().mean())
    assert found.error == pytest.approx(error)
    assert found.bound == pytest.approx(error + found.error_increase + complexity)
    assert found.vacuous == (found.bound >= 1)
    again = expected_sharpness(model, pair, sigma=found.sigma)
    assert again.error_increase == pytest.approx(found.error_increase, abs=1e-12)


def test_sigma_is_the_largest_that_keeps_the_accuracy() -> None:
    model, pair = trained(), data()
    for most in (0.02, 0.1, 0.3):
        found = pac_bayes_bound(model, pair, max_drop=most)
        assert found.error_increase <= most
        beyond = expected_sharpness(model, pair, sigma=1.06 * found.sigma)
        assert beyond.error_increase > most


def test_scaled_weights_take_scaled_noise() -> None:
    model = trained()
    for layer in (model[0], model[2]):
        layer.bias = None
    tiny = copy.deepcopy(model)
    for p in tiny.parameters():
        p.data *= 2.0**-12  # six steps of the search, and exact in binary
    found = [pac_bayes_bound(m, data()) for m in (model, tiny)]
    assert found[1].sigma == pytest.approx(found[0].sigma * 2.0**-12, rel=1e-12)
    assert found[1].bound == pytest.approx(found[0].bound, rel=1e-12)


# --- limits and invariances ---


MEASURES = {
    "max": lambda m, d: max_sharpness(m, d, num_steps=4).value,
    "expected": lambda m, d: expected_sharpness(m, d, sigma=0.05, num_draws=4).value,
    "bound": lambda m, d: pac_bayes_bound(m, d).bound,
}


@pytest.mark.parametrize("name", MEASURES)
def test_models_are_untouched_and_values_repeat(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model(torch.randn(50, 4))
    model.train()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    first = MEASURES[name](model, data())
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert MEASURES[name](model, data()) == first
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert model.training
    assert model[1].training
    assert [p.requires_grad for p in model.parameters()] == [False] + 5 * [True]
    assert all(p.grad is None for p in model.parameters())
    assert MEASURES[name](model.eval(), data()) == first


@pytest.mark.parametrize("name", MEASURES)
def test_batch_size_does_not_matter(name: str) -> None:
    model, (x, y) = trained(), data()
    loader = [(x[i : i + 17], y[i : i + 17]) for i in range(0, 60, 17)]
    found = MEASURES[name](model, loader)
    assert found == pytest.approx(MEASURES[name](model, (x, y)), rel=1e-9)
    assert found == pytest.approx(MEASURES[name](model, iter(loader)), rel=1e-9)
    arrays = (x.numpy(), y.numpy().astype(np.int32))
    assert MEASURES[name](model, arrays) == MEASURES[name](model, (x, y))


def test_half_precision_is_computed_in_double() -> None:
    model = trained().half()
    exact = copy.deepcopy(model).double()
    for measure in MEASURES.values():
        assert measure(model, data()) == measure(exact, data())


def test_rescaling_a_unit_changes_sharpness() -> None:
    model = trained()
    other = copy.deepcopy(model)
    other[0].weight.data[1] *= 20
    other[0].bias.data[1] *= 20
    other[2].weight.data[:, 1] /= 20
    values = [max_sharpness(m, data()).value for m in (model, other)]
    assert values[1] != pytest.approx(values[0], rel=0.01)


def test_another_seed_gives_another_value() -> None:
    model = trained()
    values = [expected_sharpness(model, data(), sigma=0.1, random_state=s).value for s in (0, 1)]
    assert values[0] != values[1]


def test_results_are_plain() -> None:
    model = trained()
    results = (
        max_sharpness(model, data()),
        expected_sharpness(model, data(), sigma=0.1),
        pac_bayes_bound(model, data()),
    )
    for result in results:
        assert result.rows() == [json.loads(json.dumps(result.to_dict()))]


# --- bad input ---


def test_options_out_of_range() -> None:
    model = network()
    for sigma in (0.0, -0.1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="sigma"):
            expected_sharpness(model, data(), sigma=sigma)
    with pytest.raises(ConfigError, match="num_draws"):
        expected_sharpness(model, data(), sigma=0.1, num_draws=1)
    with pytest.raises(ConfigError, match="num_draws must be >= 20"):
        pac_bayes_bound(model, data(), num_draws=5)
    with pytest.raises(ConfigError, match="radius"):
        max_sharpness(model, data(), radius=0.0)
    with pytest.raises(ConfigError, match="num_steps"):
        max_sharpness(model, data(), num_steps=0)
    with pytest.raises(ConfigError, match="step_size"):
        max_sharpness(model, data(), step_size=1.5)
    for delta in (0.0, 1.0):
        with pytest.raises(ConfigError, match="delta"):
            pac_bayes_bound(model, data(), delta=delta)
    with pytest.raises(ConfigError, match="max_drop"):
        pac_bayes_bound(model, data(), max_drop=0.0)


def test_losses_that_are_not_finite() -> None:
    model = network()
    model[2].weight.data[0, 0] = math.inf
    with pytest.raises(DataError, match="loss must be finite"):
        max_sharpness(model, data())
    with pytest.raises(DataError, match="loss must be finite"):
        expected_sharpness(model, data(), sigma=0.1)


def test_bad_data_and_other_models() -> None:
    model = network()
    with pytest.raises(DataError, match="at least one"):
        max_sharpness(model, [])
    with pytest.raises(DataError, match="between 0 and 2"):
        expected_sharpness(model, (data()[0], data()[1] + 1), sigma=0.1)
    with pytest.raises(ShapeError, match="init_model"):
        pac_bayes_bound(model, data(), init_model=nn.Linear(4, 3))
    model.hook = torch.randn(2, requires_grad=True) * 2  # what deepcopy refuses
    with pytest.raises(UnsupportedError, match="deepcopy"):
        max_sharpness(model, data())


def test_accuracy_that_no_noise_keeps() -> None:
    class Edge(nn.Module):
        """Right by a hair: the slightest noise makes a coin's toss of it."""

        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.values.expand(len(x), -1)

    pair = (torch.zeros(40, 1), torch.zeros(40, dtype=torch.long))
    with pytest.raises(DataError, match="max_drop"):
        pac_bayes_bound(Edge(), pair)
