"""Progress of long work: a bar on a terminal, one plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["ProgressBar", "progress"]


class ProgressBar(Protocol):
    """What long work calls as it goes on."""

    def update(self, done: float, note: str = "") -> None:
        """Say how much is done, in the unit of the total, with a short note."""


class _Silent:
    def update(self, done: float, note: str = "") -> None:
        """Say nothing."""


class _Lines:
    def __init__(self, what: str, total: float, interval: float) -> None:
        self._what, self._total, self._interval = what, total, interval
        self._last = time.monotonic()
        self._ended = False

    def update(self, done: float, note: str = "") -> None:
        now, at_end = time.monotonic(), done >= self._total
        if (now - self._last >= self._interval or at_end) and not self._ended:
            self._last, self._ended = now, at_end
            share = f"{100 * done / self._total:.0f} %" if self._total else "done"
            print(f"{self._what}: {share} {note}".rstrip(), file=sys.stderr, flush=True)


@contextmanager
def progress(
    what: str, total: float, *, quiet: bool = False, interval: float = 10.0
) -> Iterator[ProgressBar]:
    """Show the progress of work on standard error.

    Args:
        what: Name of the work.
        total: How much there is, in any unit.
        quiet: Show nothing. Default false.
        interval: Between two plain lines, where there is no terminal. Unit: seconds. Default 10.

    Example:
        >>> with progress("work", 2, quiet=True) as bar:
        ...     bar.update(1)
    """
    if quiet:
        yield _Silent()
    elif sys.stderr.isatty():
        with _terminal_bar(what, total) as bar:
            yield bar
    else:
        yield _Lines(what, total, interval)


@contextmanager
def _terminal_bar(what: str, total: float) -> Iterator[ProgressBar]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total, note="")

        class Bar:
            def update(self, done: float, note: str = "") -> None:
                bar.update(task, completed=done, note=note)

        yield Bar()
