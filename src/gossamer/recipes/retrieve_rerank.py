"""Three stages on one collection: words, vectors, a language model that reads a list.

Every stage gets what the one before it found and may only put it in another order. Intervals are
over queries. The bars were fixed before the run on record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.recipes._outside import outside_data
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

STAGES = {"bm25": "BM25", "encoder": "encoder", "fused": "both fused", "ranker": "ranker"}
METRIC = "ndcg@10"

Run = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        data: A BEIR folder with titles in its corpus, here or in `GOSSAMER_DATA`.
        encoder: Of queries and documents.
        max_length: Tokens that it reads.
        depth: Documents of BM25 that the encoder orders.
        model: The language model.
        top_k: Documents that it ranks.
        document_tokens: Of each that it reads.
        num_queries: Judged queries that are used, the first ones; 0 for all.
        train_steps: Of the tuned ranker, of 4 titles each.
    """

    data: str = "cranfield"
    encoder: str = "packaged:minilm"
    max_length: int = 96
    depth: int = 100
    model: str = "packaged:smollm2"
    top_k: int = 20
    document_tokens: int = 48
    num_queries: int = 0
    train_steps: int = 35


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Run the stages, the last with a ranker that is tuned on titles or with the stock model."""
    from gossamer.retrieval import evaluate_run, read_beir

    corpus, queries, qrels = read_beir(outside_data(config.data))
    if config.num_queries:
        queries = {name: queries[name] for name in list(queries)[: config.num_queries]}
    truth = {name: qrels[name] for name in queries}
    runs = first_stages(config, corpus, queries)
    before = top(runs["fused"], config.top_k)
    runs["ranker"] = ranked(config, arm, seed, corpus, queries, before)
    scalars: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name, found in runs.items():
        scalars[name] = evaluate_run(truth, found, [METRIC])[METRIC]
        rows.append({"stage": STAGES[name], "metric": METRIC, "value": scalars[name]})
    for name, base in (("encoder", "bm25"), ("fused", "encoder"), ("ranker", "fused")):
        scalars |= gain(truth, runs, name, base)
    recall = f"recall@{config.top_k}"
    kept = [evaluate_run(truth, found, [recall])[recall] for found in (before, runs["ranker"])]
    scalars["recall_lost"] = abs(kept[0] - kept[1])
    return Outcome(scalars, rows)


def first_stages(config: Config, corpus: Mapping[str, str], queries: Mapping[str, str]) -> Any:
    """Return the runs of BM25, of the encoder on BM25's best, and of both fused."""
    from gossamer.models import DualEncoder, TextEncoder
    from gossamer.retrieval import BM25Index, fuse_runs

    words = BM25Index(corpus).search(queries, config.depth)
    encoder = DualEncoder(TextEncoder(config.encoder, max_length=config.max_length))
    wanted = sorted({name for found in words.values() for name in found})
    vectors = encoder.encode_documents([corpus[name] for name in wanted], batch_size=32)
    place = {name: number for number, name in enumerate(wanted)}
    asked = encoder.encode_queries(list(queries.values()), batch_size=32)
    dense = {}
    for query, vector in zip(queries, asked, strict=True):
        names = list(words[query])
        scores = (vectors[[place[name] for name in names]] @ vector).tolist()
        dense[query] = dict(zip(names, scores, strict=True))
    return {"bm25": words, "encoder": dense, "fused": fuse_runs([words, dense])}


def ranked(
    config: Config,
    arm: str,
    seed: int,
    corpus: Mapping[str, str],
    queries: Mapping[str, str],
    first: Run,
) -> Run:
    """Return the ranker's order of what is handed to it."""
    from gossamer.recipes import blockrank_text as text
    from gossamer.retrieval import BlockRanker
    from gossamer.retrieval._ranking_setup import load_ranker

    model, tokenizer = load_ranker(config.model, dtype="float32")
    settings = text.Config(data=config.data, model=config.model, steps=config.train_steps)
    text.keep_first_layers(model, settings.layers)
    if arm == "tuned":
        text.trained(model, tokenizer, text.Texts(settings, tokenizer, seed), settings, seed)
    ranker = BlockRanker(
        model,
        tokenizer,
        layer=settings.layers - 1,
        query_position_offset="auto" if arm == "tuned" else settings.query_offset,
        max_document_length=config.document_tokens,
    )
    return ranker.rank_run(queries, corpus, first, top_k=config.top_k, quiet=True)


