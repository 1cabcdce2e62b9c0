"""A transformer that forgets the scale of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.checks import check_range, check_shape
from gossamer.errors import DataError, DtypeError, UnsupportedError
from gossamer.layers import ExactNorm, ScaleInvariantEncoderLayer
from gossamer.models.generation import generate
from gossamer.models.saving import PretrainedModel

__all__ = ["ScaleInvariantTransformer"]


class ScaleInvariantTransformer(PretrainedModel):
    """Encoder or causal model whose output does not change when its weights are all multiplied.

    All but the output layer `head` is of degree 0 in its weights: embeddings (degree 1), a norm
    with gain (1), a linear map (2), layers of degree 2, a norm (0). Train that part with
    `ScaleInvariantSGD` and the head with an optimiser of its own; `split_parameters` gives both.

    Args:
        vocab_size: Number of tokens V. Range: >= 1.
        dim: Model width M; a multiple of `num_heads`.
        num_layers: Layers. Range: >= 1.
        num_heads: Attention heads.
        causal: A token sees only what stands before it, and logits are of the next token;
            otherwise they are of the token itself. Default false.
        hidden_dim: Inner width of the feed-forward blocks. Default 4 times `dim`.
        init_std: Standard deviation of the weights at the start. Range: > 0. Default 0.02.
        balanced_init: Start the gain of the input norm at `init_std` instead of 1. In a small
            model a gain of 1 is a large part of the norm of all weights, and so of the effective
            learning rate. Default false, as in the paper.
        num_segments: Segments a token can belong to, 0 for none. Default 0.
        max_length: Rows of the position table and most tokens. `None` builds no table: then a
            causal model knows the order by its mask alone, and an encoder does not know it.

    Shape:
        - tokens: `(B, T)`, integers.
        - position_ids: not read; the model counts. There so that the batches of a task fit.
        - mask: `(B, T)`, boolean, True = a real token; padding may stand anywhere.
        - segments: `(B, T)`, integers 0 to `num_segments - 1`. Default all 0.
        - output: `(B, T, V)`.

    Raises:
        ConfigError: If an option is out of range.
        DataError: If more than `max_length` tokens come, or segments are out of range or not
            expected.

    Example:
        >>> model = ScaleInvariantTransformer(14, 32, 1, 4, causal=True, max_length=16)
        >>> model(torch.tensor([[1, 5, 12, 6]])).shape
        torch.Size([1, 4, 14])

    Source: Li et al., *Robust Training of Neural Networks Using Scale Invariant Architectures*,
        ICML 2022, section 4 (SIBERT).
    Deviations: the paper's figure of the input block could not be checked, this one reaches degree
        2 as it must; no dropout; the head is one linear map.
    """

    ids = "sequence"
    # a token's logits do not depend on what follows it, so one pass scores a whole answer
    cacheable = True
    variant_parts = ("head",)

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        *,
        causal: bool = False,
        hidden_dim: int | None = None,
        init_std: float = 0.02,
        balanced_init: bool = False,
        num_segments: int = 0,
        max_length: int | None = None,
    ) -> None:
        config = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        super().__init__()
        for size in ("vocab_size", "dim", "num_layers", "num_heads"):
            check_range(config[size], size, low=1, integer=True)
        check_range(num_segments, "num_segments", low=0, integer=True)
        check_range(init_std, "init_std", low=0.0, open_low=True)
        if max_length is not None:
            check_range(max_length, "max_length", low=1, integer=True)
        self.config = config
        self.causal = causal
        self.max_length = max_length
        self.embedding = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_length, dim) if max_length else None
        self.segment_embedding = nn.Embedding(num_segments, dim) if num_segments else None
        self.input_norm = ExactNorm(dim, affine=True)
        self.input = nn.Linear(dim, dim, bias=False)
        hidden = 4 * dim if hidden_dim is None else hidden_dim
        self.layers = nn.ModuleList(
            ScaleInvariantEncoderLayer(dim, num_heads, hidden, causal=causal, init_std=init_std)
            for _ in range(num_layers)
        )
        self.final_norm = ExactNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        tables = (self.embedding, self.positions, self.segment_embedding, self.input)
        for part in tables:
            if part is not None:
                nn.init.trunc_normal_(part.weight, std=init_std, a=-2 * init_std, b=2 * init_std)
        if balanced_init and self.input_norm.weight is not None:
            nn.init.constant_(self.input_norm.weight, init_std)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Return the logits at every place of `tokens`; there is no cache to give."""
        if cache is not None:
            self.new_cache()
        return self.head(self.encode(tokens, mask=mask, segments=segments))  # type: ignore[no-any-return]

    def encode(
        self, tokens: Tensor, *, mask: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Return what the head reads, `(B, T, M)`: the output of the scale-invariant part."""
        self._check_inputs(tokens, mask, segments)
        x = self.embedding(tokens)
        if self.positions is not None:
            real = torch.ones_like(tokens) if mask is None else mask.long()
            x = x + self.positions((real.cumsum(1) - 1).clamp(min=0))  # padding is not counted
        if self.segment_embedding is not None:
            x = x + self.segment_embedding(
                torch.zeros_like(tokens) if segments is None else segments
            )
        h = self.input(self.input_norm(x))
        keys = None if mask is None else mask[:, None, None, :]
        for layer in self.layers:
            h = layer(h, keys)
        return self.final_norm(h)  # type: ignore[no-any-return]

    def new_cache(self) -> Any:
        """Refuse: this model keeps no keys and values.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "ScaleInvariantTransformer decodes without a cache; got a request for one. Use "
            "use_cache=False."
        )

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
        """Decode greedily with a causal model, without a cache; see `gossamer.models.generate`."""
        if use_cache:
            self.new_cache()
        if not self.causal:
            raise UnsupportedError(
                "only a causal model decodes; got causal=False. Build it with causal=True."
            )
        return generate(
            self,
            prompt,
            position_ids,
            max_new_tokens=max_new_tokens,
            mask=mask,
            eos=eos,
            use_cache=False,
        )

    def _check_inputs(self, tokens: Tensor, mask: Tensor | None, segments: Tensor | None) -> None:
        check_shape(tokens, (None, None), "tokens")
        if mask is not None:
            check_shape(mask, tuple(tokens.shape), "mask")
            if mask.dtype != torch.bool:
                raise DtypeError(
                    f"mask must be boolean, True = a real token; got {mask.dtype}. Use mask.bool()."
                )
        if self.max_length is not None and tokens.shape[1] > self.max_length:
            raise DataError(
                f"tokens must be at most max_length = {self.max_length} long; got "
                f"{tokens.shape[1]}. Shorten the input or build the model with a larger max_length."
            )
        if segments is not None:
            if self.segment_embedding is None:
                raise DataError(
                    "segments are not expected, since the model was built with num_segments=0; "
                    f"got {tuple(segments.shape)}. Leave them out or give num_segments."
                )
            check_shape(segments, tuple(tokens.shape), "segments")
            most = self.segment_embedding.num_embeddings - 1
            if segments.numel() and not 0 <= int(segments.min()) <= int(segments.max()) <= most:
                raise DataError(
                    f"segments must be 0 to num_segments - 1 = {most}; got {int(segments.min())} "
                    f"to {int(segments.max())}. Number them from 0."
                )
