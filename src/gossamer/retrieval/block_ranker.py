"""In-context ranking: one prompt with all candidates, their order from one layer's attention."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.attention import BlockLayout, block_scores
from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, UnsupportedError
from gossamer.progress import progress
from gossamer.retrieval import _ranker_engines as engines
from gossamer.retrieval._document_cache import CachedDocument, DocumentCache, digest_of
from gossamer.retrieval._ranker_lists import (
    Candidate,
    ListRanker,
    RankResult,
    candidates_of,
    result_of,
)
from gossamer.retrieval._ranker_model import check_servable, resting, unwrapped
from gossamer.retrieval._ranking_prompt import RankingTemplate, checked_labels, query_offset_of
from gossamer.retrieval._ranking_setup import cache_settings, layer_of, load_ranker
from gossamer.retrieval._streams import PathLike

__all__ = ["BlockRanker"]

ENGINES = ("three_pass", "mask4d", "block")
_AGGREGATES = ("sum", "mean", "max")
_BATCH_TOKENS = 8192
_TOKENISED = 256  # documents at once


class BlockRanker(ListRanker):
    r"""Ranks candidates with a causal language model, without decoding a token.

    All candidates stand in one prompt, in which a document sees the instruction and itself (see
    `BlockLayout`). Of one middle layer the logits of the prompt's last two tokens on all
    documents' tokens are turned into scores (see `block_scores`), and the layers above it do not
    run. The cost grows linearly with the number of documents. Scores compare documents of one
    list, not of two.

    The model has to be trained for it (`fit_ranker`): the order of one that is not means nothing.
    All engines give one result to rounding. `"three_pass"` reads instruction, documents in portions
    and question one after another, in bounded memory; `"mask4d"` is the plain form to check by;
    `"block"` runs the whole prompt at once. The caller's model keeps its own attention, also when
    a call fails.

    Args:
        model: GPT-2-, Llama-, Mistral-, Qwen2- or Qwen3-type causal model of transformers.
        tokenizer: Its tokenizer, with a chat template or without.
        layer: The one that is read, from 0. Default `"auto"`: `block_rank_layer` of the model's
            config where training has set it, else `round(0.62 * layers)`, the paper's 20 of 32.
        engine: `"three_pass"`, `"mask4d"` or `"block"`. Default `"three_pass"`.
        aggregate: Over a document's tokens: `"sum"`, the paper's, `"mean"` or `"max"`; the last
            two do not favour long documents. Default `"sum"`.
        query_in_prefix: Give the query before the documents too. Without it documents can be
            cached; the paper loses 4 to 5 points of precision at 1. Default true.
        query_position_offset: Position of the last block, that of training. Default `"auto"`:
            `block_query_offset` of the config, else 8192, or less where the model has too few
            positions (its last 512, at most a quarter, stay free).
        max_document_length: Longer documents are cut, counted and reported. Range: >= 1. Unit:
            tokens, with the frame of the document. Default 160, as in training.

    Raises:
        UnsupportedError: If the model cannot be read so: an encoder, ALiBi, a sliding window.
        ConfigError: If an option is out of its range.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> class Letters:
        ...     def __call__(self, texts, **options):
        ...         return {"input_ids": [[ord(x) for x in text] for text in texts]}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=16,
        ...     intermediate_size=32, num_hidden_layers=4, num_attention_heads=2))
        >>> ranker = BlockRanker(model, Letters())
        >>> result = ranker.rank("why?", ["because", {"id": "7", "text": "therefore"}])
        >>> sorted(result.ids), round(sum(result.scores), 5)
        (['0', '7'], 1.0)

    Source: Gupta et al., *Scalable In-context Ranking with Generative Models*, NeurIPS 2025,
        section 4 and the official code.
    Deviations: the three passes are exact and need no change of the model; the mean over signal
        tokens, as in the official code (paper: their sum); ids in the prompt count from 0.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        layer: int | str = "auto",
        engine: str = "three_pass",
        aggregate: str = "sum",
        query_in_prefix: bool = True,
        query_position_offset: int | str = "auto",
        max_document_length: int = 160,
    ) -> None:
        check_choice(engine, ENGINES, "engine")
        check_choice(aggregate, _AGGREGATES, "aggregate")
        check_servable(model)
        config = unwrapped(model).config
        self.model = model
        self.tokenizer = tokenizer
        self.engine = engine
        self.aggregate = aggregate
        self.layer = layer_of(model, layer)
        self.template = RankingTemplate(
            tokenizer,
            query_in_prefix=query_in_prefix,
            max_document_length=max_document_length,
            query_offset=query_offset_of(config, query_position_offset),
            max_position=getattr(config, "max_position_embeddings", None),
        )
        self.document_cache: DocumentCache | None = None

    @classmethod
    def from_pretrained(
        cls,
        folder_or_model: str | os.PathLike[str] | Any,
        *,
        dtype: str | None = None,
        device: str | torch.device | None = None,
        **options: Any,
    ) -> BlockRanker:
        """Load model and tokenizer from a folder.

        Args:
            folder_or_model: A folder as transformers saves it, `packaged:smollm2`, or a model
                whose config names its folder.
            dtype: `"float32"`, `"bfloat16"`, `"float16"`. Default float32 on a CPU, elsewhere
                that of the file.
            device: Where it runs. Default the CPU.
            options: Of `BlockRanker`.

        Raises:
            DataError: If there is no such folder, or it holds no causal language model.
            MissingDependencyError: If transformers is not installed.
        """
        model, tokenizer = load_ranker(folder_or_model, dtype=dtype, device=device)
        return cls(model, tokenizer, **options)

    def rank(
        self,
        query: str,
        documents: Sequence[Any],
        top_k: int | None = None,
        *,
        labels: Sequence[int] | None = None,
        batch_tokens: int = _BATCH_TOKENS,
        **options: Any,
    ) -> RankResult:
        """Rank the candidates of one query; equal scores keep their first order.

        Args:
            query: The question.
            documents: Texts, or mappings with `text` and perhaps `id` and `title`; none gives an
                empty result.
            top_k: How many to return. Default all.
            labels: Numbers to call the documents by in the prompt, each once. Default 0, 1, ...;
                with a cache the documents' numbers there.
            batch_tokens: Documents' tokens at once, with `"three_pass"`. Range: >= 1.
                Default 8192.
            options: None.

        Raises:
            DataError: If the query is blank, a text is missing, an id comes twice, or scores are
                not finite.
            ConfigError: If instruction or question are too long for the positions.

        Warns:
            UserWarning: The first time that documents are cut.
        """
        self.template.check_query(query)
        check_range(batch_tokens, "batch_tokens", low=1, integer=True)
        if top_k is not None:
            check_range(top_k, "top_k", low=1, integer=True)
        if options:
            raise ConfigError(
                f"rank has the options top_k, labels and batch_tokens; got {', '.join(options)}."
                " Leave it out."
            )
        candidates = candidates_of(documents)
        if not candidates:
            return RankResult((), (), (), (), 0, 0)
        with resting(self.model):
            if self.engine == "three_pass":
                scores, lengths, num_cut = self._in_passes(query, candidates, labels, batch_tokens)
            else:
                scores, lengths, num_cut = self._at_once(query, candidates, labels)
        self._tell_of_cut(num_cut, self.template.max_document_length)
        return result_of(candidates, scores, lengths, num_cut=num_cut, top_k=top_k)

    def cache(
        self,
        corpus: Mapping[str, Any],
        folder: PathLike,
        *,
        dtype: str | None = None,
        batch_tokens: int = _BATCH_TOKENS,
        quiet: bool = False,
    ) -> DocumentCache:
        """Keep documents' keys and values on disk, and use them from now on.

        Documents that the folder holds already stay as they are, so that an interrupted call is
        repeated and a corpus may grow. An empty corpus opens what is there. A document takes
        `(2 * layer + 1) * key heads * head width` numbers for each token: 14 kB in float16 for
        SmolLM2-135M. In the prompt a document is called by its number in the cache.

        Args:
            corpus: Document id -> text, or -> a mapping with `text` and perhaps `title`.
            folder: Of the cache, a new one or one that was made with the same model and options.
            dtype: On disk: `"float16"`, `"bfloat16"` or `"float32"`. Default that of the folder,
                float16 for a new one.
            batch_tokens: Tokens at once, and in one file. Range: >= 1. Default 8192.
            quiet: Show no progress. Default false.

        Raises:
            UnsupportedError: If documents depend on the query, or another engine is set.
            ConfigError: If the folder was made with another model, layer, prompt or precision.
            DataError: If the folder holds another text under an id, or is not whole.
        """
        check_range(batch_tokens, "batch_tokens", low=1, integer=True)
        if self.template.query_in_prefix or self.engine != "three_pass":
            raise UnsupportedError(
                "documents are cached without the query and used by the engine 'three_pass'; got "
                f"query_in_prefix={self.template.query_in_prefix} and engine={self.engine!r}. Make "
                "the ranker with query_in_prefix=False."
            )
        kept = DocumentCache(
            folder, cache_settings(self.model, self.template, self.layer), dtype=dtype
        )
        first = self.template.instruction_tokens()
        with resting(self.model):
            prefix = self._cached_prefix(kept, first)
            candidates = candidates_of(corpus)
            left = [one for one in candidates if kept.find(one.name, one.text) is None]
            with progress("cache", len(left), quiet=quiet) as bar:
                for begin in range(0, len(left), _TOKENISED):
                    chosen = left[begin : begin + _TOKENISED]
                    self._add(kept, prefix, chosen, batch_tokens)
                    done = begin + len(chosen)
                    bar.update(done, f"{done} of {len(left)} documents")
        self.document_cache = kept
        return kept

    def _in_passes(
        self,
        query: str,
        candidates: Sequence[Candidate],
        labels: Sequence[int] | None,
        batch_tokens: int,
    ) -> tuple[list[float], list[int], int]:
        """Return scores, lengths and the number of cut documents, by three passes."""
        template, kept = self.template, self.document_cache
        found = [_find(kept, one) if labels is None else None for one in candidates]
        numbers = _labels(found, kept) if labels is None else checked_labels(labels, len(found))
        fresh = [place for place, cached in enumerate(found) if cached is None]
        texts = [candidates[place].text for place in fresh]
        blocks, cut = template.document_tokens(texts, [numbers[place] for place in fresh])
        num_cut = sum(cut)
        tokens = dict(zip(fresh, blocks, strict=True))
        lengths = [
            len(tokens[place]) if cached is None else cached.length
            for place, cached in enumerate(found)
        ]
        first, last = template.instruction_tokens(query), template.question_tokens(query)
        template.check_lengths(len(first), max(lengths), len(last))
        # those of like length go through the layers together, cached ones stand in front
        order = sorted(range(len(found)), key=lambda place: (found[place] is None, lengths[place]))
        ordered = [lengths[place] for place in order]
        passes = engines.Passes(
            self.model, self.layer, first=len(first), lengths=ordered, last=len(last)
        )
        if kept is None:
            passes.instruction(first)
        else:
            passes.states.put_all(0, self._cached_prefix(kept, first))
        num_kept = len(order) - len(fresh)
        for place in range(num_kept):
            cached = found[order[place]]
            if kept is not None and cached is not None:
                passes.states.put_all(passes.begins[place], kept.read(cached))
                num_cut += cached.cut
        for begin, end in engines.portions(ordered[num_kept:], batch_tokens):
            chosen = order[num_kept + begin : num_kept + end]
            passes.documents([tokens[place] for place in chosen], num_kept + begin)
        signals = (len(last) - 2, len(last) - 1)
        logits = passes.question(last, template.query_offset, signals)
        layout = BlockLayout([len(first), *ordered, len(last)], pad_multiple=1, signals=signals)
        scores = [0.0] * len(order)
        for place, score in zip(order, self._scored(logits, layout), strict=True):
            scores[place] = score
        return scores, lengths, num_cut

    def _at_once(
        self, query: str, candidates: Sequence[Candidate], labels: Sequence[int] | None
    ) -> tuple[list[float], list[int], int]:
        """Return the same from one run of the whole prompt."""
        made = self.template.prompt(query, [one.text for one in candidates], labels=labels)
        run = {"mask4d": engines.mask4d, "block": engines.block}[self.engine]
        logits = run(self.model, self.layer, made.layout, made.input_ids, made.position_ids())
        return (
            self._scored(logits, made.layout),
            list(made.layout.lengths[1:-1]),
            made.num_cut,
        )

    def _scored(self, logits: Tensor, layout: BlockLayout) -> list[float]:
        scores: list[float] = block_scores(logits, layout, aggregate=self.aggregate)[0].tolist()
        return scores

    def _cached_prefix(self, kept: DocumentCache, first: Sequence[int]) -> Tensor:
        """Return the states of the instruction, which are made once for a cache."""
        prefix = kept.prefix()
        if prefix is None:
            passes = engines.Passes(self.model, self.layer, first=len(first), lengths=[], last=0)
            passes.instruction(first)
            prefix = passes.states.get_all(0, len(first))
            kept.keep_prefix(prefix)
        # what stands first in the states of a prompt gives them precision and device
        like = next(self.model.parameters())
        return prefix.to(like.device, like.dtype)

    def _add(
        self,
        kept: DocumentCache,
        prefix: Tensor,
        candidates: Sequence[Candidate],
        batch_tokens: int,
    ) -> None:
        """Read some documents and put them into the cache."""
        numbers = range(len(kept), len(kept) + len(candidates))
        blocks, cut = self.template.document_tokens([one.text for one in candidates], numbers)
        first = prefix.shape[2]
        self.template.check_lengths(first, max(map(len, blocks)), 0)
        for begin, end in engines.portions([len(block) for block in blocks], batch_tokens):
            chosen = blocks[begin:end]
            lengths = [len(block) for block in chosen]
            passes = engines.Passes(self.model, self.layer, first=first, lengths=lengths, last=0)
            passes.states.put_all(0, prefix)
            passes.documents(chosen, 0)
            ends = zip(passes.begins, passes.begins[1:], strict=False)
            kept.add(
                [one.name for one in candidates[begin:end]],
                [digest_of(one.text) for one in candidates[begin:end]],
                cut[begin:end],
                [passes.states.get_all(a, b) for a, b in ends],
            )


def _find(kept: DocumentCache | None, candidate: Candidate) -> CachedDocument | None:
    return (
        None if kept is None or not candidate.named else kept.find(candidate.name, candidate.text)
    )


def _labels(found: Sequence[CachedDocument | None], kept: DocumentCache | None) -> tuple[int, ...]:
    """Return each document's number in the cache; others count on from its end."""
    following = 0 if kept is None else len(kept)
    return tuple(
        following + place if cached is None else cached.row for place, cached in enumerate(found)
    )
