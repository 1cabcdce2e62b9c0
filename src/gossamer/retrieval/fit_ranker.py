"""Fine-tuning of an in-context ranker, and the choice of the layer to read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.attention import block_scores
from gossamer.checks import check_range
from gossamer.errors import DataError, UnsupportedError
from gossamer.files import read_json, write_json
from gossamer.losses import BlockRankingLoss
from gossamer.progress import progress
from gossamer.retrieval import _ranker_training as parts
from gossamer.retrieval._ranker_model import check_servable, num_layers
from gossamer.retrieval._ranking_prompt import RankingTemplate, query_offset_of
from gossamer.retrieval._ranking_setup import layer_of
from gossamer.retrieval.block_ranker import BlockRanker
from gossamer.retrieval.ranking_rows import RankingRow
from gossamer.train import FileLogger, TrainConfig, Trainer, seed_all

__all__ = ["LayerReport", "RankerFitConfig", "fit_ranker", "select_layer"]


@dataclass(frozen=True)
class RankerFitConfig:
    """Settings of `fit_ranker` that are not about the loss.

    Args:
        train: Of the loop. Default 1000 steps of AdamW with rate 3e-6, the official code's.
        folder: Where the model, its tokenizer, `metrics.jsonl` and checkpoints go. Default none
            is written.
        batch_size: Rows of a step. Range: >= 1. Default 4.
        seed: Of the order of rows and documents, and of adapters. Range: >= 0. Default 0.
        query_in_prefix: Give the query before the documents as well. Default true.
        query_position_offset: Position of the last block, or `"auto"`. Default `"auto"`.
        max_document_length: Longest document with its frame. Unit: tokens. Default 160.
        answer_weight: Of the answer's loss; 0 trains the scores alone. Range: >= 0. Default 1.
        checkpointing: Make activations again for the gradient: less memory, more time. Default
            false.
        quiet: Show no progress. Default false.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> RankerFitConfig(batch_size=2).train.lr
        3e-06
    """

    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(steps=1000, lr=3e-6, betas=(0.9, 0.999), warmup=0.01)
    )
    folder: str | os.PathLike[str] | None = None
    batch_size: int = 4
    seed: int = 0
    query_in_prefix: bool = True
    query_position_offset: int | str = "auto"
    max_document_length: int = 160
    answer_weight: float = 1.0
    checkpointing: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        check_range(self.batch_size, "batch_size", low=1, integer=True)
        check_range(self.seed, "seed", low=0, high=2**32 - 1, integer=True)
        check_range(self.answer_weight, "answer_weight", low=0.0)


def fit_ranker(
    model: Any,
    tokenizer: Any,
    rows: Iterable[RankingRow],
    *,
    aux_weight: float = 0.1,
    aux_layer: int | str = "auto",
    temperature: float = 0.05,
    lora: int | Mapping[str, Any] | None = None,
    config: RankerFitConfig | None = None,
    resume: bool = False,
) -> BlockRanker:
    r"""Fine-tune a causal language model to rank the documents of a prompt.

    $$L = L_{\mathrm{answer}} + \lambda\, L_{\mathrm{ranking}}$$

    The first term is the mean cross-entropy of the tokens that name the relevant documents, the
    second `BlockRankingLoss` on the scores of one layer. The model runs with block attention; the
    order of candidates is another one in every epoch, negatives are those of the rows. All
    parameters that require a gradient are trained. Prompts of a step are held in memory at once:
    `checkpointing` makes them small.

    The model gets its own attention back at the end. Its configuration keeps the layer and the
    position of the last block (`block_rank_layer`, `block_query_offset`), and `BlockRanker` reads
    them there.

    Args:
        model: A GPT-2-, Llama-, Mistral-, Qwen2- or Qwen3-type causal model of transformers, its
            trained parameters in float32; changed in place.
        tokenizer: Its tokenizer.
        rows: Queries with candidates and answers.
        aux_weight: lambda. Range: >= 0; 0 leaves the ranking loss out. Default 0.1, the paper's.
        aux_layer: Number of the layer that learns to rank, from 0, or `"auto"`: that of the
            configuration, else 0.62 of the way up. Default `"auto"`.
        temperature: Of the ranking loss. Range: > 0. Default 0.05.
        lora: Train low-rank adapters (peft, extra `retrieval`) and add them to the weights at the
            end: a rank, or options of `LoraConfig`. Default none.
        config: Further settings. Default those of `RankerFitConfig`.
        resume: Go on from the checkpoint in the folder, if there is one. Default false.

    Returns:
        The ranker.

    Raises:
        ConfigError: If a number is out of range, there is no such layer, or positions do not fit.
        DataError: If there are no rows, an answer is not among the candidates, or the folder was
            begun with other settings.
        DtypeError: If parameters to train are in half precision.
        MissingDependencyError: If `lora` is given and peft is not installed.
        UnsupportedError: If the model is of another kind, or several processes were launched.
        GossamerError: If a loss is not finite; the message names the step.

    Example:
        >>> rows = [RankingRow("which?", {"a": "this", "b": "that"}, ("b",))]
        >>> ranker = fit_ranker(model, tokenizer, rows)  # doctest: +SKIP
        >>> ranker.rank("which?", ["this", "that"]).order  # doctest: +SKIP
        (1, 0)

    Source: Gupta et al., *Scalable In-context Ranking with Generative Models*, NeurIPS 2025,
        sections 4.2 and 5.1; rate and warm-up: official code.
    Deviations: plain AdamW (authors: Adafactor, rate 3e-7, or 8-bit AdamW); the cosine ends at a
        tenth of the rate; rows of a step run one after another.
    """
    settings = config or RankerFitConfig()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnsupportedError(
            "fit_ranker trains in one process; got WORLD_SIZE = "
            f"{os.environ['WORLD_SIZE']}. Start it without accelerate launch."
        )
    check_range(aux_weight, "aux_weight", low=0.0)
    BlockRankingLoss(temperature=temperature)  # checks it
    checked = parts.check_rows(rows)
    check_servable(model)
    layer = layer_of(model, aux_layer)
    offset = query_offset_of(model.config, settings.query_position_offset)
    template = RankingTemplate(
        tokenizer,
        query_in_prefix=settings.query_in_prefix,
        max_document_length=settings.max_document_length,
        query_offset=offset,
        max_position=getattr(model.config, "max_position_embeddings", None),
    )
    stream = parts.RankingStream(checked, template, settings.batch_size, seed=settings.seed)
    loss = parts.RowLoss(
        layer, aux_weight=aux_weight, answer_weight=settings.answer_weight, temperature=temperature
    )
    seed_all(settings.seed)
    trained = parts.adapted(model, lora)
    parts.check_trainable(trained)
    folder = None if settings.folder is None else Path(settings.folder)
    if folder is not None:
        given = {"aux_weight": aux_weight, "aux_layer": layer, "temperature": temperature}
        _begin(folder, {**given, **_kept(settings, lora, offset, checked)}, resume=resume)
    logger = None if folder is None else FileLogger(folder)
    trainer = Trainer(trained, loss, settings.train, logger=logger, quiet=settings.quiet)
    with parts.block_attention_in(model, checkpointing=settings.checkpointing):
        trainer.fit(stream, resume=resume)
    whole = model if lora is None else trained.merge_and_unload()
    whole.eval()
    whole.config.block_rank_layer = layer
    whole.config.block_query_offset = offset
    if folder is not None:
        whole.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return BlockRanker(
        whole,
        tokenizer,
        query_in_prefix=settings.query_in_prefix,
        max_document_length=settings.max_document_length,
    )


def _kept(
    settings: RankerFitConfig, lora: Any, offset: int, rows: list[RankingRow]
) -> dict[str, Any]:
    """Return what must be the same when a run is resumed; the loop checks its own settings."""
    values = {
        name: getattr(settings, name)
        for name in ("batch_size", "seed", "query_in_prefix", "max_document_length")
    }
    values |= {"answer_weight": settings.answer_weight, "query_position_offset": offset}
    key = f"{len(rows)} rows, checksum {parts.rows_key(rows):08x}"
    return values | {"lora": lora, "rows": key}


def _begin(folder: Path, values: dict[str, Any], *, resume: bool) -> None:
    path = folder / "ranking.json"
    if resume and path.exists():
        before = read_json(path)
        for name, value in values.items():
            if before.get(name) != value:
                raise DataError(
                    f"{folder} was begun with {name} = {before.get(name)!r}; got {value!r}. A run "
                    "resumes only with its own settings: set it back, or give another folder."
                )
    write_json(path, values)


@dataclass(frozen=True)
class LayerReport:
    """How well each layer ranks.

    Args:
        layer: The best one, the lowest of equals.
        accuracy: For each layer, the share of queries with a relevant document first.
        chance: The share that a random order would have.
        num_queries: How many were measured.

    Example:
        >>> LayerReport(1, (0.25, 0.75), 0.5, 4).rows()[1]
        {'layer': 1, 'precision_at_1': 0.75}
    """

    layer: int
    accuracy: tuple[float, ...]
    chance: float
    num_queries: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each layer."""
        return [
            {"layer": number, "precision_at_1": value} for number, value in enumerate(self.accuracy)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)


