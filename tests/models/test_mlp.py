"""The multilayer perceptron: formula, saving, bad sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, ShapeError
from gossamer.models import MultiLayerPerceptron


def test_it_is_matrices_with_relu_between_them() -> None:
    torch.manual_seed(0)
    model = MultiLayerPerceptron(6, 3, hidden_dims=(5, 4)).double()
    x = torch.randn(7, 2, 3, dtype=torch.float64)
    h = x.reshape(7, 6).numpy()
    weights = [p.detach().numpy() for p in model.parameters()]
    for k in (0, 2):
        h = np.maximum(h @ weights[k].T + weights[k + 1], 0)
    assert model(x).detach().numpy() == pytest.approx(h @ weights[4].T + weights[5], abs=1e-12)


def test_linear_and_saved(tmp_path: Path) -> None:
    model = MultiLayerPerceptron(3, 2, hidden_dims=())
    assert model.num_parameters() == 8
    model.save_pretrained(tmp_path)
    again = MultiLayerPerceptron.from_pretrained(tmp_path)
    x = torch.randn(4, 3)
    assert torch.equal(again(x), model(x))


def test_bad_sizes() -> None:
    for options in ({"num_features": 0}, {"num_classes": 1}, {"hidden_dims": (3, 0)}):
        with pytest.raises(ConfigError):
            MultiLayerPerceptron(**{"num_features": 3, "num_classes": 2, **options})
    with pytest.raises(ConfigError, match="list of widths"):
        MultiLayerPerceptron(3, 2, hidden_dims=64)
    for shape in ((4, 2), (3,)):
        with pytest.raises(ShapeError, match="3 numbers in a row"):
            MultiLayerPerceptron(3, 2)(torch.zeros(shape))
