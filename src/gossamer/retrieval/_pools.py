"""Batches of a retriever's training: rows, and the pool of labels that each is scored against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from gossamer.retrieval.training_rows import TrainingRows

__all__ = ["PoolBatches", "TextBatch"]

Mine = Callable[[int], NDArray[np.int32] | None]


@dataclass(frozen=True)
class TextBatch:
    """Texts, the texts of the pool, and which of the pool is relevant to which row.

    Args:
        texts: Of the rows.
        pool_texts: Of the pool.
        labels: Rows x pool.
    """

    texts: list[str] = field(repr=False)
    pool_texts: list[str] = field(repr=False)
    labels: csr_matrix


class PoolBatches:
    """Shuffled batches by number, the same for the same seed, wherever a run begins.

    The pool of a batch is all labels (`all`); one relevant label of each row, drawn (`in_batch`);
    or those and labels drawn from each row's list of hard ones (`mined`), where a label that is
    relevant to another row of the batch is relevant there too.

    Args:
        rows: What is learnt from.
        negatives: `"all"`, `"in_batch"` or `"mined"`.
        batch_size: Rows of a batch.
        num_negatives: Drawn from a row's list.
        seed: Of order and draws.
        mine: Returns the lists of an epoch, `(rows, n)` with -1 for none, or `None`.
        pairs: Keep the pool in the order of the rows, one for each, as pair losses need it.
    """

    def __init__(
        self,
        rows: TrainingRows,
        negatives: str,
        batch_size: int,
        *,
        num_negatives: int = 0,
        seed: int = 0,
        mine: Mine = lambda epoch: None,
        pairs: bool = False,
    ) -> None:
        self.rows = rows
        self.negatives = negatives
        self.batch_size = min(batch_size, len(rows.texts))
        self.num_negatives = num_negatives
        self.seed = seed
        self.mine = mine
        self.pairs = pairs
        self.per_epoch = -(-len(rows.texts) // self.batch_size)
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def batch(self, number: int) -> TextBatch:
        """Return batch `number`, from 0."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(
                len(self.rows.texts)
            )
            self._epoch = epoch
        chosen = self._order[place * self.batch_size : (place + 1) * self.batch_size]
        labels = self.rows.labels[chosen]
        if self.negatives == "all":
            pool: Any = slice(None)
            pool_texts = list(self.rows.label_texts)
        else:
            pool = self._pool(chosen, labels, epoch, np.random.default_rng([self.seed, 1, number]))
            pool_texts = [self.rows.label_texts[i] for i in pool]
            labels = labels[:, pool]
        return TextBatch([self.rows.texts[i] for i in chosen], pool_texts, labels)

    def _pool(
        self, chosen: NDArray[np.int64], labels: csr_matrix, epoch: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        counts = np.diff(labels.indptr)
        places = labels.indptr[:-1] + rng.integers(counts)
        own: NDArray[np.int64] = labels.indices[places].astype(np.int64)
        if self.pairs:
            return own
        lists = self.mine(epoch) if self.negatives == "mined" else None
        if lists is None:
            return np.unique(own)
        return np.unique(np.concatenate([own, _drawn(lists[chosen], self.num_negatives, rng)]))


def _drawn(lists: NDArray[np.int32], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return `count` of each row's entries, drawn evenly, without those that are -1."""
    keys = rng.random(lists.shape)
    keys[lists < 0] = 2.0
    kept = np.argsort(keys, axis=1)[:, :count]
    drawn = np.take_along_axis(lists, kept, axis=1).ravel()
    return drawn[drawn >= 0].astype(np.int64)
