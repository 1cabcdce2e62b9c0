"""The encoder-decoder: its formula, what it sees, decoding, beams, saving, bad input."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from gossamer.attention import CrossAttention, KVCache, MultiHeadAttention
from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.models import CrossBlock, Seq2Seq, TransformerBlock, shift_right

FREE = ["learned", "none", "rope", "alibi", "fire", "t5"]


def small(**options: object) -> Seq2Seq:
    torch.manual_seed(0)
    return Seq2Seq(**{**SIZES, **options}).eval()


SIZES = {"vocab_size": 14, "dim": 16, "num_layers": 2, "num_heads": 4, "max_length": 12}


# --- reference values ---


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], 4, 4).transpose(1, 2)


def attention(layer: MultiHeadAttention, x, y, causal: bool) -> torch.Tensor:
    q, k, v = heads(x @ layer.to_q.weight.T), heads(y @ layer.to_k.weight.T), None
    v = heads(y @ layer.to_v.weight.T)
    logits = q @ k.transpose(-1, -2) / 2
    if causal:
        logits = logits + torch.full(logits.shape[-2:], -torch.inf, dtype=x.dtype).triu(1)
    return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2) @ layer.to_out.weight.T


def test_one_layer_equals_its_formula() -> None:
    model = small(num_layers=1).double()
    source, target = torch.randint(14, (2, 5)), torch.randint(14, (2, 3))

    def read(stack: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        table = stack.positions[0].table.weight
        return 4.0 * model.embedding.weight[tokens] + table[1 : tokens.shape[1] + 1]

    def feed(block: TransformerBlock, x: torch.Tensor) -> torch.Tensor:
        y = block.around_feed_forward.before(x)
        return x + F.gelu(y @ block.feed_forward.up.weight.T) @ block.feed_forward.down.weight.T

    block = model.encoder.layers[0]
    x = read(model.encoder, source)
    y = block.around_attention.before(x)
    states = model.encoder.final_norm(feed(block, x + attention(block.attention, y, y, False)))
    block = model.decoder.layers[0]
    x = read(model.decoder, target)
    y = block.around_attention.before(x)
    x = x + attention(block.attention, y, y, True)
    y = block.around_cross_attention.before(x)
    x = feed(block, x + attention(block.cross_attention, y, states, False))
    expected = model.decoder.final_norm(x) @ model.embedding.weight.T
    torch.testing.assert_close(model(source, target), expected)


def test_embeddings_start_small_and_go_in_large() -> None:
    model = small(vocab_size=4000, dim=64, num_layers=1)
    assert abs(float(model.embedding.weight.detach().std()) - 1 / 8) < 1e-3
    x = model._embed(torch.arange(4000)[None])
    assert abs(float(x.detach().std()) - 1.0) < 1e-2
    assert "head.weight" not in model.state_dict()


@pytest.mark.parametrize(("beams", "limit"), [(1, 6), (125, 3)])
def test_beams_find_what_a_search_of_all_targets_finds(beams: int, limit: int) -> None:
    model = small(vocab_size=5).double()
    with torch.no_grad():  # sharper than at the start, so that hypotheses differ
        model.embedding.weight *= 6
    source = torch.tensor([[2, 3, 4], [4, 4, 2], [3, 2, 2]])
    found = model.generate(source, max_new_tokens=limit, num_beams=beams)
    for row, tokens in zip(source[:, None], found.tolist(), strict=True):
        if beams == 1:
            best = greedy(model, row, limit)
        else:
            best = max(targets(limit), key=lambda t: score(model, row, t))
        assert tokens[: len(best)] == best
        assert all(token == 1 for token in tokens[len(best) :])


def greedy(model: Seq2Seq, source: torch.Tensor, limit: int) -> list[int]:
    out: list[int] = []
    while len(out) < limit and 1 not in out:
        out.append(int(model(source, torch.tensor([[1, *out]]))[0, -1].argmax()))
    return out


def targets(limit: int) -> list[list[int]]:
    """Return all finished targets, and all that reach the limit."""
    words = [0, 2, 3, 4]
    some = [[*w, 1] for n in range(limit) for w in itertools.product(words, repeat=n)]
    return some + [list(w) for w in itertools.product(words, repeat=limit)]


@torch.no_grad()
def score(model: Seq2Seq, source: torch.Tensor, target: list[int]) -> float:
    labels = torch.tensor([target])
    log_p = model(source, shift_right(labels)).log_softmax(-1)
    return float(log_p.gather(2, labels[..., None]).sum()) / len(target)


# --- invariances ---


@pytest.mark.parametrize("positions", FREE)
def test_cached_decoding_equals_the_full_pass(positions: str) -> None:
    model = small(positions=positions)
    source, target = torch.randint(14, (3, 5)), torch.randint(14, (3, 7))
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False]])
    state = model.encode(source, mask)
    cache = model.new_cache()
    steps = [model.decode(target[:, n : n + 1], state, cache=cache) for n in range(7)]
    full = model(source, target, mask=mask)
    torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=0, atol=1e-4)


def test_a_cache_follows_the_samples_that_are_kept() -> None:
    model = small()
    source, target = torch.randint(14, (3, 5)), torch.randint(14, (3, 7))
    rows = torch.tensor([2, 0, 0, 1])
    state, cache = model.encode(source), model.new_cache()
    model.decode(target[:, :4], state, cache=cache)
    cache.select(rows)
    after = model.decode(target[rows, 4:], state.select(rows), cache=cache)
    torch.testing.assert_close(after, model(source, target)[rows, 4:], rtol=0, atol=1e-4)


def test_a_cache_of_one_sample_branches() -> None:
    cache = KVCache(1)
    cache.extend(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool))
    cache.layer(0).append(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    cache.select(torch.tensor([0, 0]))
    k, _ = cache.layer(0).append(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4))
    assert k.sum((1, 2, 3)).tolist() == [8.0, 8.0]


def test_the_encoder_runs_once_for_several_targets() -> None:
    model, calls = small(), []
    model.encoder.layers[0].register_forward_hook(lambda *_: calls.append(1))
    source = torch.randint(14, (2, 5))
    one, two = torch.randint(14, (2, 3)), torch.randint(14, (2, 6))
    state = model.encode(source)
    first, second = model.decode(one, state), model.decode(two, state)
    assert len(calls) == 1
    model.generate(source, max_new_tokens=8, num_beams=3)
    assert len(calls) == 2
    torch.testing.assert_close(first, model(source, one))
    torch.testing.assert_close(second, model(source, two))


def test_several_targets_of_each_source_in_one_call() -> None:
    model, calls = small(), []
    model.encoder.layers[0].register_forward_hook(lambda *_: calls.append(1))
    source, targets = torch.randint(14, (2, 5)), torch.randint(14, (2, 3, 4))
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    together = model(source, targets, mask=mask)
    assert len(calls) == 1
    for n in range(3):
        torch.testing.assert_close(together[:, n], model(source, targets[:, n], mask=mask))
    with pytest.raises(ShapeError, match="target must have the shape"):
        model(source, targets[:1])


def test_padding_of_a_source_changes_nothing() -> None:
    model = small()
    source, target = torch.randint(14, (2, 4)), torch.randint(14, (2, 3))
    padded = F.pad(source, (0, 3), value=9)
    mask = torch.arange(7) < torch.tensor([[4], [4]])
    torch.testing.assert_close(model(padded, target, mask=mask), model(source, target))
    plain = model.generate(source, max_new_tokens=5, num_beams=2)
    assert torch.equal(model.generate(padded, mask=mask, max_new_tokens=5, num_beams=2), plain)


def test_later_target_tokens_are_not_seen() -> None:
    model = small()
    source, target = torch.randint(14, (1, 4)), torch.randint(14, (1, 6))
    other = target.clone()
    other[:, 3:] = (other[:, 3:] + 1) % 14
    torch.testing.assert_close(model(source, target)[:, :3], model(source, other)[:, :3])


def test_a_source_without_positions_is_a_set() -> None:
    source, target = torch.tensor([[4, 5, 6, 7]]), torch.randint(14, (1, 3))
    turned = source[:, [2, 0, 3, 1]]
    model = small(source_positions="none")
    torch.testing.assert_close(model(source, target), model(turned, target))
    ordered = small()
    assert not torch.allclose(ordered(source, target), ordered(turned, target), atol=1e-3)


def test_samples_do_not_meet() -> None:
    model = small()
    source, target = torch.randint(14, (3, 4)), torch.randint(14, (3, 5))
    alone = torch.cat([model(s[None], t[None]) for s, t in zip(source, target, strict=True)])
    torch.testing.assert_close(model(source, target), alone)
    together = model.generate(source, max_new_tokens=6, num_beams=3)
    for n in range(3):
        single = model.generate(source[n : n + 1], max_new_tokens=6, num_beams=3)
        assert together[n, : single.shape[1]].tolist() == single[0].tolist()


def test_generation_leaves_the_mode_as_it_was() -> None:
    model = small(dropout=0.5).train()
    source = torch.randint(14, (2, 4))
    one = model.generate(source, max_new_tokens=5)
    assert model.training
    assert torch.equal(one, model.generate(source, max_new_tokens=5))


def test_dropout_acts_in_training_alone() -> None:
    source, target = torch.randint(14, (2, 4)), torch.randint(14, (2, 3))
    model, plain = small(dropout=0.3), small()
    torch.testing.assert_close(model(source, target), plain(source, target))
    model.train()
    assert not torch.allclose(model(source, target), model(source, target))


def test_labels_are_shifted() -> None:
    labels = torch.tensor([[7, 8, 1], [9, 1, -100]])
    assert shift_right(labels, start=2).tolist() == [[2, 7, 8], [2, 9, 1]]
    with pytest.raises(ShapeError, match="labels must have the shape"):
        shift_right(labels[0])


# --- gradients ---


def test_a_sum_over_two_targets_has_the_sum_of_gradients() -> None:
    model = small().double()
    source = torch.randint(14, (2, 4))
    one, two = torch.randint(14, (2, 3)), torch.randint(14, (2, 6))

    def gradients(*losses: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(sum(losses), list(model.parameters())))

    state = model.encode(source)
    shared = gradients(model.decode(one, state).square().sum(), model.decode(two, state).sum())
    apart = gradients(model(source, one).square().sum(), model(source, two).sum())
    for a, b in zip(shared, apart, strict=True):
        torch.testing.assert_close(a, b)


def test_cross_attention_has_the_gradient_of_its_formula() -> None:
    layer = CrossAttention(4, 2).double()
    x = torch.randn(1, 2, 4, dtype=torch.double, requires_grad=True)
    y = torch.randn(1, 3, 4, dtype=torch.double, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    assert torch.autograd.gradcheck(lambda x, y: layer(x, layer.read(y, mask)), (x, y))
    y.grad = None
    layer(x, layer.read(y, mask)).sum().backward()
    assert not y.grad[:, 2].any()


# --- saving ---


@pytest.mark.parametrize("source_positions", [None, "none", {"name": "rope", "theta": 100.0}])
def test_a_folder_gives_the_same_model(tmp_path: Path, source_positions: object) -> None:
    model = small(source_positions=source_positions, norm="pre_post", dropout=0.1)
    model.save_pretrained(tmp_path)
    again = Seq2Seq.from_pretrained(tmp_path)
    source, target = torch.randint(14, (2, 4)), torch.randint(14, (2, 3))
    assert torch.equal(again(source, target), model(source, target))
    assert again.config == model.config
    assert json.loads((tmp_path / "config.json").read_text())["model"] == "Seq2Seq"


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"dim": 0}, "dim must be"),
        ({"num_layers": 0}, "num_layers must be"),
        ({"num_heads": 3}, "multiple of num_heads"),
        ({"dropout": 1.5}, "dropout must be"),
        ({"norm": "sandwich"}, "unknown norm"),
        ({"positions": "coupled_relative"}, "must count 1..T"),
        ({"source_positions": {"name": "coupled_relative"}}, "must count 1..T"),
        ({"max_length": None}, "needs the option 'max_position'"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**options)


def test_bad_calls() -> None:
    model = small()
    source, target = torch.randint(14, (2, 4)), torch.randint(14, (2, 3))
    with pytest.raises(ShapeError, match="target must have the shape"):
        model(source, target[:1])
    with pytest.raises(ShapeError, match="mask must have the shape"):
        model(source, target, mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ShapeError, match="tokens must have the shape"):
        model(source[0], target)
    with pytest.raises(DataError, match="max_length = 12"):
        model(torch.zeros(1, 13, dtype=torch.long), target[:1])
    with pytest.raises(DataError, match="max_length = 12; got 13"):
        model.generate(source, max_new_tokens=13)
    for wrong in ({"max_new_tokens": 0}, {"num_beams": 0}, {"eos": 14}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            model.generate(source, **{"max_new_tokens": 3, **wrong})


def test_a_block_without_its_source_says_so() -> None:
    with pytest.raises(TypeError, match="source"):
        CrossBlock(8, 2)(torch.zeros(1, 2, 8))
