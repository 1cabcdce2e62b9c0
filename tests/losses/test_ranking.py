"""The ranking loss: its fixed values, its gradient, and how far into a model it reaches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.attention import BlockLayout, block_scores
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.losses import BlockRankingLoss, SummedSoftmaxLoss


def shares(rows: int = 4, documents: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, documents, generator=generator, dtype=torch.float64).softmax(1)


# --- reference values ---


def test_the_formula() -> None:
    scores, relevant = shares(), [[0], [1, 3], [5], [0, 1, 2]]
    rows = []
    for s, p in zip(scores.numpy() / 0.05, relevant, strict=True):
        e = np.exp(s - s.max())
        rows.append(-math.log(e[p].sum() / e.sum()))
    found = BlockRankingLoss(reduction="none")(scores, relevant)
    np.testing.assert_allclose(found.numpy(), rows, rtol=1e-12)
    assert math.isclose(float(BlockRankingLoss()(scores, relevant)), np.mean(rows))
    assert math.isclose(float(BlockRankingLoss(reduction="sum")(scores, relevant)), sum(rows))


@pytest.mark.parametrize("documents", [1, 2, 30, 500])
def test_equal_scores_give_the_logarithm_of_the_number_of_documents(documents: int) -> None:
    equal = torch.full((2, documents), 1.0 / documents, dtype=torch.float64)
    assert math.isclose(
        float(BlockRankingLoss()(equal, [[0], [documents - 1]])), math.log(documents), abs_tol=1e-12
    )


def test_nothing_is_left_to_learn_when_all_are_relevant() -> None:
    assert float(BlockRankingLoss()(shares(), torch.ones(4, 6))) == pytest.approx(0, abs=1e-12)


def test_the_least_value_is_reached_when_one_document_has_all_attention() -> None:
    scores = torch.eye(5, dtype=torch.float64)[:1]
    least = math.log(1 + 4 * math.exp(-20))
    assert math.isclose(float(BlockRankingLoss()(scores, [[0]])), least, rel_tol=1e-6)


def test_without_a_mask_it_is_the_logarithm_of_summed_probabilities() -> None:
    labels = [[0], [1, 3], [5], [0, 1, 2]]
    torch.testing.assert_close(
        BlockRankingLoss(temperature=0.1)(shares(), labels),
        SummedSoftmaxLoss(temperature=0.1)(shares(), labels),
    )


# --- invariances ---


def test_what_a_mask_leaves_out_changes_nothing() -> None:
    scores = shares().requires_grad_()
    wide = torch.cat((scores, torch.full((4, 2), 0.9, dtype=torch.float64)), dim=1)
    mask = torch.arange(8).expand(4, 8) < 6
    labels = [[0], [1, 3], [5], [2]]
    padded = BlockRankingLoss()(wide, labels, mask=mask)
    plain = BlockRankingLoss()(scores, labels)
    torch.testing.assert_close(padded, plain)
    grads = [torch.autograd.grad(loss, scores)[0] for loss in (padded, plain)]
    torch.testing.assert_close(*grads)


def test_half_precision_scores_are_computed_in_float32() -> None:
    assert BlockRankingLoss()(shares().bfloat16(), [[0]] * 4).dtype == torch.float32


# --- gradients ---


def test_gradient() -> None:
    labels = torch.tensor([[1, 0, 0, 1, 0, 0]] * 4)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2, 5] = False

    def loss(x: Tensor) -> Tensor:
        return BlockRankingLoss()(x.softmax(1), labels, mask=mask)

    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (x,))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_teaches_queries_and_keys_up_to_its_layer(checkpointing: bool) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from gossamer.models import register_block_attention

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=14, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    model.set_attn_implementation(register_block_attention())
    if checkpointing:
        new = getattr(model, "activation_checkpointing_enable", None)  # renamed within version 5
        enable = new or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        model.train()
    layout = BlockLayout([4, 3, 5, 3, 4], pad_multiple=4)
    ids = layout.position_ids(40)[None].expand(2, -1)
    tokens = torch.randint(14, (2, layout.num_tokens))
    signals: dict[int, Tensor | None] = {1: None}
    model(tokens, position_ids=ids, block_layout=layout, block_signals=signals, use_cache=False)
    logits = signals[1]
    assert logits is not None
    BlockRankingLoss()(block_scores(logits, layout), [[0], [2]]).backward()
    for number, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj"):
            grad = getattr(layer.self_attn, name).weight.grad
            reached = grad is not None and bool(grad.abs().max() > 0)
            assert reached == (number <= 1), f"layer {number}, {name}"


# --- bad input ---


def test_options_out_of_range() -> None:
    with pytest.raises(ConfigError, match="temperature must be > 0"):
        BlockRankingLoss(temperature=0.0)
    with pytest.raises(ConfigError, match="unknown reduction"):
        BlockRankingLoss(reduction="max")


def test_scores_and_labels_that_do_not_fit() -> None:
    loss = BlockRankingLoss()
    with pytest.raises(DataError, match="every row must have a relevant label; got none in row 1"):
        loss(shares(2), [[0], []])
    with pytest.raises(DataError, match="indices from 0 to 5; got 6"):
        loss(shares(1), [[6]])
    with pytest.raises(ShapeError, match="must have the shape"):
        loss(shares(2), torch.ones(2, 5))
    with pytest.raises(DataError, match="must not hold NaN"):
        loss(torch.full((1, 3), float("nan")), [[0]])
    with pytest.raises(DtypeError, match="must be floating point"):
        loss(torch.ones(1, 3, dtype=torch.long), [[0]])


def test_masks_that_do_not_fit() -> None:
    loss = BlockRankingLoss()
    mask = torch.ones(1, 6, dtype=torch.bool)
    with pytest.raises(DtypeError, match="mask must be boolean"):
        loss(shares(1), [[0]], mask=mask.int())
    with pytest.raises(ShapeError, match="mask must have the shape"):
        loss(shares(1), [[0]], mask=mask[:, 1:])
    mask[0, 2] = False
    with pytest.raises(DataError, match="got document 2 of row 0, which the mask leaves out"):
        loss(shares(1), [[2]], mask=mask)
