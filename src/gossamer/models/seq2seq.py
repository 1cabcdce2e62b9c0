"""An encoder-decoder whose encoder output serves several targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.attention import KVCache, SourceKeys
from gossamer.checks import check_shape
from gossamer.errors import ConfigError
from gossamer.models.beam import beam_search
from gossamer.models.block import CrossBlock, Options
from gossamer.models.saving import PretrainedModel
from gossamer.models.transformer import TransformerStack

__all__ = ["Seq2Seq", "SourceState", "shift_right"]


class _Reader(TransformerStack):
    causal = False

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._build_layers()


class _Writer(_Reader):
    causal = True
    block = CrossBlock


@dataclass(frozen=True)
class SourceState:
    """What an encoder made of a batch of sources, for any number of decoder passes.

    Args:
        states: `(B, S, M)`, the encoder's output.
        keys: Keys and values of each decoder layer, with the mask of the sources.
    """

    states: Tensor
    keys: tuple[SourceKeys, ...]

    def __len__(self) -> int:
        return len(self.states)

    def select(self, rows: Tensor) -> SourceState:
        """Return the state of some samples, which may repeat."""
        return SourceState(self.states[rows], tuple(keys.select(rows) for keys in self.keys))


class Seq2Seq(PretrainedModel):
    r"""Encoder-decoder transformer: source and target in, logits of the next target token out.

    Source, target and output share one table of embeddings, drawn from N(0, 1/M) and multiplied by
    $\sqrt{M}$ where they go in. `encode` runs the encoder once; its state serves several targets
    (`decode`) and every step of decoding. Padding stands on the right of a target, where a causal
    model does not see it; that of a source is told by a mask. With `source_positions="none"` a
    source is a set: its order changes nothing.

    Args:
        vocab_size: Number of tokens V, of sources and targets together. Range: >= 1.
        dim: Model width M.
        num_layers: Layers of the encoder, and of the decoder. Range: >= 1.
        num_heads: Attention heads.
        positions: Position encoding as in `Decoder`, of one that counts 1..T. Default `"learned"`,
            with a table of `max_length` rows.
        source_positions: That of the encoder. Default `None`, the same.
        feed_forward: As in `Decoder`.
        norm: As in `Decoder`.
        dropout: On embeddings and on the output of every sublayer, in training. Range: 0 to 1.
            Default 0.
        max_length: Most tokens of a source and of a target, or `None` for no limit.

    Shape:
        - source: `(B, S)`, integers; mask: `(B, S)`, boolean, True = a real token.
        - target: `(B, T)`, integers: the start token, then what is known of the target; or
          `(B, k, T)` for k targets of each source, encoded once.
        - output: `(B, T, V)`, or `(B, k, T, V)`.

    Raises:
        ConfigError: If an option is unknown or out of range, or positions read ids of a task.
        DataError: If more than `max_length` tokens come.
        ShapeError: If source, mask and target do not fit.

    Example:
        >>> model = Seq2Seq(14, 16, 1, 2, source_positions="none", max_length=8)
        >>> source, labels = torch.tensor([[4, 5, 6]]), torch.tensor([[7, 8, 1]])
        >>> model(source, shift_right(labels)).shape
        torch.Size([1, 3, 14])
        >>> model.generate(source, max_new_tokens=4, num_beams=2).shape[0]
        1

    Source: Vaswani et al., *Attention Is All You Need*, NeurIPS 2017, figure 1 and section 3.4.
    Deviations: the norm stands before each sublayer unless `norm` says otherwise.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        *,
        positions: Options = "learned",
        source_positions: Options | None = None,
        feed_forward: Options = "gelu",
        norm: Options = "pre",
        dropout: float = 0.0,
        max_length: int | None = None,
    ) -> None:
        config = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        super().__init__()
        self.config = config
        self.max_length = max_length
        options: dict[str, Any] = {**config, "attention": None}
        own = positions if source_positions is None else source_positions
        self.encoder = _Reader({**options, "positions": own})
        self.decoder = _Writer(options)
        for stack in (self.encoder, self.decoder):
            if stack.ids == "task":
                raise ConfigError(
                    "positions of a Seq2Seq must count 1..T; got an encoding that reads the ids of "
                    f"a task, {stack.config['positions']!r}. Choose another, or add "
                    "ids='sequence'."
                )
        self.embedding = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)

    def forward(self, source: Tensor, target: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Return the logits of the next token at every place of `target`."""
        return self.decode(target, self.encode(source, mask))

    def encode(self, source: Tensor, mask: Tensor | None = None) -> SourceState:
        """Run the encoder.

        Args:
            source: `(B, S)`, integers.
            mask: `(B, S)`, boolean, True = a real token. Default all.
        """
        states = self.encoder._states(source, self._embed(source), None, mask)
        layers = cast("list[CrossBlock]", list(self.decoder.layers))
        return SourceState(states, tuple(b.cross_attention.read(states, mask) for b in layers))

    def decode(self, target: Tensor, state: SourceState, *, cache: KVCache | None = None) -> Tensor:
        """Return the logits of the next token, `(B, T, V)` or `(B, k, T, V)`.

        Args:
            target: `(B, T)` or `(B, k, T)`, integers; with a `cache`, the new tokens only.
            state: Of `encode`.
            cache: Of `new_cache`, for decoding step by step.
        """
        if target.dim() == 3:
            check_shape(target, (len(state), None, None), "target")
            rows = torch.arange(len(state), device=target.device)
            several = state.select(rows.repeat_interleave(target.shape[1]))
            logits = self.decode(target.flatten(0, 1), several, cache=cache)
            return logits.view(*target.shape, -1)
        check_shape(target, (len(state), None), "target")
        x = self._embed(target)
        options: dict[str, Any] = {"cache": cache, "sources": state.keys}
        return F.linear(
            self.decoder._states(target, x, None, None, **options), self.embedding.weight
        )

    def new_cache(self) -> KVCache:
        """Return an empty cache of the decoder's depth."""
        return KVCache(len(self.decoder.layers))

    def generate(
        self,
        source: Tensor,
        *,
        mask: Tensor | None = None,
        max_new_tokens: int,
        num_beams: int = 1,
        eos: int = 1,
    ) -> Tensor:
        """Decode greedily or with beams; see `gossamer.models.beam_search`."""
        return beam_search(
            self,
            source,
            mask=mask,
            max_new_tokens=max_new_tokens,
            num_beams=num_beams,
            eos=eos,
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        return x


def shift_right(labels: Tensor, *, start: int = 1) -> Tensor:
    """Return what a decoder reads to predict `labels`: the start token, then all but the last.

    Args:
        labels: `(B, T)`, integers, -100 for padding on the right.
        start: The token that begins a target. Default 1.

    Example:
        >>> shift_right(torch.tensor([[7, 8, 1], [9, 1, -100]])).tolist()
        [[1, 7, 8], [1, 9, 1]]

    Source: Raffel et al., *Exploring the Limits of Transfer Learning*, JMLR 2020, public code.
    Deviations: padding is read as token 0.
    """
    check_shape(labels, (None, None), "labels")
    first = labels.new_full((len(labels), 1), start)
    return torch.cat((first, labels[:, :-1].clamp(min=0)), dim=1)
