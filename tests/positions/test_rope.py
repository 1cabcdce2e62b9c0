"""RoPE: angles against the reference, and what only differences may do."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError
from gossamer.models import Decoder
from gossamer.positions import RopePositions
from gossamer.tasks import AdditionTask
from tests.conftest import DATA

REFERENCE = json.loads((DATA / "length-task-fixtures" / "position_bias.json").read_text())

# --- reference values ---


@pytest.mark.parametrize("row", REFERENCE["rope"], ids=lambda row: f"{row['pos']}-{row['theta']:g}")
def test_rope_angles(row: dict) -> None:
    half = row["head_dim"] // 2
    rope = RopePositions(row["head_dim"], theta=row["theta"])
    ids = torch.tensor([[row["pos"] + 1]])
    q = torch.cat((torch.ones(half), torch.zeros(half))).view(1, 1, 1, -1)
    turned, _ = rope.rotate(q, q, ids, ids, q_index=ids)
    np.testing.assert_allclose(turned[0, 0, 0, :half].numpy(), row["cos"], atol=1e-4)
    np.testing.assert_allclose(turned[0, 0, 0, half:].numpy(), row["sin"], atol=1e-4)


# --- limits and invariances ---


@torch.no_grad()
def test_rope_logits_depend_on_the_difference_only() -> None:
    rope = RopePositions(16, theta=100.0)
    q = torch.randn(1, 2, 5, 16)
    ids = torch.tensor([[1, 4, 4, 9, 30]])
    near = rope.rotate(q, q, ids, ids, q_index=ids)
    far = rope.rotate(q, q, ids + 70, ids + 70, q_index=ids)
    torch.testing.assert_close(near[0] @ near[1].mT, far[0] @ far[1].mT, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(near[0].norm(dim=-1), q.norm(dim=-1))


def test_rope_scale_interpolates() -> None:
    q = torch.randn(1, 1, 1, 8)
    half = RopePositions(8, scale=0.5).rotate(
        q, q, torch.tensor([[21]]), torch.tensor([[21]]), q_index=q
    )
    whole = RopePositions(8).rotate(q, q, torch.tensor([[11]]), torch.tensor([[11]]), q_index=q)
    torch.testing.assert_close(half[0], whole[0])


@torch.no_grad()
def test_angles_come_from_coupled_ids() -> None:
    """Tokens with equal ids turn alike, wherever they stand, and id 0 does not turn."""
    task = AdditionTask()
    example = task.example("653+49")
    ids = example.position_ids[None]
    rope = RopePositions(8, theta=100.0)
    q = torch.ones(1, 1, ids.shape[1], 8)
    turned, _ = rope.rotate(q, q, ids, ids, q_index=torch.arange(ids.shape[1])[None])
    for position, number in enumerate(ids[0].tolist()):
        angles = max(number - 1, 0) * 100.0 ** (-np.arange(4) / 4)
        expected = np.concatenate(
            (np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles))
        )
        np.testing.assert_allclose(turned[0, 0, position].numpy(), expected, atol=1e-5)


@torch.no_grad()
def test_a_model_reads_coupled_ids_when_told_to() -> None:
    torch.manual_seed(0)
    model = Decoder(14, 32, 1, 4, positions={"name": "rope", "ids": "task"}).eval()
    task = AdditionTask()
    tokens = task.example("653+49").tokens[None]
    ids, moved = (task.position_ids("653+49", start=s)[None] for s in (1, 5))
    assert (model(tokens, ids) - model(tokens, torch.arange(1, ids.shape[1] + 1)[None])).any()
    # the digits turn by 4 more, id 0 stays: not a pure shift, so the logits differ
    assert (model(tokens, ids) - model(tokens, moved)).abs().max() > 1e-4


# --- gradients ---


def test_gradient_of_the_rotation() -> None:
    rope = RopePositions(4)
    ids = torch.tensor([[0, 1, 7]])
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    turned, _ = rope.rotate(q, q, ids, ids, q_index=ids)
    weight = torch.randn_like(turned)
    (grad,) = torch.autograd.grad((turned * weight).sum(), q)
    # a rotation is orthogonal: its gradient is the turn back
    back, _ = rope.rotate(grad, grad, ids, ids, q_index=ids)
    torch.testing.assert_close(back, weight)


# --- bad input ---


@pytest.mark.parametrize(
    "options", [{"head_dim": 3}, {"head_dim": 0}, {"theta": 1.0}, {"scale": 0.0}]
)
def test_bad_options(options: dict) -> None:
    with pytest.raises(ConfigError):
        RopePositions(**{"head_dim": 4, **options})
