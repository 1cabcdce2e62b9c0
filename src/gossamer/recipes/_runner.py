"""Runs a recipe: arms and seeds, resume, verdict, run folder, page."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer._version import __version__
from gossamer.checks import check_choice, check_keys, check_range, check_table
from gossamer.environment import describe_environment
from gossamer.errors import ConfigError
from gossamer.files import (
    begin_folder,
    choose_folder,
    read_json,
    read_lines,
    read_toml,
    write_json,
    write_text,
)
from gossamer.progress import progress
from gossamer.recipes._base import Recipe, build_config
from gossamer.recipes._jobs import Job, find_recipe, plan_jobs, run_jobs
from gossamer.recipes._verdict import judge, worst
from gossamer.registry import get_method

__all__ = ["RunResult", "run_recipe"]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run.

    Args:
        folder: The run folder.
        summary: What `summary.json` holds.
    """

    folder: Path
    summary: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary."""
        return self.summary


def run_recipe(
    name: str,
    *,
    scale: str | None = None,
    seeds: int | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    jobs: int | None = None,
    first_seed: int | None = None,
    threads: int = 1,
    quiet: bool = False,
) -> RunResult:
    """Run every arm with every seed, judge the claims, write the run folder and its page.

    Args:
        name: A recipe's name, or a user's own `FILE.py`.
        scale: `"small"`, `"medium"`, `"paper"`. Default that of `config`, else `"small"`.
        seeds: How many. Range: >= 1. Default that of `config`, else of the scale, mostly 3.
        config: A `config.toml` of another run, or a dict that replaces values of the scale.
        out: Run folder. Default `runs/<name>`, with `-2`, `-3`, ... when taken.
        resume: Go on with the newest run, or with `out`. Finished jobs are kept, a job that was
            interrupted goes on from its checkpoint.
        jobs: Arms and seeds at a time. Default the number of cores.
        first_seed: Seeds count up from here. Default 0, or those of `config`.
        threads: Threads of each job. Default 1.
        quiet: Show no progress. Default false.

    Raises:
        ConfigError: If a name or a value is unknown.
        DataError: If the folder holds another run.

    Example:
        >>> run_recipe("position-coupling", seeds=3)    # doctest: +SKIP
    """
    recipe = find_recipe(name)
    saved = _saved_settings(config, recipe)
    scale = scale or saved.get("scale", "small")
    check_choice(scale, recipe.scales, f"scale of {recipe.name}")
    recipe = recipe.at(scale)
    seed_list = _seeds(saved.get("seeds"), seeds, first_seed, recipe.seeds.get(scale, 3))
    for number, what in ((jobs, "jobs"), (threads, "threads")):
        if number is not None:
            check_range(number, what, low=1, high=1024, integer=True)
    settings = build_config(recipe.scales[scale], saved.get("config", {}), "config")
    _page(recipe, settings, "")  # a figure or method that does not exist is found before the work
    folder = choose_folder(f"runs/{Path(recipe.name).stem}", out, resume=resume)
    text = _config_text(recipe, scale, seed_list, settings)
    begin_folder(folder, text, resume=resume)

    plan = plan_jobs(name, scale, recipe.arms, seed_list, folder)
    workers = min(jobs or os.cpu_count() or 1, len(plan))
    finished = all(job.result_path.exists() for job in plan)
    started = time.perf_counter()
    with progress(recipe.name, len(plan), quiet=quiet) as bar:
        run_jobs(plan, _plain(settings), workers=workers, threads=threads, on_progress=bar.update)
    earlier = _seconds_before(folder)
    seconds = earlier if finished and earlier else earlier + time.perf_counter() - started
    results = {(job.arm, job.seed): job.read() for job in plan}
    summary = _summary(recipe, scale, seed_list, results, seconds)
    command = _command(name, scale, seed_list, settings, recipe, folder)
    _write_folder(folder, recipe, settings, plan, summary, results, command)
    return RunResult(folder, summary)


def _saved_settings(
    config: str | os.PathLike[str] | Mapping[str, Any] | None, recipe: Recipe
) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return {"config": dict(config)}
    saved = read_toml(config)
    check_keys(saved, ("recipe", "scale", "seeds", "config"), str(config))
    check_table(saved.get("config", {}), f"[config] of {config}")
    if saved.get("recipe", recipe.name) != recipe.name:
        raise ConfigError(
            f"{config} must belong to the recipe {recipe.name!r}; got {saved['recipe']!r}. "
            "Name that recipe, or another file."
        )
    return saved


def _config_text(recipe: Recipe, scale: str, seeds: Sequence[int], settings: Any) -> str:
    import tomli_w

    head = {"recipe": recipe.name, "scale": scale, "seeds": list(seeds)}
    return tomli_w.dumps({**head, "config": _plain(settings)})


def _plain(settings: Any) -> dict[str, Any]:
    """Return a configuration as plain values; TOML has no null, so what is `None` is left out."""
    return {key: value for key, value in dataclasses.asdict(settings).items() if value is not None}


def _seconds_before(folder: Path) -> float:
    """Return the wall time of an earlier finished part, so that a second call does not report 0."""
    path = folder / "summary.json"
    return float(read_json(path).get("seconds", 0.0)) if path.exists() else 0.0


def _summary(
    recipe: Recipe,
    scale: str,
    seeds: Sequence[int],
    results: Mapping[tuple[str, int], Mapping[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    def by_arm(metric: str) -> dict[str, dict[int, float]]:
        values: dict[str, dict[int, float]] = {}
        for (arm, seed), result in results.items():
            value = result["scalars"].get(metric)
            values.setdefault(arm, {})[seed] = float("nan") if value is None else float(value)
        return values

    claims = [judge(claim, by_arm(claim.metric)) for claim in recipe.claims]
    return {
        "recipe": recipe.name,
        "scale": scale,
        "seeds": list(seeds),
        "verdict": worst([claim["verdict"] for claim in claims]),
        "claims": claims,
        "table": _table(recipe, len(seeds), results),
        "seconds": round(seconds, 1),
        "version": __version__,
    }


def _table(
    recipe: Recipe, num_seeds: int, results: Mapping[tuple[str, int], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    rows = []
    for arm in recipe.arms:
        mine = [result for (name, _), result in results.items() if name == arm.name]
        head = {"arm": arm.name, "role": arm.role, "seeds": len(mine)}
        count = len(mine)
        few = [f"{count} seed{'s' if count > 1 else ''} only"] if count < num_seeds else []
        seconds = {"seconds_here": round(statistics.median(r["seconds"] for r in mine), 1)}
        for variant in ("", *mine[0]["variants"]):
            measured = [r["variants"][variant] if variant else r["scalars"] for r in mine]
            values, notes = _columns(recipe, arm.name, measured)
            rows.append(
                {**head, "variant": variant, **values, **seconds, "note": "; ".join(few + notes)}
            )
    return rows


def _columns(
    recipe: Recipe, arm: str, measured: Sequence[Mapping[str, float]]
) -> tuple[dict[str, Any], list[str]]:
    """Return one arm's cells of the table, and what must be said of them."""
    cells: dict[str, Any] = {}
    notes = []
    for column in recipe.columns:
        values = [m[column.name] for m in measured if m.get(column.name) is not None]
        if not values:
            continue
        middle = statistics.median(values)
        cells |= {
            f"{column.name}_here": middle,
            f"{column.name}_low_here": min(values),
            f"{column.name}_high_here": max(values),
        }
        if column.in_domain and column.fit is not None and middle < column.fit:
            notes.append("did not fit the trained range")
        if arm in column.paper:
            cells[f"{column.name}_paper"] = column.paper[arm]
    return cells, notes


