"""Learned tables: plain absolute positions, and coupled positions with one table for each level."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError
from gossamer.positions.base import Positions, check_ids

__all__ = ["CoupledPositions", "LearnedPositions"]


class LearnedPositions(Positions):
    r"""One learned vector for each absolute position, added to the token embedding.

    $$h_t = E_\text{tok}[x_t] + E_\text{pos}[\mathrm{id}_t]$$

    With `random_start=True` every sample's ids are shifted in training by a fresh uniform offset,
    so that rows are trained which short samples would never reach; in evaluation the offset is
    `max_position // 4`, because rows near the ends of the table are drawn rarely in training.

    Args:
        dim: Model width.
        max_position: Largest id. Range: >= 1.
        random_start: Shift ids by a random offset in training (PyTorch's global generator, as
            dropout does). Default false.

    Shape:
        - ids: `(B, T)`, integers, 0 = no position (row 0, never shifted).
        - output of `embed`: `(B, T, dim)`.

    Raises:
        DataError: If an id exceeds the table, or three quarters of it in evaluation with a random
            start.

    Example:
        >>> LearnedPositions(8, 16).embed(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])

    Source: Vaswani et al., *Attention Is All You Need*, NeurIPS 2017, learned variant; random
        start: Cho et al., NeurIPS 2024, baseline "random-start APE".
    Deviations: the authors evaluate at offset 0, we at `max_position // 4` with a random start.
    """

    def __init__(self, dim: int, max_position: int, *, random_start: bool = False) -> None:
        super().__init__()
        check_range(max_position, "max_position", low=1, integer=True)
        self.max_position = max_position
        self.random_start = random_start
        self.table = nn.Embedding(max_position + 1, dim)

    @property
    def per_sample(self) -> bool:
        """True while a random start is drawn for each sample."""
        return self.random_start and self.training

    def embed(self, ids: Tensor) -> Tensor:
        """Look the ids up, shifted first when `random_start` is set."""
        check_ids(ids, 1, max_position=(self.max_position,))
        if self.random_start:
            ids = torch.where(ids > 0, ids + self._offset(ids), 0)
        out: Tensor = self.table(ids)
        return out

    def _offset(self, ids: Tensor) -> Tensor:
        if not self.training:
            # the same for all calls of a sample, so that decoding with a cache fits the full pass
            offset = self.max_position // 4
            self._check_room(ids, offset)
            return torch.full((1, 1), offset, device=ids.device)
        room = self.max_position - ids.amax(1, keepdim=True) + 1
        drawn = torch.rand(room.shape, device=ids.device, dtype=torch.float64) * room
        return drawn.long()

    def _check_room(self, ids: Tensor, offset: int) -> None:
        if torch.compiler.is_compiling() or ids.numel() == 0:
            return
        if int(ids.max()) > self.max_position - offset:
            raise DataError(
                f"position_ids must be <= {self.max_position - offset} in evaluation, where a "
                f"table of {self.max_position} with a random start is read from {offset} on; got "
                f"{int(ids.max())}. Use shorter inputs or a larger max_position."
            )

    def extra_repr(self) -> str:
        """Show the options."""
        return f"max_position={self.max_position}, random_start={self.random_start}"


def _orthogonal_table(rows: int, dim: int) -> nn.Embedding:
    """Return a table whose rows (or, with more rows than `dim`, columns) are orthogonal."""
    table = nn.Embedding(rows, dim)
    with torch.no_grad():
        nn.init.orthogonal_(table.weight, gain=max(rows, dim) ** 0.5)
    return table


class CoupledPositions(Positions):
    r"""Learned tables for coupled ids: one for each level, summed.

    $$h_t = E_\text{tok}[x_t] + \sum_l E_l[\mathrm{id}_{t,l}]$$

    Tokens that play the same role share an id, so they share a vector. Rows that short samples
    never reach are trained by the random start of the task (`shift_ids`). Two rows further apart
    than the trained length never meet in training, so their logit is noise, and it is small only
    where rows are orthogonal. So each table starts with orthogonal rows of norm `sqrt(dim)`, the
    norm of a N(0, 1) start; that needs `dim > max_position`, and heads wider than `max_position` to
    keep them apart. `CoupledRelativePositions` has no such term. With distinct consecutive ids and
    equal rows this is `LearnedPositions`, bit for bit.

    Args:
        dim: Model width.
        max_position: Largest id, one number or one for each level. Range: >= 1.
        levels: Ids for each token. Default 1.
        shared: One table for all levels. Default false.

    Shape:
        - ids: `(B, T)` for one level, `(B, T, levels)` for more; row 0 ("no position") is learned.
        - output of `embed`: `(B, T, dim)`.

    Raises:
        DataError: If an id exceeds its level's table; the message names level and maximum.
        ConfigError: If `max_position` does not have one entry for each level.

    Example:
        >>> CoupledPositions(8, 16).embed(torch.tensor([[0, 2, 1, 2]])).shape
        torch.Size([1, 4, 8])

    Source: Cho et al., *Position Coupling*, NeurIPS 2024, section 3; several levels: Cho et al.,
        ICLR 2025.
    Deviations: the orthogonal start is ours; the authors draw from N(0, 1).
    """

    coupled = True

    def __init__(
        self, dim: int, max_position: int | list[int], *, levels: int = 1, shared: bool = False
    ) -> None:
        super().__init__()
        check_range(levels, "levels", low=1, integer=True)
        if isinstance(max_position, list | tuple):
            limits = list(max_position)
        else:
            limits = [max_position] * levels
        if len(limits) != levels:
            raise ConfigError(
                f"max_position must have one entry for each of {levels} levels; got {limits}. "
                "Give one number or a list of that many."
            )
        if shared:
            limits = [max(limits)] * levels
        for limit in limits:
            check_range(limit, "max_position", low=1, integer=True)
        self.levels = levels
        self.shared = shared
        self.max_position = tuple(limits)
        self.tables = nn.ModuleList(
            _orthogonal_table(m + 1, dim) for m in limits[: 1 if shared else levels]
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Sum the looked-up rows over levels."""
        check_ids(ids, self.levels, max_position=self.max_position)
        by_level = [ids] if self.levels == 1 else list(ids.unbind(-1))
        tables = list(self.tables) * (self.levels if self.shared else 1)
        out: Tensor = tables[0](by_level[0])
        for table, level_ids in zip(tables[1:], by_level[1:], strict=True):
            out = out + table(level_ids)
        return out

    def extra_repr(self) -> str:
        """Show the options."""
        return f"max_position={list(self.max_position)}, levels={self.levels}, shared={self.shared}"
