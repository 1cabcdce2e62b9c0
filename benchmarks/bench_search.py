"""Exact search of vectors with NumPy, torch and faiss.

Run: python benchmarks/bench_search.py
"""

from __future__ import annotations

import numpy as np
import torch
from _timing import medians, show

from gossamer.retrieval import search_top_k

torch.set_num_threads(1)


def main() -> None:
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


if __name__ == "__main__":
    main()
