"""The client's address and scheme behind trusted reverse proxies.

The headers of other clients are ignored: with a forged address they would escape the delay that
follows wrong keys, and the isolation of sources whose requests kill workers.
"""

from __future__ import annotations

import contextlib
from typing import Any, cast

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from servekit.gateway.auth.authorization import Access, Headers
from servekit.gateway.http.asgi import ASGIApp, Receive, Scope, Send


class TrustedProxies:
    """ASGI middleware that reads the X-Forwarded-… headers of trusted proxies.

    Requests on the fast path do not pass through it: see `client_address`.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access
        self._next = app
        access.on_change(self._on_change)
        self._on_change()

    def _on_change(self) -> None:
        trusted = self._access.rules.trusted_proxies
        self._next = _reading_headers(self._app, trusted) if trusted else self._app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._next(scope, receive, send)


class ForwardedAddress:
    """Finds the client's address in the X-Forwarded-For headers of trusted proxies."""

    def __init__(self, trusted: tuple[str, ...]) -> None:
        self._read = _reading_headers(_do_nothing, trusted)

    def find_client(self, address: str, headers: Headers) -> str:
        """Return the address of the client that `address` forwards for, else `address`."""
        scope: Scope = {"type": "http", "client": (address, 0), "headers": headers}
        with contextlib.suppress(StopIteration):
            self._read(scope, None, None).send(None)  # it waits for nothing
        found: str = scope["client"][0]
        return found


async def _do_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    pass


def _reading_headers(app: ASGIApp, trusted: tuple[str, ...]) -> Any:
    return cast(Any, ProxyHeadersMiddleware)(app, [*trusted])