def select_layer(
    ranker: BlockRanker, rows: Iterable[RankingRow], *, quiet: bool = True
) -> LayerReport:
    """Measure how often each layer's attention puts a relevant document first.

    One pass through all layers for each query. Use queries that were not trained on: the choice
    is made by looking at them, so the best figure is too good by a little.

    Args:
        ranker: With the model, its prompt and its positions; its own layer plays no part.
        rows: Queries with candidates and answers.
        quiet: Show no progress. Default true.

    Raises:
        DataError: If there are no rows, or an answer is not among the candidates.

    Example:
        >>> report = select_layer(ranker, rows)  # doctest: +SKIP
        >>> BlockRanker(ranker.model, ranker.tokenizer, layer=report.layer)  # doctest: +SKIP

    Source: Gupta et al., NeurIPS 2025, section 5: the signal is in the middle layers.
    Deviations: none
    """
    checked = parts.check_rows(rows)
    model, hits = ranker.model, torch.zeros(0)
    was = model.training
    model.eval()
    try:
        with (
            parts.block_attention_in(model),
            torch.inference_mode(),
            progress("layers", len(checked), quiet=quiet) as bar,
        ):
            for number, row in enumerate(checked, start=1):
                found = _layer_hits(model, ranker.template, row)
                hits = found if not len(hits) else hits + found
                bar.update(number, f"{number} of {len(checked)} queries")
    finally:
        model.train(was)
    accuracy = tuple((hits / len(checked)).tolist())
    chances = [len(row.answer_ids) / len(row.documents) for row in checked]
    best = max(range(len(accuracy)), key=lambda layer: (accuracy[layer], -layer))
    return LayerReport(best, accuracy, sum(chances) / len(chances), len(checked))


def _layer_hits(model: Any, template: RankingTemplate, row: RankingRow) -> Tensor:
    """Return for each layer whether it puts a relevant document first."""
    prompt = template.prompt(row.query, list(row.documents.values()))
    signals: dict[int, Tensor | None] = dict.fromkeys(range(num_layers(model)))
    parts.run_prompt(model.base_model, prompt, signals)
    firsts = [
        int(block_scores(logits, prompt.layout)[0].argmax())
        for logits in signals.values()
        if logits is not None
    ]
    return torch.tensor([float(first in row.answer_places) for first in firsts])