def _command(
    name: str, scale: str, seeds: Sequence[int], settings: Any, recipe: Recipe, folder: Path
) -> str:
    plain = list(seeds) == list(range(seeds[0], seeds[0] + len(seeds)))
    if not plain or settings != recipe.scales[scale]:
        return f"gossamer reproduce {name} --config {folder}/config.toml"
    command = f"gossamer reproduce {name} --scale {scale} --seeds {len(seeds)}"
    return f"{command} --seed {seeds[0]}" if seeds[0] else command


def _seeds(saved: Any, count: int | None, first: int | None, usual: int) -> list[int]:
    """Return the seeds to run: what the user asks for, else those of the configuration."""
    if count is None and first is None and saved is not None:
        if not isinstance(saved, list) or not saved:
            raise ConfigError(f"seeds must be a list of integers; got {saved!r}. Write [0, 1, 2].")
        chosen = saved
    else:
        count = usual if count is None else count
        check_range(count, "seeds", low=1, integer=True)
        begin = 0 if first is None else first
        check_range(begin, "seed", low=0, high=2**32 - 1, integer=True)
        chosen = list(range(begin, begin + count))
    for seed in chosen:
        check_range(seed, "seed", low=0, high=2**32 - 1, integer=True)
    return chosen


def _write_folder(
    folder: Path,
    recipe: Recipe,
    settings: Any,
    plan: Sequence[Job],
    summary: dict[str, Any],
    results: Mapping[tuple[str, int], Mapping[str, Any]],
    command: str,
) -> None:
    from gossamer.report import write_page, write_table

    write_json(folder / "summary.json", summary)
    write_table(summary["table"], folder / "table.csv")
    rows = [
        {"arm": arm, "seed": seed, **row}
        for (arm, seed), result in results.items()
        for row in result["rows"]
    ]
    write_table(rows, folder / "rows.csv")
    write_text(folder / "metrics.jsonl", "".join(_merged_metrics(plan)))
    write_json(folder / "environment.json", describe_environment())
    write_json(folder / "page.json", _page(recipe, settings, command))
    write_page(folder)


def _merged_metrics(plan: Sequence[Job]) -> list[str]:
    lines = []
    for job in plan:
        path = job.folder / "metrics.jsonl"
        if path.exists():
            for entry in read_lines(path):
                entry = {"arm": job.arm, "seed": job.seed, **entry}
                lines.append(json.dumps(entry) + "\n")
    return lines


def _page(recipe: Recipe, settings: Any, command: str) -> dict[str, Any]:
    method = get_method(recipe.method) if recipe.method else None
    return {
        "title": recipe.title,
        "what": recipe.what,
        "paper": method.paper.cite() if method else "",
        "columns": [
            {"name": c.name, "label": c.label, "unit": c.unit, "in_domain": c.in_domain}
            for c in recipe.columns
        ],
        "arms": [{"name": a.name, "title": a.title, "role": a.role} for a in recipe.arms],
        "figures": [
            {k: v for k, v in dataclasses.asdict(f).items() if k != "options"}
            | {k: _resolve(v, settings) for k, v in f.options.items()}
            for f in recipe.figures
        ],
        "deviations": list(method.deviations) if method else [],
        "notes": [],
        "command": command,
    }


def _resolve(value: Any, settings: Any) -> Any:
    """Return a figure's option; `"config.NAME"` stands for a value of the configuration."""
    if isinstance(value, str) and value.startswith("config."):
        name = value.removeprefix("config.")
        check_choice(name, [f.name for f in dataclasses.fields(settings)], "value in a figure")
        return getattr(settings, name)
    if isinstance(value, list | tuple):
        return [_resolve(item, settings) for item in value]
    return value
