"""Block attention on the tokens alone, without padding, in three ways that give one result.

Each takes `(B, H, S, D)` in the order of the prompt, S the sum of the lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.attention.block_layout import BlockLayout

__all__ = [
    "Lengths",
    "flash_works",
    "flex",
    "flex_block_mask",
    "fold",
    "merge",
    "merge_documents",
    "merge_last",
    "sdpa",
    "sdpa_documents",
    "sdpa_last",
]

Lengths = tuple[int, ...]

# documents whose lengths fall into the same step are one batch; at most so much is padded
STEP = 32


@dataclass(frozen=True)
class Group:
    """Documents that are computed as one batch.

    Args:
        index: Place of each of their tokens, counted from the first document; short documents are
            filled up on the right with their own last token, which no token of theirs sees.
            A slice where places are consecutive and nothing is filled up.
        shape: Documents and tokens of each.
    """

    index: Tensor | slice
    shape: tuple[int, int]


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept here must serve a gradient later
def _groups(lengths: Lengths, device: torch.device) -> tuple[list[Group], Tensor | None]:
    """Return batches of documents, and where each token is in their joined results.

    That is `None` where the joined results are in order already.
    """
    documents = torch.tensor(lengths[1:-1])
    begins = documents.cumsum(0) - documents
    steps = (documents + STEP - 1) // STEP
    if bool((documents == documents[0]).all()):
        steps = torch.zeros_like(documents)
    groups = []
    place = torch.empty(int(documents.sum()), dtype=torch.long)
    used = 0
    for step in sorted(set(steps.tolist())):
        chosen = steps == step
        begin, length = begins[chosen, None], documents[chosen, None]
        width = int(length.max())
        inside = torch.arange(width)
        index = begin + torch.minimum(inside, length - 1)
        real = inside < length
        place[index[real]] = used + torch.arange(index.numel()).view_as(index)[real]
        flat = index.flatten()
        run = slice(int(flat[0]), int(flat[0]) + len(flat))
        consecutive = bool((flat == torch.arange(run.start, run.stop)).all())
        where = run if consecutive else flat.to(device)
        groups.append(Group(where, (len(index), width)))
        used += len(flat)
    # nothing may stand behind the last token either, as it does where the last document is filled
    ordered = used == len(place) and bool((place == torch.arange(used)).all())
    return groups, None if ordered else place.to(device)


def _take(x: Tensor, group: Group) -> Tensor:
    """Return a group's documents as a batch, `(B * m, H, W, D)`; a view where that is possible."""
    x = x[:, :, group.index]
    return x.reshape(*x.shape[:2], *group.shape, x.shape[-1]).movedim(2, 1).flatten(0, 1)


def _join(parts: list[Tensor], groups: list[Group], place: Tensor | None, batch: int) -> Tensor:
    """Return the documents' results in the order of the prompt, `(B, H, S_documents, ...)`."""
    rows = [
        part.reshape(batch, group.shape[0], *part.shape[1:]).movedim(1, 2).flatten(2, 3)
        for part, group in zip(parts, groups, strict=True)
    ]
    joined = rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)
    return joined if place is None else joined[:, :, place]


def _split(x: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    """Return instruction, documents and last block, the last two empty where there is one block."""
    last = lengths[-1] if len(lengths) > 1 else 0
    begin, end = lengths[0], x.shape[2] - last
    return x[:, :, :begin], x[:, :, begin:end], x[:, :, end:]


def fold(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give each group of query heads its key head without copying it: a batch for each key head."""
    batch, kv_heads = k.shape[:2]
    if q.shape[1] == kv_heads:
        return q, k, v
    size = q.shape[1] // kv_heads
    q = q.reshape(batch * kv_heads, size, *q.shape[2:])
    k, v = (x.flatten(0, 1)[:, None].expand(-1, size, -1, -1) for x in (k, v))
    return q, k, v


def sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float) -> Tensor:
    """Attend in three calls of PyTorch's attention: instruction, documents as a batch, last block.

    All inputs have four dimensions: with five PyTorch leaves its fast kernels.
    """
    shape = q.shape
    q, k, v = fold(q, k, v)
    parts = [_split(x, lengths) for x in (q, k, v)]
    (q0, qd, q1), (k0, kd, _), (v0, vd, _) = parts
    out = [F.scaled_dot_product_attention(q0, k0, v0, is_causal=True, scale=scale)]
    if qd.shape[2]:
        out.append(sdpa_documents(qd, (k0, kd), (v0, vd), lengths, scale))
    if q1.shape[2]:
        out.append(sdpa_last(q1, k, v, scale))
    return torch.cat(out, dim=2).view(*shape[:3], v.shape[-1])


def sdpa_documents(
    q: Tensor, k: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor], lengths: Lengths, scale: float
) -> Tensor:
    """Attend from documents to the instruction and themselves; k and v hold one part for each."""
    groups, place = _groups(lengths, q.device)
    results = []
    for group in groups:
        count, width = group.shape
        k_all, v_all = (
            torch.cat((_repeat(shared, count), _take(own, group)), dim=2) for shared, own in (k, v)
        )
        sees = torch.ones(width, k_all.shape[2], dtype=torch.bool, device=q.device)
        sees = sees.tril(k[0].shape[2])
        results.append(
            F.scaled_dot_product_attention(
                _take(q, group), k_all, v_all, attn_mask=sees, scale=scale
            )
        )
    return _join(results, groups, place, q.shape[0])


def sdpa_last(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend causally from the last tokens to all."""
    sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    sees = sees.tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale)


def _repeat(x: Tensor, count: int) -> Tensor:
    """Return each sample `count` times in a row, as a view where there is one sample."""
    return x[:, None].expand(-1, count, -1, -1, -1).flatten(0, 1)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return attention and the logarithm of each row's sum, `(B, H, T)`; private in PyTorch."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = operator(q, k, v, 0.0, causal, scale=scale)
    return out, log_sum


@functools.cache
def flash_works(dtype: torch.dtype) -> bool:
    """Return whether the private operator is there and computes what is expected of it."""
    tol = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 3e-2)
    q, k, v = (
        (torch.arange(3 * n * 8, dtype=torch.float64) * f).sin().view(1, 3, n, 8).to(dtype)
        for n, f in ((5, 0.7), (5, 1.1), (5, 1.3))
    )
    logits = 0.5 * q.double() @ k[:, :1].double().transpose(-1, -2)
    for causal in (False, True):
        try:
            out, log_sum = _flash(q, k[:, :1].expand(-1, 3, -1, -1), v, 0.5, causal=causal)
        except Exception:
            return False  # whatever a private operator does in another version
        if causal:
            logits = logits.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
        expected = logits.softmax(-1) @ v.double(), logits.logsumexp(-1)
        for a, b in zip((out, log_sum), expected, strict=True):
            if a.shape != b.shape or not torch.allclose(a.double(), b, atol=tol, rtol=tol):
                return False
    return True


