"""`gossamer evaluate`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from gossamer._version import __version__
from gossamer.cli._common import COMMON, Common, data_folders, print_json

if TYPE_CHECKING:
    from gossamer.retrieval import RunReport

__all__ = ["run"]

_OPTIONS = ("--qrels", "--data", "--split", "--metrics", "--per-query", "--missing", "--drop-self")
_COUNTS = ("num_queries", "num_missing", "num_without_relevant", "num_unjudged")


def run(
    *runs: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    qrels: Path | None = None,
    data: Path | None = None,
    split: str = "test",
    metrics: str = "ndcg@10,recall@100,mrr@10,map",
    per_query: Annotated[bool, Parameter(negative="")] = False,
    missing: Literal["zero", "skip"] = "zero",
    drop_self: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> None:
    """Evaluate TREC runs as trec_eval does; two or more are also compared query by query.

    Example: gossamer evaluate bm25.trec dense.trec --qrels test.qrels --metrics ndcg@10,mrr@10

    Args:
        runs: Files of runs, packed (.gz) or not; - for standard input.
        qrels: Judgements: a TREC file, or three columns with or without a header.
        data: A BEIR or MS MARCO folder to take the judgements from, here or in GOSSAMER_DATA.
        split: Which judgements of the folder.
        metrics: Names with commas between them; two runs are compared by each.
        per_query: Write the value of every query to per_query.csv.
        missing: Queries that a run does not answer count zero, or are skipped.
        drop_self: Take documents whose id is the query's out of the runs.
    """
    from gossamer.checks import check_choice
    from gossamer.errors import ConfigError
    from gossamer.files import choose_folder, write_json
    from gossamer.report import write_table
    from gossamer.retrieval import compare_runs, evaluate_run, read_qrels, read_run

    began = time.perf_counter()
    for path in runs:  # a lone hyphen is a file, so that unknown options arrive here too
        if str(path).startswith("--"):
            check_choice(str(path), _OPTIONS, "option of evaluate")
    if not runs:
        raise ConfigError("evaluate needs at least one run; got none. Name a file in TREC form.")
    if missing == "skip" and len(runs) > 1:
        raise ConfigError(
            "several runs are compared on the same queries, so missing ones must count zero; got "
            "--missing skip. Leave it out, or evaluate one run at a time."
        )
    truth = read_qrels(_judgements(qrels, data, split))
    names = _names(runs)
    loaded = {name: read_run(path) for name, path in zip(names, runs, strict=True)}
    if drop_self:
        loaded = {name: _without_self(table) for name, table in loaded.items()}
    wanted = [metric.strip() for metric in metrics.split(",") if metric.strip()]
    reports = {
        name: evaluate_run(truth, table, wanted, per_query=per_query, missing=missing)
        for name, table in loaded.items()
    }
    pairs: list[dict[str, Any]] = []
    if len(loaded) > 1:
        seed = 0 if common.seed is None else common.seed
        for metric in next(iter(reports.values())).means:
            compared = compare_runs(truth, loaded, metric, random_state=seed)
            pairs += [{"metric": metric, **pair} for pair in compared.rows()]
    table_rows = _table(reports)
    out = choose_folder("runs/evaluate", common.out)
    write_table(table_rows, out / "table.csv")
    files = [out / "summary.json", out / "table.csv"]
    if per_query:
        write_table(_query_rows(reports), out / "per_query.csv")
        files.append(out / "per_query.csv")
    summary = {
        "command": "evaluate",
        "version": __version__,
        "seconds": round(time.perf_counter() - began, 3),
        "seed": common.seed or 0,
        "files": [str(path) for path in files],
        "table": table_rows,
        "pairs": pairs,
    }
    write_json(out / "summary.json", summary)
    if common.json:
        print_json(summary)
    else:
        _show(table_rows, pairs)
        print(f"written: {out.resolve()}")


def _judgements(qrels: Path | None, data: Path | None, split: str) -> Path:
    from gossamer.errors import ConfigError, DataError

    if qrels is not None and data is None:
        return qrels
    if qrels is not None or data is None:
        raise ConfigError(
            "evaluate needs either --qrels FILE or --data DIR; got "
            f"{'neither' if qrels is None else 'both'}. Give one of them."
        )
    names = (f"qrels/{split}.tsv", f"qrels/{split}.trec", f"qrels.{split}.tsv")
    for folder in data_folders(data):
        for name in names:
            for path in (folder / name, folder / f"{name}.gz"):
                if path.is_file():
                    return path
    raise DataError(
        f"{data} must hold judgements of the split {split!r} as one of {', '.join(names)}; there "
        "is none. Check --data and --split, or give the file with --qrels."
    )


def _names(runs: Sequence[Path]) -> list[str]:
    """Return short names of the runs, or their paths where those would be the same."""
    stems = [path.name.removesuffix(".gz").removesuffix(".trec") for path in runs]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in runs]
    if len(set(names)) < len(names):
        from gossamer.errors import ConfigError

        raise ConfigError(f"runs must be different files; got {', '.join(names)}. Leave one out.")
    return names


def _without_self(run: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {
        query: {document: score for document, score in scores.items() if document != query}
        for query, scores in run.items()
    }


def _table(reports: Mapping[str, RunReport]) -> list[dict[str, Any]]:
    return [
        {"run": name, **report.means, **{count: getattr(report, count) for count in _COUNTS}}
        for name, report in reports.items()
    ]


def _query_rows(reports: Mapping[str, RunReport]) -> list[dict[str, Any]]:
    return [
        {"run": name, "query": query, **values}
        for name, report in reports.items()
        for query, values in report.per_query.items()
    ]


def _show(rows: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        values = [f"{key} {value:.4f}" for key, value in row.items() if isinstance(value, float)]
        print(f"{row['run']}: {', '.join(values)}")
        counts = f"{row['num_queries']} queries, {row['num_missing']} missing in the run"
        if row["num_without_relevant"]:
            counts += f", {row['num_without_relevant']} without a relevant document left out"
        if row["num_unjudged"]:
            counts += f", {row['num_unjudged']} of the run not judged"
        print(f"  {counts}")
    for pair in pairs:
        print(
            f"{pair['metric']}: {pair['first']} - {pair['second']} = {pair['difference']:+.4f} "
            f"({pair['low']:+.4f} to {pair['high']:+.4f}), p = {pair['p_ttest']:.3g} (t-test), "
            f"{pair['p_bootstrap']:.3g} (bootstrap); better on {pair['wins']}, worse on "
            f"{pair['losses']}, equal on {pair['ties']}"
        )
