"""What processes tell each other; a process alone tells nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Alone", "Together", "processes"]


class Alone:
    """One process: everything is what it is."""

    rank = 0
    size = 1

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the processes."""
        return value

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest value of the processes."""
        return value

    def cat(self, value: Tensor) -> Tensor:
        """Return the rows of all processes, in the order of their ranks."""
        return value

    def lengths(self, length: int) -> list[int]:
        """Return the length of each process."""
        return [length]


class Together(Alone):
    """All processes of the default group; parts may differ in length."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the processes."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest value of the processes."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def cat(self, value: Tensor) -> Tensor:
        """Return the rows of all processes, in the order of their ranks."""
        lengths = self.lengths(len(value))
        # collectives want equal shapes: the shorter parts are padded, and cut again
        padded = value.new_zeros((max(lengths), *value.shape[1:]))
        padded[: len(value)] = value
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def lengths(self, length: int) -> list[int]:
        """Return the length of each process."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mine = torch.tensor([length], device=device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return [int(part) for part in parts]

    @staticmethod
    def _reduced(value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        out = value.clone()
        dist.all_reduce(out, operation)
        return out


def processes() -> Alone:
    """Return the processes of the default group, or this one alone where there is none."""
    return Together() if dist.is_available() and dist.is_initialized() else Alone()
