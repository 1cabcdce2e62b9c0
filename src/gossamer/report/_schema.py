"""Dataclasses from JSON objects, with errors that name the file and the place inside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gossamer.checks import check_keys
from gossamer.errors import ConfigError, DataError

__all__ = ["build"]

T = TypeVar("T")

_WORDS = {
    str: "a string",
    bool: "true or false",
    float: "a number",
    dict: "an object",
    list: "a list",
}


def _expect(value: Any, kind: type, place: str) -> None:
    # JSON writes 1.0 as 1, and Python counts a truth value among the integers.
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise DataError(f"{place} must be {_WORDS[kind]}; got {value!r:.60}. Correct this entry.")


def _convert_list(value: Any, hints: tuple[Any, ...], place: str) -> tuple[Any, ...]:
    _expect(value, list, place)
    if Ellipsis in hints:
        hints = hints[:1] * len(value)
    if len(value) != len(hints):
        raise DataError(
            f"{place} must have {len(hints)} entries; got {len(value)}. Correct this entry."
        )
    return tuple(
        _convert(entry, hint, f"{place}[{i}]")
        for i, (entry, hint) in enumerate(zip(value, hints, strict=True))
    )


def _convert(value: Any, hint: Any, place: str) -> Any:
    arguments = get_args(hint)
    if NoneType in arguments:
        return None if value is None else _convert(value, arguments[0], place)
    if hint is Any:
        return value
    if get_origin(hint) is tuple:
        return _convert_list(value, arguments, place)
    if get_origin(hint) is Mapping:
        _expect(value, dict, place)
        return {
            key: _convert(entry, arguments[1], f"{place}.{key}") for key, entry in value.items()
        }
    if is_dataclass(hint):
        return build(hint, value, place)  # type: ignore[arg-type]
    _expect(value, hint, place)
    return value


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def build(cls: type[T], data: Any, place: str) -> T:
    """Make a dataclass from a JSON object, nested ones included.

    `null` and a missing key mean the field's default. Unknown keys are left alone, unless the class
    sets `STRICT`: for what a person writes by hand, where a typing error must not pass.
    """
    _expect(data, dict, place)
    hints = get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    if getattr(cls, "STRICT", False):
        try:
            check_keys(data, known, place)
        except ConfigError as error:
            raise DataError(str(error)) from None
    values: dict[str, Any] = {}
    for name, field in known.items():
        if data.get(name) is not None:
            values[name] = _convert(data[name], hints[name], f"{place}, {name}")
        elif not _has_default(field):
            raise DataError(f"{place} has no {name!r}, which is needed. Add this key.")
    return cls(**values)
