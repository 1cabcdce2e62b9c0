"""What holds for every position encoding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.models import Decoder
from gossamer.positions import POSITION_NAMES, Positions, build_positions

ENTRIES = {
    "none": {},
    "learned": {"max_position": 64},
    "coupled": {"max_position": 64},
    "coupled_relative": {},
    "rope": {},
    "alibi": {},
    "kerple_log": {},
    "kerple_power": {},
    "t5": {"num_buckets": 8, "max_distance": 16},
    "fire": {"init_length": 8.0},
    "diet_absolute": {"max_length": 64, "rank": 4},
    "diet_relative": {"max_length": 16},
}


# encodings that read the ids of a task, with options and levels of the ids
TASK_ENTRIES = {
    "rope": ({}, 1),
    "alibi": ({}, 1),
    "kerple_log": ({}, 1),
    "kerple_power": ({}, 1),
    "t5": ({}, 1),
    "fire": ({"coupled": True}, 1),
    "coupled": ({"levels": 2}, 2),
    "coupled_relative": ({"levels": 2}, 2),
    "diet_absolute": ({"num_segments": 7}, 2),
    "diet_relative": ({"num_segments": 7}, 2),
}


def test_every_encoding_is_tested() -> None:
    assert set(ENTRIES) == set(POSITION_NAMES)


def stirred(module: nn.Module) -> nn.Module:
    """Fill tables that start at 0, so that what they do can be seen."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_()
    return module


def decoder(name: str, **options: object) -> Decoder:
    torch.manual_seed(0)
    entry = {"name": name, **ENTRIES[name], **options}
    return stirred(Decoder(14, 32, 2, 4, positions=entry, norm="pre_post").eval())


def encoding(name: str, **options: object) -> Positions:
    torch.manual_seed(0)
    sizes = {"dim": 32, "num_heads": 4, "head_dim": 8}
    return stirred(build_positions(name, **sizes, **{**ENTRIES[name], **options}))


def far_options(name: str, furthest: int) -> dict:
    """Room for far ids in the encodings that have tables."""
    keys = {"max_position", "max_length"} & set(ENTRIES[name])
    return dict.fromkeys(keys, furthest)


def inputs(length: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(14, (3, length), generator=generator)
    return tokens, torch.randint(8, (3, length), generator=generator)


# --- what holds for every encoding ---


@pytest.mark.parametrize("name", ENTRIES)
@torch.no_grad()
def test_cached_decoding_equals_full_pass(name: str) -> None:
    model = decoder(name)
    tokens, ids = inputs()
    full = model(tokens, ids)
    cache = model.new_cache()
    parts = [model(tokens[:, :7], ids[:, :7], cache=cache)]
    parts += [
        model(tokens[:, t : t + 1], ids[:, t : t + 1], cache=cache)
        for t in range(7, tokens.shape[1])
    ]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", TASK_ENTRIES)
@torch.no_grad()
def test_cached_decoding_equals_full_pass_with_the_ids_of_a_task(name: str) -> None:
    options, levels = TASK_ENTRIES[name]
    model = decoder(name, ids="task", **options)
    tokens, ids = inputs()
    if levels == 2:
        ids = torch.stack((ids, ids.flip(1)), dim=-1)
    full = model(tokens, ids)
    cache = model.new_cache()
    parts = [model(tokens[:, a:b], ids[:, a:b], cache=cache) for a, b in ((0, 7), (7, 9))]
    parts += [
        model(tokens[:, t : t + 1], ids[:, t : t + 1], cache=cache)
        for t in range(9, tokens.shape[1])
    ]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=0)
    assert (model(tokens, ids.flip(0)) - full).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*ENTRIES, "sequence"])
