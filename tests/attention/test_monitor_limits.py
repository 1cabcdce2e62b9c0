"""Where monitors see less than they seem to: buffers, masks, blind spots."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer.attention import MismatchMonitor, MultiHeadAttention, RoundingMonitor
from gossamer.attention._sdpa_calls import AttentionCall


def test_a_copy_keeps_what_no_checkpoint_holds_in_full_precision() -> None:
    """Frequencies of rotary positions are float32 in a bfloat16 model as it is loaded."""
    seen = {}

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("frequencies", torch.full((4,), 0.3), persistent=False)
            self.register_buffer("kept", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            seen[self.weight.dtype] = (self.frequencies.dtype, self.kept.dtype)
            return super().forward(x * self.kept)

    MismatchMonitor(Layer(), dtype=torch.bfloat16).check(torch.randn(5, 4))
    assert seen[torch.bfloat16] == (torch.float32, torch.bfloat16)


def test_additive_masks_of_any_size_hide_keys(generator) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=generator).unbind()
    hidden = torch.zeros(6, 6, dtype=torch.bool)
    hidden[:, :3] = True
    hidden[:4] = True  # queries that see nothing
    for low in (-1e9, -65504.0, torch.finfo(torch.float32).min, -math.inf):
        bias = torch.zeros(6, 6).masked_fill(hidden, low)
        call = AttentionCall("", q, k, v, bias, False, 0.3, q)
        scores = call.scores(0, 6, q, k)
        assert torch.equal(scores.isfinite(), ~hidden.expand_as(scores))


def test_a_monitor_says_where_it_is_blind(generator) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv_proj(x).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, dim=-1)
            out = nn.functional.scaled_dot_product_attention(q, k, v)
            return out.transpose(1, 2).flatten(2)

    x = torch.randn(2, 5, 8, generator=generator)
    model = Fused()
    with (
        RoundingMonitor(model, every=1),
        pytest.warns(UserWarning, match="weights of .* not found"),
    ):
        model(x).sum().backward()

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MultiHeadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=True)

    again = Again()
    with RoundingMonitor(again, every=1), pytest.warns(UserWarning, match="use_reentrant=False"):
        again(x.requires_grad_()).sum().backward()
