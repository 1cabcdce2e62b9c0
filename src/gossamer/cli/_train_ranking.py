"""`gossamer train --task ranking:ROWS.jsonl`: fine-tuning of an in-context ranker."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli._common import Common, print_json, set_threads, silence_loading
from gossamer.cli._train_page import loss_figure

if TYPE_CHECKING:
    from gossamer.retrieval import RankerFitConfig, RankingRow

__all__ = ["is_ranking", "run_ranking"]

_NAME = "ranking"
# options of fit_ranker, and those of its configuration that a run may choose
_LOSS = ("aux_weight", "aux_layer", "temperature", "lora")
_PROMPT = (
    "query_in_prefix", "query_position_offset", "max_document_length", "answer_weight",
    "checkpointing",
)  # fmt: skip
_TABLES = ("task", "model", "train", "batch_size", "seed")


def is_ranking(task: str | None, config: Path | None) -> bool:
    """Whether options or a configuration name this task."""
    if task is not None:
        return task.partition(":")[0] == _NAME
    if config is None or not config.is_file():
        return False
    from gossamer.files import read_toml

    table = read_toml(config).get("task")
    return isinstance(table, Mapping) and table.get("name") == _NAME


def run_ranking(
    task: str | None,
    config: Path | None,
    given: Mapping[str, Any],
    *,
    refused: Mapping[str, Any],
    resume: bool,
    common: Common,
) -> None:
    """Fine-tune, measure every layer on held-out rows if there are any, write the page.

    Args:
        task: `ranking:ROWS.jsonl,option=value`, or none.
        config: A file with the settings, or none.
        given: Options of the command that win over those of the file.
        refused: Options that belong to other tasks.
        resume: Go on from the checkpoint of the folder.
        common: Options of every command.
    """
    from gossamer.environment import describe_environment
    from gossamer.errors import ConfigError
    from gossamer.files import begin_folder, choose_folder, write_json
    from gossamer.report import write_page
    from gossamer.retrieval import fit_ranker, read_ranking_rows, select_layer
    from gossamer.retrieval._ranking_setup import load_ranker

    for name, value in refused.items():
        if value is not None:
            raise ConfigError(f"{name} does not belong to ranking; got {value!r}. Leave it out.")
    values = _values(task, config, given, common)
    table = values["task"]
    rows = read_ranking_rows(table["path"])
    held_out = read_ranking_rows(table["test"]) if "test" in table else []
    settings = _settings(values, common.quiet)
    losses = {key: table[key] for key in _LOSS if key in table}
    silence_loading()
    model, tokenizer = load_ranker(values["model"]["name"], dtype="float32")
    set_threads(common)
    folder = choose_folder("runs/train", common.out, resume=resume)
    begin_folder(folder, _text(values, settings), resume=resume)
    started = time.perf_counter()
    settings = dataclasses.replace(settings, folder=folder)
    ranker = fit_ranker(model, tokenizer, rows, **losses, config=settings, resume=resume)
    report = select_layer(ranker, held_out, quiet=common.quiet) if held_out else None
    cells = [] if report is None else report.rows()
    summary = _summary(values, cells, ranker.layer, time.perf_counter() - started)
    if report is not None:
        known = {_content(row) for row in rows}
        summary |= {
            "chance": report.chance,
            "num_queries": report.num_queries,
            "num_trained_on": sum(_content(row) in known for row in held_out),
        }
    write_json(folder / "summary.json", summary)
    write_json(folder / "environment.json", describe_environment())
    _write_inputs(folder, summary, title=f"Ranker trained on {table['path']}")
    page = write_page(folder)
    if common.json:
        print_json(summary)
        return
    for cell in cells:
        mark = ", the trained layer" if cell["layer"] == ranker.layer else ""
        print(f"layer {cell['layer']}: precision at 1 {cell['precision_at_1']:.3f}{mark}")
    if report is not None:
        trained_on = summary["num_trained_on"] or "none"
        print(
            f"chance {report.chance:.3f}, {report.num_queries} queries, {trained_on} of them "
            "trained on"
        )
    following = f"gossamer rank DATA --run RUN --model {shlex.quote(str(folder))}"
    print(f"page: {page.resolve()}\nnext: {following}")


def _values(
    task: str | None, config: Path | None, given: Mapping[str, Any], common: Common
) -> dict[str, Any]:
    """Return the tables of a file, or of none, in which the options win."""
    from gossamer.checks import check_given, check_keys, check_table
    from gossamer.errors import ConfigError
    from gossamer.files import read_toml
    from gossamer.tasks.build import parse_options

    values = read_toml(config) if config else {}
    name = str(config or "the options")
    check_keys(values, _TABLES, name)
    for table in ("task", "model", "train"):
        check_table(values.get(table, {}), f"[{table}] of {name}")
    if task is not None:
        tail = task.partition(":")[2]
        values["task"] = {"name": _NAME, **parse_options(tail, task, path_first=True)}
    if given["test"] is not None:
        values["task"]["test"] = str(given["test"])
    check_keys(values["task"], ("name", "path", "test", *_LOSS, *_PROMPT), "the task ranking")
    check_given(values["task"], "path", "the task ranking")
    if given["model"] is not None:
        values["model"] = {"name": given["model"]}
    if not isinstance(values.get("model", {}).get("name"), str):
        raise ConfigError(
            "ranking needs --model, a folder of a causal model of Hugging Face or "
            "packaged:smollm2; got none. Add --model."
        )
    train = {key: value for key, value in given["train"].items() if value is not None}
    values["train"] = {**values.get("train", {}), **train}
    for key, value in (("batch_size", given["batch_size"]), ("seed", common.seed)):
        if value is not None:
            values[key] = value
    return values


def _content(row: RankingRow) -> tuple[str, frozenset[str]]:
    """Return what makes a row the same as another, whatever its ids and its order."""
    return row.query, frozenset(row.documents.values())


def _settings(values: Mapping[str, Any], quiet: bool) -> RankerFitConfig:
    from gossamer.checks import check_keys
    from gossamer.retrieval import RankerFitConfig
    from gossamer.train import TrainConfig

    defaults = RankerFitConfig()
    train = dict(values["train"])
    check_keys(train, [f.name for f in dataclasses.fields(TrainConfig)], "[train]")
    if isinstance(train.get("betas"), list):
        train["betas"] = tuple(train["betas"])
    return dataclasses.replace(
        defaults,
        train=dataclasses.replace(defaults.train, **train),
        batch_size=values.get("batch_size", defaults.batch_size),
        seed=values.get("seed", defaults.seed),
        quiet=quiet,
        **{key: values["task"][key] for key in _PROMPT if key in values["task"]},
    )


def _text(values: Mapping[str, Any], settings: RankerFitConfig) -> str:
    """Return all settings as TOML, so that a run is known by its folder alone."""
    import tomli_w

    train = dataclasses.asdict(settings.train)
    train["betas"] = list(settings.train.betas)
    whole = {"batch_size": settings.batch_size, "seed": settings.seed, "task": values["task"]}
    return tomli_w.dumps({**whole, "model": values["model"], "train": train})


def _summary(
    values: Mapping[str, Any], cells: list[dict[str, Any]], layer: int, seconds: float
) -> dict[str, Any]:
    from gossamer._version import __version__

    row: dict[str, Any] = {"arm": "model", "role": "ours", "seeds": 1, "layer_here": layer}
    if cells:
        row["precision_here"] = cells[layer]["precision_at_1"]
        row["best_here"] = max(cell["precision_at_1"] for cell in cells)
    return {
        "command": "train",
        "version": __version__,
        "seconds": round(seconds, 1),
        "seed": values.get("seed", 0),
        "files": ["model.safetensors", "config.json", "config.toml", "metrics.jsonl"],
        "layer": layer,
        "cells": cells,
        "table": [{**row, "note": ""}],
    }


def _write_inputs(folder: Path, summary: Mapping[str, Any], *, title: str) -> None:
    """Write `rows.csv` and `page.json`, from which `write_page` draws the page."""
    from gossamer.files import write_json
    from gossamer.report import write_table

    head = {"arm": "model", "seed": summary["seed"]}
    rows = [{"kind": "layer", **head, **cell} for cell in summary["cells"]]
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        rows.append({"kind": "loss", **head, **json.loads(line)})
    write_table(rows, folder / "rows.csv")
    columns = [{"name": "layer", "label": "Trained layer", "unit": "", "in_domain": False}]
    figures = [loss_figure("loss")]
    if summary["cells"]:
        share = "share of the queries"
        columns += [
            {"name": "precision", "label": "Precision at 1", "unit": share, "in_domain": False},
            {"name": "best", "label": "of the best layer", "unit": share, "in_domain": False},
        ]
        figures = [_LAYER_FIGURE, loss_figure("loss")]
    write_json(
        folder / "page.json",
        {
            "title": title,
            "what": _WHAT,
            "columns": columns,
            "arms": [{"name": "model", "title": "This model", "role": "ours"}],
            "figures": figures,
            "command": shlex.join(["gossamer", "train", "--config", f"{folder}/config.toml"]),
        },
    )


_WHAT = (
    "A language model was fine-tuned to name the relevant document of a prompt, and to look at it "
    "most in one layer. The last step is kept. With held-out rows every layer's first document is "
    "checked; the best layer is one that was chosen by looking at them."
)
_LAYER_FIGURE = {
    "kind": "curve",
    "name": "layers",
    "title": "Relevant document first, by the attention of each layer",
    "alt": "Share of held-out queries with a relevant document first against the layer.",
    "where": {"kind": "layer"},
    "x": "layer",
    "y": "precision_at_1",
    "y_label": "precision at 1",
}
