"""`gossamer report`."""

from __future__ import annotations

from pathlib import Path

from gossamer.cli._common import COMMON, Common, print_json

__all__ = ["run"]


def run(first: Path, second: Path | None = None, /, *, common: Common = COMMON) -> None:
    """Write a run's page again from its numbers, or a page of two runs side by side.

    Example: gossamer report runs/position-coupling

    Args:
        first: A run folder.
        second: Another run folder to compare with.
    """
    from gossamer.files import choose_folder
    from gossamer.report import write_comparison, write_page

    if second is None:
        page = write_page(first)
    else:
        page = write_comparison(first, second, choose_folder("runs/report", common.out))
    if common.json:
        print_json({"command": "report", "files": [str(page)]})
    else:
        print(f"page: {page.resolve()}")
