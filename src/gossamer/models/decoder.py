"""A decoder-only transformer whose position encoding is a part one can choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from gossamer.attention import KVCache
from gossamer.checks import check_choice, check_range, check_shape
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.models.block import Options, TransformerBlock, named_options
from gossamer.models.generation import generate
from gossamer.models.saving import PretrainedModel
from gossamer.positions import Positions, build_positions, check_ids

__all__ = ["Decoder"]


class Decoder(PretrainedModel):
    """Causal transformer: tokens and position ids in, logits of the next token out.

    `positions`, `feed_forward`, `attention` and `norm` take a name or a dict of plain values, so
    that `config.json` is complete. In the entry `positions`, two keys belong to the model:
    `share` (one encoding for all layers, or one each; default the encoding's own habit) and `ids`
    (`"task"`: read the given ids; `"sequence"`: count 1..T and ignore given ids, so that one batch
    serves coupled models and uncoupled baselines; default `"task"` for coupled encodings).

    Args:
        vocab_size: Number of tokens V. Range: >= 1.
        dim: Model width M.
        num_layers: Layers. Range: >= 1.
        num_heads: Attention heads.
        positions: Position encoding, for example `"rope"` or `{"name": "fire", "share": True}`.
        feed_forward: `"gelu"`, `"relu"`, `"silu"`, `"gelu_tanh"` (plain), `"gated"`, or a dict with
            `hidden_dim` (default 4 times `dim`).
        attention: Options of `MultiHeadAttention`, for example `{"num_kv_heads": 2}`.
        norm: `"pre"`, `"post"`, `"pre_post"`, or a dict with `kind` (`"rms"`, `"layer"`) and `eps`.
        loops: How often the stack of layers is applied, with the same weights. Range: >= 1.
        max_length: Most tokens, or `None` for no limit.

    Shape:
        - tokens: `(B, T)`, integers.
        - position_ids: `(B, T)`, `(1, T)`, or with levels `(B, T, levels)`.
        - mask: `(B, T)`, boolean, True = a real token (padding on the left when decoding).
        - output: `(B, T, V)`.

    Raises:
        ConfigError: If an option is unknown or out of range.
        DataError: If a coupled encoding gets no ids, or more than `max_length` tokens come.

    Example:
        >>> model = Decoder(14, 32, 1, 4, positions="coupled_relative", norm="pre_post")
        >>> ids = torch.tensor([[0, 2, 1, 2]])
        >>> model(torch.tensor([[1, 5, 12, 6]]), ids).shape
        torch.Size([1, 4, 14])

    Source: Vaswani et al. 2017; norms as in Cho et al., NeurIPS 2024, public code.
    Deviations: token embeddings start at N(0, 1), linear maps at PyTorch's default.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        *,
        positions: Options = "rope",
        feed_forward: Options = "gelu",
        attention: dict[str, Any] | None = None,
        norm: Options = "pre",
        loops: int = 1,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        given = dict(locals())
        for size in ("vocab_size", "dim", "num_layers", "num_heads", "loops"):
            check_range(given[size], size, low=1, integer=True)
        names = ("vocab_size", "dim", "num_layers", "num_heads", "positions", "feed_forward")
        self.config = {n: given[n] for n in (*names, "attention", "norm", "loops", "max_length")}
        self.loops = loops
        self.max_length = max_length
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            TransformerBlock(
                dim, num_heads, feed_forward=feed_forward, attention=attention, norm=norm
            )
            for _ in range(num_layers)
        )
        self.positions = self._build_positions(positions, dim, num_layers, num_heads)
        style, norm_options = named_options(norm, "norm")
        kind = nn.LayerNorm if norm_options.get("kind") == "layer" else nn.RMSNorm
        eps = norm_options.get("eps", 1e-6)
        self.final_norm = nn.Identity() if style == "post" else kind(dim, eps=eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def _build_positions(
        self, value: Options, dim: int, num_layers: int, num_heads: int
    ) -> nn.ModuleList:
        name, options = named_options(value, "positions")
        share, ids = options.pop("share", None), options.pop("ids", None)
        if share not in (None, True, False):
            raise ConfigError(f"share must be true or false; got {share!r}. Change it.")
        head_dim = cast(TransformerBlock, self.layers[0]).attention.head_dim

        def build() -> Positions:
            return build_positions(name, dim=dim, num_heads=num_heads, head_dim=head_dim, **options)

        first = build()
        self.ids = ids or ("task" if first.coupled else "sequence")
        check_choice(self.ids, ("task", "sequence"), "ids")
        per_layer = bool(first.per_layer) if share is None else not share
        return nn.ModuleList([first, *(build() for _ in range(num_layers - 1 if per_layer else 0))])

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the logits of the next token at every place of `tokens`.

        With a `cache`, `tokens`, `position_ids` and `mask` are those of the new tokens only.
        """
        self._check_inputs(tokens, mask, cache)
        real = tokens.new_ones(1, tokens.shape[1], dtype=torch.bool) if mask is None else mask
        start = 0 if cache is None or cache.index is None else cache.index
        index = (real.cumsum(1) - 1 + start).clamp(min=0)  # (1 or B, T), padding not counted
        ids = self._ids(tokens, position_ids, real, index)
        k_ids, visible = (ids, real) if cache is None else cache.extend(ids, real)
        padded = mask is not None or (cache is not None and not bool(visible.all()))
        key_mask = visible[:, None, None, :] if padded else None

        x = self.embedding(tokens)
        encodings = cast("list[Positions]", list(self.positions))
        if encodings[0].per_sample:
            ids = ids.expand(len(tokens), -1)
        added = encodings[0].embed(ids)
        x = x if added is None else x + added
        biases = [p.bias(ids, k_ids, q_index=index) for p in encodings]
        for step in range(self.loops * len(self.layers)):
            number = step % len(self.layers)
            own = number if len(encodings) > 1 else 0
            x = self.layers[number](
                x,
                key_mask,
                causal=True,
                bias=biases[own],
                positions=encodings[own],
                ids=ids,
                index=index,
                cache=None if cache is None else cache.layer(step),
            )
        return self.head(self.final_norm(x))  # type: ignore[no-any-return]

    def _ids(self, tokens: Tensor, given: Tensor | None, real: Tensor, index: Tensor) -> Tensor:
        if self.ids == "sequence":
            return (index + 1) * real
        if given is None:
            raise DataError(
                "position_ids are needed, since this model's position encoding reads the ids "
                "of a task; "
                "got None. Pass task.position_ids(query), or build the model with ids='sequence'."
            )
        check_ids(given, cast(Positions, self.positions[0]).levels)
        if given.shape[1] != tokens.shape[1] or given.shape[0] not in (1, tokens.shape[0]):
            raise ShapeError(
                f"position_ids must have one id for each token, {tuple(tokens.shape)}; "
                f"got {tuple(given.shape)}. Pass the ids of these tokens only."
            )
        # samples with equal ids share one bias, which saves time and memory
        return given[:1] if len(given) > 1 and bool((given == given[:1]).all()) else given

    def _check_inputs(self, tokens: Tensor, mask: Tensor | None, cache: KVCache | None) -> None:
        check_shape(tokens, (None, None), "tokens")
        if mask is not None:
            check_shape(mask, tuple(tokens.shape), "mask")
            if mask.dtype != torch.bool:
                raise DtypeError(
                    f"mask must be boolean, True = a real token; got {mask.dtype}. Use mask.bool()."
                )
        length = tokens.shape[1] + (0 if cache is None else cache.length)
        if self.max_length is not None and length > self.max_length:
            raise DataError(
                f"tokens must be at most max_length = {self.max_length} long; got {length}. "
                "Shorten the input or build the model with a larger max_length."
            )

    def new_cache(self) -> KVCache:
        """Return an empty cache of the right depth."""
        return KVCache(self.loops * len(self.layers))

    @property
    def cacheable(self) -> bool:
        """Whether cached decoding equals the full pass."""
        return all(bool(p.cacheable) for p in self.positions)

    def generate(
        self,
        prompt: Tensor,
        position_ids: Tensor | Callable[[Tensor], Tensor] | None = None,
        *,
        max_new_tokens: int,
        mask: Tensor | None = None,
        eos: int | None = None,
        use_cache: bool | None = None,
    ) -> Tensor:
        """Decode greedily; see `gossamer.models.generate`."""
        return generate(
            self,
            prompt,
            position_ids,
            max_new_tokens=max_new_tokens,
            mask=mask,
            eos=eos,
            use_cache=use_cache,
        )
