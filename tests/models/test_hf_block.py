"""Block attention in models of transformers, against the same models under a whole mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from gossamer.attention import BlockLayout, block_scores
from gossamer.errors import ConfigError, DataError, ShapeError, UnsupportedError
from gossamer.models import block_signals, register_block_attention

from .hf_models import CACHE, VOCAB, make

KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
LENGTHS = [4, 3, 5, 3, 4]
OFFSET = 40
SIZES = {"max_position_embeddings": 64, "num_hidden_layers": 3}


def blocks_of(kind: str, **options: Any) -> Any:
    model = make(kind, **{**SIZES, **options})
    model.set_attn_implementation(register_block_attention())
    return model


def prompt(layout: BlockLayout, batch: int = 2) -> Tensor:
    maker = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, VOCAB, (batch, sum(layout.lengths)), generator=maker)
    slots = torch.zeros(batch, layout.num_tokens, dtype=torch.long)
    slots[:, layout.real()] = tokens
    return slots


def placed(layout: BlockLayout, batch: int = 2) -> dict[str, Any]:
    ids = layout.position_ids(OFFSET)[None].expand(batch, -1)
    return {"position_ids": ids, "block_layout": layout}


def masked(kind: str, layout: BlockLayout, tokens: Tensor, **options: Any) -> Any:
    """Run the model under the whole mask, by transformers' own attention."""
    model = make(kind, **SIZES, **options)
    mask = layout.mask()[None, None].expand(len(tokens), 1, -1, -1)
    if options.get("attn_implementation") == "eager":  # which adds its mask
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e30)
    ids = layout.position_ids(OFFSET)[None].expand(len(tokens), -1)
    wanted = {"output_attentions": options.get("attn_implementation") == "eager"}
    return model, model(tokens, attention_mask=mask, position_ids=ids, **wanted)


# --- reference values ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pad_multiple", [1, 4])
def test_logits_and_gradients_are_those_of_the_whole_mask(kind: str, pad_multiple: int) -> None:
    layout = BlockLayout(LENGTHS, pad_multiple=pad_multiple)
    tokens, real = prompt(layout), layout.real()
    reference, expected = masked(kind, layout, tokens, attn_implementation="sdpa")
    model = blocks_of(kind)
    with torch.no_grad():
        quick = model(tokens, **placed(layout)).logits
    found = model(tokens, attention_mask=real.expand(2, -1), **placed(layout)).logits
    torch.testing.assert_close(found[:, real], expected.logits[:, real])
    torch.testing.assert_close(quick[:, real], expected.logits[:, real])
    for logits in (found, expected.logits):
        logits[:, real].sin().sum().backward()
    for (name, a), (_, b) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        if a.grad is not None or b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("early_exit", [True, False])
def test_signals_give_the_attention_weights_on_documents(kind, layer, early_exit) -> None:
    layout = BlockLayout(LENGTHS)
    tokens = prompt(layout)
    _, reference = masked(kind, layout, tokens, attn_implementation="eager")
    model = blocks_of(kind)
    options = {"layer": layer, "query_offset": OFFSET, "early_exit": early_exit}
    logits = block_signals(model, tokens, layout, **options)
    block = layout.block_ids()
    documents = (block > 0) & (block < 4)
    weights = reference.attentions[layer][:, :, -2:, documents]
    weights = weights / weights.sum(-1, keepdim=True)
    # transformers' own softmax is one in float32
    torch.testing.assert_close(logits.softmax(-1), weights, atol=1e-4, rtol=0, check_dtype=False)
    scores = block_scores(logits, layout)
    torch.testing.assert_close(scores.sum(-1), torch.ones(2, dtype=torch.float64))


def test_one_block_is_the_plain_model() -> None:
    layout = BlockLayout([9], pad_multiple=1)
    tokens = prompt(layout)
    expected = make("llama", **SIZES)(tokens).logits
    ids = layout.position_ids()[None]
    found = blocks_of("llama")(tokens, position_ids=ids, block_layout=layout).logits
    torch.testing.assert_close(found, expected)


# --- invariances ---


def test_early_exit_runs_the_layers_up_to_it_and_changes_nothing() -> None:
    layout = BlockLayout(LENGTHS)
    tokens = prompt(layout)
    model = blocks_of("llama")
    ran: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    names = list(model.state_dict())
    one = block_signals(model, tokens, layout, layer=1, query_offset=OFFSET)
    assert ran == [0, 1]
    whole = block_signals(model, tokens, layout, layer=1, query_offset=OFFSET, early_exit=False)
    assert ran == [0, 1, 0, 1, 2]
    assert torch.equal(one, whole)
    assert list(model.state_dict()) == names


