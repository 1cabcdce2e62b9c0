"""Spectra: random matrices, planted spikes, closed forms, bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.measures import (
    effective_rank,
    marchenko_pastur_edges,
    spectra,
    spectral_report,
    stable_rank,
)


def noise(p: int, q: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((p, q))


# --- reference values ---


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_random_entries_have_no_outliers_and_a_spike_is_one_more(seed, scale) -> None:
    matrix = scale * noise(400, 1600, seed)
    report = spectral_report(matrix)
    assert report.num_outliers == 0
    assert report.variance == pytest.approx(scale**2, rel=0.02)
    edges = marchenko_pastur_edges((400, 1600), scale**2)
    assert (report.lower_edge, report.upper_edge) == pytest.approx(edges, rel=0.02)
    # an eigenvalue of three times the edge, in a random direction
    rng = np.random.default_rng(seed + 10)
    u, w = rng.standard_normal(400), rng.standard_normal(1600)
    size = np.sqrt(3 * edges[1] * 1600)
    spiked = matrix + size * np.outer(u, w) / np.linalg.norm(u) / np.linalg.norm(w)
    after = spectral_report(spiked)
    assert after.num_outliers == report.num_outliers + 1
    assert after.bulk_mass < report.bulk_mass


@pytest.mark.parametrize("shape", [(30, 70), (70, 30), (50, 50)])
def test_figures_are_those_of_their_definitions(shape) -> None:
    matrix = noise(*shape)
    s = np.linalg.norm(matrix, 2)
    energy = np.linalg.eigvalsh(matrix @ matrix.T)
    energy = energy[energy > 1e-9] / energy.sum()
    report = spectral_report(matrix)
    assert report.spectral_norm == pytest.approx(s)
    assert report.stable_rank == pytest.approx((matrix**2).sum() / s**2)
    assert report.effective_rank == pytest.approx(np.exp(-(energy * np.log(energy)).sum()))
    assert stable_rank(matrix) == pytest.approx(report.stable_rank)
    assert effective_rank(matrix) == pytest.approx(report.effective_rank)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_median_of_the_bulk_by_direct_quadrature(ratio) -> None:
    low, high = (1 - ratio**0.5) ** 2, (1 + ratio**0.5) ** 2
    x = np.linspace(low, high, 400_001)[1:-1]
    density = np.sqrt((high - x) * (x - low)) / (2 * np.pi * ratio * x)
    mass = np.cumsum(density) * (x[1] - x[0])
    assert mass[-1] == pytest.approx(1.0, abs=1e-4)
    assert spectra._bulk_median(ratio) == pytest.approx(x[np.searchsorted(mass, 0.5)], abs=1e-3)


def test_median_of_a_square_matrix() -> None:
    values = np.linalg.svd(noise(800, 800), compute_uv=False) ** 2 / 800
    assert spectra._bulk_median(1.0) == pytest.approx(np.median(values), rel=0.02)


# --- limits and invariances ---


def test_orthogonal_zero_and_rank_one() -> None:
    eye = spectral_report(np.eye(5))
    assert eye.stable_rank == pytest.approx(5)
    assert eye.effective_rank == pytest.approx(5)
    zero = spectral_report(np.zeros((3, 7)))
    assert (zero.stable_rank, zero.effective_rank, zero.num_outliers) == (0, 0, 0)
    assert (zero.spectral_norm, zero.bulk_mass) == (0, 1)
    one = spectral_report(np.outer(np.arange(1, 9.0), np.ones(9)))
    assert one.stable_rank == pytest.approx(1)
    assert one.effective_rank == pytest.approx(1)
    assert one.num_outliers == 1
    assert one.bulk_mass == pytest.approx(0, abs=1e-12)


def test_transposed_scaled_and_from_torch() -> None:
    matrix = noise(20, 60)
    report = spectral_report(matrix)
    turned = spectral_report(matrix.T)
    assert turned.shape == (60, 20)
    assert turned.num_outliers == report.num_outliers
    assert spectral_report(3 * matrix).variance == pytest.approx(9 * report.variance)
    weight = torch.nn.Parameter(torch.from_numpy(matrix).bfloat16())
    assert spectral_report(weight).stable_rank == pytest.approx(report.stable_rank, rel=0.02)
    row = json.loads(json.dumps(report.rows()))[0]
    assert row["shape"] == [20, 60]


def test_needs_no_torch() -> None:
    code = "import sys, gossamer.measures.spectra; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- bad input ---


def test_bad_input() -> None:
    for bad in (np.ones(3), np.ones((2, 2, 2)), np.ones((0, 4))):
        with pytest.raises(ShapeError, match="weight must be a matrix"):
            spectral_report(bad)
    with pytest.raises(DataError, match="weight must be finite; got 1"):
        spectral_report(np.array([[1.0, np.nan]]))
    with pytest.raises(ConfigError, match="variance must be >= 0"):
        marchenko_pastur_edges((2, 3), -1.0)
    with pytest.raises(ShapeError, match="two sides"):
        marchenko_pastur_edges((2, 3, 4), 1.0)
