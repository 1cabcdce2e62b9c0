"""Norms and margins: values by hand, paths one by one, dense matrices, invariances, bad input."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError, UnsupportedError
from gossamer.measures import (
    fold_batchnorm,
    frobenius_complexity,
    output_margins,
    path_norm,
    spectral_complexity,
)
from gossamer.measures.norms import margin_quantile_of


def stack(*matrices: list[list[float]] | Tensor) -> nn.Sequential:
    """Return a ReLU network without biases from its matrices."""
    layers: list[nn.Module] = []
    for matrix in matrices:
        weight = torch.as_tensor(matrix, dtype=torch.float64)
        layer = nn.Linear(*reversed(weight.shape), bias=False, dtype=torch.float64)
        layer.weight.data.copy_(weight)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def random_net(*sizes: int, seed: int = 0) -> nn.Sequential:
    rng = np.random.default_rng(seed)
    pairs = itertools.pairwise(sizes)
    return stack(*(torch.as_tensor(rng.standard_normal((m, n))) for n, m in pairs))


def by_enumeration(matrices: list[np.ndarray], p: int) -> float:
    """Return a path norm from every single path."""
    total = 0.0
    sizes = [matrices[0].shape[1], *(m.shape[0] for m in matrices)]
    for path in itertools.product(*(range(size) for size in sizes)):
        product = 1.0
        for index, matrix in enumerate(matrices):
            w = matrix[path[index + 1], path[index]]
            product *= abs(2 * w) if p == 1 else 4 * matrix.shape[0] * w**2
        total += product
    return total**2 if p == 1 else total


def dense(apply: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> np.ndarray:
    """Return the matrix of a linear operator, one column for each input."""
    eye = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    with torch.no_grad():
        return apply(eye).flatten(1).T.numpy()


def of_convolution(conv: nn.Module, shape: tuple[int, ...]) -> np.ndarray:
    return dense(lambda v: conv(v) - conv(torch.zeros_like(v)), shape)


TWO = stack([[1, -2], [3, 0]], [[1, 1]])
ALL = (
    lambda m, shape: frobenius_complexity(m),
    lambda m, shape: path_norm(m, shape, p=1),
    lambda m, shape: path_norm(m, shape, p=2),
    lambda m, shape: spectral_complexity(m, shape),
)

# --- reference values ---


def test_two_layers_by_hand() -> None:
    assert frobenius_complexity(TWO, log=False) == pytest.approx(448, rel=1e-12)
    assert path_norm(TWO, (2,), p=1, log=False) == pytest.approx(576, rel=1e-12)
    assert path_norm(TWO, (2,), p=2, log=False) == pytest.approx(448, rel=1e-12)
    expected = 4 * (7 + math.sqrt(13))
    assert spectral_complexity(TWO, (2,), log=False) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(42.422205, abs=1e-6)


def test_one_layer() -> None:
    weight = np.random.default_rng(0).standard_normal((3, 5))
    model = stack(torch.as_tensor(weight))
    expected = (2 * np.abs(weight).sum()) ** 2
    assert path_norm(model, (5,), p=1, log=False) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [1, 2])
def test_paths_one_by_one(p: int) -> None:
    model = random_net(3, 4, 3, 2)
    matrices = [m.weight.detach().numpy() for m in model if isinstance(m, nn.Linear)]
    expected = by_enumeration(matrices, p)
    assert path_norm(model, (3,), p=p, log=False) == pytest.approx(expected, rel=1e-12)


CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "dilation": 2},
    {"kernel_size": 3, "padding": 1, "groups": 2},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": (1, 3), "padding": (0, 2), "stride": (1, 2)},
    {"kernel_size": 3, "padding": "same"},
]


@pytest.mark.parametrize("how", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("p", [1, 2])
def test_paths_through_convolutions_are_those_of_dense_matrices(how: dict, p: int) -> None:
    torch.manual_seed(0)
    first = nn.Conv2d(2, 4, **how).double()
    second = nn.Conv2d(4, 2, 2, bias=False).double()
    model = nn.Sequential(first, nn.ReLU(), second)
    one = of_convolution(first, (2, 5, 5))
    between = tuple(first(torch.zeros(1, 2, 5, 5, dtype=torch.float64)).shape[1:])
    written_out = stack(torch.as_tensor(one), torch.as_tensor(of_convolution(second, between)))
    expected = path_norm(written_out, (50,), p=p)
    assert path_norm(model, (2, 5, 5), p=p) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [1, 2])
def test_paths_through_a_small_convolution_one_by_one(p: int) -> None:
    torch.manual_seed(0)
    first, second = nn.Conv1d(1, 2, 2).double(), nn.Conv1d(2, 1, 2).double()
    matrices = [of_convolution(first, (1, 4)), of_convolution(second, (2, 3))]
    found = path_norm(nn.Sequential(first, nn.ReLU(), second), (1, 4), p=p, log=False)
    assert found == pytest.approx(by_enumeration(matrices, p), rel=1e-12)


@pytest.mark.parametrize("how", CONVOLUTIONS[:4] + CONVOLUTIONS[5:], ids=str)
def test_norm_of_a_convolution_is_that_of_its_dense_matrix(how: dict) -> None:
    torch.manual_seed(1)
    conv = nn.Conv2d(2, 4, **how)
    matrix = of_convolution(conv.double(), (2, 8, 8))
    expected = matrix.shape[0] * np.linalg.svd(matrix, compute_uv=False)[0] ** 2
    found = spectral_complexity(conv, (2, 8, 8), log=False)
    assert found == pytest.approx(expected, rel=1e-8)


def test_norms_of_a_convolution_by_other_definitions() -> None:
    torch.manual_seed(0)
    circular = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", groups=2, bias=False).double()
    conv = nn.Conv2d(2, 4, 3, padding=1, groups=2, bias=False).double()
    conv.weight.data.copy_(circular.weight)
    matrix = of_convolution(circular, (2, 6, 6))
    wrapped = 144 * np.linalg.svd(matrix, compute_uv=False)[0] ** 2
    found = spectral_complexity(conv, (2, 6, 6), convolution="circular", log=False)
    assert found == pytest.approx(wrapped, rel=1e-10)
    # padding with copies is a layer of its own: an upper bound
    assert spectral_complexity(circular, (2, 6, 6), log=False) >= wrapped * (1 - 1e-9)
    plain = nn.Conv2d(2, 4, 3, padding=1, bias=False)
    reshaped = 144 * np.linalg.norm(plain.weight.detach().double().numpy().reshape(4, 18), 2) ** 2
    found = spectral_complexity(plain, (2, 6, 6), convolution="reshaped", log=False)
    assert found == pytest.approx(reshaped, rel=1e-6)
    exact = spectral_complexity(plain, (2, 6, 6), log=False)
    assert reshaped < exact <= 9 * reshaped


def test_circular_norm_takes_no_stride() -> None:
    with pytest.raises(UnsupportedError, match="exact"):
        spectral_complexity(nn.Conv2d(1, 1, 3, stride=2), (1, 8, 8), convolution="circular")
    with pytest.raises(UnsupportedError, match="no smaller"):
        spectral_complexity(nn.Conv2d(1, 1, 3, padding=1), (1, 2, 2), convolution="circular")


POOLS: list[tuple[nn.Module, nn.Module | None]] = [
    (nn.AvgPool2d(2), None),
    (nn.AvgPool2d(3, stride=2, padding=1), None),
    (nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), None),
    (nn.AvgPool2d(2, stride=2, ceil_mode=True), None),
    (nn.AdaptiveAvgPool2d((2, 3)), None),
    (nn.AdaptiveAvgPool2d(1), None),
]


@pytest.mark.parametrize("pool", [pool for pool, _ in POOLS], ids=str)
@pytest.mark.parametrize("p", [1, 2])
def test_average_pooling_is_its_weights(pool: nn.Module, p: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 2).double()
    found = path_norm(nn.Sequential(conv, nn.ReLU(), pool), (2, 6, 6), p=p, log=False)
    one, two = of_convolution(conv, (2, 6, 6)), dense(pool, (3, 5, 5))
    if p == 1:
        expected = (two @ np.abs(2 * one)).sum() ** 2
    else:
        expected = (two**2 @ (4 * len(one) * one**2)).sum()
    assert found == pytest.approx(expected, rel=1e-12)


def window_matrix(pool: nn.Module, shape: tuple[int, int]) -> np.ndarray:
    """Return which inputs a max pooling sees at each output: it is 1 where that input is 1."""
    eye = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, 1, *shape)
    return pool(eye).flatten(1).T.numpy()


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.MaxPool2d(2, stride=1, dilation=2),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.AdaptiveMaxPool2d((2, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("p", [1, 2])
def test_max_pooling_is_the_sum_over_its_window(pool: nn.Module, p: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 1, 2).double()
    found = path_norm(nn.Sequential(conv, pool, nn.Flatten()), (2, 6, 6), p=p, log=False)
    one, two = of_convolution(conv, (2, 6, 6)), window_matrix(pool, (5, 5))
    if p == 1:
        expected = (two @ np.abs(2 * one)).sum() ** 2
    else:
        expected = (two @ (4 * len(one) * one**2)).sum()
    assert found == pytest.approx(expected, rel=1e-12)


class Residual(nn.Module):
    """Two branches, in the words of a user: functional calls and a sum in place."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 4, bias=False)
        self.branch = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x.view(x.size(0), -1)))
        x += F.relu(self.branch(x))
        return self.head(F.dropout(x, 0.5, training=self.training))


