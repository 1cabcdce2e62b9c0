"""Blocks and attention of this library inside decoders of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gossamer.attention import MultiHeadAttention, SparkAttention
from gossamer.errors import ConfigError, UnsupportedError
from gossamer.layers import PackedSparkFeedForward, SparkFeedForward
from gossamer.models import Decoder, replace_attention, replace_feed_forward

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **options})
    return transformers.LlamaForCausalLM(config).eval()


def gemma() -> Any:
    torch.manual_seed(0)
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=16)
    ).eval()


@pytest.mark.parametrize("make", [llama, gemma])
def test_spark_blocks_pack_without_changing_what_is_generated(make: Any) -> None:
    model = replace_feed_forward(make(), lambda old: SparkFeedForward.like(old, k=0.2))
    prompt = torch.randint(1, 50, (2, 9))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    with torch.no_grad():
        before = model.generate(prompt, **options)
        logits = model(prompt).logits
        replace_feed_forward(model, lambda block: block.pack(engine="torch"))
        assert isinstance(model.model.layers[2].mlp, PackedSparkFeedForward)
        torch.testing.assert_close(model(prompt).logits, logits, atol=1e-5, rtol=0)
        assert torch.equal(model.generate(prompt, **options), before)


def own_attention(old: Any) -> MultiHeadAttention:
    """The same projections, so that the model must give the same as before."""
    new = MultiHeadAttention(32, 4, num_kv_heads=2)
    names = [("to_q", "q_proj"), ("to_k", "k_proj"), ("to_v", "v_proj"), ("to_out", "o_proj")]
    for ours, theirs in names:
        getattr(new, ours).load_state_dict(getattr(old, theirs).state_dict())
    return new


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_same_attention_gives_the_same_model(attention: str) -> None:
    """Mask, rotary positions, grouped keys and the cache are the model's own."""
    theirs = llama(attn_implementation=attention)
    ours = replace_attention(llama(attn_implementation=attention), own_attention)
    tokens = torch.randint(1, 50, (2, 9))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0  # padding on the left
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}):
            a, b = theirs(tokens, **options).logits, ours(tokens, **options).logits
            seen = mask.bool() if options else mask >= 0
            torch.testing.assert_close(b[seen], a[seen], atol=1e-5, rtol=0)
            options = {**options, "max_new_tokens": 8, "do_sample": False}
            assert torch.equal(ours.generate(tokens, **options), theirs.generate(tokens, **options))


def test_spark_attention_generates_with_the_cache_as_without() -> None:
    torch.manual_seed(0)
    model = replace_attention(llama(), lambda old: SparkAttention(32, 4, k=5, num_kv_heads=2))
    prompt = torch.randint(1, 50, (2, 12))
    with torch.no_grad():
        out = model.generate(prompt, max_new_tokens=10, do_sample=False)
        full = model(out[:, :-1], use_cache=False).logits
    assert torch.equal(full[:, 11:].argmax(-1), out[:, 12:])


def test_masks_and_models_that_would_be_misread_are_refused() -> None:
    model = replace_attention(llama(), own_attention)
    layer = model.model.layers[0].self_attn
    x, ids = torch.randn(2, 6, 32), torch.arange(6)[None]
    for mask in (torch.ones(2, 6), torch.ones(2, 1, 1, 6, dtype=torch.bool)):
        with pytest.raises(UnsupportedError, match="must say what each query sees"):
            layer(x, attention_mask=mask, position_ids=ids)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.vision = llama().model.layers, llama().model.layers

    with pytest.raises(UnsupportedError, match="one list of layers with mlp; got 2"):
        replace_feed_forward(Two(), SparkFeedForward.like)


def test_some_layers_only() -> None:
    model = replace_feed_forward(llama(), SparkFeedForward.like, layers=[1])
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    assert kinds == ["LlamaMLP", "SparkFeedForward", "LlamaMLP"]
    half = replace_attention(llama().bfloat16(), own_attention, layers=[2])
    assert half.model.layers[2].self_attn.layer.to_q.weight.dtype == torch.bfloat16
    assert half(torch.ones(1, 4, dtype=torch.long)).logits.dtype == torch.bfloat16


def test_a_model_of_this_library_is_packed_by_the_same_call() -> None:
    torch.manual_seed(0)
    feed_forward = {"name": "spark", "hidden_dim": 200, "k": 0.1}
    model = Decoder(11, 32, 2, 4, feed_forward=feed_forward).eval()
    tokens = torch.randint(11, (2, 9))
    with torch.no_grad():
        before = model(tokens)
        replace_feed_forward(model, lambda block: block.pack(engine="torch"))
        assert isinstance(model.layers[1].feed_forward, PackedSparkFeedForward)
        torch.testing.assert_close(model(tokens), before, atol=1e-5, rtol=0)


def test_bad_input() -> None:
    with pytest.raises(UnsupportedError, match=r"list of layers with mlp.*got Linear"):
        replace_feed_forward(nn.Linear(2, 2), SparkFeedForward.like)
    with pytest.raises(ConfigError, match="layers must be >= 0 and <= 2; got 3"):
        replace_feed_forward(llama(), SparkFeedForward.like, layers=[3])
    with pytest.raises(ConfigError, match="factory must return a module; got NoneType"):
        replace_feed_forward(llama(), lambda old: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match=r"must return a MultiHeadAttention.*got Identity"):
        replace_attention(llama(), lambda old: nn.Identity())
    scaled = llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UnsupportedError, match="must have plain rotary positions"):
        replace_attention(scaled, own_attention)
