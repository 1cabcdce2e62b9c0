"""A decoder-only transformer whose position encoding is a part one can choose."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gossamer.attention import KVCache
from gossamer.checks import check_range
from gossamer.models.block import Options
from gossamer.models.generation import generate
from gossamer.models.transformer import Transformer

__all__ = ["Decoder"]


class Decoder(Transformer):
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
        attention: Options of `MultiHeadAttention`, for example `{"num_kv_heads": 2}`; or another
            layer by name: `{"name": "shaw", "max_distance": 16}`, `{"name": "top_k", "num_keys":
            8}`, `{"name": "sparse", "patterns": [{"kind": "sliding", "length": 9, "window": 2}]}`.
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
        >>> import torch
        >>> model = Decoder(14, 32, 1, 4, positions="coupled_relative", norm="pre_post")
        >>> ids = torch.tensor([[0, 2, 1, 2]])
        >>> model(torch.tensor([[1, 5, 12, 6]]), ids).shape
        torch.Size([1, 4, 14])

    Source: Vaswani et al. 2017; norms as in Cho et al., NeurIPS 2024, public code.
    Deviations: token embeddings start at N(0, 1), linear maps at PyTorch's default.
    """

    causal = True

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        *,
        positions: Options = "rope",
        feed_forward: Options = "gelu",
        attention: Options | None = None,
        norm: Options = "pre",
        loops: int = 1,
        max_length: int | None = None,
    ) -> None:
        config = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        check_range(loops, "loops", low=1, integer=True)
        super().__init__(config)
        self.loops = loops

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
        return self._run(tokens, position_ids, mask, cache=cache, loops=self.loops)

    def new_cache(self) -> KVCache:
        """Return an empty cache of the right depth."""
        return KVCache(self.loops * len(self.layers))

    @property
    def cacheable(self) -> bool:
        """Whether cached decoding equals the full pass."""
        return all(p.cacheable for p in self._encodings())

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