def test_residual_branches_add() -> None:
    model = Residual().double()
    w1, w2, w3 = (m.weight.detach().numpy() for m in (model.first, model.branch, model.head))
    skip = np.eye(4)
    l1 = np.abs(2 * w3) @ (skip + np.abs(2 * w2)) @ np.abs(2 * w1)
    l2 = (8 * w3**2) @ (skip + 16 * w2**2) @ (16 * w1**2)
    assert path_norm(model, (3,), p=1, log=False) == pytest.approx(l1.sum() ** 2, rel=1e-12)
    assert path_norm(model, (3,), p=2, log=False) == pytest.approx(l2.sum(), rel=1e-12)
    norms = [np.linalg.norm(w, 2) for w in (w1, w2, w3)]
    product = math.sqrt(4) * norms[0] * (1 + math.sqrt(4) * norms[1]) * math.sqrt(2) * norms[2]
    assert spectral_complexity(model, (3,), log=False) == pytest.approx(product**2, rel=1e-12)


def test_sums_in_place_change_no_other_branch() -> None:
    class Aliased(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.inner, self.inplace = nn.Linear(3, 3, bias=False), inplace

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            y = F.relu(h, inplace=self.inplace)
            y += self.inner(y)
            return y + h  # with a ReLU in place h is y

    for inplace in (False, True):
        torch.manual_seed(0)
        model = Aliased(inplace).double()
        matrix = np.abs(2 * model.inner.weight.detach().numpy())
        once, twice = matrix, matrix @ matrix
        paths = 2 * (once + twice) if inplace else (once + twice) + once
        with pytest.warns(UserWarning, match="more than once"):
            found = path_norm(model, (3,), p=1, log=False)
        assert found == pytest.approx(paths.sum() ** 2, rel=1e-12)


def test_joined_branches() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 3, bias=False), nn.Linear(2, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.one(x), 3 * self.two(x) / 2 + 1], dim=1)

    torch.manual_seed(0)
    model = Joined().double()
    w1, w2 = model.one.weight.detach().numpy(), 1.5 * model.two.weight.detach().numpy()
    total = np.abs(2 * w1).sum() + np.abs(2 * w2).sum()
    assert path_norm(model, (2,), p=1, log=False) == pytest.approx(total**2, rel=1e-12)
    squares = 3 * np.linalg.norm(w1, 2) ** 2 + np.linalg.norm(w2, 2) ** 2
    assert spectral_complexity(model, (2,), log=False) == pytest.approx(squares, rel=1e-12)


