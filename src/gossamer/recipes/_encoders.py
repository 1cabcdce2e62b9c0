"""What the recipe on encoders needs: a baseline's positions, segments at the input, rank, time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.attention import attention_rank
from gossamer.models import Encoder
from gossamer.positions import Positions, T5Positions
from gossamer.recipes._timing import cpu_seconds

__all__ = ["SegmentsAtInput", "TupePositions", "measure_rank", "measure_times"]


class TupePositions(Positions):
    r"""Absolute positions with projections of their own, plus T5's bias: a baseline of DIET.

    $$b_{ij} = \frac{(p_i U_Q) \cdot (p_j U_K)}{\sqrt{2 D}} + R[\mathrm{bucket}(i - j)]$$

    The content is to be scaled by the same $1 / \sqrt{2 D}$. Table and projections serve all
    layers.

    Args:
        dim: Model width.
        num_heads: Attention heads; a divisor of `dim`.
        max_length: Largest position id. Unit: tokens.

    Shape:
        - ids: `(B, T)` or `(1, T)`; output of `bias`: `(B or 1, H, T, S)`.

    Example:
        >>> ids = torch.arange(1, 5)[None]
        >>> TupePositions(16, 2, 8).bias(ids, ids, q_index=ids - 1).shape
        torch.Size([1, 2, 4, 4])

    Source: Ke et al., *Rethinking Positional Encoding in Language Pre-training*, ICLR 2021,
        section 3.1 (TUPE-R).
    Deviations: no [CLS] token, so nothing to untie from the positions.
    """

    def __init__(self, dim: int, num_heads: int, max_length: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.table = nn.Embedding(max_length + 1, dim)
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.relative = T5Positions(num_heads, bidirectional=True)

    def bias(self, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor) -> Tensor:
        """Return the product of the projected positions plus the relative bias."""
        q = self._heads(self.to_q(self.norm(self.table(q_ids))))
        k = self._heads(self.to_k(self.norm(self.table(k_ids))))
        product: Tensor = q @ k.mT / math.sqrt(2 * q.shape[-1])
        return product + self.relative.bias(q_ids, k_ids, q_index=q_index)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)


class SegmentsAtInput(nn.Module):
    """An encoder that reads the ids of a task with segments and embeds these at its input.

    Args:
        encoder: Built with `num_segments`, and with positions that it counts itself.

    Shape:
        - tokens: `(B, T)`; position_ids: `(B, T, 2)`, the second level segment number + 1.
        - output: `(B, T, V)`.

    Example:
        >>> encoder = Encoder(9, 8, 1, 2, positions="none", num_segments=2)
        >>> ids = torch.tensor([[[1, 1], [2, 2]]])
        >>> SegmentsAtInput(encoder)(torch.tensor([[3, 4]]), ids).shape
        torch.Size([1, 2, 9])

    Source: Devlin et al., *BERT*, NAACL 2019, section 3.
    Deviations: none
    """

    causal = False

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    @property
    def device(self) -> torch.device:
        """Where the encoder is."""
        return self.encoder.device

    def num_parameters(self) -> int:
        """Return how many numbers are trained."""
        return self.encoder.num_parameters()

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Return the logits of every token."""
        logits: Tensor = self.encoder(tokens, segments=position_ids[..., 1] - 1)
        return logits


def measure_rank(positions: Positions, *, length: int, dim: int, head_dim: int) -> int:
    """Return the rank of one head's logits for random tokens and projections.

    Singular values below 1e-5 of the largest do not count.

    Args:
        positions: An encoding for one head, with random tables.
        length: Unit: tokens.
        dim: Model width.
        head_dim: Width of the head.

    Example:
        >>> from gossamer.positions import NoPositions
        >>> measure_rank(NoPositions(), length=12, dim=8, head_dim=4)
        4
    """
    x = torch.randn(1, 1, length, dim)
    to_q, to_k = torch.randn(2, dim, head_dim) / dim**0.5
    ids = torch.arange(1, length + 1)[None]
    with torch.no_grad():
        added = positions.embed(ids)
        bias = positions.bias(ids, ids, q_index=ids - 1)
    x = x if added is None else x + added[:, None]
    return int(attention_rank(x @ to_q, x @ to_k, bias=bias, tol=1e-5).logit_rank)


def measure_times(
    models: Sequence[nn.Module], tokens: Tensor, *, forward_repeats: int, step_repeats: int
) -> dict[str, float]:
    """Return the time of the first of two models over that of the second.

    `forward` is a pass in evaluation, `step` a training step of AdamW. The models run in turn,
    and change places in each round; a figure is the ratio of two medians of CPU time.

    Args:
        models: Two.
        tokens: Their input, `(B, T)`; in training also what they are to put out.
        forward_repeats: Timed passes of each.
        step_repeats: Timed steps of each.

    Example:
        >>> models = [Encoder(9, 8, 1, 2, positions="none") for _ in range(2)]
        >>> tokens = torch.zeros(1, 4, dtype=torch.long)
        >>> sorted(measure_times(models, tokens, forward_repeats=2, step_repeats=1))
        ['forward', 'step']
    """
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for m in models]

    @torch.no_grad()
    def forward(number: int) -> None:
        models[number](tokens)

    def step(number: int) -> None:
        optimizers[number].zero_grad()
        loss = F.cross_entropy(models[number](tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[number].step()

    for model in models:
        model.eval()
    ratios = {"forward": _ratio(forward, forward_repeats)}
    for model in models:
        model.train()
    return {**ratios, "step": _ratio(step, step_repeats)}


def _ratio(work: Callable[[int], None], repeats: int) -> float:
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in (0, 1):
        work(number)  # warm-up; the product of DIET-ABS is kept from here on
    for repeat in range(repeats):
        for number in (0, 1) if repeat % 2 else (1, 0):
            seconds[number].append(cpu_seconds(partial(work, number)))
    return statistics.median(seconds[0]) / statistics.median(seconds[1])
