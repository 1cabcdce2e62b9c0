"""The description of the server for programs (OpenAPI) and for readers (HTML)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from gossamer._version import __version__
from gossamer.retrieval._schemas import ERROR, Endpoint

__all__ = ["openapi", "page"]

_ERRORS = {
    400: "The body is no JSON in UTF-8.",
    404: "There is no such path.",
    405: "The path takes another method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body has another media type.",
    422: "A field is missing, unknown or wrong, or the model cannot take a text.",
    500: "The model failed, or its scores are not finite.",
    501: "The server was not given the model or the index of this path.",
    503: "Too many requests wait, or the server shuts down; Retry-After says when to come back.",
    504: "The answer was not there in time.",
}
_OF_PATHS = (404, 405)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h2 { margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
pre { background: #f4f4f4; padding: 0.7rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.8rem 0.25rem 0; }
td { border-top: 1px solid #ddd; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; }
  pre { background: #262626; } td, h2 { border-color: #444; } }
"""


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the table.

    Example:
        >>> from gossamer.retrieval import ServerLimits
        >>> from gossamer.retrieval._schemas import build_endpoints
        >>> list(openapi(build_endpoints(ServerLimits()))["paths"])
        ['/rerank', '/embed', '/search', '/health']
    """
    return {
        "openapi": "3.1.0",
        "info": {"title": "gossamer serve", "version": __version__},
        "paths": {e.path: {e.method.lower(): _operation(e)} for e in endpoints},
        "components": {"schemas": {"Error": ERROR}},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": _content("The answer.", endpoint.answer)}
    if endpoint.body is None:
        return {"summary": endpoint.summary, "responses": responses}
    error = {"$ref": "#/components/schemas/Error"}
    for status, description in _ERRORS.items():
        if status not in _OF_PATHS:
            responses[str(status)] = _content(description, error)
    body = {"schema": endpoint.body, "example": endpoint.example}
    return {
        "summary": endpoint.summary,
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": responses,
    }


def _content(description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def page(endpoints: Sequence[Endpoint]) -> str:
    """Return the same as one HTML page that needs nothing else."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>gossamer serve</title>",
        f"<style>{_STYLE}</style><h1>gossamer serve {escape(__version__)}</h1>",
        "<p>JSON in, JSON out. For programs: <a href=openapi.json>openapi.json</a>.</p>",
        *(_section(endpoint) for endpoint in endpoints),
        "<h2>Errors</h2><p>Each is an object of this form:</p>",
        _rows(_fields(ERROR)),
        "<table><tr><th>status<th>when</tr>",
        *(f"<tr><td>{s}<td>{escape(text)}</tr>" for s, text in _ERRORS.items()),
        "</table></html>",
    ]
    return "\n".join(parts)


def _section(endpoint: Endpoint) -> str:
    parts = [f"<h2><code>{endpoint.method} {endpoint.path}</code></h2>"]
    parts.append(f"<p>{escape(endpoint.summary)}</p>")
    call = f"curl http://localhost:8000{endpoint.path}"
    if endpoint.body is not None:
        parts += ["<h3>Request</h3>", _rows(_fields(endpoint.body))]
        call += (
            " -H 'Content-Type: application/json' \\\n  -d '" + json.dumps(endpoint.example) + "'"
        )
    parts += ["<h3>Answer</h3>", _rows(_fields(endpoint.answer)), f"<pre>{escape(call)}</pre>"]
    return "\n".join(parts)


def _rows(fields: Iterator[tuple[str, str, str]]) -> str:
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{escape(text)}</tr>"
        for name, kind, text in fields
    ]
    return "<table><tr><th>field<th>type<th>meaning</tr>" + "".join(rows) + "</table>"


def _fields(schema: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield name, type and meaning of each field, those inside after what holds them."""
    for name, field in schema.get("properties", {}).items():
        text = field.get("description", "")
        if name in schema.get("required", ()):
            kind = _kind(field)
        else:
            kind = f"{_kind(field)}, optional"
        if field.get("default") is not None:
            text += f" Default {json.dumps(field['default'])}."
        bounds = [
            f"{word} {field[key]}."
            for key, word in (("minimum", "At least"), ("maximum", "At most"))
            if key in field
        ]
        yield before + name, kind, " ".join([text, *bounds])
        inside = field.get("items", field)
        yield from _fields(inside, f"{before}{name}{'[]' if inside is not field else ''}.")


def _kind(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_kind(branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(json.dumps(choice) for choice in schema["enum"])
    types = schema["type"]
    words = types if isinstance(types, str) else " or ".join(types)
    if words == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"array of {_kind(schema['items'])}{most}"
    return words
