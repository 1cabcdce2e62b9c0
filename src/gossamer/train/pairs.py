"""Training of an encoder-decoder on pairs of texts, with smoothing over words and sentences."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_choice, check_keys, check_range
from gossamer.errors import ConfigError, DataError
from gossamer.files import begin_folder
from gossamer.losses import SequenceSmoothingLoss
from gossamer.measures import corpus_bleu
from gossamer.models import Seq2Seq, shift_right
from gossamer.tasks import PairBatch, PairsTask, Task
from gossamer.tasks.base import IGNORED
from gossamer.tasks.pair_batches import pad_rows
from gossamer.train.evaluation import GridResult
from gossamer.train.job import TrainJob

__all__ = ["Neighbors", "PairsLoss", "evaluate_pairs", "pairs_options", "train_pairs"]

_MOST_SOURCES = 1000
"""Sources of the test pairs that are decoded."""
_ROWS = 64
_LOSSES: dict[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "smoothing": ("alpha",),
    "sequence_smoothing": ("alpha", "token_alpha", "neighbors"),
}


class Neighbors(Protocol):
    """What training reads of a `NeighborTable`."""

    @property
    def corpus(self) -> Sequence[str]:
        """The sentences that are neighbours."""

    def check_data(self, targets: Sequence[str], corpus: Sequence[str] | None = None) -> None:
        """Refuse other targets than those that the table was mined from."""

    def sample(
        self, rows: Iterable[int], *, epoch: int = 0, random_state: int = 0
    ) -> NDArray[np.int32]:
        """Draw one neighbour of each target, -1 where there is none."""


class PairsLoss:
    """Loss of a batch of pairs and, with a table, of one neighbour of each target.

    Source and both targets go through the model in one call, so the encoder runs once. The draw of
    a row depends on the seed, the epoch and the row alone.

    Args:
        task: Gives the tokens of the neighbours.
        alpha: Share of the neighbours. Range: 0 to 1. Default 0.1.
        token_alpha: Share of each word that is spread over the vocabulary. Range: 0 to 1. Default
            0.
        neighbors: Mined from `task.targets()`. Default none.
        seed: Of the draws. Default 0.

    Raises:
        ConfigError: If a share is out of its range.
        DataError: If the table was mined from other targets.

    Source: Lukasik et al., *Semantic Label Smoothing for Sequence to Sequence Problems*, EMNLP
        2020.
    Deviations: those of `SequenceSmoothingLoss`.
    """

    def __init__(
        self,
        task: PairsTask,
        *,
        alpha: float = 0.1,
        token_alpha: float = 0.0,
        neighbors: Neighbors | None = None,
        seed: int = 0,
    ) -> None:
        self.loss = SequenceSmoothingLoss(alpha=alpha, token_alpha=token_alpha)
        self.neighbors = neighbors
        self.seed = seed
        if neighbors is not None:
            neighbors.check_data(task.targets("train"))
            rows = [task.target_tokens(text).tolist() for text in neighbors.corpus]
            self.corpus = pad_rows(rows, IGNORED)

    def __call__(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """Return the loss, a scalar. Unit: nats for each token."""
        if self.neighbors is None or self.loss.alpha == 0:
            logits = model(batch.source, shift_right(batch.labels), mask=batch.mask)
            return self.loss(logits, batch.labels, None, None)  # type: ignore[no-any-return]
        both = self._with_one(self.neighbors, batch)  # (B, 2, T)
        targets = shift_right(both.flatten(0, 1)).view_as(both)
        logits = model(batch.source, targets, mask=batch.mask)
        return self.loss(logits[:, 0], both[:, 0], logits[:, 1], both[:, 1])  # type: ignore[no-any-return]

    def _with_one(self, neighbors: Neighbors, batch: PairBatch) -> Tensor:
        """Return the labels of the targets and of one neighbour each."""
        rows = batch.rows.tolist()
        drawn = neighbors.sample(rows, epoch=batch.epoch, random_state=self.seed)
        chosen = torch.from_numpy(drawn.astype(np.int64))
        near = torch.where(chosen[:, None] >= 0, self.corpus[chosen.clamp(min=0)], IGNORED)
        near = near[:, : max(1, int((near != IGNORED).sum(1).max()))].to(batch.labels.device)
        width = max(near.shape[1], batch.labels.shape[1])
        parts = [F.pad(p, (0, width - p.shape[1]), value=IGNORED) for p in (batch.labels, near)]
        return torch.stack(parts, dim=1)


def train_pairs(
    job: TrainJob,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    quiet: bool = False,
    task: Task | None = None,
    neighbors: Neighbors | None = None,
) -> GridResult:
    """Train the job's encoder-decoder, keep it in a run folder, and measure it on the test pairs.

    The folder is that of `train_task`. The last step is kept.

    Args:
        job: What to train; its `loss` is `{"name": "cross_entropy"}` (default), `{"name":
            "smoothing", "alpha": 0.1}` over words, or `{"name": "sequence_smoothing", "alpha": 0.1,
            "token_alpha": 0, "neighbors": PATH}`, where the path is for the record.
        folder: Run folder.
        resume: Go on from the folder's checkpoint, if there is one.
        quiet: Show no progress. Default false.
        task: What `job.build_task()` gave. Default: built.
        neighbors: The table at that path. Default none.

    Returns:
        One cell, as `evaluate_pairs` gives it.

    Raises:
        ConfigError: If an option of `loss` is unknown or out of range, or names a table that
            was not given.
        DataError: If a text is longer than the model can take, the table was mined from other
            targets, or the folder was begun with other settings.
        GossamerError: If the loss is not finite; the message names the step.
    """
    import tomli_w

    from gossamer.train.logging import FileLogger
    from gossamer.train.loop import Trainer
    from gossamer.train.seeding import seed_all

    path = Path(folder)
    built: Any = task or job.build_task()
    model: Any = job.build_model(built)
    job = dataclasses.replace(job, task=built.config)
    loss = PairsLoss(
        built, **pairs_options(job.loss, neighbors), neighbors=neighbors, seed=job.seed
    )
    stream = built.pairs(job.batch_size, seed=job.seed)
    kept = built.pairs(job.batch_size, split="test")  # they are read after the training
    longest = {
        "source": stream.source,
        "target": stream.labels,
        "test source": kept.source,
        "test target": kept.labels,
        **({} if neighbors is None else {"neighbour": loss.corpus}),
    }
    for name, rows in longest.items():
        _check_length(model, name, rows.shape[1])
    seed_all(job.seed)
    begin_folder(path, tomli_w.dumps(job.to_dict()), resume=resume)
    trainer = Trainer(model, loss, job.train, logger=FileLogger(path), quiet=quiet)
    trainer.fit(stream, resume=resume)
    model.save_pretrained(path)
    return evaluate_pairs(model, built)


def evaluate_pairs(
    model: Seq2Seq,
    task: PairsTask,
    *,
    split: str = "test",
    num_sources: int = _MOST_SOURCES,
    num_beams: int = 1,
) -> GridResult:
    """Measure what an encoder-decoder writes for sources against all their targets.

    Args:
        model: Set to evaluation mode meanwhile.
        task: What it was trained on.
        split: `"train"` or `"test"`. Default `"test"`.
        num_sources: Most distinct sources. Range: >= 1. Default 1000.
        num_beams: Of decoding. Default 1, greedy.

    Returns:
        One cell: `bleu` (corpus BLEU, 0 to 100), `exact_match` (share of outputs that are one of
        the targets), `cross_entropy` and `token_accuracy` (nats for each token, and share of
        tokens, of the targets given the true tokens before) and `num_samples`, the sources.

    Source: Papineni et al., *BLEU*, ACL 2002.
    Deviations: none
    """
    check_range(num_sources, "num_sources", low=1, integer=True)
    references = dict(list(task.references(split).items())[:num_sources])
    written = _write(model, task, list(references), num_beams)
    targets = list(references.values())
    exact = [text in known for text, known in zip(written, targets, strict=True)]
    cell = {
        "split": split,
        "bleu": corpus_bleu(written, targets),
        "exact_match": sum(exact) / len(exact),
        **_given_the_truth(model, task, references),
        "num_samples": len(references),
    }
    return GridResult((cell,))


def _write(model: Seq2Seq, task: PairsTask, sources: list[str], num_beams: int) -> list[str]:
    """Return the model's text for each source."""
    tokens = [task.encode(source).tolist() for source in sources]
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    texts = [""] * len(tokens)
    for begin in range(0, len(order), _ROWS):
        chosen = order[begin : begin + _ROWS]
        source = pad_rows([tokens[i] for i in chosen], 0).to(model.device)
        limit = task.longest_target + 1
        made = model.generate(source, mask=source != 0, max_new_tokens=limit, num_beams=num_beams)
        for i, row in zip(chosen, made.tolist(), strict=True):
            texts[i] = task.decode(row)
    return texts


