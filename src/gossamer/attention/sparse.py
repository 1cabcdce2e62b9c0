"""Attention along sparse patterns, at a cost by the pairs of a pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gossamer.attention._gather_plan import GatherPlan, Group, plan_gather
from gossamer.attention.bias import PositionBias
from gossamer.attention.core import MultiHeadAttention, attend, check_heads, check_mask
from gossamer.attention.patterns import AttentionPattern
from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, ShapeError, UnsupportedError

__all__ = ["SparseAttention", "pattern_attention"]

_ENGINES = ("auto", "dense", "gather", "flex")
# masks, plans and block masks of a pattern, as long as the pattern lives
_FORMS: WeakKeyDictionary[AttentionPattern, dict[Any, Any]] = WeakKeyDictionary()


def pattern_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: AttentionPattern,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    engine: str = "auto",
) -> Tensor:
    r"""Softmax attention over the pairs of a pattern; a query that sees nothing gives 0.

    $$o_k = \sum_{j \in A_k} \mathrm{softmax}_j(s\,q_k \cdot k_j + b_{kj})\,v_j$$

    Engines give one result. `"dense"` is plain attention with the pattern as a mask, cost n x n.
    `"gather"` fetches the keys of a run of queries and attends to them: time and memory by the
    number of pairs, so linear in n for a window. `"flex"` is FlexAttention with a block mask made
    from block indices, compiled on CUDA. `"auto"` is flex on CUDA where there is neither mask nor
    bias and heads are 16 wide or more; otherwise gather, or dense where gathering costs more.

    Args:
        q: Queries.
        k: Keys; with fewer heads than queries, each serves a group.
        v: Values.
        pattern: Which pairs take part, for T = S = its length.
        mask: Keys that take part, such as those that are no padding. Default all.
        bias: Added to the logits; holds T x S numbers whatever the pattern. Default none.
        scale: Factor s. Default `1 / sqrt(D)`.
        engine: `"auto"`, `"dense"`, `"gather"` or `"flex"`.

    Shape:
        - q: `(B, H, T, D)`; k: `(B, H_kv, T, D)`; v: `(B, H_kv, T, D_v)`.
        - mask: `(B, 1, 1, T)`, boolean; bias: `(1 or B, 1 or H, T, T)`.
        - output: `(B, H, T, D_v)`.

    Raises:
        ShapeError: If the length is not that of the pattern, or the mask is not one of keys.
        UnsupportedError: If `"flex"` is asked for a gradient on the CPU, or for a mask or a bias.

    Example:
        >>> q = torch.randn(1, 2, 6, 4)
        >>> pattern_attention(q, q, q, AttentionPattern.sliding(6, 1)).shape
        torch.Size([1, 2, 6, 4])

    Source: Yun et al., *O(n) Connections are Expressive Enough*, NeurIPS 2020, eq. 2.
    Deviations: logits are scaled.
    """
    check_choice(engine, _ENGINES, "engine")
    check_heads(q, k, v)
    for name, length in (("queries", q.shape[2]), ("keys", k.shape[2])):
        if length != pattern.length:
            raise ShapeError(
                f"{name} must be as many as the pattern has tokens, {pattern.length}; got "
                f"{length}. Build a pattern for {length} tokens."
            )
    if mask is not None:
        check_mask(mask)
        if mask.dim() != 4 or mask.shape[1:3] != (1, 1):
            raise ShapeError(
                f"mask must be one of keys, (B, 1, 1, T); got {tuple(mask.shape)}. Put what "
                "differs between queries into the pattern."
            )
    if engine == "auto" and q.is_cuda and mask is None and bias is None and q.shape[3] >= 16:
        engine = "flex"
    if engine == "flex":
        return _attend_flex(q, k, v, pattern, mask, bias, scale)
    plan = None
    if engine != "dense":
        always = engine == "gather"
        plan = _kept(
            pattern,
            ("plan", q.device, always),
            lambda: plan_gather(pattern, q.device, always=always),
        )
    if plan is None:
        if pattern.num_pairs < pattern.length**2:
            seen = _kept(pattern, ("mask", q.device), lambda: pattern.mask(q.device))
            mask = seen if mask is None else seen & mask
        return attend(q, k, v, mask, bias=bias, scale=scale)
    return _attend_gathered(q, k, v, plan, mask, bias, scale)


def _kept(pattern: AttentionPattern, name: Any, make: Callable[[], Any]) -> Any:
    """Return a form of a pattern, made at the first call."""
    forms = _FORMS.setdefault(pattern, {})
    if name not in forms:
        forms[name] = make()
    return forms[name]


def _attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: GatherPlan,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, D)
    parts = [_attend_group(q, k, v, group, mask, bias, scale) for group in plan.groups]
    out = torch.cat(parts, dim=1).index_select(1, plan.places)
    return out.transpose(1, 2)


def _attend_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attend from all runs of a group, as a batch: `(B, G b, H, D_v)`."""
    batch, (runs, size, width) = len(q), group.mask.shape

    def fetch(x: Tensor, index: Tensor) -> Tensor:
        rows = x.index_select(1, index.flatten())  # (B, G b, H, D)
        return rows.view(batch * runs, index.shape[1], *rows.shape[2:]).transpose(1, 2)

    seen = group.mask[None]  # (1, G, b, K)
    if mask is not None:
        seen = seen & mask[:, 0, 0][:, group.keys][:, :, None]
    seen = seen.expand(batch, -1, -1, -1).reshape(batch * runs, 1, size, width)
    added = None
    if bias is not None:
        pairs = bias[:, :, group.queries[:, :, None], group.keys[:, None, :]]  # (1|B, 1|H, G, b, K)
        pairs = pairs.expand(batch, *pairs.shape[1:]).transpose(1, 2)
        added = pairs.reshape(batch * runs, -1, size, width)
    out = attend(
        fetch(q, group.queries),
        fetch(k, group.keys),
        fetch(v, group.keys),
        seen,
        bias=added,
        scale=scale,
    )
    return out.transpose(1, 2).reshape(batch, runs * size, q.shape[2], -1)