@torch.no_grad()
def test_left_padding_changes_nothing(name: str) -> None:
    by_length = {"length_scale": "sequence"}
    model = decoder("coupled_relative", **by_length) if name == "sequence" else decoder(name)
    tokens, ids = inputs()
    pad = torch.zeros(3, 4, dtype=torch.long)
    mask = torch.arange(24).expand(3, 24) >= 4
    padded = model(torch.cat((pad, tokens), 1), torch.cat((pad, ids), 1), mask=mask)
    torch.testing.assert_close(padded[:, 4:], model(tokens, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ENTRIES)
@torch.no_grad()
def test_samples_with_different_padding_are_as_if_alone(name: str) -> None:
    model = decoder(name)
    tokens, ids = inputs()
    mask = torch.arange(20).expand(3, 20) >= torch.tensor([[0], [3], [7]])
    together = model(tokens, ids * mask, mask=mask)
    for row, pad in enumerate((0, 3, 7)):
        alone = model(tokens[row : row + 1, pad:], ids[row : row + 1, pad:])
        torch.testing.assert_close(together[row : row + 1, pad:], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ENTRIES)
@torch.no_grad()
def test_the_future_is_invisible(name: str) -> None:
    model = decoder(name)
    tokens, ids = inputs()
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 14
    torch.testing.assert_close(model(tokens, ids)[:, :12], model(changed, ids)[:, :12])


@pytest.mark.parametrize("name", ENTRIES)
def test_every_parameter_learns(name: str) -> None:
    model = decoder(name).train()
    tokens, ids = inputs()
    model(tokens, ids).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", ENTRIES)
@torch.no_grad()
def test_half_precision_keeps_positions_apart(name: str) -> None:
    """Under bfloat16 autocast neighbouring far positions are still told apart where they can be."""
    positions = encoding(name, **far_options(name, 400))
    ids = torch.arange(256, 260)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bias = positions.bias(ids, ids, q_index=ids - 1)
        q = torch.randn(1, 4, 4, 8).bfloat16()
        turned, _ = positions.rotate(q, q, ids, ids, q_index=ids - 1)
    assert turned.dtype == torch.bfloat16
    if bias is not None:
        assert bias.dtype == torch.float32
        assert bias[0, 0, 3, 2] != bias[0, 0, 3, 1]


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("bad", ["negative", "float", "short", "levels"])
def test_bad_ids(name: str, bad: str) -> None:
    model = decoder(name, ids="task")
    tokens, ids = inputs()
    values = {
        "negative": (ids - 9, DataError, "must be >= 0"),
        "float": (ids.float(), DtypeError, "must be integers"),
        "short": (ids[:, :5], ShapeError, "one id for each token"),
        "levels": (ids[..., None].expand(-1, -1, 2), ShapeError, "level"),
    }
    value, error, message = values[bad]
    with pytest.raises(error, match=message):
        model(tokens, value)


@pytest.mark.parametrize("name", ENTRIES)
@torch.no_grad()
def test_int32_ids_are_as_good(name: str) -> None:
    positions = encoding(name)
    ids = torch.tensor([[0, 1, 2, 4, 5], [0, 0, 1, 2, 7]])
    for kept in (ids, ids[:1], ids[:1, 1:3]):
        q = torch.randn(len(kept), 4, kept.shape[1], 8)
        long, short = (
            (
                positions.embed(i),
                positions.bias(i, i, q_index=i),
                *positions.rotate(q, q, i, i, q_index=i),
            )
            for i in (kept, kept.int())
        )
        for a, b in zip(long, short, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
@torch.no_grad()
def test_a_compiled_graph_has_no_branch_on_data(name: str) -> None:
    positions = encoding(name)
    ids = torch.tensor([[0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6]])
    q = torch.randn(2, 4, 6, 8)

    def hooks(ids: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor | None]:
        turned = positions.rotate(q, q, ids, ids, q_index=ids)
        return [positions.embed(ids), positions.bias(ids, ids, q_index=ids), *turned]

    torch.compiler.reset()  # each encoding is a new graph of the same code
    compiled = torch.compile(hooks, backend="eager", fullgraph=True)
    for ours, expected in zip(compiled(ids, q), hooks(ids, q), strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected)


def test_unknown_names_and_options() -> None:
    sizes = {"dim": 8, "num_heads": 2, "head_dim": 4}
    with pytest.raises(ConfigError, match="did you mean 'fire'"):
        build_positions("fir", **sizes)
    with pytest.raises(ConfigError, match="did you mean 'window'"):
        build_positions("coupled_relative", **sizes, windw=2)
    with pytest.raises(ConfigError, match="needs the option 'max_position'"):
        build_positions("learned", **sizes)
    with pytest.raises(ConfigError, match="needs the option 'max_length'"):
        build_positions("diet_relative", **sizes)
    with pytest.raises(ConfigError, match="even"):
        build_positions("rope", dim=8, num_heads=2, head_dim=3)


# --- no positions ---


@torch.no_grad()
def test_one_layer_without_positions_ignores_the_order_of_the_query() -> None:
    """The theorem of Cho et al.: permuting the query leaves the next token's logits unchanged."""
    torch.manual_seed(0)
    model = Decoder(14, 32, 1, 4, positions="none").double().eval()
    tokens, _ = inputs()
    permuted = tokens.clone()
    permuted[:, :-1] = tokens[:, torch.randperm(19)]
    difference = (model(tokens)[:, -1] - model(permuted)[:, -1]).abs().max()
    assert difference < 1e-12
    assert (decoder("rope")(tokens)[:, -1] - decoder("rope")(permuted)[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "name",
    ["rope", "fire", "alibi", "kerple_log", "kerple_power", "t5", "diet_absolute", "diet_relative"],
)
def test_a_model_in_half_precision_keeps_far_positions(name: str) -> None:
    """Casting a whole module must not cost its positions their precision."""
    full = encoding(name, **far_options(name, 4100))
    half = copy.deepcopy(full).bfloat16()
    ids = torch.arange(4000, 4004)[None]
    q = torch.randn(1, 4, 4, 8)
    turned = half.rotate(q.bfloat16(), q.bfloat16(), ids, ids, q_index=ids - 1)[0].float()
    torch.testing.assert_close(
        turned, full.rotate(q, q, ids, ids, q_index=ids - 1)[0], atol=0.05, rtol=0
    )
    bias = full.bias(ids, ids, q_index=ids - 1)
    if bias is not None:
        torch.testing.assert_close(
            half.bias(ids, ids, q_index=ids - 1).float(), bias, atol=0.02, rtol=0.02
        )