def test_margins() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 4)), rng.integers(0, 3, 30)
    model = nn.Linear(4, 3)
    found = output_margins(model, (x, y))
    logits = x @ model.weight.detach().double().numpy().T + model.bias.detach().double().numpy()
    for row, label, margin in zip(logits, y, found, strict=True):
        others = [value for index, value in enumerate(row) if index != label]
        assert float(margin) == pytest.approx(row[label] - max(others), rel=1e-9)
    loader = [(x[i : i + 7], torch.as_tensor(y[i : i + 7])) for i in range(0, 30, 7)]
    assert torch.allclose(output_margins(model, loader), found, rtol=0, atol=1e-12)
    assert torch.allclose(output_margins(model, iter(loader)), found, rtol=0, atol=1e-12)


def test_quantile_of_margins() -> None:
    margins = torch.arange(100.0, dtype=torch.float64).flip(0)
    assert margin_quantile_of(margins, 0.05) == 5  # 5 of 100 lie below
    assert margin_quantile_of(margins, 0.07) == 7
    assert margin_quantile_of(margins, 0.051) == 6
    assert margin_quantile_of(margins, 0.999) == 99
    with pytest.warns(UserWarning, match="smallest margin"):
        assert margin_quantile_of(margins[-10:], 0.05) == 0


