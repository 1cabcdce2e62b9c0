"""ALiBi: slopes for any number of heads, any positions, both directions."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError
from gossamer.positions import AlibiPositions, alibi_slopes
from tests.conftest import DATA

REFERENCE = json.loads((DATA / "length-task-fixtures" / "position_bias.json").read_text())

# --- reference values ---


@pytest.mark.parametrize("heads", sorted(REFERENCE["alibi_slopes"], key=int))
def test_alibi_slopes(heads: str) -> None:
    expected = torch.tensor(REFERENCE["alibi_slopes"][heads], dtype=torch.float32)
    torch.testing.assert_close(alibi_slopes(int(heads)), expected, atol=1e-7, rtol=1e-6)


def test_alibi_bias_by_hand() -> None:
    ids = torch.tensor([[0, 1, 3, 7]])
    bias = AlibiPositions(2, bidirectional=True).bias(ids, ids, q_index=ids)
    slopes = np.array([2.0**-4, 2.0**-8])
    p = np.array([0, 1, 3, 7])
    distance = np.abs(p[:, None] - p[None]) * ((p > 0)[:, None] & (p > 0)[None])
    np.testing.assert_allclose(bias[0].numpy(), -slopes[:, None, None] * distance, rtol=1e-6)
    causal = AlibiPositions(2).bias(ids, ids, q_index=ids)
    assert causal[0, 0, 1, 2] == 0
    assert causal[0, 0, 2, 1] == -2 * 2.0**-4


# --- limits and invariances ---


@pytest.mark.parametrize("heads", range(1, 34))
def test_any_number_of_heads_decays(heads: int) -> None:
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,)
    assert ((slopes > 0) & (slopes < 1)).all()
    assert len(set(slopes.tolist())) == heads


@pytest.mark.parametrize("bidirectional", [False, True])
def test_only_differences_count(bidirectional: bool) -> None:
    alibi = AlibiPositions(3, bidirectional=bidirectional)
    ids = torch.tensor([[5, 1, 9, 9, 30]])
    near, far = (alibi.bias(i, i, q_index=i) for i in (ids, ids + 1000))
    assert torch.equal(near, far)


# --- bad input ---


@pytest.mark.parametrize("heads", [0, -1, 2.0, True])
def test_bad_head_counts(heads: object) -> None:
    with pytest.raises(ConfigError, match="num_heads"):
        AlibiPositions(heads)
    with pytest.raises(ConfigError, match="num_heads"):
        alibi_slopes(heads)
