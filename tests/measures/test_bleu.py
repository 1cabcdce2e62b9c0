"""BLEU against hand values, the definition in exact fractions, and figures of sacreBLEU."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest

from gossamer.errors import ConfigError, DataError
from gossamer.measures import corpus_bleu, sentence_bleu

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "big", "red"]


def sentences(count: int, seed: int) -> list[str]:
    """Return made-up sentences of 1 to 14 words, the same in every version of Python."""
    state, made = seed, []
    for _ in range(count):
        words = []
        for _ in range(15):
            state = (1103515245 * state + 12345) % 2**31
            words.append(WORDS[(state >> 16) % len(WORDS)])
        made.append(" ".join(words[: 1 + (state >> 20) % 14]))
    return made


def corpus() -> tuple[list[str], list[list[str]]]:
    """Return 200 sentences with one to three references, partly alike."""
    hypotheses, others = sentences(200, 1), [sentences(200, seed) for seed in (2, 3)]
    references = []
    for row, text in enumerate(hypotheses):
        words = text.split()
        own = " ".join([*words[: len(words) // 2], "red", *words[len(words) // 2 + row % 2 :]])
        references.append([own, *(other[row] for other in others[: row % 3])])
    return hypotheses, references


def naive(pairs: list[tuple[str, list[str]]], max_order: int) -> tuple[list[Any], list[int]]:
    """Return matches over n-grams of each order, and both lengths, by counting in lists."""
    sums = [[0, 0] for _ in range(max_order)]
    lengths = [0, 0]
    for text, references in pairs:
        words, others = text.split(), [reference.split() for reference in references]
        lengths[0] += len(words)
        lengths[1] += sorted((abs(len(o) - len(words)), len(o)) for o in others)[0][1]
        for n in range(1, max_order + 1):
            own, *rest = (
                [tuple(w[i : i + n]) for i in range(len(w) - n + 1)] for w in (words, *others)
            )
            sums[n - 1][0] += sum(
                min(own.count(g), max(r.count(g) for r in rest)) for g in set(own)
            )
            sums[n - 1][1] += len(own)
    return sums, lengths


def combined(precisions: list[Fraction], lengths: list[int]) -> float:
    brevity = 1.0 if lengths[0] >= lengths[1] else math.exp(1 - lengths[1] / lengths[0])
    return brevity * float(math.prod(precisions)) ** (1 / len(precisions))


# --- reference values ---


def test_hand_values() -> None:
    assert sentence_bleu("the cat sat", "the cat sat down") == pytest.approx(math.exp(-1 / 3))
    assert sentence_bleu("the cat sat", "the cat sat down") == pytest.approx(0.716531, abs=1e-6)
    # 3 of 4 words, then (1+1)/(3+1), (0+1)/(2+1), (0+1)/(1+1)
    assert sentence_bleu("a b x c", "a b y c") == pytest.approx((3 / 4 * 2 / 4 / 3 / 2) ** 0.25)
    # repeated words count as often as the reference holds them: 2 of 7
    assert sentence_bleu("the " * 7, "the cat the mat", max_order=1) == pytest.approx(2 / 7)


@pytest.mark.parametrize("text", ["a", "a b", "the cat sat down again", "a a a a a a"])
@pytest.mark.parametrize("max_order", [1, 4, 5])
def test_identical_texts_have_one(text: str, max_order: int) -> None:
    assert sentence_bleu(text, text, max_order=max_order) == 1.0
    if len(text.split()) >= max_order:
        assert corpus_bleu([text], [text], max_order=max_order) == pytest.approx(100.0)


def test_texts_without_a_common_word_have_zero() -> None:
    assert sentence_bleu("a b c d e", "v w x y z") == 0.0
    assert sentence_bleu("", "v w") == 0.0
    assert corpus_bleu(["a b c d e", ""], ["v w x y z", "a"]) == 0.0


@pytest.mark.parametrize("max_order", [1, 2, 4, 5])
def test_sentence_equals_the_definition(max_order: int) -> None:
    for text, references in zip(*corpus(), strict=True):
        sums, lengths = naive([(text, references)], max_order)
        smooth = [Fraction(m + (n > 0), t + (n > 0)) for n, (m, t) in enumerate(sums)]
        expected = combined(smooth, lengths)
        found = sentence_bleu(text, references, max_order=max_order)
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("max_order", [1, 2, 4, 5])
def test_corpus_equals_the_definition(max_order: int) -> None:
    hypotheses, references = corpus()
    sums, lengths = naive(list(zip(hypotheses, references, strict=True)), max_order)
    expected = 100 * combined([Fraction(m, t) for m, t in sums], lengths)
    assert corpus_bleu(hypotheses, references, max_order=max_order) == pytest.approx(expected)


def test_orders_without_a_match_count_half_quarter() -> None:
    # 2 of 4 words, then none of 3, 2, 1
    expected = 100 * (2 / 4 * (1 / 2) / 3 * (1 / 4) / 2 * (1 / 8) / 1) ** 0.25
    assert corpus_bleu(["a x b y"], ["a v b w"]) == pytest.approx(expected)
    # an order that no sentence is long enough for
    assert corpus_bleu(["a b c"], ["a b c"]) == 0.0


# values of sacreBLEU 2.6.0: BLEU(tokenize="none", max_ngram_order=N).corpus_score, and the mean of
# sentence_score with smooth_method="add-k", smooth_value=1, effective_order=True
SACREBLEU = {4: (70.12064922062817, 0.6529713910189117), 5: (61.92433046292662, 0.6091465387538267)}


@pytest.mark.parametrize("max_order", [4, 5])
def test_figures_of_sacrebleu(max_order: int) -> None:
    hypotheses, references = corpus()
    expected = SACREBLEU[max_order]
    assert corpus_bleu(hypotheses, references, max_order=max_order) == pytest.approx(expected[0])
    pairs = zip(hypotheses, references, strict=True)
    single = [sentence_bleu(h, r, max_order=max_order) for h, r in pairs]
    assert sum(single) / len(single) == pytest.approx(expected[1])


@pytest.mark.skipif(
    importlib.util.find_spec("sacrebleu") is None, reason="sacrebleu is not installed"
)
def test_equal_to_sacrebleu_where_it_is_installed() -> None:
    from sacrebleu.metrics import BLEU

    hypotheses, references = corpus()
    widest = max(map(len, references))
    streams = list(zip(*(r + [r[0]] * (widest - len(r)) for r in references), strict=True))
    theirs = BLEU(tokenize="none").corpus_score(hypotheses, [list(s) for s in streams]).score
    assert corpus_bleu(hypotheses, references) == pytest.approx(theirs, abs=1e-9)


# --- limits and invariances ---


def test_order_and_repetition_of_references_change_nothing() -> None:
    hypotheses, references = corpus()
    turned = [[*r[::-1], r[0]] for r in references]
    assert corpus_bleu(hypotheses, turned) == corpus_bleu(hypotheses, references)
    assert corpus_bleu(hypotheses[::-1], references[::-1]) == corpus_bleu(hypotheses, references)


def test_one_reference_may_be_a_text() -> None:
    hypotheses, references = corpus()
    first = [r[0] for r in references]
    assert corpus_bleu(hypotheses, first) == corpus_bleu(hypotheses, [[r] for r in first])
    assert sentence_bleu("a b", "a c") == sentence_bleu(" a  b\n", ["a c"])


def test_of_two_lengths_that_are_equally_near_the_shorter_counts() -> None:
    # lengths 3 and 5 around 4: no penalty with 3
    assert sentence_bleu("a b c d", ["a b c d e", "a b c"], max_order=1) == 1.0


def test_a_reference_more_never_lowers_matches() -> None:
    for text, references in zip(*corpus(), strict=True):
        same_length = [*references, " ".join(["tree"] * len(text.split()))]
        assert sentence_bleu(text, same_length) >= sentence_bleu(text, references) - 1e-12


def test_loads_no_torch() -> None:
    code = (
        "import sys; from gossamer.measures import corpus_bleu; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- bad input ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: corpus_bleu([], []), "hypotheses must hold at least one text"),
        (lambda: corpus_bleu(["a"], ["a", "b"]), r"one entry for each of 1 hypotheses; got 2.*zip"),
        (lambda: corpus_bleu("a", ["a"]), "hypotheses must be a list of texts"),
        (lambda: corpus_bleu(["a"], "a"), "references must be a list of texts"),
        (
            lambda: corpus_bleu(["a", "b"], [["a"], []]),
            "references of row 1 must hold",
        ),
        (
            lambda: corpus_bleu(["a", None], ["a", "b"]),
            "hypothesis of row 1 must be text",
        ),
        (lambda: corpus_bleu(["a"], [[["a"]]]), "references of row 0 must be text.*join"),
        (lambda: sentence_bleu("a", []), "references must hold at least one text"),
        (lambda: sentence_bleu(["a", "b"], "a b"), "hypothesis must be text.*Join tokens"),
    ],
)
def test_bad_data(call: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


@pytest.mark.parametrize("max_order", [0, 2.5, True])
def test_bad_order(max_order: Any) -> None:
    with pytest.raises(ConfigError, match="max_order must be"):
        sentence_bleu("a", "a", max_order=max_order)
    with pytest.raises(ConfigError, match="max_order must be"):
        corpus_bleu(["a"], ["a"], max_order=max_order)
