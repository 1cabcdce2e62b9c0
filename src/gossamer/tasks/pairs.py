"""Pairs of texts in a file: translation, summaries, texts from data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.files import read_text
from gossamer.tasks.base import EOS, Batch, Example, GridCell, Task, collate
from gossamer.tasks.pair_batches import PairStream
from gossamer.tasks.rows import Row, held_out
from gossamer.tasks.words import UNKNOWN, Vocabulary, split_words

__all__ = ["PairsTask"]

_REMEDY = "Give a UTF-8 file of lines source<TAB>target."


@dataclass(frozen=True)
class _Pair:
    source: list[str]
    target: list[str]

    @property
    def key(self) -> str:
        return " ".join(self.source)


class PairsTask(Task):
    r"""Sources and targets from a file with one pair a line, parted by a tab.

    Texts are split into words, signs and single characters of Chinese and Japanese; a produced
    target is those with one space between. The vocabulary serves both sides and is that of the
    training pairs. About a tenth of the distinct sources, chosen by a hash of their words, are for
    tests with all their targets: no source is on both sides, and a pair stays on its side when
    others are added. A source may have several targets, which are then references in tests.

    For an encoder-decoder, `pairs` gives the batches. A decoder reads source, end token and target
    as one sequence.

    Args:
        path: Lines `source<TAB>target`, UTF-8, `.gz` is unpacked; blank lines are left out, further
            columns too if all lines have them.
        vocab_size: Most tokens; rarer words, and words that come once, are unknown. Range: >= 4.
            Default 4000.
        checksum: Of the file a model was trained on; another file is an error. Default none.

    Raises:
        ConfigError: If `vocab_size` is out of range.
        DataError: If the file is missing, empty, not UTF-8, a line has not two texts, there are
            not two distinct sources, or the file is another one than `checksum` says.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/my.tsv"
        >>> with open(path, "w") as file:
        ...     _ = file.write("".join(f"day {n % 9}\tit is day {n % 9} .\n" for n in range(40)))
        >>> task = PairsTask(path)
        >>> task.decode(task.target_tokens("it is day ."))
        'it is day .'
        >>> task.pairs(4).batch(0).labels.shape
        torch.Size([4, 6])

    Source: the library's own.
    Deviations: words in place of word pieces.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        vocab_size: int = 4000,
        checksum: str | None = None,
    ) -> None:
        self.path = str(path)
        self.most_tokens = vocab_size
        text = read_text(self.path, _REMEDY)
        self.checksum = blake2b(text.encode(), digest_size=8).hexdigest()
        if checksum not in (None, self.checksum):
            raise DataError(
                f"{self.path} must be the file that the model was trained on; it was changed since "
                f"then (checksum {self.checksum}, not {checksum}). Put that file back, or train "
                "again."
            )
        pairs = _read_pairs(text, self.path)
        rows = [Row(pair.key, "", None, 0) for pair in pairs]
        out = held_out(rows, self.path)
        self._split = {
            "train": [pair for pair, test in zip(pairs, out, strict=True) if not test],
            "test": [pair for pair, test in zip(pairs, out, strict=True) if test],
        }
        self._targets: dict[str, list[str]] = {}
        for pair in pairs:
            self._targets.setdefault(pair.key, []).append(" ".join(pair.target))
        train = self._split["train"]
        self.vocabulary = Vocabulary(
            (words for pair in train for words in (pair.source, pair.target)), size=vocab_size
        )
        self.vocab = self.vocabulary.symbols
        self.longest_target = max(len(pair.target) for pair in train)

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        options = {"vocab_size": self.most_tokens, "checksum": self.checksum}
        return {"name": "pairs", "path": self.path, **options}

    # --- pairs ---

    def pairs(self, batch_size: int, *, seed: int = 0, split: str = "train") -> PairStream:
        """Return the batches of an encoder-decoder; all of a split are in one epoch.

        A source ends with the end token, as in `encode`.
        """
        chosen = self._of(split)
        sources = [[*self.vocabulary.encode(pair.source), EOS] for pair in chosen]
        targets = [self.vocabulary.encode(pair.target) for pair in chosen]
        return PairStream(sources, targets, batch_size, seed=seed)

    def targets(self, split: str = "train") -> list[str]:
        """Return the targets of a split as words with spaces, in the order of `pairs`' rows."""
        return [" ".join(pair.target) for pair in self._of(split)]

    def references(self, split: str = "test") -> dict[str, list[str]]:
        """Return the distinct sources of a split with all their targets, words with spaces."""
        return {pair.key: self._targets[pair.key] for pair in self._of(split)}

    def target_tokens(self, target: str) -> Tensor:
        """Return the tokens of a target and the end token, `(T,)`."""
        return torch.tensor([*self.vocabulary.encode(split_words(target)), EOS])

    def _of(self, split: str) -> list[_Pair]:
        check_choice(split, ("train", "test"), "split")
        return self._split[split]

    # --- one sequence, for a decoder ---

    def sample(self, batch_size: int, *, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw pairs of a split as sequences."""
        chosen = self._of(split)
        drawn = torch.randint(len(chosen), (batch_size,), generator=generator)
        return collate([self._sequence(chosen[n].source, chosen[n].target) for n in drawn.tolist()])

    def encode(self, query: str) -> Tensor:
        """Return the tokens of a source and the end token; words not known are all the same.

        Raises:
            DataError: If there is no word in it.
        """
        words = split_words(query)
        if not words:
            raise DataError(f"query must hold at least one word; got {query!r}. Write a source.")
        return torch.tensor([*self.vocabulary.encode(words), EOS])

    def position_ids(self, query: str, *, start: int | None = None) -> Tensor:
        """Return ids 1, 2, ... for a source and a target as long as the longest in training."""
        begin = 1 if start is None else start
        check_range(begin, "start", low=1, integer=True)
        size = len(self.encode(query)) + self.longest_target + 1
        return torch.arange(begin, begin + size)

    def answer(self, query: str) -> str:
        """Return the first target that the file has for a source.

        Raises:
            UnsupportedError: If it has none.
        """
        known = self._targets.get(" ".join(split_words(query)))
        if known is None:
            raise UnsupportedError(
                f"{self.path} has no target for the source {query[:40]!r}. Ask the model for one."
            )
        return known[0]

    def check(self, query: str, text: str) -> bool | None:
        """Whether a text is one of the targets; `None` for a source that the file has not."""
        known = self._targets.get(" ".join(split_words(query)))
        return None if known is None else " ".join(split_words(text)) in known

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return produced tokens as words with spaces."""
        produced = [int(token) for token in tokens]
        produced = produced[: produced.index(EOS)] if EOS in produced else produced
        return " ".join(self.vocab[token] for token in produced if token >= UNKNOWN)

    def example(self, query: str, *, start: int | None = None) -> Example:
        """Return a source and its first target as one sequence."""
        example = self._sequence(split_words(query), self.answer(query).split())
        shift = 0 if start is None else start - 1
        return Example(example.tokens, example.position_ids + shift, example.loss_mask)

    def grid(self, **axes: Any) -> list[GridCell]:
        """Return one cell: the pairs that are not trained on."""
        if axes:
            raise ConfigError(
                f"the grid of pairs has no axes; got {', '.join(axes)}. Leave it out."
            )
        return [GridCell({"split": "test"}, self)]

    def _sequence(self, source: Sequence[str], target: Sequence[str]) -> Example:
        begin = self.vocabulary.encode(source)
        tokens = torch.tensor([*begin, EOS, *self.vocabulary.encode(target), EOS])
        places = torch.arange(len(tokens))
        return Example(tokens, places + 1, places > len(begin))


def _read_pairs(text: str, path: str) -> list[_Pair]:
    """Read lines of two texts.

    Raises:
        DataError: With the path, the line and the column.
    """
    pairs: list[_Pair] = []
    columns = 0
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        parts = line.split("\t")
        columns = columns or len(parts)
        if len(parts) < 2:
            raise DataError(
                f"{place}, column {len(line) + 1}: expected a tab and a target after the source; "
                f"got {line[:40]!r}. {_REMEDY}"
            )
        if len(parts) != columns:
            extra = len("\t".join(parts[: min(columns, len(parts))])) + 1
            raise DataError(
                f"{place}, column {extra}: expected {columns} columns as in the first line; got "
                f"{len(parts)}. Write tabs between columns only."
            )
        pair = _Pair(split_words(parts[0]), split_words(parts[1]))
        for name, words, column in (
            ("source", pair.source, 1),
            ("target", pair.target, len(parts[0]) + 2),
        ):
            if not words:
                raise DataError(
                    f"{place}, column {column}: expected a {name} of at least one word; it is "
                    "empty. Write it, or remove the line."
                )
        pairs.append(pair)
    if not pairs:
        raise DataError(f"{path} must hold one pair a line; it is empty. {_REMEDY}")
    return pairs
