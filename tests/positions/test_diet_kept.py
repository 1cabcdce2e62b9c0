"""What the absolute form of DIET keeps in evaluation, and what makes it forget."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch

from gossamer.attention import attend
from gossamer.positions import DietAbsolutePositions, diet
from tests.positions.test_diet import PLAIN, absolute, bias


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often the product is made."""
    made: list[int] = []
    plain = diet._multiply

    def counted(*args: object) -> torch.Tensor:
        made.append(1)
        return plain(*args)

    monkeypatch.setattr(diet, "_multiply", counted)
    return made


@torch.no_grad()
def test_the_product_is_made_once_in_evaluation(products: list[int]) -> None:
    positions = absolute(2, 8).eval()
    first = bias(positions, PLAIN)
    kept = first.clone()
    first.fill_(-math.inf)  # what a caller writes must not reach what is kept
    assert torch.equal(bias(positions, PLAIN), kept)
    assert len(products) == 1
    assert torch.equal(bias(positions, PLAIN[:, :4]), kept[:, :, :4, :4])
    assert len(products) == 2
    positions.train()
    bias(positions, PLAIN)
    bias(positions, PLAIN)
    assert len(products) == 4


def test_gradients_never_meet_what_is_kept(products: list[int]) -> None:
    positions = absolute(2, 8).eval()
    with torch.no_grad():
        bias(positions, PLAIN)
    bias(positions, PLAIN).sum().backward()
    assert positions.query.grad.any()
    assert len(products) == 2


@torch.no_grad()
def test_a_new_query_computes_its_row_alone(products: list[int]) -> None:
    positions = absolute(2, 8).eval()
    whole = bias(positions, PLAIN)
    products.clear()
    row = bias(positions, PLAIN[:, 5:], PLAIN)
    torch.testing.assert_close(row, whole[:, :, 5:])
    assert not products


def _step(positions: DietAbsolutePositions) -> None:
    optimizer = torch.optim.SGD(positions.parameters(), lr=0.1)
    positions.query.grad = torch.ones_like(positions.query)
    optimizer.step()


def _load(positions: DietAbsolutePositions, assign: bool) -> None:
    state = {key: value + 1.0 for key, value in positions.state_dict().items()}
    positions.load_state_dict(state, assign=assign)


CHANGES = {
    "optimizer": _step,
    "load": lambda positions: _load(positions, assign=False),
    "assign": lambda positions: _load(positions, assign=True),
    "data": lambda positions: (positions.key.data.add_(1.0), positions.eval()),
    "train and back": lambda positions: (
        positions.train(), positions.key.data.add_(1.0), positions.eval(),
    ),
    "other parameter": lambda positions: setattr(
        positions, "query", torch.nn.Parameter(positions.query + 1.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_product_is_made_anew_after(change: str) -> None:
    positions = absolute(2, 8).eval()
    with torch.no_grad():
        before = bias(positions, PLAIN)
    CHANGES[change](positions)
    with torch.no_grad():
        after = bias(positions, PLAIN)
        torch.testing.assert_close(after[0], positions.query[:, :6] @ positions.key[:, :6].mT)
    assert (after - before).abs().max() > 0.01


@torch.no_grad()
def test_a_change_of_dtype_is_seen() -> None:
    positions = absolute(2, 8).float().eval()
    assert bias(positions, PLAIN).dtype == torch.float32
    assert bias(positions.double(), PLAIN).dtype == torch.float64
    half = bias(positions.bfloat16(), PLAIN)
    assert half.dtype == torch.float32
    rounded = positions.query[:, :6].float() @ positions.key[:, :6].float().mT
    torch.testing.assert_close(half[0], rounded)


@torch.no_grad()
def test_copies_keep_nothing() -> None:
    positions = absolute(2, 8).eval()
    positions.query.add_(0.0).add_(0.0)
    bias(positions, PLAIN)
    twin = copy.deepcopy(positions)
    buffer = io.BytesIO()
    torch.save(positions, buffer)
    buffer.seek(0)
    for other in (twin, torch.load(buffer, weights_only=False)):
        other.query.mul_(0.0).add_(0.0)  # as many versions as the original
        assert not bias(other, PLAIN).any()
    assert bias(positions, PLAIN).any()


@torch.no_grad()
def test_replaced_parameters_are_seen() -> None:
    positions = absolute(2, 8).eval()
    positions.forward = bias.__get__(positions)  # type: ignore[method-assign]
    for value in (1.0, 2.0):
        tables = {key: torch.full_like(t, value) for key, t in positions.state_dict().items()}
        out = torch.func.functional_call(positions, tables, (PLAIN,))
        assert torch.equal(out, torch.full_like(out, 3 * value**2))


def test_inference_mode() -> None:
    with torch.inference_mode():
        made_inside = absolute(2, 8).eval()
        inside = bias(made_inside, PLAIN)
    positions = absolute(2, 8).eval()
    with torch.inference_mode():
        first = bias(positions, PLAIN)
    with torch.no_grad():
        second = bias(positions, PLAIN) + 0.0
    assert torch.equal(first, second)
    assert torch.equal(inside, first)
    # what was kept under inference_mode serves a graph that learns something else
    positions.requires_grad_(False)
    q = torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    attend(q, q, q, bias=bias(positions, PLAIN)).sum().backward()
    assert torch.isfinite(q.grad).all()
