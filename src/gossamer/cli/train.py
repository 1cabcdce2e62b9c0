"""`gossamer train`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from gossamer.cli._common import COMMON, Common, print_json, set_threads

if TYPE_CHECKING:
    from gossamer.tasks import Task
    from gossamer.train import TrainJob

__all__ = ["run"]


def run(
    *,
    task: str | None = None,
    test: Path | None = None,
    coupling: str | None = None,
    model: str | None = None,
    positions: str | None = None,
    loss: str | None = None,
    alpha: float | None = None,
    noise_matrix: str | None = None,
    optimizer: str | None = None,
    teacher: str | None = None,
    neighbors: Path | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    config: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
    common: Common = COMMON,
) -> None:
    """Train a small exact model on a task, and measure it beyond the trained length.

    The folder holds what `gossamer solve` needs. All other settings stand in a TOML file. With
    --task table:FILE.csv or images:DIR it is a classifier, also of labels that are partly wrong;
    with --task pairs:FILE.tsv it writes a target for each source; with --task ranking:ROWS.jsonl
    a language model ranks the documents of a prompt.

    Example: gossamer train --task addition:digits=1-10 --steps 1200

    Example: gossamer train --task my.jsonl --test longer.jsonl

    Example: gossamer train --task table:my.csv,target=species --loss forward
    --noise-matrix estimate

    Example: gossamer train --task text:novel.txt --model scale_invariant
    --optimizer scale_invariant_sgd

    Example: gossamer train --task table:my.csv --teacher runs/train

    Example: gossamer train --task pairs:my.tsv --model seq2seq --neighbors nb.npz --alpha 0.1

    Example: gossamer train --task ranking:rows.jsonl --model packaged:smollm2 --steps 200

    Args:
        task: A file of your own, my.jsonl, with rows {"query": "12+34", "answer": "46"}; text:FILE
            or masked_text:FILE; or addition, multi_addition, multiplication, fixed_multiplication,
            minesweeper, copy, reverse, parity, lego, markov, argmax or lookup, with options after a
            colon: addition:digits=1-20,carry_chains=0.3; table:FILE.csv, with the column of classes
            target=NAME (default label) and columns to leave out ignore=A+B; images:DIR with one
            folder for each class, or an .npz or IDX files; pairs:FILE.tsv with lines
            source<TAB>target; ranking:ROWS.jsonl with the options of
            fit_ranker: ranking:rows.jsonl,aux_weight=0.1,aux_layer=18,lora=8.
        test: Another file of such rows, for example longer ones; they are never trained on.
        coupling: Ids for a file of your own: fields (proposes a rule and shows it), groups (of the
            rows), none (counts 1..T) or module:function; default auto, the first of groups, fields,
            none that the file allows.
        model: A decoder (default) answers token by token, an encoder all at once; scale_invariant
            is a decoder (or encoder) whose weights have no scale; seq2seq, for pairs, reads the
            source whole. A table and images have mlp. For
            ranking, a folder of a Hugging Face model, or packaged:smollm2.
        positions: Position encoding: coupled_relative (default for tasks with coupled ids), rope,
            alibi, fire or none; learned and coupled need a table size, so they stand in the file of
            --config.
        loss: cross_entropy (default), smoothing, forward or backward (corrected for wrong labels),
            generalized or symmetric.
        alpha: Of smoothing, default 0.1; of forward and backward, the share of labels drawn again
            at random, default 0.1, unless --noise-matrix is given; share of the teacher, default
            0.9; share of the neighbours, default 0.1.
        noise_matrix: For forward and backward, a .npy file whose entry (i, j) is the chance of
            label j for true class i; or estimate, for a table or images.
        optimizer: adamw (default), sgd, or scale_invariant_sgd for --model scale_invariant.
        teacher: A run of gossamer train on the same task and file, whose probabilities are learnt
            too; for images also the folder of a Hugging Face image classifier.
        neighbors: For pairs, a table of real sentences near each target, an .npz; it is mined
            from the targets of training and written when the file is not there.
        steps: Optimiser steps. Default 1200 for most tasks.
        lr: Peak learning rate. Default 0.003 for most tasks; 0.2 for scale_invariant_sgd.
        batch_size: Samples for each step. Default 64 for most tasks.
        config: A TOML file with the tables [task], [model], [train], as in config.toml of a run.
        resume: Go on with the newest run (or with --out) from its checkpoint; its own config.toml
            is read when neither --task nor --config is given.
    """
    from gossamer.cli._train_labelled import is_labelled, run_labelled
    from gossamer.cli._train_page import axes_of, measure_of, summary_of, table_of, write_inputs
    from gossamer.cli._train_pairs import check_pairs, named_neighbors
    from gossamer.cli._train_ranking import is_ranking, run_ranking
    from gossamer.environment import describe_environment
    from gossamer.files import choose_folder, newest_run, write_json
    from gossamer.report import write_page
    from gossamer.tasks import FileTask, preview_task
    from gossamer.train import train_task

    options = {
        "steps": steps,
        "lr": lr,
        "optimizer": optimizer,
        "device": common.device if common.device != "auto" else None,
    }
    if resume and task is None and config is None:
        begun = common.out or newest_run("runs/train")
        config = begun / "config.toml" if begun else None
    if is_ranking(task, config):
        refused: dict[str, Any] = {"--coupling": coupling, "--positions": positions}
        refused |= {"--loss": loss, "--alpha": alpha, "--noise-matrix": noise_matrix}
        refused |= {"--optimizer": optimizer, "--teacher": teacher, "--neighbors": neighbors}
        given = {"test": test, "model": model, "batch_size": batch_size, "train": options}
        run_ranking(task, config, given, refused=refused, resume=resume, common=common)
        return
    table, built = _task_table(task, coupling, test)
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": model, "positions": positions},
        "train": options,
        "loss": _loss_table(loss, alpha, noise_matrix, teacher, neighbors),
    }
    job = _job(table, tables, batch_size, config, common)
    _check_loss_options(job, alpha=alpha, noise_matrix=noise_matrix)
    if is_labelled(job.task["name"]):
        refused = {"--positions": positions, "--neighbors": neighbors and str(neighbors)}
        run_labelled(job, refused=refused, resume=resume, common=common)
        return
    built = built or job.build_task()
    check_pairs(job)
    job.check(built)  # a wrong option is found before a folder is made
    near = named_neighbors(job, built, quiet=common.quiet or bool(_launched_rank()))
    if isinstance(built, FileTask) and not common.quiet and not _launched_rank():
        print(preview_task(built), file=sys.stderr)
    set_threads(common)
    rank = _launched_rank()
    if rank is None:
        folder = choose_folder("runs/train", common.out, resume=resume)
    else:
        folder = _shared_folder(common.out, check=rank == 0 and not resume)
    started = time.perf_counter()
    result = train_task(job, folder, resume=resume, quiet=common.quiet, task=built, neighbors=near)
    if rank:
        return  # the first process writes the page
    measure = measure_of(job.task["name"], result.rows()[0])
    cells = result.rows()
    seconds = time.perf_counter() - started
    summary = summary_of(job, cells, table_of(cells, measure), seconds)
    write_json(folder / "summary.json", summary)
    write_json(folder / "environment.json", describe_environment())
    title = f"Training run: {job.task.get('path', job.task['name'])}"
    command = ["train", "--config", f"{folder}/config.toml"]
    write_inputs(folder, summary, measure, title=title, command=command)
    page = write_page(folder)
    if common.json:
        print_json(summary)
        return
    axes = axes_of(result.rows())
    for row in result.rows():
        cell = ", ".join(f"{key} {row[key]}" for key in axes)
        value = f"{measure.title} {row[measure.column]:.3f}{measure.unit and ' ' + measure.unit}"
        print(f"{cell}: {value} on {row['num_samples']} samples")
    print(f"page: {page.resolve()}\nnext: gossamer solve {folder} QUERY")


def _task_table(
    spec: str | None, coupling: str | None, test: Path | None
) -> tuple[dict[str, Any] | None, Task | None]:
    """Return the table [task] of the options; for a user's file also the task, read once."""
    from gossamer.errors import ConfigError
    from gossamer.tasks import build_task, parse_task

    name, options = parse_task(spec) if spec is not None else (None, {})
    own = {"coupling": coupling, "test": None if test is None else str(test)}
    given = {key: value for key, value in own.items() if value is not None}
    if given and name != "file":
        got = "no --task" if spec is None else f"--task {spec}"
        raise ConfigError(
            f"--{next(iter(given))} belongs to a file of your own; got {got}. Leave it out, or "
            "give --task FILE.jsonl."
        )
    if name == "file":
        task = build_task(name, **{**options, **given})
        return task.config, task
    return (None, None) if name is None else ({"name": name, **options}, None)


