"""What the fine-tuning of a ranker is made of: prompts by number, their loss, adapters."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.attention import block_scores
from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError, DtypeError, MissingDependencyError
from gossamer.losses import BlockRankingLoss
from gossamer.models import register_block_attention
from gossamer.retrieval._ranking_prompt import RankingPrompt, RankingTemplate
from gossamer.retrieval.ranking_rows import RankingRow

__all__ = [
    "RankingStream",
    "RowLoss",
    "adapted",
    "block_attention_in",
    "check_rows",
    "check_trainable",
    "rows_key",
]

# the projections of a layer that the official code adapts
_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, eq=False)
class TrainingPrompt:
    """One row as a prompt that ends with the answer.

    Args:
        prompt: Tokens and blocks.
        places: Of the relevant documents in it.
    """

    prompt: RankingPrompt
    places: tuple[int, ...]


class RankingStream:
    """Training batches by number; every epoch has another order of rows and of documents.

    Args:
        rows: All of them.
        template: Writes the prompts.
        batch_size: Rows of a batch.
        seed: Of the orders.
    """

    def __init__(
        self, rows: Sequence[RankingRow], template: RankingTemplate, batch_size: int, *, seed: int
    ) -> None:
        self.rows = rows
        self.template = template
        self.batch_size = batch_size
        self.seed = seed
        self._told = False

    def batch(self, number: int) -> list[TrainingPrompt]:
        """Return batch `number`, from 0."""
        first = number * self.batch_size
        return [self._prompt(place) for place in range(first, first + self.batch_size)]

    def _prompt(self, place: int) -> TrainingPrompt:
        epoch, within = divmod(place, len(self.rows))
        order = list(range(len(self.rows)))
        random.Random(f"{self.seed}-{epoch}").shuffle(order)
        row = self.rows[order[within]]
        names = list(row.documents)
        random.Random(f"{self.seed}-{epoch}-{order[within]}").shuffle(names)
        places = tuple(sorted(names.index(name) for name in row.answer_ids))
        texts = [row.documents[name] for name in names]
        prompt = self.template.prompt(row.query, texts, answer=places)
        if prompt.num_cut and not self._told:
            self._told = True
            warnings.warn(
                f"documents longer than max_document_length = {self.template.max_document_length} "
                f"tokens lose their end: {prompt.num_cut} of {len(texts)} in the first such row, "
                f"{row.query_id or row.query[:40]!r}",
                stacklevel=2,
            )
        return TrainingPrompt(prompt, places)


class RowLoss:
    """The loss of a batch of rows: that of the answer's tokens plus that of one layer's scores.

    Args:
        layer: The one whose scores are ranked.
        aux_weight: Of the ranking loss.
        answer_weight: Of the answer's.
        temperature: Of the ranking loss.
    """

    def __init__(
        self, layer: int, *, aux_weight: float, answer_weight: float, temperature: float
    ) -> None:
        self.layer = layer
        self.aux_weight = aux_weight
        self.answer_weight = answer_weight
        self.ranking = BlockRankingLoss(temperature=temperature)

    def __call__(self, model: Any, batch: Sequence[TrainingPrompt]) -> Tensor:
        """Return the mean over the rows."""
        return torch.stack([self.of_row(model, row) for row in batch]).mean()

    def of_row(self, model: Any, row: TrainingPrompt) -> Tensor:
        """Return the loss of one row."""
        prompt = row.prompt
        signals: dict[int, Tensor | None] = {self.layer: None} if self.aux_weight else {}
        kept = prompt.num_answer + 1  # the first token is predicted by the one before it
        logits = run_prompt(model, prompt, signals, logits_to_keep=kept).logits
        targets = prompt.input_ids[-prompt.num_answer :].to(logits.device)
        loss = self.answer_weight * F.cross_entropy(logits[0, -kept:-1].float(), targets)
        read = signals.get(self.layer)
        if read is not None:
            scores = block_scores(read, prompt.layout)
            loss = loss + self.aux_weight * self.ranking(scores, [list(row.places)])
        return loss


def run_prompt(
    model: Any, prompt: RankingPrompt, signals: dict[int, Tensor | None], **options: Any
) -> Any:
    """Return what a model with block attention puts out for a prompt; fill in its signals."""
    device = next(model.parameters()).device
    return model(
        prompt.input_ids[None].to(device),
        position_ids=prompt.position_ids()[None].to(device),
        block_layout=prompt.layout,
        block_signals=signals,
        use_cache=False,
        **options,
    )


@contextmanager
def block_attention_in(model: Any, *, checkpointing: bool = False) -> Iterator[None]:
    """Give a model block attention, and its own back at the end.

    Args:
        model: One of transformers.
        checkpointing: Make activations again for the gradient. Not the re-entrant way: that one
            loses the gradient of the scores.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(register_block_attention())
    start, end = "activation_checkpointing_enable", "activation_checkpointing_disable"
    if not hasattr(model, start):  # renamed within version 5
        start, end = "gradient_checkpointing_enable", "gradient_checkpointing_disable"
    try:
        if checkpointing:
            getattr(model, start)({"use_reentrant": False})
        yield
    finally:
        if checkpointing:
            getattr(model, end)()
        model.set_attn_implementation(before)


