"""Middleware before all endpoints: checks keys, quotas, CORS and foreign web pages.

Without keys, CORS and host rules it is bypassed: the hot routes' handlers are then those of the
endpoints. Every path except those in `OPEN` needs a key, so unknown paths need one, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

import structlog

from servekit.errors import InvalidKey, RequestError, ServekitError
from servekit.gateway.api.openapi import docs_pages
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.auth.authorization import ACTING, Access, key_of
from servekit.gateway.auth.csrf import CsrfCheck
from servekit.gateway.http.asgi import (
    ASGIApp,
    Envelope,
    Header,
    Receive,
    Scope,
    Send,
    encode_error,
    send_error,
)
from servekit.gateway.http.response import FastHandler, FastResponse
from servekit.gateway.http.trusted_proxies import ForwardedAddress
from servekit.gateway.ui import login

log: Any = structlog.get_logger("servekit.gateway")

#: Paths without a key, for load balancers and readers of the documentation.
OPEN = {"/", "/livez", "/readyz", "/version", "/openapi.json", "/docs/oauth2-redirect"}
OPEN |= {"/health", "/v1/health", "/ping"}
#: The one of these whose response has more for a caller with a key.
READY = "/readyz"
OPEN |= login.PATHS | docs_pages.PATHS
#: Needs no key if the configuration says so.
METRICS = "/metrics"
#: Static files of /docs/swagger.
OPEN_FOLDER = "/static-offline-docs/"
METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
#: Response headers that CORS exposes to a page beside the default ones.
EXPOSED = b", ".join(
    [b"retry-after", b"www-authenticate", b"x-request-id", b"servekit-warning"]
    + [
        b"x-ratelimit-%b-%b" % (which, what)
        for what in (b"requests", b"tokens")
        for which in (b"limit", b"remaining", b"reset")
    ]
)
PREFLIGHT_MAX_AGE_S = 600
_ASKED_METHOD = b"access-control-request-method"  # only a preflight has it


class AuthMiddleware:
    """The middleware of both paths: fast responses (`exchanges`) and ASGI (`__call__`)."""

    def __init__(
        self,
        access: Access,
        handlers: Mapping[bytes, FastHandler],
        envelopes: Mapping[str, Envelope],
    ) -> None:
        """Create it; `envelopes` has, by path, the error formats other than OpenAI's."""
        self._access = access
        self._envelopes = envelopes
        self._handlers = handlers
        #: The hot routes' handlers for the protocol; changed in place with the rules.
        self.exchanges: dict[bytes, FastHandler] = dict(handlers)
        self.open = True
        self._strangers: CsrfCheck | None = None
        self._forwarded: ForwardedAddress | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        access.on_change(self._on_change)

    def _on_change(self) -> None:
        rules = self._access.rules
        proxies = rules.trusted_proxies
        guarded = self._access.closed or rules.hosts or rules.browser_link
        self.open = not (guarded or rules.cors or proxies)
        self._forwarded = ForwardedAddress(proxies) if proxies else None
        self._strangers = CsrfCheck(rules.hosts, rules.cors) if rules.hosts else None
        for path, handler in self._handlers.items():
            if self._access.closed:
                handler = partial(self._authenticate, handler)
            if rules.cors or rules.hosts or proxies:
                handler = partial(self._check_origin, handler)
            self.exchanges[path] = handler

    # ---- fast responses

    def _check_origin(self, handler: FastHandler, exchange: FastResponse) -> None:
        """Let `handler` go on with a request that no stranger's page sends."""
        if self._access.rules.cors:
            exchange.extra = self._cors(exchange.headers)
        if self._forwarded is not None:
            origin = exchange.origin
            origin.address = self._forwarded.find_client(origin.address, exchange.protocol.headers)
        if self._strangers is not None:
            self._strangers.check_request(exchange.headers)
        handler(exchange)

    def _authenticate(self, handler: FastHandler, exchange: FastResponse) -> None:
        """Answer a request once its key is verified, which nearly always is at once."""
        protocol, callers = exchange.protocol, self._access.callers
        if (holder := protocol.holder) is not None and holder[0] is callers:
            # the same head again, under the same rules: nearly all requests of a kept connection
            self._serve_caller(handler, exchange, holder[1])
            return
        key = key_of(protocol.headers)
        caller = self._access.find_verified(key)
        if caller is not None:
            protocol.holder = callers, caller
            self._serve_caller(handler, exchange, caller)
            return
        task = asyncio.get_running_loop().create_task(self._verify(handler, exchange, key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _verify(self, handler: FastHandler, exchange: FastResponse, key: bytes) -> None:
        """Verify the key off the event loop, then answer the request."""

        def go_on(exchange: FastResponse) -> None:
            if not exchange.disconnected:
                self._serve_caller(handler, exchange, caller)

        try:
            caller = await self._access.verify(key)
        except ServekitError as error:
            exchange.send_error(error)
        except Exception:
            log.exception("unexpected_error")
            exchange.send_error(ServekitError("an internal error; see the logs"))
        else:
            exchange.begin_with(go_on)

    def _serve_caller(self, handler: FastHandler, exchange: FastResponse, caller: ApiKey) -> None:
        exchange.origin.key = caller.rule.name
        refused = caller.charge_request()
        if caller.limited:
            exchange.extra += caller.rate_limit_headers()
        if refused is not None:
            raise refused
        before = ACTING.set(caller)
        try:
            handler(exchange)
        finally:
            ACTING.reset(before)

    # ---- ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
        """Let `app` answer on behalf of the caller; refusals become error responses."""
        headers = dict(scope["headers"])
        extra = self._cors(headers)
        path: str = scope["path"]
        if extra and scope["method"] == "OPTIONS" and _ASKED_METHOD in headers:
            await _preflight(send, extra, headers)
            return
        try:
            if self._strangers is not None and path not in OPEN:
                self._strangers.check_request(headers)
            if self._access.closed and path == READY:
                with contextlib.suppress(RequestError):
                    ACTING.set(await self._caller(scope))
            elif login.carries_link(scope):
                pass  # `Login` answers it
            elif self._access.closed and not self._is_open(scope):
                caller = await self._caller(scope)
                ACTING.set(caller)  # visible in this request's task only
                if scope["method"] == "POST" and (path in login.CALLS or not _is_page(path)):
                    refused = caller.charge_request()
                    extra += caller.rate_limit_headers()
                    if refused is not None:
                        raise refused
            elif not self._access.closed and _is_page(path) and login.find_session(scope):
                login.refuse_strangers(scope)
        except RequestError as error:
            if (
                isinstance(error, InvalidKey)
                and _is_page(path)
                and await login.redirect_to_login(scope, send)
            ):
                return
            encode = self._envelopes.get(path, encode_error)
            await send_error(_add_headers(send, extra), error, encode)
            return
        await app(scope, receive, _add_headers(send, extra) if extra else send)

    def _is_open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path == METRICS:
            return self._access.rules.open_metrics
        if scope["method"] in ("GET", "HEAD") and path.rpartition("/")[0] == "/docs":
            return True  # 404, as without keys, for a page that is none
        return path in OPEN or path.startswith(OPEN_FOLDER)

    async def _caller(self, scope: Scope) -> ApiKey:
        if _is_page(scope["path"]):
            login.refuse_strangers(scope)
            login.find_session(scope)
            return await self._access.holder(scope["headers"])
        key = key_of(scope["headers"])
        return self._access.find_verified(key) or await self._access.verify(key)

    # ---- web pages

    def _cors(self, headers: Mapping[bytes, bytes]) -> tuple[Header, ...]:
        """Return the CORS headers that let the page of this request read the response."""
        allowed = self._access.rules.cors
        if not allowed:
            return ()
        origin = headers.get(b"origin", b"")
        if "*" in allowed and origin:
            return (
                (b"access-control-allow-origin", b"*"),
                (b"access-control-expose-headers", EXPOSED),
            )
        vary = (b"vary", b"Origin")
        if origin.decode("latin-1") not in allowed:
            return (vary,)
        return (
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
            vary,
        )


def _is_page(path: str) -> bool:
    """Return whether this is a page of the UI, where a session or password is valid, too."""
    return path == "/ui" or path.startswith("/ui/")


async def _preflight(send: Send, extra: tuple[Header, ...], headers: Mapping[bytes, bytes]) -> None:
    """Answer the browser's CORS preflight, which precedes a page's request with a key."""
    wanted = headers.get(b"access-control-request-headers", b"")
    head: list[Header] = [
        *extra,
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", wanted or b"authorization, content-type"),
        (b"access-control-max-age", b"%d" % PREFLIGHT_MAX_AGE_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": head})
    await send({"type": "http.response.body", "body": b""})


def _add_headers(send: Send, extra: tuple[Header, ...]) -> Send:
    """Return a `send` that adds headers to the response."""

    def sending(message: Any) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        return send(message)

    return sending
