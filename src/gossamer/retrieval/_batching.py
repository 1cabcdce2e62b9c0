"""One thread that does the model's work, and requests that wait for it in batches."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Kind", "QueueClosed", "QueueFull", "QueueTimeout", "Worker"]

_LONGEST_RETRY = 60  # seconds


class QueueFull(Exception):
    """No more requests may wait; `retry` says in how many seconds there may be room."""

    def __init__(self, waiting: int, retry: int) -> None:
        super().__init__(f"{waiting} requests wait")
        self.waiting, self.retry = waiting, retry


class QueueClosed(Exception):
    """The worker takes no more requests."""


class QueueTimeout(Exception):
    """A request was not done in time; `done` of its `total` items were."""

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f"{done} of {total} items were done")
        self.done, self.total = done, total


@dataclass(frozen=True)
class Kind:
    """A kind of work: what does it, and how many items it may get at once.

    Args:
        function: Maps a list of items to a list of as many results.
        max_batch: Most items of one call.
    """

    function: Callable[[list[Any]], Sequence[Any]]
    max_batch: int


@dataclass(eq=False, repr=False)
class _Job:
    kind: str
    items: Sequence[Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Any]]
    taken: int = 0
    results: list[Any] = field(default_factory=list)

    def finish(self, outcome: list[Any] | Exception) -> None:
        """Hand over the results, unless nobody waits for them any more."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: list[Any] | Exception) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class Worker:
    """Runs the items of many requests in one thread, since models are not re-entrant.

    Whenever the thread is free it takes the request that waits longest, and fills its batch with
    items of later requests of the same kind. There is no delay: batches grow by themselves while
    the thread is busy. What is left of a request that is larger than a batch goes to the end of
    the queue, so that a small request waits for at most one batch of each large one.

    Args:
        kinds: What can be done, by name.
        max_waiting: Most requests in the queue. Range: >= 1.

    Example:
        >>> worker = Worker({"double": Kind(lambda items: [2 * i for i in items], 8)}, 4)
        >>> asyncio.run(worker.submit("double", [1, 2], timeout=5.0))
        [2, 4]
        >>> worker.close()
    """

    def __init__(self, kinds: Mapping[str, Kind], max_waiting: int) -> None:
        self._kinds = kinds
        self._max_waiting = max_waiting
        self._jobs: deque[_Job] = deque()
        self._ready = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._seconds = 0.0  # of a batch, smoothed
        self.num_batches = 0
        self.num_items = 0

    @property
    def waiting(self) -> int:
        """How many requests are in the queue."""
        return len(self._jobs)

    def open(self) -> None:
        """Take requests again after `close`; a new worker is open."""
        with self._ready:
            self._closed = False

    def close(self) -> None:
        """Take no more requests, do what waits, and end the thread."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    async def submit(self, kind: str, items: Sequence[Any], *, timeout: float) -> list[Any]:
        """Wait for the results of items.

        Args:
            kind: Name of the work.
            items: At least one.
            timeout: Seconds; whatever is not begun by then is dropped.

        Raises:
            QueueFull: If too many requests wait already.
            QueueClosed: If the worker is closed.
            QueueTimeout: If the time is over.
        """
        loop = asyncio.get_running_loop()
        job = _Job(kind, items, loop, loop.create_future())
        self._append(job)
        try:
            return await asyncio.wait_for(job.future, timeout)
        except TimeoutError:
            raise QueueTimeout(len(job.results), len(items)) from None
        finally:
            self._drop(job)

    def _append(self, job: _Job) -> None:
        with self._ready:
            if self._closed:
                raise QueueClosed
            if len(self._jobs) >= self._max_waiting:
                wait = math.ceil(self._seconds * len(self._jobs))
                raise QueueFull(len(self._jobs), min(max(wait, 1), _LONGEST_RETRY))
            if self._thread is None:
                # a daemon, so that a call of the model that never ends cannot keep the process
                self._thread = threading.Thread(target=self._run, name="model", daemon=True)
                self._thread.start()
            self._jobs.append(job)
            self._ready.notify()

    def _drop(self, job: _Job) -> None:
        with self._ready:
            if job in self._jobs:
                self._jobs.remove(job)

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                parts = self._take()
            began = time.perf_counter()
            self._work(parts)
            last = time.perf_counter() - began
            self._seconds = last if not self._seconds else 0.8 * self._seconds + 0.2 * last

    def _take(self) -> list[tuple[_Job, list[Any]]]:
        """Take a batch out of the queue: items with the request that they belong to."""
        kind = self._jobs[0].kind
        room = self._kinds[kind].max_batch
        parts: list[tuple[_Job, list[Any]]] = []
        rest: list[_Job] = []
        others: deque[_Job] = deque()
        for job in self._jobs:
            if job.kind != kind or room == 0:
                others.append(job)
                continue
            items = list(job.items[job.taken : job.taken + room])
            job.taken += len(items)
            room -= len(items)
            parts.append((job, items))
            if job.taken < len(job.items):
                rest.append(job)
        self._jobs = others
        self._jobs.extend(rest)
        return parts

    def _work(self, parts: list[tuple[_Job, list[Any]]]) -> None:
        kind = self._kinds[parts[0][0].kind]
        items = [item for _, some in parts for item in some]
        self.num_batches += 1
        self.num_items += len(items)
        try:
            results = kind.function(items)
            if len(results) != len(items):
                raise RuntimeError(f"{len(items)} items gave {len(results)} results")
        except Exception as error:
            if len(parts) > 1:  # only the request that is at fault may fail
                for part in parts:
                    self._work([part])
                return
            self._drop(parts[0][0])
            parts[0][0].finish(error)
            return
        start = 0
        for job, some in parts:
            job.results += results[start : start + len(some)]
            start += len(some)
            if len(job.results) == len(job.items):
                job.finish(job.results)
