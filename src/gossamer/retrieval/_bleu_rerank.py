"""Sentence BLEU of many pairs of one list of texts, compiled; equal to `sentence_bleu`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.attention._compiled import compiled

__all__ = ["GramIndex"]


class GramIndex:
    """The n-grams of texts as sorted numbers, without collisions.

    Args:
        texts: Split at white space.
        max_order: The longest n-gram.
    """

    def __init__(self, texts: Sequence[str], max_order: int) -> None:
        words: dict[str, int] = {}
        flat: list[int] = []
        lengths = np.empty(len(texts), dtype=np.int64)
        for row, text in enumerate(texts):
            tokens = text.split()
            lengths[row] = len(tokens)
            flat.extend([words.setdefault(token, len(words)) for token in tokens])
        tokens_of_all = np.array(flat, dtype=np.int64)
        sentence = np.repeat(np.arange(len(texts)), lengths)
        ends = np.cumsum(lengths)[sentence]  # where the sentence of each token ends
        grams, starts, begin = [], [], 0
        numbers, places = tokens_of_all, np.arange(len(tokens_of_all))
        for n in range(1, max_order + 1):
            if n > 1:
                long_enough = places + n <= ends[places]
                numbers, places = numbers[long_enough], places[long_enough]
                # an n-gram is one of n - 1 words and a word: a new number for each such pair
                pairs = numbers * len(words) + tokens_of_all[places + n - 1]
                numbers = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
            rows = sentence[places]
            grams.append(numbers[np.lexsort((numbers, rows))])
            counts = np.bincount(rows, minlength=len(texts))
            starts.append(begin + np.concatenate([[0], np.cumsum(counts)]))
            begin += len(numbers)
        self._grams = np.concatenate(grams)
        self._starts = np.stack(starts).astype(np.int64)

    def scores(
        self, references: NDArray[np.int64], hypotheses: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the BLEU of each hypothesis against the reference of its row.

        Args:
            references: Numbers of texts, `(n,)`.
            hypotheses: Numbers of texts, `(n, k)`; -1 for none, which has -1.
        """
        out = np.full(hypotheses.shape, -1.0)
        _score(references, hypotheses, self._grams, self._starts, out)
        return out


@compiled
def _score(references: Any, hypotheses: Any, grams: Any, starts: Any, out: Any) -> None:
    orders = starts.shape[0]
    for row in range(hypotheses.shape[0]):
        reference = references[row]
        wanted = starts[0, reference + 1] - starts[0, reference]
        for column in range(hypotheses.shape[1]):
            hypothesis = hypotheses[row, column]
            if hypothesis < 0:
                continue
            total = 0.0
            for n in range(orders):
                i, end = starts[n, hypothesis], starts[n, hypothesis + 1]
                j, stop = starts[n, reference], starts[n, reference + 1]
                count, matches = end - i, 0
                while i < end and j < stop:  # the common part of two sorted lists
                    if grams[i] == grams[j]:
                        matches += 1
                        i += 1
                        j += 1
                    elif grams[i] < grams[j]:
                        i += 1
                    else:
                        j += 1
                if n == 0 and matches == 0:
                    total = -math.inf
                    break
                smooth = 1 if n > 0 else 0
                total += math.log((matches + smooth) / (count + smooth))
            length = starts[0, hypothesis + 1] - starts[0, hypothesis]
            if total == -math.inf:
                out[row, column] = 0.0
            else:
                brevity = min(1.0, math.exp(1 - wanted / length))
                out[row, column] = brevity * math.exp(total / orders)
