"""What the recipe on smoothing over sentences trains and measures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.errors import DataError, GossamerError
from gossamer.files import read_text
from gossamer.measures import corpus_bleu, sentence_bleu
from gossamer.models import Seq2Seq, shift_right
from gossamer.optim import warmup_linear
from gossamer.recipes._outside import outside_data
from gossamer.recipes._restaurant_texts import GUARD, Input, Texts, load_texts
from gossamer.recipes._timing import cpu_seconds
from gossamer.retrieval import NeighborTable, mine_neighbors
from gossamer.tasks import EOS, PairBatch, PairStream, Vocabulary, split_words
from gossamer.tasks.base import IGNORED
from gossamer.tasks.pair_batches import pad_rows
from gossamer.tasks.words import UNKNOWN

if TYPE_CHECKING:
    from gossamer.recipes.semantic_smoothing import Config
    from gossamer.train.logging import Logger

__all__ = ["Data", "describe", "load", "measure", "mine", "train"]

ROWS = 256  # of a batch without gradients
LONGEST = 80  # tokens that a target may have


@dataclass(frozen=True)
class Data:
    """The texts as tokens: words first, then one for each slot with its value."""

    texts: Texts
    words: Vocabulary
    slots: dict[tuple[str, str], int]

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.words) + len(self.slots)

    def source(self, slots: Input) -> list[int]:
        """Return the tokens of an input."""
        return [self.slots[pair] for pair in slots]

    def target(self, text: str) -> list[int]:
        """Return the tokens of a sentence without an end."""
        return self.words.encode(text.split())[: LONGEST - 1]

    def text(self, tokens: Tensor) -> str:
        """Return produced tokens as a sentence."""
        produced = tokens.tolist()
        produced = produced[: produced.index(EOS)] if EOS in produced else produced
        symbols = self.words.symbols
        return " ".join(symbols[t] for t in produced if UNKNOWN <= t < len(symbols))


@cache
def load(name: str) -> Data:
    """Return the data with the vocabulary of the training sentences."""
    texts = load_texts(name)
    words = Vocabulary(text.split() for text in texts.corpus)
    seen = [source for source, _ in (*texts.pairs, *texts.test)]
    slots = sorted({pair for source in seen for pair in source})
    return Data(texts, words, {pair: n for n, pair in enumerate(slots, start=len(words))})


# --- neighbours ---

MINED: dict[str, dict[str, Any]] = {
    "cosine": {"rerank": None},
    "method": {"rerank": "bleu5"},
    "guarded": {"rerank": "bleu5", "num_retrieved": 300, "keep_tokens": GUARD},
}


@cache
def neighbors(name: str, arm: str) -> NeighborTable:
    """Return the table of an arm; every neighbour found is kept, whatever its BLEU."""
    texts = load_texts(name)
    targets = [target for _, target in texts.pairs]
    return mine_neighbors(targets, corpus=texts.corpus, min_bleu=0.0, **MINED[arm])


def draws(config: Config, arm: str, seed: int) -> Callable[[int], list[int]]:
    """Return the function that gives for each pair in an epoch a sentence of the corpus, or -1."""
    texts = load(config.data).texts
    rows = len(texts.pairs)
    if arm in MINED:
        table = neighbors(config.data, arm)
        return lambda epoch: table.sample(
            range(rows), epoch=epoch, random_state=seed, chance=config.alpha
        ).tolist()
    chance = config.alpha if arm == "random" else 0.0

    def at_random(epoch: int) -> list[int]:
        draw = np.random.default_rng((seed, epoch))
        picked = draw.integers(0, len(texts.corpus), rows)
        places: list[int] = np.where(draw.random(rows) < chance, picked, -1).tolist()
        return places

    return at_random


class Stream:
    """Batches in which drawn sentences stand in the place of targets, of similar length."""

    def __init__(self, config: Config, data: Data, arm: str, seed: int) -> None:
        self.sources = [data.source(source) for source, _ in data.texts.pairs]
        self.targets = [data.target(target) for _, target in data.texts.pairs]
        self.corpus = [data.target(text) for text in data.texts.corpus]
        self.places = draws(config, arm, seed)
        self.options = {"batch_size": config.batch_size, "seed": seed}
        self.per_epoch = -(-len(self.sources) // config.batch_size)
        self._epoch = -1

    def batch(self, number: int) -> PairBatch:
        """Return batch `number`, from 0."""
        epoch = number // self.per_epoch
        if epoch != self._epoch:
            self._epoch = epoch
            drawn = zip(self.targets, self.places(epoch), strict=True)
            chosen = [target if at < 0 else self.corpus[at] for target, at in drawn]
            self._pairs = PairStream(self.sources, chosen, **self.options)
        return self._pairs.batch(number)


# --- training ---


def train(config: Config, arm: str, seed: int, log: Logger) -> Seq2Seq:
    """Train the model of one arm; the last step is kept."""
    data = load(config.data)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _fit(config, data, arm, seed, log)


def _fit(config: Config, data: Data, arm: str, seed: int, log: Logger) -> Seq2Seq:
    model = Seq2Seq(
        data.vocab_size,
        config.dim,
        config.layers,
        config.heads,
        source_positions="none",
        feed_forward={"name": "gelu", "hidden_dim": config.hidden_dim},
        norm={"name": "pre", "kind": "layer"},
        dropout=config.dropout,
        max_length=LONGEST,
    )
    stream = Stream(config, data, arm, seed)
    loss_of = token_loss(config, arm, stream.targets, data.vocab_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    schedule = warmup_linear(config.steps, warmup=config.warmup / config.steps)
    total = 0.0
    for step in range(config.steps):
        batch = stream.batch(step)
        optimizer.param_groups[0]["lr"] = config.lr * schedule(step)
        logits = model(batch.source, shift_right(batch.labels), mask=batch.mask)
        real = batch.labels != IGNORED
        loss = loss_of(logits[real], batch.labels[real])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += float(loss.detach())
        if not math.isfinite(total):
            raise GossamerError(
                f"the loss must be finite; got {float(loss.detach())} at step {step + 1} of "
                f"{config.steps}. Lower lr in --config."
            )
        if (step + 1) % config.log_every == 0:
            share = (step + 1) / config.steps
            log.log(step + 1, {"progress": share, "loss": total / config.log_every})
            total = 0.0
    return model.eval()


def token_loss(
    config: Config, arm: str, targets: list[list[int]], vocab_size: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of tokens: cross-entropy, smoothed where the arm says so."""
    if arm == "token":
        return lambda logits, labels: F.cross_entropy(
            logits, labels, label_smoothing=config.token_alpha
        )
    if arm != "unigram":
        return F.cross_entropy
    counts = Counter(token for target in targets for token in [*target, EOS])
    shares = torch.zeros(vocab_size)
    for token, count in counts.items():
        shares[token] = count
    shares /= shares.sum()

    def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        spread = -(log_p @ shares).mean()
        return (1 - config.token_alpha) * F.nll_loss(log_p, labels) + config.token_alpha * spread

    return smoothed


