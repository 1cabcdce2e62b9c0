"""The rank audit against closed forms and NumPy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from gossamer.attention import attention_rank
from gossamer.errors import ConfigError, DtypeError, ShapeError
from gossamer.positions import DietAbsolutePositions


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- reference values ---


def test_input_additive_positions_have_the_rank_of_the_head_and_diet_adds_its_own() -> None:
    """n = 128, d = 64, head width 16, rank of the bias 16: 16 against exactly 32."""
    n, d, width, rank = 128, 64, 16, 16
    x, added = draw(n, d), draw(n, d, seed=1)
    to_q, to_k = draw(d, width, seed=2) / 8, draw(d, width, seed=3) / 8

    def project(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (y @ to_q)[None, None], (y @ to_k)[None, None]

    additive = attention_rank(*project(x + added), tol=1e-5)
    assert additive.logit_rank.tolist() == [[16]]

    torch.manual_seed(0)
    diet = DietAbsolutePositions(1, n, rank=rank, init_std=1.0)
    ids = torch.arange(1, n + 1)[None]
    bias = diet.bias(ids, ids, q_index=ids - 1).detach()
    decoupled = attention_rank(*project(x), bias=bias, tol=1e-5)
    assert decoupled.logit_rank.tolist() == [[32]]
    assert attention_rank(*project(x), tol=1e-5).logit_rank.tolist() == [[16]]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_equals_numpy(kv_heads) -> None:
    q, k = draw(2, 2, 9, 4), draw(2, kv_heads, 12, 4, seed=1)
    bias = draw(1, 2, 9, 12, seed=2)
    mask = draw(2, 1, 9, 12, seed=3) > -0.5
    found = attention_rank(q, k, mask, bias=bias, tol=0.1)
    for b, h in np.ndindex(2, 2):
        a, c = q[b, h].double().numpy(), k[b, h * kv_heads // 2].double().numpy()
        logits = a @ c.T / 2 + bias[0, h].double().numpy()
        weights = np.where(mask[b, 0].numpy(), np.exp(logits), 0.0)
        weights /= weights.sum(1, keepdims=True)
        for name, matrix in (("logit", logits), ("weight", weights)):
            s = np.linalg.svd(matrix, compute_uv=False)
            assert int(getattr(found, f"{name}_rank")[b, h]) == (s > 0.1 * s[0]).sum()
            p = s / s.sum()
            effective = float(getattr(found, f"{name}_effective_rank")[b, h])
            assert effective == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-9)


# --- limits ---


def test_equal_singular_values_and_zero() -> None:
    q = torch.eye(4)[None, None]
    found = attention_rank(q, q)
    assert found.logit_rank.tolist() == [[4]]
    assert found.logit_effective_rank.item() == pytest.approx(4.0)
    nothing = attention_rank(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 5, 2))
    assert nothing.logit_rank.item() == 0
    assert nothing.logit_effective_rank.item() == 0.0
    assert nothing.weight_rank.item() == 1  # uniform
    assert nothing.weight_effective_rank.item() == pytest.approx(1.0)


def test_padding_adds_no_rank() -> None:
    q, k = draw(1, 1, 6, 8), draw(1, 1, 6, 8, seed=1)
    real = torch.tensor([0, 0, 1, 1, 1, 1], dtype=torch.bool)
    mask = (real[:, None] & real)[None, None]
    part, whole = attention_rank(q[:, :, 2:], k[:, :, 2:]), attention_rank(q, k, mask)
    for name, value in vars(whole).items():
        torch.testing.assert_close(value, getattr(part, name))


def test_result_is_plain() -> None:
    report = attention_rank(draw(2, 3, 5, 4), draw(2, 3, 5, 4, seed=1))
    table = json.loads(json.dumps(report.to_dict()))
    assert len(table["weight_rank"]) == 2
    assert len(table["weight_rank"][0]) == 3
    rows = report.rows()
    assert len(rows) == 6
    assert rows[4]["sample"] == 1
    assert rows[4]["head"] == 1
    assert rows[4]["logit_effective_rank"] == table["logit_effective_rank"][1][1]
    assert 1 <= rows[4]["logit_effective_rank"] <= math.nextafter(4, 5)


# --- bad input ---


def test_bad_input() -> None:
    q, k = draw(1, 2, 5, 4), draw(1, 2, 7, 4, seed=1)
    with pytest.raises(ShapeError, match=r"bias must broadcast to the logits.*\(1, 2, 5, 7\)"):
        attention_rank(q, k, bias=torch.zeros(1, 2, 5, 6))
    with pytest.raises(ShapeError, match="mask must broadcast"):
        attention_rank(q, k, torch.ones(3, 1, 5, 7, dtype=torch.bool))
    with pytest.raises(DtypeError, match="mask must be boolean"):
        attention_rank(q, k, torch.ones(5, 7))
    with pytest.raises(ConfigError, match="tol must be"):
        attention_rank(q, k, tol=0.0)
    with pytest.raises(ShapeError, match="q must have the shape"):
        attention_rank(q[0], k)
