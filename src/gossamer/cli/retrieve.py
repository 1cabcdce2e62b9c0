"""`gossamer retrieve`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gossamer._version import __version__
from gossamer.cli._common import COMMON, Common, print_json, set_threads, silence_loading

__all__ = ["run"]


def run(
    data: Path,
    *,
    model: Annotated[list[str] | None, Parameter(negative="")] = None,
    split: str | None = None,
    top_k: int = 100,
    index: Path | None = None,
    batch_size: int = 64,
    common: Common = COMMON,
) -> None:
    """Find the best documents of each query, and write them as a TREC run.

    Several models are fused by reciprocal rank, and the run of each is written too. Vectors of
    documents are kept as an index; an interrupted search goes on where it stopped if --index says
    where, and a corpus that has grown has only its new documents encoded.

    Example: gossamer retrieve cranfield --model bm25

    Example: gossamer retrieve cranfield --model bm25 --model packaged:minilm --index minilm-index

    Args:
        data: A folder in BEIR, MS MARCO or XMC form, here or in GOSSAMER_DATA. In the last, labels
            are the documents, by number.
        model: bm25 (default), a run of train-retriever, a folder with an encoder of transformers,
            or packaged:minilm; may be given several times.
        split: Whose queries; default test (dev.small of MS MARCO), or all queries where a BEIR
            folder has no judgements.
        top_k: Documents for each query.
        index: Folder for the vectors; default `index` in the output folder. One model only.
        batch_size: Documents encoded at a time.
    """
    from gossamer.checks import check_range
    from gossamer.cli._collections import (
        data_folder,
        hidden_pairs,
        read_data,
        searchable,
        usual_split,
    )
    from gossamer.errors import ConfigError
    from gossamer.files import choose_folder, write_json
    from gossamer.retrieval import fuse_runs, write_qrels, write_run

    began = time.perf_counter()
    names = list(model or ["bm25"])
    dense = [name for name in names if name != "bm25"]
    if len(set(names)) < len(names):
        raise ConfigError(f"models must be different; got {', '.join(names)}. Leave one out.")
    if index is not None and len(dense) != 1:
        raise ConfigError(
            f"--index keeps the vectors of one model; got {len(dense)} that make vectors. Give one "
            "--model beside bm25, or leave --index out."
        )
    check_range(top_k, "top_k", low=1, integer=True)
    set_threads(common)
    folder = data_folder(data)
    read = read_data(folder, split or usual_split(folder))
    collection, hidden = searchable(read), hidden_pairs(read)
    _check_ids(collection)
    wanted = top_k + max(map(len, hidden.values()), default=0)
    out = choose_folder("runs/retrieve", common.out)
    runs: dict[str, Any] = {}
    stages = []
    for number, name in enumerate(names):
        started = time.perf_counter()
        if name == "bm25":
            found = _bm25(collection.corpus, collection.queries, wanted)
        else:
            place = index or out / ("index" if len(dense) == 1 else f"index-{number}")
            found = _dense(name, place, collection, wanted, batch_size, common)
        runs[name] = _shown(found, hidden, top_k)
        stages.append({"model": name, "seconds": round(time.perf_counter() - started, 2)})
    files = [out / "run.trec"]
    fused = next(iter(runs.values())) if len(runs) == 1 else fuse_runs(list(runs.values()))
    for number, (name, one) in enumerate(runs.items() if len(runs) > 1 else ()):
        files.append(out / f"run-{number}-{_short(name)}.trec")
        write_run(one, files[-1], tag=_short(name))
    best = _shown(fused, {}, top_k)
    write_run(best, files[0], tag=_short(names[0]) if len(names) == 1 else "fused")
    if collection.qrels:
        files.append(out / "qrels.trec")
        write_qrels(collection.qrels, files[-1])
    summary = {
        "command": "retrieve",
        "version": __version__,
        "seconds": round(time.perf_counter() - began, 2),
        "seed": common.seed or 0,
        "files": [str(path) for path in files],
        "queries": len(collection.queries),
        "documents": len(collection.corpus),
        "without_result": sum(not documents for documents in best.values()),
        "models": stages,
    }
    write_json(out / "summary.json", summary)
    if common.json:
        print_json(summary)
        return
    print(
        f"{len(best)} queries, {len(collection.corpus)} documents, {summary['seconds']} s\n"
        f"written: {files[0].resolve()}"
    )
    if collection.qrels:
        words = ["gossamer", "evaluate", str(files[0]), "--qrels", str(out / "qrels.trec")]
        print("next: " + shlex.join(words))


def _check_ids(collection: Any) -> None:
    """Find ids that no run can hold before hours of encoding, not behind them."""
    from gossamer.errors import DataError

    for kind, names in (("document", collection.corpus), ("query", collection.queries)):
        wrong = next((name for name in names if name.split() != [name]), None)
        if wrong is not None:
            raise DataError(
                f"{kind} id must be one word, without white space, in a TREC file; got {wrong!r}. "
                "Replace the spaces."
            )


def _bm25(corpus: Mapping[str, str], queries: Mapping[str, str], top_k: int) -> Any:
    from gossamer.retrieval import BM25Index

    return BM25Index(corpus).search(queries, top_k)


def _dense(
    name: str, place: Path, collection: Any, top_k: int, batch_size: int, common: Common
) -> Any:
    from gossamer.retrieval import index_texts, load_retriever
    from gossamer.train import pick_device

    silence_loading()
    encoder = load_retriever(name).to(pick_device(common.device))
    index = index_texts(
        encoder, collection.corpus, place, name=name, batch_size=batch_size, quiet=common.quiet
    )
    texts = list(collection.queries.values())
    asked = encoder.encode_queries(texts, batch_size=batch_size, quiet=common.quiet)
    vectors = asked.float().numpy()
    if not common.quiet:
        print(f"{len(index)} vectors in {place}", file=sys.stderr)
    return index.search(dict(zip(collection.queries, vectors, strict=True)), top_k)


def _shown(run: Any, hidden: Mapping[str, set[str]], top_k: int) -> Any:
    """Return the first documents of each query, without those that are hidden from it."""
    return {
        query: dict(
            islice((pair for pair in found.items() if pair[0] not in hidden.get(query, ())), top_k)
        )
        for query, found in run.items()
    }


def _short(name: str) -> str:
    """Return a name for files and tags."""
    stem = Path(name).name.replace("packaged:", "")
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in stem)
