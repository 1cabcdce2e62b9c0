"""The decoder: shapes, saving, generation, loops, and what a user can get wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.models import Decoder
from gossamer.tasks import AdditionTask

ENTRY = {"name": "fire", "share": True, "init_length": 8.0}


def small(**options: object) -> Decoder:
    torch.manual_seed(0)
    return Decoder(14, 16, 2, 4, **options).eval()


# --- construction ---


@pytest.mark.parametrize(
    "norm", ["pre", "post", "pre_post", {"name": "pre", "kind": "layer", "eps": 1e-5}]
)
@pytest.mark.parametrize(
    "feed_forward", ["gelu", "gated", {"name": "gated", "activation": "silu", "hidden_dim": 24}]
)
def test_options_build_and_run(norm: object, feed_forward: object) -> None:
    model = small(
        norm=norm, feed_forward=feed_forward, attention={"num_kv_heads": 2, "out_norm": "rms"}
    )
    assert model(torch.randint(14, (2, 5))).shape == (2, 5, 14)


def test_sharing() -> None:
    assert len(small(positions=ENTRY).positions) == 1
    assert len(small(positions={"name": "fire"}).positions) == 2
    assert len(small(positions={"name": "coupled_relative", "share": True}).positions) == 1
    assert len(small(positions="rope").positions) == 1


def test_loops_repeat_the_same_weights() -> None:
    once, twice = small(), small(loops=2)
    assert once.num_parameters() == twice.num_parameters()
    tokens = torch.randint(14, (1, 6))
    x = once.embedding(tokens)
    index = torch.arange(6)[None]
    for _ in range(2):
        for layer in once.layers:
            x = layer(x, causal=True, positions=once.positions[0], ids=index + 1, index=index)
    torch.testing.assert_close(twice(tokens), once.head(once.final_norm(x)))


def test_the_smallest_input() -> None:
    assert small()(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, 14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim must be"),
        ({"loops": 0}, "loops must be"),
        ({"norm": "sandwich"}, "unknown norm"),
        ({"feed_forward": "geglu"}, "unknown feed_forward"),
        ({"feed_forward": {"hidden_dim": 3}}, "needs the option 'name'"),
        ({"feed_forward": {"name": "gated", "hiden_dim": 3}}, "did you mean 'hidden_dim'"),
        ({"attention": {"heads": 3}}, "unknown key 'heads' in attention"),
        ({"positions": {"name": "rope", "ids": "tsk"}}, "did you mean 'task'"),
        ({"positions": {"name": "rope", "theta": 0.5}}, "theta must be"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Decoder(**{"vocab_size": 14, "dim": 16, "num_layers": 1, "num_heads": 4, **options})


# --- ids ---


def test_uncoupled_models_count_and_ignore_given_ids() -> None:
    tokens = torch.randint(14, (2, 6))
    given = torch.randint(9, (2, 6))
    model = small(positions="rope")
    assert torch.equal(model(tokens), model(tokens, given))
    reading = small(positions={"name": "rope", "ids": "task"})
    assert not torch.equal(reading(tokens, given), model(tokens))
    torch.testing.assert_close(reading(tokens, torch.arange(1, 7)[None]), model(tokens))


def test_equal_ids_share_one_bias_without_a_difference() -> None:
    model = small(positions="coupled_relative")
    tokens, ids = torch.randint(14, (3, 6)), torch.tensor([[0, 2, 1, 2, 1, 0]])
    torch.testing.assert_close(model(tokens, ids), model(tokens, ids.expand(3, 6)))
    mixed = torch.cat((ids, ids, ids + 1))
    torch.testing.assert_close(model(tokens, mixed)[:2], model(tokens[:2], ids))


def test_missing_and_misshapen_input() -> None:
    model = small(positions="coupled_relative", max_length=8)
    tokens = torch.randint(14, (2, 6))
    with pytest.raises(DataError, match="position_ids are needed"):
        model(tokens)
    with pytest.raises(ShapeError, match="one id for each token"):
        model(tokens, torch.ones(3, 6, dtype=torch.long))
    with pytest.raises(ShapeError, match="mask must have the shape"):
        model(tokens, torch.ones(2, 6, dtype=torch.long), mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(DataError, match="max_length = 8"):
        model(torch.zeros(1, 9, dtype=torch.long), torch.ones(1, 9, dtype=torch.long))
    with pytest.raises(ShapeError, match="tokens must have the shape"):
        model(tokens[0], tokens[0])


# --- generation ---


@pytest.mark.parametrize("positions", ["rope", "fire", "coupled_relative"])
def test_a_cache_follows_the_samples_that_are_kept(positions: str) -> None:
    model = small(positions=positions)
    tokens = torch.randint(14, (3, 7))
    mask = torch.arange(7) >= torch.tensor([[0], [2], [1]])
    ids = (mask.cumsum(1) * mask) % 4
    rows, cache = torch.tensor([2, 0, 0, 1]), model.new_cache()
    full = model(tokens, ids, mask=mask)
    model(tokens[:, :4], ids[:, :4], mask=mask[:, :4], cache=cache)
    cache.select(rows)
    after = model(tokens[rows, 4:], ids[rows, 4:], mask=mask[rows, 4:], cache=cache)
    torch.testing.assert_close(after, full[rows, 4:], rtol=0, atol=1e-4)


def test_greedy_decoding_follows_the_full_pass() -> None:
    model = small(positions="coupled_relative")
    prompt, ids = torch.randint(14, (3, 5)), torch.randint(1, 6, (1, 12))
    tokens = prompt
    for t in range(5, 12):
        tokens = torch.cat((tokens, model(tokens, ids[:, :t])[:, -1:].argmax(-1)), 1)
    for use_cache in (True, False):
        produced = model.generate(prompt, ids, max_new_tokens=7, use_cache=use_cache)
        assert torch.equal(produced, tokens[:, 5:])


def test_ids_by_a_function_of_the_prefix() -> None:
    model = small(positions="coupled_relative")
    prompt, ids = torch.randint(14, (2, 5)), torch.randint(1, 6, (2, 12))
    seen = []

    def rule(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return ids[:, : tokens.shape[1]]

    by_rule = model.generate(prompt, rule, max_new_tokens=7)
    assert torch.equal(by_rule, model.generate(prompt, ids, max_new_tokens=7))
    assert seen == list(range(5, 12))


def test_end_token_stops_a_sample_and_the_batch() -> None:
    model = small()
    prompt = torch.randint(14, (4, 5))
    free = model.generate(prompt, max_new_tokens=6)
    eos = int(free[0, 2])
    stopped = model.generate(prompt, max_new_tokens=6, eos=eos)
    for row, whole in zip(stopped.tolist(), free.tolist(), strict=True):
        end = whole.index(eos) if eos in whole else len(whole)
        assert row[: end + 1] == whole[: min(end + 1, len(row))]
        assert all(token == eos for token in row[end:])


def test_generation_restores_the_mode() -> None:
    model = small().train()
    model.generate(torch.zeros(1, 2, dtype=torch.long), max_new_tokens=1)
    assert model.training


def test_generation_without_ids_for_a_coupled_model() -> None:
    model = small(positions="coupled_relative")
    prompt = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(DataError, match="needed to decode"):
        model.generate(prompt, max_new_tokens=2)
    with pytest.raises(ShapeError, match="must cover prompt and answer, 8 tokens; got 4"):
        model.generate(prompt, torch.ones(1, 4, dtype=torch.long), max_new_tokens=5)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        model.generate(prompt, max_new_tokens=0)


def test_masks_are_checked() -> None:
    model = small()
    tokens = torch.zeros(2, 3, dtype=torch.long)
    mask = torch.ones(2, 3, dtype=torch.bool)
    for wrong in (mask.long(), mask.float()):
        with pytest.raises(DtypeError, match="mask must be boolean"):
            model(tokens, mask=wrong)
    mask[0, 2] = False
    with pytest.raises(DataError, match="padded on the left"):
        model.generate(tokens, max_new_tokens=1, mask=mask)
    with pytest.raises(ShapeError, match="prompt must have the shape"):
        model.generate(tokens[0], max_new_tokens=1)
    coupled = small(positions="coupled_relative")
    with pytest.raises(ShapeError, match="Add the batch axis"):
        coupled.generate(tokens, torch.ones(5, dtype=torch.long), max_new_tokens=2)


def test_ids_beyond_the_table_name_the_maximum() -> None:
    model = small(positions={"name": "coupled", "max_position": 12})
    task = AdditionTask()
    prompt, ids = (
        task.encode("12345678901+1")[None],
        task.position_ids("12345678901+1", start=2)[None],
    )
    with pytest.raises(DataError, match="max_position = 12"):
        model.generate(prompt, ids, max_new_tokens=13)


# --- saving ---


@pytest.mark.parametrize("positions", ["rope", "coupled_relative", ENTRY])
def test_round_trip(tmp_path: Path, positions: object) -> None:
    model = small(
        positions=positions, attention={"num_kv_heads": 2}, norm={"name": "pre", "kind": "layer"}
    )
    model.save_pretrained(tmp_path)
    again = Decoder.from_pretrained(tmp_path)
    assert again.config == model.config
    assert not again.training
    tokens, ids = torch.randint(14, (2, 6)), torch.arange(1, 7)[None]
    assert torch.equal(again(tokens, ids), model(tokens, ids))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json does not exist\. Give a folder"):
        Decoder.from_pretrained(tmp_path)
    small().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model": "Encoder"}))
    with pytest.raises(DataError, match="must describe a Decoder; got 'Encoder'"):
        Decoder.from_pretrained(tmp_path)
    path.write_text(json.dumps({**config, "dimm": 3}))
    with pytest.raises(ConfigError, match="did you mean 'dim'"):
        Decoder.from_pretrained(tmp_path)
    path.write_text(json.dumps({**config, "dim": 32}))
    with pytest.raises(DataError, match="must hold the weights"):
        Decoder.from_pretrained(tmp_path)
    path.write_text('{\n "dim": }')
    with pytest.raises(DataError, match=r"config\.json, line 2, column 9"):
        Decoder.from_pretrained(tmp_path)
    path.write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="must hold the weights"):
        Decoder.from_pretrained(tmp_path)
