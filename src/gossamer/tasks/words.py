"""Texts as words, and words as numbers."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from gossamer.checks import check_range
from gossamer.errors import DataError

__all__ = ["UNKNOWN", "Vocabulary", "split_words"]

UNKNOWN = 2
_SPECIAL = ("_", "$", "<unk>")

# scripts that write no spaces: every character is a word
_SINGLE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# accents and vowel signs that stand as characters of their own; for `re` they are no letters
_MARKS = "".join(
    chr(code) for code in range(0x300, 0x1C00) if unicodedata.category(chr(code)) in ("Mc", "Mn")
)
_LETTER = rf"(?:[^\W{_SINGLE}]|[{_MARKS}])"
_WORD = re.compile(rf"[{_SINGLE}]|{_LETTER}+(?:['\u2019-]{_LETTER}+)*|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Split a text into words, signs, and single characters of Chinese and Japanese.

    Example:
        >>> split_words("It's a well-known caf\u00e9, isn't it?")
        ["It's", 'a', 'well-known', 'caf\u00e9', ',', "isn't", 'it', '?']

    Source: the library's own.
    Deviations: none
    """
    return _WORD.findall(text)


class Vocabulary:
    """Numbers for the words of a corpus: 0 padding, 1 start and end, 2 any unknown word.

    Words stand in the order of how often they come, equal ones by their characters. A word that
    comes once is unknown, so that a model meets the unknown word in training.

    Args:
        texts: Texts as lists of words.
        size: Most numbers, those three with them. Range: >= 4. Default 4000.

    Raises:
        DataError: If no word comes twice.

    Example:
        >>> vocabulary = Vocabulary([["a", "dog", "and", "a", "cat"], ["a", "dog"]])
        >>> vocabulary.symbols
        ('_', '$', '<unk>', 'a', 'dog')
        >>> vocabulary.encode(["a", "cat"])
        [3, 2]

    Source: the library's own.
    Deviations: none
    """

    def __init__(self, texts: Iterable[Sequence[str]], *, size: int = 4000) -> None:
        check_range(size, "vocab_size", low=len(_SPECIAL) + 1, integer=True)
        counts = Counter(word for text in texts for word in text)
        often = sorted((-count, word) for word, count in counts.items() if count > 1)
        if not often:
            raise DataError(
                "texts must hold a word that comes twice; got none, so that every word would be "
                "unknown. Give more texts."
            )
        words = [word for _, word in often[: size - len(_SPECIAL)]]
        self.symbols: tuple[str, ...] = (*_SPECIAL, *words)
        self._numbers = {word: number for number, word in enumerate(words, start=len(_SPECIAL))}

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the numbers of words."""
        return [self._numbers.get(word, UNKNOWN) for word in words]
