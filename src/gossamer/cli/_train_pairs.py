"""`gossamer train` on pairs of texts: the table of neighbours, read or mined."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.retrieval import NeighborTable
    from gossamer.tasks import Task
    from gossamer.train import TrainJob

__all__ = ["check_pairs", "neighbors_of"]


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


def neighbors_of(job: TrainJob, task: Task, *, quiet: bool) -> NeighborTable | None:
    """Return the table that the job's loss names; it is mined and written when it is not there.

    Args:
        job: What is trained.
        task: Its pairs; neighbours are those of the targets of training, from among them.
        quiet: Say nothing.
    """
    path = job.loss.get("neighbors")
    if path is None:
        return None
    from gossamer.retrieval import NeighborTable, mine_neighbors

    if Path(path).exists():
        return NeighborTable.load(path)
    pairs: Any = task
    table = mine_neighbors(pairs.targets("train"), held_out=pairs.targets("test"))
    table.save(path)
    if not quiet:
        print(f"mined neighbours of {len(table)} targets into {path}", file=sys.stderr)
    return table
