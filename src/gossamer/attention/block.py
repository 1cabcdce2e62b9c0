"""Attention over a prompt with many documents, each of which sees the instruction and itself."""

from __future__ import annotations

import functools
import math
from typing import Literal, overload

import torch
from torch import Tensor

from gossamer.attention import _block_engines as engines
from gossamer.attention._block_engines import Lengths
from gossamer.attention.block_layout import BlockLayout
from gossamer.attention.core import attend, check_heads
from gossamer.checks import check_choice, check_range
from gossamer.errors import DataError, ShapeError, UnsupportedError

__all__ = [
    "attend_documents",
    "attend_last",
    "block_attention",
    "block_scores",
    "grouped_logits",
    "signal_logits",
]

ENGINES = ("auto", "dense", "sdpa", "merge", "flex")


@overload
def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = ...,
    engine: str = ...,
    return_signal_logits: Literal[False] = ...,
) -> Tensor: ...


@overload
def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = ...,
    engine: str = ...,
    return_signal_logits: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    engine: str = "auto",
    return_signal_logits: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attend as a `BlockLayout` says, in time that grows with the number of documents.

    $$o_i = \sum_{j \in V(i)} \mathrm{softmax}_{j \in V(i)}(s\, q_i^\top k_j)\, v_j$$

    V(i) is the row of token i in `layout.mask()`. For prompts that hold many candidates, to rank
    them or to answer from them. All engines give one result to rounding: `"dense"` is the plain
    form with a T x T mask, for checks; `"sdpa"` makes three calls of PyTorch's attention, with
    documents of like length as one batch; `"merge"` attends to shared and own keys apart and
    joins the two by their log-sum-exp, without a copy of the instruction for each document;
    `"flex"` is compiled FlexAttention.

    Padding is neither read nor written: its rows are 0, whatever it holds. The caller turns
    queries and keys by `layout.position_ids`.

    Args:
        q: Queries.
        k: Keys; fewer heads than queries have are shared by groups of them.
        v: Values.
        layout: Blocks of the prompt, the same for all samples.
        scale: Factor s on the logits. Range: > 0. Default `1 / sqrt(D)`.
        engine: `"auto"`, `"dense"`, `"sdpa"`, `"merge"` (CPU, inference; without the private
            operator that it needs, `"sdpa"`) or `"flex"` (on CPUs inference). Default `"auto"`:
            `"merge"` where it works, else `"sdpa"`.
        return_signal_logits: Return the signal logits as well, for `block_scores`. They need
            documents. Default false.

    Shape:
        - q: `(B, H, T, D)`; k: `(B, H_kv, T, D)`; v: `(B, H_kv, T, D_v)`, T `layout.num_tokens`.
        - output: `(B, H, T, D_v)`; signal logits `(B, H, signals, tokens of documents)`.

    Raises:
        ShapeError: If q, k and v do not fit the layout or each other.
        UnsupportedError: If the engine cannot work on this device, or has no gradient there.
        DataError: If there is no document to give signal logits for.

    Example:
        >>> layout = BlockLayout([3, 2, 4, 2], pad_multiple=1)
        >>> q = torch.randn(1, 2, 11, 8)
        >>> out, logits = block_attention(q, q, q, layout, return_signal_logits=True)
        >>> out.shape, logits.shape
        (torch.Size([1, 2, 11, 8]), torch.Size([1, 2, 2, 6]))

    Source: Gupta et al., *Scalable In-context Ranking with Generative Models*, NeurIPS 2025,
        section 4.
    Deviations: all engines scale the signal logits, as the paper does; in the official code one
        of its back-ends does not.
    """
    check_heads(q, k, v)
    check_choice(engine, ENGINES, "engine")
    if scale is not None:
        check_range(scale, "scale", low=0.0, open_low=True)
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] != layout.num_tokens:
            raise ShapeError(
                f"{name} must have the {layout.num_tokens} slots of the layout; got "
                f"{x.shape[2]}. Lay out this prompt, with the padding it has."
            )
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    chosen = _choose(engine, q, k, v)
    if chosen == "dense":
        out = _dense(q, k, v, layout, factor)
    else:
        work = {"sdpa": engines.sdpa, "merge": engines.merge, "flex": engines.flex}[chosen]
        packed = [_pack(x, layout) for x in (q, k, v)]
        out = work(packed[0], packed[1], packed[2], layout.lengths, factor)
        out = _unpack(out, layout)
    if not return_signal_logits:
        return out
    return out, signal_logits(q, k, layout, scale=factor)


def signal_logits(q: Tensor, k: Tensor, layout: BlockLayout, *, scale: float) -> Tensor:
    """Return the logits of the signal tokens on the tokens of documents.

    Args:
        q: Queries, `(B, H, T, D)`.
        k: Keys, `(B, H_kv, T, D)`.
        layout: Blocks of the prompt.
        scale: Factor on the logits.

    Raises:
        DataError: If there is no document.
    """
    _check_documents(layout)
    signals, documents = _signal_places(layout, q.device)
    return grouped_logits(q[:, :, signals], k[:, :, documents], scale=scale)


def grouped_logits(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Return the logits of queries `(B, H, T, D)` on keys `(B, H_kv, S, D)`, `(B, H, T, S)`."""
    rows = q.reshape(*k.shape[:2], -1, *q.shape[2:])  # (B, H_kv, H / H_kv, T, D)
    return (scale * rows @ k[:, :, None].transpose(-1, -2)).flatten(1, 2)


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, shared: tuple[Tensor, Tensor], lengths: Lengths, scale: float
) -> Tensor:
    """Attend from some documents of a prompt to its instruction and to themselves.

    Args:
        q: Queries of the documents' tokens, one document after the other, `(B, H, S, D)`.
        k: Their keys, `(B, H_kv, S, D)`.
        v: Their values.
        shared: Keys and values of the instruction, `(B, H_kv, L0, D)`.
        lengths: Tokens of each document.
        scale: Factor on the logits.
    """
    merged = _choose("auto", q, k, v) == "merge"
    work = engines.merge_documents if merged else engines.sdpa_documents
    folded, k_own, v_own = engines.fold(q, k, v)
    _, k_shared, v_shared = engines.fold(q, *shared)
    around = (1, *lengths, 1)  # the engines leave out the first and the last
    return work(folded, (k_shared, k_own), (v_shared, v_own), around, scale).reshape(q.shape)


