"""The gradient of a loss over very many pairs, with the memory of one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.losses._collectives import Alone
from gossamer.losses._labels import warn_of_range
from gossamer.losses._statistics import Blocks
from gossamer.losses.streamed import StreamedLoss

__all__ = ["GradientCache"]


class GradientCache:
    r"""Backward pass of a contrastive loss over a whole batch, encoding a chunk at a time.

    All inputs and labels are encoded by chunks without a graph; the loss gives the gradient of the
    embeddings; each chunk is encoded again with a graph and gets its part of that gradient. The
    result is the gradient of the whole batch: random numbers of the second pass, as of dropout, are
    those of the first, on every device. It costs one more forward pass.

    Losses that can be streamed (`DecoupledSoftmaxLoss`, `CoupledSoftmaxLoss`, `SummedSoftmaxLoss`)
    need neither the `(B, L)` scores nor the `(L, D)` embeddings of the labels: memory is that of
    one chunk's graph and of `B * chunk_size` scores. `SoftTopKLoss` keeps the embeddings, which its
    search reads again and again. For any other loss both exist.

    Args:
        encode: Maps a chunk of inputs or label inputs to embeddings `(n, D)`.
        loss: Called with logits `(B, L)` and the labels; returns a scalar.
        chunk_size: Inputs or labels at a time. Range: >= 1. Default 1024.
        store_dtype: Of the label embeddings that `SoftTopKLoss` keeps, for its search alone;
            `torch.float16` halves them. Default that of `encode`.

    Raises:
        ConfigError: If an option is out of its range, or `encode` gives nothing to learn.

    Example:
        >>> from gossamer.losses import DecoupledSoftmaxLoss
        >>> encoder = torch.nn.Linear(3, 2)
        >>> cache = GradientCache(encoder, DecoupledSoftmaxLoss(temperature=1.0), chunk_size=2)
        >>> loss = cache.backward(torch.randn(4, 3), torch.randn(5, 3), [[0], [1], [2, 3], [4]])
        >>> encoder.weight.grad.shape
        torch.Size([2, 3])

    Source: Gao et al., *Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup*,
        RepL4NLP 2021.
    Deviations: random states of all devices are kept, also of one that `encode` moves to.
    """

    def __init__(
        self,
        encode: Callable[[Any], Tensor],
        loss: Callable[[Tensor, Any], Tensor],
        *,
        chunk_size: int = 1024,
        store_dtype: torch.dtype | None = None,
    ) -> None:
        check_range(chunk_size, "chunk_size", low=1, integer=True)
        if store_dtype is not None and not store_dtype.is_floating_point:
            raise ConfigError(
                f"store_dtype must be floating point; got {store_dtype}. Use torch.float16."
            )
        self.encode = encode
        self.loss = loss
        self.chunk_size = chunk_size
        self.store_dtype = store_dtype

    def backward(self, inputs: Any, label_inputs: Any, labels: Any) -> Tensor:
        """Add the gradient to the parameters of the encoder, and return the loss without a graph.

        Args:
            inputs: A tensor, a list, or a mapping of tensors, cut along the first axis.
            label_inputs: The same, one entry for each label.
            labels: For the loss.

        Raises:
            ShapeError: If entries of a mapping differ in length, or `encode` gives no matrix.
            DataError: If there are no inputs or no labels.
        """
        if isinstance(self.loss, StreamedLoss) and self.loss.streams:
            return self._streamed(self.loss, inputs, label_inputs, labels)
        sides = [self._embed(side, name) for side, name in _named(inputs, label_inputs)]
        leaves = [embeddings.requires_grad_() for embeddings, _ in sides]
        with torch.enable_grad():
            value = self.loss(leaves[0] @ leaves[1].T, labels)
            gradients = torch.autograd.grad(value, leaves)
            for (side, _), (_, states), gradient in zip(
                _named(inputs, label_inputs), sides, gradients, strict=True
            ):
                self._push(side, states, gradient)
        return value.detach()

    def _streamed(self, loss: StreamedLoss, inputs: Any, label_inputs: Any, labels: Any) -> Tensor:
        """Do the same without the scores."""
        count = _size(label_inputs, "label_inputs")
        embeddings, input_states = self._embed(inputs, "inputs")
        queries = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        queries = queries / loss.temperature
        plan = loss.plan(labels, (len(queries), count), queries)
        states: list[_RandomState] = []
        stored: list[Tensor] = []

        def chunks() -> Iterator[Tensor]:
            if stored:
                yield from stored
                return
            for chunk in self._chunks(label_inputs, "label_inputs", states):
                if plan.statistic.passes > 1:
                    stored.append(chunk if self.store_dtype is None else chunk.to(self.store_dtype))
                yield chunk

        blocks = Blocks(queries, chunks, plan)
        with torch.no_grad():
            value = blocks.fit(Alone())
        stored.clear()
        warn_of_range(loss, blocks.relevant * loss.temperature)
        with torch.enable_grad():
            leaves = [blocks.relevant.requires_grad_(), value.clone().requires_grad_()]
            total = loss.of_statistics(leaves[0], leaves[1], plan)
            to_relevant, to_statistic = torch.autograd.grad(total, leaves)
        to_queries = torch.zeros_like(queries)
        for begin, chunk in self._again(label_inputs, states, count):
            keys = chunk.detach().to(queries.dtype)
            with torch.no_grad():
                gradient = blocks.gradient(keys, begin, to_relevant, to_statistic)
                to_queries += gradient @ keys
                to_keys = gradient.T @ queries
            chunk.backward(to_keys.to(chunk.dtype))  # type: ignore[no-untyped-call]
        self._push(inputs, input_states, to_queries / loss.temperature)
        return total.detach()

    def _embed(self, side: Any, name: str) -> tuple[Tensor, list[_RandomState]]:
        states: list[_RandomState] = []
        return torch.cat(list(self._chunks(side, name, states))), states

    def _chunks(self, side: Any, name: str, states: list[_RandomState]) -> Iterator[Tensor]:
        """Yield embeddings without a graph, and keep the random states of the calls."""
        size = _size(side, name)
        for begin in range(0, size, self.chunk_size):
            states.append(_RandomState())
            part = slice(begin, min(begin + self.chunk_size, size))
            with torch.no_grad():
                embeddings = self.encode(_take(side, part))
            if embeddings.dim() != 2 or len(embeddings) != part.stop - begin:
                raise ShapeError(
                    f"encode must return one row for each of {part.stop - begin} {name}; got "
                    f"{tuple(embeddings.shape)}. Pool the tokens of a text to one vector."
                )
            yield embeddings.detach()

    def _again(
        self, side: Any, states: list[_RandomState], size: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield number of the first row and embeddings with a graph, as drawn before."""
        for number, state in enumerate(states):
            begin = number * self.chunk_size
            part = slice(begin, min(begin + self.chunk_size, size))
            with torch.enable_grad(), state.again():
                embeddings = self.encode(_take(side, part))
            if not embeddings.requires_grad:
                raise ConfigError(
                    "encode must depend on parameters that learn; got embeddings without a "
                    "gradient. Remove torch.no_grad() or detach() from it."
                )
            yield begin, embeddings

    def _push(self, side: Any, states: list[_RandomState], gradient: Tensor) -> None:
        for begin, embeddings in self._again(side, states, len(gradient)):
            part = gradient[begin : begin + len(embeddings)]
            embeddings.backward(part.to(embeddings.dtype))  # type: ignore[no-untyped-call]


class _RandomState:
    """The state of every generator of random numbers, to draw the same again."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        # also before the first use: encode may be what moves the inputs there
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self.mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw as then, and go on afterwards as if nothing had been drawn."""
        now = _RandomState()
        self.set()
        try:
            yield
        finally:
            now.set()


def _named(inputs: Any, label_inputs: Any) -> tuple[tuple[Any, str], tuple[Any, str]]:
    return (inputs, "inputs"), (label_inputs, "label_inputs")


def _size(side: Any, name: str) -> int:
    sizes = {len(value) for value in side.values()} if isinstance(side, Mapping) else {len(side)}
    if len(sizes) > 1:
        raise ShapeError(
            f"the entries of {name} must have one length; got {sorted(sizes)}. Give one row for "
            "each input in every entry."
        )
    size = sizes.pop() if sizes else 0
    if not size:
        raise DataError(f"{name} must hold at least one entry; got none. Give some.")
    return size


def _take(side: Any, part: slice) -> Any:
    if isinstance(side, Mapping):
        return {name: value[part] for name, value in side.items()}
    return side[part]
