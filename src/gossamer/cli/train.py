"""`gossamer train`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gossamer.cli._common import COMMON, Common, print_json, set_threads

__all__ = ["run"]


def run(
    *,
    task: str | None = None,
    positions: str | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    config: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> None:
    """Train a small exact model on a task, and measure it beyond the trained length.

    The folder holds what `gossamer solve` needs. All other settings stand in a TOML file.

    Example: gossamer train --task addition:digits=1-10 --steps 1200

    Args:
        task: A task, with options after a colon: addition:digits=1-20,carry_chains=0.3
        positions: Position encoding: coupled_relative (default), rope, alibi, fire or none; learned
            and coupled need a table size, so they stand in the file of --config.
        steps: Optimiser steps. Default 1200.
        lr: Peak learning rate. Default 0.003.
        batch_size: Samples for each step. Default 64.
        config: A TOML file with the tables [task], [model], [train], as in config.toml of a run.
        resume: Go on with the newest run (or with --out) from its checkpoint; its own config.toml
            is read when neither --task nor --config is given.
    """
    from gossamer.cli._train_page import axes_of, write_inputs
    from gossamer.environment import describe_environment
    from gossamer.files import choose_folder, newest_run, write_json
    from gossamer.report import write_page
    from gossamer.train import train_task

    options = {
        "steps": steps,
        "lr": lr,
        "device": common.device if common.device != "auto" else None,
    }
    if resume and task is None and config is None:
        begun = common.out or newest_run("runs/train")
        config = begun / "config.toml" if begun else None
    job = _job(task, positions, options, batch_size, config, common.seed)
    job.build_model(job.build_task())  # a wrong option is found before a folder is made
    set_threads(common)
    rank = _launched_rank()
    if rank is None:
        folder = choose_folder("runs/train", common.out, resume=resume)
    else:
        folder = _shared_folder(common.out, check=rank == 0 and not resume)
    started = time.perf_counter()
    result = train_task(job, folder, resume=resume, quiet=common.quiet)
    if rank:
        return  # the first process writes the page
    summary = _summary(job, result.rows(), time.perf_counter() - started)
    write_json(folder / "summary.json", summary)
    write_json(folder / "environment.json", describe_environment())
    title = f"Training run: {job.task['name']}"
    write_inputs(folder, summary, title, ["train", "--config", f"{folder}/config.toml"])
    page = write_page(folder)
    if common.json:
        print_json(summary)
        return
    axes = axes_of(result.rows())
    for row in result.rows():
        cell = ", ".join(f"{key} {row[key]}" for key in axes)
        print(f"{cell}: exact match {row['exact_match']:.3f} on {row['num_samples']} samples")
    print(f"page: {page.resolve()}\nnext: gossamer solve {folder} QUERY")


def _launched_rank() -> int | None:
    """Return this process's number under `accelerate launch` with several, else `None`."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return int(os.environ.get("RANK", "0")) if several else None


def _shared_folder(out: Path | None, *, check: bool) -> Path:
    from gossamer.errors import ConfigError
    from gossamer.files import choose_folder

    if out is None:
        raise ConfigError(
            "--out is needed with several processes, so that all of them use one folder; got none. "
            "Give --out DIR."
        )
    # one process looks whether it is free; another may already have begun to write
    return choose_folder("", out) if check else out


def _job(
    task: str | None,
    positions: str | None,
    options: dict[str, Any],
    batch_size: int | None,
    config: Path | None,
    seed: int | None,
) -> Any:
    from gossamer.checks import check_table
    from gossamer.errors import ConfigError
    from gossamer.files import read_toml
    from gossamer.tasks import build_task
    from gossamer.train import TrainJob

    values = read_toml(config) if config else {}
    for table in ("model", "train"):
        check_table(values.get(table, {}), f"[{table}] of {config}")
    if task is not None:
        name, options_of_task = build_task(task).config["name"], build_task(task).config
        given = {key.partition("=")[0].strip() for key in task.partition(":")[2].split(",")}
        values["task"] = {"name": name, **{k: v for k, v in options_of_task.items() if k in given}}
    if "task" not in values:
        raise ConfigError(
            "train needs --task or a --config with a table [task]; got neither. Try --task "
            "addition."
        )
    if positions is not None:
        values.setdefault("model", {})["positions"] = positions
    train = values.setdefault("train", {})
    train.update({key: value for key, value in options.items() if value is not None})
    if batch_size is not None:
        values["batch_size"] = batch_size
    if seed is not None:
        values["seed"] = seed
    return TrainJob.from_dict(values, str(config or "the options"))


def _summary(job: Any, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    from gossamer._version import __version__
    from gossamer.cli._train_page import table_of

    return {
        "command": "train",
        "version": __version__,
        "seconds": round(seconds, 1),
        "seed": job.seed,
        "files": ["model.safetensors", "config.json", "config.toml", "metrics.jsonl"],
        "cells": rows,
        "table": table_of(rows),
    }
