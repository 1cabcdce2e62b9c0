"""What a retriever learns from: texts, the texts that answer them, and which belongs to which."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from gossamer.errors import DataError, ShapeError
from gossamer.retrieval.collections import Collection
from gossamer.retrieval.xmc import XmcData

__all__ = ["TrainingRows"]


@dataclass(frozen=True)
class TrainingRows:
    """Queries, documents and a sparse matrix of which is relevant; rows without any are left out.

    Args:
        texts: One for each row.
        label_texts: One for each column: documents, or the texts of labels.
        labels: Rows x columns, above 0 where relevant.
        row_numbers: Of the rows in the data set. Default 0, 1, ...
        num_empty: Rows that were left out.

    Raises:
        ShapeError: If there are not as many texts as rows or columns.
        DataError: If no row has a relevant column.

    Example:
        >>> rows = TrainingRows.of(Collection({"d": "a text"}, {"q": "a query"}, {"q": {"d": 1}}))
        >>> rows.texts, rows.label_texts, rows.labels.nnz
        (['a query'], ['a text'], 1)
    """

    texts: Sequence[str] = field(repr=False)
    label_texts: Sequence[str] = field(repr=False)
    labels: csr_matrix
    row_numbers: Sequence[int] = field(default=(), repr=False)
    num_empty: int = 0

    def __post_init__(self) -> None:
        for name, texts, size in (
            ("texts", self.texts, self.labels.shape[0]),
            ("label_texts", self.label_texts, self.labels.shape[1]),
        ):
            if len(texts) != size:
                raise ShapeError(
                    f"{name} must hold one text for each of the {size} "
                    f"{'rows' if name == 'texts' else 'columns'} of the labels; got {len(texts)}. "
                    "Read both from the same data set."
                )

    def checksum(self) -> int:
        """Return a number that tells these rows from others."""
        total = 0
        for texts in (self.texts, self.label_texts):
            for text in texts:
                total = zlib.crc32(text.encode("utf-8", "surrogatepass") + b"\0", total)
        for part in (self.labels.indptr, self.labels.indices):
            total = zlib.crc32(part.astype("<i8").tobytes(), total)
        return total

    @classmethod
    def of(cls, data: XmcData | Collection | TrainingRows) -> TrainingRows:
        """Take a collection or a multi-label data set, whatever a reader of this package returned.

        Args:
            data: What `read_beir`, `read_msmarco` or `read_xmc` gives, or rows already.

        Raises:
            DataError: If texts are missing, or no row has a relevant column.
        """
        if isinstance(data, TrainingRows):
            return data
        if isinstance(data, Collection):
            return _of_collection(*data)
        missing = "texts" if data.texts is None else "label_texts"
        if data.texts is None or data.label_texts is None:
            raise DataError(
                f"data must hold texts of rows and of labels; got no {missing}. Put raw/trn_X.txt, "
                "raw/tst_X.txt and raw/Y.txt beside the matrices, or fill in XmcData."
            )
        return _without_empty(data.texts, data.label_texts, data.labels)


def _of_collection(
    corpus: Mapping[str, str], queries: Mapping[str, str], qrels: Mapping[str, Mapping[str, int]]
) -> TrainingRows:
    place = {name: number for number, name in enumerate(corpus)}
    rows: list[int] = []
    columns: list[int] = []
    texts: list[str] = []
    for query, grades in qrels.items():
        found = [place[name] for name, grade in grades.items() if grade > 0 and name in place]
        rows += [len(texts)] * len(found)
        columns += found
        if query not in queries:
            raise DataError(
                f"judged queries must have texts; got none for {query!r}, where the queries have "
                f"ids like {next(iter(queries), None)!r}. Give queries and judgements that belong "
                "together."
            )
        texts.append(queries[query])
    values = np.ones(len(rows), dtype=np.float32)
    labels = csr_matrix((values, (rows, columns)), shape=(len(texts), len(corpus)))
    return _without_empty(texts, list(corpus.values()), labels)


def _without_empty(texts: Sequence[str], label_texts: Sequence[str], labels: Any) -> TrainingRows:
    matrix = csr_matrix(labels)
    matrix.data = (matrix.data > 0).astype(np.float32)
    matrix.eliminate_zeros()
    if len(texts) != matrix.shape[0]:
        return TrainingRows(texts, label_texts, matrix)  # says what does not fit
    kept = np.flatnonzero(np.diff(matrix.indptr))
    if not len(kept):
        raise DataError(
            "data must hold a row with a relevant document or label; got none. Check the split, "
            "and that ids of judgements are those of the corpus."
        )
    numbers = kept.tolist()
    return TrainingRows(
        [texts[i] for i in numbers],
        label_texts,
        matrix[kept],
        numbers,
        matrix.shape[0] - len(kept),
    )
