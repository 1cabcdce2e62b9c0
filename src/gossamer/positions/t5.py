"""Relative bias in logarithmic buckets of the distance, as in T5."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.checks import check_range
from gossamer.errors import ConfigError
from gossamer.positions._gather import bias_of_offsets
from gossamer.positions.base import Positions, check_ids, relative_ids

__all__ = ["T5Positions"]


class T5Positions(Positions):
    r"""One learned number for each bucket of distances and head.

    $$b_{h,i,j} = R[h, \mathrm{bucket}(p_i - p_j)]$$

    The first half of the buckets holds one distance each; the other half grows with the logarithm
    up to `max_distance`, and the last bucket takes all that is further. In the bidirectional form
    half the buckets are for keys before the query and half for keys after it. One module serves all
    layers by default. A pair that contains id 0 gets bias 0. Bucket borders are exact integers, so
    that no rounding of a logarithm can move a distance to its neighbour's bucket.

    Args:
        num_heads: Attention heads. Range: >= 1.
        num_buckets: Buckets in all. Range: >= 2; bidirectional: even, >= 4. Default 32.
        max_distance: Distance from which all share the last bucket. Unit: tokens. Range: larger
            than the number of exact buckets. Default 128.
        bidirectional: Tell keys after the query apart; otherwise they share bucket 0 with distance
            0. Default false.

    Shape:
        - ids: `(B, T)` or `(1, T)`; output of `bias`: `(B or 1, H, T, S)`, dtype of the table.

    Raises:
        ConfigError: If an option is out of its range, or the buckets do not fit `max_distance`.

    Example:
        >>> T5Positions(2).bucket(torch.tensor([0, 15, 20, 100, 1000, -3])).tolist()
        [0, 15, 17, 30, 31, 0]

    Source: Raffel et al., *Exploring the Limits of Transfer Learning*, JMLR 2020, section 2.1; the
        uniform Xavier start is that of the authors' T5X code.
    Deviations: T5 does not scale its logits by `1 / sqrt(D)`. That scale belongs to the attention
        here: give a model `attention={"scale": 1.0}` for T5's.
    """

    borders: Tensor

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        check_range(num_heads, "num_heads", low=1, integer=True)
        check_range(num_buckets, "num_buckets", low=4 if bidirectional else 2, integer=True)
        check_range(max_distance, "max_distance", low=1, integer=True)
        if bidirectional and num_buckets % 2:
            raise ConfigError(
                "num_buckets must be even for the bidirectional form, since each direction takes "
                f"half of them; got {num_buckets}. Change num_buckets by one."
            )
        per_side = num_buckets // 2 if bidirectional else num_buckets
        if max_distance <= per_side // 2:
            raise ConfigError(
                f"max_distance must be larger than the {per_side // 2} distances that have a "
                f"bucket of their own; got {max_distance}. Raise max_distance or lower num_buckets."
            )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        borders = torch.tensor(_borders(per_side, max_distance))
        self.register_buffer("borders", borders, persistent=False)
        self.table = nn.Parameter(nn.init.xavier_uniform_(torch.zeros(num_heads, num_buckets)))

    def bias(self, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor) -> Tensor:
        """Return the table's entry for the bucket of each pair."""
        check_ids(q_ids, 1)
        offset, placed = relative_ids(q_ids, k_ids)
        if not self.bidirectional:
            offset = offset.clamp(min=0)
        return bias_of_offsets(self._columns, offset, placed)

    def _columns(self, offset: Tensor) -> Tensor:
        return self.table.index_select(1, self.bucket(offset))

    def bucket(self, offset: Tensor) -> Tensor:
        """Return the bucket of each offset `p_i - p_j`, integers of any shape, negative = after."""
        distance = offset.abs() if self.bidirectional else offset.clamp(min=0)
        bucket = torch.bucketize(distance, self.borders, right=True)
        return bucket + (offset < 0) * (self.num_buckets // 2) if self.bidirectional else bucket

    def extra_repr(self) -> str:
        """Show the options."""
        return (
            f"num_heads={len(self.table)}, num_buckets={self.num_buckets}, "
            f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"
        )


def _borders(num_buckets: int, max_distance: int) -> list[int]:
    """Return the least distance of every bucket but the first.

    Bucket `exact + n` begins at the least d with `d >= exact * (max_distance / exact) ** (n / m)`,
    m being the number of logarithmic buckets; compared as integers, both sides to the power m.
    """
    exact = num_buckets // 2
    logarithmic = num_buckets - exact
    borders, distance = list(range(1, exact + 1)), exact
    for n in range(1, logarithmic):
        bound = exact ** (logarithmic - n) * max_distance**n
        guess = int(exact * (max_distance / exact) ** (n / logarithmic)) - 1
        distance = max(distance, guess)
        while distance**logarithmic < bound:
            distance += 1
        borders.append(distance)
    return borders
