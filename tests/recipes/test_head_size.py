"""The parts of the recipe on head size: arms, the fit of one head, the learned mixture."""

from __future__ import annotations

import math

import pytest
import torch

from gossamer.attention import MultiHeadAttention
from gossamer.recipes._mixing import TalkingHeads, fit_head, mixing_layer, train_mixing
from gossamer.recipes.head_size import RECIPE, Config, flops, layers_of, run, summary
from gossamer.train.logging import NoLogger

TINY = Config(
    fit_length=4, fit_dim=6, head_dims=(2, 3, 4), starts=1, max_iter=5, length=32, content=32,
    steps=2, batch_size=2,
)  # fmt: skip


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_every_arm_gives_what_its_claims_need(arm: str) -> None:
    outcome = run(TINY, arm, 0, NoLogger())
    needed = {c.metric for c in RECIPE.claims if arm in (c.ours, *c.baselines)}
    assert needed - {"divergence_4"} <= set(outcome.scalars)
    assert set(outcome.scalars) - {"divergence_3"} <= {column.name for column in RECIPE.columns}
    assert all(math.isfinite(value) for value in outcome.scalars.values())


def test_sizes_are_those_that_the_claims_name() -> None:
    config = Config()
    counts = {}
    for arm in ("standard", "fixed"):
        for heads, head_dim in layers_of(arm, config):
            layer = mixing_layer(arm, 64, 32, heads, head_dim)
            counts[heads, head_dim] = sum(p.numel() for p in layer.parameters())
    assert counts[4, 16] == counts[2, 32] == counts[32, 2] == 14_336
    assert counts[1, 32] == 7_168
    assert counts[16, 32] == 114_688
    grouped = mixing_layer("grouped", 64, 32, 16, 32)
    assert grouped.num_kv_heads == 4


def test_fit_is_exact_where_the_theorem_says_so() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    target = (2 * torch.randn(5, 5, generator=generator, dtype=torch.float64)).softmax(0)
    found = [
        fit_head(x, target, size, starts=1, max_iter=40, generator=generator)
        for size in (1, 2, 4, 5)
    ]
    assert found[0] > found[1] > 1e-3
    assert max(found[2:]) < 1e-9


def test_a_descent_lowers_the_divergence_of_the_best_logits() -> None:
    from gossamer.attention import realize_attention

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    target = (2 * torch.randn(6, 6, generator=generator, dtype=torch.float64)).softmax(0)
    to_q, to_k, _ = realize_attention(x, target, 2)
    start = ((to_k @ x).mT @ (to_q @ x) / 2**0.5).log_softmax(0)
    before = float((target * (target.log() - start)).sum(0).mean())
    assert 0 < fit_head(x, target, 2, starts=0, max_iter=40, generator=generator) < before


def test_talking_heads_start_as_plain_attention_and_mix() -> None:
    torch.manual_seed(0)
    talking, plain = TalkingHeads(8, 2, head_dim=4), MultiHeadAttention(8, 2)
    plain.load_state_dict(talking.state_dict(), strict=False)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(talking(x), plain(x))
    with torch.no_grad():
        talking.mix_logits.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        talking.mix_weights.copy_(talking.mix_logits)
    torch.testing.assert_close(talking(x), plain(x))  # changing places twice changes nothing
    with torch.no_grad():
        talking.mix_weights.copy_(torch.eye(2))
    assert (talking(x) - plain(x)).abs().max() > 1e-4


def test_training_lowers_the_error() -> None:
    generator = torch.Generator().manual_seed(0)
    target = (2 * torch.randn(6, 6, generator=generator)).softmax(-1)
    errors = []
    for steps in (1, 200):
        torch.manual_seed(0)
        layer = mixing_layer("standard", 12, 6, 1, 12)
        found = train_mixing(
            layer, target, steps=steps, batch_size=16, lr=2e-2, generator=generator
        )
        errors.append(found["error"])
    assert errors[1] < 0.2 * errors[0]
    assert 1 <= found["logit_rank"] <= 6


def test_flops_and_summaries() -> None:
    layer = mixing_layer("standard", 12, 6, 2, 4)
    weights = 3 * 12 * 8 + 8 * 6
    assert flops(layer, 5) == 2 * 5 * weights + 4 * 5 * 5 * 8
    found = summary("standard", {1: 0.1, 4: 0.2, 8: 0.1, 32: 3.0})
    assert found == {"growth": pytest.approx(30), "least_step": 0.5, "equal": 0.2}
    found = summary("fixed", {1: 9.0, 2: 0.4, 4: 0.2, 16: 0.1})
    assert found == {"least_step": 2.0, "equal": 0.4}
