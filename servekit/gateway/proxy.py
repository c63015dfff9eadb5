"""The UI of the first gateway, served by the others: Gradio's sessions live in one process."""

from __future__ import annotations

from pathlib import Path

import httpx

from servekit.errors import ModelUnavailable
from servekit.gateway.http import Receive, Scope, Send, send_error

#: Headers that speak of one connection, not of the message. Source: RFC 9110, section 7.6.1.
HOP_BY_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}


class UnixProxy:
    """Passes requests on to a Unix socket, bodies streamed both ways."""

    def __init__(self, path: Path) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        transport = httpx.AsyncHTTPTransport(uds=str(path), limits=limits)
        self._client = httpx.AsyncClient(transport=transport, timeout=None, base_url="http://ui")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = self._client.build_request(
            scope["method"],
            httpx.URL("http://ui", raw_path=_target(scope)),
            headers=[(k, v) for k, v in scope["headers"] if k not in HOP_BY_HOP],
            content=await _body(receive),
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError:
            await send_error(send, ModelUnavailable("the UI is starting", retry_after_s=2.0))
            return
        await _relay(response, send)


def _target(scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path + (b"?" + query if query else b"")


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _relay(response: httpx.Response, send: Send) -> None:
    headers = [(k.lower(), v) for k, v in response.headers.raw if k.lower() not in HOP_BY_HOP]
    try:
        await send(
            {"type": "http.response.start", "status": response.status_code, "headers": headers}
        )
        async for chunk in response.aiter_raw():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        await response.aclose()
