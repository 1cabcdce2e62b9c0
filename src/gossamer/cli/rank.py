"""`gossamer rank`."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from gossamer._version import __version__
from gossamer.cli._common import (
    COMMON,
    Common,
    data_folders,
    print_json,
    set_threads,
    silence_loading,
)

if TYPE_CHECKING:
    from gossamer.retrieval import BlockRanker, RankResult

__all__ = ["run"]

_CORPUS = ("corpus.jsonl", "collection.tsv")
_PART = "results.jsonl"


def run(
    data: Path | None = None,
    /,
    *,
    run: Path,
    model: str,
    top_k: int = 100,
    engine: Literal["three_pass", "mask4d", "block"] = "three_pass",
    layer: int | Literal["auto"] = "auto",
    aggregate: Literal["sum", "mean", "max"] = "sum",
    cache: Path | None = None,
    batch_tokens: int = 8192,
    max_document_length: int = 160,
    query_position_offset: int | Literal["auto"] = "auto",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    corpus: Path | None = None,
    queries: Path | None = None,
    split: str = "test",
    resume: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> None:
    """Rank the best documents of a first-stage run anew with a language model.

    No document is lost: those beyond --top-k follow in their first order. The model has to be
    trained for it; the order of one that is not means nothing.

    Example: gossamer rank cranfield --run bm25.trec --model packaged:smollm2 --top-k 20

    Args:
        data: A BEIR or MS MARCO folder with documents and queries, here or in GOSSAMER_DATA.
        run: First stage, a TREC run.
        model: Folder of a causal language model of transformers, or packaged:smollm2.
        top_k: How many documents of each query are ranked.
        engine: How the prompt is run; all give the same scores.
        layer: The layer that is read, from 0; auto is that of training, or 62 % of the depth.
        aggregate: Over a document's tokens; mean and max do not favour long documents.
        cache: Folder that keeps the documents' states; the query then stands behind them alone.
        batch_tokens: Documents' tokens at once; bounds the memory.
        max_document_length: Tokens of a document; what is longer is cut and counted.
        query_position_offset: Position of the last block; auto is that of training, or 8192, or
            less where the model has fewer positions.
        dtype: Precision; default float32 on a CPU, elsewhere that of the model.
        corpus: Documents instead of data: JSON lines with _id, title, text, or id, tab, text.
        queries: Queries instead of data, in the same forms.
        split: Which queries of an MS MARCO folder.
        resume: Go on with the newest run (or with --out); queries that are done are kept.
    """
    import tomli_w

    from gossamer.checks import check_range
    from gossamer.files import begin_folder, choose_folder, write_json
    from gossamer.retrieval import BlockRanker, length_bias, read_run, read_texts, write_run
    from gossamer.train import pick_device

    began = time.perf_counter()
    check_range(top_k, "top_k", low=1, integer=True)  # before a model is loaded
    set_threads(common)
    paths = _files(data, corpus, queries, split)
    first = read_run(run)
    texts, asked = (read_texts(path) for path in paths)
    silence_loading()
    ranker = BlockRanker.from_pretrained(
        model,
        dtype=dtype,
        device=pick_device(common.device),
        layer=layer,
        engine=engine,
        aggregate=aggregate,
        query_in_prefix=cache is None,
        query_position_offset=query_position_offset,
        max_document_length=max_document_length,
    )
    settings = {
        "model": model,
        "run": str(run),
        "corpus": str(paths[0]),
        "queries": str(paths[1]),
        "top_k": top_k,
        "layer": ranker.layer,
        "aggregate": aggregate,
        "query_in_prefix": cache is None,
        "query_position_offset": ranker.template.query_offset,
        "max_document_length": max_document_length,
        "dtype": str(next(ranker.model.parameters()).dtype).removeprefix("torch."),
    }
    out = choose_folder("runs/rank", common.out, resume=resume)
    begin_folder(out, tomli_w.dumps(settings), resume=resume)
    if cache is not None:
        _fill(ranker, first, texts, top_k, cache, quiet=common.quiet)
    done = _Results(out / _PART, resume=resume)
    found = ranker.rank_lists(
        asked, texts, first, top_k=top_k, quiet=common.quiet, skip=done.rows,
        batch_tokens=batch_tokens,
    )  # fmt: skip
    for name, scores, result in found:
        done.add(name, scores, result)
    write_run({name: done.rows[name]["scores"] for name in first}, out / "run.trec")
    results = list(done.results())
    summary = {
        "command": "rank",
        "version": __version__,
        "seconds": round(time.perf_counter() - began, 3),
        "seed": common.seed or 0,
        "files": [str(out / "run.trec"), str(out / _PART), str(out / "summary.json")],
        **settings,
        "engine": engine,
        "num_queries": len(results),
        "num_documents": sum(result.num_candidates for result in results),
        "num_cut": sum(result.num_cut for result in results),
        "length_bias": length_bias(results),
    }
    write_json(out / "summary.json", summary)
    if common.json:
        print_json(summary)
    else:
        _show(summary)
        print(f"written: {(out / 'run.trec').resolve()}")
        if data is not None:
            runs = [str(run), str(out / "run.trec")]
            print("next: " + shlex.join(["gossamer", "evaluate", *runs, "--data", str(data)]))


def _files(
    data: Path | None, corpus: Path | None, queries: Path | None, split: str
) -> tuple[Path, Path]:
    """Return the files of documents and queries."""
    from gossamer.errors import ConfigError, DataError

    if data is None and corpus is not None and queries is not None:
        return corpus, queries
    if data is None or corpus is not None or queries is not None:
        raise ConfigError(
            "rank needs either a folder DATA or both --corpus FILE and --queries FILE; got "
            f"DATA {data}, --corpus {corpus}, --queries {queries}. Give one or the other."
        )
    wanted = ("queries.jsonl", f"queries.{split}.tsv")
    for folder in data_folders(data):
        pair = [_first_of(folder, names) for names in (_CORPUS, wanted)]
        if pair[0] is not None and pair[1] is not None:
            return pair[0], pair[1]
    raise DataError(
        f"{data} must hold documents as one of {', '.join(_CORPUS)} and queries as one of "
        f"{', '.join(wanted)}, packed (.gz) or not; it does not. Check the path and --split, or "
        "give --corpus and --queries."
    )


def _first_of(folder: Path, names: tuple[str, ...]) -> Path | None:
    from gossamer.retrieval._streams import existing

    return next((path for name in names if (path := existing(folder / name)) is not None), None)


def _fill(
    ranker: BlockRanker,
    first: Mapping[str, Mapping[str, float]],
    texts: Mapping[str, str],
    top_k: int,
    cache: Path,
    *,
    quiet: bool,
) -> None:
    """Put the documents that are to be ranked into the cache."""
    from gossamer.retrieval._tables import ranked

    wanted = {name: None for scores in first.values() for name in ranked(scores)[:top_k]}
    ranker.cache({name: texts[name] for name in wanted if name in texts}, cache, quiet=quiet)


class _Results:
    """Queries that are done, one line each, so that an interruption loses one query at most."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        from gossamer.files import read_lines, write_text

        self.path = path
        rows = read_lines(path) if resume and path.exists() else []
        self.rows: dict[str, dict[str, Any]] = {row["query"]: row for row in rows}
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))  # whole lines only

    def add(self, name: str, scores: Mapping[str, float], result: RankResult) -> None:
        row = {
            "query": name,
            "scores": dict(scores),
            "lengths": list(result.lengths),
            "num_cut": result.num_cut,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows[name] = row

    def results(self) -> Iterator[RankResult]:
        """Yield what was found, to sum it up."""
        from gossamer.retrieval import RankResult

        for row in self.rows.values():
            count = len(row["lengths"])
            names, scores = tuple(row["scores"])[:count], tuple(row["scores"].values())[:count]
            yield RankResult(
                names, scores, tuple(range(count)), tuple(row["lengths"]), count, row["num_cut"]
            )


def _show(summary: Mapping[str, Any]) -> None:
    from gossamer.files import without_nan

    bias = without_nan(summary["length_bias"])
    print(
        f"{summary['num_queries']} queries, {summary['num_documents']} documents ranked at layer "
        f"{summary['layer']} in {summary['seconds']:.1f} s"
    )
    print(f"  {summary['num_cut']} documents cut at {summary['max_document_length']} tokens")
    if bias is not None:
        print(f"  rank correlation of score and length: {bias:+.2f}")
