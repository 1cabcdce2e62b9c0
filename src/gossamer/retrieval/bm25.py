"""BM25, the lexical first stage that every dense one is compared with."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from gossamer.checks import check_range
from gossamer.errors import DataError
from gossamer.progress import progress
from gossamer.retrieval._tables import Run
from gossamer.retrieval._text import words_of
from gossamer.retrieval._top_k import top_k_columns

__all__ = ["BM25Index"]

_MANY = 200_000  # texts; fewer take seconds and need no progress
_BLOCK = 2**22  # dense scores at once


class BM25Index:
    r"""An index of words, searched by BM25.

    $$s(q, d) = \sum_{w \in q} \ln\!\Big(1 + \frac{n - n_w + 0.5}{n_w + 0.5}\Big)
      \frac{f_{w,d}}{f_{w,d} + k_1 (1 - b + b\, |d| / \overline{|d|})}$$

    n documents, $n_w$ with the word w, $f_{w,d}$ times w in d, |d| words of d. A word that a query
    holds twice counts twice. Words are runs of letters and digits in lower case, without those of
    the Snowball stop list for English; no stemming. Equal scores are cut as trec_eval orders them.
    Scores are kept as a sparse matrix, 12 bytes for each different word of each document; a query
    costs one sparse product.

    Args:
        corpus: Document id -> text, at least one.
        k1: How soon repeats of a word stop counting. Range: >= 0. Default 0.9.
        b: Share of the length normalisation. Range: 0..1. Default 0.4. Both defaults are those
            of Anserini; 1.5 and 0.75 are the other usual pair.

    Raises:
        ConfigError: If an option is out of its range.
        DataError: If the corpus is empty or a text is none.

    Example:
        >>> index = BM25Index({"d1": "red wings", "d2": "blue wings", "d3": "boats"})
        >>> list(index.search({"q": "blue wings?"}, 2)["q"])
        ['d2', 'd1']

    Source: Robertson and Zaragoza, *The Probabilistic Relevance Framework: BM25 and Beyond*,
        2009; idf and defaults: Lucene, Anserini.
    Deviations: without the constant factor k1 + 1, which changes no ranking, as in Lucene 8.
    """

    def __init__(self, corpus: Mapping[str, str], *, k1: float = 0.9, b: float = 0.4) -> None:
        check_range(k1, "k1", low=0.0)
        check_range(b, "b", low=0.0, high=1.0)
        _check_texts(corpus, "corpus")
        if not corpus:
            raise DataError("corpus must hold at least one document; it is empty. Add documents.")
        self.k1, self.b = k1, b
        # the later id first, so that ties by position are ties by id as trec_eval breaks them
        self.ids = sorted(corpus, key=str, reverse=True)
        self.vocabulary: dict[str, int] = {}
        counts, lengths = self._count(corpus)
        self._weights = _weigh(counts, lengths, k1, b)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.ids)

    def __repr__(self) -> str:
        return (
            f"BM25Index({len(self)} documents, {len(self.vocabulary)} words, "
            f"k1={self.k1}, b={self.b})"
        )

    def search(self, queries: Mapping[str, str], top_k: int) -> Run:
        """Return the best documents of each query; documents without a word of it are left out.

        Args:
            queries: Query id -> text.
            top_k: Most documents for a query. Range: >= 1.

        Raises:
            ConfigError: If `top_k` is out of its range.
            DataError: If a text is none.

        Example:
            >>> BM25Index({"d": "boats"}).search({"q": "a boats race", "p": "wings"}, 10)
            {'q': {'d': 0.151...}, 'p': {}}
        """
        check_range(top_k, "top_k", low=1, integer=True)
        _check_texts(queries, "queries")
        asked = _rows(
            [self._known_words(query, text) for query, text in queries.items()],
            len(self.vocabulary),
        )
        names, run = list(queries), {}
        step = max(1, _BLOCK // len(self))
        quiet = len(names) * len(self) < _MANY * 1000
        with progress("search", len(names), quiet=quiet) as bar:
            for start in range(0, len(names), step):
                scores = (asked[start : start + step] @ self._weights).toarray()
                best = top_k_columns(scores, min(top_k, len(self)))
                for name, row, columns in zip(names[start:], scores, best, strict=False):
                    run[name] = {self.ids[i]: float(row[i]) for i in columns if row[i] > 0}
                bar.update(min(start + step, len(names)))
        return run

    def _known_words(self, query: str, text: str) -> Counter[int]:
        words = words_of(_checked(text, f"queries[{query!r}]"))
        return Counter(self.vocabulary[word] for word in words if word in self.vocabulary)

    def _count(self, corpus: Mapping[str, str]) -> tuple[csr_matrix, np.ndarray[Any, Any]]:
        """Return how often each word is in each document, and the lengths."""
        quiet = len(corpus) < _MANY
        rows = []
        with progress("index", len(corpus), quiet=quiet) as bar:
            for done, name in enumerate(self.ids, start=1):
                words = words_of(_checked(corpus[name], f"corpus[{name!r}]"))
                rows.append(
                    Counter(self.vocabulary.setdefault(w, len(self.vocabulary)) for w in words)
                )
                if done % 4096 == 0:
                    bar.update(done)
        counts = _rows(rows, len(self.vocabulary))
        return counts, np.asarray(counts.sum(axis=1), dtype=np.float64).ravel()


def _rows(counters: list[Counter[int]], columns: int) -> csr_matrix:
    indices, values, starts = array("i"), array("f"), array("q", [0])
    for counter in counters:
        indices.extend(counter.keys())
        values.extend(counter.values())
        starts.append(len(indices))
    return csr_matrix(
        (np.array(values, np.float64), np.array(indices, np.int32), np.array(starts, np.int64)),
        shape=(len(counters), columns),
    )


def _weigh(counts: csr_matrix, lengths: np.ndarray[Any, Any], k1: float, b: float) -> csr_matrix:
    """Return the score of each word in each document, words x documents."""
    n = counts.shape[0]
    holding = np.bincount(counts.indices, minlength=counts.shape[1])
    idf = np.log1p((n - holding + 0.5) / (holding + 0.5))
    mean = lengths.mean() or math.inf  # a corpus without any word has no entry to weigh
    norm = np.repeat(k1 * (1.0 - b + b * lengths / mean), np.diff(counts.indptr))
    counts.data = idf[counts.indices] * counts.data / (counts.data + norm)
    return csr_matrix(counts.T)


def _checked(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise DataError(f"{name} must be a text; got {text!r}. Give '' for an empty one.")
    return text


def _check_texts(texts: object, name: str) -> None:
    if not isinstance(texts, Mapping):
        raise DataError(
            f"{name} must be a mapping from id to text; got {type(texts).__name__}. Give texts "
            'ids, such as {"d1": "red wings"}.'
        )