def attend_last(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend causally from the last tokens of a prompt, `(B, H, T, D)`, to all, `(B, H_kv, S, D)`.

    Args:
        q: Queries of the last tokens.
        k: Keys of all tokens.
        v: Their values.
        scale: Factor on the logits.
    """
    merged = _choose("auto", q, k, v) == "merge" and k.shape[2] > q.shape[2]
    work = engines.merge_last if merged else engines.sdpa_last
    return work(*engines.fold(q, k, v), scale).reshape(q.shape)


def block_scores(logits: Tensor, layout: BlockLayout, *, aggregate: str = "sum") -> Tensor:
    r"""Turn signal logits into one score for each document.

    $$S_k = \frac{1}{HR}\sum_{h,r}\ \sum_{j \in \text{document } k} \mathrm{softmax}_j(z_{hrj})$$

    The softmax goes over the tokens of all documents together, in float32 or more, so that with
    `"sum"` scores are at least 0 and sum to 1. They compare documents of one prompt, not of two.

    Args:
        logits: What `block_attention` returns with `return_signal_logits`.
        layout: Blocks of the prompt.
        aggregate: Over the tokens of a document: `"sum"`, `"mean"` or `"max"`; the last two do
            not favour long documents. Default `"sum"`, the paper's.

    Shape:
        - logits: `(B, H, signals, tokens of documents)`.
        - output: `(B, documents)`, float32 or more.

    Raises:
        ShapeError: If the logits are not those of the layout.
        DataError: If there is no document.

    Example:
        >>> layout = BlockLayout([3, 2, 2, 2], pad_multiple=1)
        >>> block_scores(torch.zeros(1, 4, 2, 4), layout).tolist()
        [[0.5, 0.5]]

    Source: Gupta et al., NeurIPS 2025, section 4.
    Deviations: the mean over signal tokens, as in the official code; the paper's text has their
        sum, which gives the same order.
    """
    check_choice(aggregate, ("sum", "mean", "max"), "aggregate")
    _check_documents(layout)
    lengths = torch.tensor(layout.lengths[1:-1], device=logits.device)
    total = sum(layout.lengths[1:-1])
    if logits.dim() != 4 or logits.shape[-1] != total:
        raise ShapeError(
            f"logits must have the shape (batch, heads, signals, {total}), one column for each "
            f"token of a document; got {tuple(logits.shape)}. Pass what block_attention returns."
        )
    weights = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    places = torch.arange(len(lengths), device=logits.device)
    document = places.repeat_interleave(lengths, output_size=total)
    per_document = weights.new_zeros(*weights.shape[:-1], len(lengths))
    if aggregate == "max":
        index = document.expand_as(weights)
        per_document = per_document.scatter_reduce(-1, index, weights, "amax", include_self=False)
    else:
        per_document = per_document.index_add(-1, document, weights)
        per_document = per_document / lengths if aggregate == "mean" else per_document
    return per_document.mean((1, 2))


def _choose(engine: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the engine that runs, or say why the one that was asked for cannot."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    on_cpu = q.device.type == "cpu"
    if engine in ("dense", "sdpa"):
        return engine
    if engine == "flex":
        if learns and on_cpu:
            raise UnsupportedError(
                "engine 'flex' has no gradient on CPUs; got inputs that require one. Use engine "
                "'sdpa', or torch.no_grad()."
            )
        return "flex"
    if engine == "merge" and (learns or not on_cpu):
        why = (
            "has no gradient; got inputs that require one"
            if learns
            else (f"works on CPUs; got inputs on {q.device}")
        )
        raise UnsupportedError(f"engine 'merge' {why}. Use engine 'sdpa' or 'auto'.")
    fits = q.dtype == k.dtype == v.dtype and q.shape[-1] == v.shape[-1]
    possible = on_cpu and not learns and fits and engines.flash_works(q.dtype)
    return "merge" if possible else "sdpa"


def _dense(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float) -> Tensor:
    """Attend under the whole mask: the formula as it stands."""
    if any(layout.padding):
        padding = ~layout.real(device=q.device)[:, None]
        q, k, v = (x.masked_fill(padding, 0.0) for x in (q, k, v))
    return attend(q, k, v, layout.mask(device=q.device), scale=scale)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept here must serve a gradient later
def _real_places(
    lengths: tuple[int, ...], padding: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return the slots that hold tokens."""
    begins, used = [], 0
    for pad, length in zip(padding, lengths, strict=True):
        begins.append(torch.arange(used + pad, used + pad + length))
        used += pad + length
    return torch.cat(begins).to(device)


def _pack(x: Tensor, layout: BlockLayout) -> Tensor:
    """Return the tokens without the padding."""
    if not any(layout.padding):
        return x
    return x[:, :, _real_places(layout.lengths, layout.padding, x.device)]


def _unpack(x: Tensor, layout: BlockLayout) -> Tensor:
    """Put the tokens back into their slots, and 0 into padding."""
    if not any(layout.padding):
        return x
    places = _real_places(layout.lengths, layout.padding, x.device)
    slots = x.new_zeros(*x.shape[:2], layout.num_tokens, x.shape[-1])
    return slots.index_copy(2, places, x)


def _signal_places(layout: BlockLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the slots of the signal tokens and those of the documents' tokens."""
    places = _real_places(layout.lengths, layout.padding, device)
    last = layout.lengths[-1]
    signals = [len(places) - last + signal for signal in layout.signals]
    return places[signals], places[layout.lengths[0] : len(places) - last]


def _check_documents(layout: BlockLayout) -> None:
    if not layout.num_documents:
        raise DataError(
            "scores need a layout with at least one document between the first and the last "
            f"block; got {layout.num_blocks} block(s). Give documents."
        )
