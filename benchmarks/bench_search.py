"""Exact search of vectors with NumPy, torch and faiss, and the evaluation of a large run.

Run: python benchmarks/bench_search.py [search | evaluate]
"""

from __future__ import annotations

import sys

import numpy as np
import pytrec_eval
import torch
from _timing import medians, show

from gossamer.retrieval import evaluate_run, search_top_k

torch.set_num_threads(1)


def main() -> None:
    chosen = sys.argv[1:] or ["search", "evaluate"]
    if "search" in chosen:
        search()
    if "evaluate" in chosen:
        evaluate()


def search() -> None:
    rng = np.random.default_rng(0)
    documents = rng.standard_normal((100_000, 384), dtype=np.float32)
    for count in (1000, 1):
        queries = rng.standard_normal((count, 384), dtype=np.float32)
        tensors = torch.from_numpy(queries), torch.from_numpy(documents)
        runs = {
            "numpy": lambda q=queries: search_top_k(q, documents, 100),
            "torch": lambda t=tensors: search_top_k(*t, 100),
            "faiss": lambda q=queries: search_top_k(q, documents, 100, engine="faiss"),
            "faiss, blocks of 32,768": lambda q=queries: search_top_k(
                q, documents, 100, engine="faiss", block_size=32_768
            ),
        }
        places = [run()[1] for run in runs.values()]
        same = [float((np.asarray(each) == places[0]).mean()) for each in places]
        title = f"{count} queries x 100,000 documents x 384, top 100"
        show(title, medians(runs, repeats=2), "numpy")
        print("places equal to NumPy's:", ", ".join(f"{100 * share:.2f} %" for share in same))


def evaluate() -> None:
    rng = np.random.default_rng(0)
    names = [f"d{number}" for number in range(100_000)]
    run, qrels = {}, {}
    for number in range(10_000):
        found = (97 * np.arange(1000) + 13 * number) % len(names)
        scores = rng.permutation(1000) / 1024  # no ties, exact in float32
        run[f"q{number}"] = dict(zip([names[i] for i in found], scores.tolist(), strict=True))
        qrels[f"q{number}"] = {names[i]: 1 for i in found[:5]}
    ours = ["ndcg@10", "recall@100", "map"]
    peer = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "recall.100", "map"})
    runs = {
        "gossamer": lambda: evaluate_run(qrels, run, ours),
        "pytrec_eval": lambda: peer.evaluate(run),
    }
    title = "3 metrics of 10,000 queries x 1000 documents"
    show(title, medians(runs, repeats=2), "gossamer", unit="s")


if __name__ == "__main__":
    main()
