"""Attention over blocks of queries against attention with the whole bias."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.attention import PositionBias, attend, bias, core, position_bias
from gossamer.models import Decoder
from gossamer.positions import (
    AlibiPositions,
    CoupledRelativePositions,
    FirePositions,
    NoPositions,
    RopePositions,
)


@pytest.fixture
def _tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias, "DIRECT_SIZE", 0)
    monkeypatch.setattr(core, "BLOCK_SIZE", 200)


def inputs(length: int, keys: int, kv_heads: int = 4, batch: int = 2):
    g = torch.Generator().manual_seed(0)
    shapes = ((batch, 4, length, 6), (batch, kv_heads, keys, 6), (batch, kv_heads, keys, 5))
    return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]


def encoding() -> FirePositions:
    torch.manual_seed(0)
    return FirePositions(4, init_length=4.0, coupled=True).double()


def both(q, k, v, mask=None, *, causal=False, dropout=0.0):
    """Return outputs and gradients of the whole form and of the blocks."""
    length, keys = q.shape[2], k.shape[2]
    k_ids = torch.randint(0, keys, (2, keys), generator=torch.Generator().manual_seed(1))
    q_ids, index = k_ids[:, keys - length :], torch.arange(keys - length, keys)[None]
    results = []
    for whole in (True, False):
        fire = encoding()
        lazy = PositionBias(fire, q_ids, k_ids, index)
        given = fire.bias(q_ids, k_ids, q_index=index) if whole else lazy
        torch.manual_seed(3)
        out = attend(q, k, v, mask, bias=given, causal=causal, dropout=dropout)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        tensors = (q, k, v, *fire.parameters())
        results.append((out, *torch.autograd.grad((out * weight).sum(), tensors)))
    return results


# --- equality with the whole form ---


@pytest.mark.usefixtures("_tiny_blocks")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "keys", "kv_heads", "masking"),
    [
        (1, 1, 4, "none"),
        (13, 13, 4, "none"),
        (13, 13, 2, "keys"),
        (13, 13, 1, "pairs"),
        (7, 40, 2, "none"),
        (7, 40, 4, "pairs"),
        (31, 31, 1, "keys"),
    ],
)
def test_outputs_and_gradients_equal_the_whole_form(causal, length, keys, kv_heads, masking):
    q, k, v = inputs(length, keys, kv_heads)
    mask = None
    if masking == "keys":
        mask = torch.arange(keys)[None, None, None] >= torch.tensor([0, 3]).view(2, 1, 1, 1)
    if masking == "pairs":
        mask = torch.rand(2, 4, length, keys, generator=torch.Generator().manual_seed(2)) > 0.3
    for whole, blocks in zip(*both(q, k, v, mask, causal=causal), strict=True):
        torch.testing.assert_close(blocks, whole, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("_tiny_blocks")
def test_queries_without_keys_before_them() -> None:
    q, k, v = inputs(9, 4)
    lazy = PositionBias(
        AlibiPositions(4), torch.arange(1, 10)[None], torch.arange(1, 5)[None], torch.zeros(1, 9)
    )
    out = attend(q, k, v, bias=lazy, causal=True)
    torch.testing.assert_close(out, attend(q, k, v, bias=lazy.rows(0, 9), causal=True))
    assert (out[:, :, :5] == 0).all()


@pytest.mark.usefixtures("_tiny_blocks")
def test_dropout_draws_the_same_for_the_gradient() -> None:
    """With fixed draws the output is linear in v, so its gradient gives it back."""
    q, k, v = inputs(9, 9, batch=1)
    ids = torch.arange(1, 10)[None]
    lazy = PositionBias(AlibiPositions(4), ids, ids, ids - 1)
    torch.manual_seed(0)
    out = attend(q, k, v, bias=lazy, dropout=0.5)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    torch.rand(7)  # the state of the generator in between must not matter
    (grad,) = torch.autograd.grad((out * weight).sum(), v)
    torch.testing.assert_close((grad * v).sum(), (out * weight).sum())


class Whole(torch.nn.Module):
    """Attention with the encoding inside, so that `functional_call` can replace its tensors."""

    def __init__(self, positions: FirePositions) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, q, k, v):
        ids = torch.arange(1, q.shape[2] + 1)[None]
        lazy = PositionBias(self.positions, ids, ids, ids - 1)
        return attend(q, k, v, bias=lazy, causal=True)


@pytest.mark.usefixtures("_tiny_blocks")
def test_gradcheck_also_of_replaced_parameters(monkeypatch) -> None:
    """The gradient is taken after `functional_call` has put the module's own tensors back."""
    monkeypatch.setattr(core, "BLOCK_SIZE", 16)
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    layer = Whole(FirePositions(2, hidden_dim=2, init_length=2.0)).double()
    names = [name for name, _ in layer.named_parameters()]
    start = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    q, k, v = (torch.randn(1, 2, 4, 2, generator=g, dtype=torch.float64) for _ in range(3))

    def run(q, *tensors):
        return functional_call(layer, dict(zip(names, tensors, strict=True)), (q, k, v))

    assert torch.autograd.gradcheck(run, (q.requires_grad_(), *start))