def _loss_table(
    loss: str | None,
    alpha: float | None,
    noise_matrix: str | None,
    teacher: str | None,
    neighbors: Path | None,
) -> dict[str, Any]:
    """Return the table [loss] of the options; a teacher or neighbours name the loss."""
    from gossamer.errors import ConfigError

    named = {"distillation": teacher, "sequence_smoothing": neighbors}
    for own, value in named.items():
        if value is not None and loss not in (None, own):
            option = "--teacher" if own == "distillation" else "--neighbors"
            raise ConfigError(
                f"{option} has a loss of its own, {own}; got --loss {loss}. Leave --loss out."
            )
        loss = own if value is not None else loss
    files = {"teacher": teacher, "neighbors": neighbors and str(neighbors)}
    return {"name": loss, "alpha": alpha, "noise_matrix": noise_matrix, **files}


def _check_loss_options(job: TrainJob, *, alpha: float | None, noise_matrix: str | None) -> None:
    """Refuse options that the loss does not take, by the name they have on the command line."""
    from gossamer.errors import ConfigError

    name = job.loss.get("name", "cross_entropy")
    if alpha is not None and name == "cross_entropy":
        raise ConfigError(
            f"--alpha belongs to --loss smoothing, forward or backward, --teacher or --neighbors; "
            f"got {alpha} with {name}. Give one of them, or leave it out."
        )
    if noise_matrix is not None and name not in ("forward", "backward"):
        raise ConfigError(
            f"--noise-matrix belongs to --loss forward or backward; got {noise_matrix!r} with "
            f"{name}. Add --loss forward, or leave it out."
        )


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
    task: dict[str, Any] | None,
    tables: dict[str, dict[str, Any]],
    batch_size: int | None,
    config: Path | None,
    common: Common,
) -> TrainJob:
    """Return the job of a file, or of none, in which the options win."""
    from gossamer.checks import check_table
    from gossamer.errors import ConfigError
    from gossamer.files import read_toml
    from gossamer.train import TrainJob

    values = read_toml(config) if config else {}
    options = {"task": task, "batch_size": batch_size, "seed": common.seed}
    values |= {key: value for key, value in options.items() if value is not None}
    if "task" not in values:
        raise ConfigError(
            "train needs --task or a --config with a table [task]; got neither. Try --task "
            "addition."
        )
    for table, given in tables.items():
        check_table(values.get(table, {}), f"[{table}] of {config}")
        own = {key: value for key, value in given.items() if value is not None}
        values[table] = {**values.get(table, {}), **own}
    return TrainJob.from_dict(values, str(config or "the options"))