def _attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: AttentionPattern,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
) -> Tensor:
    if mask is not None or bias is not None:
        raise UnsupportedError(
            "the engine 'flex' takes no mask and no bias here; got one of them. Use the engine "
            "'gather' or 'dense'."
        )
    if not q.is_cuda and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise UnsupportedError(
            "FlexAttention has no gradient on the CPU; got inputs that require one with the "
            "engine 'flex'. Use the engine 'gather', or torch.no_grad()."
        )
    if not torch.is_grad_enabled():
        # parameters may require gradients all the same
        q, k, v = q.detach(), k.detach(), v.detach()
    blocks = _kept(pattern, ("blocks", q.device), lambda: pattern.block_mask(device=q.device))
    out: Tensor = _flex(q.is_cuda and not torch.compiler.is_compiling())(
        q,
        k,
        v,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out


@cache
def _flex(compile_it: bool) -> Callable[..., Any]:
    """Return FlexAttention; without compilation it makes all logits."""
    from torch.nn.attention.flex_attention import flex_attention

    plain: Callable[..., Any] = flex_attention
    return torch.compile(plain) if compile_it else plain


class SparseAttention(MultiHeadAttention):
    r"""Attention in which a query sees the keys of a sparse pattern.

    Several patterns are used as their union in all heads and layers; side by side, each by its
    share of the heads; or in turn, layer by layer. Check them with `check_patterns`. On the CPU
    keys are fetched by runs of queries, at a cost by the pairs; with a bias of positions or a
    causal input shorter than the pattern, the cost is that of plain attention.

    Args:
        dim: Model width M.
        num_heads: Attention heads H.
        patterns: `AttentionPattern`s of one length, or their plain values such as
            `{"kind": "strided", "length": 25, "stride": 5}`, as `AttentionPattern.from_options`
            takes them.
        combine: `"union"`, `"per_head"` or `"sequential"`. Default `"union"`.
        layer: Number of the layer in its model from 0; `"sequential"` uses pattern
            `layer % len(patterns)`. A model fills it in. Default 0.
        head_dim: Width of a head. Default `dim // num_heads`.
        bias: Biases in the four projections. Default false.

    Shape:
        - x and output: `(B, T, M)`, T the length of the patterns; at most that if causal.
        - mask: `(B, 1, 1, S)`, True = takes part; bias: `(1 or B, 1 or H, T, S)`.

    Raises:
        ConfigError: If patterns do not fit each other or the heads.
        ShapeError: If the input has another length.

    Example:
        >>> patterns = AttentionPattern.strided(25, 5).parts
        >>> layer = SparseAttention(16, 4, patterns, combine="sequential", layer=1)
        >>> layer.pattern.num_pairs, layer(torch.randn(2, 25, 16)).shape
        (125, torch.Size([2, 25, 16]))

    Source: Yun et al., *O(n) Connections are Expressive Enough*, NeurIPS 2020, section 3 and 5.
    Deviations: logits are scaled; each head is as wide as in plain attention.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        patterns: Sequence[AttentionPattern | Mapping[str, Any]],
        *,
        combine: str = "union",
        layer: int = 0,
        head_dim: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, head_dim=head_dim, bias=bias)
        check_choice(combine, ("union", "per_head", "sequential"), "combine")
        check_range(layer, "layer", low=0, integer=True)
        given = _built(patterns)
        if combine == "per_head" and num_heads % len(given):
            raise ConfigError(
                "num_heads must be a multiple of the number of patterns with combine='per_head'; "
                f"got {num_heads} and {len(given)}. Change one of them."
            )
        if combine == "union":
            whole = given[0]
            for pattern in given[1:]:
                whole = whole + pattern
            given = (whole,)
        elif combine == "sequential":
            given = (given[layer % len(given)],)
        self.head_patterns = given
        self.causal_patterns = tuple(pattern.causal() for pattern in self.head_patterns)
        self.length = given[0].length

    @property
    def pattern(self) -> AttentionPattern:
        """What all heads of this layer see together."""
        whole = self.head_patterns[0]
        for pattern in self.head_patterns[1:]:
            whole = whole + pattern
        return whole

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        bias: Tensor | PositionBias | None,
        causal: bool,
        index: Tensor | None,
    ) -> Tensor:
        """Attend along the pattern of each share of the heads."""
        length, num_keys = q.shape[2], k.shape[2]
        if num_keys > self.length or (num_keys < self.length and not causal):
            raise ShapeError(
                f"x must have {'at most ' if causal else ''}{self.length} tokens, the length of "
                f"the patterns; got {num_keys}. Build the layer with patterns for {num_keys} "
                "tokens."
            )
        if isinstance(bias, PositionBias):
            bias = bias.rows(0, length)
        patterns = self.causal_patterns if causal else self.head_patterns
        share = self.num_heads // len(patterns)
        whole = length == num_keys == self.length and _in_place(index, mask, length)
        outs = []
        for number, pattern in enumerate(patterns):
            heads = slice(number * share, (number + 1) * share)
            parts = (q[:, heads], k[:, heads], v[:, heads])
            own = bias[:, heads] if bias is not None and bias.shape[1] > 1 else bias
            if whole:
                out = pattern_attention(*parts, pattern, mask, bias=own, scale=self.scale)
            else:
                seen = _moved_mask(pattern, index, length, num_keys, q.device)
                seen = seen if mask is None else seen & mask
                out = attend(*parts, seen, bias=own, scale=self.scale)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _built(
    patterns: Sequence[AttentionPattern | Mapping[str, Any]],
) -> tuple[AttentionPattern, ...]:
    if not isinstance(patterns, Sequence) or not len(patterns):
        raise ConfigError(
            f"patterns must be a list of one or more patterns; got {patterns!r}. Pass [pattern]."
        )
    given = tuple(
        pattern if isinstance(pattern, AttentionPattern) else AttentionPattern.from_options(pattern)
        for pattern in patterns
    )
    lengths = [pattern.length for pattern in given]
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"patterns of a layer must have one length; got {lengths}. Build them for the same "
            "number of tokens."
        )
    return given


def _in_place(index: Tensor | None, mask: Tensor | None, length: int) -> bool:
    """Whether every real token stands at the place that its number says."""
    if index is None or mask is None:
        return True
    moved = index != torch.arange(length, device=index.device)
    return not bool((moved & mask[:, 0, 0]).any())


def _moved_mask(
    pattern: AttentionPattern,
    index: Tensor | None,
    length: int,
    num_keys: int,
    device: torch.device,
) -> Tensor:
    """Return the pairs of the tokens' own numbers, `(1 or B, 1, T, S)`.

    Padding counts for nothing. Of a cache only the queries' numbers are known; there padding
    stands on the left, so that a key is as many tokens away as places.
    """
    if index is None:
        index = torch.arange(num_keys - length, num_keys, device=device)[None]
    if length == num_keys:
        keys = index
    else:
        keys = torch.arange(num_keys, device=device) - (num_keys - 1 - index[:, -1:])
    query, key = index[:, None, :, None], keys[:, None, None, :]
    seen = pattern.mask_mod(device)(index, index, query, key.clamp(min=0))
    return seen & (key >= 0)
