"""Positions added to models of transformers: what a forward pass and a gradient are."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")


from gossamer import attention
from gossamer.models import add_positions
from gossamer.positions import (
    AlibiPositions,
    CoupledPositions,
    CoupledRelativePositions,
    DietAbsolutePositions,
    FirePositions,
    LearnedPositions,
    NoPositions,
    Positions,
    RopePositions,
    T5Positions,
)

from .hf_models import CAUSAL, KINDS, VOCAB, attention_by_hand, attention_layers, make


def encoding(name: str, *, causal: bool) -> Positions:
    torch.manual_seed(1)
    two_sided = {"bidirectional": not causal}
    made = {
        "fire": lambda: FirePositions(4, init_length=4.0, **two_sided),
        "alibi": lambda: AlibiPositions(4, **two_sided),
        "t5": lambda: T5Positions(4, **two_sided),
        "coupled": lambda: CoupledRelativePositions(4, levels=2, length_scale="none"),
    }[name]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made.double()


class ZeroBias(Positions):
    """A bias of zeros."""

    def bias(self, q_ids, k_ids, *, q_index):
        return torch.zeros(1, 4, q_ids.shape[1], k_ids.shape[1])


# --- reference values ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [ZeroBias, NoPositions])
@pytest.mark.parametrize("reference", ["eager", "sdpa"])
def test_a_zero_bias_is_the_model_without_positions(kind, zero, reference) -> None:
    """The reference is transformers' own attention with the model's positions set to nothing."""
    plain = make(kind, attn_implementation=reference)
    ours = add_positions(make(kind), zero())
    tol = 1e-12
    if reference == "eager" and hasattr(plain.base_model, "rotary_emb"):
        # the eager softmax of Llama's kind is float32 and overflows on a float64 mask
        plain, ours, tol = plain.float(), ours.float(), 1e-4
    for name, module in plain.named_modules():
        if name.endswith(("wpe", "position_embeddings")):
            torch.nn.init.zeros_(module.weight)
        if name.endswith("rotary_emb"):
            module.inv_freq.zero_()  # angle 0
    tokens = torch.randint(2, VOCAB, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    for given in (None, mask):
        expected = plain(tokens, attention_mask=given).logits
        found = ours(tokens, attention_mask=given).logits
        real = torch.ones(2, 9, dtype=torch.bool) if given is None else given.bool()
        torch.testing.assert_close(found[real], expected[real], rtol=tol, atol=tol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fire", "alibi", "t5", "coupled"])
@pytest.mark.parametrize("share", [True, False])
def test_every_layer_equals_its_formula(kind, name, share) -> None:
    causal = kind in CAUSAL
    added = encoding(name, causal=causal)
    model = add_positions(make(kind), added, share=share)
    if not share:
        with torch.no_grad():
            for parameter in model.base_model.positions[1].parameters():
                parameter.mul_(1.7)
    tokens = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    ids = torch.arange(1, 10)[None] - (1 - mask).cumsum(1)[:, -1:]
    ids = ids.clamp(min=0)
    given = None
    if name == "coupled":
        given = ids = torch.stack((ids, (ids * 3) % 5), dim=-1)
    index = (mask.cumsum(1) - 1).clamp(min=0)

    seen = []
    for layer in attention_layers(model):
        layer.register_forward_hook(
            lambda module, args, kwargs, out: seen.append((module, args, kwargs, out)),
            with_kwargs=True,
        )
    model(tokens, attention_mask=mask, position_ids=given)
    assert len(seen) == 2
    whole = mask.bool()[:, None, None, :]
    if causal:
        whole = whole & torch.ones(9, 9, dtype=torch.bool).tril()
    for number, (module, args, kwargs, out) in enumerate(seen):
        own = model.base_model.positions[0 if share else number]
        bias = own.bias(ids, ids, q_index=index)
        x = args[0] if args else kwargs["hidden_states"]
        expected = attention_by_hand(module, x, bias, whole)
        torch.testing.assert_close(out[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_rotation_equals_turned_queries_and_keys(kind) -> None:
    """RoPE of this library in a Llama is Llama's own; in the others it is by hand."""
    model = add_positions(make(kind), RopePositions(4))
    tokens = torch.randint(2, VOCAB, (2, 9))
    if kind == "llama":
        plain = make(kind, attn_implementation="eager")
        torch.testing.assert_close(
            model(tokens).logits, plain(tokens).logits, rtol=1e-5, atol=1e-5
        )  # the angles are float32 on both sides
    shifted = torch.arange(8, 17)[None]
    torch.testing.assert_close(
        model(tokens, position_ids=shifted).logits, model(tokens).logits, rtol=1e-4, atol=1e-4
    )
    jumps = torch.tensor([[1, 2, 3, 7, 8, 9, 2, 3, 4]])
    assert not torch.allclose(model(tokens, position_ids=jumps).logits, model(tokens).logits)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("scale", ["query", "none"])
