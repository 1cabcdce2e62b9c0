"""`gossamer reproduce`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gossamer.cli._common import COMMON, Common, print_json

__all__ = ["run"]


def run(
    recipe: str,
    /,
    *,
    scale: Literal["small", "medium", "paper"] | None = None,
    seeds: int | None = None,
    config: Path | None = None,
    jobs: int | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> int:
    """Check a paper's claim on this machine: honest baselines, table, plots, a page, a verdict.

    Exits with 0 when every claim held, else with 1.

    Example: gossamer reproduce position-coupling --scale small --seeds 3

    Args:
        recipe: A recipe, as `gossamer list --recipes` prints it, or your own FILE.py.
        scale: small means at most 10 minutes on two cores. Default small.
        seeds: How many seeds, from --seed upwards. Default 3.
        config: A config.toml of another run, to repeat or vary it.
        jobs: Arms and seeds at a time. Default the number of cores.
        resume: Go on with the newest run (or with --out); what is done is kept.
    """
    from gossamer.recipes import find_recipe, run_recipe

    if not common.quiet:
        _announce(find_recipe(recipe), scale or "small")
    result = run_recipe(
        recipe,
        scale=scale,
        seeds=seeds,
        config=config,
        out=common.out,
        resume=resume,
        jobs=jobs,
        first_seed=common.seed,
        threads=1 if common.threads is None else common.threads,
        quiet=common.quiet,
    )
    if common.json:
        print_json(result.summary)
    else:
        _print(result.summary, result.folder)
    return 0 if result.summary["verdict"] == "held" else 1


def _announce(recipe: Any, scale: str) -> None:
    minutes = recipe.budget.get(scale)
    expected = f", about {minutes:g} min on 2 cores" if minutes else ""
    print(f"{recipe.title}\n{len(recipe.arms)} methods{expected}", file=sys.stderr)


def _print(summary: dict[str, Any], folder: Path) -> None:
    for claim in summary["claims"]:
        ours = claim["ours"]
        print(
            f"{claim['verdict']:10} {claim['text']}: {ours['statistic']} {ours['value']:.3g}",
            end="",
        )
        values = ", ".join(f"{value:.3g}" for value in ours["values"])
        print(f" (seeds: {values})")
    print(f"\nverdict: {summary['verdict']}   ({summary['seconds'] / 60:.1f} min)")
    print(f"page:    {(folder / 'report.html').resolve()}")
