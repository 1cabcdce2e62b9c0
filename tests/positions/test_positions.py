"""What holds for every position encoding, and the exact values of the simple ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.models import Decoder
from gossamer.positions import (
    POSITION_NAMES,
    AlibiPositions,
    CoupledPositions,
    LearnedPositions,
    RopePositions,
    alibi_slopes,
    build_positions,
)
from tests.conftest import DATA

REFERENCE = json.loads((DATA / "length-task-fixtures" / "position_bias.json").read_text())

ENTRIES = {
    "none": {},
    "learned": {"max_position": 64},
    "coupled": {"max_position": 64},
    "coupled_relative": {},
    "rope": {},
    "alibi": {},
    "fire": {"init_length": 8.0},
}


def test_every_encoding_is_tested() -> None:
    assert set(ENTRIES) == set(POSITION_NAMES)


def decoder(name: str, **options: object) -> Decoder:
    torch.manual_seed(0)
    entry = {"name": name, **ENTRIES[name], **options}
    return Decoder(14, 32, 2, 4, positions=entry, norm="pre_post").eval()


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
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [*ENTRIES, "sequence"])
@torch.no_grad()
def test_left_padding_changes_nothing(name: str) -> None:
    by_length = {"length_scale": "sequence"}
    model = decoder("coupled_relative", **by_length) if name == "sequence" else decoder(name)
    tokens, ids = inputs()
    pad = torch.zeros(3, 4, dtype=torch.long)
    mask = torch.arange(24).expand(3, 24) >= 4
    padded = model(torch.cat((pad, tokens), 1), torch.cat((pad, ids), 1), mask=mask)
    torch.testing.assert_close(padded[:, 4:], model(tokens, ids), atol=1e-4, rtol=0)


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
    encoding = build_positions(
        name,
        dim=32,
        num_heads=4,
        head_dim=8,
        **(ENTRIES[name] | ({"max_position": 400} if "max_position" in ENTRIES[name] else {})),
    )
    ids = torch.arange(256, 260)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bias = encoding.bias(ids, ids, q_index=ids - 1)
        q = torch.randn(1, 4, 4, 8).bfloat16()
        turned, _ = encoding.rotate(q, q, ids, ids, q_index=ids - 1)
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


def test_unknown_names_and_options() -> None:
    sizes = {"dim": 8, "num_heads": 2, "head_dim": 4}
    with pytest.raises(ConfigError, match="did you mean 'fire'"):
        build_positions("fir", **sizes)
    with pytest.raises(ConfigError, match="did you mean 'window'"):
        build_positions("coupled_relative", **sizes, windw=2)
    with pytest.raises(ConfigError, match="needs the option 'max_position'"):
        build_positions("learned", **sizes)
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


# --- ALiBi ---


@pytest.mark.parametrize("heads", sorted(REFERENCE["alibi_slopes"], key=int))
def test_alibi_slopes(heads: str) -> None:
    expected = torch.tensor(REFERENCE["alibi_slopes"][heads], dtype=torch.float32)
    torch.testing.assert_close(alibi_slopes(int(heads)), expected, atol=1e-7, rtol=1e-6)


def test_alibi_bias_by_hand() -> None:
    ids = torch.tensor([[0, 1, 3, 7]])
    bias = AlibiPositions(2, bidirectional=True).bias(ids, ids, q_index=ids)
    slopes = np.array([2.0**-4, 2.0**-8])
    p = np.array([0, 1, 3, 7])
    distance = np.abs(p[:, None] - p[None]) * ((p > 0)[:, None] & (p > 0)[None])
    np.testing.assert_allclose(bias[0].numpy(), -slopes[:, None, None] * distance, rtol=1e-6)
    causal = AlibiPositions(2).bias(ids, ids, q_index=ids)
    assert causal[0, 0, 1, 2] == 0
    assert causal[0, 0, 2, 1] == -2 * 2.0**-4


# --- RoPE ---


@pytest.mark.parametrize("row", REFERENCE["rope"], ids=lambda row: f"{row['pos']}-{row['theta']:g}")
def test_rope_angles(row: dict) -> None:
    half = row["head_dim"] // 2
    rope = RopePositions(row["head_dim"], theta=row["theta"])
    ids = torch.tensor([[row["pos"] + 1]])
    q = torch.cat((torch.ones(half), torch.zeros(half))).view(1, 1, 1, -1)
    turned, _ = rope.rotate(q, q, ids, ids, q_index=ids)
    np.testing.assert_allclose(turned[0, 0, 0, :half].numpy(), row["cos"], atol=1e-4)
    np.testing.assert_allclose(turned[0, 0, 0, half:].numpy(), row["sin"], atol=1e-4)


@torch.no_grad()
def test_rope_logits_depend_on_the_difference_only() -> None:
    rope = RopePositions(16, theta=100.0)
    q = torch.randn(1, 2, 5, 16)
    ids = torch.tensor([[1, 4, 4, 9, 30]])
    near = rope.rotate(q, q, ids, ids, q_index=ids)
    far = rope.rotate(q, q, ids + 70, ids + 70, q_index=ids)
    torch.testing.assert_close(near[0] @ near[1].mT, far[0] @ far[1].mT, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(near[0].norm(dim=-1), q.norm(dim=-1))


def test_rope_scale_interpolates() -> None:
    q = torch.randn(1, 1, 1, 8)
    half = RopePositions(8, scale=0.5).rotate(
        q, q, torch.tensor([[21]]), torch.tensor([[21]]), q_index=q
    )
    whole = RopePositions(8).rotate(q, q, torch.tensor([[11]]), torch.tensor([[11]]), q_index=q)
    torch.testing.assert_close(half[0], whole[0])


# --- learned tables ---


def test_distinct_consecutive_ids_equal_plain_absolute_positions() -> None:
    plain, coupled = LearnedPositions(8, 20), CoupledPositions(8, 20)
    coupled.tables[0].load_state_dict(plain.table.state_dict())
    ids = torch.arange(1, 15)[None]
    assert torch.equal(plain.embed(ids), coupled.embed(ids))


@pytest.mark.parametrize(("rows", "dim"), [(10, 32), (32, 32), (50, 32)])
def test_rows_start_orthogonal_where_they_fit(rows: int, dim: int) -> None:
    table = CoupledPositions(dim, rows - 1).tables[0].weight.detach().double()
    products = table @ table.T if rows <= dim else table.T @ table
    size = max(rows, dim)
    torch.testing.assert_close(
        products, size * torch.eye(min(rows, dim)).double(), atol=1e-4, rtol=0
    )
    assert table.std().item() == pytest.approx(1.0, rel=0.05)


def test_levels_are_summed_and_row_zero_learns() -> None:
    coupled = CoupledPositions(8, [5, 9], levels=2)
    ids = torch.tensor([[[0, 9], [5, 0]]])
    expected = coupled.tables[0](ids[..., 0]) + coupled.tables[1](ids[..., 1])
    assert torch.equal(coupled.embed(ids), expected)
    coupled.embed(ids).sum().backward()
    assert coupled.tables[0].weight.grad[0].abs().sum() > 0
    shared = CoupledPositions(8, [5, 9], levels=2, shared=True)
    assert len(shared.tables) == 1
    assert torch.equal(shared.embed(ids), shared.tables[0](ids).sum(2))


def test_a_table_names_its_maximum() -> None:
    with pytest.raises(DataError, match="max_position = 5"):
        CoupledPositions(8, 5).embed(torch.tensor([[6]]))
    with pytest.raises(DataError, match="max_position = 5 at level 1"):
        CoupledPositions(8, [5, 9], levels=2).embed(torch.tensor([[[6, 9]]]))
    with pytest.raises(ConfigError, match="one entry for each of 2 levels"):
        CoupledPositions(8, [5], levels=2)


def test_random_start_is_drawn_for_each_sample_of_a_batch() -> None:
    torch.manual_seed(0)
    positions = {"name": "learned", "max_position": 60, "random_start": True}
    model = Decoder(14, 16, 1, 2, positions=positions)
    tokens = torch.randint(14, (1, 8)).expand(6, 8)
    assert not torch.allclose(model.train()(tokens)[0], model(tokens)[1])
    rows = model(tokens)
    assert len({tuple(row.flatten().tolist()) for row in rows}) > 3
    assert torch.equal(model.eval()(tokens)[0], model(tokens)[1])


@pytest.mark.parametrize("name", ["rope", "fire", "alibi"])
def test_a_model_in_half_precision_keeps_far_positions(name: str) -> None:
    """Casting a whole module must not cost its positions their precision."""
    options = ENTRIES[name]
    full = build_positions(name, dim=32, num_heads=4, head_dim=8, **options)
    half = build_positions(name, dim=32, num_heads=4, head_dim=8, **options)
    half.load_state_dict(full.state_dict())
    half = half.bfloat16()
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


def test_random_start_reaches_every_row_and_keeps_zero() -> None:
    torch.manual_seed(0)
    learned = LearnedPositions(4, 12, random_start=True).train()
    ids = torch.tensor([[0, 1, 2, 3]]).expand(400, 4)
    learned.embed(ids).sum().backward()
    touched = learned.table.weight.grad.abs().sum(1) > 0
    assert touched.all()
    # 0 is not shifted: its row was looked up once for each sample
    assert learned.table.weight.grad[0, 0] == 400
    learned.eval()
    assert torch.equal(learned.embed(ids[:1])[0, 1:], learned.table(torch.tensor([4, 5, 6])))
    with pytest.raises(DataError, match="max_position = 12"):
        learned.embed(torch.arange(1, 12)[None])
