"""Generation of transformers' models with added positions: caches, rules for ids, beams."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from gossamer.errors import DataError, ShapeError, UnsupportedError
from gossamer.models import add_positions
from gossamer.models._hf_generation import PositionRule
from gossamer.positions import (
    AlibiPositions,
    CoupledRelativePositions,
    DietRelativePositions,
    FirePositions,
    LearnedPositions,
    NoPositions,
    RopePositions,
)

from .hf_models import CACHE, CAUSAL, VOCAB, make

KINDS = ("gpt2", "llama")


def encoding(name: str):
    torch.manual_seed(1)
    made = {
        "fire": lambda: FirePositions(4, init_length=4.0),
        "alibi": lambda: AlibiPositions(4),
        "rope": lambda: RopePositions(4),
        "learned": lambda: LearnedPositions(16, 40),
        "coupled": lambda: CoupledRelativePositions(4, base_length=4),
        "levels": lambda: CoupledRelativePositions(4, levels=2, base_length=4),
    }[name]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made.double()


def with_positions(kind: str, name: str, **options):
    return add_positions(make(kind, **options), encoding(name))


def draw(rows: int = 2, length: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def by_count(tokens: torch.Tensor) -> torch.Tensor:
    """Ids that depend on the tokens: how many small tokens stand up to here."""
    return (tokens < 8).cumsum(1)


def greedy(model, tokens, rule, steps: int) -> torch.Tensor:
    """Decode by full passes, without transformers' own loop."""
    for _ in range(steps):
        ids = None if rule is None else rule(tokens)
        logits = model(tokens, position_ids=ids, use_cache=False).logits
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), dim=1)
    return tokens


