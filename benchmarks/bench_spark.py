"""Statistical top-k against sorting, one token through Spark against dense, and decoding attention.

Run: python benchmarks/bench_spark.py [--repeats 15] [--generate]
CPU time of one thread, runs in turn, medians; every run gets fresh random input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from gossamer.attention import MultiHeadAttention, SparkAttention, statistical_top_k
from gossamer.recipes._sparse_layers import decode_runs
from gossamer.recipes._timing import cpu_medians


def table(title: str, seconds: dict[str, float], against: str) -> None:
    print(f"\n{title}\n{'':34}{'ms':>10}{'times as fast':>15}")
    for name, value in seconds.items():
        print(f"{name:34}{value * 1e3:10.3f}{seconds[against] / value:15.2f}")


def operator(repeats: int) -> None:
    for size, dtype in ((4096, torch.float32), (9216, torch.float32), (9216, torch.bfloat16)):
        x = torch.randn(256, size).to(dtype)
        k = round(0.08 * size)

        def by_sorting(x: Any = x, k: int = k) -> Any:
            values, places = x.topk(k, dim=-1)
            return torch.zeros_like(x).scatter_(-1, places, values)

        def by_kth(x: Any = x, k: int = k) -> Any:
            return torch.where(x >= x.kthvalue(x.shape[-1] - k + 1, keepdim=True).values, x, 0)

        runs: dict[str, Callable[[], object]] = {
            "topk + scatter": by_sorting,
            "kthvalue": by_kth,
            "statistical_top_k": lambda x=x, k=k: statistical_top_k(x, k),
        }
        table(
            f"256 x {size}, {dtype}, k = {k}", cpu_medians(runs, repeats=repeats), "topk + scatter"
        )


def feed_forward(repeats: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        dense, sparse = decode_runs(2304, 13824, 1024, 1106, dtype)
        seconds = cpu_medians({**dense, **sparse}, repeats=repeats)
        best = min(dense, key=lambda name: seconds[name])
        table(f"one token, width 2304, 8 % of 13,824 active, {dtype}", seconds, best)


def attention(repeats: int) -> None:
    """8 heads of size 256, keys in a cache; Spark reads half of each key and 256 whole rows."""
    full, spark = (
        kind(2048, 8, head_dim=256, **options).eval()
        for kind, options in ((MultiHeadAttention, {}), (SparkAttention, {"k": 256}))
    )
    options: dict[str, Any] = {"bias": None, "causal": True, "index": None}
    for context in (4096, 8192, 16384, 32768):
        k, v = torch.randn(2, 1, 8, context, 256)
        q = torch.randn(1, 8, 1, 256)
        runs = {
            "full": lambda k=k, v=v, q=q: full.mix(q, k, v, None, **options),
            "Spark": lambda k=k, v=v, q=q: spark.mix(q, k, v, None, **options),
        }
        seconds = cpu_medians(runs, repeats=repeats)
        table(f"attention of one token, {context} keys, float32", seconds, "full")
        whole = 2 * 256 * context
        print(f"{'share of the bytes of the cache':34}{(128 * context + 384 * 256) / whole:10.3f}")


def generation() -> None:
    """A Llama of 0.6 billion random weights: dense, and the same with Spark blocks packed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from gossamer.layers import SparkFeedForward
    from gossamer.models import replace_feed_forward

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=4,
        eos_token_id=None,
    )
    prompt = torch.randint(3, 32_000, (1, 8))
    for dtype in (torch.float32, torch.bfloat16):
        dense = LlamaForCausalLM(config).to(dtype).eval()
        count = sum(p.numel() for p in dense.parameters())
        spark = LlamaForCausalLM(config).to(dtype).eval()
        replace_feed_forward(spark, SparkFeedForward.like)
        replace_feed_forward(spark, lambda block: block.pack())
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        runs = {
            "dense": lambda m=dense, o=options: m.generate(prompt, **o),
            "Spark": lambda m=spark, o=options: m.generate(prompt, **o),
        }
        seconds = cpu_medians(runs, repeats=3)
        table(f"12 tokens of a Llama, {count / 1e9:.2f} billion weights, {dtype}", seconds, "dense")
        for name, value in seconds.items():
            print(f"{name:34}{12 / value:10.2f} tokens a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--generate", action="store_true", help="also the Llama, 5 GB of memory")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        operator(options.repeats)
        feed_forward(options.repeats)
        attention(options.repeats)
        if options.generate:
            generation()


if __name__ == "__main__":
    main()