def top(found: Run, count: int) -> Run:
    """Return the best documents of each query."""
    best = {}
    for query, scores in found.items():
        order = sorted(scores, key=lambda name: (scores[name], name), reverse=True)
        best[query] = {name: scores[name] for name in order[:count]}
    return best


def gain(truth: Any, runs: Mapping[str, Run], name: str, base: str) -> dict[str, float]:
    """Return the gain of a stage over another, with its interval over queries."""
    from gossamer.retrieval import compare_runs

    pair = compare_runs(truth, {name: runs[name], base: runs[base]}, METRIC).pairs[0]
    return {
        f"{name}_gain": pair["difference"],
        f"{name}_low": pair["low"],
        f"{name}_high": pair["high"],
    }


def _claim(text: str, metric: str, better: Any = "higher", bar: float = 0.0) -> Claim:
    return Claim(
        text=text,
        metric=metric,
        unit="nDCG@10" if metric.endswith("low") else "share",
        ours="tuned",
        better=better,
        rule="bar",
        bar=bar,
        statistic="min" if better == "higher" else "max",
    )


def _columns() -> tuple[Column, ...]:
    columns = [
        Column(name, title, "nDCG@10", in_domain=name == "bm25") for name, title in STAGES.items()
    ]
    for name, title in (("encoder", "encoder - BM25"), ("fused", "fused - encoder"),
                        ("ranker", "ranker - fused")):  # fmt: skip
        for part, words in (("gain", ""), ("low", ", lower end"), ("high", ", upper end")):
            columns.append(Column(f"{name}_{part}", f"{title}{words}", "nDCG@10"))
    return (*columns, Column("recall_lost", "Recall lost by the ranker", "share"))


RECIPE = Recipe(
    name="retrieve-rerank",
    method="blockrank",
    title="Three stages of retrieval: words, vectors, in-context ranking",
    what=(
        "BM25 finds 100 documents for each query of a small collection, a sentence encoder orders "
        "them, both orders are fused, and a language model of 135 million parameters reads the "
        "best 20 in one prompt. It is the stock model, or one tuned for some minutes on titles of "
        "the collection. nDCG@10 after each stage; intervals are 95 % over queries."
    ),
    claims=(
        _claim(
            "The encoder gains over BM25: the lower end of the interval is above 0", "encoder_low"
        ),
        _claim(
            "Fusing both gains over the encoder: the lower end of the interval is above 0",
            "fused_low",
        ),
        _claim(
            "The tuned ranker gains over the fused order, as rankers of 7 billion parameters do: "
            "the lower end of the interval is above 0",
            "ranker_low",
        ),
        _claim(
            "Ranking the best 20 anew loses no document among them", "recall_lost", "lower", 1e-12
        ),
    ),
    arms=(
        Arm("tuned", "Ranker tuned on titles", "ours", cost=2.0),
        Arm("stock", "Stock model as ranker", "baseline", max_seeds=1),
    ),
    scales={
        "small": Config(),
        "medium": Config(max_length=256, document_tokens=160, train_steps=600),
    },
    run=run,
    columns=_columns(),
    figures=(
        Figure(
            "bars",
            "stages",
            "nDCG@10 after each stage",
            "One bar for each stage: BM25, the encoder, both fused, and the ranker, for the tuned "
            "and the stock model.",
            "stage",
            "value",
            {"group": "arm", "y_label": "nDCG@10"},
        ),
    ),
    budget={"small": 10, "medium": 240},
)
