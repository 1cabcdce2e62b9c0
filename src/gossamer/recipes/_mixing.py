"""What the recipe on head size measures: the fit of one head, and layers that learn a mixture."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.attention import MultiHeadAttention, attention_rank, realize_attention

__all__ = ["TalkingHeads", "fit_head", "mixing_layer", "train_mixing"]


class TalkingHeads(MultiHeadAttention):
    r"""Attention whose heads mix their logits, and their weights, by learned matrices.

    $$W = \mathrm{softmax}(A\,S)\,B \quad\text{over heads}$$

    A baseline of the recipe on head size: logits of several heads add up, so that their rank may
    exceed the size of one head. Both matrices start as the identity.

    Args:
        dim: Model width M.
        num_heads: Attention heads H.
        head_dim: Width D of a head.

    Shape:
        - x and output: `(B, T, M)`.

    Example:
        >>> TalkingHeads(8, 2, head_dim=4)(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])

    Source: Shazeer et al., *Talking-Heads Attention*, 2020, section 4.
    Deviations: no masks, since the task has none.
    """

    def __init__(self, dim: int, num_heads: int, *, head_dim: int) -> None:
        super().__init__(dim, num_heads, head_dim=head_dim)
        self.mix_logits = nn.Parameter(torch.eye(num_heads))
        self.mix_weights = nn.Parameter(torch.eye(num_heads))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **_: Any) -> Tensor:
        """Mix logits over heads, take the softmax, mix weights over heads."""
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        weights = torch.einsum("gh,bhts->bgts", self.mix_logits, logits).softmax(-1)
        return torch.einsum("gh,bhts->bgts", self.mix_weights, weights) @ v


def fit_head(
    x: Tensor,
    target: Tensor,
    head_dim: int,
    *,
    starts: int,
    max_iter: int,
    generator: torch.Generator,
) -> float:
    """Return the least mean Kullback-Leibler divergence of one head's attention from a target.

    Query and key weights are fitted in float64 by L-BFGS from the best logits of their rank, and
    from random starts; the lowest value counts.

    Args:
        x: Tokens in columns, `(M, T)`, float64.
        target: Columns sum to 1, `(T, T)`, float64.
        head_dim: Size of the head.
        starts: Random starts besides the first.
        max_iter: Most steps of L-BFGS from each start.
        generator: Of the random starts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dependent tokens show in the divergence
        first = realize_attention(x, target, head_dim)[:2]
    size = (2, head_dim, x.shape[0])
    points = [torch.stack(first)]
    for _ in range(starts):
        drawn = torch.randn(size, generator=generator, dtype=x.dtype)
        points.append(drawn / math.sqrt(x.shape[0]))
    return min(_descend(x, target, point, max_iter) for point in points)


def _descend(x: Tensor, target: Tensor, start: Tensor, max_iter: int) -> float:
    weights = start.clone().requires_grad_()
    entropy = (target * target.log()).sum(0).mean()

    def divergence() -> Tensor:
        to_q, to_k = weights
        logits = (to_k @ x).mT @ (to_q @ x) / math.sqrt(to_q.shape[0])
        loss: Tensor = entropy - (target * logits.log_softmax(0)).sum(0).mean()
        return loss

    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=max_iter,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = divergence()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return max(float(divergence()), 0.0)  # rounding may leave it a little below 0


def mixing_layer(
    kind: str, dim: int, content: int, num_heads: int, head_dim: int
) -> MultiHeadAttention:
    """Return an untrained layer whose output has the width of the content."""
    layer: MultiHeadAttention
    if kind == "talking":
        layer = TalkingHeads(dim, num_heads, head_dim=head_dim)
    else:
        kv_heads = max(1, num_heads // 4) if kind == "grouped" else None
        layer = MultiHeadAttention(dim, num_heads, head_dim=head_dim, num_kv_heads=kv_heads)
    layer.to_out = nn.Linear(num_heads * head_dim, content, bias=False)
    return layer


def train_mixing(
    layer: MultiHeadAttention,
    target: Tensor,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    generator: torch.Generator,
) -> dict[str, float]:
    """Train a layer to mix random contents by fixed weights; return its error and logit rank.

    The input of a token is its content, and its position as a scaled unit vector. The error is the
    squared error over the squared size of the answers, on new samples.

    Args:
        layer: From `mixing_layer`.
        target: P, whose rows sum to 1, `(T, T)`.
        steps: Of Adam.
        batch_size: Samples for each step.
        lr: Falls to 0 along a cosine.
        generator: Of the samples.
    """
    length, content = len(target), layer.to_out.out_features
    places = torch.eye(length) * math.sqrt(length) / 2

    def draw(count: int) -> tuple[Tensor, Tensor]:
        samples = torch.randn(count, length, content, generator=generator)
        return torch.cat((samples, places.expand(count, -1, -1)), -1), target @ samples

    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x, answer = draw(batch_size)
        optimizer.zero_grad()
        F.mse_loss(layer(x), answer).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        x, answer = draw(500)
        error = float((layer(x) - answer).square().sum() / answer.square().sum())
        q, k = (
            part(x[:1]).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
            for part in (layer.to_q, layer.to_k)
        )
        rank = attention_rank(q, k).logit_rank.double().mean()
    return {"error": error, "logit_rank": float(rank)}
