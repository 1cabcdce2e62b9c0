"""Mine real sentences near each target: nearest embeddings, then shared n-grams."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError
from gossamer.progress import progress
from gossamer.retrieval._neighbor_table import NeighborTable, fingerprint_of
from gossamer.retrieval._neighbor_vectors import Encoder, encode

__all__ = ["mine_neighbors"]

_ORDERS = {"bleu": 4, "bleu5": 5}
_ROWS = 512  # targets at once
_LONG = 10**12  # multiplications and comparisons; fewer take seconds and need no progress


def mine_neighbors(
    targets: Sequence[str],
    *,
    corpus: Sequence[str] | None = None,
    encoder: str | Encoder = "tfidf",
    num_neighbors: int = 5,
    num_retrieved: int = 100,
    rerank: str | None = "bleu",
    min_bleu: float = 0.2,
    keep_tokens: str | re.Pattern[str] | None = None,
    deduplicate: bool = True,
    held_out: Sequence[str] | None = None,
) -> NeighborTable:
    """Find for each target the sentences of a corpus that mean and say nearly the same.

    The `num_retrieved` nearest by cosine of the embeddings are sorted by their sentence BLEU
    against the target, and the best `num_neighbors` kept. A text that equals the target is never
    its neighbour; texts are equal if they differ in case, white space or Unicode form alone. BLEU
    compares what white space parts, as `sentence_bleu` does: give texts as the model sees them,
    languages without spaces with one between characters. Search is exact; its result depends
    neither on blocks nor on threads, and equal cosines go by place in the corpus.

    Args:
        targets: The training targets, one for each pair.
        corpus: Valid sentences of the same kind. Default: the targets.
        encoder: `"tfidf"`: words and pairs of words, weighed by rarity, in 128 dimensions by a
            singular value decomposition fitted on the corpus. Or a function of a list of texts
            that returns an array `(n, d)`, one fixed vector for a text; it is called with 1024 of
            them at most. Default `"tfidf"`.
        num_neighbors: Most neighbours of a target. Range: >= 1. Default 5.
        num_retrieved: Nearest by cosine that are looked at. Range: >= `num_neighbors`. Default 100.
        rerank: `"bleu"` or `"bleu5"`: sort these by BLEU of up to 4 or 5 words; `None` keeps the
            order of the cosines. Default `"bleu"`.
        min_bleu: Neighbours with a lower BLEU are left out, with `rerank=None` too. Range: 0 to 1.
            Default 0.2.
        keep_tokens: A regular expression. Target and neighbour must have the same set of matches:
            numbers, names, `not`. Default none.
        deduplicate: Equal texts of the corpus count once, at the first place; otherwise each can
            be a neighbour. Default true.
        held_out: Validation and test targets. Equal texts of the corpus are never neighbours, and
            a warning counts them. Default none.

    Returns:
        The table; its indices are places in `corpus`, as it was given.

    Raises:
        DataError: If targets or corpus are empty, a text is none or empty, or the encoder does not
            return one finite vector for each text.
        ConfigError: If an option is out of its range.

    Warns:
        UserWarning: If texts of the corpus are held out, or more than half of the targets have no
            neighbour.

    Example:
        >>> texts = ["the dog ran home", "the dog ran off", "rain fell on the hills"]
        >>> table = mine_neighbors(texts, num_neighbors=1, num_retrieved=2, min_bleu=0.3)
        >>> table.indices.tolist()
        [[1], [0], [-1]]

    Source: Lukasik et al., *Semantic Label Smoothing for Sequence to Sequence Problems*, EMNLP
        2020: neighbours by a sentence encoder, then by BLEU.
    Deviations: the paper's encoder, its pooling, its numbers of neighbours and the order of its
        BLEU are unconfirmed; here TF-IDF, 100, 5 and 4 words. Duplicates, held-out texts, the
        least BLEU and `keep_tokens` are not in the paper.
    """
    settings = _checked_settings(
        encoder, num_neighbors, num_retrieved, rerank, min_bleu, keep_tokens, deduplicate
    )
    asked = _checked_texts(targets, "targets")
    texts = asked if corpus is None else _checked_texts(corpus, "corpus")
    keys = [_normal(text) for text in texts]
    others = () if held_out is None or len(held_out) == 0 else _checked_texts(held_out, "held_out")
    secret = {_normal(text) for text in others}
    leaked = [row for row, key in enumerate(keys) if key in secret]
    if leaked:
        warnings.warn(
            f"{len(leaked)} of {len(keys)} texts of the corpus equal a held-out text, first "
            f"{texts[leaked[0]]!r} in row {leaked[0]}; they are left out. Take them out of the "
            "training targets too.",
            stacklevel=2,
        )
    settings["left_out"] = len(leaked)
    kept = _kept_rows(keys, secret, deduplicate)
    found = _Search(asked, texts, keys, kept, encoder, keep_tokens).best(settings)
    table = NeighborTable(asked, texts, *found, settings, fingerprint_of(asked, texts, settings))
    without = int((table.indices < 0).all(axis=1).sum())
    if without > len(table) / 2:
        warnings.warn(
            f"{without} of {len(table)} targets have no neighbour, so that smoothing does little. "
            "Give a larger corpus, a lower min_bleu, or texts whose words are parted by spaces.",
            stacklevel=2,
        )
    return table


class _Search:
    """Texts, vectors and n-grams of one search.

    Args:
        targets: The targets.
        corpus: All texts of the corpus.
        keys: Of the texts of the corpus; equal texts have equal keys.
        kept: Rows of the corpus that may be neighbours.
        encoder: As in `mine_neighbors`.
        keep_tokens: As there.
    """

    def __init__(
        self,
        targets: Sequence[str],
        corpus: Sequence[str],
        keys: Sequence[str],
        kept: Sequence[int],
        encoder: str | Encoder,
        keep_tokens: str | re.Pattern[str] | None,
    ) -> None:
        chosen = [corpus[row] for row in kept]
        self.texts = list(dict.fromkeys([*chosen, *targets]))
        numbers = {text: number for number, text in enumerate(self.texts)}
        self.vectors = encode(self.texts, encoder, chosen)
        known: NDArray[np.bool_] = np.asarray(self.vectors.any(axis=1))
        self.kept = np.array([row for row in kept if known[numbers[corpus[row]]]], dtype=np.int32)
        self.sources = np.array([numbers[corpus[row]] for row in self.kept], dtype=np.int64)
        self.targets = np.array([numbers[text] for text in targets], dtype=np.int64)
        self.known = known[self.targets]
        codes: dict[str, int] = {}
        self.groups = np.array(
            [codes.setdefault(keys[row], len(codes)) for row in self.kept], dtype=np.int64
        )
        self.own = np.array([codes.get(_normal(text), -1) for text in targets], dtype=np.int64)
        self.tokens = _token_sets(self.texts, keep_tokens)

    def best(self, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return indices, BLEU and cosines of the neighbours."""
        from gossamer.retrieval._bleu_rerank import GramIndex
        from gossamer.retrieval._neighbor_search import nearest

        most, width = settings["num_retrieved"], settings["num_neighbors"]
        grams = GramIndex(self.texts, _ORDERS.get(settings["rerank"], 4))
        corpus = self.vectors[self.sources]
        rows = len(self.targets)
        indices = np.full((rows, width), -1, dtype=np.int32)
        bleu, cosine = (np.zeros((rows, width), dtype=np.float32) for _ in range(2))
        work = rows * (len(corpus) * corpus.shape[1] + 10_000 * most)
        with progress("neighbours", rows, quiet=work < _LONG) as bar:
            for begin in range(0, rows, _ROWS):
                part = slice(begin, begin + _ROWS)
                asked = self.targets[part]
                places, cosines = nearest(
                    self.vectors[asked], corpus, self.own[part], self.groups, most
                )
                there = (places >= 0) & self.known[part, None]
                sources = np.where(there, self._at(places, self.sources), -1)
                scores = grams.scores(asked, sources)
                there &= scores >= settings["min_bleu"]
                there &= self.tokens[sources] == self.tokens[asked][:, None]
                key = -scores if settings["rerank"] else np.zeros(scores.shape)
                key[~there] = np.inf
                # stable: equal scores stay in the order of the cosines
                order = np.argsort(key, axis=1, kind="stable")[:, :width]
                shown = np.take_along_axis(there, order, axis=1)
                for out, values in (
                    (indices, self._at(places, self.kept)),
                    (bleu, scores),
                    (cosine, cosines),
                ):
                    picked = np.take_along_axis(values, order, axis=1)
                    out[part] = np.where(shown, picked, out[part])
                bar.update(min(begin + _ROWS, rows))
        return indices, bleu, cosine

    @staticmethod
    def _at(places: NDArray[np.int32], values: NDArray[Any]) -> NDArray[Any]:
        """Return the values at places, anything where there is no place."""
        return values[np.maximum(places, 0)] if len(values) else places


