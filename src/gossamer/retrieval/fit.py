"""Training of a dual encoder on queries with several relevant documents or labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError
from gossamer.files import begin_folder, replacing
from gossamer.losses import (
    BinaryCrossEntropyLoss,
    CoupledSoftmaxLoss,
    DecoupledSoftmaxLoss,
    InBatchSoftmaxLoss,
    SoftTopKLoss,
    SummedSoftmaxLoss,
)
from gossamer.losses.streamed import StreamedLoss
from gossamer.models import DualEncoder
from gossamer.retrieval._pools import PoolBatches, TextBatch
from gossamer.retrieval._run_settings import run_settings
from gossamer.retrieval.collections import Collection
from gossamer.retrieval.dense import search_top_k
from gossamer.retrieval.training_rows import TrainingRows
from gossamer.retrieval.xmc import XmcData
from gossamer.train import FileLogger, TrainConfig, Trainer, TrainResult, seed_all
from gossamer.train.logging import Logger

__all__ = ["RetrieverConfig", "build_loss", "fit_retriever", "mine_negatives"]

NEGATIVES = ("all", "in_batch", "mined")
LOSSES: dict[str, Callable[..., nn.Module]] = {
    "decoupled": DecoupledSoftmaxLoss,
    "coupled": CoupledSoftmaxLoss,
    "soft_top_k": SoftTopKLoss,
    "summed": SummedSoftmaxLoss,
    "bce": BinaryCrossEntropyLoss,
    "in_batch": InBatchSoftmaxLoss,
}
_MANY_SCORES = 2**24
"""Scores of a batch from which on they are not held as a whole, where the loss allows it."""


@dataclass(frozen=True)
class RetrieverConfig:
    """Settings of a retriever's training.

    Args:
        epochs: Passes over the rows. Range: >= 1. Default 6.
        batch_size: Rows for each step. Range: >= 1. Default 512.
        lr: Peak learning rate of AdamW. Range: > 0. Default 0.002, for the bag of words; a
            pre-trained encoder needs about 0.00005.
        warmup: Share of the steps with a rising rate. Range: 0 to 1. Default 0.1.
        weight_decay: Of AdamW. Range: >= 0. Default 0.01.
        num_negatives: Hard negatives drawn for each row, for `negatives="mined"`. Range: >= 1.
            Default 8.
        mine_every: Epochs between two searches for hard negatives. Range: >= 1. Default 2.
        max_share: As in `mine_negatives`: hard negatives nearer than this share of a row's lowest
            relevant score are not drawn. Range: > 0. Default none left out.
        chunk_size: Texts encoded with a graph at a time. Range: >= 1. Default 1024.
        device: `"auto"`, `"cpu"`, `"cuda"` or `"mps"`. Default `"auto"`.
        seed: Of order and draws. Range: >= 0. Default 0.

    Raises:
        ConfigError: If a value is out of its range.

    Example:
        >>> RetrieverConfig(epochs=2).batch_size
        512
    """

    epochs: int = 6
    batch_size: int = 512
    lr: float = 2e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    num_negatives: int = 8
    mine_every: int = 2
    max_share: float | None = None
    chunk_size: int = 1024
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "num_negatives", "mine_every", "chunk_size"):
            check_range(getattr(self, name), name, low=1, integer=True)
        if self.max_share is not None:
            check_range(self.max_share, "max_share", low=0.0, open_low=True)
        check_range(self.seed, "seed", low=0, high=2**32 - 1, integer=True)
        self.loop(1)

    def loop(self, steps: int) -> TrainConfig:
        """Return the settings of the loop."""
        return TrainConfig(
            steps=steps,
            lr=self.lr,
            warmup=self.warmup,
            floor=0.0,
            weight_decay=self.weight_decay,
            device=self.device,
            log_every=min(10, steps),
            checkpoint_every=100,
        )


def build_loss(loss: str | Callable[..., Tensor], *, temperature: float = 0.05) -> Any:
    """Return a loss by name, or the one that was given.

    Args:
        loss: `"decoupled"`, `"coupled"`, `"soft_top_k"`, `"summed"`, `"bce"`, `"in_batch"`, or a
            function of logits and labels.
        temperature: Of a loss by name. Range: > 0. Default 0.05.

    Raises:
        ConfigError: If the name is unknown.

    Example:
        >>> build_loss("coupled").temperature
        0.05
    """
    if not isinstance(loss, str):
        return loss
    check_choice(loss, LOSSES, "loss")
    return LOSSES[loss](temperature=temperature)


def fit_retriever(
    model: DualEncoder,
    data: XmcData | Collection | TrainingRows,
    *,
    loss: str | Callable[..., Tensor],
    negatives: str = "all",
    config: RetrieverConfig | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    logger: Logger | None = None,
    quiet: bool = False,
) -> TrainResult:
    r"""Train a dual encoder, in place.

    Each step scores a batch of rows against a pool of labels (or documents): all of them; the
    relevant ones of the batch, one drawn for each row; or these and hard ones, that the model of
    `mine_every` epochs ago ranked high without being relevant. In every pool a label counts as
    relevant wherever the data says so. Pools of more than `chunk_size` texts are encoded by chunks
    and once more in the backward pass; of very many scores only a part exists at a time.

    Args:
        model: What is trained.
        data: What `read_beir`, `read_msmarco` or `read_xmc` gives. Rows without a relevant label
            are left out.
        loss: A name as in `build_loss`, or a loss `(logits, labels)`.
        negatives: `"all"`, `"in_batch"` or `"mined"`. Default `"all"`. `"in_batch"` as loss takes
            pairs, so it needs `"in_batch"` here.
        config: Settings. Default `RetrieverConfig()`.
        folder: Where checkpoints, `metrics.jsonl` and the trained model go. Default nowhere.
        resume: Go on from the folder's checkpoint, if there is one. Default false.
        logger: Where numbers go instead, for a run without a folder. Default nowhere.
        quiet: Show no progress. Default false.

    Returns:
        Steps, loss and seconds.

    Raises:
        ConfigError: If an option is unknown, loss and negatives do not fit, or the loss has
            parameters that want to learn.
        DataError: If texts are missing, no row has a relevant label, or the folder was begun with
            other settings.
        GossamerError: If a loss is not finite.

    Example:
        >>> from gossamer.models import BagEncoder
        >>> data = Collection({"a": "red shoes", "b": "a lamp"}, {"q": "shoes"}, {"q": {"a": 1}})
        >>> model = DualEncoder(BagEncoder(8))
        >>> fit_retriever(model, data, loss="decoupled", quiet=True).steps
        6

    Source: Gupta et al., *Dual-Encoders for Extreme Multi-Label Classification*, ICLR 2024,
        sections 3 and 4; hard negatives as in Xiong et al., *ANCE*, ICLR 2021.
    Deviations: cosine decay of the rate instead of linear.
    """
    settings = config or RetrieverConfig()
    check_choice(negatives, NEGATIVES, "negatives")
    chosen = build_loss(loss)
    pairs = isinstance(chosen, InBatchSoftmaxLoss)
    if pairs and negatives != "in_batch":
        raise ConfigError(
            "the loss of pairs takes its negatives from the batch; got negatives = "
            f"{negatives!r}. Use negatives='in_batch', or another loss."
        )
    if isinstance(chosen, nn.Module) and any(p.requires_grad for p in chosen.parameters()):
        raise ConfigError(
            f"the parameters of a loss do not learn here; got {chosen}. Call "
            "loss.requires_grad_(False) to keep them as they are, or train in a loop of your own."
        )
    if resume and folder is None:
        raise ConfigError("resume needs the folder of the run; got none. Give folder=DIR.")
    rows = TrainingRows.of(data)
    miner = _Miner(model, rows, settings, folder, quiet)
    batches = PoolBatches(
        rows,
        negatives,
        settings.batch_size,
        num_negatives=settings.num_negatives,
        seed=settings.seed,
        mine=miner,
        pairs=pairs,
    )
    if folder is not None:
        # what cannot be saved is found here, before hours of training
        begun_with = run_settings(settings, loss, negatives, model, rows)
        begin_folder(Path(folder), begun_with, resume=resume)
        if not resume:
            miner.forget()
    seed_all(settings.seed)
    trainer = Trainer(
        model,
        _StepLoss(chosen, settings.chunk_size),
        settings.loop(settings.epochs * batches.per_epoch),
        logger=logger if folder is None else FileLogger(Path(folder)),
        quiet=quiet,
    )
    result = trainer.fit(batches, resume=resume)
    if folder is not None:
        model.save_pretrained(folder)
    return result


def mine_negatives(
    model: DualEncoder,
    data: XmcData | Collection | TrainingRows,
    *,
    top_k: int = 100,
    max_share: float | None = None,
    quiet: bool = True,
) -> NDArray[np.int32]:
    """Return, for each row, the labels that the model ranks highest among the irrelevant ones.

    Args:
        model: That ranks.
        data: As in `fit_retriever`.
        top_k: Most labels for a row. Range: >= 1. Default 100.
        max_share: Leave out labels that score above this share of the row's lowest relevant score:
            they are likely to be relevant without being marked. Range: > 0. Default none left out.
        quiet: Show no progress. Default true.

    Returns:
        Columns, the hardest first, -1 where there are fewer; shape `(rows, top_k)`, of the rows
        that have a relevant label.

    Raises:
        ConfigError: If an option is out of its range.
        DataError: As in `fit_retriever`.

    Example:
        >>> from gossamer.models import BagEncoder
        >>> data = Collection({"a": "red shoes", "b": "a lamp"}, {"q": "shoes"}, {"q": {"a": 1}})
        >>> mine_negatives(DualEncoder(BagEncoder(8)), data, top_k=2).tolist()
        [[1, -1]]

    Source: Gupta et al., ICLR 2024, section 4.1; the share: Moreira et al., *NV-Retriever*, 2024.
    Deviations: none
    """
    check_range(top_k, "top_k", low=1, integer=True)
    if max_share is not None:
        check_range(max_share, "max_share", low=0.0, open_low=True)
    rows = TrainingRows.of(data)
    queries = model.encode_queries(rows.texts, quiet=quiet).numpy()
    documents = model.encode_documents(rows.label_texts, quiet=quiet).numpy()
    most = int(np.diff(rows.labels.indptr).max())
    scores, found = search_top_k(queries, documents, min(top_k + most, len(rows.label_texts)))
    mined = np.full((len(rows.texts), top_k), -1, dtype=np.int32)
    for row, (columns, values) in enumerate(zip(found, scores, strict=True)):
        relevant = rows.labels.indices[rows.labels.indptr[row] : rows.labels.indptr[row + 1]]
        kept = ~np.isin(columns, relevant)
        if max_share is not None:
            kept &= values <= max_share * (documents[relevant] @ queries[row]).min()
        hard = columns[kept][:top_k]
        mined[row, : len(hard)] = hard
    return mined


class _StepLoss:
    """The loss of one batch of texts."""

    def __init__(self, loss: Callable[..., Tensor], chunk_size: int) -> None:
        self.loss = loss
        self.chunk_size = chunk_size

    def __call__(self, model: nn.Module, batch: TextBatch) -> Tensor:
        encoder: Any = getattr(model, "module", model)  # what accelerate wraps is inside
        queries = self._embed(encoder.embed_queries, batch.texts, encoder)
        pool = self._embed(encoder.embed_documents, batch.pool_texts, encoder)
        many = len(queries) * len(pool) > _MANY_SCORES
        if many and isinstance(self.loss, StreamedLoss) and self.loss.streams:
            return self.loss.streamed(queries, pool, batch.labels)
        return self.loss(queries @ pool.T, batch.labels)

    def _embed(
        self, encode: Callable[[Sequence[str]], Tensor], texts: Sequence[str], model: nn.Module
    ) -> Tensor:
        """Encode texts; more than a chunk without their graph, which is made again later."""
        size = self.chunk_size
        if len(texts) <= size:
            return encode(texts)
        # random numbers of a device are repeated only where a tensor of it is handed over
        here = next(model.parameters()).detach()
        parts: list[Tensor] = [
            checkpoint(lambda part, _: encode(part), texts[i : i + size], here, use_reentrant=False)
            for i in range(0, len(texts), size)
        ]
        return torch.cat(parts)


class _Miner:
    """Hard negatives of an epoch: searched when it begins, kept for a run that goes on later."""

    def __init__(
        self,
        model: DualEncoder,
        rows: TrainingRows,
        config: RetrieverConfig,
        folder: str | os.PathLike[str] | None,
        quiet: bool,
    ) -> None:
        self.quiet = quiet
        self.model = model
        self.rows = rows
        self.every = config.mine_every
        self.max_share = config.max_share
        self.folder = None if folder is None else Path(folder)
        self.epoch = -1
        self.lists: NDArray[np.int32] | None = None

    def __call__(self, epoch: int) -> NDArray[np.int32] | None:
        begun = epoch - epoch % self.every
        if begun == 0:  # an untrained model knows no hard negatives
            return None
        if begun != self.epoch:
            self.lists, self.epoch = self._lists(begun), begun
        return self.lists

    def forget(self) -> None:
        """Remove the lists that an earlier run left in the folder."""
        for path in self.folder.glob("negatives-*.npy") if self.folder else ():
            path.unlink()

    def _lists(self, epoch: int) -> NDArray[np.int32]:
        path = None if self.folder is None else self.folder / f"negatives-{epoch:05}.npy"
        if path is not None and path.exists():
            kept: NDArray[np.int32] = np.load(path, allow_pickle=False)
            if kept.shape[0] != len(self.rows.texts):
                raise DataError(
                    f"{path} must hold one row for each of {len(self.rows.texts)} texts; got "
                    f"{kept.shape[0]}. Begin the run again in another folder."
                )
            return kept
        mined = mine_negatives(self.model, self.rows, max_share=self.max_share, quiet=self.quiet)
        if path is not None:
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, mined, allow_pickle=False)
        return mined