# --- limits and invariances ---


def test_rescaling_a_unit_changes_norms_but_not_path_norms() -> None:
    model, other = random_net(4, 6, 5, 3), random_net(4, 6, 5, 3)
    other[0].weight.data[2] *= 7.0
    other[2].weight.data[:, 2] /= 7.0
    before, after = ([norm(m, (4,)) for norm in ALL] for m in (model, other))
    assert after[1:3] == pytest.approx(before[1:3], abs=1e-10)
    assert abs(after[0] - before[0]) > 0.01
    assert abs(after[3] - before[3]) > 0.01
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    assert torch.allclose(output_margins(model, (x, y)), output_margins(other, (x, y)), atol=1e-10)


def test_rescaling_layers_changes_nothing() -> None:
    model, other = random_net(4, 6, 3), random_net(4, 6, 3)
    other[0].weight.data *= 5.0
    other[2].weight.data /= 5.0
    for norm in ALL:
        assert norm(other, (4,)) == pytest.approx(norm(model, (4,)), abs=1e-10)


def test_depth_does_not_overflow() -> None:
    deep = random_net(64, *(64,) * 90, 10)
    matrices = [m.weight.detach().numpy() for m in deep if isinstance(m, nn.Linear)]
    vector, log = np.ones(64), 0.0
    for matrix in matrices:
        vector = (4 * len(matrix) * matrix**2) @ vector
        log += math.log(vector.max())
        vector /= vector.max()
    expected = log + math.log(vector.sum())
    assert expected > 710  # e^710 is no float64
    assert path_norm(deep, (64,)) == pytest.approx(expected, rel=1e-12)
    assert path_norm(deep, (64,), log=False) == math.inf
    assert math.isfinite(spectral_complexity(deep, (64,)))
    assert math.isfinite(frobenius_complexity(deep))


def test_a_network_of_zeros() -> None:
    model = stack(torch.zeros(3, 100), torch.ones(2, 3))
    conv = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    nn.init.zeros_(conv.weight)
    for norm in ALL:
        assert norm(model, (100,)) == -math.inf
    assert spectral_complexity(conv, (1, 10, 10), log=False) == 0


