"""Options that every command takes, and how results are printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from gossamer.files import without_nan

__all__ = ["COMMON", "Common", "data_folders", "print_json", "set_threads", "silence_loading"]

_GROUP = Group("Common options", sort_key=9)


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True)
class Common:
    """Options of every command.

    Args:
        seed: Seed of all randomness. Default 0, or that of --config.
        device: Where tensors live.
        threads: Threads of each process; default 1 for jobs that run side by side, else all cores.
        out: Output folder; default `runs/<command or recipe>`, with -2, -3, ... when taken.
        json: Print the result as JSON on standard output.
        quiet: Show no progress.
        debug: Show the traceback of an error.
    """

    seed: int | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: int | None = None
    out: Path | None = None
    json: Annotated[bool, Parameter(negative="")] = False
    quiet: Annotated[bool, Parameter(negative="")] = False
    debug: Annotated[bool, Parameter(negative="")] = False


COMMON = Common()


def set_threads(common: Common) -> None:
    """Limit torch to the threads asked for; all cores when none were."""
    if common.threads is not None:
        import torch

        from gossamer.checks import check_range

        check_range(common.threads, "threads", low=1, high=1024, integer=True)
        torch.set_num_threads(common.threads)


def silence_loading() -> None:
    """Keep transformers from drawing a bar for each file of weights, without loading it."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when it is loaded
    loaded = sys.modules.get("transformers")
    if loaded is not None:
        loaded.utils.logging.disable_progress_bar()


def data_folders(data: Path) -> list[Path]:
    """Return where a data set that a user named may lie: here, or in GOSSAMER_DATA."""
    outside = os.environ.get("GOSSAMER_DATA")
    return [data, Path(outside) / data] if outside else [data]


def print_json(value: Mapping[str, Any]) -> None:
    """Print a result as JSON on standard output."""
    print(json.dumps(without_nan(value), indent=2, ensure_ascii=False))
