"""A small language model learns to rank real texts, and meets BM25 on the same words.

Queries are the titles of the Cranfield abstracts, documents the first tokens of the abstracts
without their titles. The bars were fixed before any run with this prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.recipes._outside import outside_data
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

OURS, UNTRAINED, BM25 = "block_aux", "untrained", "bm25"
SETS = {
    "random": "titles, random negatives",
    "near": "titles, BM25's negatives",
    "queries": "queries, BM25's best",
}


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        data: A BEIR folder, here or in `GOSSAMER_DATA`.
        model: A folder, or `packaged:NAME`.
        layers: First layers of the model; the last of them is read.
        documents: Candidates of a query.
        tokens: Of each document.
        steps: Optimiser steps.
        batch_size: Queries of a step.
        lr: Peak learning rate.
        warmup: Steps with a rising rate.
        temperature: Of the ranking loss.
        query_offset: Position of the last block.
        held_out: Titles that are not trained on.
        num_samples: Queries of each test.
    """

    data: str = "cranfield"
    model: str = "packaged:smollm2"
    layers: int = 13
    documents: int = 6
    tokens: int = 24
    steps: int = 70
    batch_size: int = 4
    lr: float = 3e-4
    warmup: int = 6
    temperature: float = 0.05
    query_offset: int = 1024
    held_out: int = 200
    num_samples: int = 80


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Measure one ranker on the three tests; a trained one also against the two baselines."""
    from gossamer.retrieval._ranking_setup import load_ranker

    model, tokenizer = load_ranker(config.model, dtype="float32")
    texts = Texts(config, tokenizer, seed)
    random_others = texts.tests("random")
    scalars: dict[str, float] = {}
    firsts: Callable[[Any], str] = texts.first_by_bm25
    if arm != BM25:
        keep_first_layers(model, config.layers)
        firsts = first_by(untrained(model, tokenizer, config))
        if arm == OURS:
            before = percent(firsts, random_others)
            firsts = first_by(trained(model, tokenizer, texts, config, seed))
            after = percent(firsts, random_others)
            by_words = percent(texts.first_by_bm25, random_others)
            scalars |= {"gain": after - before, "over_bm25": after - by_words}
    rows = []
    for name, title in SETS.items():
        tests = random_others if name == "random" else texts.tests(name)
        scalars[name] = percent(firsts, tests)
        shares = [len(row.answer_ids) / len(row.documents) for row in tests]
        scalars[f"{name}_chance"] = 100.0 * sum(shares) / len(shares)
        rows.append({"test": title, "percent": scalars[name]})
    return Outcome(scalars, rows)


def percent(firsts: Callable[[Any], str], tests: Sequence[Any]) -> float:
    """Return in how many tests a relevant document comes first."""
    return 100.0 * sum(firsts(row) in row.answer_ids for row in tests) / len(tests)


def first_by(ranker: Any) -> Callable[[Any], str]:
    """Return the function that gives the id of a ranker's first document."""

    def first(row: Any) -> str:
        named = [{"id": name, "text": text} for name, text in row.documents.items()]
        return str(ranker.rank(row.query, named).ids[0])

    return first


def keep_first_layers(model: Any, count: int) -> None:
    """Drop the layers above those that are read, and train queries and keys alone."""
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    model.requires_grad_(False)
    for block in model.model.layers:
        block.self_attn.q_proj.requires_grad_(True)
        block.self_attn.k_proj.requires_grad_(True)


def untrained(model: Any, tokenizer: Any, config: Config) -> Any:
    """Return a ranker that reads the last layer of a model as it is."""
    from gossamer.retrieval import BlockRanker

    layer = config.layers - 1
    return BlockRanker(model, tokenizer, layer=layer, query_position_offset=config.query_offset)


def trained(model: Any, tokenizer: Any, texts: Texts, config: Config, seed: int) -> Any:
    """Return a ranker after training by the ranking loss alone."""
    from gossamer.retrieval import RankerFitConfig, fit_ranker
    from gossamer.train import TrainConfig

    loop = TrainConfig(
        steps=config.steps,
        lr=config.lr,
        betas=(0.9, 0.95),
        warmup=min(1.0, config.warmup / config.steps),
        device="cpu",
        checkpoint_every=0,
    )
    settings = RankerFitConfig(
        train=loop,
        batch_size=config.batch_size,
        seed=seed,
        query_position_offset=config.query_offset,
        answer_weight=0.0,
        quiet=True,
    )
    return fit_ranker(
        model,
        tokenizer,
        texts.training(),
        aux_weight=1.0,
        aux_layer=config.layers - 1,
        temperature=config.temperature,
        config=settings,
    )


