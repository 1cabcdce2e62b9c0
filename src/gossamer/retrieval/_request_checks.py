"""What is wrong with a request: its JSON, and its fields by a schema of `_schemas`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gossamer.checks import check_keys
from gossamer.errors import ConfigError
from gossamer.retrieval._schemas import Schema

__all__ = ["RequestError", "check_body", "read_json_body"]

_A = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


class RequestError(Exception):
    """What is wrong with a request, as its answer says it.

    Args:
        status: Of HTTP.
        kind: A word that programs can compare.
        message: What was expected, what came, what to do.
        param: The field at fault.
        headers: Further ones of the answer.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the answer."""
        return {"error": {"type": self.kind, "message": self.message, "param": self.param}}


def read_json_body(raw: bytes) -> Any:
    """Return the value that a body holds.

    Raises:
        RequestError: If it is no JSON in UTF-8, or holds NaN or half characters.
    """
    try:
        text = raw.decode()
        value = json.loads(text, parse_constant=_refuse)
        if "\\u" in text:  # escapes may name halves of characters, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        problem = f"{error.msg} in line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} that is no UTF-8"
    except UnicodeEncodeError:
        problem = "an escape of half a character (a lone surrogate)"
    except RecursionError:
        problem = "brackets nested too deep"
    except ValueError as error:
        problem = str(error)
    else:
        return value
    raise RequestError(
        400,
        "invalid_json",
        f"the body must be JSON in UTF-8; got {problem}. Send what /docs shows.",
    )


def _refuse(name: str) -> None:
    raise ValueError(f"the number {name}, which JSON has not")


def check_body(value: Any, schema: Schema, param: str = "") -> Any:
    """Return a value with the defaults filled in.

    Raises:
        RequestError: If it does not fit the schema; the message names the field.
    """
    if "anyOf" in schema:
        for branch in schema["anyOf"]:
            if _is_a(value, _types(branch)):
                return check_body(value, branch, param)
        raise _wrong(value, schema, param)
    if not _is_a(value, _types(schema)) or not _in_bounds(value, schema):
        raise _wrong(value, schema, param)
    if isinstance(value, dict):
        return _check_object(value, schema, param)
    if isinstance(value, list):
        items = schema["items"]
        return [check_body(entry, items, f"{param}[{i}]") for i, entry in enumerate(value)]
    return int(value) if "integer" in _types(schema) and value is not None else value


def _check_object(value: dict[str, Any], schema: Schema, param: str) -> dict[str, Any]:
    known: dict[str, Schema] = schema.get("properties", {})
    where = param or "the body"
    if schema.get("additionalProperties") is False:
        try:
            check_keys(value, known, where)
        except ConfigError as error:
            unknown = next(key for key in value if key not in known)
            name = f"{param}.{unknown}" if param else unknown
            raise RequestError(422, "unknown_field", str(error), name) from None
    for key in schema.get("required", ()):
        if key not in value:
            got = ", ".join(value) or "no field"
            name = f"{param}.{key}" if param else key
            raise RequestError(
                422, "missing_field", f"{where} must have the field {key!r}; got {got}. Add it as "
                f"{_expected(known[key])}.", name
            )  # fmt: skip
    filled = {key: s["default"] for key, s in known.items() if "default" in s}
    for key, entry in value.items():
        name = f"{param}.{key}" if param else key
        filled[key] = check_body(entry, known[key], name) if key in known else entry
    return filled


def _types(schema: Schema) -> tuple[str, ...]:
    types = schema.get("type", ("string",) if "enum" in schema else tuple(_A))
    return (types,) if isinstance(types, str) else tuple(types)


def _is_a(value: Any, types: Sequence[str]) -> bool:
    return _kind(value) in types or ("number" in types and _kind(value) == "integer")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds = {str: "string", int: "integer", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _in_bounds(value: Any, schema: Schema) -> bool:
    if isinstance(value, str):
        fits = "enum" not in schema or value in schema["enum"]
        return fits and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, list):
        return bool(len(value) <= schema.get("maxItems", len(value)))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def _expected(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_expected(branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(choice) for choice in schema["enum"])
    words = " or ".join(_A[kind] for kind in _types(schema))
    if "pattern" in schema:
        words += " that is not blank"
    if "minimum" in schema:
        words += f" >= {schema['minimum']}"
    if "maximum" in schema:
        words += f" and <= {schema['maximum']}"
    if "maxItems" in schema:
        words += f" of at most {schema['maxItems']}"
    return words + (" with " + ", ".join(schema["required"]) if schema.get("required") else "")


def _wrong(value: Any, schema: Schema, param: str) -> RequestError:
    kind = _kind(value)
    got = _A[kind] if kind in ("object", "null") else json.dumps(value)
    if kind == "array":
        got = f"an array of {len(value)}"
    elif len(got) > 60:
        got = f"{_A[kind]} of {len(got)} characters"
    message = f"{param or 'the body'} must be {_expected(schema)}; got {got}. "
    remedy = f"Change {param}; /docs shows the form." if param else "Send what /docs shows."
    return RequestError(422, "invalid_field", message + remedy, param or None)
