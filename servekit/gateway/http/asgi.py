"""ASGI helpers of the hot routes: reading bodies, sending JSON and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any

import msgspec

from servekit.errors import BodyTooLarge, ClientClosed, InvalidKey, RequestError, ServekitError

Header = tuple[bytes, bytes]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Encodes an error in the format of an API: the HTTP status and the body.
Envelope = Callable[[ServekitError], tuple[int, bytes]]

JSON = (b"content-type", b"application/json")
#: The header that names a session; requests of one session prefer one replica.
SESSION = b"x-session-id"
#: no-transform and no buffering, so that proxies forward each event at once.
EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the whole body, at most `limit` bytes.

    Raises BodyTooLarge without reading the rest, and ClientGone.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise too_large(limit)
    message = await receive()
    body: bytes | bytearray = message.get("body", b"")
    if message.get("more_body"):
        body = bytearray(body)  # grows in place, also in many small pieces
    while message.get("more_body") and len(body) <= limit:
        message = await receive()
        body += message.get("body", b"")
    if len(body) > limit:
        raise too_large(limit)
    if message["type"] == "http.disconnect":
        raise ClientGone
    return bytes(body)


def too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body is over the limit of {limit} bytes; send less, or raise server.max_body_bytes"
    )


async def send_json(
    send: Send, body: bytes, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send a response with a JSON body."""
    length = (b"content-length", str(len(body)).encode())
    head = [JSON, length, *headers] if headers else [JSON, length]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def envelope(error: ServekitError) -> bytes:
    """Encode an error as `{"error": {"message", "type", "param", "code"}}`, OpenAI's envelope."""
    return msgspec.json.encode({"error": error_object(error)})


def encode_error(error: ServekitError) -> tuple[int, bytes]:
    """Return the status and body of an error response in OpenAI's format."""
    return error.status, envelope(error)


async def send_error(send: Send, error: ServekitError, encode: Envelope = encode_error) -> None:
    """Send an error response in the format of an API."""
    status, body = encode(error)
    await send_json(send, body, status, error_headers(error))


class ErrorResponses:
    """A context that sends an error which is raised within as the response.

    The response must not have begun. A client that is gone gets none. No generator: the context
    manager that Python 3.13 makes of one leaves each error to the collector.
    """

    def __init__(self, send: Send, encode: Envelope = encode_error) -> None:
        self._send, self._encode = send, encode

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, ClientGone | ClientClosed):
            return True
        if not isinstance(error, ServekitError):
            return False
        await send_error(self._send, error, self._encode)
        return True


def session_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the session that a client names, "" if none."""
    return headers.get(SESSION, b"").decode("latin-1")


def api_key(headers: Mapping[bytes, bytes]) -> str:
    """Return the client's key, unverified, as the fair queue's group where no keys are required."""
    find = headers.get
    key = find(b"authorization") or find(b"x-api-key") or find(b"api-key") or b""
    return key.decode("latin-1")


class MethodNotAllowed(RequestError):
    """The path does not take this method. The header `Allow` has those that it takes."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, path: str, allow: str) -> None:
        super().__init__(f"{path} takes {allow}")
        self.allow = allow


def error_headers(error: ServekitError) -> list[tuple[bytes, bytes]]:
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", error.allow.encode())]
    if isinstance(error, InvalidKey):
        return [(b"www-authenticate", b'Bearer realm="servekit"')]
    wait_s = getattr(error, "retry_after_s", None)
    return [] if wait_s is None else [(b"retry-after", str(max(1, round(wait_s))).encode())]


def error_object(error: ServekitError) -> dict[str, Any]:
    param = error.param if isinstance(error, RequestError) else None
    return {
        "message": error.message,
        "type": error_type(error.status),
        "param": param,
        "code": error.code,
    }


def error_type(status: int) -> str:
    """Return OpenAI's error `type` for an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    if status == 404:
        return "not_found_error"
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    return "server_error" if status >= 500 else "invalid_request_error"
