"""A bidirectional transformer whose position encoding is a part one can choose."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.checks import check_range, check_shape
from gossamer.errors import ConfigError, DataError, DtypeError
from gossamer.models.block import Options
from gossamer.models.transformer import Transformer, shared_rows

__all__ = ["Encoder"]


class Encoder(Transformer):
    """Bidirectional transformer: tokens in, logits of each token itself out.

    A masked language model, or a model that fills in the blanks of a task's answer. Built from the
    same parts as `Decoder`, with the same entries. An encoding that has the option
    `bidirectional` gets it true unless the entry says otherwise. Segments (which of two sentences
    a token belongs to) are added as an embedding at the input, unless the encoding carries them
    itself (`{"name": "diet_absolute", "num_segments": 2}`): then they travel as one more level of
    the ids, segment number + 1, 0 for padding.

    Args:
        vocab_size: Number of tokens V. Range: >= 1.
        dim: Model width M.
        num_layers: Layers. Range: >= 1.
        num_heads: Attention heads.
        positions: Position encoding, as in `Decoder`. Default `"learned"`, with a table of
            `max_length` rows.
        feed_forward: As in `Decoder`.
        attention: As in `Decoder`; also `{"name": "linformer", "length": 512, "projection_dim":
            64}`.
        norm: As in `Decoder`.
        num_segments: Segments a token can belong to, 0 for none. Default 0, or the encoding's own.
        max_length: Most tokens, or `None` for no limit; `"learned"` and the DIET encodings take
            their table's size from it.

    Shape:
        - tokens: `(B, T)`, integers.
        - position_ids: `(B, T)`, `(1, T)`, or with levels `(B, T, levels)`.
        - mask: `(B, T)`, boolean, True = a real token; padding may stand anywhere.
        - segments: `(B, T)`, integers 0 to `num_segments - 1`. Default all 0.
        - output: `(B, T, V)`.

    Raises:
        ConfigError: If an option is unknown or out of range.
        DataError: If a coupled encoding gets no ids, more than `max_length` tokens come, or
            segments are out of range or not expected.

    Example:
        >>> model = Encoder(14, 32, 1, 4, num_segments=2, max_length=16)
        >>> model(torch.tensor([[1, 5, 12, 6]]), segments=torch.tensor([[0, 0, 1, 1]])).shape
        torch.Size([1, 4, 14])

    Source: Devlin et al., *BERT*, NAACL 2019; segments for each head: Chen et al., EMNLP 2021,
        section 3.3.
    Deviations: no pooler; the output layer is one linear map that shares no weights.
    """

    causal = False

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        *,
        positions: Options = "learned",
        feed_forward: Options = "gelu",
        attention: Options | None = None,
        norm: Options = "pre",
        num_segments: int = 0,
        max_length: int | None = None,
    ) -> None:
        config = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        check_range(num_segments, "num_segments", low=0, integer=True)
        super().__init__(config)
        carried = self._encodings()[0].num_segments
        if carried and num_segments not in (0, carried):
            raise ConfigError(
                "num_segments of the model and of its position encoding must agree; got "
                f"{num_segments} and {carried}. Give one of them."
            )
        self.num_segments = num_segments or carried
        # whether the ids carry the segments as their last level
        self.segments_in_ids = carried > 0
        embedded = 0 if self.segments_in_ids else num_segments
        self.segment_embedding = nn.Embedding(embedded, dim) if embedded else None

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of every token; what stands at masked-out places has no meaning."""
        if segments is not None:
            self._check_segments(tokens, segments)
        return self._run(tokens, position_ids, mask, segments=segments)

    def _embed(self, tokens: Tensor, segments: Tensor | None) -> Tensor:
        x = super()._embed(tokens, segments)
        if self.segment_embedding is None:
            return x
        added: Tensor = self.segment_embedding(tokens * 0 if segments is None else segments)
        return x + added

    def _ids(
        self,
        tokens: Tensor,
        given: Tensor | None,
        real: Tensor,
        index: Tensor,
        segments: Tensor | None,
    ) -> Tensor:
        if not self.segments_in_ids:
            return super()._ids(tokens, given, real, index, segments)
        ids = (index + 1) * real if self.ids == "sequence" else self._given_ids(tokens, given)
        if ids.dim() == 3 and segments is None:
            return shared_rows(ids)  # the ids of the caller hold the segments already
        number = real.long() if segments is None else (segments + 1) * real
        rows = max(len(ids), len(number))
        levels = ids[..., None] if ids.dim() == 2 else ids
        parts = (levels.expand(rows, -1, -1), number[..., None].expand(rows, -1, -1))
        return shared_rows(torch.cat(parts, dim=-1))

    def _check_segments(self, tokens: Tensor, segments: Tensor) -> None:
        if not self.num_segments:
            raise DataError(
                "segments are not expected, since the model was built with num_segments=0; got "
                f"{tuple(segments.shape)}. Leave them out or build the model with num_segments."
            )
        check_shape(segments, tuple(tokens.shape), "segments")
        if segments.is_floating_point() or segments.dtype == torch.bool:
            raise DtypeError(
                f"segments must be integers; got {segments.dtype}. Convert with segments.long()."
            )
        if segments.numel() and not 0 <= int(segments.min()) <= int(segments.max()) < (
            self.num_segments
        ):
            raise DataError(
                f"segments must be 0 to num_segments - 1 = {self.num_segments - 1}; got "
                f"{int(segments.min())} to {int(segments.max())}. Number them from 0."
            )
