"""Minesweeper boards: count the mines around every cell, two ids for each token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError
from gossamer.tasks.base import EOS, GridCell, parse_two_ranges
from gossamer.tasks.structured import Shape, StructuredTask

__all__ = ["MinesweeperTask"]

_BEGIN, _EMPTY, _MINE, _EQUALS, _ZERO = 2, 3, 4, 5, 6


class MinesweeperTask(StructuredTask):
    """Boards row by row, such as `^EEMEEEMEE=01M121M10$` for EEM/EEE/MEE.

    The answer has, in the same order, M at every mine and elsewhere the number of mines among the
    8 neighbours. Level 1 of the ids is the column (s + 1 to s + W), level 2 the row (t + 1 to
    t + H), of board and answer alike; `=` has (s, t).

    A batch has one shape H x W, each side drawn uniformly; each board has its own rate of mines.

    Args:
        size: Fewest and most rows and columns, or a range for each, such as `((5, 9), (5, 12))` or
            `"5-9x5-12"`. Range: >= 1. Default 5 to 9, the paper's.
        mine_rate: Lowest and highest share of mines. Range: 0 to 1. Default 0.1 to 0.25.
        max_position: Largest id of both tables. Ids then start at random in training, and in the
            middle of the table in tests. Default `None`: ids start at 1.

    Raises:
        ConfigError: If a range is wrong, or the largest board needs ids beyond `max_position`.

    Example:
        >>> task = MinesweeperTask()
        >>> task.answer("EEM/EEE/MEE")
        '01M121M10'

    Source: Cho et al., *Position Coupling*, NeurIPS 2024, section 6 and public data code.
    Deviations: one shape for each batch; tests start in the middle of the table (authors: at 1).
    """

    vocab = ("_", "$", "^", "E", "M", "=", *"012345678")
    levels = 2

    def __init__(
        self,
        size: Any = (5, 9),
        *,
        mine_rate: tuple[float, float] = (0.1, 0.25),
        max_position: Any = None,
    ) -> None:
        self.size = parse_two_ranges(size, "size")
        largest = (self.size[0][1], self.size[1][1])
        check_range(max(largest), "size", high=1000, integer=True)
        if not isinstance(mine_rate, list | tuple) or len(mine_rate) != 2:
            raise ConfigError(
                f"mine_rate must be two shares (lowest, highest); got {mine_rate!r}. Change it."
            )
        check_range(mine_rate[0], "mine_rate", low=0.0, high=mine_rate[1])
        check_range(mine_rate[1], "mine_rate", low=0.0, high=1.0)
        self.mine_rate = (float(mine_rate[0]), float(mine_rate[1]))
        self._set_max_position(max_position)
        self._check_fits(largest, ConfigError)

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        size = [list(side) for side in self.size]
        options = {"size": size, "mine_rate": list(self.mine_rate)}
        return {"name": "minesweeper", **options, **self._plain_max_position}

    def grid(  # type: ignore[override]
        self, *, height: Iterable[int] | None = None, width: Iterable[int] | None = None
    ) -> list[GridCell]:
        """Return one cell for each shape of boards.

        Args:
            height: Rows. Default: square boards of 1, 1.5 and 2 times the largest trained side, as
                far as `max_position` allows.
            width: Columns; each is combined with each height. Default: as many as rows.
        """
        if height is None and width is None:
            sides = sorted({int(max(side[1] for side in self.size) * k) for k in (1, 1.5, 2)})
            shapes = [(n, n) for n in sides if self._fits((n, n))]
        elif width is None or height is None:
            shapes = [(n, n) for n in (height or width or ())]
        else:
            columns = list(width)
            shapes = [(h, w) for h in height for w in columns]
        options: dict[str, Any] = {"mine_rate": self.mine_rate, **self._plain_max_position}
        return [
            GridCell({"height": h, "width": w}, MinesweeperTask(((h, h), (w, w)), **options))
            for h, w in shapes
        ]

    def _answer_length(self, shape: Shape) -> int:
        return shape[0] * shape[1] + 1

    def _largest_ids(self, shape: Shape) -> Shape:
        return shape[1] + 1, shape[0] + 1

    def _describe(self, shape: Shape) -> str:
        return f"boards of {shape[0]} x {shape[1]}"

    def _smaller(self, shape: Shape) -> Shape | None:
        if self.max_position is None:
            return None
        columns, rows = self.max_position
        smaller = (min(shape[0], rows - 1), min(shape[1], columns - 1))
        return smaller if min(smaller) >= 1 and smaller != shape else None

    def _draw(self, batch_size: int, generator: torch.Generator) -> tuple[Shape, Tensor]:
        height, width = (
            int(torch.randint(lo, hi + 1, (1,), generator=generator)) for lo, hi in self.size
        )
        low, high = self.mine_rate
        rate = low + (high - low) * torch.rand((batch_size, 1, 1), generator=generator)
        mines = torch.rand((batch_size, height, width), generator=generator) < rate
        return (height, width), mines

    def _tokens(self, contents: Tensor, shape: Shape) -> Tensor:
        size = len(contents)
        ring = torch.ones(1, 1, 3, 3)
        ring[..., 1, 1] = 0
        counts = conv2d(contents[:, None].float(), ring, padding=1)[:, 0].round().long()
        board = torch.where(contents, _MINE, _EMPTY).flatten(1)
        answer = torch.where(contents, _MINE, counts + _ZERO).flatten(1)
        signs = [torch.full((size, 1), token) for token in (_BEGIN, _EQUALS, EOS)]
        return torch.cat([signs[0], board, signs[1], answer, signs[2]], dim=1)

    def _ids(self, shape: Shape) -> Tensor:
        height, width = shape
        columns = torch.arange(2, width + 2).repeat(height)
        rows = torch.arange(2, height + 2).repeat_interleave(width)
        board = torch.stack((columns, rows), dim=1)
        return torch.cat((torch.zeros_like(board[:1]), board, torch.ones_like(board[:1]), board,
                          torch.zeros_like(board[:1])))  # fmt: skip

    def _parse(self, query: str) -> tuple[Shape, Tensor]:
        text = query.strip().removesuffix("=")
        rows = text.split("/")
        for number, row in enumerate(rows, start=1):
            for column, character in enumerate(row, start=1):
                if character not in "EM":
                    raise DataError(
                        f"query must be rows of E (empty) and M (mine) with / between them, such "
                        f"as EEM/EEE; got {character!r} in row {number}, column {column}. Fix it."
                    )
            if not row or len(row) != len(rows[0]):
                raise DataError(
                    f"all rows of a board must have the length of the first, {len(rows[0])}; got "
                    f"{len(row)} in row {number} of {text!r}. Fill the row."
                )
        shape = (len(rows), len(rows[0]))
        self._check_fits(shape, DataError)
        return shape, torch.tensor([[[c == "M" for c in row] for row in rows]])
