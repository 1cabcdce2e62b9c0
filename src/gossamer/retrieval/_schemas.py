"""The requests and answers of the server: one table that checks them and describes them.

Schemas are a small part of JSON Schema, which is what OpenAPI 3.1 uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.retrieval.server import ServerLimits

__all__ = ["ERROR", "Endpoint", "Schema", "build_endpoints"]

Schema = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """A path of the server.

    Args:
        path: With its slash.
        method: `"GET"` or `"POST"`.
        summary: One sentence.
        answer: Schema of the answer.
        body: Schema of the request, or `None`.
        example: A request.
        option: Options of `gossamer serve` that configure it.
    """

    path: str
    method: str
    summary: str
    answer: Schema
    body: Schema | None = None
    example: Mapping[str, Any] | None = None
    option: str = ""


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def _integer(description: str, **more: Any) -> Schema:
    return {"type": "integer", "description": description, **more}


def _object(properties: Mapping[str, Schema], required: Sequence[str], **more: Any) -> Schema:
    closed = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {**closed, "additionalProperties": False, **more}


def _array(items: Schema, description: str, **more: Any) -> Schema:
    return {"type": "array", "items": items, "description": description, **more}


_QUERY = _text("What is asked; not blank.", pattern=r"\S")
_MODEL = _text("A name that the answer repeats; it chooses nothing.")
_SECONDS = {"type": "number", "description": "From the last byte of the request to the answer."}
_CUT = {
    "num_cut": _integer("How many were longer than the model reads, and were cut."),
    "max_tokens": {
        "type": ["integer", "null"],
        "description": "To how many tokens; null where the model has no limit.",
    },
}
_ANSWERING = {
    "type": "string",
    "description": "The name in the request, or the class that answers.",
}

ERROR: Schema = _object(
    {
        "error": _object(
            {
                "type": _text("A word that programs can compare."),
                "message": _text("What was expected, what came, what to do."),
                "param": {"type": ["string", "null"], "description": "The field at fault."},
            },
            ["type", "message", "param"],
        )
    },
    ["error"],
)


def build_endpoints(limits: ServerLimits) -> list[Endpoint]:
    """Return the table, with the limits of a server in it."""
    most = limits.max_documents
    return [_rerank(most), _embed(most), _search(most), _health()]


def _rerank(most: int) -> Endpoint:
    document = {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {"text": {"type": "string"}, "title": {"type": "string"}},
                "required": ["text"],
            },
        ],
        "description": "A text, or an object with text and perhaps title; more is given back.",
    }
    result = _object(
        {
            "index": _integer("Place of the document in the request.", minimum=0),
            "relevance_score": {"type": "number", "description": "Higher is better."},
            "document": {"type": "object", "description": "With return_documents."},
        },
        ["index", "relevance_score"],
    )
    meta = {"num_documents": _integer("How many were scored."), **_CUT, "seconds": _SECONDS}
    return Endpoint(
        "/rerank",
        "POST",
        "Order documents by how well they answer a query.",
        _object(
            {
                "model": _ANSWERING,
                "results": _array(result, "Best first."),
                "meta": _object(meta, list(meta)),
            },
            ["model", "results", "meta"],
        ),
        _object(
            {
                "query": _QUERY,
                "documents": _array(document, "What to order; may be empty.", maxItems=most),
                "top_n": {
                    "type": ["integer", "null"],
                    "minimum": 1,
                    "default": None,
                    "description": "Most results; all by default.",
                },
                "return_documents": {
                    "type": "boolean",
                    "default": False,
                    "description": "Repeat each document in its result.",
                },
                "model": _MODEL,
            },
            ["query", "documents"],
        ),
        {"query": "red wings", "documents": ["a boat", {"text": "wings in red"}], "top_n": 1},
        "--model",
    )


def _embed(most: int) -> Endpoint:
    one = _object(
        {
            "object": {"enum": ["embedding"]},
            "index": _integer("Place of the text in the request.", minimum=0),
            "embedding": {
                "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}],
                "description": "The vector; for base64 its little-endian float32 numbers.",
            },
        },
        ["object", "index", "embedding"],
    )
    usage = {
        "prompt_tokens": _integer("Tokens read; 0 where the model has no tokenizer."),
        "total_tokens": _integer("The same."),
    }
    meta = {**_CUT, "seconds": _SECONDS}
    return Endpoint(
        "/embed",
        "POST",
        "Turn texts into vectors whose inner product is their score.",
        _object(
            {
                "object": {"enum": ["list"]},
                "data": _array(one, "One for each text, in the order of the request."),
                "model": _ANSWERING,
                "usage": _object(usage, list(usage)),
                "meta": _object(meta, list(meta)),
            },
            ["object", "data", "model", "usage", "meta"],
        ),
        _object(
            {
                "input": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "items": {"type": "string"}, "maxItems": most},
                    ],
                    "description": "A text or several.",
                },
                "input_type": {
                    "enum": ["document", "query"],
                    "default": "document",
                    "description": "What the texts are; some models encode the two differently.",
                },
                "encoding_format": {
                    "enum": ["float", "base64"],
                    "default": "float",
                    "description": "How vectors are written.",
                },
                "model": _MODEL,
            },
            ["input"],
        ),
        {"input": ["red wings", "a boat"], "input_type": "document"},
        "--model",
    )


def _search(most: int) -> Endpoint:
    result = _object(
        {"id": _text("Of the document."), "score": {"type": "number"}}, ["id", "score"]
    )
    return Endpoint(
        "/search",
        "POST",
        "Find the best documents of the index.",
        _object(
            {
                "model": _ANSWERING,
                "results": _array(result, "Best first."),
                "meta": _object({"seconds": _SECONDS}, ["seconds"]),
            },
            ["model", "results", "meta"],
        ),
        _object(
            {
                "query": _QUERY,
                "top_k": _integer("Most results.", minimum=1, maximum=most, default=10),
                "model": _MODEL,
            },
            ["query"],
        ),
        {"query": "red wings", "top_k": 5},
        "--index",
    )


def _health() -> Endpoint:
    role = {"type": ["string", "null"], "description": "The class that answers, or null."}
    fields = {
        "status": {"enum": ["ready"]},
        "version": _text("Of gossamer."),
        "roles": _object(dict.fromkeys(("rerank", "embed", "search"), role), ["rerank"]),
        "in_flight": _integer("Requests that are being answered."),
        "waiting": _integer("Those of them in the queue."),
        "max_waiting": _integer("Most in the queue."),
        "served": _integer("Requests answered since the start."),
        "refused": _integer("Those that were wrong, status 4xx."),
        "failed": _integer("Those that failed here, status 5xx."),
        "batches": _integer("Calls of the models."),
        "items": _integer("Texts, prompts and searches in them."),
    }
    return Endpoint("/health", "GET", "Whether it is ready.", _object(fields, list(fields)))
