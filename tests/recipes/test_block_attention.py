"""The recipe on block attention: its oracle, its ratios, and every arm."""

from __future__ import annotations

import pytest
import torch

from gossamer.attention import BlockLayout
from gossamer.recipes import block_attention as recipe
from gossamer.recipes.block_attention import RECIPE, Config, errors_of, oracle, run, times_of
from gossamer.train.logging import NoLogger

from ..attention.block_reference import REFERENCE

TINY = Config(
    tokens=6, documents=(1, 2, 4), full_documents=(1, 2), dense_documents=(1, 2), heads=4,
    head_dim=8, repeats=1, checked_documents=3,
)  # fmt: skip


# --- reference values ---


def test_the_oracle_is_the_reference() -> None:
    layout = BlockLayout(REFERENCE["lengths"].tolist(), pad_multiple=1)
    q, k, v = (torch.from_numpy(REFERENCE[name])[None] for name in "qkv")
    out, scores = oracle(q, k, v, layout)
    torch.testing.assert_close(out[0], torch.from_numpy(REFERENCE["out"]))
    torch.testing.assert_close(scores[0], torch.from_numpy(REFERENCE["doc_scores"]))


@pytest.mark.parametrize("arm", ["merge", "sdpa"])
def test_a_wrong_form_is_seen(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.attention import _block_engines

    right = getattr(_block_engines, arm)
    monkeypatch.setattr(_block_engines, arm, lambda *args: right(*args) * 1.001)
    found = errors_of(arm, TINY, torch.Generator().manual_seed(0))
    assert found["output_error"] > 1e-4
    assert found["error"] >= found["output_error"]
    assert found["score_error"] < 1e-6


def test_times_are_ratios_of_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    costs = {1: [9.0, 1.0, 1.0, 5.0], 2: [9.0, 2.0, 2.0, 2.0], 4: [9.0, 8.0, 5.0, 4.0]}

    def passes(arm: str, config: Config, documents: int, generator: object):
        left = list(costs[documents])

        def one() -> None:
            clock[0] += left.pop(0)

        def whole() -> None:
            clock[0] += 30.0

        return (whole if arm == "full" else one), whole

    monkeypatch.setattr(recipe, "passes_of", passes)
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    config = Config(repeats=3)
    # the first pass is a warm-up, full attention is compared at the last size but one
    assert times_of("merge", config, (1, 2, 4), None) == ({1: 1.0, 2: 2.0, 4: 5.0}, 15.0)
    assert times_of("dense", config, (1, 2), None) == ({1: 1.0, 2: 2.0}, 15.0)
    assert times_of("full", config, (1, 2), None) == ({1: 30.0, 2: 30.0}, None)


# --- arms ---


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_an_arm_gives_what_the_claims_ask_for(arm: str) -> None:
    outcome = run(TINY, arm, 0, NoLogger())
    wanted = {claim.metric for claim in RECIPE.claims if claim.ours == arm}
    assert wanted <= set(outcome.scalars) <= {column.name for column in RECIPE.columns}
    assert all({"documents", "seconds"} == set(row) for row in outcome.rows)
    if wanted:
        assert outcome.scalars["error"] < 1e-5
    assert ("gradient_error" in outcome.scalars) == (arm == "sdpa")


def test_the_scales_compare_at_the_sizes_of_the_claims() -> None:
    small = RECIPE.scales["small"]
    assert small.documents[-2:] == (100, 200)
    assert (small.tokens, small.heads, small.head_dim) == (160, 8, 128)
