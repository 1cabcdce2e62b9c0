"""Losses by chunks of labels against the same losses on the whole matrix."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError, UnsupportedError
from gossamer.losses import (
    BinaryCrossEntropyLoss,
    CoupledSoftmaxLoss,
    DecoupledSoftmaxLoss,
    GradientCache,
    SoftTopKLoss,
    SummedSoftmaxLoss,
    sharded_loss,
)
from gossamer.losses._labels import label_matrix, label_pairs
from gossamer.losses._rows import draw_pairs

LABELS = [[0], [1, 2, 22], [3], [22, 5], [6, 0, 7, 8]]
LOSSES = [
    DecoupledSoftmaxLoss(temperature=0.1),
    DecoupledSoftmaxLoss(normalize="sum", reduction="none"),
    CoupledSoftmaxLoss(),
    SummedSoftmaxLoss(reduction="sum"),
    SoftTopKLoss("positives"),
    SoftTopKLoss(7, alpha=0.8, reduction="none"),
    SoftTopKLoss(torch.tensor([4, 5, 1, 9, 22])),
]


def unit(rows: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, 6, generator=generator, dtype=torch.float64)).to(dtype)


def both(loss: Any, dtype: torch.dtype, chunk_size: int, labels: Any) -> tuple[list[Tensor], ...]:
    """Value and gradients of the plain and of the streamed form."""
    results = []
    for streamed in (False, True):
        q, k = unit(5, dtype).requires_grad_(), unit(23, dtype, 1).requires_grad_()
        value = (
            loss.streamed(q, k, labels, chunk_size=chunk_size)
            if streamed
            else loss(q @ k.T, labels)
        )
        weight = torch.arange(1.0, 6.0, dtype=dtype) if value.dim() else torch.ones((), dtype=dtype)
        results.append([value, *torch.autograd.grad((value * weight).sum(), (q, k))])
    return tuple(results)


@pytest.mark.parametrize("chunk_size", [1, 7, 23, 100])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_equals_the_whole_matrix(loss: Any, chunk_size: int) -> None:
    for ours, theirs in zip(*both(loss, torch.float64, chunk_size, LABELS), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    for ours, theirs in zip(*both(loss, torch.float32, chunk_size, LABELS), strict=True):
        # beside the largest entry: small ones are differences of large ones
        torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-5)


def test_gradients_by_differences() -> None:
    q, k = unit(2).requires_grad_(), unit(5, seed=1).requires_grad_()
    for loss in (DecoupledSoftmaxLoss(temperature=0.5), SoftTopKLoss(2, temperature=0.5)):
        assert torch.autograd.gradcheck(
            lambda q, k, loss=loss: loss.streamed(q, k, [[0], [1, 4]], chunk_size=3), (q, k)
        )


def test_only_the_gradient_that_is_asked_for() -> None:
    q, k = unit(5), unit(23, seed=1)
    loss = DecoupledSoftmaxLoss()
    assert not loss.streamed(q, k, LABELS).requires_grad
    loss.streamed(q.requires_grad_(), k, LABELS).backward()
    assert q.grad is not None
    assert k.grad is None


def test_rows_without_negatives_and_rows_without_labels() -> None:
    q, k = unit(3).requires_grad_(), unit(4, seed=1).requires_grad_()
    labels: list[list[int]] = [[0, 1, 2, 3], [], [2]]
    loss = DecoupledSoftmaxLoss(empty="skip", reduction="none")
    value = loss.streamed(q, k, labels, chunk_size=3)
    torch.testing.assert_close(value, loss(q @ k.T, labels))
    value.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    assert not q.grad[:2].any()
    with pytest.raises(DataError, match="got none in row 1"):
        CoupledSoftmaxLoss().streamed(q, k, labels)


def test_half_precision_is_computed_in_float32() -> None:
    q, k = (x.bfloat16().requires_grad_() for x in (unit(5), unit(23, seed=1)))
    loss = DecoupledSoftmaxLoss()
    value = loss.streamed(q, k, LABELS, chunk_size=4)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(q.float() @ k.float().T, LABELS))
    value.backward()
    assert q.grad is not None
    assert k.grad is not None
    assert q.grad.dtype == k.grad.dtype == torch.bfloat16
    frozen = torch.from_numpy(unit(23, seed=1).numpy().astype(np.float16))  # as a table on disk is
    assert loss.streamed(q, frozen, LABELS).isfinite()


def test_drawn_positives_stay_out_of_the_negatives() -> None:
    loss = DecoupledSoftmaxLoss(sample_positives=1, reduction="none")
    torch.manual_seed(0)
    q, k = unit(5), unit(23, seed=1)
    z = [(q[i] @ k.T / 0.05)[[j for j in range(23) if j not in LABELS[i]]] for i in range(5)]
    seen: set[float] = set()
    for _ in range(40):
        value = loss.streamed(q, k, LABELS, chunk_size=4)
        seen.add(round(float(value[4]), 9))
    expected = {
        round(float(F.softplus(z[4].logsumexp(0) - q[4] @ k[j] / 0.05)), 9) for j in LABELS[4]
    }
    assert seen == expected
    # of 4 relevant labels 2 are drawn, the others leave the row
    two = SoftTopKLoss(2, temperature=1.0, reduction="none")
    values = {round(float(two.streamed(q, k, LABELS)[4]), 7) for _ in range(60)}
    plain = {round(float(two(q @ k.T, LABELS)[4]), 7) for _ in range(60)}
    assert values == plain
    assert len(values) == 6


def test_pairs_are_drawn_evenly() -> None:
    rows = torch.tensor([1, 0, 1, 1, 0, 3])
    torch.manual_seed(0)
    counts = sum(draw_pairs(rows, 1).int() for _ in range(900))
    assert isinstance(counts, Tensor)
    assert counts[5] == 900
    assert int(counts[rows == 0].sum()) == int(counts[rows == 1].sum()) == 900
    assert (counts[rows == 1] > 230).all()
    assert draw_pairs(rows, 3).all()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_every_form_of_labels_gives_the_same_pairs() -> None:
    dense = torch.zeros(5, 23)
    for row, columns in enumerate(LABELS):
        dense[row, columns] = 1.0 if row else 0.25
    device = torch.device("cpu")
    # a matrix may name an entry twice, and may name zeros
    twice = scipy.sparse.coo_matrix(
        (np.r_[dense.numpy().ravel() / 2, dense.numpy().ravel() / 2],
         (np.tile(np.repeat(np.arange(5), 23), 2), np.tile(np.arange(23), 10))), shape=(5, 23)
    )  # fmt: skip
    forms: list[Any] = [
        dense, dense.numpy(), dense.tolist(), scipy.sparse.csr_matrix(dense.numpy()),
        scipy.sparse.csc_array(dense.numpy()), dense.to_sparse_csr(), dense.double().to_sparse(),
        twice,
    ]  # fmt: skip
    for labels in forms:
        pairs = label_pairs(labels, (5, 23), device)
        assert (pairs.columns.diff() >= 0).all()
        matrix = torch.zeros(5, 23)
        matrix[pairs.rows, pairs.columns] = pairs.weights
        torch.testing.assert_close(matrix, dense)
        torch.testing.assert_close(label_matrix(labels, (5, 23), device), dense)


def test_bad_input() -> None:
    q, k = unit(5), unit(23, seed=1)
    loss = DecoupledSoftmaxLoss()
    with pytest.raises(ConfigError, match="chunk_size must be >= 1"):
        loss.streamed(q, k, LABELS, chunk_size=0)
    with pytest.raises(ShapeError, match="keys must have the shape"):
        loss.streamed(q, k[:, :2], LABELS)
    with pytest.raises(DataError, match="at least one query and one key; got 5 and 0"):
        loss.streamed(q, k[:0], LABELS)
    with pytest.raises(DtypeError, match=r"keys must be floating point; got torch\.int64"):
        loss.streamed(q, k.long(), LABELS)
    with pytest.raises(DataError, match="from 0 to 22; got 23 in row 4"):
        loss.streamed(q, k, [*LABELS[:4], [23]])
    with pytest.raises(ShapeError, match=r"\(5, 23\); got \(5, 24\)"):
        loss.streamed(q, k, scipy.sparse.csr_matrix((5, 24)))
    with pytest.raises(DataError, match="negative or NaN"):
        loss.streamed(q, k, scipy.sparse.csr_matrix(-np.ones((5, 23))))
    broken = k.clone()
    broken[9, 0] = math.nan
    for other in (loss, SoftTopKLoss(7)):
        with pytest.raises(DataError, match="must not be NaN"):
            other.streamed(q, broken, LABELS, chunk_size=4)
    with pytest.raises(UnsupportedError, match=r"num_negatives must be None .* got 3"):
        DecoupledSoftmaxLoss(num_negatives=3).streamed(q, k, LABELS)
    with pytest.raises(ConfigError, match="k must be above 0 and below the number of labels"):
        SoftTopKLoss(23).streamed(q, k, LABELS)
    with pytest.raises(ShapeError, match="one for each of 5 rows"):
        SoftTopKLoss(torch.tensor([1, 2])).streamed(q, k, LABELS)
    with pytest.raises(UnsupportedError, match="that can be streamed; got BinaryCrossEntropyLoss"):
        sharded_loss(BinaryCrossEntropyLoss(), q, k, LABELS)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["streamed", "cache"])
def test_warns_once_of_embeddings_that_are_no_unit_vectors(kind: str) -> None:
    q, k = 3 * unit(5), unit(23, seed=1)
    loss = DecoupledSoftmaxLoss()
    with pytest.warns(UserWarning, match=r"temperature 0\.05 is for embeddings of length 1"):
        loss.streamed(q, k, LABELS)
    loss.streamed(q, k, LABELS)
    assert DecoupledSoftmaxLoss(temperature=1.0).streamed(q, k, LABELS).isfinite()
    if kind == "cache":
        linear = torch.nn.Linear(6, 6).double()
        linear.weight.data = 4 * torch.eye(6, dtype=torch.float64)
        with pytest.warns(UserWarning, match="got scores from"):
            GradientCache(linear, DecoupledSoftmaxLoss()).backward(q, k, LABELS)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_matrix_or_the_labels() -> None:
    """512 x 150,000 scores are 0.3 GB, as a dense matrix of labels is; a few chunks are allowed."""
    code = (
        "import resource, scipy.sparse, numpy as np, torch\n"
        "from gossamer.losses import DecoupledSoftmaxLoss, GradientCache\n"
        "table = torch.nn.Embedding(2048, 32)\n"
        "encode = lambda ids: torch.nn.functional.normalize(table(ids % 2048), dim=1)\n"
        "cache = GradientCache(encode, DecoupledSoftmaxLoss(), chunk_size=4096)\n"
        "rows = np.arange(512)\n"
        "for L in (10_000, 150_000):\n"  # the first loads what torch loads late
        "    y = scipy.sparse.csr_matrix((np.ones(512), (rows, rows * 19)), shape=(512, L))\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    cache.backward(torch.arange(512), torch.arange(L), y)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    # freed blocks go back to the system, else the figure is that of the C library's heap
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert int(done.stdout) < 60
