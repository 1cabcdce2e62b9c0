"""Tokens a second of transformers' `generate`, with added positions against the plain model.

Model: a random Llama, 4 layers, width 256, 8 heads; batch 8, prompt 64, 64 new tokens.
Run: python benchmarks/bench_hf.py   (needs the extra `hf`)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _timing import medians
from transformers import LlamaConfig, LlamaForCausalLM

from gossamer.models import add_positions

torch.set_num_threads(1)

BATCH, PROMPT, NEW = 8, 64, 64
ENTRIES = {
    "none": {},
    "rope": {},
    "alibi": {},
    "t5": {},
    "fire": {"init_length": 32.0},
    "coupled_relative": {},
}


def generation(name: str) -> Callable[[], object]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    options = {"max_new_tokens": NEW, "do_sample": False}
    if name != "plain":
        add_positions(model, {"name": name, **ENTRIES[name]})
        options["position_ids"] = torch.arange(1, PROMPT + 1)[None]
    prompt = torch.randint(2, 1000, (BATCH, PROMPT))
    return lambda: model.generate(prompt, **options)


def main() -> None:
    names = ("plain", *ENTRIES)
    seconds = medians({name: generation(name) for name in names}, repeats=7)
    print(f"{'generate, batch 8':28}{'tokens/s':>10}{'ratio':>9}")
    for name in names:
        rate = BATCH * NEW / seconds[name]
        label = "plain Llama (own RoPE)" if name == "plain" else f"added {name}"
        print(f"{label:28}{rate:10,.0f}{seconds['plain'] / seconds[name]:9.2f}")


if __name__ == "__main__":
    main()
