"""The baseline of in-context ranking: attention of an untrained model, read over all layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.attention.block import attend_last, grouped_logits
from gossamer.checks import check_range
from gossamer.errors import ConfigError
from gossamer.retrieval._ranker_engines import AttentionPart, States, found_logits, run_part
from gossamer.retrieval._ranker_lists import ListRanker, RankResult, candidates_of, result_of
from gossamer.retrieval._ranker_model import check_servable, num_layers, resting, unwrapped
from gossamer.retrieval._ranking_prompt import RankingTemplate
from gossamer.retrieval._ranking_setup import load_ranker

__all__ = ["AttentionReader"]

_NO_QUERY = "N/A"
_LOWEST = 2.0  # standard deviations below a document's mean, where tokens are left out


class AttentionReader(ListRanker):
    r"""Ranks candidates by what the query's tokens attend to, in a model that was not trained.

    $$S_k = \sum_{j \in D_k}\Big(a_j(q) - a_j(\text{N/A})\Big),\qquad
      a_j(q) = \frac{1}{|q|}\sum_{l,h}\sum_{i \in q} \alpha^{l,h}_{ij}$$

    One prompt holds instruction, documents and then the query, under ordinary causal attention
    with ordinary positions: each document sees those before it, so that their order matters and
    the cost grows with the square of the prompt. What a query without content attends to is taken
    off; then tokens more than two standard deviations below their document's mean are left out.
    `BlockRanker` is to be compared with it.

    Args:
        model: As of `BlockRanker`.
        tokenizer: Its tokenizer.
        max_document_length: Longer documents are cut. Range: >= 1. Unit: tokens. Default 160.
        calibrate: Take off the query without content. Default true.

    Raises:
        UnsupportedError: As `BlockRanker`.
        ConfigError: As `BlockRanker`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> class Letters:
        ...     def __call__(self, texts, **options):
        ...         return {"input_ids": [[ord(x) for x in text] for text in texts]}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=16,
        ...     intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
        >>> reader = AttentionReader(model, Letters())
        >>> reader.rank("why?", ["because", "therefore"]).num_candidates
        2

    Source: Chen et al., *Attention in Large Language Models Yields Efficient Zero-Shot
        Re-Rankers*, ICLR 2025.
    Deviations: the prompt is that of `BlockRanker`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_document_length: int = 160,
        calibrate: bool = True,
    ) -> None:
        check_servable(model)
        self.model = model
        self.tokenizer = tokenizer
        self.calibrate = calibrate
        self.template = RankingTemplate(
            tokenizer, query_in_prefix=False, max_document_length=max_document_length
        )

    @classmethod
    def from_pretrained(
        cls,
        folder_or_model: str | os.PathLike[str] | Any,
        *,
        dtype: str | None = None,
        device: str | torch.device | None = None,
        **options: Any,
    ) -> AttentionReader:
        """Load model and tokenizer from a folder, as `BlockRanker.from_pretrained` does.

        Args:
            folder_or_model: As there.
            dtype: As there.
            device: As there.
            options: Of `AttentionReader`.
        """
        model, tokenizer = load_ranker(folder_or_model, dtype=dtype, device=device)
        return cls(model, tokenizer, **options)

    def rank(
        self,
        query: str,
        documents: Sequence[Any],
        top_k: int | None = None,
        *,
        batch_tokens: int = 8192,
        **options: Any,
    ) -> RankResult:
        """Rank the candidates of one query, as `BlockRanker.rank`.

        Args:
            query: The question.
            documents: As there.
            top_k: As there.
            batch_tokens: Tokens of the prompt at once. Range: >= 1. Default 8192.
            options: None.

        Raises:
            DataError: As there.
            ConfigError: If the prompt has more tokens than the model has positions.
        """
        self.template.check_query(query)
        check_range(batch_tokens, "batch_tokens", low=1, integer=True)
        if top_k is not None:
            check_range(top_k, "top_k", low=1, integer=True)
        if options:
            raise ConfigError(f"rank has no option {', '.join(options)}. Leave it out.")
        candidates = candidates_of(documents)
        if not candidates:
            return RankResult((), (), (), (), 0, 0)
        texts = [one.text for one in candidates]
        blocks, cut = self.template.document_tokens(texts, range(len(texts)))
        lengths = [len(block) for block in blocks]
        with resting(self.model):
            weights = self._weights(query, blocks, batch_tokens)
        scores = [
            float(_without_lowest(part).sum() if self.calibrate else part.sum())
            for part in torch.split(weights, lengths)
        ]
        self._tell_of_cut(sum(cut), self.template.max_document_length)
        return result_of(candidates, scores, lengths, num_cut=sum(cut), top_k=top_k)

    def _weights(self, query: str, blocks: Sequence[Sequence[int]], batch_tokens: int) -> Tensor:
        """Return the attention of the query on each token of a document."""
        first = self.template.instruction_tokens()
        before = [*first, *(token for block in blocks for token in block)]
        asked = self.template.question_tokens(query)
        blank = self.template.question_tokens(_NO_QUERY)
        room = max(len(asked), len(blank))
        positions = getattr(unwrapped(self.model).config, "max_position_embeddings", None)
        if positions is not None and len(before) + room > positions:
            raise ConfigError(
                f"the prompt must fit the model's {positions} positions; got "
                f"{len(before) + room} tokens. Give fewer documents, or a smaller "
                "max_document_length."
            )
        states = States(num_layers(self.model), len(before) + room)
        for begin in range(0, len(before), batch_tokens):
            part: AttentionPart = _Before(states, begin)
            tokens = before[begin : begin + batch_tokens]
            run_part(self.model, tokens, range(begin, begin + len(tokens)), part)
        weights = self._asked(states, before, asked, blank, len(first))
        if self.calibrate:
            weights = weights - self._asked(states, before, blank, asked, len(first))
        return weights

    def _asked(
        self,
        states: States,
        before: Sequence[int],
        tokens: Sequence[int],
        other: Sequence[int],
        first: int,
    ) -> Tensor:
        """Return the weights of one question, whose query is where another question differs."""
        part = _Asked(states, first, len(before), _differing(tokens, other))
        ids = range(len(before), len(before) + len(tokens))
        run_part(self.model, tokens, ids, part)
        return found_logits(part.weights)