class Texts:
    """Titles as queries for abstracts without them, and BM25 on the same words.

    Args:
        config: Of the recipe.
        tokenizer: Cuts the abstracts.
        seed: Of the titles held out, the negatives and the order of candidates.
    """

    def __init__(self, config: Config, tokenizer: Any, seed: int) -> None:
        from gossamer.retrieval import BM25Index, read_beir

        self.config = config
        self.seed = seed
        self.titles, whole = titles_and_texts(outside_data(config.data))
        cut = tokenizer(list(whole.values()), add_special_tokens=False)["input_ids"]
        parts = tokenizer.batch_decode([tokens[: config.tokens] for tokens in cut])
        self.documents = dict(zip(whole, parts, strict=True))
        self.collection = read_beir(outside_data(config.data))
        self.index = BM25Index(self.documents)
        names = sorted(self.titles)
        random.Random(f"titles-{seed}").shuffle(names)
        self.held_out, self.trained = names[: config.held_out], names[config.held_out :]

    def training(self) -> list[Any]:
        """Return one row with random negatives for each title that is trained on."""
        draw = random.Random(f"training-{self.seed}")
        return [self._row(self.titles[name], name, self._others(name, draw), draw)
                for name in self.trained]  # fmt: skip

    def tests(self, kind: str) -> list[Any]:
        """Return the rows of a test, one of `SETS`."""
        draw = random.Random(f"{kind}-{self.seed}")
        if kind == "queries":
            return self._query_rows(draw)
        found = self.held_out[: self.config.num_samples]
        rows = []
        for name in found:
            title = self.titles[name]
            near = [other for other in self._best(title) if other != name]
            others = self._others(name, draw) if kind == "random" else near
            rows.append(self._row(title, name, others[: self.config.documents - 1], draw))
        return rows

    def first_by_bm25(self, row: Any) -> str:
        """Return the candidate that BM25 ranks first; the first of equals."""
        scores = self.index.search({"q": row.query}, len(self.documents))["q"]
        first: str = max(row.documents, key=lambda name: scores.get(name, 0.0))
        return first

    def _query_rows(self, draw: random.Random) -> list[Any]:
        """Return judged queries with BM25's best, those where one of them is relevant."""
        from gossamer.retrieval import RankingRow

        rows = []
        names = sorted(self.collection.queries)
        draw.shuffle(names)
        for name in names:
            query, grades = self.collection.queries[name], self.collection.qrels[name]
            best = self._best(query)[: self.config.documents]
            draw.shuffle(best)
            answers = tuple(other for other in best if grades.get(other, 0) > 0)
            if answers:
                rows.append(RankingRow(query, {d: self.documents[d] for d in best}, answers, name))
        return rows[: self.config.num_samples]

    def _best(self, query: str) -> list[str]:
        return list(self.index.search({"q": query}, self.config.documents + 1)["q"])

    def _others(self, name: str, draw: random.Random) -> list[str]:
        others = [other for other in self.documents if other != name]
        return draw.sample(others, self.config.documents - 1)

    def _row(self, query: str, name: str, others: list[str], draw: random.Random) -> Any:
        from gossamer.retrieval import RankingRow

        chosen = [name, *others]
        draw.shuffle(chosen)
        return RankingRow(query, {d: self.documents[d] for d in chosen}, (name,), name)


def titles_and_texts(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return titles and texts of a corpus; a title that a text begins with is cut off."""
    import json

    from gossamer.errors import DataError
    from gossamer.retrieval._streams import stream_lines

    path = next((p for p in (folder / "corpus.jsonl", folder / "corpus.jsonl.gz") if p.exists()),
                folder / "corpus.jsonl")  # fmt: skip
    titles, texts = {}, {}
    for _, line in stream_lines(path):
        row = json.loads(line)
        title, text = row.get("title", "").strip(), row.get("text", "").strip()
        rest = text.removeprefix(title).strip()
        if title and rest:
            titles[str(row["_id"])], texts[str(row["_id"])] = title, rest
    if not titles:
        raise DataError(f"{path} must hold documents with title and text; got none. Use others.")
    return titles, texts


def _claim(metric: str, unit: str, bar: float, words: str) -> Claim:
    return Claim(
        text=f"{words}, every seed",
        metric=metric,
        unit=unit,
        ours=OURS,
        better="higher",
        rule="bar",
        bar=bar,
        statistic="min",
    )


RECIPE = Recipe(
    name="blockrank-text",
    method="blockrank",
    title="Ranking by attention on real texts: a small language model against BM25",
    what=(
        "SmolLM2-135M, which cannot rank at all, is trained for some minutes by the ranking loss "
        "alone: queries and keys of its first 13 layers, on titles of the Cranfield abstracts. How "
        "often does the attention of layer 12 put the abstract of a title that it has not seen "
        "first, among random others and among those that BM25 takes for near? BM25 reads the same "
        "24 tokens of each abstract."
    ),
    claims=(
        _claim(
            "random",
            "% of queries",
            70.0,
            "Among random others the right abstract comes first for at least 70 % of the titles",
        ),
        _claim("gain", "points", 40.0, "That is at least 40 points above the untrained model"),
        _claim(
            "over_bm25",
            "points",
            1.25,
            "It is right for at least one title in 80 more than BM25 on the same words",
        ),
    ),
    arms=(
        Arm(OURS, "SmolLM2, trained by the ranking loss", "ours", max_seeds=2, cost=8.0),
        Arm(UNTRAINED, "SmolLM2, untrained", "baseline", max_seeds=1),
        Arm(BM25, "BM25 on the same words", "baseline", cost=0.1),
    ),
    scales={
        "small": Config(),
        "medium": Config(steps=600, layers=19, tokens=96, num_samples=200),
    },
    run=run,
    columns=(
        Column("random", "Titles, random others", "% of queries", in_domain=True),
        Column("near", "Titles, BM25's nearest", "% of queries"),
        Column("queries", "Queries, BM25's best", "% of queries"),
        Column("gain", "Above untrained, random others", "points"),
        Column("over_bm25", "Above BM25, random others", "points"),
        Column("random_chance", "Chance, random others", "% of queries"),
        Column("near_chance", "Chance, nearest", "% of queries"),
        Column("queries_chance", "Chance, queries", "% of queries"),
    ),
    figures=(
        Figure(
            "bars",
            "first-places",
            "Relevant document first, of six",
            "Percent of test queries with a relevant document first, for the trained and the "
            "untrained model and BM25: titles with random and with near other abstracts, and "
            "judged queries.",
            "test",
            "percent",
            {"group": "arm", "y_label": "P@1 (%)"},
        ),
    ),
    budget={"small": 10, "medium": 240},
)