def _token_sets(texts: list[str], pattern: str | re.Pattern[str] | None) -> NDArray[np.int64]:
    """Return a number for the set of matches of each text: equal sets, equal numbers."""
    if pattern is None:
        return np.zeros(len(texts), dtype=np.int64)
    expression = re.compile(pattern)
    codes: dict[frozenset[str], int] = {}
    sets = [frozenset(match.group() for match in expression.finditer(text)) for text in texts]
    return np.array([codes.setdefault(found, len(codes)) for found in sets], dtype=np.int64)


def _kept_rows(keys: Sequence[str], secret: set[str], deduplicate: bool) -> list[int]:
    """Return the rows of the corpus that may be neighbours.

    Raises:
        DataError: If there is none.
    """
    seen = set(secret)
    kept = []
    for row, key in enumerate(keys):
        if key not in seen:
            kept.append(row)
            if deduplicate:
                seen.add(key)
    if not kept:
        raise DataError(
            "corpus must hold a text that is not held out; got none. Give sentences of the "
            "training side."
        )
    return kept


def _normal(text: str) -> str:
    """Return what equal texts share: one Unicode form, no case, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _checked_texts(texts: Sequence[str], name: str) -> tuple[str, ...]:
    if isinstance(texts, str):
        raise DataError(f"{name} must be a list of texts; got one text. Write [{name}].")
    found = tuple(texts)
    if not found:
        raise DataError(f"{name} must hold at least one text; got none. Give some sentences.")
    for row, text in enumerate(found):
        if not isinstance(text, str):
            raise DataError(f"{name} must be texts; got {text!r} in row {row}. Decode or join it.")
    empty = [row for row, text in enumerate(found) if not text.strip()]
    if empty:
        rows = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise DataError(
            f"{name} must not be empty texts; got {len(empty)} of them, row {rows}. Remove these "
            "pairs."
        )
    return found


def _checked_settings(
    encoder: str | Encoder,
    num_neighbors: int,
    num_retrieved: int,
    rerank: str | None,
    min_bleu: float,
    keep_tokens: str | re.Pattern[str] | None,
    deduplicate: bool,
) -> dict[str, Any]:
    """Return the settings as plain values."""
    if not callable(encoder):
        check_choice(encoder, ["tfidf"], "encoder")
    check_range(num_neighbors, "num_neighbors", low=1, integer=True)
    check_range(num_retrieved, "num_retrieved", low=num_neighbors, integer=True)
    if rerank is not None:
        check_choice(rerank, _ORDERS, "rerank")
    check_range(min_bleu, "min_bleu", low=0.0, high=1.0)
    pattern = None
    if keep_tokens is not None:
        try:
            compiled = re.compile(keep_tokens)
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"keep_tokens must be a regular expression for texts; got {keep_tokens!r} "
                f"({error}). Mend it."
            ) from None
        pattern = f"{compiled.pattern!r}, flags {int(compiled.flags)}"
    return {
        "encoder": encoder if isinstance(encoder, str) else _name_of(encoder),
        "num_neighbors": num_neighbors,
        "num_retrieved": num_retrieved,
        "rerank": rerank,
        "min_bleu": min_bleu,
        "keep_tokens": pattern,
        "deduplicate": bool(deduplicate),
    }


def _name_of(encoder: Encoder) -> str:
    return str(getattr(encoder, "__qualname__", type(encoder).__qualname__))
