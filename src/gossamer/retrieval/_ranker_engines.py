"""The signal logits of one prompt, in three ways that give one result.

`three_pass` reads the instruction once, then the documents in portions on top of its keys and
values, then the question on top of all; the others run the prompt as it stands, `mask4d` under the
whole mask and `block` by block attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.attention import BlockLayout
from gossamer.attention.block import attend_documents, attend_last, grouped_logits, signal_logits
from gossamer.errors import UnsupportedError
from gossamer.models import register_block_attention
from gossamer.retrieval._ranker_model import check_registered, first_layers, num_layers, registered

__all__ = [
    "AttentionPart",
    "Passes",
    "States",
    "block",
    "found_logits",
    "mask4d",
    "portions",
    "run_part",
]

_PASSES, _MASKED = "gossamer_rank_passes", "gossamer_rank_mask"


class States:
    """Keys and values of a prompt's tokens in layers below the one that is read, keys in that.

    One tensor, `(2 * layer + 1, H_kv, T, D)`: key and value of layer 0, of layer 1, ...

    Args:
        layer: The one that is read.
        num_tokens: T.
    """

    def __init__(self, layer: int, num_tokens: int) -> None:
        self.layer = layer
        self.num_tokens = num_tokens
        self.data: Tensor | None = None

    def put(self, layer: int, begin: int, k: Tensor, v: Tensor | None) -> None:
        """Keep keys and values, `(1, H_kv, S, D)`, from a token on."""
        data = self._data(k.shape[1], k.shape[3], k)
        end = begin + k.shape[2]
        data[2 * layer, :, begin:end] = k[0]
        if v is not None:
            data[2 * layer + 1, :, begin:end] = v[0]

    def put_all(self, begin: int, states: Tensor) -> None:
        """Keep the states of some tokens in every layer, `(2 * layer + 1, H_kv, S, D)`."""
        data = self._data(states.shape[1], states.shape[3], states)
        data[:, :, begin : begin + states.shape[2]] = states

    def get(self, layer: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of some tokens, `(1, H_kv, S, D)`, without a copy."""
        k, v = self._kept()[2 * layer : 2 * layer + 2, None, :, begin:end]
        return k, v

    def read_keys(self, begin: int, end: int) -> Tensor:
        """Return the keys of some tokens in the layer that is read."""
        return self._kept()[-1, None, :, begin:end]

    def get_all(self, begin: int, end: int) -> Tensor:
        """Return what `put_all` takes."""
        return self._kept()[:, :, begin:end]

    def _data(self, heads: int, width: int, like: Tensor) -> Tensor:
        if self.data is None:
            shape = (2 * self.layer + 1, heads, self.num_tokens, width)
            self.data = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self.data

    def _kept(self) -> Tensor:
        if self.data is None:
            raise UnsupportedError(
                "the model must call the attention that it is given; got a model whose layers "
                "did not. Take off hooks, such as those of device_map, and other patches."
            )
        return self.data


