"""Proxy to the first gateway's UI, for the other gateways: Gradio's sessions need one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx

from servekit.errors import ModelUnavailable
from servekit.gateway.http.asgi import (
    ClientGone,
    Receive,
    Scope,
    Send,
    read_body,
    send_error,
    send_json,
)

#: Headers of one connection, which a proxy must not forward. Source: RFC 9110, section 7.6.1.
HOP_BY_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
#: Gradio's page shows `detail`.
_TOO_LONG = b'{"detail": "The conversation is too long. Start a new chat."}'


class UnixProxy:
    """Forwards requests to a Unix socket, and streams the responses back.

    While nobody listens there, `show_waiting` answers those who ask for a page.
    """

    def __init__(
        self, path: Path, max_body_bytes: int, show_waiting: Callable[[Send], Awaitable[None]]
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._show_waiting = show_waiting
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        transport = httpx.AsyncHTTPTransport(uds=str(path), limits=limits)
        self._client = httpx.AsyncClient(transport=transport, timeout=None, base_url="http://ui")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or await refuse_long_body(scope, send, self._max_body_bytes):
            return
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
        except ClientGone:
            return
        request = self._client.build_request(
            scope["method"],
            httpx.URL("http://ui", raw_path=_target(scope)),
            headers=[(k, v) for k, v in scope["headers"] if k not in HOP_BY_HOP],
            content=body,
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError:
            if b"text/html" in dict(scope["headers"]).get(b"accept", b""):
                await self._show_waiting(send)
            else:
                await send_error(send, ModelUnavailable("the UI is starting", retry_after_s=2.0))
            return
        await _until_gone(_relay(response, send), receive)


async def refuse_long_body(scope: Scope, send: Send, max_body_bytes: int) -> bool:
    """Refuse a request to the UI unless its body has a length within the limit.

    No page sends chunked bodies. Returns whether it is refused.
    """
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    chunked = b"transfer-encoding" in headers
    if not chunked and length.isdigit() and int(length) <= max_body_bytes:
        return False
    await send_json(send, _TOO_LONG, 413)
    return True


async def _until_gone(relay: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Relay until done or until the client has left, which the UI must notice, too."""
    relaying, leaving = (
        asyncio.ensure_future(relay),
        asyncio.ensure_future(_await_disconnect(receive)),
    )
    try:
        await asyncio.wait([relaying, leaving], return_when=asyncio.FIRST_COMPLETED)
        if relaying.done():
            relaying.result()
    finally:
        relaying.cancel()
        leaving.cancel()
        await asyncio.gather(relaying, leaving, return_exceptions=True)


async def _await_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _target(scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path + (b"?" + query if query else b"")


async def _relay(response: httpx.Response, send: Send) -> None:
    """Send a response on; if the UI ends within it, the client sees that it is incomplete."""
    headers = [(k.lower(), v) for k, v in response.headers.raw if k.lower() not in HOP_BY_HOP]
    try:
        await send(
            {"type": "http.response.start", "status": response.status_code, "headers": headers}
        )
        async for chunk in response.aiter_raw():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    except httpx.TransportError:
        return  # the server disconnects
    finally:
        await response.aclose()
