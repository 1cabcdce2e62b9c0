"""Time of the generalization measures, against writing the network out as dense matrices.

One network of linear layers and a small one of convolutions. The dense forms need the matrix of
every convolution, one column for each input. Run: python benchmarks/bench_generalization.py
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from _timing import medians, show
from torch import Tensor, nn

from gossamer.measures import (
    expected_sharpness,
    frobenius_complexity,
    max_sharpness,
    output_margins,
    path_norm,
    spectral_complexity,
)

torch.set_num_threads(1)


def matrices(model: nn.Sequential, shape: tuple[int, ...]) -> list[Tensor]:
    """Return the dense matrix of every layer with weights, in float64."""
    found = []
    x = torch.zeros(1, *shape)
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            size = x[0].numel()
            eye = torch.eye(size, dtype=torch.float64).reshape(size, *x.shape[1:])
            plain = nn.functional.conv2d(
                eye, layer.weight.double(), None, layer.stride, layer.padding
            )
            found.append(plain.flatten(1).T)
        elif isinstance(layer, nn.Linear):
            found.append(layer.weight.double())
        x = layer(x)
    return found


@torch.no_grad()
def dense_path(model: nn.Sequential, shape: tuple[int, ...]) -> float:
    vector = torch.ones(math.prod(shape), dtype=torch.float64)
    for matrix in matrices(model, shape):
        vector = 4 * len(matrix) * matrix.square() @ vector
    return math.log(float(vector.sum()))


@torch.no_grad()
def dense_spectral(model: nn.Sequential, shape: tuple[int, ...]) -> float:
    norms = [(len(m), float(torch.linalg.svdvals(m)[0])) for m in matrices(model, shape)]
    return sum(math.log(units) + 2 * math.log(norm) for units, norm in norms)


def convolutional() -> tuple[nn.Sequential, tuple[int, ...]]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip
    return model, (3, 16, 16)


def main() -> None:
    torch.manual_seed(0)
    perceptron = nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    cases = {"784-256-256-10": (perceptron, (784,)), "3 convolutions, 16 x 16": convolutional()}
    for title, (model, shape) in cases.items():
        data = (torch.randn(2000, *shape), torch.randint(10, (2000,)))
        for one, two in ((path_norm, dense_path), (spectral_complexity, dense_spectral)):
            assert math.isclose(one(model, shape), two(model, shape), rel_tol=1e-8)
        exact: dict[str, Callable[[], object]] = {
            "path norm": lambda m=model, s=shape: path_norm(m, s),
            "path norm, dense": lambda m=model, s=shape: dense_path(m, s),
            "spectral": lambda m=model, s=shape: spectral_complexity(m, s),
            "spectral, dense SVD": lambda m=model, s=shape: dense_spectral(m, s),
            "spectral, reshaped": lambda m=model, s=shape: spectral_complexity(
                m, s, convolution="reshaped"
            ),
            "l2": lambda m=model: frobenius_complexity(m),
        }
        show(f"{title}: norms", medians(exact, repeats=3), "path norm")
        passes: dict[str, Callable[[], object]] = {
            "margins, 2000 examples": lambda m=model, d=data: output_margins(m, d),
            "max sharpness, 20 steps": lambda m=model, d=data: max_sharpness(m, d),
            "expected sharpness, 20 draws": lambda m=model, d=data: expected_sharpness(
                m, d, sigma=0.01
            ),
        }
        show(f"{title}: data", medians(passes, repeats=1), "margins, 2000 examples")


if __name__ == "__main__":
    main()
