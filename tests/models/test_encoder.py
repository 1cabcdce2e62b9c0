"""The encoder: what it sees, padding anywhere, segments, saving, and what a user can get wrong."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

from gossamer.attention import bias
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.models import Decoder, Encoder
from gossamer.positions import POSITION_NAMES

SEGMENTED = {"name": "diet_absolute", "num_segments": 2, "rank": 3, "init_std": 0.5}
EXTRA = {"coupled": {"max_position": 12}}
FREE = sorted(set(POSITION_NAMES) - {"coupled", "coupled_relative"})


def small(**options: object) -> Encoder:
    torch.manual_seed(0)
    return Encoder(14, 16, 2, 4, **{"max_length": 12, **options}).eval()


def randomised(model: Encoder) -> Encoder:
    """Give tables that start at zero other values, so that a lost term is seen."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.positions.parameters():
            if not parameter.any():
                parameter.normal_()
    return model.eval()


# --- reference values ---


def test_one_layer_equals_its_formula() -> None:
    model = small(num_segments=3).double()
    tokens, segments = torch.randint(14, (2, 5)), torch.randint(3, (2, 5))
    block = model.layers[0]
    model.layers = model.layers[:1]
    ids = torch.arange(1, 6)[None]
    x = (
        model.embedding.weight[tokens]
        + model.positions[0].table.weight[ids]
        + model.segment_embedding.weight[segments]
    )
    y = block.around_attention.before(x)
    q, k, v = (
        linear(y).view(2, 5, 4, 4).transpose(1, 2)
        for linear in (block.attention.to_q, block.attention.to_k, block.attention.to_v)
    )
    weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
    x = x + block.attention.to_out((weights @ v).transpose(1, 2).flatten(2))
    x = x + block.feed_forward(block.around_feed_forward.before(x))
    expected = model.head(model.final_norm(x))
    torch.testing.assert_close(model(tokens, segments=segments), expected)


def test_segments_in_the_bias_are_a_table_for_each_head() -> None:
    """With equal content everywhere, a layer's attention is the softmax of the bias alone."""
    model = randomised(small(positions=SEGMENTED, num_segments=2))
    seen = {}
    model.layers[0].attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    segments = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    model(torch.zeros(2, 5, dtype=torch.long), segments=segments)
    diet = model.positions[0]
    product = diet.query[:, :5] @ diet.key[:, :5].transpose(1, 2)
    for b in range(2):
        table = diet.segments[:, segments[b]][:, :, segments[b]]
        torch.testing.assert_close(seen["bias"][b], product + table)


# --- limits and invariances ---


@pytest.mark.parametrize("name", FREE)
def test_every_token_sees_both_sides(name: str) -> None:
    model = randomised(small(positions=name))
    tokens = torch.randint(14, (1, 7))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 14
    assert not torch.allclose(model(tokens)[0, 2], model(changed)[0, 2])
    changed = tokens.clone()
    changed[0, 1] = (tokens[0, 1] + 1) % 14
    assert not torch.allclose(model(tokens)[0, 2], model(changed)[0, 2])


