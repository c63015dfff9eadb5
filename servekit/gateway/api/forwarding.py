"""Endpoints that servekit does not know, forwarded to the server behind a model.

The model is named in the body (JSON or a form), else in the query, else in the header `x-model`.
Without a name it is the first model, by default the `default_model`, that has the endpoint; a model
that lists the endpoint itself comes before those that have all of `/v1/*`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import unquote_plus

from servekit.errors import ClientClosed, RequestError, ServekitError, Unsupported
from servekit.gateway.api.forwarded_body import FoundModel, find_model
from servekit.gateway.http.asgi import (
    ClientGone,
    ErrorResponses,
    Receive,
    Scope,
    Send,
    api_key,
    envelope,
    read_body,
    send_error,
    session_of,
)
from servekit.gateway.http.response import DisconnectWatcher, Endpoint
from servekit.gateway.routing.adapter_route import base_of
from servekit.gateway.routing.forwarded_request import ForwardedRequest
from servekit.gateway.routing.router import ModelQueue, Router
from servekit.gateway.routing.task_check import serves_any
from servekit.protocol.forwarding import find_pattern
from servekit.protocol.messages import HttpPart, HttpRequest
from servekit.protocol.types import Task

#: Well-known endpoints, for the OpenAPI document and as labels of metrics.
KNOWN = {
    "/v1/audio/speech": "A text as speech",
    "/v1/images/generations": "Images of a text",
    "/v1/images/edits": "Edited images",
    "/v1/images/variations": "Variations of an image",
    "/v1/moderations": "Whether a text is harmful",
    "/pooling": "The hidden states of texts",
}
#: Endpoints of servekit that a model may list nevertheless, as servers have other formats for them,
#: and models of their own.
FORWARDED_FIRST = (
    *("/tokenize", "/detokenize", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    *("/v1/classify", "/classify", "/v1/audio/transcriptions", "/v1/audio/translations"),
)
#: Paths that mean the same to each server: without escapes, and without segments that lead up.
_PLAIN = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")
#: Request headers that are about the body. Others are about the connection, or hold keys.
_HEADERS = (b"content-type", b"accept", b"accept-language")
_MODEL = b"x-model"
#: Longer bodies are read in a thread, because that takes milliseconds.
_LARGE_BYTES = 2**20


class Forwarding:
    """The forwarded endpoints, as an ASGI application."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self._router = router
        self._max_body_bytes = max_body_bytes

    def covers(self, path: str) -> bool:
        """Return whether some model has this endpoint."""
        routes = self._router.routes.values()
        return bool(_PLAIN.fullmatch(path)) and any(_pattern_of(route, path) for route in routes)

    def known_endpoints(self) -> dict[str, str]:
        """Return the well-known endpoints that some model has, each with a summary."""
        return {path: summary for path, summary in KNOWN.items() if self.covers(path)}

    def label(self, path: str) -> str:
        """Return the label for metrics: clients could create any number of paths."""
        if path in KNOWN:
            return path
        return next(filter(None, (_pattern_of(r, path) for r in self._router.routes.values())), "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with ErrorResponses(send):
            call = await self._open(scope, receive)
            watch = DisconnectWatcher(call, receive)
            try:
                await _send_response(call, send)
            finally:
                watch.stop_watching()
                call.cancel()

    def before(self, endpoint: Endpoint, tasks: Sequence[Task] = ()) -> Endpoint:
        """Return an endpoint that forwards the requests for models that list it, and no others.

        A request without a model is for the default one, or if that neither lists the endpoint nor
        serves one of the `tasks`, for one that lists it.
        """

        async def chosen(scope: Scope, receive: Receive, send: Send) -> None:
            if not self.covers(scope["path"]):
                await endpoint(scope, receive, send)
                return
            body: bytes | None = None

            async def read_again() -> MutableMapping[str, Any]:
                nonlocal body
                if body is None:
                    return await receive()
                whole, body = body, None
                return {"type": "http.request", "body": whole, "more_body": False}

            try:
                body = await read_body(scope, receive, self._max_body_bytes)
                headers = dict(scope["headers"])
                kind = headers.get(b"content-type", b"")
                if len(body) > _LARGE_BYTES:
                    found = await asyncio.to_thread(find_model, kind, body)
                else:
                    found = find_model(kind, body)
                model, _ = _name_model(found, scope["query_string"], headers)
                forwards = self._lists(scope["path"], model, tasks)
            except ClientGone:
                return
            except ServekitError as error:
                await send_error(send, error)
                return
            await (self if forwards else endpoint)(scope, read_again, send)

        return chosen

    def _lists(self, path: str, model: str, tasks: Sequence[Task]) -> bool:
        route = self._router.find(model)
        if _pattern_of(route, path):
            return True
        return bool(tasks) and not model and not serves_any(route, tasks)

    async def _open(self, scope: Scope, receive: Receive) -> ForwardedRequest:
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise RequestError("content-encoding: send the body as it is", param="content-encoding")
        body = await read_body(scope, receive, self._max_body_bytes)
        kind = headers.get(b"content-type", b"")
        if len(body) > _LARGE_BYTES:
            found, digest = await asyncio.to_thread(_read, kind, body)
        else:
            found, digest = _read(kind, body)
        del body
        model, query = _name_model(found, scope["query_string"], headers)
        route = self._find(scope["path"], model)
        http = HttpRequest(
            scope["path"],
            query,
            tuple((name, headers[name]) for name in _HEADERS if name in headers),
            len(found.body),
            digest,
            found.at,
            found.is_json,
        )
        call = ForwardedRequest(route.status.name, http, found.body, api_key(headers))
        if self._router.chooses:
            call.session = session_of(headers)
        self._router.queue_call(call)
        return call

    def _find(self, path: str, model: str) -> ModelQueue:
        """Return the model of a request. Raises ModelNotFound, Forbidden and Unsupported."""
        able = [route for route in self._router.models() if _pattern_of(route, path)]
        route = self._router.find(model)
        if able and not model:
            best = [one for one in able if path in one.status.endpoints] or able
            return route if route in best else best[0]
        self._router.access.require_model(route.status.name, base_of(route))
        if _pattern_of(route, path):
            return route
        names = ", ".join(repr(one.status.name) for one in able) or "none that you may use"
        has = f"the model {route.status.name!r} has no {path}; models that may have it: {names}"
        raise Unsupported(has, param="model")


def _pattern_of(route: ModelQueue, path: str) -> str:
    return find_pattern(path, route.status.endpoints)


def _read(kind: bytes, body: bytes) -> tuple[FoundModel, bytes]:
    found = find_model(kind, body)
    return found, hashlib.sha256(found.body).digest()


def _name_model(found: FoundModel, query: bytes, headers: Mapping[bytes, bytes]) -> tuple[str, str]:
    """Return the name of the model, and the query without it."""
    pairs = query.decode("latin-1").split("&")
    rest = "&".join(pair for pair in pairs if pair.partition("=")[0] != "model")
    return found.model or _in_query(pairs) or headers.get(_MODEL, b"").decode("latin-1"), rest


def _in_query(pairs: list[str]) -> str:
    named = (value for name, _, value in (pair.partition("=") for pair in pairs) if name == "model")
    return unquote_plus(next(named, ""))


async def _send_response(call: ForwardedRequest, send: Send) -> None:
    """Send the response as it comes; a failure after its first part ends it early."""
    head: HttpPart | None = None
    try:
        while (part := await call.next_part()) is not None:
            if head is None:
                head = part
                headers = [*part.headers]
                await send(
                    {"type": "http.response.start", "status": part.status, "headers": headers}
                )
            await send({"type": "http.response.body", "body": part.data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    except ClientClosed:
        return
    except RequestError as error:
        if head is None:
            await send_error(send, error)
        elif _takes_events(head):
            event = b"data: " + envelope(error) + b"\n\n"
            await send({"type": "http.response.body", "body": event})
        # else the server closes the connection, and the client sees that the response is incomplete


def _takes_events(head: HttpPart) -> bool:
    headers = dict(head.headers)
    stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
    return stream and not headers.keys() & {b"content-length", b"content-encoding"}
