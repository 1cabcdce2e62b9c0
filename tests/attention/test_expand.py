"""Larger heads that compute the same: every kind of layer, models, save and load, bad input."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from gossamer.attention import LinformerAttention, MultiHeadAttention, expand_heads
from gossamer.errors import ConfigError, UnsupportedError
from gossamer.models import Decoder

KINDS = {
    "plain": {},
    "bias": {"bias": True},
    "grouped": {"num_kv_heads": 2},
    "values of their own": {"value_dim": 3},
    "head size of its own": {"head_dim": 5},
    "layer norm": {"out_norm": "layer"},
    "rms norm": {"out_norm": "rms"},
    "fixed scale": {"scale": 1.0},
}


def inputs(length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, length, 16, generator=g)
    mask = torch.rand(2, 1, length, length, generator=g) > 0.4
    return x, mask


# --- reference values ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [5, 16, 33])
def test_outputs_stay_after_growing_and_after_a_round_trip(kind, head_dim) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4, **KINDS[kind])
    x, mask = inputs()
    wide = expand_heads(layer, head_dim)
    assert wide.head_dim == head_dim
    sizes = {"value_dim": wide.value_dim, "head_dim": head_dim}
    again = MultiHeadAttention(16, 4, **{**KINDS[kind], **sizes})
    again.load_state_dict(load(save(wide.state_dict())))
    for seen in (None, mask):
        for causal in (False, True):
            out = layer(x, seen, causal=causal)
            for grown in (wide, again):
                torch.testing.assert_close(grown(x, seen, causal=causal), out, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("head_dim", [4, 32])
def test_layer_of_torch(bias, head_dim) -> None:
    """With `head_dim` = dim / heads this is `nn.MultiheadAttention` itself."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, bias=bias, batch_first=True)
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    ours = expand_heads(theirs, head_dim)
    x, _ = inputs()
    wanted = theirs(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(ours(x), wanted, atol=1e-6, rtol=1e-5)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)  # True = left out, for torch
    wanted = theirs(x, x, x, attn_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(ours(x, ~hidden), wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours(x, causal=True), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", [None, {"out_norm": "rms", "num_kv_heads": 2}])
def test_model_of_this_library_and_its_folder(attention, tmp_path) -> None:
    torch.manual_seed(0)
    model = Decoder(20, 16, 2, 4, positions="fire", attention=attention).eval()
    tokens = torch.randint(20, (2, 9))
    wide = expand_heads(model, 12)
    assert wide.layers[1].attention.head_dim == 12
    assert model.layers[1].attention.head_dim == 4
    torch.testing.assert_close(wide(tokens), model(tokens), atol=1e-5, rtol=1e-5)
    wide.save_pretrained(tmp_path)
    again = Decoder.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(tokens), model(tokens), atol=1e-5, rtol=1e-5)


# --- limits and invariances ---


def test_the_old_layer_is_untouched_and_new_parts_can_learn() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4).double().eval()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    wide = expand_heads(layer, 10)
    assert wide.to_q.weight.dtype == torch.float64
    assert not wide.training
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    x, _ = inputs()
    wide(x.double()).square().sum().backward()
    assert (wide.to_q.weight.grad.view(4, 10, 16)[:, 4:] != 0).all()
    assert (wide.to_out.weight.grad.view(16, 4, 10)[..., 4:] != 0).all()


def test_number_of_parameters() -> None:
    for heads, head_dim, bias in ((4, 20, False), (3, 7, True)):  # 3 does not divide 16
        layer = MultiHeadAttention(16, heads, head_dim=head_dim, bias=bias)
        count = sum(p.numel() for p in layer.parameters())
        assert count == 4 * 16 * heads * head_dim + bias * (3 * heads * head_dim + 16)


def test_a_layer_that_is_used_twice_stays_one() -> None:
    layer = MultiHeadAttention(16, 4)
    wide = expand_heads(nn.ModuleList([layer, layer]), 8)
    assert wide[0] is wide[1]


def test_gradients_of_a_wide_layer() -> None:
    torch.manual_seed(0)
    layer = expand_heads(MultiHeadAttention(4, 2, bias=True).double(), 3)
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x, causal=True), x)


# --- bad input ---


def test_bad_input() -> None:
    layer = MultiHeadAttention(16, 4)
    with pytest.raises(ConfigError, match="head_dim must be at least the present size, 4; got 3"):
        expand_heads(layer, 3)
    with pytest.raises(ConfigError, match="head_dim must be >= 1"):
        expand_heads(layer, 0)
    with pytest.raises(UnsupportedError, match="got RopePositions, which would pair"):
        expand_heads(Decoder(20, 16, 1, 4, positions="rope"), 8)
    with pytest.raises(UnsupportedError, match="got LinformerAttention"):
        expand_heads(LinformerAttention(16, 4, length=8, projection_dim=2), 8)
    with pytest.raises(UnsupportedError, match="got MultiheadAttention"):
        expand_heads(nn.TransformerEncoderLayer(16, 4), 8)
    with pytest.raises(UnsupportedError, match="got Linear"):
        expand_heads(nn.Linear(4, 4), 8)
    for options in ({"kdim": 8}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(UnsupportedError, match="equal widths of queries, keys and values"):
            expand_heads(nn.MultiheadAttention(16, 4, **options), 8)


def test_head_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"multiple of num_heads .* Give head_dim"):
        MultiHeadAttention(16, 3)
    with pytest.raises(ConfigError, match="head_dim must be >= 1"):
        MultiHeadAttention(16, 4, head_dim=0)
    with pytest.raises(ConfigError, match="head_dim must be even"):
        Decoder(20, 16, 1, 4, positions="rope", attention={"head_dim": 5})
