"""Neighbours of the targets for `gossamer train --neighbors`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gossamer.retrieval import NeighborTable
    from gossamer.tasks import PairsTask

__all__ = ["neighbors_of"]


def neighbors_of(path: Path, task: PairsTask, *, quiet: bool = False) -> NeighborTable:
    """Return the table of a file, mined from the training targets into it when it is absent.

    Args:
        path: A `.npz` file.
        task: Pairs to train on; their test targets are never neighbours.
        quiet: Do not say what was mined. Default false.

    Raises:
        DataError: If the file is no such table, or was mined from other targets.
    """
    from gossamer.retrieval import NeighborTable, mine_neighbors

    if path.exists():
        return NeighborTable.load(path, targets=task.targets("train"))
    table = mine_neighbors(task.targets("train"), held_out=task.targets("test"))
    table.save(path)
    if not quiet:
        found = table.to_dict()
        print(
            f"{path}: {found['mean_neighbors']:.1f} neighbours a target, mean BLEU "
            f"{found['mean_bleu']:.2f}, none for {found['share_without']:.0%}",
            file=sys.stderr,
        )
    return table