def check_rows(rows: Any) -> list[RankingRow]:
    """Return rows as a list that can be trained on.

    Raises:
        DataError: If there is none, one is no `RankingRow`, or an answer is no candidate.
    """
    checked = list(rows)
    if not checked:
        raise DataError("rows must hold at least one row; got none. Read a file of rows.")
    for number, row in enumerate(checked):
        if not isinstance(row, RankingRow):
            raise DataError(
                f"rows must be RankingRows; got {type(row).__name__} at place {number}. Use "
                "read_ranking_rows(path)."
            )
        unknown = [name for name in row.answer_ids if name not in row.documents]
        if unknown or not row.answer_ids:
            raise DataError(
                f"answer_ids must be among the row's {len(row.documents)} documents; got "
                f"{unknown[0] if unknown else 'none'!r} at place {number}, query "
                f"{row.query[:40]!r}. Add the document, or take the row out."
            )
    return checked


def rows_key(rows: Sequence[RankingRow]) -> int:
    """Return a number that tells two lists of rows apart."""
    key = 0
    for row in rows:
        key = zlib.crc32(repr(row).encode(), key)
    return key


def adapted(model: Any, lora: int | Mapping[str, Any] | None) -> Any:
    """Return a model with low-rank adapters by peft, or the model itself.

    Args:
        model: One of transformers.
        lora: Rank, or options of peft's `LoraConfig`.

    Raises:
        ConfigError: If the rank is out of range.
        MissingDependencyError: If peft is not installed.
    """
    if lora is None:
        return model
    options: dict[str, Any] = {"r": lora} if isinstance(lora, int) else dict(lora)
    check_range(options.get("r", 8), "lora", low=1, integer=True)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingDependencyError("peft", "retrieval") from None
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    defaults: dict[str, Any] = {
        "lora_alpha": 2 * options.get("r", 8),
        "task_type": "CAUSAL_LM",
        "target_modules": [name for name in _LORA_TARGETS if name in names],
    }
    options = {**defaults, **options}
    if not options["target_modules"]:
        raise ConfigError(
            f"lora needs the names of a {type(model).__name__}'s projections; got none. Give "
            'lora={"r": 8, "target_modules": [...]}.'
        )
    with warnings.catch_warnings():
        # peft asks models by a name that transformers has replaced
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, LoraConfig(**options))


def check_trainable(model: Any) -> None:
    """Check that there is something to train, in float32.

    Raises:
        ConfigError: If nothing requires a gradient.
        DtypeError: If something does in half precision, where small steps would round to nothing.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError(
            "model must have parameters that require a gradient; got none. Call "
            "model.requires_grad_(True)."
        )
    for name, parameter in trained.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise DtypeError(
                f"trained parameters must be float32, since steps as small as these round to "
                f"nothing in half precision; got {parameter.dtype} for {name}. Load the model "
                "with dtype=torch.float32 (activations may be bfloat16: TrainConfig.precision), "
                "or use lora."
            )