class AttentionPart(Protocol):
    """What the attention layers do with one part of the prompt."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...


class _Instruction:
    def __init__(self, states: States) -> None:
        self.states = states

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if layer == self.states.layer:
            self.states.put(layer, 0, torch.zeros_like(k), None)  # nobody reads them there
            return torch.zeros_like(q)
        self.states.put(layer, 0, k, v)
        return attend_last(q, k, v, scale)


class _Documents:
    def __init__(self, states: States, first: int, begin: int, lengths: Sequence[int]) -> None:
        self.states = states
        self.first = first
        self.begin = begin
        self.lengths = tuple(lengths)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if layer == self.states.layer:
            self.states.put(layer, self.begin, k, None)
            return torch.zeros_like(q)
        self.states.put(layer, self.begin, k, v)
        shared = self.states.get(layer, 0, self.first)
        return attend_documents(q, k, v, shared, self.lengths, scale)


class _Question:
    def __init__(self, states: States, first: int, begin: int, signals: Sequence[int]) -> None:
        self.states = states
        self.first = first
        self.begin = begin
        self.signals = list(signals)
        self.logits: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if layer == self.states.layer:
            keys = self.states.read_keys(self.first, self.begin)
            self.logits = grouped_logits(q[:, :, self.signals], keys, scale=scale)
            return torch.zeros_like(q)
        self.states.put(layer, self.begin, k, v)
        return attend_last(q, *self.states.get(layer, 0, self.begin + k.shape[2]), scale)


class Passes:
    """The three passes over one prompt.

    Args:
        model: A causal language model.
        layer: The one that is read.
        first: Tokens of the instruction.
        lengths: Tokens of each document, in the order in which their logits are wanted.
        last: Tokens of the last block.
    """

    def __init__(
        self, model: Any, layer: int, *, first: int, lengths: Sequence[int], last: int
    ) -> None:
        name = registered(_PASSES, _attend_part)
        self._read = first_layers(model, layer + 1, name, read=True)
        self.first = first
        self.begins = [first + sum(lengths[:place]) for place in range(len(lengths) + 1)]
        self.states = States(layer, self.begins[-1] + last)

    def instruction(self, tokens: Sequence[int]) -> None:
        """Read the instruction."""
        _run(self._read, tokens, range(len(tokens)), _Instruction(self.states))

    def documents(self, blocks: Sequence[Sequence[int]], place: int) -> None:
        """Read some documents, the first of them at a place of the list."""
        lengths = [len(block) for block in blocks]
        positions = [self.first + i for length in lengths for i in range(length)]
        tokens = [token for block in blocks for token in block]
        part = _Documents(self.states, self.first, self.begins[place], lengths)
        _run(self._read, tokens, positions, part)

    def question(self, tokens: Sequence[int], offset: int, signals: Sequence[int]) -> Tensor:
        """Read the last block and return the signal logits."""
        part = _Question(self.states, self.first, self.begins[-1], signals)
        _run(self._read, tokens, range(offset, offset + len(tokens)), part)
        return found_logits(part.logits)


def portions(lengths: Sequence[int], batch_tokens: int) -> list[tuple[int, int]]:
    """Return runs of documents, `(begin, end)`, each of at most so many tokens, or one document."""
    runs: list[tuple[int, int]] = []
    begin, used = 0, 0
    for place, length in enumerate(lengths):
        if place > begin and used + length > batch_tokens:
            runs.append((begin, place))
            begin, used = place, 0
        used += length
    return [*runs, (begin, len(lengths))] if lengths else []


def mask4d(
    model: Any, layer: int, layout: BlockLayout, tokens: Tensor, positions: Tensor
) -> Tensor:
    """Return the signal logits from one run under the whole mask: the form to check by."""
    found: dict[int, Tensor | None] = {layer: None}
    name = registered(_MASKED, _attend_masked)
    part = first_layers(model, layer + 1, name, read=True)
    device = next(model.parameters()).device
    part(
        input_ids=tokens[None].to(device),
        position_ids=positions[None].to(device),
        attention_mask=layout.mask(device=device)[None, None],
        use_cache=False,
        rank_signals=found,
        rank_layout=layout,
    )
    return found_logits(found[layer])


def block(model: Any, layer: int, layout: BlockLayout, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the signal logits from one run of block attention."""
    found: dict[int, Tensor | None] = {layer: None}
    name = check_registered(register_block_attention())
    part = first_layers(model, layer + 1, name, read=True)
    device = next(model.parameters()).device
    part(
        input_ids=tokens[None].to(device),
        position_ids=positions[None].to(device),
        use_cache=False,
        block_layout=layout,
        block_signals=found,
    )
    return found_logits(found[layer])


def run_part(
    model: Any, tokens: Sequence[int], positions: Sequence[int], part: AttentionPart
) -> None:
    """Run a part of a prompt through all layers."""
    whole = first_layers(model, num_layers(model), registered(_PASSES, _attend_part), read=False)
    _run(whole, tokens, positions, part)


def _run(model: Any, tokens: Sequence[int], positions: Sequence[int], part: AttentionPart) -> None:
    device = next(model.parameters()).device
    model(
        input_ids=torch.tensor([list(tokens)], device=device),
        position_ids=torch.tensor([list(positions)], device=device),
        use_cache=False,
        rank_part=part,
    )


def found_logits(logits: Tensor | None) -> Tensor:
    """Return what a part has found, or say that the model did not call its attention."""
    if logits is None:
        raise UnsupportedError(
            "the layer that is read must call the attention that it is given; got a layer that "
            "did not. Take off hooks, such as those of device_map, and other patches."
        )
    return logits


def _attend_part(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rank_part: AttentionPart,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return rank_part.attend(layer, query, key, value, scale).transpose(1, 2).contiguous(), None


def _attend_masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rank_signals: dict[int, Tensor | None],
    rank_layout: BlockLayout,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    if layer in rank_signals:
        rank_signals[layer] = signal_logits(query, key, rank_layout, scale=scale)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None