# --- measures ---


@torch.no_grad()
def measure(model: Seq2Seq, data: Data) -> dict[str, float]:
    """Return BLEU with and without beams, the loss of the references, and values found."""
    sources = [data.source(source) for source, _ in data.texts.test]
    references = [texts for _, texts in data.texts.test]
    tokens = pad_rows(sources, 0)
    mask = tokens != 0
    found = {}
    for name, beams in (("greedy", 1), ("beam", 4)):
        made = model.generate(tokens, mask=mask, max_new_tokens=LONGEST, num_beams=beams)
        texts = [data.text(row) for row in made]
        found[name] = corpus_bleu(texts, references)
    pairs = zip(texts, data.texts.values, strict=True)
    named = [value in text for text, own in pairs for value in own]
    return {**found, "nll": reference_loss(model, data), "values": 100.0 * sum(named) / len(named)}


def reference_loss(model: Seq2Seq, data: Data) -> float:
    """Return the mean loss of a token of the references. Unit: nats."""
    pairs = [(s, data.target(t)) for s, texts in data.texts.test for t in texts]
    pairs.sort(key=lambda pair: len(pair[1]))
    stream = PairStream([data.source(s) for s, _ in pairs], [t for _, t in pairs], ROWS)
    total = 0.0
    for begin in range(0, len(pairs), ROWS):
        batch = stream.take(np.arange(begin, min(begin + ROWS, len(pairs))))
        logits = model(batch.source, shift_right(batch.labels), mask=batch.mask)
        total += float(F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="sum"))
    return total / int((stream.labels != IGNORED).sum())


def describe(config: Config, arm: str) -> dict[str, float]:
    """Return figures of the neighbours of an arm, and a mark if the data is the stand-in."""
    found = {"generated": 1.0} if load(config.data).texts.generated else {}
    if arm in MINED:
        table = neighbors(config.data, arm)
        found |= {"without": 100.0 * table.to_dict()["share_without"], "overlap": overlap(table)}
    return found


def mine(config: Config) -> dict[str, float]:
    """Return what mining takes, and how near the neighbours are with BLEU and without."""
    sentences = mining_sentences(config.mining_data, config.mining_sentences)
    seconds = cpu_seconds(lambda: mine_neighbors(sentences, min_bleu=0.0))
    found = describe(config, "method")
    gain = found["overlap"] - overlap(neighbors(config.data, "cosine"))
    return {**found, "mining_seconds": seconds, "rerank_gain": gain}


def overlap(table: NeighborTable) -> float:
    """Return the mean BLEU of up to five words of all neighbours."""
    scores = [
        sentence_bleu(table.corpus[place], target, max_order=5)
        for target, own in zip(table.targets, table.indices.tolist(), strict=True)
        for place in own
        if place >= 0
    ]
    return float(np.mean(scores))


def mining_sentences(name: str, count: int) -> list[str]:
    """Return sentences to mine in: the English ones of tatoeba_zh_en, or words at random."""
    try:
        folder = outside_data(name)
    except DataError:
        draw = np.random.default_rng(0)
        words = np.array([f"w{n}" for n in range(4000)])
        chances = 1 / np.arange(1, 4001)
        sizes = draw.integers(4, 12, count)
        return [" ".join(draw.choice(words, n, p=chances / chances.sum())) for n in sizes]
    lines = read_text(folder / "cmn.tsv.gz").splitlines()
    texts = dict.fromkeys(" ".join(split_words(line.split("\t")[0].lower())) for line in lines)
    return list(texts)[:count]
