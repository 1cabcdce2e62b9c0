"""Tiny random language models with a real tokenizer, and the scores of a prompt by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

CHAT = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content | trim }}</s>\n"
    "{% endfor %}"
)
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 4}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
}
DOCUMENTS = [
    {"id": "d1", "title": "Wings", "text": "carry lift"},
    {"id": "d2", "text": "heat in slabs"},
    {"id": "d3", "title": "Bodies", "text": "of revolution in a supersonic stream of air"},
    {"id": "d4", "text": ""},
]


def tokenizer(chat: str | None = CHAT) -> Any:
    """Return a tokenizer of bytes, with two special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {x: i for i, x in enumerate(letters, start=2)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = chat
    return fast


def language_model(kind: str = "llama", *, layers: int = 3, **options: Any) -> Any:
    """Return a random model with 9 query heads and 3 key heads, in evaluation mode."""
    model_class, config_class, extra = KINDS[kind]
    heads = {} if kind == "gpt2" else {"num_key_value_heads": 3, "intermediate_size": 48}
    sizes = {
        "vocab_size": 258, "hidden_size": 36, "num_hidden_layers": layers,
        "num_attention_heads": 9, "max_position_embeddings": 2048, **heads, **extra, **options,
    }  # fmt: skip
    config = config_class(**sizes, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():  # the start of transformers is too small to see a lost term
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


def saved(folder: Path) -> Path:
    """Save a model and its tokenizer."""
    language_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def logits_by_hand(
    model: Any, prompt: Any, layer: int, *, mask: Tensor, positions: Tensor
) -> Tensor:
    """Return the signal logits from a run of the whole Llama model under a given mask."""
    with torch.no_grad():
        states = model(
            prompt.input_ids[None], attention_mask=mask[None, None], position_ids=positions[None],
            output_hidden_states=True, use_cache=False,
        ).hidden_states[layer]  # fmt: skip
        block = model.model.layers[layer]
        normed = block.input_layernorm(states)
        q, k = (
            project(normed).unflatten(-1, (-1, 4)).transpose(1, 2)
            for project in (block.self_attn.q_proj, block.self_attn.k_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(states, positions[None]))
    layout = prompt.layout
    blocks = layout.block_ids()
    documents = (blocks > 0) & (blocks < layout.num_blocks - 1)
    last = int((blocks == layout.num_blocks - 1).nonzero()[0])
    rows = [last + signal for signal in layout.signals]
    keys = k[:, :, documents].repeat_interleave(3, dim=1)
    return q[:, :, rows] @ keys.transpose(-1, -2) / 2.0
