"""The bias of a position encoding: whole where it is small, else by blocks of queries."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.func import functional_call

from gossamer.positions import Positions

__all__ = ["PositionBias", "position_bias"]

# Numbers in one bias, (1 or B) x H x T x S, up to which it is made whole: 64 MiB in float32.
DIRECT_SIZE = 2**24


@dataclass(frozen=True)
class PositionBias:
    """The bias of an encoding for given ids, not made yet: `attend` asks for it block by block.

    A whole bias has H x T x S numbers for each sample or for all: at 12 heads and 8192 tokens
    3.2 GB. With this in its place, `attend` makes the rows of a few queries, uses them and drops
    them.

    Args:
        positions: The encoding; its bias for a query must not depend on the other queries
            (`separate_rows`).
        q_ids: Ids of the queries.
        k_ids: Ids of the keys.
        q_index: 0-based index of each query in its own sequence, padding not counted.

    Shape:
        - q_ids: `(1 or B, T[, levels])`; k_ids: `(1 or B, S[, levels])`; q_index: `(1 or B, T)`.

    Example:
        >>> import torch
        >>> from gossamer.positions import AlibiPositions
        >>> ids = torch.arange(1, 9)[None]
        >>> PositionBias(AlibiPositions(2), ids, ids, ids - 1).rows(4, 6).shape
        torch.Size([1, 2, 2, 8])

    Source: the library's own.
    Deviations: none
    """

    positions: Positions
    q_ids: Tensor
    k_ids: Tensor
    q_index: Tensor

    def rows(
        self,
        begin: int,
        end: int,
        num_keys: int | None = None,
        *,
        learned: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the bias of queries `begin` to `end` and of the first `num_keys` keys.

        `learned` stands in for the encoding's parameters: rows that are made again for a gradient
        must see those of their forward pass, which `functional_call` may have replaced by then.
        """
        inputs = (self.q_ids[:, begin:end], self.k_ids[:, :num_keys], self.q_index[:, begin:end])
        asking = _Asking(self.positions)
        tensors = {f"positions.{name}": value for name, value in (learned or {}).items()}
        made: Tensor = functional_call(asking, tensors, inputs) if tensors else asking(*inputs)
        return made

    def learned(self) -> dict[str, Tensor]:
        """Return the encoding's parameters as they are now."""
        return dict(self.positions.named_parameters())


class _Asking(nn.Module):
    """The hook as a module's forward pass, which is what `functional_call` calls."""

    def __init__(self, positions: Positions) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, q_ids: Tensor, k_ids: Tensor, q_index: Tensor) -> Tensor | None:
        return self.positions.bias(q_ids, k_ids, q_index=q_index)


def position_bias(
    positions: Positions, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor, num_heads: int
) -> Tensor | PositionBias | None:
    """Return an encoding's bias, whole up to a size and else as a `PositionBias`.

    An encoding whose bias depends on the other queries is always asked for the whole:
    `length_scale="sequence"`, and random positions in training.

    Args:
        positions: The encoding.
        q_ids: Ids of the queries, `(1 or B, T[, levels])`.
        k_ids: Ids of the keys, `(1 or B, S[, levels])`.
        q_index: 0-based index of each query in its own sequence, `(1 or B, T)`.
        num_heads: Attention heads H.

    Returns:
        `(1 or B, H, T, S)`, or a `PositionBias`, or `None` for an encoding without a bias.

    Example:
        >>> import torch
        >>> from gossamer.positions import AlibiPositions
        >>> ids = torch.arange(1, 4)[None]
        >>> position_bias(AlibiPositions(2), ids, ids, q_index=ids - 1, num_heads=2).shape
        torch.Size([1, 2, 3, 3])

    Source: the library's own.
    Deviations: none
    """
    if type(positions).bias is Positions.bias:
        return None
    batch = max(len(q_ids), len(k_ids))
    size = batch * num_heads * q_ids.shape[1] * k_ids.shape[1]
    if size > DIRECT_SIZE and q_ids.shape[1] > 1 and positions.separate_rows:
        return PositionBias(positions, q_ids, k_ids, q_index)
    return positions.bias(q_ids, k_ids, q_index=q_index)