def test_half_precision_is_computed_in_double() -> None:
    model = random_net(4, 6, 3).half()
    exact = random_net(4, 6, 3)
    for one, two in zip(exact.parameters(), model.parameters(), strict=True):
        one.data.copy_(two.data)
    for norm in ALL:
        assert norm(model, (4,)) == norm(exact, (4,))
    assert model[0].weight.dtype == torch.float16


def test_parametrized_weights_are_those_that_act() -> None:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 4, bias=False)),
        nn.ReLU(),
        nn.Linear(4, 2, bias=False),
    )
    plain = stack(model[0].weight, model[2].weight)
    for norm in ALL:
        assert norm(model, (3,)) == pytest.approx(norm(plain, (3,)), rel=1e-6)
    assert nn.utils.parametrize.is_parametrized(model[0])
    assert model[0].weight.shape == (4, 3)


def test_leaky_units_and_constants() -> None:
    model = random_net(3, 4, 2)
    leaky = nn.Sequential(model[0], nn.LeakyReLU(0.2), model[2], nn.LogSoftmax(1))
    assert path_norm(leaky, (3,)) == pytest.approx(path_norm(model, (3,)), rel=1e-12)
    steep = nn.Sequential(model[0], nn.PReLU(4, 3.0), model[2]).double()
    expected = path_norm(model, (3,)) + 2 * math.log(3)
    assert path_norm(steep, (3,)) == pytest.approx(expected, rel=1e-9)


def test_calls_by_keyword_and_compiled_models() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.relu(input=F.linear(input=x, weight=self.first.weight))
            return torch.matmul(torch.flatten(input=hidden, start_dim=1), self.last.weight.T)

    model = Keywords().double()
    expected = path_norm(stack(model.first.weight.detach(), model.last.weight.detach()), (3,))
    assert path_norm(model, (3,)) == pytest.approx(expected, rel=1e-12)
    compiled = nn.Module()  # as torch.compile wraps it
    compiled._orig_mod = model
    assert path_norm(compiled, (3,)) == pytest.approx(expected, rel=1e-12)


def test_weight_tying_is_said() -> None:
    model = random_net(3, 3, 3)
    model[2].weight = model[0].weight
    matrix = model[0].weight.detach().numpy()
    for measure in (path_norm, spectral_complexity):
        with pytest.warns(UserWarning, match="more than once.*0 = 2.*counted once"):
            measure(model, (3,))
    with pytest.warns(UserWarning, match="several modules"):
        frobenius_complexity(model)
    with pytest.warns(UserWarning, match="more than once"):
        found = path_norm(model, (3,), p=1, log=False)
    assert found == pytest.approx(by_enumeration([matrix, matrix], 1), rel=1e-12)


# --- BatchNorm ---


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2),
        nn.BatchNorm2d(6, affine=False),
        nn.Flatten(),
        nn.Linear(6 * 64, 5),
        nn.BatchNorm1d(5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    nn.init.uniform_(model[1].weight, -1.0, 2.0)
    nn.init.normal_(model[1].bias)
    for _ in range(3):
        model(3 * torch.randn(16, 2, 4, 4) + 1)
    return model


def test_folded_batchnorm_gives_the_same_outputs() -> None:
    model = normed()
    folded = fold_batchnorm(model)
    x = torch.randn(8, 2, 4, 4)
    assert not any("BatchNorm" in type(m).__name__ for m in folded.modules())
    with torch.no_grad():
        assert torch.allclose(folded(x), model.eval()(x), rtol=0, atol=1e-5)
    assert folded[0].weight.dtype == torch.float32
    assert folded[0].weight.requires_grad


@pytest.mark.parametrize("norm", ALL[1:])
def test_norms_see_batchnorm_as_part_of_the_layer(norm: Callable) -> None:
    model = normed()
    assert norm(model, (2, 4, 4)) == pytest.approx(norm(fold_batchnorm(model), (2, 4, 4)), abs=1e-5)


def test_batchnorm_that_follows_no_layer_stays() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))
    model(torch.randn(50, 3) * torch.tensor([1.0, 3.0, 0.2]))
    folded = fold_batchnorm(model)
    assert isinstance(folded[0], nn.BatchNorm1d)
    factor = 1 / np.sqrt(model[0].running_var.double().numpy() + model[0].eps)
    weight = model[1].weight.detach().double().numpy()
    expected = (2 * np.abs(weight) @ factor).sum() ** 2
    assert path_norm(model, (3,), p=1, log=False) == pytest.approx(expected, rel=1e-9)
    expected = 2 * (np.linalg.norm(weight, 2) * factor.max()) ** 2
    assert spectral_complexity(model, (3,), log=False) == pytest.approx(expected, rel=1e-9)


