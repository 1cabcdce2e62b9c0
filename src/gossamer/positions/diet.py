"""Positions and segments as terms of their own on the logits (DIET)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.positions._gather import take_or_zero
from gossamer.positions.base import Positions, check_ids, relative_ids

__all__ = ["DietAbsolutePositions", "DietRelativePositions"]


class _DietPositions(Positions):
    """What both forms share: a term of segments, and the checks on ids."""

    def __init__(
        self, num_heads: int, max_length: int, *, num_segments: int, share_heads: bool
    ) -> None:
        super().__init__()
        check_range(num_heads, "num_heads", low=1, integer=True)
        check_range(max_length, "max_length", low=1, integer=True)
        check_range(num_segments, "num_segments", low=0, integer=True)
        self.num_heads = num_heads
        self.max_length = max_length
        self.num_segments = num_segments
        self.share_heads = share_heads
        self.levels = 2 if num_segments else 1
        self.coupled = num_segments > 0  # a model cannot count segments: they come with the ids
        self._query_limit: tuple[str, int] | None = None
        self._key_limit: tuple[str, int] | None = None
        shape = (num_heads, num_segments, num_segments)
        self.segments = nn.Parameter(torch.zeros(shape)) if num_segments else None

    def bias(self, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor) -> Tensor:
        """Return the term of positions plus the term of segments."""
        self._check(q_ids, self._query_limit)
        if k_ids is not q_ids or self._key_limit != self._query_limit:
            self._check(k_ids, self._key_limit)
        if self.segments is None:
            return self._position_bias(q_ids, k_ids)
        positions = self._position_bias(q_ids[..., 0], k_ids[..., 0])
        return positions + self._segment_bias(q_ids[..., 1], k_ids[..., 1])

    def _position_bias(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def _segment_bias(self, q_segments: Tensor, k_segments: Tensor) -> Tensor:
        index = (q_segments.unsqueeze(2) - 1) * self.num_segments + k_segments.unsqueeze(1) - 1
        placed = (q_segments > 0).unsqueeze(2) & (k_segments > 0).unsqueeze(1)
        table: Tensor = self.segments  # type: ignore[assignment]
        return take_or_zero(table.flatten(1), index, placed)

    def _check(self, ids: Tensor, limit: tuple[str, int] | None) -> None:
        check_ids(ids, self.levels)
        if torch.compiler.is_compiling() or ids.numel() == 0:
            return
        levels = ids if self.levels == 2 else ids.unsqueeze(-1)
        if limit is not None and int(levels[..., 0].max()) > limit[1]:
            raise DataError(
                f"position ids must be <= {limit[0]} = {limit[1]}, since each has a row of its "
                f"own; got {int(levels[..., 0].max())}. Build with a larger {limit[0]}, or use "
                "DietRelativePositions, which clips far distances, or FirePositions."
            )
        if self.levels == 2 and int(levels[..., 1].max()) > self.num_segments:
            raise DataError(
                f"segment ids (level 2: segment number + 1, 0 = none) must be <= num_segments = "
                f"{self.num_segments}; got {int(levels[..., 1].max())}. Count segments from 1 or "
                "raise num_segments."
            )

    def _all_heads(self, bias: Tensor) -> Tensor:
        return bias.expand(-1, self.num_heads, -1, -1)

    def extra_repr(self) -> str:
        """Show the options."""
        return (
            f"num_heads={self.num_heads}, max_length={self.max_length}, "
            f"num_segments={self.num_segments}, share_heads={self.share_heads}"
        )


class DietAbsolutePositions(_DietPositions):
    r"""A learned low-rank bias of absolute positions, and a small table of segments.

    $$b_{h,i,j} = (P_Q^h {P_K^h}^\top)_{ij} + S^h[\mathrm{seg}_i, \mathrm{seg}_j]$$

    Added to the scaled logits, in place of positions and segments at the input. It lifts the rank
    that the logits of a head can reach from D to D + rank, and costs about 1 / (2 B) of the
    attention for a batch of B when `rank = D`, since all samples share the product. One module
    serves all layers by default, the paper's best setting. It cannot reach beyond `max_length`.

    In evaluation without gradients the product of a full pass is kept, and dropped by `train()`,
    by a new value of the tables (optimizer step, `load_state_dict`) and by a change of device or
    dtype. A write through `parameter.data` is not seen: call `eval()` after it. A pass with fewer
    queries than keys, as cached decoding makes it, computes the rows of its queries alone.
    Products are float32 under any autocast. A pair that contains position 0 or segment 0 gets 0
    from that term.

    Args:
        num_heads: Attention heads. Range: >= 1.
        max_length: Largest position id. Unit: tokens. Range: >= 1.
        rank: Columns d_p of both tables. Range: >= 1. Default 64, a usual head width; the paper's
            best is 128.
        num_segments: Kinds of segment, 0 for none. With segments the ids have a second level:
            segment number + 1, 0 = none. Range: >= 0. Default 0.
        share_heads: One product for all heads; the paper found it worst, so it warns. Default
            false.
        key_length: Number of projected keys (Linformer); their ids are 1..key_length. Default
            `None`: keys are tokens.
        init_std: Standard deviation of the tables' start; that of the bias is
            `init_std ** 2 * sqrt(rank)`. Range: > 0. Default 0.02.

    Shape:
        - ids: `(B, T)` or `(1, T)`, with segments `(B, T, 2)` or `(1, T, 2)`.
        - output of `bias`: `(B or 1, H, T, S)`, float32.

    Raises:
        ConfigError: If an option is out of its range, or `key_length` is set with segments.
        DataError: If an id exceeds `max_length`, or a segment `num_segments`.
        ShapeError: If the number of keys differs from `key_length`.

    Example:
        >>> ids = torch.arange(1, 5)[None]
        >>> DietAbsolutePositions(2, max_length=8).bias(ids, ids, q_index=ids - 1).shape
        torch.Size([1, 2, 4, 4])

    Source: Chen et al., *A Simple and Effective Positional Encoding for Transformers*, EMNLP 2021,
        DIET-ABS; with `key_length`, DIET-ABS-LIN.
    Deviations: the paper gives no start; tables from N(0, init_std), segments from 0. The paper
        prints a scale of `1 / sqrt(d)` on the content; the attention here uses `1 / sqrt(D)`.
    """

    def __init__(
        self,
        num_heads: int,
        max_length: int,
        *,
        rank: int = 64,
        num_segments: int = 0,
        share_heads: bool = False,
        key_length: int | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__(num_heads, max_length, num_segments=num_segments, share_heads=share_heads)
        check_range(rank, "rank", low=1, integer=True)
        check_range(init_std, "init_std", low=0.0, open_low=True)
        if key_length is not None:
            check_range(key_length, "key_length", low=1, integer=True)
            if num_segments:
                raise ConfigError(
                    "num_segments must be 0 with key_length, since a projected key mixes tokens of "
                    f"all segments; got {num_segments}. Drop one of the two."
                )
        if share_heads:
            warnings.warn(
                "share_heads=True gives all heads one absolute bias, which the paper found worst; "
                "to save parameters share one module over all layers.",
                UserWarning,
                stacklevel=2,
            )
        self.rank = rank
        self.key_length = key_length
        self.cacheable = key_length is None  # projected keys mix tokens that are still to come
        heads = 1 if share_heads else num_heads
        self.query = nn.Parameter(torch.randn(heads, max_length, rank) * init_std)
        self.key = nn.Parameter(torch.randn(heads, key_length or max_length, rank) * init_std)
        self._query_limit = ("max_length", max_length)
        self._key_limit = ("key_length", key_length) if key_length else self._query_limit
        self._kept: tuple[tuple[Tensor, Tensor], tuple[int, ...], Tensor] | None = None

    def bias(self, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor) -> Tensor:
        """Return the term of positions plus the term of segments."""
        if self.key_length not in (None, k_ids.shape[1]):
            raise ShapeError(
                f"k_ids must have one id for each projected key, (1, key_length) = "
                f"(1, {self.key_length}); got {tuple(k_ids.shape)}. Pass 1..key_length, or build "
                "with the key_length of the projection."
            )
        return super().bias(q_ids, k_ids, q_index=q_index)

    def _position_bias(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        with torch.autocast(q_ids.device.type, enabled=False):
            if not torch.compiler.is_compiling() and q_ids.shape[1] > 1:
                rows, columns = int(q_ids.max()), int(k_ids.max())
                if _is_plain(q_ids) and _is_plain(k_ids):
                    product = self._product(rows, columns)
                    # what is kept is copied: a caller may write into it, for example -inf
                    product = product if product.requires_grad else product.clone()
                    return self._all_heads(product[None])
                pairs = max(len(q_ids), len(k_ids)) * q_ids.shape[1] * k_ids.shape[1]
                if 0 < rows * columns < pairs:
                    return self._all_heads(self._gathered(q_ids, k_ids, rows, columns))
            pairs_of_rows = _rows(self.query, q_ids) @ _rows(self.key, k_ids).mT
            return self._all_heads(pairs_of_rows.transpose(0, 1))  # from (1 or H, B, T, S)

    def _gathered(self, q_ids: Tensor, k_ids: Tensor, rows: int, columns: int) -> Tensor:
        """The product of all positions, looked up by samples that differ in their ids."""
        table = self._product(rows, columns).flatten(1)
        index = (q_ids.unsqueeze(2) - 1) * columns + k_ids.unsqueeze(1) - 1
        return take_or_zero(table, index, relative_ids(q_ids, k_ids)[1])

    def _product(self, rows: int, columns: int) -> Tensor:
        tables = (self.query, self.key)
        wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tables)
        if self.training or wants_gradient or any(t.is_inference() for t in tables):
            return _multiply(*tables, rows, columns)
        key = (rows, columns, *(t._version for t in tables))
        if self._kept is not None:
            seen, seen_key, product = self._kept
            if seen_key == key and all(a is b for a, b in zip(seen, tables, strict=True)):
                return product
        product = _multiply(*tables, rows, columns)
        self._kept = (tables, key, product)
        return product

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and drop the product that evaluation keeps."""
        self._kept = None
        return super().train(mode)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._kept = None  # a change of device or dtype does not count as a new version
        applied: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return applied

    def __getstate__(self) -> dict[str, Any]:
        # versions of a copied parameter start anew and could meet the kept ones again
        return {**self.__dict__, "_kept": None}

    def extra_repr(self) -> str:
        """Show the options."""
        return f"{super().extra_repr()}, rank={self.rank}, key_length={self.key_length}"