@pytest.mark.parametrize("name", FREE)
def test_padding_may_stand_anywhere(name: str) -> None:
    model = randomised(small(positions=name))
    real = torch.tensor([[0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    tokens = torch.randint(14, (2, 7))
    padded = model(tokens, mask=real)
    for b in range(2):
        alone = model(tokens[b][real[b]][None])
        torch.testing.assert_close(padded[b][real[b]], alone[0])
    other = torch.where(real, tokens, 3)
    torch.testing.assert_close(model(other, mask=real)[real], padded[real])


@pytest.mark.parametrize("share", [True, False])
def test_segments_move_with_padding(share: bool) -> None:
    model = randomised(small(positions={**SEGMENTED, "share": share}))
    real = torch.tensor([[0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    tokens, segments = torch.randint(14, (1, 6)), torch.tensor([[1, 0, 0, 1, 1, 1]])
    alone = model(tokens[real][None], segments=segments[real][None])
    torch.testing.assert_close(model(tokens, mask=real, segments=segments)[real], alone[0])


def test_without_positions_tokens_can_be_permuted() -> None:
    model = small(positions="none")
    tokens, order = torch.randint(14, (1, 7)), torch.randperm(7)
    torch.testing.assert_close(model(tokens[:, order]), model(tokens)[:, order])


def test_bidirectional_is_the_default_of_an_encoder_only() -> None:
    found = []
    for name in POSITION_NAMES:
        model = small(positions={"name": name, **EXTRA.get(name, {})})
        if "bidirectional" in inspect.signature(type(model.positions[0])).parameters:
            found.append(name)
            assert all(p.bidirectional for p in model.positions)
            entry = {"name": name, "bidirectional": False}
            assert not small(positions=entry).positions[0].bidirectional
            assert not Decoder(14, 16, 1, 4, positions=name).positions[0].bidirectional
    assert {"alibi", "fire", "t5", "kerple_log"} <= set(found)


def test_the_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(small(positions="t5")).double()
    tokens, real = torch.randint(14, (2, 9)), torch.rand(2, 9) > 0.3
    whole = model(tokens, mask=real)
    monkeypatch.setattr(bias, "DIRECT_SIZE", 0)
    monkeypatch.setattr("gossamer.attention.core.BLOCK_SIZE", 2 * 4 * 9 * 2)
    torch.testing.assert_close(model(tokens, mask=real), whole)


def test_a_sample_without_a_real_token_is_finite() -> None:
    model = small()
    real = torch.tensor([[1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    out = model(torch.randint(14, (2, 3)), mask=real)
    assert torch.isfinite(out).all()


# --- segments ---


def test_segments_at_the_input_are_a_sum() -> None:
    model = small(num_segments=2)
    tokens = torch.randint(14, (2, 5))
    zeros = torch.zeros(2, 5, dtype=torch.long)
    torch.testing.assert_close(model(tokens), model(tokens, segments=zeros))
    assert not torch.allclose(model(tokens), model(tokens, segments=zeros + 1))
    plain = small()
    plain.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        plain.embedding.weight += model.segment_embedding.weight[1]
    torch.testing.assert_close(plain(tokens), model(tokens, segments=zeros + 1))


def test_segments_travel_in_the_ids_or_beside_them() -> None:
    model = randomised(small(positions={**SEGMENTED, "ids": "task"}))
    assert model.segments_in_ids
    assert model.segment_embedding is None
    tokens, segments = torch.randint(14, (2, 5)), torch.randint(2, (2, 5))
    ids = torch.tensor([[1, 2, 3, 2, 1]])
    both = torch.stack((ids.expand(2, 5), segments + 1), dim=-1)
    beside = model(tokens, ids, segments=segments)
    torch.testing.assert_close(model(tokens, both), beside)
    counted = randomised(small(positions=SEGMENTED))
    counted.load_state_dict(model.state_dict())
    torch.testing.assert_close(
        counted(tokens, segments=segments),
        model(tokens, torch.arange(1, 6)[None], segments=segments),
    )
    torch.testing.assert_close(counted(tokens), counted(tokens, segments=segments * 0))


def test_bad_segments() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(DataError, match="num_segments=0"):
        small()(tokens, segments=tokens)
    model = small(num_segments=2)
    for wrong in (tokens + 2, tokens - 1):
        with pytest.raises(DataError, match=r"segments must be 0 to num_segments - 1 = 1"):
            model(tokens, segments=wrong)
    with pytest.raises(ShapeError, match="segments must have the shape"):
        model(tokens, segments=tokens[:, :2])
    with pytest.raises(DtypeError, match="segments must be integers"):
        model(tokens, segments=tokens.float())
    with pytest.raises(ConfigError, match="must agree; got 3 and 2"):
        small(positions=SEGMENTED, num_segments=3)
    with pytest.raises(ConfigError, match="num_segments must be"):
        small(num_segments=-1)


# --- ids ---


def test_coupled_ids_are_read() -> None:
    model = randomised(small(positions="coupled_relative"))
    tokens, ids = torch.randint(14, (2, 6)), torch.tensor([[0, 2, 1, 2, 1, 0]])
    assert not torch.allclose(model(tokens, ids), model(tokens, ids.flip(1)))
    torch.testing.assert_close(model(tokens, ids), model(tokens, ids + 7 * (ids > 0)))
    with pytest.raises(DataError, match="position_ids are needed"):
        model(tokens)
    with pytest.raises(ShapeError, match="one id for each token"):
        model(tokens, ids[:, :4])


def test_levels_of_coupled_ids() -> None:
    model = randomised(small(positions={"name": "coupled_relative", "levels": 2}))
    tokens, ids = torch.randint(14, (2, 6)), torch.randint(4, (2, 6, 2))
    assert model(tokens, ids).shape == (2, 6, 14)
    with pytest.raises(ShapeError, match=r"\(B, T, 2\)"):
        model(tokens, ids[..., 0])


def test_a_random_start_is_drawn_for_each_sample() -> None:
    entry = {"name": "learned", "max_position": 40, "random_start": True}
    model = small(positions=entry).train()
    tokens = torch.ones(16, 5, dtype=torch.long)
    assert len({row.sum().item() for row in model(tokens)}) > 1


def test_max_length_is_the_table_of_the_encoding() -> None:
    assert small().positions[0].max_position == 12
    for name in ("diet_absolute", "diet_relative"):
        assert small(positions=name).positions[0].max_length == 12
        entry = {"name": name, "max_length": 5}
        assert small(positions=entry).positions[0].max_length == 5
    with pytest.raises(DataError, match="max_length = 12 long; got 13"):
        small()(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ConfigError, match="needs the option 'max_position'"):
        small(max_length=None)


# --- gradients ---


def test_token_and_position_rows_get_the_same_gradient_at_the_input() -> None:
    """The identity for input-additive positions: one sample, every token and position once."""
    model = small(max_length=6)
    tokens = torch.randperm(14)[:6][None]
    model(tokens).square().sum().backward()
    by_token = model.embedding.weight.grad[tokens[0]]
    torch.testing.assert_close(by_token, model.positions[0].table.weight.grad[1:7])


@pytest.mark.parametrize("name", ["learned", "t5", "diet_relative"])
def test_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = Encoder(5, 4, 1, 2, positions=name, num_segments=2, max_length=4).double()
    tokens, segments = torch.randint(5, (2, 4)), torch.randint(2, (2, 4))
    real = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]], dtype=torch.bool)
    out = model(tokens, mask=real, segments=segments)[real]
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        index = tuple(int(i) for i in (parameter.grad.abs() > 0).nonzero()[0])
        step = torch.zeros_like(parameter)
        step[index] = 1e-5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step
                values.append(model(tokens, mask=real, segments=segments)[real].square().sum())
                parameter -= sign * step
        slope = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(parameter.grad[index], slope, rtol=1e-5, atol=1e-7)


# --- saving and construction ---


@pytest.mark.parametrize(
    "options",
    [
        {"num_segments": 2},
        {"positions": SEGMENTED},
        {"positions": {"name": "fire", "init_length": 8.0}, "norm": "post"},
        {"attention": {"name": "linformer", "length": 12, "projection_dim": 3}},
        {"positions": "none", "attention": {"name": "shaw", "max_distance": 3}},
    ],
)
def test_round_trip(tmp_path: Path, options: dict) -> None:
    model = small(**options)
    model.save_pretrained(tmp_path)
    again = Encoder.from_pretrained(tmp_path)
    assert again.config == model.config
    tokens = torch.randint(14, (2, 6))
    assert torch.equal(again(tokens), model(tokens))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model"] == "Encoder"
    with pytest.raises(DataError, match="must describe a Decoder; got 'Encoder'"):
        Decoder.from_pretrained(tmp_path)


def test_out_norm_is_an_option() -> None:
    model = small(attention={"out_norm": "layer", "num_kv_heads": 2})
    assert model(torch.randint(14, (1, 5))).shape == (1, 5, 14)


def test_causality_is_told() -> None:
    assert Encoder.causal is False
    assert Decoder.causal is True


def test_the_smallest_input() -> None:
    assert small()(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, 14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"positions": "bert"}, "unknown position encoding"),
        ({"norm": "sandwich"}, "unknown norm"),
        ({"positions": {"name": "t5", "shar": True}}, "unknown key 'shar'"),
        ({"positions": {"name": "t5", "share": "yes"}}, "share must be true or false"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    base = {"vocab_size": 14, "dim": 16, "num_layers": 1, "num_heads": 4, "max_length": 8}
    with pytest.raises(ConfigError, match=message):
        Encoder(**{**base, **options})


def test_masks_and_tokens_are_checked() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(DtypeError, match="mask must be boolean"):
        small()(tokens, mask=torch.ones(1, 3))
    with pytest.raises(ShapeError, match="tokens must have the shape"):
        small()(tokens[0])