def test_shared_layers_are_not_folded() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.one, self.two = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.linear(self.one(self.linear(x))))

    model = Twice()
    model(torch.randn(20, 3))
    model.eval()
    x = torch.randn(5, 3)
    folded = fold_batchnorm(model)
    assert isinstance(folded.one, nn.BatchNorm1d)
    assert torch.equal(folded(x), model(x))


def test_what_cannot_be_folded() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(UnsupportedError, match=r"running statistics.*'1'"):
        fold_batchnorm(model)

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) if x.sum() > 0 else x

    with pytest.raises(UnsupportedError, match=r"torch\.fx"):
        fold_batchnorm(Branching())


# --- beyond the theory ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


def test_attention_passes_only_when_asked() -> None:
    model = Block()
    with pytest.raises(UnsupportedError, match=r"attention.*'layer.self_attn'.*approximate=True"):
        path_norm(model, (5, 3))
    assert math.isfinite(path_norm(model, (5, 3), approximate=True))
    assert math.isfinite(spectral_complexity(model, (5, 3), approximate=True))
    with pytest.raises(UnsupportedError, match=r"'layer.self_attn'"):
        frobenius_complexity(model)
    assert math.isfinite(frobenius_complexity(model, approximate=True))


def test_attention_as_an_even_average() -> None:
    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(3, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, self.value(x)).flatten(1)

    model = Core().double()
    one = np.kron(np.eye(5), model.value.weight.detach().numpy())
    even = np.kron(np.full((5, 5), 0.2), np.eye(4))
    found = path_norm(model, (5, 3), p=1, log=False, approximate=True)
    assert found == pytest.approx((even @ np.abs(2 * one)).sum() ** 2, rel=1e-12)
    found = path_norm(model, (5, 3), p=2, log=False, approximate=True)
    assert found == pytest.approx((even**2 @ (4 * 20 * one**2)).sum(), rel=1e-12)


def test_attention_of_the_framework_has_its_two_projections() -> None:
    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0].flatten(1)

    torch.manual_seed(0)
    model = Core().double()
    value = model.attention.in_proj_weight.detach().numpy()[8:]
    out = model.attention.out_proj.weight.detach().numpy()
    one, two = np.kron(np.eye(3), value), np.kron(np.eye(3), out)
    even = np.kron(np.full((3, 3), 1 / 3), np.eye(4))
    found = path_norm(model, (3, 4), p=1, log=False, approximate=True)
    expected = (np.abs(2 * two) @ even @ np.abs(2 * one)).sum() ** 2
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)],
    ids=str,
)
def test_norms_count_as_their_weights_when_asked(norm: nn.Module) -> None:
    nn.init.uniform_(norm.weight, -2, 2)
    shape = (4, 4) if isinstance(norm, nn.InstanceNorm1d) else (4,)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(math.prod(shape), 2, bias=False))
    with pytest.raises(UnsupportedError, match=r"norm.*at '0'"):
        path_norm(model, shape)
    gains = norm.weight.detach().double().numpy()
    gains = np.repeat(gains, 4) if len(shape) == 2 else gains
    expected = (2 * np.abs(model[2].weight.detach().double().numpy()) @ np.abs(gains)).sum() ** 2
    found = path_norm(model, shape, p=1, log=False, approximate=True)
    assert found == pytest.approx(expected, rel=1e-9)


