"""The base of all position encodings: three hooks, each with a neutral default.

A model asks its encoding for three things and no more: a vector to add to the token embedding,
a change of queries and keys, and a bias on the attention logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.errors import DataError, DtypeError, ShapeError

__all__ = ["Positions", "check_ids", "relative_ids"]

# narrower types cannot index, and unsigned ones cannot be subtracted
_INTEGERS = (torch.int64, torch.int32)


class Positions(nn.Module):
    """Base class: position ids in, embedding, rotation or bias out.

    Position ids are integers of shape `(B, T)` or, with several levels, `(B, T, levels)`; the
    first axis may be 1 when all samples share their ids. 1 is the first position and 0 means
    "no position" (start, end and padding tokens). Ids are data: a task's coupling rule makes
    them, and they travel unchanged through training, evaluation and cached decoding.

    Attributes:
        levels: How many ids a token carries. Default 1.
        per_layer: Whether a model holds one module for each layer unless told otherwise.
        coupled: Whether the ids of the task are read; otherwise a model counts 1..T.
        cacheable: Whether decoding with a key-value cache equals the full pass.
        per_sample: Whether samples with equal ids are treated apart just now.
        separate_rows: Whether the bias of a query is the same when others are not asked for.
        num_segments: Kinds of segment that the last level of the ids names, 0 for none.

    Example:
        >>> Positions().bias(torch.ones(1, 2), torch.ones(1, 2), q_index=torch.zeros(1, 2)) is None
        True

    Source: the library's own interface.
    Deviations: none
    """

    levels: int = 1
    per_layer: bool = False
    coupled: bool = False
    cacheable: bool = True
    num_segments: int = 0

    @property
    def per_sample(self) -> bool:
        """False unless the encoding draws something for each sample."""
        return False

    @property
    def separate_rows(self) -> bool:
        """True unless something is read or drawn from all queries together."""
        return self.cacheable

    def __init__(self) -> None:
        super().__init__()

    def embed(self, ids: Tensor) -> Tensor | None:
        """Return what is added to the token embeddings, `(B, T, dim)`, or `None`."""
        return None

    def rotate(
        self, q: Tensor, k: Tensor, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return changed queries and keys, `(B, H, T, D)`; each depends on its own id alone.

        That independence is what lets a cache keep keys that are already changed.
        """
        return q, k

    def bias(self, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor) -> Tensor | None:
        """Return what is added to the logits, `(1 or B, H, T, S)`, or `None`; never -inf.

        `q_index` is the 0-based index of each query in its own sequence, padding not counted.
        """
        return None


def check_ids(ids: Tensor, levels: int, *, max_position: tuple[int, ...] | None = None) -> None:
    """Check dtype, shape and range of position ids.

    Args:
        ids: `(B, T)` for one level, `(B, T, levels)` for more.
        levels: Number of levels expected.
        max_position: Largest id that each level's table holds; default no limit.

    Raises:
        DtypeError: If the ids are not int64 or int32.
        ShapeError: If the axes do not fit `levels`.
        DataError: If an id is negative or larger than its table; the message names the maximum.

    Example:
        >>> check_ids(torch.tensor([[0, 1, 2]]), 1, max_position=(2,))
    """
    if ids.dtype not in _INTEGERS:
        raise DtypeError(
            f"position_ids must be integers (int64 or int32); got {ids.dtype}. Convert with "
            "position_ids.long()."
        )
    if ids.dim() != (2 if levels == 1 else 3) or (levels > 1 and ids.shape[-1] != levels):
        wanted = "(B, T)" if levels == 1 else f"(B, T, {levels})"
        raise ShapeError(
            f"position_ids must have the shape {wanted} for {levels} level(s); got "
            f"{tuple(ids.shape)}. "
            "Check the encoding's `levels` against the task's."
        )
    if torch.compiler.is_compiling() or ids.numel() == 0:
        return
    if int(ids.min()) < 0:
        raise DataError(
            f"position_ids must be >= 0 (0 = no position); got {int(ids.min())}. Shift "
            "position_ids up."
        )
    if max_position is not None:
        largest = ids.reshape(-1, levels).amax(0).tolist()
        for level, (got, limit) in enumerate(zip(largest, max_position, strict=True)):
            if got > limit:
                where = f" at level {level + 1}" if levels > 1 else ""
                raise DataError(
                    f"position_ids must be <= max_position = {limit}{where}; got {int(got)}. "
                    "Use shorter inputs or build the model with a larger max_position."
                )


def relative_ids(q_ids: Tensor, k_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return differences `q - k` and where both ids are positions, both `(B, T, S)`.

    Example:
        >>> relative_ids(torch.tensor([[0, 3]]), torch.tensor([[1, 2]]))[0].tolist()
        [[[-1, -2], [2, 1]]]
    """
    difference = q_ids.unsqueeze(2) - k_ids.unsqueeze(1)
    placed = (q_ids > 0).unsqueeze(2) & (k_ids > 0).unsqueeze(1)
    return difference, placed
