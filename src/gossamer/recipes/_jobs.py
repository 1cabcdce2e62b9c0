"""One arm with one seed as a job: run in a process of its own, kept on disk when done."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gossamer.checks import check_choice
from gossamer.errors import ConfigError, DataError, GossamerError
from gossamer.files import read_json, write_json
from gossamer.recipes._base import Arm, Outcome, Recipe, build_config
from gossamer.registry import list_methods

__all__ = ["Job", "find_recipe", "list_recipes", "plan_jobs", "run_jobs"]


@dataclass(frozen=True)
class Job:
    """One arm with one seed, and the folder where its numbers go."""

    recipe: str
    scale: str
    arm: str
    seed: int
    folder: Path

    @property
    def result_path(self) -> Path:
        """The file that exists once the job is done."""
        return self.folder / "outcome.json"

    def read(self) -> dict[str, Any]:
        """Return what the job gave."""
        result = read_json(self.result_path)
        for key in ("scalars", "rows", "variants", "seconds"):
            if key not in result:
                raise DataError(f"{self.result_path} has no {key!r}. Delete it and resume the run.")
        return result


@cache
def _recipe_modules() -> dict[str, str]:
    package = importlib.import_module("gossamer.recipes")
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    return {name.replace("_", "-"): f"gossamer.recipes.{name}" for name in names}


def list_recipes() -> list[str]:
    """Return the names of all recipes.

    Example:
        >>> "position-coupling" in list_recipes()
        True
    """
    return sorted(_recipe_modules())


def find_recipe(name: str) -> Recipe:
    """Return a recipe by name, or the `RECIPE` of a user's own `FILE.py`.

    Raises:
        ConfigError: If the name is unknown.
        DataError: If the file is missing or holds no `RECIPE`.

    Example:
        >>> find_recipe("position-coupling").method
        'position-coupling'
    """
    if name.endswith(".py"):
        return _load_file(Path(name))
    methods = [method.name for method in list_methods()]
    if name not in _recipe_modules() and name in methods:
        raise ConfigError(
            f"{name!r} is a method without a recipe of its own name; got it where a recipe is "
            f"expected. See `gossamer info {name}`, or `gossamer list --recipes`."
        )
    check_choice(name, _recipe_modules(), "recipe")
    recipe: Recipe = importlib.import_module(_recipe_modules()[name]).RECIPE
    return recipe


def _load_file(path: Path) -> Recipe:
    if not path.is_file():
        raise DataError(f"{path}: expected a recipe file; it does not exist. Check the path.")
    module_name = f"gossamer_user_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise DataError(f"{path}: expected a Python file; it cannot be imported. Check the name.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = getattr(error, "lineno", None) or _line_in(path, error)
        where = f"{path}, line {line}" if line else str(path)
        raise DataError(
            f"{where}: expected a file that imports; got {type(error).__name__}: {error}. Mend it."
        ) from error
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise DataError(f"{path}: expected a `RECIPE = Recipe(...)`; got none. Define it.")
    return recipe


def _line_in(path: Path, error: Exception) -> int | None:
    """Return the line of a file at which an error passed through it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return lines[-1] if lines else None


def plan_jobs(
    name: str, scale: str, arms: Sequence[Arm], seeds: Sequence[int], folder: Path
) -> list[Job]:
    """Return the jobs of a run, the dearest first."""
    return [
        Job(name, scale, arm.name, seed, folder / "arms" / f"{arm.name}-seed{seed}")
        for arm in sorted(arms, key=lambda arm: -arm.cost)
        for seed in seeds[: arm.max_seeds]
    ]


def run_jobs(
    jobs: Sequence[Job],
    config: Mapping[str, Any],
    *,
    workers: int,
    threads: int = 1,
    on_progress: Callable[[float, str], None] = lambda done, note: None,
) -> None:
    """Run the jobs that have no result yet, several at a time.

    An interruption or an error leaves the results of finished jobs in place.

    Args:
        jobs: From `plan_jobs`.
        config: The recipe's configuration as plain values: the class of a user's own file cannot
            travel to another process.
        workers: Jobs at a time; 1 runs in this process. Range: >= 1.
        threads: Threads of each job. Range: >= 1. Default 1.
        on_progress: Called with jobs done (a fraction counts) and a note.
    """
    left = [job for job in jobs if not job.result_path.exists()]
    done = len(jobs) - len(left)
    if workers == 1:
        for number, job in enumerate(left):
            on_progress(done + number, f"{job.arm} seed {job.seed}")
            _run_job(job, config, threads)
    elif left:
        _run_parallel(left, config, min(workers, len(left)), threads, done, on_progress)
    on_progress(len(jobs), "")


def _run_parallel(
    jobs: Sequence[Job],
    config: Mapping[str, Any],
    workers: int,
    threads: int,
    done: int,
    on_progress: Callable[[float, str], None],
) -> None:
    import multiprocessing

    # a fresh interpreter for each worker: forking a process that holds threads of torch may hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_end_with, initargs=(os.getpid(),)
    )
    waiting = list(jobs)
    running: dict[Future[None], Job] = {}
    try:
        while waiting or running:
            # no more than can run: what waits in the pool's own queue cannot be called back
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                running[pool.submit(_run_job, job, config, threads)] = job
            finished, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in finished:
                done += 1
                del running[future]
                future.result()
            shares = {job: _share_done(job) for job in running.values()}
            note = ", ".join(f"{j.arm} seed {j.seed} {share:.0%}" for j, share in shares.items())
            on_progress(done + sum(shares.values()), note)
    except BaseException:
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with(parent: int) -> None:
    """Let a worker end when the process that started it is gone, killed or not."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    # Ctrl-C reaches every process of a terminal; the parent decides when workers end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def _share_done(job: Job) -> float:
    """Return how far a running job has come, from the last line that its training loop logged."""
    import json

    path = job.folder / "metrics.jsonl"
    if not path.exists():
        return 0.0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    try:
        return float(json.loads(lines[-1]).get("progress", 0.0)) if lines else 0.0
    except json.JSONDecodeError:  # the line is being written
        return 0.0


def _run_job(job: Job, config: Mapping[str, Any], threads: int) -> None:
    import torch

    from gossamer.train import FileLogger, load_checkpoint, seed_all
    from gossamer.train.checkpoint import random_state, restore_random_state

    before = torch.get_num_threads(), random_state()
    torch.set_num_threads(threads)
    seed_all(job.seed)
    recipe = find_recipe(job.recipe)
    settings = build_config(recipe.scales[job.scale], config, "config")
    log = FileLogger(job.folder)
    if load_checkpoint(job.folder) is None:
        log.rewind(0)  # what an interrupted job without a checkpoint logged is said again
    started = time.perf_counter()
    try:
        outcome: Outcome = recipe.run(settings, job.arm, job.seed, log)
    except Exception as error:
        message = (
            str(error) if isinstance(error, GossamerError) else f"{type(error).__name__}: {error}"
        )
        raise GossamerError(f"{job.arm}, seed {job.seed}: {message}") from error
    finally:
        log.close()
        torch.set_num_threads(before[0])
        restore_random_state(before[1])
    write_json(
        job.result_path,
        {
            "scalars": outcome.scalars,
            "rows": outcome.rows,
            "variants": outcome.variants,
            "seconds": time.perf_counter() - started,
        },
    )