# --- bad input ---


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.gate(x)) * self.value(x)


def test_unknown_layers_are_named_with_their_path() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Softmax(1)))
    with pytest.raises(UnsupportedError, match=r"softmax in the layer Softmax at '1\.0'"):
        path_norm(inner, (3,))
    with pytest.raises(UnsupportedError, match="lstm in the layer LSTM at '0'"):
        spectral_complexity(nn.Sequential(nn.LSTM(3, 4)), (5, 3))
    with pytest.raises(UnsupportedError, match="two activations in the layer Product at '0'"):
        path_norm(nn.Sequential(Product()), (3,))
    with pytest.raises(UnsupportedError, match=r"tanh.*approximate=True"):
        path_norm(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), (3,))
    with pytest.raises(UnsupportedError, match="LSTM at '0'"):
        frobenius_complexity(nn.Sequential(nn.LSTM(3, 4)))
    with pytest.raises(UnsupportedError, match="without any"):
        path_norm(nn.ReLU(), (3,))
    with pytest.raises(UnsupportedError, match="by layers with weights"):
        path_norm(nn.PReLU(), (3,))


def test_dropout_that_is_always_on_is_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.linear(x))

    with pytest.raises(UnsupportedError, match=r"dropout.*training"):
        path_norm(Noisy(), (3,))


def test_options_out_of_range() -> None:
    with pytest.raises(ConfigError, match="p must be 1 or 2"):
        path_norm(TWO, (2,), p=3)
    with pytest.raises(ConfigError, match="circular"):
        spectral_complexity(TWO, (2,), convolution="circul")
    with pytest.raises(ShapeError, match=r"take an input of input_shape \(3,\).*multiplied"):
        path_norm(TWO, (3,))
    with pytest.raises(ShapeError, match="input_shape must be a tuple"):
        spectral_complexity(TWO, 2)
    for quantile in (0.0, 1.0, 1.5, -0.1):
        with pytest.raises(ConfigError, match="margin_quantile"):
            margin_quantile_of(torch.ones(30), quantile)


def test_bad_data() -> None:
    model = nn.Linear(4, 3)
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.raises(DataError, match="at least one"):
        output_margins(model, [])
    with pytest.raises(DataError, match="at least one"):
        output_margins(model, (x[:0], y[:0]))
    with pytest.raises(DataError, match=r"between 0 and 2.*got 3"):
        output_margins(model, (x, y + 1))
    with pytest.raises(DataError, match="got -1"):
        output_margins(model, (x, y - 1))
    with pytest.raises(DtypeError, match="integers"):
        output_margins(model, (x, y.float()))
    with pytest.raises(ShapeError, match="6 and 5 rows"):
        output_margins(model, (x, y[:5]))
    with pytest.raises(ShapeError, match=r"\(B,\)"):
        output_margins(model, (x, F.one_hot(y)))
    with pytest.raises(ShapeError, match="C >= 2"):
        output_margins(nn.Linear(4, 1), (x, 0 * y))
    with pytest.raises(DataError, match="pair"):
        output_margins(model, [x, y, x])
    with pytest.raises(DataError, match="finite"):
        output_margins(model, (x / 0, y))
    broken = nn.Linear(4, 3)
    broken.weight.data[0, 0] = math.nan
    with pytest.raises(DataError, match="logits"):
        output_margins(broken, (x, y))


@pytest.mark.gpu
def test_the_device_does_not_matter() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = normed()
    for norm in ALL:
        assert norm(copy.deepcopy(model).cuda(), (2, 4, 4)) == pytest.approx(
            norm(model, (2, 4, 4)), rel=1e-8
        )
