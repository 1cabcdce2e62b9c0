"""The layout of a prompt with many documents: masks, positions, cutting, padding."""

from __future__ import annotations

import warnings

import pytest
import torch

from gossamer.attention import BlockLayout
from gossamer.errors import ConfigError, DataError, ShapeError

from ..conftest import DATA
from .block_reference import REFERENCE, place

LENGTHS = REFERENCE["lengths"].tolist()


class Letters:
    """A tokenizer whose tokens are letters; padding is 7."""

    pad_token_id = 7

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        tokens = [ord(letter) for letter in text]
        return {"input_ids": [1, *tokens, 2] if add_special_tokens else tokens}


# --- reference values ---


def test_reference_file_says_where_it_is_from() -> None:
    assert "CC0" in (DATA / "block-attention" / "README.md").read_text()


@pytest.mark.parametrize("pad_multiple", [1, 4, 16])
def test_mask_and_positions_are_those_of_the_reference(pad_multiple: int) -> None:
    layout = BlockLayout(LENGTHS, pad_multiple=pad_multiple)
    real = layout.real()
    mask = layout.mask()
    assert torch.equal(mask[real][:, real], torch.from_numpy(REFERENCE["mask"]))
    assert int(mask.sum()) == layout.num_pairs == int(REFERENCE["pairs"])  # none with padding
    ids = layout.position_ids(8192)
    assert ids[real].tolist() == REFERENCE["position_ids"].tolist()
    assert ids[~real].eq(0).all()


def test_a_small_mask_by_hand() -> None:
    layout = BlockLayout([2, 2, 2, 2], pad_multiple=1)
    assert layout.mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize("lengths", [[6], [3, 4]])
def test_without_documents_it_is_the_causal_triangle(lengths: list[int]) -> None:
    layout = BlockLayout(lengths, pad_multiple=1)
    size = sum(lengths)
    assert torch.equal(layout.mask(), torch.ones(size, size, dtype=torch.bool).tril())
    assert layout.num_pairs == size * (size + 1) // 2
    assert layout.num_documents == 0


@pytest.mark.parametrize(("documents", "ratio"), [(10, 2.66), (20, 4.65), (50, 10.6), (100, 20.6)])
def test_pairs_of_equal_blocks_follow_the_formula(documents: int, ratio: float) -> None:
    blocks, length = documents + 2, 160
    layout = BlockLayout([length] * blocks)
    pairs = blocks * length * (length + 1) // 2 + (2 * blocks - 3) * length**2
    assert layout.num_pairs == pairs
    full = layout.num_tokens * (layout.num_tokens + 1) / 2
    assert full / pairs == pytest.approx(ratio, rel=5e-3)


def test_padding_is_on_the_left_of_each_block() -> None:
    layout = BlockLayout([3, 1, 5], pad_multiple=4)
    assert layout.block_ids().tolist() == [-1, 0, 0, 0, -1, -1, -1, 1, -1, -1, -1, 2, 2, 2, 2, 2]
    assert layout.num_tokens == 16
    assert layout.report() == {
        "documents": 1, "tokens": 9, "padding": 7, "documents_cut": 0, "tokens_cut": 0,
        "pairs": 6 + (1 + 3) + (15 + 5 * 4),
    }  # fmt: skip
    assert repr(layout) == "BlockLayout([3, 1, 5], pad_multiple=4)"
    assert (
        repr(BlockLayout([1] * 9)) == "BlockLayout([1, 1, 1, 1, 1, 1, 1, 1, ...], pad_multiple=16)"
    )


def test_segments_are_tokenised_each_on_its_own() -> None:
    made = BlockLayout.from_segments(Letters(), "abc", ["d", "efg"], "h:[", pad_multiple=2)
    assert made.lengths == (3, 1, 3, 3)
    assert made.input_ids is not None
    expected = [7, *b"abc", 7, *b"d", 7, *b"efg", 7, *b"h:["]
    assert made.input_ids.tolist() == expected
    assert made.signals == (1, 2)
    assert torch.equal(made.real(), made.input_ids != 7)


def test_signals_are_found_by_their_last_place() -> None:
    signals = [ord(":"), ord("[")]
    made = BlockLayout.from_segments(Letters(), "a", ["b"], "x:y:[3", signal_ids=signals)
    assert made.signals == (3, 4)
    assert BlockLayout([1, 1, 6], signals=(-3, -2)).signals == (3, 4)
    assert BlockLayout([1, 1, 1]).signals == (0,)


