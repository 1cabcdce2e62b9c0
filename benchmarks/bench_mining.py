"""Time to mine neighbours, and of the rerank alone against plain Python and other libraries.

Texts: English sentences of `tatoeba_zh_en` in `GOSSAMER_DATA` (punctuation split off, lower case,
distinct), or made-up ones where it is absent; a seeded draw of them, and above their number halves
of two joined. One thread. NLTK and sacreBLEU take part where they are installed.
Run: OMP_NUM_THREADS=1 python benchmarks/bench_mining.py [12000 27000 100000]
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import os
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from gossamer.measures import sentence_bleu
from gossamer.retrieval import mine_neighbors
from gossamer.retrieval._bleu_rerank import GramIndex
from gossamer.retrieval._neighbor_search import nearest
from gossamer.retrieval._neighbor_vectors import encode

PAIRS = 20_000  # for the plain reranks


def sentences(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    path = Path(os.environ.get("GOSSAMER_DATA", "")) / "tatoeba_zh_en" / "cmn.tsv.gz"
    if path.is_file():
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        raw = [line.split("\t")[0].lower() for line in lines]
        texts = list(dict.fromkeys(" ".join(re.findall(r"[\w']+|[^\w\s]", text)) for text in raw))
    else:
        print("no tatoeba_zh_en in GOSSAMER_DATA: made-up sentences", file=sys.stderr)
        words = [f"w{int(i)}" for i in rng.zipf(1.3, 50_000) if i < 20_000]
        texts = [" ".join(rng.choice(words, rng.integers(3, 12))) for _ in range(20_000)]
    found = [texts[i] for i in rng.permutation(len(texts))[:count]]
    while len(found) < count:  # the first part of one sentence and the second of another
        a, b = (texts[i].split() for i in rng.integers(len(texts), size=2))
        found.append(" ".join(a[: len(a) // 2] + b[len(b) // 2 :]))
    return found


def timed(name: str, run: Callable[[], object]) -> object:
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"  {name:34}{wall:10.3f} s wall{cpu:10.3f} s CPU")
    return result


def whole(count: int) -> None:
    texts = sentences(count)
    print(f"\n{count} sentences, {sum(len(t.split()) for t in texts) / count:.1f} words each")
    table = timed("mine_neighbors", lambda: mine_neighbors(texts))
    found = table.to_dict()
    print(f"  mean BLEU {found['mean_bleu']:.3f}, without neighbours {found['share_without']:.1%}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"  largest memory of the process so far {peak:.2f} GiB")


def parts(count: int) -> None:
    texts = sentences(count)
    print(f"\nparts, {count} sentences, 100 nearest each")
    vectors = timed("embedding", lambda: encode(texts, "tfidf", texts))
    rows = np.arange(count)
    places, _ = timed("search", lambda: nearest(vectors, vectors, rows, rows, 100))
    grams = timed("n-grams", lambda: GramIndex(texts, 4))
    timed("rerank", lambda: grams.scores(rows, places.astype(np.int64)))


def kept_counts(pairs: list[tuple[str, str]]) -> list[float]:
    """Return the BLEU of pairs from n-gram counts that each text has once."""
    grams: dict[str, list[Counter[tuple[str, ...]]]] = {}
    for text in {text for pair in pairs for text in pair}:
        words = text.split()
        grams[text] = [
            Counter(zip(*(words[i:] for i in range(n)), strict=False)) for n in range(1, 5)
        ]
    found = []
    for a, b in pairs:
        product = 1.0
        for n, (own, other) in enumerate(zip(grams[a], grams[b], strict=True)):
            small, large = (own, other) if len(own) < len(other) else (other, own)
            matches = sum(min(count, large[gram]) for gram, count in small.items() if gram in large)
            product *= (matches + (n > 0)) / (max(0, len(a.split()) - n) + (n > 0))
        brevity = min(1.0, math.exp(1 - len(b.split()) / len(a.split())))
        found.append(brevity * product**0.25)
    return found


def reranks(count: int) -> None:
    """Time the BLEU of the same pairs by each."""
    texts = sentences(count)
    rows = np.arange(PAIRS // 100)
    vectors = encode(texts, "tfidf", texts)
    places, _ = nearest(vectors[rows], vectors, rows, np.arange(count), 100)
    pairs = [(texts[j], texts[i]) for i in rows for j in places[i]]
    grams = GramIndex(texts, 4)
    runs: dict[str, Callable[[], object]] = {
        "compiled": lambda: grams.scores(rows, places.astype(np.int64)).ravel(),
        "sentence_bleu, plain Python": lambda: [sentence_bleu(a, b) for a, b in pairs],
        "plain Python, counts kept": lambda: kept_counts(pairs),
    }
    if importlib.util.find_spec("sacrebleu"):
        from sacrebleu.metrics import BLEU

        metric = BLEU(tokenize="none", smooth_method="add-k", smooth_value=1, effective_order=True)
        runs["sacreBLEU"] = lambda: [metric.sentence_score(a, [b]).score / 100 for a, b in pairs]
    if importlib.util.find_spec("nltk"):
        from nltk.translate.bleu_score import SmoothingFunction
        from nltk.translate.bleu_score import sentence_bleu as of_nltk

        smooth = SmoothingFunction().method2  # add one above single words
        runs["NLTK"] = lambda: [
            of_nltk([b.split()], a.split(), smoothing_function=smooth) for a, b in pairs
        ]
    print(f"\n{len(pairs)} pairs of sentences")
    values = {name: np.array(timed(name, run)) for name, run in runs.items()}
    for name, value in values.items():
        print(
            f"  largest difference to compiled, {name}: {abs(value - values['compiled']).max():.1e}"
        )


def main() -> None:
    mine_neighbors(["a b c", "a b d"], min_bleu=0.0)  # compile
    sizes = [int(size) for size in sys.argv[1:]] or [12_000]
    with threadpool_limits(1):
        parts(sizes[0])
        reranks(sizes[0])
        for size in sizes:
            whole(size)


if __name__ == "__main__":
    main()
