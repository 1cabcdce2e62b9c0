"""Keys, values and their ids while decoding."""

from __future__ import annotations

from torch import Tensor

from gossamer.errors import ShapeError

__all__ = ["KVCache", "LayerCache"]


class _Growing:
    """A tensor that grows along its length axis in place, doubling its room when full.

    Its batch axis grows from 1 to the batch when samples begin to differ, and a new part with
    batch 1 stands for all samples.
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.length = 0
        self._room: Tensor | None = None

    def append(self, new: Tensor) -> Tensor:
        end = self.length + new.shape[self.axis]
        room = self._room_for(new, end)
        room.narrow(self.axis, self.length, end - self.length).copy_(new)
        self.length = end
        return room.narrow(self.axis, 0, end)

    def select(self, rows: Tensor, *, shared: bool = True) -> None:
        """Keep some samples, which may repeat; one that stands for all stays where `shared`."""
        if self._room is not None and (len(self._room) > 1 or not shared):
            self._room = self._room[rows]

    def _room_for(self, new: Tensor, end: int) -> Tensor:
        old = self._room
        if old is not None and end <= old.shape[self.axis] and len(new) in (1, len(old)):
            return old
        shape = list(new.shape)
        shape[self.axis] = max(2 * end, 64)
        if old is not None:
            shape[0] = max(len(new), len(old))
        room = new.new_zeros(shape)
        if old is not None:
            room.narrow(self.axis, 0, self.length).copy_(old.narrow(self.axis, 0, self.length))
        self._room = room
        return room


class KVCache:
    """What a model keeps between two calls of cached decoding.

    Keys are kept as the position encoding left them. Ids, and which keys take part, are kept once
    for all layers. A model calls `extend` once for each forward pass and hands `layer(n)` to its
    n-th layer. For inference only: nothing is differentiable.

    Args:
        num_layers: Attention layers of the model, times its loops.

    Example:
        >>> import torch
        >>> cache = KVCache(1)
        >>> k, v = cache.layer(0).append(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
        >>> k.shape
        torch.Size([1, 1, 2, 4])

    Source: standard practice.
    Deviations: none
    """

    def __init__(self, num_layers: int) -> None:
        self._layers = [LayerCache() for _ in range(num_layers)]
        self._ids = _Growing(axis=1)
        self._mask = _Growing(axis=1)
        self.length = 0
        self.index: Tensor | None = None

    def extend(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Add ids and mask of new tokens; return those of all, `(B, S[, levels])`, `(B, S)`."""
        self.length += ids.shape[1]
        self.index = mask.sum(1, keepdim=True) + (0 if self.index is None else self.index)
        return self._ids.append(ids), self._mask.append(mask)

    def select(self, rows: Tensor) -> None:
        """Keep the samples with these numbers, in this order; one may come several times."""
        self._ids.select(rows)
        self._mask.select(rows)
        for layer in self._layers:
            layer.select(rows)
        if self.index is not None and len(self.index) > 1:
            self.index = self.index[rows]

    def layer(self, number: int) -> LayerCache:
        """Return the part of one layer."""
        return self._layers[number]


class LayerCache:
    """The keys and values of one layer."""

    def __init__(self) -> None:
        self._k = _Growing(axis=2)
        self._v = _Growing(axis=2)
        self.batch: int | None = None

    def select(self, rows: Tensor) -> None:
        """Keep some samples, as in `KVCache.select`."""
        # a batch of one sample is no stand-in for all here
        self._k.select(rows, shared=False)
        self._v.select(rows, shared=False)
        self.batch = len(rows)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values, `(B, H, T, D)`; return all of them."""
        if self.batch not in (None, len(k)):
            raise ShapeError(
                f"the cache holds {self.batch} sequences; got {len(k)}. "
                "Start a new KVCache for another batch."
            )
        self.batch = len(k)
        return self._k.append(k), self._v.append(v)
