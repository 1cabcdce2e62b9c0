"""Index hints: the format, equal significance, random starts, bad input."""

from __future__ import annotations

import string

import pytest
import torch

from gossamer.errors import ConfigError, DataError
from gossamer.tasks import AdditionTask, MultiAdditionTask, add_index_hints, collate

TASK = AdditionTask((1, 5))
HINTS = string.ascii_lowercase


def hinted(query: str, **options: object) -> tuple[str, torch.Tensor]:
    """Return the longer sequence as text, and its loss mask."""
    options = {"first_hint": TASK.vocab_size, "num_hints": len(HINTS), **options}
    example = add_index_hints(TASK.example(query), **options)
    vocab = (*TASK.vocab, *HINTS)
    assert example.position_ids.tolist() == list(range(1, len(example.tokens) + 1))
    return "".join(vocab[token] for token in example.tokens), example.loss_mask


# --- reference values ---


def test_the_format() -> None:
    text, mask = hinted("653+49")
    assert text == "$c6b5a3+c0b4a9=a2b0c7d0$"
    assert mask.tolist() == [False] * 15 + [True] * 9
    assert hinted("5+7")[0] == "$a5+a7=a2b1$"


@pytest.mark.parametrize("start", [1, 4])
def test_only_differences_of_ids_matter(start: int) -> None:
    example = TASK.example("653+49", start=start)
    tokens = add_index_hints(example, first_hint=14, num_hints=26).tokens
    assert torch.equal(
        tokens, add_index_hints(TASK.example("653+49"), first_hint=14, num_hints=26).tokens
    )


def test_equal_significance_has_equal_hints(generator: torch.Generator) -> None:
    starts = set()
    for _ in range(120):
        text, _ = hinted("12345+678", generator=generator)
        first, second, total = text.strip("$").replace("=", "+").split("+")
        units = first[-2]
        starts.add(units)
        for number in (first, second, total[::-1]):
            hints = sorted(character for character in number if character in HINTS)
            begin = HINTS.index(units)
            assert hints == list(HINTS[begin : begin + len(hints)])
        # without the hints the sequence is the plain one
        assert "".join(c for c in text if c not in HINTS) == TASK.symbols(
            TASK.example("12345+678").tokens
        )
    # six digits of the answer leave 21 starts for 26 hints
    assert starts == set(HINTS[:21])


def test_a_batch_of_hinted_examples() -> None:
    examples = [
        add_index_hints(TASK.example(query), first_hint=14, num_hints=6)
        for query in ("1+2", "99+1")
    ]
    assert collate(examples).tokens.shape == (2, 18)


# --- bad input ---


def test_bad_input() -> None:
    with pytest.raises(DataError, match="at least the digits of the longest number, 4; got 3"):
        hinted("999+1", num_hints=3)
    with pytest.raises(DataError, match="below first_hint = 13; got 13"):
        hinted("999+1", first_hint=13)
    with pytest.raises(ConfigError, match="num_hints"):
        hinted("9+1", num_hints=0)
    several = MultiAdditionTask().example("1+2+3")
    with pytest.raises(DataError, match="one level"):
        add_index_hints(several, first_hint=20, num_hints=9)