@pytest.mark.usefixtures("_tiny_blocks")
@pytest.mark.parametrize("name", ["fire", "alibi", "coupled_relative", "rope"])
def test_a_model_does_not_change(name, monkeypatch) -> None:
    torch.manual_seed(0)
    entry = {"name": name, "ids": "task"}
    model = Decoder(14, 16, 2, 4, positions=entry, attention={"num_kv_heads": 2}).double()
    tokens, ids = torch.randint(14, (3, 20)), torch.arange(1, 21)[None]
    mask = torch.arange(20) >= torch.tensor([[0], [4], [9]])
    results = []
    for size in (0, 2**24):
        monkeypatch.setattr(bias, "DIRECT_SIZE", size)
        out = model(tokens, ids, mask=mask)
        out[mask].square().sum().backward()
        results.append([out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    for blocks, whole in zip(*results, strict=True):
        torch.testing.assert_close(blocks, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("_tiny_blocks")
def test_a_cache_filled_by_blocks_decodes_alike() -> None:
    torch.manual_seed(0)
    model = Decoder(14, 16, 2, 4, positions="coupled_relative").eval()
    prompt, ids = torch.randint(14, (2, 30)), torch.randint(1, 9, (2, 36))
    lazy = model.generate(prompt, ids, max_new_tokens=6, use_cache=True)
    tokens = prompt
    for t in range(30, 36):
        logits = model(tokens, ids[:, :t])
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(lazy, tokens[:, 30:])


# --- no array of T x S ---


class Largest(TorchDispatchMode):
    """Note the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, torch.Tensor):
                self.numel = max(self.numel, part.numel())
        return out


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_as_large_as_the_bias_is_made(masked, monkeypatch) -> None:
    monkeypatch.setattr(core, "BLOCK_SIZE", 2**13)
    length = 256
    q = torch.randn(1, 2, length, 4, requires_grad=True)
    ids = torch.arange(1, length + 1)[None]
    mask = torch.arange(length)[None, None, None] > 3 if masked else None
    positions = CoupledRelativePositions(2)
    largest = {}
    for size in (0, 2**24):
        monkeypatch.setattr(bias, "DIRECT_SIZE", size)
        with Largest() as seen:
            made = position_bias(positions, ids, ids, q_index=ids - 1, num_heads=2)
            attend(q, q, q, mask, bias=made, causal=True).sum().backward()
        largest[size] = seen.numel
    assert largest[2**24] >= 2 * length**2
    assert largest[0] <= 2 * length**2 / 8


# --- which form is taken ---


def test_small_and_dependent_biases_stay_whole(monkeypatch) -> None:
    ids = torch.arange(1, 9)[None]

    def make(positions):
        return position_bias(positions, ids, ids, q_index=ids - 1, num_heads=2)

    alibi = AlibiPositions(2)
    assert isinstance(make(alibi), torch.Tensor)
    monkeypatch.setattr(bias, "DIRECT_SIZE", 2 * 8 * 8 - 1)
    assert isinstance(make(alibi), PositionBias)
    for positions in (RopePositions(4), NoPositions()):
        assert make(positions) is None
    # the scale of one query depends on the last one
    assert isinstance(make(CoupledRelativePositions(2, length_scale="sequence")), torch.Tensor)
    # positions are drawn once for all queries
    drawn = FirePositions(2, random_max_position=16)
    assert isinstance(make(drawn), torch.Tensor)
    assert isinstance(make(drawn.eval()), PositionBias)