# --- cached equals full ---


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("name", ["fire", "rope", "coupled"])
def test_generation_equals_full_passes(kind, name) -> None:
    model = with_positions(kind, name)
    rule = by_count if name == "coupled" else None
    expected = greedy(model, draw(), rule, 6)
    for use_cache in (True, False):
        found = model.generate(
            draw(), position_ids=rule, max_new_tokens=6, do_sample=False, use_cache=use_cache
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["learned", "alibi"])
def test_other_encodings_decode_with_a_cache(kind, name) -> None:
    model = with_positions(kind, name)
    found = model.generate(draw(), max_new_tokens=6, do_sample=False)
    assert torch.equal(found, greedy(model, draw(), None, 6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fire", "coupled", "rope", "levels"])
def test_steps_of_the_caller_equal_the_full_pass(kind, name) -> None:
    """Ids of cached keys are kept: only those of the new tokens are given."""
    model = with_positions(kind, name)
    tokens = draw(2, 9)
    ids = torch.randint(0, 6, (2, 9, 2) if name == "levels" else (2, 9))
    if name == "fire":
        ids = ids.sort(1).values + 1
    mask = (torch.arange(9) >= torch.tensor([[0], [2]])).long()
    ids = ids * (mask if ids.dim() == 2 else mask[..., None])
    full = model(tokens, position_ids=ids, attention_mask=mask).logits
    cache, parts = None, []
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        out = model(
            tokens[:, begin:end],
            position_ids=ids[:, begin:end],
            attention_mask=mask[:, :end],
            use_cache=True,
            **{CACHE: cache},
        )
        cache = out[CACHE]
        parts.append(out.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], full[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_counting_goes_on_without_a_mask(kind) -> None:
    model = with_positions(kind, "fire")
    tokens = draw(2, 8)
    first = model(tokens[:, :5], use_cache=True)
    then = model(tokens[:, 5:], **{CACHE: first[CACHE]})
    torch.testing.assert_close(then.logits, model(tokens).logits[:, 5:])


def test_a_cache_made_by_the_caller_may_be_lazy() -> None:
    model = with_positions("llama", "coupled")
    tokens, ids = draw(2, 8), by_count(draw(2, 8))
    cache = transformers.DynamicCache()
    model(tokens[:, :5], position_ids=ids[:, :5], **{CACHE: cache})
    then = model(tokens[:, 5:], position_ids=ids[:, 5:], **{CACHE: cache})
    full = model(tokens, position_ids=ids).logits
    torch.testing.assert_close(then.logits, full[:, 5:])


def test_ids_are_cut_and_reordered_with_the_cache() -> None:
    model = with_positions("gpt2", "coupled")
    tokens, ids = draw(3, 8), by_count(draw(3, 8))
    out = model(tokens, position_ids=ids, use_cache=True)
    out[CACHE].crop(-3)
    out[CACHE].reorder_cache(torch.tensor([2, 0, 0]))
    order = [2, 0, 0]
    then = model(tokens[order, 5:], position_ids=ids[order, 5:], **{CACHE: out[CACHE]})
    full = model(tokens[order], position_ids=ids[order]).logits
    torch.testing.assert_close(then.logits, full[:, 5:])


# --- padding, rules, beams ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fire", "coupled"])
def test_left_padding_changes_no_answer(kind, name) -> None:
    model = with_positions(kind, name)
    short, long = draw(1, 4, seed=1), draw(1, 7, seed=2)
    padded = torch.cat((torch.cat((torch.zeros(1, 3, dtype=torch.long), short), 1), long))
    mask = (torch.arange(7) >= torch.tensor([[3], [0]])).long()
    ids = None
    alone = {}
    if name == "coupled":
        ids = torch.zeros(2, 7, dtype=torch.long)
        ids[0, 3:], ids[1] = by_count(short)[0], by_count(long)[0]
        alone = {"position_ids": by_count(short)}
    options = {"max_new_tokens": 5, "do_sample": False}
    both = model.generate(padded, attention_mask=mask, position_ids=ids, **options)
    assert torch.equal(both[:1, 7:], model.generate(short, **alone, **options)[:, 4:])


def test_ids_of_the_prompt_go_on_by_one() -> None:
    model = with_positions("llama", "coupled")
    ids = torch.tensor([[3, 2, 1, 3, 2, 1]])

    def rule(tokens: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(2, tokens.shape[1] - 4)[None]
        return torch.cat((ids, steps), dim=1)

    options = {"max_new_tokens": 5, "do_sample": False}
    expected = greedy(model, draw(), rule, 5)
    assert torch.equal(model.generate(draw(), position_ids=ids, **options), expected)
    assert torch.equal(model.generate(draw(), position_ids=rule, **options), expected)
    longer = torch.cat((ids, torch.tensor([[2, 3, 4]])), dim=1)
    assert torch.equal(model.generate(draw(), position_ids=longer, **options), expected)

    def last_scores(given: torch.Tensor) -> torch.Tensor:
        kept = {"output_logits": True, "return_dict_in_generate": True}
        return model.generate(draw(), position_ids=given, **kept, **options).logits[-1]

    torch.testing.assert_close(last_scores(longer), last_scores(ids))
    assert not torch.allclose(last_scores(torch.cat((ids, ids[:, :3]), dim=1)), last_scores(ids))


def test_the_rule_by_itself() -> None:
    tokens = torch.zeros(4, 5, dtype=torch.long)
    ids = torch.tensor([[[1, 3], [2, 2]], [[5, 0], [6, 1]]])
    plain = PositionRule(ids, last_is_segment=False)
    assert plain.ids(tokens, 1, 4, 4)[:, :, 0].tolist() == [[2, 3, 4]] * 2 + [[6, 7, 8]] * 2
    assert plain.ids(tokens, 1, 4, 4)[:, :, 1].tolist() == [[2, 3, 4]] * 2 + [[1, 2, 3]] * 2
    segments = PositionRule(ids, last_is_segment=True)
    assert segments.ids(tokens, 1, 4, 4)[:, :, 1].tolist() == [[2, 2, 2]] * 2 + [[1, 1, 1]] * 2
    flat = PositionRule(torch.tensor([[4, 0]]), last_is_segment=False)
    assert flat.ids(tokens, 0, 4, 4).tolist() == [[4, 0, 1, 2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["none", "tensor", "function"])
def test_beams_keep_their_own_ids(kind, given) -> None:
    model = with_positions(kind, "fire" if given == "none" else "coupled")
    prompt = draw(2, 5)
    rule = {"none": None, "tensor": by_count(prompt), "function": by_count}[given]
    found = [
        model.generate(
            prompt,
            position_ids=rule,
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=7,
            do_sample=False,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for use_cache in (True, False)
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[0].sequences_scores, found[1].sequences_scores)
    if given == "function":
        # the score of a beam is that of its tokens under the ids of these very tokens
        tokens = found[0].sequences
        logits = model(tokens, position_ids=by_count(tokens)).logits
        chosen = logits.log_softmax(-1)[:, 4:-1].gather(-1, tokens[:, 5:, None])[..., 0]
        torch.testing.assert_close(
            chosen.mean(1), found[0].sequences_scores.double(), rtol=1e-5, atol=1e-5
        )


def test_segments_stay_those_of_the_last_token() -> None:
    torch.manual_seed(0)
    diet = DietRelativePositions(4, 20, num_segments=2).double()
    for parameter in diet.parameters():
        torch.nn.init.normal_(parameter)
    model = add_positions(make("gpt2"), diet)
    types = torch.tensor([[0, 0, 0, 1, 1, 1]])

    def rule(tokens: torch.Tensor) -> torch.Tensor:
        count = torch.arange(1, tokens.shape[1] + 1)
        return torch.stack((count, 1 + (count > 3).long()), dim=-1)[None]

    expected = greedy(model, draw(1), rule, 5)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(draw(1), token_type_ids=types, **options), expected)
    ids = rule(draw(1))
    assert torch.equal(model.generate(draw(1), position_ids=ids, **options), expected)


def test_prompts_in_chunks() -> None:
    model = with_positions("llama", "coupled")
    ids = by_count(draw(2, 9))
    options = {"max_new_tokens": 4, "do_sample": False}
    whole = model.generate(draw(2, 9), position_ids=ids, **options)
    parts = model.generate(draw(2, 9), position_ids=ids, prefill_chunk_size=4, **options)
    assert torch.equal(whole, parts)
    with pytest.raises(UnsupportedError, match="needs all tokens so far"):
        model.generate(draw(2, 9), position_ids=by_count, prefill_chunk_size=4, **options)


def test_a_sliding_window_drops_the_ids_of_dropped_keys() -> None:
    model = with_positions("mistral", "coupled", sliding_window=4)
    expected = greedy(model, draw(2, 9), by_count, 6)
    options = {"max_new_tokens": 6, "do_sample": False, "position_ids": by_count}
    assert torch.equal(model.generate(draw(2, 9), **options), expected)
    far = draw(1, 9)
    far[0, 0] = far[0, 0] % 12 + 2
    ids = torch.ones(1, 9, dtype=torch.long)
    one_layer = with_positions("mistral", "coupled", sliding_window=4, num_hidden_layers=1)
    same = [one_layer(t, position_ids=ids).logits[0, 5:] for t in (far, draw(1, 9))]
    torch.testing.assert_close(*same)


def test_a_bert_that_decodes() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=32, is_decoder=True, max_position_embeddings=24,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(config).double().eval()
    model = add_positions(model, encoding("fire"))
    expected = greedy(model, draw(), None, 30)
    assert torch.equal(model.generate(draw(), max_new_tokens=30, do_sample=False), expected)


def test_cross_attention_has_no_positions() -> None:
    def build(**options):
        return make("gpt2", add_cross_attention=True, **options)

    plain = build(attn_implementation="eager")
    torch.nn.init.zeros_(plain.transformer.wpe.weight)
    model = add_positions(build(), NoPositions())
    states, tokens = torch.randn(2, 5, 16, dtype=torch.float64), draw(2, 7)
    seen = torch.ones(2, 5, dtype=torch.long)
    seen[1, 3:] = 0
    inputs = {"encoder_hidden_states": states, "encoder_attention_mask": seen}
    full = model(tokens, **inputs).logits
    torch.testing.assert_close(full, plain(tokens, **inputs).logits)
    biased = add_positions(build(), encoding("coupled"))
    ids = by_count(tokens)
    full = biased(tokens, position_ids=ids, **inputs).logits
    first = biased(tokens[:, :4], position_ids=ids[:, :4], use_cache=True, **inputs)
    then = biased(tokens[:, 4:], position_ids=ids[:, 4:], **{CACHE: first[CACHE]}, **inputs)
    torch.testing.assert_close(then.logits, full[:, 4:])


# --- wrong use ---


def test_caches_that_cannot_hold_ids() -> None:
    model = with_positions("llama", "fire")
    with pytest.raises(UnsupportedError, match=r"DynamicCache; got StaticCache"):
        model.generate(draw(), max_new_tokens=3, cache_implementation="static")
    foreign = make("llama")(draw(), use_cache=True)[CACHE]
    with pytest.raises(DataError, match="got 6 tokens without ids"):
        model(draw(2, 1), **{CACHE: foreign})


def test_a_scale_by_the_final_length_has_no_cache() -> None:
    added = CoupledRelativePositions(4, length_scale="sequence").double()
    model = add_positions(make("llama"), added)
    options = {"position_ids": by_count, "max_new_tokens": 3, "do_sample": False}
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        model.generate(draw(), **options)
    expected = greedy(model, draw(), by_count, 3)
    assert torch.equal(model.generate(draw(), use_cache=False, **options), expected)


def test_bad_rules() -> None:
    model = with_positions("llama", "coupled")
    ids = by_count(draw())
    with pytest.raises(DataError, match="position_ids are needed"):
        model.generate(draw(), max_new_tokens=2)
    with pytest.raises(ShapeError, match="must cover the prompt, 6 tokens; got 5"):
        model.generate(draw(), position_ids=ids[:, :5], max_new_tokens=2)
    with pytest.raises(ShapeError, match="Add the batch axis"):
        model.generate(draw(), position_ids=ids[0], max_new_tokens=2)
    with pytest.raises(ShapeError, match="got 3 rows for 2 sequences"):
        model.generate(draw(), position_ids=by_count(draw(3)), max_new_tokens=2)
    with pytest.raises(ShapeError, match=r"function for position_ids must return .*got \(2, 1\)"):
        model.generate(draw(), position_ids=lambda t: by_count(t)[:, -1:], max_new_tokens=2)
