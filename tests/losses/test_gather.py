"""Two processes against one: gathered rows, and labels split between processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.errors import DataError, ShapeError
from gossamer.losses import (
    CoupledSoftmaxLoss,
    DecoupledSoftmaxLoss,
    SoftTopKLoss,
    SummedSoftmaxLoss,
    gather_with_grad,
    sharded_loss,
)

# 11 labels in parts of 6 and 5: relevant ones at both sides of the border, first and last
LABELS = [[0, 5], [5, 6], [10], [6, 4, 9], [1]]
ROWS, COLUMNS = (3, 2), (6, 5)
LOSSES: list[Any] = [
    DecoupledSoftmaxLoss(),
    DecoupledSoftmaxLoss(normalize="sum", reduction="none"),
    CoupledSoftmaxLoss(reduction="sum"),
    SummedSoftmaxLoss(),
    SoftTopKLoss(4),
    SoftTopKLoss("positives"),
]


def data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(7, 4).double()
    return model, torch.randn(5, 7, dtype=torch.float64), torch.randn(11, 7, dtype=torch.float64)


def backward(loss: Any, value: Tensor, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    (value * torch.arange(1.0, 6.0) if value.dim() else value).sum().backward()
    return value.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def part(lengths: tuple[int, ...], rank: int) -> slice:
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def work(rank: int, folder: str) -> None:
    """What one of the two processes does; it writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model, x, y = data()
    found: dict[str, Any] = {}
    rows, columns = part(ROWS, rank), part(COLUMNS, rank)
    for number, loss in enumerate(LOSSES):
        q = F.normalize(model(x[rows]), dim=1)
        k = F.normalize(model(y[columns]), dim=1)
        value = sharded_loss(loss, q, k, LABELS[rows], chunk_size=4)
        found[f"loss {number}"] = backward(loss, value, model)
    leaf = torch.arange(3.0 * (1 + rank)).reshape(-1, 3).requires_grad_()  # 1 row and 2 rows
    whole = gather_with_grad(leaf)
    (whole * (rank + 1) * torch.arange(9.0).reshape(3, 3)).sum().backward()
    found["gather"] = whole.detach(), leaf.grad
    none = gather_with_grad(torch.ones(2 * rank, 2))
    found["empty part"] = none.shape
    try:  # NaN at one process is an error at both
        broken = torch.full((3, 4), float("nan") if rank else 0.0)
        sharded_loss(DecoupledSoftmaxLoss(), torch.ones(1, 4), broken, [[0]])
    except DataError as error:
        found["error"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_two_processes_give_what_one_gives(found: list[dict[str, Any]], number: int) -> None:
    model, x, y = data()
    loss = LOSSES[number]
    scores = F.normalize(model(x), dim=1) @ F.normalize(model(y), dim=1).T
    value, gradients = backward(loss, loss(scores, LABELS), model)
    one, two = (each[f"loss {number}"] for each in found)
    torch.testing.assert_close(one[0], value, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(two[0], value, atol=1e-10, rtol=1e-10)
    for first, second, expected in zip(one[1], two[1], gradients, strict=True):
        torch.testing.assert_close(first + second, expected, atol=1e-9, rtol=1e-9)
        assert not torch.allclose(first, expected)  # each has its own part of the gradient


@pytest.mark.slow
def test_rows_of_all_processes_and_the_way_back(found: list[dict[str, Any]]) -> None:
    weights = torch.arange(9.0).reshape(3, 3)
    for rank, each in enumerate(found):
        whole, gradient = each["gather"]
        expected = torch.cat([torch.arange(3.0)[None], torch.arange(6.0).reshape(2, 3)])
        assert torch.equal(whole, expected)
        assert torch.equal(gradient, 3 * weights[part((1, 2), rank)])  # 1 + 2 times
        assert each["empty part"] == (2, 2)


@pytest.mark.slow
def test_a_fault_of_one_process_ends_both(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "must not be NaN" in each["error"]


def test_alone_it_is_what_it_is() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert torch.equal(gather_with_grad(x), x)
    (gather_with_grad(x) * 2).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3, 2), 2.0))
    q, k = F.normalize(torch.randn(5, 4)), F.normalize(torch.randn(11, 4))
    for loss in LOSSES:
        torch.testing.assert_close(sharded_loss(loss, q, k, LABELS), loss(q @ k.T, LABELS))
    with pytest.raises(ShapeError, match="axis of rows; got a scalar"):
        gather_with_grad(torch.tensor(1.0))