def test_the_scale_of_queries_reaches_the_content(kind, scale) -> None:
    torch.manual_seed(0)
    added = CoupledRelativePositions(4, length_scale=scale, base_length=4).double()
    torch.nn.init.zeros_(added.table)
    model, plain = add_positions(make(kind), added), add_positions(make(kind), NoPositions())
    tokens, ids = torch.randint(2, VOCAB, (1, 9)), torch.arange(1, 10)[None]
    same = torch.allclose(model(tokens, position_ids=ids).logits, plain(tokens).logits)
    assert same == (scale == "none")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "roberta"])
@pytest.mark.parametrize("levels", [1, 2])
def test_learned_positions_enter_at_the_input(kind, levels) -> None:
    torch.manual_seed(0)
    added = LearnedPositions(16, 30) if levels == 1 else CoupledPositions(16, 30, levels=2)
    model = add_positions(make(kind), added.double())
    tokens = torch.randint(2, VOCAB, (2, 9))
    ids = torch.randint(0, 20, (2, 9) if levels == 1 else (2, 9, 2))
    embeds = model.get_input_embeddings()(tokens) + added.embed(ids)
    plain = add_positions(make(kind), NoPositions())
    expected = plain(inputs_embeds=embeds).logits
    torch.testing.assert_close(model(tokens, position_ids=ids).logits, expected)
    by_vectors = model(inputs_embeds=model.get_input_embeddings()(tokens), position_ids=ids)
    torch.testing.assert_close(by_vectors.logits, expected)


# --- limits and invariances ---


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_beyond_the_models_own_table(kind) -> None:
    causal = kind in CAUSAL
    model = add_positions(make(kind), encoding("alibi", causal=causal))
    assert model(torch.randint(2, VOCAB, (1, 40))).logits.shape == (1, 40, VOCAB)


@pytest.mark.parametrize("kind", KINDS)
def test_left_padding_changes_nothing(kind) -> None:
    model = add_positions(make(kind), encoding("fire", causal=kind in CAUSAL))
    tokens = torch.randint(2, VOCAB, (1, 7))
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), tokens), dim=1)
    mask = (torch.arange(10)[None] >= 3).long()
    out = model(padded, attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(out, model(tokens).logits)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_coupled_ids_are_not_taken_for_packed_sequences(kind) -> None:
    """Ids that jump mark packed sequences to transformers; here every token is still seen."""
    model = add_positions(make(kind), encoding("coupled", causal=kind in CAUSAL))
    tokens, ids = torch.randint(2, VOCAB, (1, 8)), torch.tensor([[3, 2, 1, 0, 3, 2, 1, 0]])
    ids = torch.stack((ids, ids), dim=-1)
    changed = tokens.clone()
    changed[0, 0] = tokens[0, 0] % 12 + 2
    last = [model(t, position_ids=ids).logits[0, -1] for t in (tokens, changed)]
    assert not torch.allclose(*last)


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("padded", [False, True])
def test_blocks_of_queries_change_nothing(kind, padded, monkeypatch) -> None:
    model = add_positions(make(kind), encoding("t5", causal=kind in CAUSAL))
    tokens = torch.randint(2, VOCAB, (2, 9))
    mask = (torch.arange(9) >= torch.tensor([[0], [4]])).long() if padded else None
    real = torch.ones(2, 9, dtype=torch.bool) if mask is None else mask.bool()
    results = []
    for size in (0, 2**24):
        monkeypatch.setattr(attention.bias, "DIRECT_SIZE", size)
        monkeypatch.setattr(attention.core, "BLOCK_SIZE", 2 * 4 * 9 * 2)
        model.zero_grad()
        out = model(tokens, attention_mask=mask).logits[real]
        out.square().sum().backward()
        results.append((out, model.base_model.positions[0].table.grad.clone()))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "roberta", "llama"])
