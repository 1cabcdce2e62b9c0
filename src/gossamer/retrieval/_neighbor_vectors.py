"""One unit vector for each text: TF-IDF and a singular value decomposition, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_finite
from gossamer.errors import DataError
from gossamer.progress import progress

__all__ = ["Encoder", "encode"]

Encoder = Callable[[list[str]], Any]

_DIM = 128
_FEATURES = 100_000  # the most frequent ones; bounds the memory of the decomposition
_CHUNK = 1024  # texts for one call of the user's encoder
_FLOOR = 1e-12
# shorter than this, a unit row outside the kept directions is rounding
_ROUNDING = 1e-5


def encode(texts: list[str], encoder: str | Encoder, corpus: Sequence[str]) -> NDArray[np.float32]:
    """Return vectors of length 1, `(n, d)`; zeros for a text in which nothing is known.

    Args:
        texts: What to encode.
        encoder: `"tfidf"`, fitted on the corpus, or a function.
        corpus: Texts to fit on.

    Raises:
        DataError: If the function does not return one finite vector for each text, or TF-IDF finds
            no word.
    """
    if isinstance(encoder, str):
        return _unit(_tfidf(texts, corpus))
    parts: list[NDArray[np.float32]] = []
    with progress("encoding", len(texts), quiet=len(texts) <= _CHUNK) as bar:
        for begin in range(0, len(texts), _CHUNK):
            chunk = texts[begin : begin + _CHUNK]
            width = parts[0].shape[1] if parts else None
            parts.append(_unit(_checked(encoder(chunk), len(chunk), width)))
            bar.update(begin + len(chunk))
    return np.concatenate(parts)


def _checked(found: Any, count: int, width: int | None) -> NDArray[np.float32]:
    if hasattr(found, "detach"):  # a tensor; torch is not imported here
        found = found.detach().cpu().float().numpy()
    vectors: NDArray[np.float32] = np.asarray(found, dtype=np.float32)
    shape = vectors.shape
    if len(shape) != 2 or shape[0] != count or shape[1] != (width or shape[1]) or not shape[1]:
        raise DataError(
            f"encoder must return one vector for each of {count} texts, ({count}, "
            f"{width or 'd'}); got {shape}. Stack the vectors in the order of the texts."
        )
    check_finite(vectors, "vectors of the encoder")
    return vectors


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float32] = vectors / np.maximum(norms, np.float32(_FLOOR))
    return unit


def _tfidf(texts: list[str], corpus: Sequence[str]) -> NDArray[np.float32]:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.utils.extmath import randomized_svd
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    words = TfidfVectorizer(
        token_pattern=r"\w+",
        ngram_range=(1, 2),
        sublinear_tf=True,
        max_features=_FEATURES,
        dtype=np.float32,
    )
    try:
        fitted = words.fit_transform(corpus)
    except ValueError:  # an empty vocabulary
        raise DataError(
            "corpus must hold words for encoder='tfidf'; got none but punctuation. Check the "
            "texts, or give an encoder of your own."
        ) from None
    width = min(_DIM, *fitted.shape)
    with threadpool_limits(1):  # the sums of more threads differ in the last bits
        directions = randomized_svd(fitted, width, n_iter=5, random_state=0)[2]
        rows = words.transform(texts) @ directions.T
    vectors: NDArray[np.float32] = np.asarray(rows, dtype=np.float32)
    vectors[np.linalg.norm(vectors, axis=1) < _ROUNDING] = 0
    return vectors
