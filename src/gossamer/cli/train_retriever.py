"""`gossamer train-retriever`."""

from __future__ import annotations

import inspect
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from gossamer._version import __version__
from gossamer.cli._common import COMMON, Common, print_json, set_threads, silence_loading

if TYPE_CHECKING:
    from gossamer.models import DualEncoder
    from gossamer.retrieval import RetrieverConfig, TrainingRows

__all__ = ["run"]

_MANY = 10_000
"""Labels or documents from which on scoring all of them at every step is no sensible default."""


def run(
    data: Path,
    *,
    encoder: str = "bag",
    loss: Literal["decoupled", "coupled", "soft_top_k", "summed", "bce", "in_batch"] = "decoupled",
    negatives: Literal["all", "in_batch", "mined"] | None = None,
    towers: Literal["one", "two"] = "one",
    split: str = "train",
    dim: int | None = None,
    temperature: float = 0.05,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    num_negatives: int | None = None,
    chunk_size: int | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> None:
    """Train an encoder that puts the relevant documents or labels of a text next to it.

    The folder is a model for `gossamer retrieve` and `gossamer serve`. Nothing is chosen by looking
    at test data; the last step is kept, and measured on the split `test` where there is one.

    Example: gossamer train-retriever debtags-xmc --epochs 6

    Example: gossamer train-retriever my-beir-folder --encoder packaged:minilm --negatives mined

    Args:
        data: A folder in BEIR, MS MARCO or XMC form, here or in GOSSAMER_DATA.
        encoder: bag (hashed words and character n-grams, trains in seconds), a folder with an
            encoder of transformers, or packaged:minilm.
        loss: What is minimised; decoupled never sets two relevant labels against each other.
        negatives: Every step scores all labels or documents (default up to 10,000 of them), those
            of its own batch, or these and hard ones (mined, default beyond).
        towers: One encoder for both sides, or two that start alike.
        split: Which judgements or rows to train on.
        dim: Width of the bag's vectors. Default 96.
        temperature: Divides the cosines.
        epochs: Passes over the rows. Default 6 for a bag, 3 for a pre-trained encoder.
        batch_size: Rows for each step. Default 512 for a bag, 64 for a pre-trained encoder.
        lr: Peak learning rate. Default 0.002 for a bag, 0.00005 for a pre-trained encoder.
        num_negatives: Hard negatives drawn for each row, with --negatives mined. Default 8.
        chunk_size: Texts encoded at a time; fewer need less memory. Default 1024 for a bag, 64 for
            a pre-trained encoder.
        resume: Go on with the newest run (or with --out) from its checkpoint; give the same
            options again.
    """
    from gossamer.cli._collections import data_folder, read_data
    from gossamer.cli._retriever_page import write_retriever_page
    from gossamer.environment import describe_environment
    from gossamer.files import choose_folder, write_json
    from gossamer.retrieval import RetrieverConfig, TrainingRows, build_loss, fit_retriever

    began = time.perf_counter()
    given = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "num_negatives": num_negatives,
        "chunk_size": chunk_size,
        "seed": common.seed,
        "device": common.device,
    }
    defaults = {} if encoder == "bag" else _PRETRAINED
    known = {key: value for key, value in given.items() if value is not None}
    config = RetrieverConfig(**{**defaults, **known})
    built_loss = build_loss(loss, temperature=temperature)
    folder = data_folder(data)
    rows = TrainingRows.of(read_data(folder, split))
    chosen = negatives or ("in_batch" if loss == "in_batch" else _default(rows))
    set_threads(common)
    _check_used("--dim", dim, used=encoder == "bag", where="--encoder bag")
    _check_used("--num-negatives", num_negatives, used=chosen == "mined", where="--negatives mined")
    model = _model(encoder, towers, 96 if dim is None else dim, config.seed)
    out = choose_folder("runs/train-retriever", common.out, resume=resume)
    if not common.quiet:
        print(_describe(rows, chosen, config), file=sys.stderr)
    result = fit_retriever(
        model, rows, loss=built_loss, negatives=chosen, config=config, folder=out, resume=resume,
        quiet=common.quiet,
    )  # fmt: skip
    measured = {} if split == "test" else _measure(model, folder, rows, common)
    summary: dict[str, Any] = {
        "command": "train-retriever",
        "version": __version__,
        "seconds": round(time.perf_counter() - began, 1),
        "seed": config.seed,
        "files": ["model.safetensors", "config.json", "config.toml", "metrics.jsonl"],
        "rows": len(rows.texts),
        "labels": len(rows.label_texts),
        "left_out": rows.num_empty,
        "negatives": chosen,
        "steps": result.steps,
        "loss": result.loss,
        "test": measured,
    }
    summary["table"] = [
        {"arm": "model", "role": "ours", "seeds": 1}
        | {f"{name}_here": value for name, value in measured.items()}
        | {"note": ""}
    ]
    write_json(out / "summary.json", summary)
    write_json(out / "environment.json", describe_environment())
    chosen_options = {"encoder": encoder, "loss": loss, "negatives": negatives, "towers": towers,
                      "split": split, "dim": dim, "temperature": temperature, **given}  # fmt: skip
    page = write_retriever_page(out, summary, data, _repeated(data, chosen_options))
    if common.json:
        print_json(summary)
        return
    if measured:
        print("test: " + ", ".join(f"{name} {value:.4f}" for name, value in measured.items()))
    following = shlex.join(["gossamer", "retrieve", str(data), "--model", str(out)])
    print(f"page: {page.resolve()}\nnext: {following}")


