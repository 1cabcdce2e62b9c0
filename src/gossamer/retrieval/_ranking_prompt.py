"""The prompt of in-context ranking: texts, tokens, blocks, positions and the answer to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.attention import BlockLayout
from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError, UnsupportedError

__all__ = ["RankingPrompt", "RankingTemplate", "checked_labels", "query_offset_of"]

_TASK = (
    "You get a query and a list of documents, each written as "
    "`ID: <id> | CONTENT: <text> | END ID: <id>`. Read all of them, then find the documents that "
    "help to answer the query."
)
_START = "\n====== Now let's start! ======\n"
_QUESTION = "Which document is most relevant to answer the query? Print out the ID of the document."
_LEAD = "The following document(s) can help answer the query:"
_ANSWER = "Final Answer: ["  # its last two tokens are the signals

# config.json may keep the position that a model was trained with under this name
_OFFSET_KEY, _OFFSET = "block_query_offset", 8192
_ROOM = 512  # positions left for the last block below the end of a model's range
_IGNORED = -100


@dataclass(frozen=True, eq=False)
class RankingPrompt:
    """One prompt as tokens.

    Args:
        layout: Its blocks.
        input_ids: The tokens in the slots of the layout, `(T,)`.
        labels: The number that each document is called by in the prompt.
        num_cut: Documents that were cut at the limit.
        num_answer: Tokens of the answer at the end of the last block; 0 for a prompt to read.
        query_offset: Position of the last block.
        max_position: Positions that the model has, or `None`.
    """

    layout: BlockLayout
    input_ids: Tensor
    labels: tuple[int, ...]
    num_cut: int
    num_answer: int
    query_offset: int
    max_position: int | None

    def position_ids(self) -> Tensor:
        """Return the positions, `(T,)`."""
        return self.layout.position_ids(self.query_offset, max_position=self.max_position)

    def targets(self) -> Tensor:
        """Return the tokens to predict, `(T,)`: those of the answer, elsewhere -100.

        They stand at their own places, as models of transformers take `labels`.
        """
        targets = torch.full_like(self.input_ids, _IGNORED)
        if self.num_answer:
            targets[-self.num_answer :] = self.input_ids[-self.num_answer :]
        return targets


class RankingTemplate:
    r"""Writes prompts of in-context ranking for one tokenizer.

    Blocks: instruction with the query, one block for each document, the question with the start
    of the answer. Each is tokenised on its own, so that a document's tokens do not depend on its
    neighbours. With a chat template the blocks are the parts of one conversation: its header
    belongs to the instruction, the change of turn to the last block. Special tokens are those of
    the chat template; what looks like one inside a query or document is taken out. Documents
    beyond the limit lose their end.

    Args:
        tokenizer: One of transformers.
        query_in_prefix: Give the query in the instruction as well, so that documents are read
            with it in mind. Without it their states serve every query. Default true.
        max_document_length: Longest document with its frame. Range: >= 1. Unit: tokens.
            Default 160.
        query_offset: Position of the last block. Range: >= 1. Default 8192, the paper's.
        max_position: Positions that the model has. Default no limit.

    Raises:
        ConfigError: If a number is out of range.
        UnsupportedError: If the chat template changes what it is given.

    Example:
        >>> class Letters:
        ...     def __call__(self, texts, **options):
        ...         return {"input_ids": [[ord(x) for x in text] for text in texts]}
        >>> prompt = RankingTemplate(Letters()).prompt("why?", ["a", "b"], answer=[1])
        >>> prompt.layout.num_documents, prompt.labels, prompt.num_answer
        (2, (0, 1), 2)
        >>> "".join(map(chr, prompt.input_ids[-9:].tolist()))
        'swer: [1]'

    Source: Gupta et al., *Scalable In-context Ranking with Generative Models*, NeurIPS 2025,
        section 4.1 and the prompt of the official code.
    Deviations: the wording of the instruction is ours.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        query_in_prefix: bool = True,
        max_document_length: int = 160,
        query_offset: int = _OFFSET,
        max_position: int | None = None,
    ) -> None:
        check_range(max_document_length, "max_document_length", low=1, integer=True)
        check_range(query_offset, "query_position_offset", low=1, integer=True)
        if max_position is not None and query_offset >= max_position:
            raise ConfigError(
                "query_position_offset must lie below the end of the model's "
                f"{max_position} positions; got {query_offset}. Lower it, or give 'auto'."
            )
        self.tokenizer = tokenizer
        self.query_in_prefix = query_in_prefix
        self.max_document_length = max_document_length
        self.query_offset = query_offset
        self.max_position = max_position
        self._header, self._turn, self._end = _frame(tokenizer)
        self._special = _special_tokens(tokenizer)

    def instruction_tokens(self, query: str = "") -> list[int]:
        """Return the first block; without the query in it, the same for every query."""
        asked = f"\nQuery: {self._plain(query)}" if self.query_in_prefix else ""
        return self._tokens([f"{self._header}{_TASK}{asked}\n\nDocuments:"])[0]

    def document_tokens(
        self, documents: Sequence[str], labels: Sequence[int]
    ) -> tuple[list[list[int]], list[bool]]:
        """Return one block for each document, and which of them were cut."""
        texts = [
            f"\nID: {label} | CONTENT: {self._plain(text)} | END ID: {label}"
            for text, label in zip(documents, labels, strict=True)
        ]
        blocks = self._tokens(texts) if texts else []
        limit = self.max_document_length
        return [block[:limit] for block in blocks], [len(block) > limit for block in blocks]

    def question_tokens(self, query: str) -> list[int]:
        """Return the last block, up to the bracket that opens the answer."""
        asked = f"{_START}{_QUESTION}\nQuery: {self._plain(query)}\n{_LEAD}"
        tokens = self._tokens([f"{asked}{self._turn}{_ANSWER}"])[0]
        if len(tokens) < 2:
            raise DataError(
                f"the last block must have two tokens to read; got {tokens}. Use a tokenizer "
                "that knows the letters of the prompt."
            )
        return tokens

    def answer_tokens(self, labels: Sequence[int]) -> list[int]:
        """Return the completion to learn: `3, 17]` and the end of the turn."""
        text = ", ".join(map(str, labels)) + f"]{self._end}"
        tokens = self._tokens([text])[0]
        last = getattr(self.tokenizer, "eos_token_id", None)
        return tokens if self._end or last is None else [*tokens, last]

    def prompt(
        self,
        query: str,
        documents: Sequence[str],
        *,
        labels: Sequence[int] | None = None,
        answer: Sequence[int] | None = None,
        pad_multiple: int = 1,
    ) -> RankingPrompt:
        """Lay a whole prompt out.

        Args:
            query: The question.
            documents: Texts of the candidates, title first.
            labels: Numbers to call them by, each once. Default 0, 1, 2, ...
            answer: Places of the relevant documents, to end the prompt with their labels.
            pad_multiple: Slots of a block are a multiple of this. Range: >= 1. Default 1.

        Raises:
            DataError: If the query is blank, a text is none, a label comes twice, there is no
                document, or a place of the answer lies outside.
            ConfigError: If instruction or question are too long for the positions.
        """
        numbers = checked_labels(labels, len(documents))
        self.check_query(query)
        for place, text in enumerate(documents):
            if not isinstance(text, str):
                raise DataError(
                    f"documents must be texts; got {text!r} at place {place}. Leave it out."
                )
        if not documents:
            raise DataError("documents must hold at least one text; got none. Add candidates.")
        blocks, cut = self.document_tokens(documents, numbers)
        first, last = self.instruction_tokens(query), self.question_tokens(query)
        added = [] if answer is None else self.answer_tokens(_answered(answer, numbers))
        signals = (len(last) - 2, len(last) - 1)
        self.check_lengths(len(first), max(map(len, blocks)), len(last) + len(added))
        layout = BlockLayout(
            [len(first), *map(len, blocks), len(last) + len(added)],
            pad_multiple=pad_multiple,
            signals=signals,
        )
        filler = getattr(self.tokenizer, "pad_token_id", None) or 0
        slots: list[int] = []
        for block, padding in zip((first, *blocks, [*last, *added]), layout.padding, strict=True):
            slots += [filler] * padding + block
        layout.input_ids = torch.tensor(slots)
        return RankingPrompt(
            layout=layout,
            input_ids=layout.input_ids,
            labels=numbers,
            num_cut=sum(cut),
            num_answer=len(added),
            query_offset=self.query_offset,
            max_position=self.max_position,
        )

    def check_query(self, query: Any) -> None:
        """Check that a query is text.

        Raises:
            DataError: If it is blank or no text.
        """
        if not isinstance(query, str) or not query.strip():
            raise DataError(f"query must be a text that is not blank; got {query!r}. Fill it in.")

    def check_lengths(self, first: int, document: int, last: int) -> None:
        """Check that no block runs into the next one's positions, or beyond the model's.

        Raises:
            ConfigError: If the instruction with the longest document, or the last block, is too
                long.
        """
        if first + document > self.query_offset:
            raise ConfigError(
                "query_position_offset must lie after the instruction and the longest document, "
                f"{first} + {document} tokens; got {self.query_offset}. Raise it, shorten the "
                "query, or lower max_document_length."
            )
        if self.max_position is not None and self.query_offset + last > self.max_position:
            raise ConfigError(
                f"query_position_offset must leave room for the last block's {last} tokens below "
                f"the model's {self.max_position} positions; got {self.query_offset}. Shorten the "
                f"query, or lower it to at most {max(1, self.max_position - last)}."
            )

    def _plain(self, text: str) -> str:
        """Return a text without what the tokenizer would read as special tokens."""
        for token in self._special:
            if token in text:
                text = text.replace(token, " ")
        return text

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        found = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [list(tokens) for tokens in found]


