"""What the recipe on ranking needs: prompts of random tokens, and a decoder that shows scores."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.attention import BlockLayout, MultiHeadAttention, block_scores
from gossamer.attention.block import signal_logits
from gossamer.losses import BlockRankingLoss
from gossamer.models import Decoder
from gossamer.positions import Positions, RopePositions

__all__ = ["PromptDecoder", "PromptStream", "Prompts", "draw_prompts", "layout_of", "prompt_loss"]

CONTENT, IDS = 32, 32
BEGIN, SEPARATOR, DOCUMENT, COLON, BRACKET = range(CONTENT + IDS, CONTENT + IDS + 5)
VOCAB = CONTENT + IDS + 5
QUERY, SHARED, WORDS = 4, 3, 6
"""Tokens of a query, those of them in the relevant document, tokens of a document."""
OFFSET = 64
"""Position of the last block."""


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts with equally many documents.

    Args:
        tokens: `(B, T)`.
        ids: The id token of each document, `(B, N)`.
        relevant: Number of the relevant document, `(B,)`.
        number: Of the batch.
    """

    tokens: Tensor
    ids: Tensor
    relevant: Tensor
    number: int = 0

    @property
    def documents(self) -> int:
        """How many documents a prompt has."""
        return self.ids.shape[1]

    @property
    def answers(self) -> Tensor:
        """The id token of the relevant document."""
        return self.ids.gather(1, self.relevant[:, None])[:, 0]


def draw_prompts(
    count: int, documents: int, generator: torch.Generator, *, number: int = 0
) -> Prompts:
    """Return prompts `BOS q q q q SEP`, documents `DOC id c c c c c c id`, `SEP q q q q COL BRK`.

    The relevant document holds three of the four query tokens. Any other holds none, or with
    probability 1/2 one.

    Args:
        count: Prompts.
        documents: Of each prompt. Range: 1 to 32.
        generator: Of the random numbers.
        number: Kept with them.

    Example:
        >>> prompts = draw_prompts(2, 3, torch.Generator().manual_seed(0))
        >>> prompts.tokens.shape, prompts.ids.shape
        (torch.Size([2, 40]), torch.Size([2, 3]))
    """

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    order = random(count, CONTENT).argsort(1)
    query, others = order[:, :QUERY], order[:, QUERY:]
    places = random(count, documents, others.shape[1]).argsort(2)[..., :WORDS]
    words = others[:, None].expand(-1, documents, -1).gather(2, places)
    near = random(count, documents) < 0.5
    drawn = query.gather(1, (QUERY * random(count, documents)).long())
    words[..., 0] = torch.where(near, drawn, words[..., 0])
    relevant = (documents * random(count)).long()
    rows = torch.arange(count)
    found = words[rows, relevant]
    # the first places are mixed with the others below
    found = torch.cat((query[:, :SHARED], others.gather(1, places[rows, relevant, SHARED:])), 1)
    words[rows, relevant] = found
    words = words.gather(2, random(count, documents, WORDS).argsort(2))
    query = query.gather(1, random(count, QUERY).argsort(1))
    ids = CONTENT + random(count, IDS).argsort(1)[:, :documents]
    marks = torch.full((count, documents, 1), DOCUMENT)
    blocks = torch.cat((marks, ids[..., None], words, ids[..., None]), dim=2).flatten(1)

    def column(token: int) -> Tensor:
        return torch.full((count, 1), token)

    head = (column(BEGIN), query, column(SEPARATOR))
    tail = (column(SEPARATOR), query, column(COLON), column(BRACKET))
    return Prompts(torch.cat((*head, blocks, *tail), dim=1), ids, relevant, number)


@functools.cache
def layout_of(documents: int) -> BlockLayout:
    """Return the blocks of prompts with so many documents."""
    lengths = [QUERY + 2, *[WORDS + 3] * documents, QUERY + 3]
    return BlockLayout(lengths, pad_multiple=1)


class PromptStream:
    """Training batches by number, with more documents in later ones.

    Args:
        batch_size: Prompts of a batch.
        stages: `(share of the steps, documents)`: from that share on.
        steps: Of the run.
        seed: Of the samples.

    Example:
        >>> stream = PromptStream(2, ((0.0, 1), (0.5, 4)), 10, seed=0)
        >>> stream.batch(4).documents, stream.batch(5).documents
        (1, 4)
    """

    def __init__(
        self, batch_size: int, stages: tuple[tuple[float, int], ...], steps: int, *, seed: int
    ) -> None:
        self.batch_size = batch_size
        self.stages = stages
        self.steps = steps
        self.seed = seed

    def batch(self, number: int) -> Prompts:
        """Return batch `number`, from 0."""
        documents = [n for share, n in self.stages if number >= share * self.steps][-1]
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + number)
        return draw_prompts(self.batch_size, documents, generator, number=number)


class _QuarterRope(Positions):
    """Rotary positions on the first quarter of each head; the rest sees no positions."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.width = head_dim // 4
        self.rope = RopePositions(self.width)

    def rotate(
        self, q: Tensor, k: Tensor, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate a part of queries and keys."""
        width = self.width
        parts = self.rope.rotate(q[..., :width], k[..., :width], q_ids, k_ids, q_index=q_index)
        turned = [torch.cat((a, b[..., width:]), -1) for a, b in zip(parts, (q, k), strict=True)]
        return turned[0], turned[1]