def test_long_documents_are_cut_and_the_count_is_told() -> None:
    with pytest.warns(UserWarning, match="2 of 3 documents were longer than max_block_length = 4"):
        layout = BlockLayout([4, 6, 4, 9, 2], max_block_length=4)
    assert layout.lengths == (4, 4, 4, 4, 2)
    assert layout.cut == (0, 2, 0, 5, 0)
    assert layout.report()["documents_cut"] == 2
    assert layout.report()["tokens_cut"] == 7
    with pytest.warns(UserWarning, match="lost 2 tokens"):
        made = BlockLayout.from_segments(
            Letters(), "ab", ["cdef"], "g", max_block_length=2, pad_multiple=1
        )
    assert made.input_ids is not None
    assert made.input_ids.tolist() == list(b"abcdg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BlockLayout([4, 4, 4], max_block_length=4)


def test_random_places_match_the_mask_function() -> None:
    layout = BlockLayout([3, 2, 5, 4], pad_multiple=4)
    sees, mask = layout.mask_mod(), layout.mask()
    zero = torch.tensor(0)
    for i in range(0, layout.num_tokens, 3):
        for j in range(0, layout.num_tokens, 2):
            assert sees(zero, zero, torch.tensor(i), torch.tensor(j)) == mask[i, j]


def test_place_fills_padding_with_nan() -> None:
    layout = BlockLayout(LENGTHS)
    x = place(torch.ones(1, 2, 31, 8), layout)
    assert torch.equal(x.isnan().any(-1)[0, 0], ~layout.real())


# --- bad input ---


def test_blocks_that_are_empty_or_none() -> None:
    with pytest.raises(DataError, match=r"got none\. Give a prompt"):
        BlockLayout([])
    with pytest.raises(DataError, match=r"at least 1 token.*got 0 for block 2 of 4"):
        BlockLayout([3, 2, 0, 4])
    with pytest.raises(DataError, match="got 0 for block 1 of 3"):
        BlockLayout.from_segments(Letters(), "a", [""], "b")
    with pytest.raises(ConfigError, match="pad_multiple must be >= 1"):
        BlockLayout([3], pad_multiple=0)
    with pytest.raises(ConfigError, match="max_block_length must be >= 1"):
        BlockLayout([3], max_block_length=0)


def test_only_documents_are_cut() -> None:
    with pytest.raises(DataError, match=r"instruction must have at most max_block_length = 4.*5"):
        BlockLayout([5, 1, 1], max_block_length=4)
    with pytest.raises(DataError, match=r"last block must have at most.*got 6"):
        BlockLayout([1, 1, 6], max_block_length=4)


def test_signals_outside_the_last_block() -> None:
    with pytest.raises(DataError, match=r"places in the last block of 3 tokens; got 3"):
        BlockLayout([5, 4, 3], signals=[3])
    with pytest.raises(DataError, match="got -4"):
        BlockLayout([5, 4, 3], signals=[-4])
    with pytest.raises(DataError, match="must name a token"):
        BlockLayout([5, 4, 3], signals=[])
    with pytest.raises(DataError, match=r"signal_ids must be in the last block.*got 58"):
        BlockLayout.from_segments(Letters(), "a:", ["b"], "c", signal_ids=[ord(":")])


def test_positions_that_overlap_or_end_beyond_the_model() -> None:
    layout = BlockLayout([5, 9, 4])
    assert layout.position_ids(14).max() == 17
    with pytest.raises(ConfigError, match=r"query_offset must lie after.*5 \+ 9 tokens; got 13"):
        layout.position_ids(13)
    assert layout.position_ids(60, max_position=64).max() == 63
    with pytest.raises(ConfigError, match=r"4 tokens below the model's 64.*got 61.*to 60"):
        layout.position_ids(61, max_position=64)
    with pytest.raises(ConfigError, match="query_offset must be >= 0"):
        layout.position_ids(-1)


def test_padding_on_the_right_is_refused() -> None:
    layout = BlockLayout([3, 2], pad_multiple=4)
    layout.check_padding(torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1]]))
    with pytest.raises(DataError, match=r"padding, which is on the left.*Pad each block"):
        layout.check_padding(torch.tensor([[1, 1, 1, 0, 1, 1, 0, 0]]))
    with pytest.raises(ShapeError, match=r"attention_mask must have the shape"):
        layout.check_padding(torch.ones(1, 7))


def test_documents_and_lengths_of_the_wrong_kind() -> None:
    def tokenizer(text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    with pytest.raises(DataError, match="documents must be a list of texts; got str"):
        BlockLayout.from_segments(tokenizer, "ab", "one doc", "q:")
    with pytest.raises(DataError, match=r"whole numbers of tokens; got 3\.5 for block 1 of 3"):
        BlockLayout([12, 3.5, 5])  # type: ignore[list-item]
