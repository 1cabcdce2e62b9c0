"""BLEU of one sentence and of a corpus; knows the standard library only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from gossamer.checks import check_range
from gossamer.errors import DataError

__all__ = ["SIGNATURE", "corpus_bleu", "sentence_bleu"]

# how sacreBLEU names the settings of `corpus_bleu`; print it beside every figure
SIGNATURE = "case:mixed|eff:no|tok:none|smooth:exp"

Grams = Counter[tuple[str, ...]]


def sentence_bleu(hypothesis: str, references: str | Sequence[str], *, max_order: int = 4) -> float:
    r"""Return the BLEU of one sentence, from 0 to 1, with add-one smoothing above single words.

    $$\mathrm{BLEU} = \min\left(1, e^{1 - r/h}\right)
      \left(\frac{m_1}{h} \prod_{n=2}^{N} \frac{m_n + 1}{t_n + 1}\right)^{1/N}$$

    $t_n$ counts the n-grams of the hypothesis, $m_n$ those that some reference holds at least as
    often, h the words of the hypothesis, r those of the reference whose length is nearest, the
    shorter of two. Texts are split at white space, nothing else is done to them: lower their case
    and part the punctuation as your model sees them. Without a common word it is 0.

    Args:
        hypothesis: A sentence. An empty one has 0.
        references: One sentence or several.
        max_order: N, the longest n-gram. Unit: words. Range: >= 1. Default 4.

    Raises:
        DataError: If there is no reference, or something is no text.
        ConfigError: If `max_order` is out of its range.

    Example:
        >>> round(sentence_bleu("the cat sat", "the cat sat down"), 6)
        0.716531

    Source: Papineni et al., *BLEU*, ACL 2002; smoothing of Lin and Och, *ORANGE*, COLING 2004;
        equal to sacreBLEU's sentence score with `smooth_method="add-k"`, `smooth_value=1` and
        `tokenize="none"`, over 100.
    Deviations: none
    """
    check_range(max_order, "max_order", low=1, integer=True)
    matches, totals, length, nearest = _statistics(hypothesis, references, max_order, "")
    if matches[0] == 0:
        return 0.0
    pairs = zip(matches, totals, strict=True)
    smooth = [(m + (n > 0)) / (t + (n > 0)) for n, (m, t) in enumerate(pairs)]
    return _mean(smooth, length, nearest)


def corpus_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    max_order: int = 4,
) -> float:
    r"""Return the BLEU of a corpus in points, from 0 to 100, as sacreBLEU computes it.

    Matches, n-grams and lengths of all sentences are summed, then combined as in
    `sentence_bleu`. An n-gram order without any match counts as 1/2, 1/4, ... of one match. Texts
    are split at white space. Say with each figure `gossamer.measures.bleu.SIGNATURE`, the settings
    in the words of sacreBLEU.

    Args:
        hypotheses: Sentences.
        references: For each hypothesis a sentence, or a list of one or more. The streams of
            sacreBLEU (first references of all, second references of all, ...) become this by
            `list(zip(*streams))`.
        max_order: The longest n-gram. Unit: words. Range: >= 1. Default 4.

    Raises:
        DataError: If there is no hypothesis, numbers differ, an entry has no reference, or
            something is no text; the message names the row.
        ConfigError: If `max_order` is out of its range.

    Example:
        >>> both = [["the cat sat", "a cat sat down"], ["it was very cold today"]]
        >>> round(corpus_bleu(["the cat sat", "it was cold today"], both), 2)
        52.38

    Source: Papineni et al., *BLEU*, ACL 2002; settings of sacreBLEU 2: smoothing `exp`, no
        effective order, `tokenize="none"` (Post, WMT 2018).
    Deviations: none
    """
    check_range(max_order, "max_order", low=1, integer=True)
    _check_rows(hypotheses, references)
    matches, totals = [0] * max_order, [0] * max_order
    length = nearest = 0
    for row, (hypothesis, own) in enumerate(zip(hypotheses, references, strict=True)):
        here = _statistics(hypothesis, own, max_order, f" of row {row}")
        matches = [a + b for a, b in zip(matches, here[0], strict=True)]
        totals = [a + b for a, b in zip(totals, here[1], strict=True)]
        length, nearest = length + here[2], nearest + here[3]
    if matches[0] == 0 or 0 in totals:
        return 0.0
    share, precisions = 1.0, []
    for m, t in zip(matches, totals, strict=True):
        share = share if m else share / 2
        precisions.append((m or share) / t)
    return 100 * _mean(precisions, length, nearest)


def _mean(precisions: Sequence[float], length: int, nearest: int) -> float:
    """Return the geometric mean with the penalty for short hypotheses."""
    brevity = min(1.0, math.exp(1 - nearest / length))
    return brevity * math.exp(sum(map(math.log, precisions)) / len(precisions))


def _statistics(
    hypothesis: str, references: str | Sequence[str], max_order: int, where: str
) -> tuple[list[int], list[int], int, int]:
    """Return matches and n-grams of each order, the length, and the nearest reference length."""
    texts = [references] if isinstance(references, str) else list(references)
    if not texts:
        raise DataError(f"references{where} must hold at least one text; got none. Add one.")
    for name, text in [("hypothesis", hypothesis), *(("references", text) for text in texts)]:
        if not isinstance(text, str):
            raise DataError(
                f"{name}{where} must be text; got {text!r}. Join tokens by spaces: ' '.join(...)."
            )
    words, others = hypothesis.split(), [text.split() for text in texts]
    own = _grams(words, max_order)
    known = _grams(others[0], max_order)
    for other in others[1:]:
        known |= _grams(other, max_order)  # the largest count of each
    matches = [0] * max_order
    for gram, count in own.items():
        if gram in known:
            matches[len(gram) - 1] += min(count, known[gram])
    length = len(words)
    totals = [max(0, length - n) for n in range(max_order)]
    nearest = min(map(len, others), key=lambda size: (abs(size - length), size))
    return matches, totals, length, nearest


def _grams(words: Sequence[str], max_order: int) -> Grams:
    """Return how often a sentence holds each n-gram."""
    shifted = [words[start:] for start in range(max_order)]
    return Counter(
        chain.from_iterable(zip(*shifted[:n], strict=False) for n in range(1, max_order + 1))
    )


def _check_rows(hypotheses: Sequence[str], references: Sequence[object]) -> None:
    for name, value in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(value, str):
            raise DataError(f"{name} must be a list of texts; got one text. Write [{name}].")
    if len(hypotheses) == 0:
        raise DataError("hypotheses must hold at least one text; got none. Add some.")
    if len(references) != len(hypotheses):
        raise DataError(
            f"references must hold one entry for each of {len(hypotheses)} hypotheses; got "
            f"{len(references)}. Streams of sacreBLEU become that by list(zip(*streams))."
        )