class _ReadAttention(MultiHeadAttention):
    """Attention that keeps its signal logits of the last pass."""

    layout: BlockLayout
    signals: Tensor

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """Attend, and keep the signal logits."""
        self.signals = signal_logits(q, k, self.layout, scale=self.head_dim**-0.5)
        return super().mix(q, k, v, mask, **options)


class PromptDecoder(nn.Module):
    """A small decoder on the prompts of `draw_prompts`, with block or full causal attention.

    Full attention has positions 0 to T - 1. Keys start equal to queries, so that equal tokens
    attend to each other from the beginning.

    Args:
        blocks: Attention by blocks; else full causal.
        dim: Model width.
        num_layers: Layers.
        num_heads: Heads of each; rotary positions on a quarter of their width.
        hidden_dim: Of the feed-forward blocks.

    Shape:
        - prompts: as `Prompts`.
        - output: last hidden states `(B, T, dim)`, and for each layer its scores `(B, N)`.

    Example:
        >>> prompts = draw_prompts(2, 3, torch.Generator().manual_seed(0))
        >>> hidden, scores = PromptDecoder(True, dim=32, num_layers=2)(prompts)
        >>> hidden.shape, scores[1].shape
        (torch.Size([2, 40, 32]), torch.Size([2, 3]))

    Source: Gupta et al., NeurIPS 2025.
    Deviations: a decoder of four layers on random tokens.
    """

    def __init__(
        self,
        blocks: bool,
        *,
        dim: int = 64,
        num_layers: int = 4,
        num_heads: int = 4,
        hidden_dim: int = 128,
    ) -> None:
        super().__init__()
        self.blocks = blocks
        feed_forward = {"name": "gelu", "hidden_dim": hidden_dim}
        self.decoder = Decoder(
            VOCAB, dim, num_layers, num_heads, positions="none", feed_forward=feed_forward
        )
        self.positions = _QuarterRope(dim // num_heads)
        for layer in self.decoder.layers:
            attention = _ReadAttention(dim, num_heads)
            attention.to_k.load_state_dict(attention.to_q.state_dict())
            layer.attention = attention

    def num_parameters(self) -> int:
        """Return how many numbers are trained."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, prompts: Prompts) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states and the scores of all layers."""
        layout = layout_of(prompts.documents)
        index = torch.arange(layout.num_tokens)[None]
        ids = 1 + (layout.position_ids(OFFSET)[None] if self.blocks else index)
        mask = layout.mask() if self.blocks else None
        x = self.decoder.embedding(prompts.tokens)
        scores = []
        for layer in self.decoder.layers:
            attention = cast(_ReadAttention, layer.attention)
            attention.layout = layout
            x = layer(
                x, mask, causal=not self.blocks, positions=self.positions, ids=ids, index=index
            )
            scores.append(block_scores(attention.signals, layout))
        return self.decoder.final_norm(x), scores

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token for some hidden states."""
        return self.decoder.head(hidden)  # type: ignore[no-any-return]


def prompt_loss(
    model: PromptDecoder,
    prompts: Prompts,
    *,
    layer: int,
    aux_weight: float,
    stand_in_weight: float,
    temperature: float,
) -> Tensor:
    """Return the loss of a batch: answer, ranking, and the two that stand in for pre-training.

    These are the loss of each token of the repeated query, and that of each document's closing id.

    Args:
        model: To be trained.
        prompts: A batch.
        layer: Whose scores are ranked.
        aux_weight: Of the ranking loss; 0 leaves it out.
        stand_in_weight: Of each of the other two.
        temperature: Of the ranking loss.
    """
    hidden, scores = model(prompts)
    tokens, length = prompts.tokens, prompts.tokens.shape[1]

    def next_token(places: list[int]) -> Tensor:
        wanted = tokens[:, [place + 1 for place in places]]
        return F.cross_entropy(model.logits(hidden[:, places]).flatten(0, 1), wanted.flatten())

    answer = F.cross_entropy(model.logits(hidden[:, -1]), prompts.answers)
    repeated = next_token(list(range(length - QUERY - 3, length - 3)))
    first = QUERY + 2 + WORDS + 1  # the last word of the first document
    closing = next_token([first + (WORDS + 3) * k for k in range(prompts.documents)])
    loss = answer + stand_in_weight * (repeated + closing)
    if aux_weight:
        ranking = BlockRankingLoss(temperature=temperature)
        loss = loss + aux_weight * ranking(scores[layer], prompts.relevant[:, None].tolist())
    return loss


@torch.no_grad()
def measure_prompts(
    model: PromptDecoder, documents: int, count: int, generator: torch.Generator
) -> tuple[list[float], float]:
    """Return the percent of prompts with the relevant document first, by layer and decoded.

    Args:
        model: Trained or not.
        documents: Of each prompt.
        count: Prompts.
        generator: Of the samples.
    """
    was = model.training
    model.eval()
    read = torch.zeros(len(model.decoder.layers))
    decoded = 0.0
    for begin in range(0, count, 128):
        prompts = draw_prompts(min(128, count - begin), documents, generator)
        hidden, scores = model(prompts)
        read += torch.stack([(s.argmax(1) == prompts.relevant).sum() for s in scores])
        answer = model.logits(hidden[:, -1]).argmax(1)
        decoded += float((answer == prompts.answers).sum())
    model.train(was)
    return (100 * read / count).tolist(), 100 * decoded / count