def _blend(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> Tensor:
    """Return attention over the keys of both, from the attention over each."""
    weight = torch.sigmoid(one[1] - two[1])[..., None].to(one[0].dtype)
    return torch.lerp(two[0], one[0], weight)


def merge(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float) -> Tensor:
    """Attend to shared and own keys apart, without a mask, and join the two by their sums.

    No key is copied for each document. For CPUs and inference.
    """
    shape = q.shape
    q, k, v = fold(q, k, v)
    (q0, qd, q1), (k0, kd, _), (v0, vd, _) = (_split(x, lengths) for x in (q, k, v))
    out = [_flash(q0, k0, v0, scale, causal=True)[0]]
    if qd.shape[2]:
        out.append(merge_documents(qd, (k0, kd), (v0, vd), lengths, scale))
    if q1.shape[2]:
        out.append(merge_last(q1, k, v, scale))
    return torch.cat(out, dim=2).view(shape)


def merge_documents(
    q: Tensor, k: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor], lengths: Lengths, scale: float
) -> Tensor:
    """As `sdpa_documents`, without a copy of the instruction for each."""
    groups, place = _groups(lengths, q.device)
    own = []
    for group in groups:
        qg, kg, vg = (_take(x, group) for x in (q, k[1], v[1]))
        own.append(_flash(qg, kg, vg, scale, causal=True))
    joined, log_sum = (
        _join(list(parts), groups, place, q.shape[0]) for parts in zip(*own, strict=True)
    )
    return _blend(_flash(q, k[0], v[0], scale), (joined, log_sum))


def merge_last(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As `sdpa_last`, without a mask."""
    before = k.shape[2] - q.shape[2]
    others = _flash(q, k[:, :, :before], v[:, :, :before], scale)
    own = _flash(q, k[:, :, before:], v[:, :, before:], scale, causal=True)
    return _blend(others, own)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def flex_block_mask(lengths: Lengths, device: torch.device, tile: int = 128) -> Any:
    """Return FlexAttention's block mask, found from the lengths, never from all pairs of tokens.

    A tile of pairs is left out where no pair is seen, computed without the mask where every pair
    is, and with the mask elsewhere.
    """
    from torch.nn.attention.flex_attention import BlockMask

    layout = BlockLayout(lengths, pad_multiple=1)
    block = layout.block_ids(device=device)
    size, last = len(block), len(lengths) - 1
    begin = torch.arange(0, size, tile, device=device)
    low, high = block[begin], block[(begin + tile - 1).clamp(max=size - 1)]
    q_low, q_high, k_low, k_high = low[:, None], high[:, None], low, high
    before = begin[:, None] > begin
    # block numbers grow along the prompt, so the ends of a tile tell what is in it
    some = before & ((k_low == 0) | (q_high == last) | (k_high == q_low))
    same = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    full = before & ((k_high == 0) | (q_low == last) | same)
    if size % tile:
        full[-1] = False  # the last tile reaches beyond the prompt
    partial = (some & ~full) | torch.eye(len(begin), dtype=torch.bool, device=device)
    indices = [
        (kind.sum(-1, dtype=torch.int32)[None, None], _first(kind)[None, None])
        for kind in (partial, full)
    ]
    return BlockMask.from_kv_blocks(
        *indices[0],
        *indices[1],
        BLOCK_SIZE=tile,
        mask_mod=layout.mask_mod(device=device),
        seq_lengths=(size, size),
    )


def _first(kind: Tensor) -> Tensor:
    """Return the column numbers of each row, those that are true in front."""
    return kind.int().argsort(dim=-1, descending=True, stable=True).int()


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def flex(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float) -> Tensor:
    """Attend by compiled FlexAttention; on CPUs forward only, and it needs a C++ compiler."""
    mask = flex_block_mask(lengths, q.device)
    grouped = q.shape[1] != k.shape[1]
    return _compiled_flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
