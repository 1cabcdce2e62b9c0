"""Tasks by name, as the command line and configuration files ask for them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from gossamer.checks import check_choice, check_keys
from gossamer.errors import ConfigError
from gossamer.tasks.base import Task

__all__ = ["TASK_NAMES", "build_task"]

_TASKS = {"addition": ("addition", "AdditionTask")}

TASK_NAMES = tuple(_TASKS)


def build_task(spec: str, **options: Any) -> Task:
    """Build a task from a name, or a name with options.

    Args:
        spec: One of `TASK_NAMES`, with options after a colon if wanted:
            `"addition:digits=1-20,carry_chains=0.3"`.
        **options: The task's own keywords; they win over those in `spec`.

    Raises:
        ConfigError: If the name or an option is unknown or malformed.

    Example:
        >>> build_task("addition:digits=1-5").config["digits"]
        [1, 5]
    """
    name, _, tail = spec.partition(":")
    check_choice(name, _TASKS, "task")
    module, symbol = _TASKS[name]
    task = getattr(importlib.import_module(f"gossamer.tasks.{module}"), symbol)
    options = {**_parse_options(tail, spec), **options}
    check_keys(options, inspect.signature(task).parameters, f"task {name!r}")
    built: Task = task(**options)
    return built


def _parse_options(text: str, spec: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(
                f"options of a task must be key=value pairs such as addition:digits=1-20; "
                f"got {part!r} in {spec!r}. Add a value."
            )
        options[key.strip()] = _number(value.strip())
    return options


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