@torch.no_grad()
def _given_the_truth(
    model: Seq2Seq, task: PairsTask, references: Mapping[str, list[str]]
) -> dict[str, float]:
    """Return loss and accuracy of the tokens of all targets, given the true ones before."""
    pairs = [(source, text) for source, texts in references.items() for text in texts]
    pairs.sort(key=lambda pair: len(pair[1]))
    was_training = model.training
    model.eval()
    loss = right = count = 0.0
    for begin in range(0, len(pairs), _ROWS):
        part = pairs[begin : begin + _ROWS]
        source = pad_rows([task.encode(s).tolist() for s, _ in part], 0).to(model.device)
        rows = [task.target_tokens(text).tolist() for _, text in part]
        labels = pad_rows(rows, IGNORED).to(model.device)
        logits = model(source, shift_right(labels), mask=source != 0)
        loss += float(F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum"))
        right += float((logits.argmax(-1) == labels).sum())
        count += float((labels != IGNORED).sum())
    model.train(was_training)
    return {"cross_entropy": loss / count, "token_accuracy": right / count}


def pairs_options(loss: Mapping[str, Any], neighbors: Neighbors | None) -> dict[str, float]:
    """Return the shares of a table [loss] for pairs of texts.

    Raises:
        ConfigError: If a name or key is unknown, or a table of neighbours is named and not given.
    """
    table = {"name": "cross_entropy", **loss}
    name = str(table.pop("name"))
    check_choice(name, _LOSSES, "loss for pairs of texts")
    check_keys(table, _LOSSES[name], f"loss {name!r}")
    if name != "sequence_smoothing":
        if neighbors is not None:
            raise ConfigError(
                f"neighbours belong to the loss sequence_smoothing; got {name!r}. Leave them out."
            )
        alpha = table.get("alpha", 0.1 if name == "smoothing" else 0.0)
        check_range(alpha, "alpha", low=0.0, high=1.0)
        return {"alpha": 0.0, "token_alpha": alpha}
    if neighbors is None or "neighbors" not in table:
        got = "no table" if neighbors is None else "a table, but no path of it"
        raise ConfigError(
            "neighbors in [loss] must name the table that is given as `neighbors`; got "
            f"{got}. Load it with NeighborTable.load, or mine it."
        )
    return {"alpha": 0.1, **{key: value for key, value in table.items() if key != "neighbors"}}


def _check_length(model: Seq2Seq, name: str, size: int) -> None:
    if model.max_length is not None and size > model.max_length:
        raise DataError(
            f"the longest {name} must have at most max_length = {model.max_length} tokens; got "
            f"{size} with its end token. Raise max_length in [model], or shorten the texts."
        )
