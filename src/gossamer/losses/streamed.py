"""Losses of scores that never exist as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.checks import check_range, check_shape
from gossamer.errors import DataError, DtypeError, UnsupportedError
from gossamer.losses._collectives import Alone, processes
from gossamer.losses._labels import warn_of_range
from gossamer.losses._rows import options_of
from gossamer.losses._statistics import Blocks, Plan
from gossamer.losses.gather import gather_with_grad

__all__ = ["StreamedLoss", "sharded_loss"]


class StreamedLoss(nn.Module):
    """A loss that needs of all scores of a row one number, besides those of its relevant labels."""

    temperature: float
    streams = True

    def extra_repr(self) -> str:
        """Show the options."""
        return options_of(self)

    def plan(self, labels: Any, shape: tuple[int, int], like: Tensor) -> Plan:
        """Return what the loss does with a batch.

        Args:
            labels: Of the rows.
            shape: Rows B and labels L.
            like: Queries, for dtype and device.
        """
        raise NotImplementedError

    def of_statistics(self, relevant: Tensor, value: Tensor, plan: Plan) -> Tensor:
        """Return the loss.

        Args:
            relevant: Scores of the relevant pairs.
            value: Statistic of each row.
            plan: Of the batch.
        """
        raise NotImplementedError

    def streamed(
        self, queries: Tensor, keys: Tensor, labels: Any, *, chunk_size: int = 4096
    ) -> Tensor:
        """Return the loss of `queries @ keys.T` and its exact gradient, by chunks of keys.

        The scores of one chunk exist at a time, and sparse labels stay sparse: memory is that of
        queries, keys, their gradients where asked for, and `B * chunk_size` scores. Soft top-k goes
        over the keys once for each step of its search.

        Args:
            queries: Embeddings of the inputs, `(B, D)`, floating.
            keys: Embeddings of the labels, `(L, D)`, floating; half precision is widened chunk by
                chunk. A tensor over a memory-mapped array will do.
            labels: As for the call with scores.
            chunk_size: Keys at a time. Range: >= 1. Default 4096.

        Raises:
            ShapeError: If shapes do not fit.
            DtypeError: If queries or keys are integers.
            ConfigError: If `chunk_size` is out of its range.
            UnsupportedError: If the loss draws negatives.
            DataError: As for the call with scores.
        """
        _check(queries, keys, chunk_size)
        plan = self.plan(labels, (len(queries), len(keys)), queries)
        return _loss(self, queries, keys, plan, plan, chunk_size, Alone())


def sharded_loss(
    loss: StreamedLoss, queries: Tensor, keys: Tensor, labels: Any, *, chunk_size: int = 4096
) -> Tensor:
    r"""Return the loss of the inputs and labels of all processes, each holding a part of both.

    Process r has some inputs, which may be few, and a consecutive part of the labels: the parts in
    the order of the ranks are all labels, and need not be of one length. Inputs are gathered, each
    process scores all of them against its labels by chunks, and row statistics are exchanged. The
    value is that of one process with everything; so are the gradients of parameters **summed** over
    the processes (`DistributedDataParallel` takes the mean: multiply the loss by their number).

    Args:
        loss: `DecoupledSoftmaxLoss`, `CoupledSoftmaxLoss`, `SummedSoftmaxLoss` or `SoftTopKLoss`.
        queries: Embeddings of this process's inputs.
        keys: Embeddings of this process's labels.
        labels: Of this process's inputs, numbered over all labels: lists of indices, or a matrix.
        chunk_size: Keys at a time. Range: >= 1. Default 4096.

    Shape:
        - queries: `(b, D)`; keys: `(l, D)`; labels: `(b, L)` or b lists; output: scalar, or
          `(B,)` for the inputs of all processes.

    Raises:
        UnsupportedError: If the loss cannot be streamed.
        As `loss.streamed`.

    Example:
        >>> from gossamer.losses import DecoupledSoftmaxLoss
        >>> loss = DecoupledSoftmaxLoss(temperature=1.0)
        >>> float(sharded_loss(loss, torch.zeros(2, 4), torch.zeros(3, 4), [[0], [2]]))
        1.0986...

    Source: Gupta et al., *Dual-Encoders for Extreme Multi-Label Classification*, ICLR 2024,
        section 4.
    Deviations: parts of different lengths instead of padding; a label at the end of a part counts
        as relevant where it is (the official code loses it).
    """
    if not isinstance(loss, StreamedLoss):
        raise UnsupportedError(
            f"loss must be one of this package that can be streamed; got {type(loss).__name__}. "
            "Use DecoupledSoftmaxLoss, CoupledSoftmaxLoss, SummedSoftmaxLoss or SoftTopKLoss."
        )
    _check(queries, keys, chunk_size)
    group = processes()
    rows, columns = group.lengths(len(queries)), group.lengths(len(keys))
    own = loss.plan(labels, (len(queries), sum(columns)), queries)
    whole = own.joined(group, sum(rows[: group.rank]))
    begin = sum(columns[: group.rank])
    part = whole.of_labels(begin, begin + len(keys))
    return _loss(loss, gather_with_grad(queries), keys, whole, part, chunk_size, group)


def _loss(
    loss: StreamedLoss,
    queries: Tensor,
    keys: Tensor,
    whole: Plan,
    part: Plan,
    chunk_size: int,
    group: Alone,
) -> Tensor:
    wide = queries if queries.dtype == torch.float64 else queries.float()
    relevant, value = _Statistics.apply(  # type: ignore[no-untyped-call]
        wide / loss.temperature, keys, part, chunk_size, group
    )
    warn_of_range(loss, relevant.detach() * loss.temperature)
    return loss.of_statistics(relevant, value, whole)


def _check(queries: Tensor, keys: Tensor, chunk_size: int) -> None:
    check_range(chunk_size, "chunk_size", low=1, integer=True)
    check_shape(queries, (None, None), "queries")
    check_shape(keys, (None, queries.shape[1]), "keys")
    if not len(queries) or not len(keys):
        raise DataError(
            f"there must be at least one query and one key; got {len(queries)} and {len(keys)}. "
            "Give some."
        )
    for name, value in (("queries", queries), ("keys", keys)):
        if not value.is_floating_point():
            raise DtypeError(f"{name} must be floating point; got {value.dtype}. Use .float().")


class _Statistics(torch.autograd.Function):
    """Scores of the relevant pairs of all processes, and the statistic of each row."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, plan: Plan, chunk_size: int, group: Alone
    ) -> tuple[Tensor, Tensor]:
        def chunks() -> Iterator[Tensor]:
            return iter(keys.split(chunk_size))  # type: ignore[no-untyped-call]

        blocks = Blocks(queries, chunks, plan)
        count = len(blocks.relevant)
        value = blocks.fit(group)
        first = sum(group.lengths(count)[: group.rank])
        ctx.own = slice(first, first + count)
        ctx.blocks, ctx.chunk_size = blocks, chunk_size
        ctx.save_for_backward(queries, keys)
        # pairs are in the order of the labels, and so are the parts of the processes
        return blocks.relevant, value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        queries, keys = ctx.saved_tensors
        # every process computes the whole loss from these, so that nothing is summed here
        to_relevant, to_statistic = grads[0][ctx.own], grads[1]
        to_queries = torch.zeros_like(queries) if ctx.needs_input_grad[0] else None
        to_keys = torch.empty_like(keys) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(keys), ctx.chunk_size):
            chunk = keys[begin : begin + ctx.chunk_size]
            gradient = ctx.blocks.gradient(chunk, begin, to_relevant, to_statistic)
            if to_queries is not None:
                to_queries += gradient @ chunk.to(gradient.dtype)
            if to_keys is not None:
                to_keys[begin : begin + len(chunk)] = (gradient.T @ queries).to(keys.dtype)
        return to_queries, to_keys, None, None, None