def test_segments_are_the_token_types(kind) -> None:
    torch.manual_seed(0)
    diet = DietAbsolutePositions(4, 20, rank=3, num_segments=2, init_std=0.5).double()
    torch.nn.init.normal_(diet.segments)
    model = add_positions(make(kind), diet)
    tokens, types = torch.randint(2, VOCAB, (2, 9)), torch.randint(2, (2, 9))
    mask = (torch.arange(9) >= torch.tensor([[0], [3]])).long()
    position = mask.cumsum(1) * mask
    by_hand = torch.stack((position, (types + 1) * mask), dim=-1)
    found = model(tokens, attention_mask=mask, token_type_ids=types).logits
    expected = model(tokens, attention_mask=mask, position_ids=by_hand).logits
    torch.testing.assert_close(found, expected)
    none = model(tokens, attention_mask=mask).logits
    zeros = model(tokens, attention_mask=mask, token_type_ids=types * 0).logits
    torch.testing.assert_close(none, zeros)
    assert not torch.allclose(found, none)
    assert not any("token_type" in name for name, _ in model.named_parameters())


def test_token_types_stay_where_the_encoding_has_no_segments() -> None:
    model = add_positions(make("bert"), encoding("alibi", causal=False))
    tokens = torch.randint(2, VOCAB, (1, 5))
    ones = torch.ones(1, 5, dtype=torch.long)
    assert not torch.allclose(model(tokens, token_type_ids=ones).logits, model(tokens).logits)


def test_a_mask_of_the_caller_for_pairs() -> None:
    model = add_positions(make("llama"), encoding("alibi", causal=True))
    tokens = torch.randint(2, VOCAB, (2, 6))
    seen = (torch.rand(2, 1, 6, 6) > 0.3) | torch.eye(6, dtype=torch.bool)
    seen &= torch.ones(6, 6, dtype=torch.bool).tril()
    as_numbers = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    by_truth = model(tokens, attention_mask=seen).logits
    torch.testing.assert_close(model(tokens, attention_mask=as_numbers).logits, by_truth)
    assert not torch.allclose(by_truth, model(tokens).logits)


# --- gradients and training ---


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("blocks", [False, True])
def test_gradient_checkpointing_changes_no_gradient(kind, blocks, monkeypatch) -> None:
    if blocks:
        monkeypatch.setattr(attention.bias, "DIRECT_SIZE", 0)
        monkeypatch.setattr(attention.core, "BLOCK_SIZE", 2 * 4 * 9 * 2)
    tokens = torch.randint(2, VOCAB, (2, 9))
    grads = []
    for checkpointing in (False, True):
        model = add_positions(
            make(kind, attention_dropout=0.0) if kind == "llama" else make(kind),
            encoding("fire", causal=kind in CAUSAL),
            share=False,
        )
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing:
            # renamed within version 5
            new = getattr(model, "activation_checkpointing_enable", None)
            (new or model.gradient_checkpointing_enable)()
        model(tokens, use_cache=False).logits.square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert any("positions.1" in name for name in grads[0])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-7, atol=1e-9, msg=name)


def test_the_gradient_of_the_bias_is_the_slope() -> None:
    model = add_positions(make("gpt2"), encoding("t5", causal=True))
    table = model.base_model.positions[0].table
    tokens = torch.randint(2, VOCAB, (1, 6))

    def loss():
        return model(tokens).logits.square().mean()

    loss().backward()
    index = tuple(int(i) for i in (table.grad.abs() > 1e-9).nonzero()[0])
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            table[index] += step
            values.append(loss())
            table[index] -= step
    assert table.grad[index].item() == pytest.approx(float(values[0] - values[1]) / 2e-5, rel=1e-5)


def test_a_step_of_an_optimiser_moves_the_bias() -> None:
    model = add_positions(make("gpt2"), encoding("fire", causal=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(2, VOCAB, (2, 6))
    before = model.base_model.positions[0].c.clone()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert model.base_model.positions[0].c != before
    with torch.no_grad():
        assert model(tokens).logits.requires_grad is False


def test_plain_checkpointing_around_the_model() -> None:
    model = add_positions(make("llama"), encoding("fire", causal=True))
    tokens = torch.randint(2, VOCAB, (1, 5))
    checkpoint(lambda t: model(t).logits, tokens, use_reentrant=False).sum().backward()
    inside = model.base_model.positions[0].c.grad.clone()
    model.zero_grad()
    model(tokens).logits.sum().backward()
    torch.testing.assert_close(inside, model.base_model.positions[0].c.grad)
