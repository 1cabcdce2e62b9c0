"""Ranking with SmolLM2-135M: one prompt read to the middle against a full prefill of the model.

Model: 30 layers, width 576, float32; layer 18 is read. Documents of about 32 tokens, made of
Cranfield-like words. Run: python benchmarks/bench_ranker.py [--documents 25 50 100 200]
Times are CPU seconds of one thread, medians; runs of more than 20 s are taken once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from gossamer.retrieval import BlockRanker

WORDS = [
    "wing",
    "lift",
    "drag",
    "boundary",
    "layer",
    "supersonic",
    "flow",
    "heat",
    "transfer",
    "plate",
    "shock",
    "wave",
    "pressure",
    "body",
    "velocity",
    "theory",
    "laminar",
    "turbulent",
    "buckling",
    "shell",
    "cone",
    "mach",
    "number",
    "nose",
    "angle",
    "stress",
]
QUERY = "what is the effect of heat transfer on a laminar boundary layer?"


def documents(count: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    return [
        {"id": str(i), "text": " ".join(draw.choices(WORDS, k=draw.randint(11, 17)))}
        for i in range(count)
    ]


def cpu_seconds(work: Callable[[], Any], repeats: int) -> float:
    found: list[float] = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
        if found[0] > 20.0:
            break
    return statistics.median(found)


def prefill_of(ranker: BlockRanker, given: list[dict[str, str]]) -> Callable[[], Any]:
    """Return a prefill of the whole model under causal attention, with the last token's logits."""
    prompt = ranker.template.prompt(QUERY, [one["text"] for one in given])
    tokens = prompt.input_ids[None]
    return torch.inference_mode()(
        lambda: ranker.model(tokens, logits_to_keep=1, use_cache=True).logits
    )


def compare_with_prefill(ranker: BlockRanker, counts: list[int]) -> None:
    print("documents  tokens  full prefill s  ranker s  ratio")
    for count in counts:
        given = documents(count)
        repeats = 3 if count <= 50 else 1
        ours = cpu_seconds(lambda given=given: ranker.rank(QUERY, given), repeats)
        full = cpu_seconds(prefill_of(ranker, given), repeats)
        tokens = len(ranker.template.prompt(QUERY, [one["text"] for one in given]).input_ids)
        print(f"{count:9d}  {tokens:6d}  {full:14.2f}  {ours:8.2f}  {full / ours:5.2f}", flush=True)


def compare_with_cache(ranker: BlockRanker, count: int) -> None:
    given = documents(count)
    fresh = cpu_seconds(lambda: ranker.rank(QUERY, given), 3)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        kept = ranker.cache({one["id"]: one["text"] for one in given}, folder, quiet=True)
        made = time.process_time() - begin
        size = sum(path.stat().st_size for path in kept.folder.iterdir()) / 2**20
        served = cpu_seconds(lambda: ranker.rank(QUERY, given), 5)
    ranker.document_cache = None
    print(
        f"{count} documents: read for each query {fresh:.2f} s, from the cache {served:.2f} s, "
        f"ratio {fresh / served:.1f}; making the cache {made:.2f} s, {size:.0f} MB in float16"
    )


def compare_engines(ranker: BlockRanker, count: int) -> None:
    given, found = documents(count), {}
    for engine in ("mask4d", "block", "three_pass"):
        ranker.engine = engine
        result = ranker.rank(QUERY, given)
        found[engine] = [result.scores[result.order.index(place)] for place in range(count)]
    for engine in ("block", "three_pass"):
        pairs = zip(found[engine], found["mask4d"], strict=True)
        largest = max(abs(a - b) / b for a, b in pairs)
        print(f"{engine} against mask4d: largest relative difference of a score {largest:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[25, 50, 100, 200])
    counts = parser.parse_args().documents
    torch.set_num_threads(1)
    ranker = BlockRanker.from_pretrained("packaged:smollm2", layer=18)
    ranker.rank(QUERY, documents(2))
    compare_engines(ranker, 10)
    for threads in (2, 1):
        torch.set_num_threads(threads)
        clock = time.perf_counter()
        used = cpu_seconds(lambda: ranker.rank(QUERY, documents(20)), 3)
        clock = (time.perf_counter() - clock) / 3
        print(f"20 documents, {threads} threads: {clock:.2f} s on the clock, {used:.2f} s of CPU")
    compare_with_prefill(ranker, counts)
    apart = BlockRanker(ranker.model, ranker.tokenizer, layer=18, query_in_prefix=False)
    compare_with_cache(apart, 100)


if __name__ == "__main__":
    main()
