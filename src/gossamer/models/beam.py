"""Greedy decoding and beam search of an encoder-decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import DataError

if TYPE_CHECKING:
    from gossamer.models.seq2seq import Seq2Seq, SourceState

__all__ = ["beam_search"]


@torch.no_grad()
def beam_search(
    model: Seq2Seq,
    source: Tensor,
    *,
    mask: Tensor | None = None,
    max_new_tokens: int,
    num_beams: int = 1,
    eos: int = 1,
) -> Tensor:
    r"""Return for each source the target with the highest log-probability for each token.

    Hypotheses are compared by $\frac1n \sum_{t \le n} \log p(y_t \mid y_{<t}, x)$, where n counts
    the end token. A finished one keeps its place as long as its score does; a sample is done when
    all its hypotheses are finished. With one beam this is greedy decoding. The model is set to
    evaluation mode meanwhile, and the source is encoded once.

    Args:
        model: A `Seq2Seq`.
        source: `(B, S)`, integers.
        mask: `(B, S)`, boolean, True = a real token. Default all.
        max_new_tokens: Most tokens of a target, the end token too. Range: >= 1.
        num_beams: Hypotheses for each source. Range: >= 1. Default 1.
        eos: Token that begins and ends a target. Default 1.

    Returns:
        The targets, `(B, n)` with n <= `max_new_tokens`; what comes after an `eos` is `eos`.

    Raises:
        ConfigError: If a number is out of its range.
        DataError: If `max_new_tokens` is more than the model's `max_length`.

    Example:
        >>> from gossamer.models import Seq2Seq
        >>> model = Seq2Seq(14, 16, 1, 2, max_length=8)
        >>> beam_search(model, torch.tensor([[4, 5]]), max_new_tokens=3, num_beams=2).shape[0]
        1

    Source: standard beam search; score divided by length as in Wu et al., *Google's Neural Machine
        Translation System*, 2016, section 7, with the exponent 1.
    Deviations: no penalty for source words that are not covered.
    """
    check_range(max_new_tokens, "max_new_tokens", low=1, integer=True)
    check_range(num_beams, "num_beams", low=1, integer=True)
    check_range(eos, "eos", low=0, high=model.config["vocab_size"] - 1, integer=True)
    if model.max_length is not None and max_new_tokens > model.max_length:
        raise DataError(
            f"max_new_tokens must be at most the model's max_length = {model.max_length}; got "
            f"{max_new_tokens}. Ask for fewer tokens."
        )
    was_training = model.training
    model.eval()
    try:
        return _search(model, model.encode(source, mask), max_new_tokens, num_beams, eos)
    finally:
        model.train(was_training)


def _search(model: Seq2Seq, state: SourceState, limit: int, beams: int, eos: int) -> Tensor:
    batch, device = len(state), state.states.device
    first = torch.arange(batch, device=device)[:, None] * beams  # (B, 1)
    if beams > 1:
        state = state.select(torch.arange(batch, device=device).repeat_interleave(beams))
    tokens = torch.full((batch * beams, 1), eos, device=device)
    totals = torch.full((batch, beams), -torch.inf, device=device)
    totals[:, 0] = 0.0  # all hypotheses are equal at first, so only one may branch
    lengths = torch.zeros(batch, beams, device=device)
    done = torch.zeros(batch, beams, dtype=torch.bool, device=device)
    cache = model.new_cache()
    for _ in range(limit):
        logits = model.decode(tokens[:, -1:], state, cache=cache)[:, -1]
        log_p = logits.float().log_softmax(-1).view(batch, beams, -1)
        # a finished hypothesis goes on with the end token alone, which costs nothing
        stay = torch.full_like(log_p[0, 0], -torch.inf)
        stay[eos] = 0.0
        sums = totals[..., None] + torch.where(done[..., None], stay, log_p)  # (B, K, V)
        lengths = lengths + ~done
        best = (sums / lengths[..., None]).flatten(1).topk(beams).indices
        parent, token = best // log_p.shape[-1], best % log_p.shape[-1]
        totals = sums.flatten(1).gather(1, best)
        lengths = lengths.gather(1, parent)
        done = done.gather(1, parent) | (token == eos)
        rows = (first + parent).flatten()
        tokens = torch.cat((tokens[rows], token.view(-1, 1)), dim=1)
        if bool(done.all()):
            break
        if beams > 1:
            cache.select(rows)
    winner = first[:, 0] + (totals / lengths).argmax(1)
    return tokens[winner, 1:]
