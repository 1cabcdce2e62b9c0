"""Log-sum-exp over very many columns without the matrix of scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_range, check_shape

__all__ = ["streamed_logsumexp"]


def streamed_logsumexp(
    queries: Tensor, keys: Tensor, *, chunk_size: int = 4096, mask: Tensor | None = None
) -> Tensor:
    r"""Return $\log \sum_l \exp(q_i \cdot k_l)$ for every query, by chunks of keys.

    The scores of one chunk exist at a time, in the forward pass and again for the exact gradient:
    memory grows with `B * chunk_size`, not with `B * L`.

    Args:
        queries: Rows; divide them by a temperature before.
        keys: Columns.
        chunk_size: Keys at a time. Range: >= 1. Default 4096.
        mask: Boolean, True = takes part. Default all. A row without any gives -inf and gradient 0.

    Shape:
        - queries: `(B, D)`; keys: `(L, D)`; mask: `(B, L)`; output: `(B,)`, float32 or better.

    Raises:
        ShapeError: If the shapes do not fit.
        ConfigError: If `chunk_size` is out of its range.

    Example:
        >>> q, k = torch.randn(3, 4), torch.randn(10, 4)
        >>> torch.allclose(streamed_logsumexp(q, k, chunk_size=4), (q @ k.T).logsumexp(1))
        True

    Source: the online softmax of Milakov and Gimelshein, 2018.
    Deviations: none
    """
    check_range(chunk_size, "chunk_size", low=1, integer=True)
    check_shape(queries, (None, None), "queries")
    check_shape(keys, (None, queries.shape[1]), "keys")
    if mask is not None:
        check_shape(mask, (len(queries), len(keys)), "mask")
    out: Tensor = _Streamed.apply(queries, keys, mask, chunk_size)  # type: ignore[no-untyped-call]
    return out


def _scores(queries: Tensor, keys: Tensor, mask: Tensor | None, part: slice) -> Tensor:
    scores = queries @ keys[part].T
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return scores if mask is None else scores.masked_fill(~mask[:, part], -torch.inf)


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, mask: Tensor | None, chunk_size: int
    ) -> Tensor:
        wide = torch.promote_types(queries.dtype, torch.float32)
        total = torch.full((len(queries),), -torch.inf, dtype=wide, device=queries.device)
        for begin in range(0, len(keys), chunk_size):
            scores = _scores(queries, keys, mask, slice(begin, begin + chunk_size))
            total = torch.logaddexp(total, scores.logsumexp(1))
        ctx.save_for_backward(queries, keys, mask, total)
        ctx.chunk_size = chunk_size
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        queries, keys, mask, total = ctx.saved_tensors
        # a row that saw nothing has -inf - (-inf); it gets no gradient
        safe = torch.where(total.isfinite(), total, torch.inf)
        to_queries = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
        to_keys = torch.empty_like(keys) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(keys), ctx.chunk_size):
            part = slice(begin, begin + ctx.chunk_size)
            scores = _scores(queries, keys, mask, part)
            weights = ((scores - safe[:, None]).exp() * grads[0][:, None]).to(queries.dtype)
            if to_queries is not None:
                to_queries += weights @ keys[part]
            if to_keys is not None:
                to_keys[part] = weights.T @ queries
        return to_queries, to_keys, None, None