class _Before:
    """A part of instruction and documents under causal attention."""

    def __init__(self, states: States, begin: int) -> None:
        self.states = states
        self.begin = begin

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.states.put(layer, self.begin, k, v)
        return attend_last(q, *self.states.get(layer, 0, self.begin + k.shape[2]), scale)


class _Asked(_Before):
    """The last block, whose query's weights on the documents are added up over heads and layers."""

    def __init__(self, states: States, first: int, begin: int, rows: Sequence[int]) -> None:
        super().__init__(states, begin)
        self.first = first
        self.rows = list(rows)
        self.weights: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = super().attend(layer, q, k, v, scale)
        keys, _ = self.states.get(layer, 0, self.begin + k.shape[2])
        logits = grouped_logits(q[:, :, self.rows], keys, scale=scale).float()  # (1, H, rows, T)
        own = torch.arange(keys.shape[2], device=q.device) - self.begin
        sees = own <= torch.tensor(self.rows, device=q.device)[:, None]
        attended = logits.masked_fill(~sees, -torch.inf).softmax(-1)
        added = attended[0, :, :, self.first : self.begin].sum(0).mean(0)
        self.weights = added if self.weights is None else self.weights + added
        return out


def _differing(tokens: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the places of tokens between the common start and the common end of two lists."""
    shortest = min(len(tokens), len(other))
    start = next((i for i in range(shortest) if tokens[i] != other[i]), shortest)
    left = shortest - start
    end = next((i for i in range(left) if tokens[-1 - i] != other[-1 - i]), left)
    return list(range(start, len(tokens) - end)) or list(range(len(tokens)))


def _without_lowest(weights: Tensor) -> Tensor:
    """Return a document's weights without those far below their mean."""
    if len(weights) < 2:
        return weights
    return weights[weights >= weights.mean() - _LOWEST * weights.std()]
