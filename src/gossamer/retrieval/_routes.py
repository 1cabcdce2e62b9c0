"""The paths of the server as a Starlette application; loaded by `create_app`."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from gossamer._version import __version__
from gossamer.checks import check_choice
from gossamer.errors import ConfigError, DataError, GossamerError
from gossamer.retrieval._api_page import openapi, page
from gossamer.retrieval._batching import QueueClosed, QueueFull, QueueTimeout, Worker
from gossamer.retrieval._request_checks import RequestError, check_body, read_json_body
from gossamer.retrieval._roles import Roles
from gossamer.retrieval._schemas import Endpoint, build_endpoints

if TYPE_CHECKING:
    from gossamer.retrieval.server import ServerLimits

__all__ = ["build_app"]

_LOG = logging.getLogger("gossamer.server")

Body = dict[str, Any]


def build_app(roles: Roles, limits: ServerLimits, timeout: float) -> Starlette:
    """Return the application."""
    service = _Service(roles, limits, timeout)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.worker.open()
        try:
            yield
        except asyncio.CancelledError:  # told to stop at once: nobody waits for the worker
            return
        await asyncio.to_thread(service.worker.close)

    endpoints = build_endpoints(limits)
    routes = [
        Route(e.path, _endpoint(service, e), methods=[e.method], name=e.path) for e in endpoints
    ]
    document, html = _dumps(openapi(endpoints)), page(endpoints)

    async def describe(_: Request) -> Response:
        return _json(document)

    async def docs(_: Request) -> Response:
        return HTMLResponse(html)

    routes += [Route("/openapi.json", describe), Route("/docs", docs)]
    paths = [route.path for route in routes]

    async def no_route(request: Request, error: Exception) -> Response:
        return _no_route(service, request, error, paths)

    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: no_route})


class _Service:
    """The state of a server and what each path answers."""

    def __init__(self, roles: Roles, limits: ServerLimits, timeout: float) -> None:
        self.roles, self.limits, self.timeout = roles, limits, timeout
        self.worker = Worker(roles.kinds(), limits.max_waiting)
        self.in_flight = 0
        self.counts = {"served": 0, "refused": 0, "failed": 0}
        self.names: dict[str, str | None] = {
            "/rerank": _name(roles.ranker or roles.encoder),
            "/embed": _name(roles.encoder),
            "/search": _name(roles.index),
        }

    async def answer(self, endpoint: Endpoint, request: Request) -> Body:
        """Return the answer to a request.

        Raises:
            RequestError: If there is none.
        """
        if endpoint.body is None:
            return self.health()
        if self.names[endpoint.path] is None:
            raise RequestError(
                501,
                "not_configured",
                f"{endpoint.path} needs a model or an index that this server was not given. Start "
                f"it with gossamer serve {endpoint.option} ...",
            )
        self.in_flight += 1
        try:
            return await self._model_answer(endpoint, endpoint.body, request)
        finally:
            self.in_flight -= 1

    async def _model_answer(self, endpoint: Endpoint, schema: Body, request: Request) -> Body:
        deadline = asyncio.get_running_loop().time() + self.timeout
        raw = await self._read(request)
        body = check_body(read_json_body(raw), schema)
        began = time.perf_counter()
        method: Callable[[Body, float], Awaitable[Body]] = getattr(self, endpoint.path[1:])
        made = await method(body, deadline)
        meta = {**made.pop("meta", {}), "seconds": round(time.perf_counter() - began, 6)}
        name = body.get("model") or self.names[endpoint.path]
        return {**made, "model": name, "meta": meta}

    def health(self) -> Body:
        """Answer `/health`."""
        return {
            "status": "ready",
            "version": __version__,
            "roles": {path[1:]: name for path, name in self.names.items()},
            "in_flight": self.in_flight,
            "waiting": self.worker.waiting,
            "max_waiting": self.limits.max_waiting,
            **self.counts,
            "batches": self.worker.num_batches,
            "items": self.worker.num_items,
        }

    async def rerank(self, body: Body, deadline: float) -> Body:
        """Answer `/rerank`."""
        given = body["documents"]
        texts = [_text_of(document) for document in given]
        role = "rank" if self.roles.ranker else "document"
        order, scores, num_cut = await self._order(body["query"], texts, deadline)
        best = order[: len(given) if body["top_n"] is None else body["top_n"]]
        results: list[Body] = [
            {"index": place, "relevance_score": score}
            for place, score in zip(best, scores, strict=False)
        ]
        if body["return_documents"]:
            for result in results:
                document = given[result["index"]]
                text = isinstance(document, str)
                result["document"] = {"text": document} if text else document
        meta = {
            "num_documents": len(given),
            "num_cut": num_cut,
            "max_tokens": self.roles.max_tokens(role),
        }
        return {"results": results, "meta": meta}

    async def embed(self, body: Body, deadline: float) -> Body:
        """Answer `/embed`."""
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        role = body["input_type"]
        found = await self._work("encode", [(role, text) for text in texts], deadline)
        plain = body["encoding_format"] == "float"
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": one.vector.tolist() if plain else _base64(one.vector),
            }
            for i, one in enumerate(found)
        ]
        tokens = sum(one.num_tokens for one in found)
        return {
            "object": "list",
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {
                "num_cut": sum(one.cut for one in found),
                "max_tokens": self.roles.max_tokens(role),
            },
        }

    async def search(self, body: Body, deadline: float) -> Body:
        """Answer `/search`."""
        (found,) = await self._work("search", [(body["query"], body["top_k"])], deadline)
        return {"results": [{"id": name, "score": score} for name, score in found]}

    async def _order(
        self, query: str, texts: list[str], deadline: float
    ) -> tuple[list[int], list[float], int]:
        """Return places, best first, the score of each, and how many texts were cut."""
        if not texts:
            return [], [], 0
        if self.roles.ranker:
            (ranked,) = await self._work("rank", [(query, texts)], deadline)
            return ranked.order, ranked.scores, ranked.num_cut
        items = [("query", query), *(("document", text) for text in texts)]
        asked, *found = await self._work("encode", items, deadline)
        scores = np.stack([one.vector for one in found]) @ asked.vector
        order = np.argsort(-scores, kind="stable").tolist()
        return order, scores[order].tolist(), sum(one.cut for one in found)

    async def _work(self, kind: str, items: list[Any], deadline: float) -> list[Any]:
        if not items:
            return []
        left = deadline - asyncio.get_running_loop().time()
        try:
            return await self.worker.submit(kind, items, timeout=left)
        except QueueFull as error:
            raise RequestError(
                503,
                "overloaded",
                f"at most {self.limits.max_waiting} requests may wait; {error.waiting} do. Try "
                f"again in {error.retry} s.",
                headers={"Retry-After": str(error.retry)},
            ) from None
        except QueueClosed:
            raise _shutting_down() from None
        except QueueTimeout as error:
            raise RequestError(
                504,
                "timeout",
                f"the answer must be there in {self.timeout:g} s; {error.done} of {error.total} "
                "parts of the work were done, the rest was dropped. Send less, ask again when the "
                "server is less busy, or start it with a longer --timeout.",
            ) from None
        except DataError as error:
            # texts are checked before: this is about what a model made of them, such as NaN
            raise RequestError(500, "model_fault", str(error)) from None
        except GossamerError as error:
            # what a model of this library says about a request is written for who sent it
            raise RequestError(422, "refused_by_model", str(error)) from None

    async def _read(self, request: Request) -> bytes:
        """Return the body, or stop as soon as it is too large or too late."""
        kind = request.headers.get("content-type", "application/json").split(";")[0].strip()
        if kind.lower() != "application/json":
            raise RequestError(
                415,
                "not_json",
                f"the body must be application/json; got {kind}. Send the header Content-Type: "
                "application/json.",
            )
        length = request.headers.get("content-length", "")
        if length.isdecimal():
            self._check_size(int(length))
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.timeout):
                async for part in request.stream():
                    size += len(part)
                    self._check_size(size)
                    parts.append(part)
        except TimeoutError:
            raise RequestError(
                408,
                "slow_body",
                f"the body must be here in {self.timeout:g} s; got {size} bytes. Send it faster.",
            ) from None
        return b"".join(parts)

    def _check_size(self, size: int) -> None:
        most = self.limits.max_body_bytes
        if size > most:
            raise RequestError(
                413,
                "too_large",
                f"the body must be at most {most} bytes; got {size} or more. Send fewer or shorter "
                "texts in a request.",
            )


def _endpoint(service: _Service, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        began = time.perf_counter()
        try:
            response = _json(_dumps(await service.answer(endpoint, request)))
        except RequestError as error:
            response = _error(error)
        except asyncio.CancelledError:  # told to stop at once
            response = _error(_shutting_down())
        except ClientDisconnect:
            response = Response(status_code=400)  # nobody reads it
        except Exception as error:
            _report(error)
            response = _error(
                RequestError(
                    500,
                    "internal_fault",
                    f"the model or the server failed with {type(error).__name__}. Its log names "
                    "the place.",
                )
            )
        _count(service, endpoint, response, began)
        return response

    return respond


def _no_route(service: _Service, request: Request, error: Exception, paths: list[str]) -> Response:
    began = time.perf_counter()
    status = getattr(error, "status_code", 500)
    headers = getattr(error, "headers", None)
    path = request.url.path
    if status == 405:
        allowed = (headers or {}).get("Allow", "another method")
        wrong = RequestError(
            405,
            "wrong_method",
            f"{path} takes {allowed}; got {request.method}. Change the method.",
            headers=headers,
        )
    else:
        try:
            check_choice(path[:80], paths, "path")
            message = f"no answer for {path}"
        except ConfigError as unknown:
            message = str(unknown)
        wrong = RequestError(status, "unknown_path", message, headers=headers)
    response = _error(wrong)
    _count(service, None, response, began)
    return response


def _count(service: _Service, endpoint: Endpoint | None, response: Response, began: float) -> None:
    status = response.status_code
    if endpoint is None or endpoint.body is not None:
        service.counts["served" if status < 400 else "refused" if status < 500 else "failed"] += 1
    # the path of an unknown one may be text of the user
    path = f"{endpoint.method} {endpoint.path}" if endpoint else "(unknown path or method)"
    _LOG.info("%s %d %.0f ms", path, status, 1000 * (time.perf_counter() - began))


def _report(error: Exception) -> None:
    """Log where an error was raised; its message may hold text of the user."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    _LOG.error("%s in %s:%s", type(error).__name__, place.filename, place.lineno)


def _shutting_down() -> RequestError:
    return RequestError(
        503,
        "shutting_down",
        "the server takes no more requests, since it is shutting down. Ask another one.",
        headers={"Retry-After": "5"},
    )


def _error(error: RequestError) -> Response:
    return _json(_dumps(error.body()), error.status, error.headers)


def _json(raw: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(raw, status, headers, media_type="application/json")


def _dumps(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def _base64(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()


def _text_of(document: str | Body) -> str:
    if isinstance(document, str):
        return document
    text: str = document["text"]
    return f"{document['title']} {text}" if document.get("title") else text


def _name(thing: object) -> str | None:
    return None if thing is None else type(thing).__name__