def query_offset_of(config: Any, offset: int | str = "auto") -> int:
    """Return the position of the last block for a model.

    `"auto"` is what the model was trained with, `block_query_offset` of its config; without that
    8192, the paper's, or where the model has too few positions 512 (at most a quarter of them)
    below their end.

    Args:
        config: Of the model.
        offset: A position, or `"auto"`.

    Raises:
        ConfigError: If it is neither.
    """
    if offset != "auto":
        if isinstance(offset, str):
            raise ConfigError(
                f"query_position_offset must be a position or 'auto'; got {offset!r}. Change it."
            )
        return offset
    trained = getattr(config, _OFFSET_KEY, None)
    if trained is not None:
        return int(trained)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return _OFFSET
    return min(_OFFSET, int(positions) - min(_ROOM, int(positions) // 4))


def _frame(tokenizer: Any) -> tuple[str, str, str]:
    """Return what a chat template writes before the user's text, after it, and at the end."""
    if getattr(tokenizer, "chat_template", None) is None:
        return "", "\n", ""
    user, reply = "text-of-the-user", "text-of-the-answer"
    written = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": user},
            {"role": "assistant", "content": f"{_ANSWER}{reply}"},
        ],
        tokenize=False,
    )
    header, found, rest = written.partition(user)
    turn, also, end = rest.partition(f"{_ANSWER}{reply}")
    if not found or not also:
        raise UnsupportedError(
            "the tokenizer's chat template must keep the texts of user and assistant as they "
            f"are; got {written[:200]!r}. Set tokenizer.chat_template to another template, or to "
            "None for plain text."
        )
    return header, turn, end.rstrip()


def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the spellings of special tokens, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {token.content for token in added if token.special}
    found |= set(getattr(tokenizer, "all_special_tokens", ()))
    return tuple(sorted(found - {""}, key=lambda token: (-len(token), token)))


def checked_labels(labels: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return the labels of documents, 0, 1, ... where none are given.

    Raises:
        DataError: If there is not one for each, or one comes twice.
    """
    if labels is None:
        return tuple(range(count))
    numbers = tuple(labels)
    if len(numbers) != count or len(set(numbers)) != count:
        raise DataError(
            f"labels must hold one number for each of the {count} documents, each once; got "
            f"{len(numbers)}, {len(set(numbers))} of them different. Leave labels out to count "
            "from 0."
        )
    return numbers


def _answered(answer: Sequence[int], labels: Sequence[int]) -> list[int]:
    """Return the labels of the documents at some places."""
    if not answer:
        raise DataError("answer must name at least one document; got none. Leave the prompt out.")
    for place in answer:
        if not 0 <= place < len(labels):
            raise DataError(
                f"answer must hold places among the {len(labels)} documents; got {place}. Count "
                "from 0."
            )
    return [labels[place] for place in answer]
