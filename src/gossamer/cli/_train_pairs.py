"""`gossamer train` on pairs of texts: the table of neighbours, read or mined."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.retrieval import NeighborTable
    from gossamer.tasks import PairsTask, Task
    from gossamer.train import TrainJob

__all__ = ["check_pairs", "named_neighbors", "neighbors_of"]


def check_pairs(job: TrainJob) -> None:
    """Check the loss of a job with an encoder-decoder before anything is made.

    Raises:
        ConfigError: If an option of it is unknown, or neighbours are given to another model.
    """
    from gossamer.errors import ConfigError

    path = job.loss.get("neighbors")
    if job.model.get("name") != "seq2seq":
        if path is not None:
            raise ConfigError(
                f"--neighbors belongs to pairs with the model seq2seq; got {path!r} with "
                f"{job.task['name']}. Leave it out."
            )
        return
    from gossamer.train.pairs import pairs_options

    named = job.loss.get("name", "cross_entropy") == "sequence_smoothing"
    unknown: Any = object() if named else None  # a table that only mining will give
    pairs_options(job.loss, unknown)


def named_neighbors(job: TrainJob, task: Task, *, quiet: bool) -> NeighborTable | None:
    """Return the table that the job's loss names, `None` if it names none."""
    path = job.loss.get("neighbors")
    if path is None:
        return None
    pairs: Any = task
    return neighbors_of(Path(path), pairs, quiet=quiet)


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
