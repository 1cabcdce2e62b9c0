"""The Spark recipe on tiny settings: every arm gives its numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gossamer.layers import sparsity_report
from gossamer.recipes import build_config, find_recipe
from gossamer.recipes._sparse_layers import ExactTopK, GateTopK, SquaredRelu, decode_runs
from gossamer.recipes._timing import cpu_medians
from gossamer.train.logging import NoLogger

RECIPE = find_recipe("spark")
TINY = {
    "length": 8,
    "dim": 16,
    "hidden_dim": 60,
    "batch_size": 4,
    "steps": 4,
    "test_tokens": 256,
    "decode_dim": 24,
    "decode_hidden": 90,
    "decode_predictor": 10,
    "decode_repeats": 2,
}


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_every_arm_gives_what_table_and_claims_ask(arm: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    config = build_config(RECIPE.scales["small"], {**TINY, "text": str(text)}, "tiny")
    outcome = RECIPE.run(config, arm, 0, NoLogger())
    asked = {claim.metric for claim in RECIPE.claims if claim.ours == arm}
    assert asked <= set(outcome.scalars)
    assert all(math.isfinite(value) for value in outcome.scalars.values())
    assert set(outcome.scalars) <= {column.name for column in RECIPE.columns}
    kinds = {row["what"] for row in outcome.rows}
    assert kinds == {"spark": {"share", "decode"}, "spark_calibrated": {"share"}}.get(arm, set())


def test_baselines_are_their_formulas() -> None:
    x = torch.randn(5, 8)
    exact = ExactTopK(8, 30, 4)
    scores = x @ exact.up.weight.T
    kept = scores >= scores.topk(4, dim=-1).values[:, -1:]
    expected = torch.where(kept, torch.nn.functional.gelu(scores, approximate="tanh"), 0.0)
    torch.testing.assert_close(exact(x), expected @ exact.down.weight.T)
    square = SquaredRelu(8, 30)
    hidden = (x @ square.up.weight.T).clamp(min=0) ** 2
    torch.testing.assert_close(square(x), hidden @ square.down.weight.T)
    gate = GateTopK(8, 30, 1.0)
    hidden = torch.nn.functional.gelu(x @ gate.gate.weight.T, approximate="tanh")
    expected = (hidden * (x @ gate.up.weight.T)) @ gate.down.weight.T
    torch.testing.assert_close(gate(x), expected)
    report = sparsity_report(torch.nn.Sequential(exact), [x])
    assert abs(report.layers["0"].active - 4 / 30) < 1e-6


def test_dense_routes_that_are_compared_give_the_same() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        dense, sparse = decode_runs(24, 90, 10, 9, dtype)
        torch.manual_seed(1)
        with torch.no_grad():
            outs = []
            for run in dense.values():
                torch.manual_seed(2)
                outs.append(run())
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], atol=1e-2, rtol=1e-2)
        assert all(seconds >= 0 for seconds in cpu_medians(sparse, repeats=1).values())
