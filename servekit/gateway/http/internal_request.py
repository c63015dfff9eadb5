"""A request that the gateway sends to its own application, as a client would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from servekit.errors import ServekitError
from servekit.gateway.http.asgi import ASGIApp, encode_error, error_headers

Json = dict[str, Any]
#: The statuses of refusals that pass.
AGAIN = (429, 503)
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class InternalAnswer:
    """The answer of the application, whole."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def pause_s(self) -> float | None:
        """The time to wait before the request is sent again; None if this answer stands."""
        if self.status not in AGAIN:
            return None
        wait = self.headers.get(b"retry-after", b"1")
        return min(_LONGEST_PAUSE_S, float(wait) if wait.isdigit() else 1.0)


def refuse_internally(error: ServekitError) -> InternalAnswer:
    """Return the answer to a request that is not sent at all."""
    status, body = encode_error(error)
    return InternalAnswer(status, dict(error_headers(error)), body)


async def post_internally(
    app: ASGIApp, path: str, body: bytes, on_body: Callable[[bytes], None] | None = None
) -> InternalAnswer:
    """Send JSON to a path of `app`, in the name of the caller of this context (`ACTING`).

    `on_body` is called with each part of an answer of status 200, whose `body` is then empty.
    """
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
    ]
    scope: Json = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": headers, "client": None, "server": None, "repeats": True,
    }  # fmt: skip
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    status, told, parts = 0, {}, bytearray()

    async def receive() -> Json:
        if not unread:
            await asyncio.Event().wait()  # this client stays
        return unread.pop()

    async def send(message: Any) -> None:
        nonlocal status, told
        if message["type"] == "http.response.start":
            status, told = message["status"], dict(message["headers"])
        elif on_body is not None and status == 200:
            on_body(message.get("body", b""))
        else:
            parts.extend(message.get("body", b""))

    # in a task of its own, whose context the request may change
    asked = asyncio.get_running_loop().create_task(_as_task(app, scope, receive, send))
    try:
        await asked
    finally:
        asked.cancel()
    if not status:
        status, answered = encode_error(ServekitError("an internal error; see the logs"))
        return InternalAnswer(status, told, answered)
    return InternalAnswer(status, told, bytes(parts))


async def _as_task(app: ASGIApp, scope: Json, receive: Any, send: Any) -> None:
    await app(scope, receive, send)