_PRETRAINED: dict[str, Any] = {"epochs": 3, "batch_size": 64, "lr": 5e-5, "chunk_size": 64}


def _check_used(name: str, value: int | None, *, used: bool, where: str) -> None:
    """Refuse an option that would change nothing."""
    from gossamer.errors import ConfigError

    if value is not None and not used:
        raise ConfigError(f"{name} belongs to {where}; got {value}. Leave it out.")


def _repeated(data: Path, options: Mapping[str, Any]) -> list[str]:
    """Return the command that gives this run again: the options that are not the defaults."""
    defaults = {name: one.default for name, one in inspect.signature(run).parameters.items()}
    defaults |= {"seed": COMMON.seed, "device": COMMON.device}
    command = ["gossamer", "train-retriever", str(data)]
    for name, value in options.items():
        if value != defaults[name]:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def _default(rows: TrainingRows) -> str:
    return "all" if len(rows.label_texts) <= _MANY else "mined"


def _describe(rows: TrainingRows, negatives: str, config: RetrieverConfig) -> str:
    left = f", {rows.num_empty} without any left out" if rows.num_empty else ""
    return (
        f"{len(rows.texts)} rows with {rows.labels.nnz / len(rows.texts):.1f} relevant of "
        f"{len(rows.label_texts)} each{left}; negatives: {negatives}; "
        f"{config.epochs} epochs of {-(-len(rows.texts) // config.batch_size)} steps"
    )


def _model(encoder: str, towers: str, dim: int, seed: int) -> DualEncoder:
    import copy

    import torch

    from gossamer.models import BagEncoder, DualEncoder
    from gossamer.retrieval import load_retriever

    silence_loading()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DualEncoder(BagEncoder(dim)) if encoder == "bag" else load_retriever(encoder)
    if towers == "two" and model.document_encoder is None:
        model.document_encoder = copy.deepcopy(model.encoder)
    return model


def _measure(
    model: DualEncoder, folder: Path, rows: TrainingRows, common: Common
) -> dict[str, float]:
    """Return the metrics of the split `test`; none where there is no such split."""
    import numpy as np

    from gossamer.cli._collections import has_test, read_data
    from gossamer.retrieval import Collection, evaluate_run, evaluate_xmc, propensities

    if not has_test(folder):
        return {}
    test = read_data(folder, "test")
    if isinstance(test, Collection):
        run = _search(model, test.queries, test.corpus, common)
        return dict(evaluate_run(test.qrels, run, ["ndcg@10", "recall@100", "mrr@10"]).means)
    if test.texts is None:
        return {}
    names = [str(number) for number in range(len(test.texts))]
    labels = {str(number): text for number, text in enumerate(rows.label_texts)}
    run = _search(model, dict(zip(names, test.texts, strict=True)), labels, common)
    counts = np.asarray(rows.labels.sum(axis=0)).ravel()
    num_rows = len(rows.texts) + rows.num_empty
    weights = propensities(counts, num_rows) if num_rows >= 3 else None
    scores = _sparse([run[name] for name in names], len(labels))
    return evaluate_xmc(scores, test.labels, propensities=weights, exclude=test.exclude).values


def _search(
    model: DualEncoder, queries: Mapping[str, str], texts: Mapping[str, str], common: Common
) -> Any:
    """Return the best 100 texts of each query."""
    from gossamer.retrieval import search_top_k

    asked = model.encode_queries(list(queries.values()), quiet=common.quiet)
    vectors = model.encode_documents(list(texts.values()), quiet=common.quiet)
    scores, places = search_top_k(asked.numpy(), vectors.numpy(), 100)
    names = list(texts)
    return {
        query: {names[i]: float(score) for i, score in zip(found, row, strict=True)}
        for query, found, row in zip(queries, places, scores, strict=True)
    }


def _sparse(rows: Sequence[Mapping[str, float]], width: int) -> Any:
    import numpy as np
    from scipy.sparse import csr_matrix

    starts = np.cumsum([0, *(len(row) for row in rows)])
    columns = np.array([int(name) for row in rows for name in row], dtype=np.int64)
    values = np.array([score for row in rows for score in row.values()])
    return csr_matrix((values, columns, starts), shape=(len(rows), width))