def test_the_order_of_documents_does_not_matter() -> None:
    layout = BlockLayout(LENGTHS, pad_multiple=1)
    tokens = prompt(layout)
    model = blocks_of("mistral")
    parts = list(tokens.split(LENGTHS, dim=1))
    order = [0, 3, 1, 2, 4]
    other = BlockLayout([LENGTHS[i] for i in order], pad_multiple=1)
    moved = torch.cat([parts[i] for i in order], dim=1)
    options = {"layer": 2, "query_offset": OFFSET}
    scores = block_scores(block_signals(model, tokens, layout, **options), layout)
    found = block_scores(block_signals(model, moved, other, **options), other)
    torch.testing.assert_close(found, scores[:, [2, 0, 1]])
    one = model(tokens, **placed(layout)).logits[:, -1]
    torch.testing.assert_close(model(moved, **placed(other)).logits[:, -1], one)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_tokens_after_the_prompt_belong_to_the_last_block(kind: str) -> None:
    layout = BlockLayout(LENGTHS, pad_multiple=4)
    longer = BlockLayout([*LENGTHS[:-1], 8], pad_multiple=4)
    tokens = prompt(longer)
    model = blocks_of(kind)
    with torch.no_grad():
        expected = model(tokens, **placed(longer)).logits
        size = layout.num_tokens
        first = model(tokens[:, :size], use_cache=True, **placed(layout))
        torch.testing.assert_close(first.logits[:, -1], expected[:, size - 1])
        cache = getattr(first, CACHE)
        for begin, end in ((size, size + 1), (size + 1, size + 4)):
            options = {CACHE: cache, "use_cache": True, "block_layout": layout}
            ids = torch.arange(OFFSET + 4, OFFSET + 8)[None, begin - size : end - size]
            real = torch.cat((layout.real(), torch.ones(end - size, dtype=torch.bool)))
            found = model(
                tokens[:, begin:end],
                position_ids=ids.expand(2, -1),
                attention_mask=real.expand(2, -1),
                **options,
            ).logits
            torch.testing.assert_close(found, expected[:, begin:end])


# --- gradients ---


@pytest.mark.parametrize("checkpointing", [False, True])
def test_scores_have_a_gradient_up_to_their_layer(checkpointing: bool) -> None:
    layout = BlockLayout(LENGTHS)
    model = blocks_of("llama")
    if checkpointing:
        new = getattr(model, "activation_checkpointing_enable", None)  # renamed within version 5
        (new or model.gradient_checkpointing_enable)()
        model.train()
    signals: dict[int, Tensor | None] = {1: None}
    model(prompt(layout), block_signals=signals, use_cache=False, **placed(layout))
    logits = signals[1]
    assert logits is not None
    block_scores(logits, layout)[:, 0].sum().backward()
    grads = [layer.self_attn.q_proj.weight.grad for layer in model.model.layers]
    assert grads[0].abs().max() > 0
    assert grads[1].abs().max() > 0
    assert grads[2] is None or grads[2].eq(0).all()


# --- bad input ---


def test_without_a_layout_it_refuses() -> None:
    model = blocks_of("llama")
    with pytest.raises(UnsupportedError, match="the blocks of its prompt; got no block_layout"):
        model(torch.ones(1, 5, dtype=torch.long))


def test_masks_that_contradict_the_layout() -> None:
    layout = BlockLayout(LENGTHS, pad_multiple=4)
    tokens, model = prompt(layout), blocks_of("llama")
    right = layout.real().flip(0).expand(2, -1)
    with pytest.raises(DataError, match="Pad each block on the left"):
        model(tokens, attention_mask=right, **placed(layout))
    whole = layout.mask()[None, None].expand(2, 1, -1, -1)
    with pytest.raises(UnsupportedError, match="attention_mask must be a padding mask"):
        model(tokens, attention_mask=whole, **placed(layout))
    ones = torch.ones_like(tokens)
    assert model(tokens, attention_mask=ones, **placed(layout)).logits.isfinite().all()


def test_a_window_that_cuts_the_question_off() -> None:
    layout = BlockLayout(LENGTHS, pad_multiple=1)
    tokens = prompt(layout)
    with pytest.raises(UnsupportedError, match=r"sliding_window must not cut.*19 tokens.*of 18"):
        blocks_of("mistral", sliding_window=18)(tokens, **placed(layout))
    wide, plain = blocks_of("mistral", sliding_window=19), blocks_of("mistral")
    found = wide(tokens, **placed(layout)).logits
    torch.testing.assert_close(found, plain(tokens, **placed(layout)).logits)


def test_models_and_prompts_that_do_not_fit() -> None:
    layout = BlockLayout(LENGTHS)
    tokens = prompt(layout)
    options = {"layer": 1, "query_offset": OFFSET}
    plain = make("llama", **SIZES, attn_implementation="sdpa")
    with pytest.raises(UnsupportedError, match=r"must use the attention.*got 'sdpa'"):
        block_signals(plain, tokens, layout, **options)
    model = blocks_of("llama")
    with pytest.raises(ConfigError, match="layer must be >= 0 and <= 2; got 3"):
        block_signals(model, tokens, layout, layer=3, query_offset=OFFSET)
    with pytest.raises(ConfigError, match=r"64 positions; got 8192"):
        block_signals(model, tokens, layout, layer=1)
    with pytest.raises(ShapeError, match="input_ids must have the shape"):
        block_signals(model, tokens[:, 1:], layout, **options)
    with pytest.raises(ShapeError, match=r"layout's 80 slots; got 79 queries"):
        model(tokens[:, 1:], position_ids=torch.arange(79)[None], block_layout=layout)
    bert = make("bert", max_position_embeddings=100)
    bert.set_attn_implementation(register_block_attention())
    with pytest.raises(UnsupportedError, match="sees both sides, BertSelfAttention"):
        bert(tokens, block_layout=layout)
    with pytest.raises(UnsupportedError, match=r"no dropout; got attention_dropout = 0.5"):
        blocks_of("llama", attention_dropout=0.5).train()(tokens, **placed(layout))


def test_the_offset_of_the_configuration_is_used() -> None:
    layout = BlockLayout(LENGTHS)
    tokens, model = prompt(layout), blocks_of("llama")
    expected = block_signals(model, tokens, layout, layer=1, query_offset=30)
    model.config.block_query_offset = 30
    assert torch.equal(block_signals(model, tokens, layout, layer=1), expected)
