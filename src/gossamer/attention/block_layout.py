"""Which token of a prompt with many documents sees which: lengths, slots, masks, positions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_range, check_shape
from gossamer.errors import ConfigError, DataError

__all__ = ["BlockLayout"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class BlockLayout:
    r"""The blocks of a prompt: instruction, one block for each document, question at the end.

    A token of the instruction sees the tokens before it. A token of a document sees the whole
    instruction and its own document up to itself. A token of the last block sees all before it.
    No document sees another, so the number of pairs grows with the number of documents and not
    with its square. One block alone, and two without a document, are plain causal attention.

    Each block takes a multiple of `pad_multiple` slots, with padding on the left. `lengths`,
    `cut` and the other attributes are plain values; tensors are made when they are asked for.

    Args:
        lengths: Tokens of each block in the order of the prompt. Range: >= 1 each.
        max_block_length: Longest block. Longer documents are cut at their end, with a warning;
            a longer instruction or question is an error. Unit: tokens. Default no limit.
        pad_multiple: Slots of a block are a multiple of this; 1 for no padding. Range: >= 1.
            Default 16.
        signals: Tokens of the last block whose attention gives the scores, counted from its
            start, or from its end where negative. Default the last two.

    Raises:
        DataError: If a block is empty, there is none, or a signal lies outside the last block.
        ConfigError: If a number is out of range.

    Example:
        >>> layout = BlockLayout([2, 1, 2, 1], pad_multiple=1)
        >>> layout.mask().int().tolist()[3:]
        [[1, 1, 0, 1, 0, 0], [1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
        >>> layout.position_ids(100).tolist(), layout.num_pairs
        ([0, 1, 2, 2, 3, 100], 19)

    Source: Gupta et al., *Scalable In-context Ranking with Generative Models*, NeurIPS 2025,
        section 4; padding on the left and the multiple of 16 are those of the official code.
    Deviations: a block is padded to its own multiple; the official code pads all blocks to the
        longest.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        max_block_length: int | None = None,
        pad_multiple: int = 16,
        signals: Sequence[int] | None = None,
    ) -> None:
        check_range(pad_multiple, "pad_multiple", low=1, integer=True)
        given = list(lengths)
        _check_lengths(given)
        self.cut = _cut_of(given, max_block_length)
        self.lengths = tuple(a - b for a, b in zip(given, self.cut, strict=True))
        self.pad_multiple = pad_multiple
        self.padding = tuple(-length % pad_multiple for length in self.lengths)
        self.signals = _signals_of(signals, self.lengths[-1])
        self.input_ids: Tensor | None = None

    @classmethod
    def from_segments(
        cls,
        tokenizer: Callable[..., Any],
        instruction: str,
        documents: Sequence[str],
        query: str,
        *,
        max_block_length: int | None = None,
        pad_multiple: int = 16,
        signal_ids: Sequence[int] | None = None,
    ) -> BlockLayout:
        """Tokenise the parts of a prompt, each on its own, and lay them out.

        The layout that comes back holds the tokens in `input_ids`, `(T,)`, with the tokenizer's
        padding token (0 without one) in slots of padding. Special tokens are not added: write
        them into the texts.

        Args:
            tokenizer: One of transformers, or a function of a text and `add_special_tokens` that
                returns a dict with `input_ids`.
            instruction: First block.
            documents: One text each; may be empty.
            query: Last block: the question, up to the first token of the answer.
            max_block_length: As above.
            pad_multiple: As above.
            signal_ids: Token ids whose last places in the last block are the signals. Default
                the last two tokens, whatever they are.

        Raises:
            DataError: If a text has no tokens, or a signal token is not in the last block.

        Example:
            >>> def tokenizer(text, add_special_tokens=False):
            ...     return {"input_ids": [ord(letter) for letter in text]}
            >>> made = BlockLayout.from_segments(tokenizer, "ab", ["c", "de"], "f:", pad_multiple=2)
            >>> made.input_ids.tolist()
            [97, 98, 0, 99, 100, 101, 102, 58]
        """
        if isinstance(documents, str):
            raise DataError(
                "documents must be a list of texts; got str. Put a single document in a list."
            )
        texts = (instruction, *documents, query)
        tokens = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        signals = None if signal_ids is None else [_last(tokens[-1], i) for i in signal_ids]
        layout = cls(
            [len(block) for block in tokens],
            max_block_length=max_block_length,
            pad_multiple=pad_multiple,
            signals=signals,
        )
        filler = getattr(tokenizer, "pad_token_id", None) or 0
        slots = []
        for block, length, padding in zip(tokens, layout.lengths, layout.padding, strict=True):
            slots += [filler] * padding + block[:length]
        layout.input_ids = torch.tensor(slots)
        return layout

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """How many of them are documents."""
        return max(0, len(self.lengths) - 2)

    @property
    def num_tokens(self) -> int:
        """Slots T of the prompt, padding among them: the length of queries and keys."""
        return sum(self.lengths) + sum(self.padding)

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees, by formula; `mask()` holds as many."""
        before, pairs = 0, 0
        last = len(self.lengths) - 1
        for block, length in enumerate(self.lengths):
            seen = before if block == last else self.lengths[0] if block else 0
            pairs += length * (length + 1) // 2 + length * seen
            before += length
        return pairs

    def real(self, *, device: torch.device | str | None = None) -> Tensor:
        """Return which slots hold a token, `(T,)`; the others are padding."""
        return self.block_ids(device=device) >= 0

    def block_ids(self, *, device: torch.device | str | None = None) -> Tensor:
        """Return the block of each slot, `(T,)`, and -1 for padding."""
        blocks, counts = [], []
        for block, (padding, length) in enumerate(zip(self.padding, self.lengths, strict=True)):
            blocks += [-1, block]
            counts += [padding, length]
        return torch.tensor(blocks, device=device).repeat_interleave(
            torch.tensor(counts, device=device), output_size=sum(counts)
        )

    def mask(self, *, device: torch.device | str | None = None) -> Tensor:
        """Return the whole mask, `(T, T)`, True = takes part; for checks and small inputs."""
        slots = torch.arange(self.num_tokens, device=device)
        return self.mask_mod(device=device)(slots, slots, slots[:, None], slots)

    def mask_mod(self, *, device: torch.device | str | None = None) -> MaskMod:
        """Return the mask as the function of indices that FlexAttention takes."""
        block = self.block_ids(device=device)
        last = self.num_blocks - 1

        def sees(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
            q_block, k_block = block[q_index], block[k_index]
            related = (q_block == k_block) | (k_block == 0) | (q_block == last)
            return related & (k_index <= q_index) & (q_block >= 0) & (k_block >= 0)

        return sees

    def position_ids(
        self,
        query_offset: int = 8192,
        *,
        max_position: int | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Return 0-based positions, `(T,)`, the same for all documents; padding gets 0.

        Every document starts after the instruction, so their order does not matter; the last
        block starts at `query_offset`. A trained model needs the offset it was trained with.

        Args:
            query_offset: First position of the last block. Range: at least the instruction and
                the longest document. Default 8192, the paper's; the released code has 16384.
            max_position: Positions that the model knows; more is an error. Default no limit.
            device: Of the result.

        Raises:
            ConfigError: If the last block would overlap a document or go beyond the limit.
        """
        first, last = self.lengths[0], self.lengths[-1]
        documents = max(self.lengths[1:-1], default=0)
        check_range(query_offset, "query_offset", low=0, integer=True)
        starts = [0, *[first] * self.num_documents, query_offset][: self.num_blocks]
        if self.num_blocks > 1 and query_offset < first + documents:
            raise ConfigError(
                "query_offset must lie after the instruction and the longest document, "
                f"{first} + {documents} tokens; got {query_offset}. Raise query_offset."
            )
        end = max(start + length for start, length in zip(starts, self.lengths, strict=True))
        if max_position is not None and end > max_position:
            raise ConfigError(
                f"query_offset must leave room for the last block's {last} tokens below the "
                f"model's {max_position} positions; got {query_offset}. Lower query_offset to "
                f"{max(0, max_position - last)} or use a model with more positions."
            )
        block = self.block_ids(device=device)
        begins = torch.tensor(self._begins(), device=device)
        place = torch.arange(self.num_tokens, device=device) - begins[block]
        ids = place + torch.tensor(starts, device=device)[block]
        return torch.where(block >= 0, ids, 0)

    def check_padding(self, real: Tensor) -> None:
        """Check that a padding mask, `(T,)` or `(B, T)`, is that of this layout.

        Raises:
            DataError: If tokens and padding lie elsewhere, for example padding on the right.
        """
        check_shape(real, (*real.shape[:-1], self.num_tokens), "attention_mask")
        if not bool((real.bool() == self.real(device=real.device)).all()):
            raise DataError(
                "attention_mask must be 1 on the tokens of the layout and 0 on its padding, which "
                f"is on the left of each block; got another one with {int(real.sum())} ones. Pad "
                "each block on the left, or use layout.real()."
            )

    def report(self) -> dict[str, int]:
        """Return what was laid out, padded and cut, as plain numbers."""
        return {
            "documents": self.num_documents,
            "tokens": sum(self.lengths),
            "padding": sum(self.padding),
            "documents_cut": sum(count > 0 for count in self.cut),
            "tokens_cut": sum(self.cut),
            "pairs": self.num_pairs,
        }

    def __repr__(self) -> str:
        lengths = ", ".join(map(str, self.lengths[:8])) + (", ..." if self.num_blocks > 8 else "")
        return f"BlockLayout([{lengths}], pad_multiple={self.pad_multiple})"

    def _begins(self) -> list[int]:
        """Return the slot of each block's first token."""
        begins, used = [], 0
        for padding, length in zip(self.padding, self.lengths, strict=True):
            begins.append(used + padding)
            used += padding + length
        return begins


def _check_lengths(lengths: Sequence[int]) -> None:
    if not lengths:
        raise DataError("lengths must hold one number for each block; got none. Give a prompt.")
    for block, length in enumerate(lengths):
        if isinstance(length, bool) or int(length) != length:
            raise DataError(
                f"lengths must be whole numbers of tokens; got {length!r} for block {block} of "
                f"{len(lengths)}. Count tokens."
            )
        if length < 1:
            raise DataError(
                f"lengths must be at least 1 token for each block; got {length} for block {block} "
                f"of {len(lengths)}. Leave empty documents out."
            )


def _cut_of(lengths: Sequence[int], limit: int | None) -> tuple[int, ...]:
    """Return how many tokens each block loses to the limit."""
    if limit is None:
        return (0,) * len(lengths)
    check_range(limit, "max_block_length", low=1, integer=True)
    cut = tuple(max(0, length - limit) for length in lengths)
    for name, block in (("instruction", 0), ("last block", -1)):
        if cut[block]:
            raise DataError(
                f"the {name} must have at most max_block_length = {limit} tokens, since only "
                f"documents are cut; got {lengths[block]}. Raise max_block_length."
            )
    if any(cut):
        warnings.warn(
            f"{sum(count > 0 for count in cut)} of {len(lengths) - 2} documents were longer than "
            f"max_block_length = {limit} and lost {sum(cut)} tokens at their ends",
            stacklevel=3,
        )
    return cut


def _signals_of(signals: Sequence[int] | None, length: int) -> tuple[int, ...]:
    """Return the signals as places counted from the start of the last block."""
    if signals is None:
        return tuple(range(max(0, length - 2), length))
    for signal in signals:
        if not -length <= signal < length:
            raise DataError(
                f"signals must be places in the last block of {length} tokens; got {signal}. "
                "Count from its start, or from its end with negative numbers."
            )
    if not signals:
        raise DataError("signals must name a token of the last block; got none. Leave it out.")
    return tuple(signal % length for signal in signals)


def _last(tokens: Sequence[int], signal: int) -> int:
    """Return the last place of a token."""
    if signal not in tokens:
        raise DataError(
            f"signal_ids must be in the last block, which ends with {list(tokens[-4:])}; got "
            f"{signal}. End the query with the signal tokens, tokenised on their own."
        )
    return len(tokens) - 1 - list(reversed(tokens)).index(signal)