class DietRelativePositions(_DietPositions):
    r"""One learned number for each offset and head, and a small table of segments.

    $$b_{h,i,j} = R^h[p_i - p_j] + S^h[\mathrm{seg}_i, \mathrm{seg}_j]$$

    No buckets: `2 max_length - 1` offsets, both directions apart. With `R[k] = -m |k|` this is
    symmetric ALiBi, with R tied inside buckets T5's bias. One module for each layer by default, as
    in the paper. Longer sequences work: offsets of `max_length` and more share the last entry. A
    pair that contains position 0 or segment 0 gets 0 from that term.

    Args:
        num_heads: Attention heads. Range: >= 1.
        max_length: Offsets below it have an entry of their own. Unit: tokens. Range: >= 1.
        num_segments: Kinds of segment, 0 for none. With segments the ids have a second level:
            segment number + 1, 0 = none. Range: >= 0. Default 0.
        share_heads: One table of offsets for all heads. Default false.

    Shape:
        - ids: `(B, T)` or `(1, T)`, with segments `(B, T, 2)` or `(1, T, 2)`.
        - output of `bias`: `(B or 1, H, T, S)`, dtype of the table.

    Raises:
        ConfigError: If an option is out of its range.
        DataError: If a segment exceeds `num_segments`.

    Example:
        >>> ids = torch.arange(1, 5)[None]
        >>> DietRelativePositions(2, max_length=8).bias(ids, ids, q_index=ids - 1).shape
        torch.Size([1, 2, 4, 4])

    Source: Chen et al., *A Simple and Effective Positional Encoding for Transformers*, EMNLP 2021,
        DIET-REL.
    Deviations: the paper gives no start, here all entries are 0; it has no rule beyond its length,
        here offsets are clipped.
    """

    per_layer = True

    def __init__(
        self,
        num_heads: int,
        max_length: int,
        *,
        num_segments: int = 0,
        share_heads: bool = False,
    ) -> None:
        super().__init__(num_heads, max_length, num_segments=num_segments, share_heads=share_heads)
        heads = 1 if share_heads else num_heads
        self.table = nn.Parameter(torch.zeros(heads, 2 * max_length - 1))

    def _position_bias(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        offset, placed = relative_ids(q_ids, k_ids)
        last = self.max_length - 1
        return self._all_heads(take_or_zero(self.table, offset.clamp(-last, last) + last, placed))


def _is_plain(ids: Tensor) -> bool:
    """Whether the ids are 1..T for all samples."""
    plain = torch.arange(1, ids.shape[1] + 1, device=ids.device, dtype=ids.dtype)
    return len(ids) == 1 and torch.equal(ids[0], plain)


def _full(table: Tensor) -> Tensor:
    return table.to(torch.promote_types(table.dtype, torch.float32))


def _multiply(query: Tensor, key: Tensor, rows: int, columns: int) -> Tensor:
    return _full(query[:, :rows]) @ _full(key[:, :columns]).mT  # (1 or H, rows, columns)


def _rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return the table's row of each id, 0 for id 0, `(1 or H, B, T, rank)`."""
    if not torch.compiler.is_compiling() and _is_plain(ids):
        return _full(table[:, None, : ids.shape[1]])
    picked = table.index_select(1, (ids - 1).clamp(min=0).flatten())
    return _full(picked.view(len(table), *ids.shape, -1)) * (ids > 0)[None, :, :, None]
