"""Tiny random models of transformers, and what an attention layer of each computes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCAB = 14
# kind -> model class, config class, further options; imported by name, so that the slow imports
# of transformers happen while tests are collected and not inside of one
GROUPED = {"num_key_value_heads": 2}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED),
    "mistral": (MistralForCausalLM, MistralConfig, {**GROUPED, "sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GROUPED),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**GROUPED, "head_dim": 4}),
    "bert": (BertForMaskedLM, BertConfig, {}),
    "roberta": (RobertaForMaskedLM, RobertaConfig, {"type_vocab_size": 2}),
}
# renamed within version 5
CACHE = (
    "cache"
    if "cache" in inspect.signature(GPT2LMHeadModel.forward).parameters
    else ("past_key_values")
)
CAUSAL = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


def make(kind: str, *, seed: int = 0, **options: Any) -> Any:
    """Build a random model in evaluation mode, float64, without dropout."""
    model_class, config_class, extra = KINDS[kind]
    sizes = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 24, **extra, **options}
    if kind not in ("gpt2",):
        sizes["intermediate_size"] = 32
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = config_class(**sizes, **tokens)
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():  # the start of transformers is too small to see a lost term
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0 if "embed" not in name and "wte" not in name else 20.0)
    return model.double().eval()


def attention_layers(model: Any) -> list[torch.nn.Module]:
    """Return the self-attention modules."""
    names = ("attn", "self_attn", "attention.self")
    return [m for n, m in model.named_modules() if n.endswith(tuple(f".{x}" for x in names))]


def attention_by_hand(module: Any, x: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention of one layer from its weights; `mask` is True where a key is seen."""
    kind = type(module).__name__
    if kind == "GPT2Attention":
        q, k, v = (x @ module.c_attn.weight + module.c_attn.bias).split(16, dim=-1)
        project = module.c_proj
    elif kind.endswith("SelfAttention"):
        q, k, v = module.query(x), module.key(x), module.value(x)
        project = torch.nn.Identity()  # the output map is another module
    else:
        q, k, v = module.q_proj(x), module.k_proj(x), module.v_proj(x)
        project = module.o_proj
    q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))
    if kind == "Qwen3Attention":
        q, k = module.q_norm(q), module.k_norm(k)
    k, v = (y.repeat_interleave(4 // y.shape[1], dim=1) for y in (k, v))
    logits = q @ k.transpose(-1, -2) / 2 + bias
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return project((weights @ v).transpose(1, 2).flatten(2))
