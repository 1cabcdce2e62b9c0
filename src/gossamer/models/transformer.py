"""What all transformers share: parts by name, position ids, one pass through the layers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.attention import KVCache, LinformerAttention, SourceKeys, position_bias
from gossamer.checks import check_choice, check_range, check_shape
from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.models.block import Options, TransformerBlock, named_options
from gossamer.models.saving import PretrainedModel
from gossamer.positions import Positions, build_positions, check_ids

__all__ = ["Transformer", "TransformerStack"]

# the option of an encoding that the model's max_length answers when it is not given
_FROM_MAX_LENGTH = {
    "learned": "max_position",
    "diet_absolute": "max_length",
    "diet_relative": "max_length",
}


class TransformerStack(PretrainedModel):
    """What stands between embedding and output layer; a subclass has these and builds the layers.

    Attributes:
        causal: Whether a token sees only what stands before it, so that logits are of the next
            token; otherwise they are of the token itself.
        ids: `"task"` when the model reads position ids, `"sequence"` when it counts.
        block: Class of the layers.

    Args:
        config: The keywords of the subclass, by name; sizes are checked here.
    """

    causal: bool
    ids: str
    block: type[TransformerBlock] = TransformerBlock

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        for size in ("vocab_size", "dim", "num_layers", "num_heads"):
            check_range(config[size], size, low=1, integer=True)
        self.config = config
        self.max_length: int | None = config["max_length"]
        self.dropout: float = config.get("dropout", 0.0)

    def _build_layers(self) -> None:
        config = self.config
        dim, norm = config["dim"], config["norm"]
        options = {key: config[key] for key in ("feed_forward", "attention", "norm")}
        options["dropout"] = self.dropout
        self.layers = nn.ModuleList(
            self.block(dim, config["num_heads"], **options, layer=number)
            for number in range(config["num_layers"])
        )
        self.positions = self._build_positions(config["positions"])
        style, norm_options = named_options(norm, "norm")
        kind = nn.LayerNorm if norm_options.get("kind") == "layer" else nn.RMSNorm
        eps = norm_options.get("eps", 1e-6)
        self.final_norm = nn.Identity() if style == "post" else kind(dim, eps=eps)

    def _build_positions(self, value: Options) -> nn.ModuleList:
        name, options = named_options(value, "positions")
        share, ids = options.pop("share", None), options.pop("ids", None)
        if share not in (None, True, False):
            raise ConfigError(f"share must be true or false; got {share!r}. Change it.")
        if name in _FROM_MAX_LENGTH and self.max_length is not None:
            options.setdefault(_FROM_MAX_LENGTH[name], self.max_length)
        sizes = {
            "dim": self.config["dim"],
            "num_heads": self.config["num_heads"],
            "head_dim": cast(TransformerBlock, self.layers[0]).attention.head_dim,
        }

        def build() -> Positions:
            return build_positions(name, **sizes, **options)

        first = build()
        two_sided = "bidirectional" in inspect.signature(type(first)).parameters
        if two_sided and not self.causal and "bidirectional" not in options:
            options["bidirectional"] = True
            first = build()
        # an encoder gets segments apart from the ids, so it can count the positions itself
        reads = first.coupled and (self.causal or not first.num_segments)
        self.ids = ids or ("task" if reads else "sequence")
        check_choice(self.ids, ("task", "sequence"), "ids")
        per_layer = bool(first.per_layer) if share is None else not share
        copies = self.config["num_layers"] - 1 if per_layer else 0
        return nn.ModuleList([first, *(build() for _ in range(copies))])

    def _encodings(self) -> list[Positions]:
        return cast("list[Positions]", list(self.positions))

    def _states(
        self,
        tokens: Tensor,
        x: Tensor,
        position_ids: Tensor | None,
        mask: Tensor | None,
        *,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
        loops: int = 1,
        sources: Sequence[SourceKeys] | None = None,
    ) -> Tensor:
        """Return what the layers make of the embeddings `x` of `tokens`, normalised."""
        self._check_inputs(tokens, mask, cache)
        real = tokens.new_ones(1, tokens.shape[1], dtype=torch.bool) if mask is None else mask
        start = 0 if cache is None or cache.index is None else cache.index
        index = (real.cumsum(1) - 1 + start).clamp(min=0)  # (1 or B, T), padding not counted
        ids = self._ids(tokens, position_ids, real, index, segments)
        k_ids, visible = (ids, real) if cache is None else cache.extend(ids, real)
        padded = mask is not None or (cache is not None and not bool(visible.all()))
        key_mask = visible[:, None, None, :] if padded else None

        encodings = self._encodings()
        if encodings[0].per_sample:
            ids = ids.expand(len(tokens), *ids.shape[1:])
        added = encodings[0].embed(ids)
        x = F.dropout(x if added is None else x + added, self.dropout, self.training)
        attention = cast(TransformerBlock, self.layers[0]).attention
        if isinstance(attention, LinformerAttention):
            k_ids = _mixture_ids(attention.num_keys, ids)
        heads = attention.num_heads
        biases = [position_bias(p, ids, k_ids, q_index=index, num_heads=heads) for p in encodings]
        for step in range(loops * len(self.layers)):
            number = step % len(self.layers)
            own = number if len(encodings) > 1 else 0
            x = self.layers[number](
                x,
                key_mask,
                causal=self.causal,
                bias=biases[own],
                positions=encodings[own],
                ids=ids,
                index=index,
                cache=None if cache is None else cache.layer(step),
                **({} if sources is None else {"source": sources[number]}),
            )
        return self.final_norm(x)  # type: ignore[no-any-return]

    def _ids(
        self,
        tokens: Tensor,
        given: Tensor | None,
        real: Tensor,
        index: Tensor,
        segments: Tensor | None,
    ) -> Tensor:
        if self.ids == "sequence":
            return (index + 1) * real
        ids = self._given_ids(tokens, given)
        check_ids(ids, self._encodings()[0].levels)
        return shared_rows(ids)

    def _given_ids(self, tokens: Tensor, given: Tensor | None) -> Tensor:
        if given is None:
            raise DataError(
                "position_ids are needed, since this model's position encoding reads the ids "
                "of a task; got None. Pass task.position_ids(query), or build the model with "
                "ids='sequence'."
            )
        if given.dim() < 2:
            check_ids(given, self._encodings()[0].levels)
        if given.shape[1] != tokens.shape[1] or given.shape[0] not in (1, tokens.shape[0]):
            raise ShapeError(
                f"position_ids must have one id for each token, {tuple(tokens.shape)}; "
                f"got {tuple(given.shape)}. Pass the ids of these tokens only."
            )
        return given

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


class Transformer(TransformerStack):
    """Base of `Decoder` and `Encoder`: a stack with its own embedding and output layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config["vocab_size"], config["dim"])
        self._build_layers()
        self.head = nn.Linear(config["dim"], config["vocab_size"], bias=False)

    def _run(
        self,
        tokens: Tensor,
        position_ids: Tensor | None,
        mask: Tensor | None,
        *,
        segments: Tensor | None = None,
        cache: KVCache | None = None,
        loops: int = 1,
    ) -> Tensor:
        """Return the logits at every place of `tokens`."""
        x = self._embed(tokens, segments)
        options: dict[str, Any] = {"segments": segments, "cache": cache, "loops": loops}
        return self.head(self._states(tokens, x, position_ids, mask, **options))  # type: ignore[no-any-return]

    def _embed(self, tokens: Tensor, segments: Tensor | None) -> Tensor:
        return self.embedding(tokens)  # type: ignore[no-any-return]


def shared_rows(ids: Tensor) -> Tensor:
    """Return one row when all are equal: such samples share one bias, which saves time and memory.

    Example:
        >>> shared_rows(torch.tensor([[1, 2], [1, 2]])).tolist()
        [[1, 2]]
    """
    return ids[:1] if len(ids) > 1 and bool((ids == ids[:1]).all()) else ids


def _mixture_ids(num_keys: int, ids: Tensor) -> Tensor:
    """Return the ids of Linformer's keys, 1..P; they belong to no segment."""
    numbers = torch.arange(1, num_keys + 1, device=ids.device)[None]
    return numbers if ids.dim() == 2 else F.pad(numbers[..., None], (0, ids.shape[2] - 1))
