"""Batches of Hugging Face sequence-to-sequence models with the labels of a neighbour."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError, MissingDependencyError
from gossamer.retrieval._neighbor_table import NeighborTable

__all__ = ["NeighborCollator"]

_IGNORED = -100


class NeighborCollator:
    """Collate features for a sequence-to-sequence model and add the labels of a neighbour.

    A feature is what a tokenizer of transformers makes, with `labels`, and `row`, the number of
    its target in the table; -1 for what has no neighbours, such as validation rows. The trainer of
    transformers keeps that column with `remove_unused_columns=False`. Batches get
    `neighbor_labels` for `SequenceSmoothingLoss`; with `replace` the labels themselves change and
    any trainer will do. A draw depends on seed, epoch and row, not on the batch or the worker:
    call `set_epoch`, or give `trainer_callback()` to the trainer.

    Args:
        tokenizer: Of transformers, the one that made the labels.
        table: Of `mine_neighbors`.
        random_state: The seed. Range: >= 0. Default 0.
        temperature: As in `NeighborTable.sample`. Unit: BLEU. Range: > 0. Default infinity.
        sample: One drawn neighbour, else all of them. Default true.
        replace: Chance that the labels of a row become those of a drawn neighbour, with no second
            decoder pass and the same loss on average; above 0 there are no `neighbor_labels`.
            Range: 0 to 1. Default 0.
        max_length: Cut neighbours to this length. Unit: tokens. Range: >= 1. Default none.
        base: Makes the batch of the rest. Default: `DataCollatorForSeq2Seq(tokenizer)`.

    Shape:
        - neighbor_labels: `(B, T')`, or `(B, k, T')` for `sample=False`, int64; -100 where there
          is no token.

    Raises:
        ConfigError: If an option is out of its range, or features lack `row` or `labels`.
        DataError: If a row is not in the table, or its labels are not what the tokenizer makes of
            the target there.
        MissingDependencyError: Without transformers (extra `hf`) and without `base`.

    Example:
        >>> from gossamer.retrieval import mine_neighbors
        >>> table = mine_neighbors(["a red cat", "a red dog", "rain fell"], min_bleu=0.1)
        >>> def tokenizer(text_target, **options):
        ...     return {"input_ids": [[len(word) for word in t.split()] for t in text_target]}
        >>> def base(features):
        ...     return {"labels": torch.tensor([feature["labels"] for feature in features])}
        >>> collate = NeighborCollator(tokenizer, table, base=base)
        >>> collate([{"row": 0, "labels": [1, 3, 3]}])["neighbor_labels"]
        tensor([[1, 3, 3]])

    Source: Lukasik et al., *Semantic Label Smoothing for Sequence to Sequence Problems*, EMNLP
        2020.
    Deviations: one drawn neighbour in each step, the replacement form and the temperature are not
        in the paper.
    """

    def __init__(
        self,
        tokenizer: Any,
        table: NeighborTable,
        *,
        random_state: int = 0,
        temperature: float = math.inf,
        sample: bool = True,
        replace: float = 0.0,
        max_length: int | None = None,
        base: Callable[[list[dict[str, Any]]], Any] | None = None,
    ) -> None:
        check_range(replace, "replace", low=0.0, high=1.0)
        if max_length is not None:
            check_range(max_length, "max_length", low=1, integer=True)
        if replace > 0 and not sample:
            raise ConfigError(
                f"replace must be 0 with sample=False; got {replace:g}. One neighbour at most "
                "takes the place of a target: leave sample alone."
            )
        table.sample([], random_state=random_state, temperature=temperature)  # checks both
        self.tokenizer = tokenizer
        self.table = table
        self.random_state = random_state
        self.temperature = temperature
        self.sample = sample
        self.replace = replace
        self.max_length = max_length
        self.base = _default_base(tokenizer) if base is None else base
        # in shared memory, so that workers that live for several epochs see it change
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._checked: set[int] = set()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins, for draws of its own.

        Raises:
            ConfigError: If it is no integer >= 0.
        """
        check_range(epoch, "epoch", low=0, integer=True)
        self._epoch[0] = epoch

    def trainer_callback(self) -> Any:
        """Return a callback of transformers that calls `set_epoch`.

        Raises:
            MissingDependencyError: Without transformers (extra `hf`).
        """
        try:
            from transformers import TrainerCallback
        except ImportError:
            raise MissingDependencyError("transformers", "hf") from None
        collator = self

        class SetEpoch(TrainerCallback):  # type: ignore[misc]
            def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                # the fraction of a resumed epoch, which rounding may leave below its number
                collator.set_epoch(math.floor((state.epoch or 0) + 1e-6))

        return SetEpoch()

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Any:
        """Return the batch."""
        rows, plain = _parted(features)
        known = [row for row in rows if row >= 0]
        self._check_labels(
            {row: f["labels"] for row, f in zip(rows, plain, strict=True) if row >= 0}
        )
        if not known:
            return self.base(plain)
        if not self.sample:
            batch = self.base(plain)
            every = [self.table.indices[row] if row >= 0 else [] for row in rows]
            width = self.table.indices.shape[1]
            flat = [index for own in every for index in [*own, *[-1] * (width - len(own))]]
            labels = self._padded(flat)
            batch["neighbor_labels"] = labels.reshape(len(rows), width, -1)
            return batch
        drawn = iter(
            self.table.sample(
                known,
                epoch=int(self._epoch),
                random_state=self.random_state,
                temperature=self.temperature,
                chance=self.replace or 1.0,
            ).tolist()
        )
        indices = [next(drawn) if row >= 0 else -1 for row in rows]
        if self.replace > 0:
            for feature, ids in zip(plain, self._ids(indices), strict=True):
                feature["labels"] = ids or feature["labels"]
            return self.base(plain)
        batch = self.base(plain)
        batch["neighbor_labels"] = self._padded(indices)
        return batch

    def _ids(self, indices: Sequence[int]) -> list[list[int]]:
        """Return the tokens of texts of the corpus, none for -1."""
        texts = [self.table.corpus[index] for index in indices if index >= 0]
        cut = {} if self.max_length is None else {"max_length": self.max_length}
        found = iter(
            self.tokenizer(text_target=texts, truncation=bool(cut), **cut)["input_ids"]
            if texts
            else []
        )
        return [list(next(found)) if index >= 0 else [] for index in indices]

    def _padded(self, indices: Sequence[int]) -> Tensor:
        rows = self._ids(indices)
        width = max(1, *map(len, rows))
        return torch.tensor([row + [_IGNORED] * (width - len(row)) for row in rows])

    def _check_labels(self, labels: Mapping[int, list[int]]) -> None:
        """Check, once for each row, that the labels are the target of the table in these tokens."""
        new = {row: ids for row, ids in labels.items() if row not in self._checked}
        if not new:
            return
        self.table.sample(new)  # refuses rows outside
        texts = [self.table.targets[row] for row in new]
        wanted = self.tokenizer(text_target=texts)["input_ids"]
        for (row, ids), whole in zip(new.items(), wanted, strict=True):
            given = [token for token in ids if token != _IGNORED]
            # a target that was cut may keep its last token, the end of the text
            cut = 1 < len(given) < len(whole) and given[:-1] == list(whole)[: len(given) - 1]
            if given != list(whole) and not cut:
                raise DataError(
                    f"labels of row {row} must be what the tokenizer makes of its target, "
                    f"{self.table.targets[row]!r}: {list(whole)[:8]}...; got {given[:8]}... Give "
                    "the tokenizer of the model, and rows in the order of the table."
                )
        self._checked |= set(new)


def _parted(features: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the rows, and the features without them, labels as lists."""
    rows, plain = [], []
    for feature in features:
        for key in ("row", "labels"):
            if key not in feature:
                raise ConfigError(
                    f"features must have 'row', the number of the target in the table or -1, and "
                    f"'labels'; got {', '.join(feature)}. Add {key!r}; a trainer of transformers "
                    "keeps it with remove_unused_columns=False."
                )
        rows.append(operator.index(feature["row"]))
        rest = {name: value for name, value in feature.items() if name != "row"}
        plain.append({**rest, "labels": [int(token) for token in rest["labels"]]})
    bad = next((row for row in rows if row < -1), None)
    if bad is not None:
        raise DataError(f"row must be a target of the table, or -1; got {bad}. Number the pairs.")
    return rows, plain


def _default_base(tokenizer: Any) -> Callable[[list[dict[str, Any]]], Any]:
    try:
        from transformers import DataCollatorForSeq2Seq
    except ImportError:
        raise MissingDependencyError("transformers", "hf") from None
    base: Callable[[list[dict[str, Any]]], Any] = DataCollatorForSeq2Seq(tokenizer)
    return base
