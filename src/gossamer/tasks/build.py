"""Tasks by name, as the command line and configuration files ask for them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from gossamer.checks import check_choice, check_given, check_keys
from gossamer.errors import ConfigError
from gossamer.tasks.base import Task
from gossamer.tasks.labelled import LabelledTask

__all__ = ["LABELLED_NAMES", "TASK_NAMES", "build_labelled_task", "build_task", "parse_task"]

_TASKS = {
    "addition": ("addition", "AdditionTask"),
    "multi_addition": ("multi_addition", "MultiAdditionTask"),
    "multiplication": ("multiplication", "MultiplicationTask"),
    "fixed_multiplication": ("multiplication", "FixedMultiplicationTask"),
    "minesweeper": ("minesweeper", "MinesweeperTask"),
    "copy": ("strings", "CopyTask"),
    "reverse": ("strings", "ReverseTask"),
    "parity": ("strings", "ParityTask"),
    "lego": ("lego", "LegoTask"),
    "markov": ("markov", "MarkovTask"),
    "argmax": ("retrieval", "ArgmaxTask"),
    "lookup": ("retrieval", "LookupTask"),
    "text": ("text", "TextTask"),
    "masked_text": ("masked_text", "MaskedTextTask"),
    "pairs": ("pairs", "PairsTask"),
    "file": ("user", "FileTask"),
}
_LABELLED = {"table": ("table", "TableTask"), "images": ("images", "ImageTask")}
_WITH_PATH = ("text", "masked_text", "pairs", "file", *_LABELLED)

TASK_NAMES = tuple(_TASKS)
LABELLED_NAMES = tuple(_LABELLED)


def build_task(spec: str, **options: Any) -> Task:
    """Build a task from a name, or a name with options.

    Args:
        spec: One of `TASK_NAMES`, with options after a colon if wanted:
            `"addition:digits=1-20,carry_chains=0.3"`; for a task on a file the path comes first:
            `"text:novel.txt,length=128"`, `"pairs:my.tsv"`. A file `my.jsonl` of your own needs no
            name before it.
        **options: The task's own keywords; they win over those in `spec`.

    Raises:
        ConfigError: If the name or an option is unknown or malformed.

    Example:
        >>> build_task("addition:digits=1-5").config["digits"]
        [1, 5]
    """
    name, given = parse_task(spec)
    check_choice(name, _TASKS, "task")
    built: Task = _build(name, _TASKS[name], {**given, **options})
    return built


def build_labelled_task(spec: str, **options: Any) -> LabelledTask:
    """Build a task on rows that have one class each, from a name with a path.

    Args:
        spec: `"table:FILE.csv"` or `"images:PATH"`, options after the path:
            `"table:my.csv,target=species"`.
        **options: The task's own keywords; they win over those in `spec`.

    Raises:
        ConfigError: If the name or an option is unknown or malformed.
        DataError: If the file is wrong.

    Example:
        >>> build_labelled_task("table:missing.csv")
        Traceback (most recent call last):
            ...
        gossamer.errors.DataError: missing.csv does not exist. Give a CSV file in UTF-8 ...
    """
    name, given = parse_task(spec)
    check_choice(name, _LABELLED, "task")
    built: LabelledTask = _build(name, _LABELLED[name], {**given, **options})
    return built


def _build(name: str, where: tuple[str, str], options: dict[str, Any]) -> Any:
    module, symbol = where
    task = getattr(importlib.import_module(f"gossamer.tasks.{module}"), symbol)
    check_keys(options, inspect.signature(task).parameters, f"task {name!r}")
    if name in _WITH_PATH:
        check_given(options, "path", f"task {name!r}")
    return task(**options)


def parse_task(spec: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options that a text such as `"addition:digits=1-20"` gives.

    Raises:
        ConfigError: If the name is unknown or an option malformed.

    Example:
        >>> parse_task("my.jsonl,coupling=none")
        ('file', {'path': 'my.jsonl', 'coupling': 'none'})
    """
    name, _, tail = spec.partition(":")
    if name not in (*_TASKS, *_LABELLED) and spec.partition(",")[0].endswith(".jsonl"):
        name, tail = "file", spec
    check_choice(name, (*_TASKS, *_LABELLED, "FILE.jsonl"), "task")
    return name, parse_options(tail, spec, path_first=name in _WITH_PATH)


def parse_options(text: str, spec: str, *, path_first: bool) -> dict[str, Any]:
    """Return the options of a text such as `"digits=1-20,carry_chains=0.3"`.

    Args:
        text: Options with commas between them.
        spec: What the user gave as a whole, for messages.
        path_first: Whether the first one is a path without its key.

    Raises:
        ConfigError: If one has no value.
    """
    options: dict[str, Any] = {}
    if path_first and text:
        path, _, text = text.partition(",")
        options["path"] = path.strip().removeprefix("path=")
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(
                f"options of a task must be key=value pairs such as addition:digits=1-20; "
                f"got {part!r} in {spec!r}. Add a value."
            )
        options[key.strip()] = _plain(value.strip())
    return options


def _plain(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
