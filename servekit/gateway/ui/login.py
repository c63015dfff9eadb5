"""Sign-in on the pages with an API key: /ui/login, /ui/logout, and the redirects to them.

Any gateway answers these itself, before Gradio is loaded. A key is exchanged for a session cookie
(`auth.sessions`), which is valid for the pages only, and which browsers do not send for other
sites. Wrong keys slow their address down: API keys have 190 random bits, but a file may contain a
weaker one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from html import escape
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
import structlog

from servekit.errors import Forbidden, InvalidKey, RequestError, ServekitError
from servekit.gateway.auth import sessions
from servekit.gateway.auth.authorization import Access
from servekit.gateway.http.asgi import (
    ClientGone,
    Receive,
    Scope,
    Send,
    read_body,
    send_error,
    send_json,
)
from servekit.gateway.ui.pages import sign_in
from servekit.gateway.ui.pages.language import COOKIE, NAMES, PAGES, Say, get_preferred, get_root

log: Any = structlog.get_logger("servekit.gateway")

LOGIN = {f"{get_root(language)}/login": language for language in NAMES}
LOGOUT, SESSION = "/ui/logout", "/ui/session"
#: The paths that Login answers, with keys in the file and without.
PATHS = {*LOGIN, LOGOUT, SESSION}
#: Language and name of each page, by address.
ADDRESSES = {
    f"{get_root(language)}/{name}".rstrip("/"): (language, name)
    for language in NAMES
    for name in PAGES
}
MAX_BODY_BYTES = 4096
#: The answers are private, and the browser's Back must not show them.
_PRIVATE = [
    (b"cache-control", b"no-store"),
    (b"vary", b"Cookie, Accept-Language"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


class Patience:
    """The delay of an address after wrong keys: 1 s, 2 s, … 16 s; forgotten after FORGET_S."""

    LONGEST_S, FORGET_S, ADDRESSES = 16.0, 600.0, 4096

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()  # count, free since

    def wait_s(self, address: str, now_s: float) -> float:
        """Return the seconds until the address may try; at 0, this try counts as wrong for now."""
        count, free_s = self._wrong.get(address, (0, 0.0))
        if now_s < free_s:
            return free_s - now_s
        if now_s - free_s > self.FORGET_S:
            count = 0
        self._wrong[address] = (count + 1, now_s + min(2.0**count, self.LONGEST_S))
        self._wrong.move_to_end(address)
        if len(self._wrong) > self.ADDRESSES:
            self._wrong.popitem(last=False)
        return 0.0

    def forgive(self, address: str) -> None:
        """Forget the wrong keys of an address that has sent a right one."""
        self._wrong.pop(address, None)


class Login:
    """The ASGI application behind `PATHS`: form, sign-in, sign-out and the session's owner."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._patience = Patience()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        try:
            if path == SESSION:
                await self._send_key_name(scope, send)
            elif method == "POST":
                refuse_strangers(scope)
                if path == LOGOUT:
                    await _send_redirect(
                        send,
                        f"{get_root(get_preferred(scope['headers']))}/login",
                        _make_cookie(scope),
                    )
                else:
                    await self._sign_in(scope, receive, send)
            else:
                await self._show(scope, send)
        except ClientGone:
            return
        except RequestError as error:
            await send_error(send, error)

    async def _show(self, scope: Scope, send: Send) -> None:
        """Show the form, or redirect a visitor who needs none."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        page = _get_page(query)
        language = LOGIN.get(scope["path"], get_preferred(scope["headers"]))
        if (chosen := query.get("lang", [""])[0]) in NAMES:
            kept = f"{COOKIE}={chosen}; Path=/ui; Max-Age=31536000; SameSite=Lax"
            return await _send_redirect(
                send, _make_address(chosen, page), (b"set-cookie", kept.encode())
            )
        if not self._access.closed or self._name(scope) is not None:
            return await _send_redirect(send, f"{get_root(language)}/{page}")
        wanted = get_preferred(scope["headers"])
        if scope["path"] not in LOGIN or wanted != language == "en":
            return await _send_redirect(send, _make_address(wanted, page))
        return await _send_form(send, Say(language), page)

    async def _sign_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = parse_qs((await read_body(scope, receive, MAX_BODY_BYTES)).decode("latin-1"))
        language, page = LOGIN[scope["path"]], _get_page(fields)
        if not self._access.closed:
            return await _send_redirect(send, f"{get_root(language)}/{page}")
        try:
            token = await self._session_of(scope, fields.get("key", [""])[0].strip())
        except Slow as error:
            words = Say(language)("login.slow", seconds=max(1, round(error.retry_after_s or 1)))
            return await _send_form(send, Say(language), page, words, error)
        except InvalidKey as error:
            return await _send_form(send, Say(language), page, Say(language)("login.wrong"), error)
        except RequestError as error:
            return await _send_form(send, Say(language), page, error.message, error)
        return await _send_redirect(
            send, f"{get_root(language)}/{page}", _make_cookie(scope, token)
        )

    async def _session_of(self, scope: Scope, key: str) -> str:
        """Return a session for the holder of a key. Raises Slow, InvalidKey and Busy."""
        address = str((scope.get("client") or ("",))[0])
        if wait_s := self._patience.wait_s(address, time.monotonic()):
            raise Slow("too many wrong keys", retry_after_s=wait_s)
        access = self._access
        asked = key.encode()
        try:
            caller = access.find_verified(asked) or await access.verify(asked)
        except InvalidKey:
            log.warning("sign_in_failed", address=address)
            raise
        self._patience.forgive(address)
        log.info("sign_in_succeeded", key=caller.rule.name, address=address)
        return sessions.issue(caller.rule, access.rules, time.time())

    async def _send_key_name(self, scope: Scope, send: Send) -> None:
        """Send the name of the signed-in key to the page's script; null for none."""
        body = msgspec.json.encode({"key": self._name(scope)})
        await send_json(send, body, headers=_PRIVATE)

    def _name(self, scope: Scope) -> str | None:
        token = sessions.token_in(scope["headers"], _get_port(scope))
        return sessions.name_in(token, self._access.rules, time.time())


class Slow(RequestError):
    """The address has sent wrong keys, and has to wait for `Retry-After`."""

    status = 429
    code = "rate_limit_exceeded"


# ---- for the gate


def find_session(scope: Scope) -> None:
    """Copy the session cookie of a request to its authorization header, unless that has a key."""
    headers = scope["headers"]
    if any(name == b"authorization" for name, _ in headers):
        return
    if token := sessions.token_in(headers, _get_port(scope)):
        session = sessions.SCHEME + token.encode("latin-1")
        scope["headers"] = [*headers, (b"authorization", session)]


async def redirect_to_login(scope: Scope, send: Send) -> bool:
    """Redirect a browser to the form; return False for requests that do not ask for a page."""
    headers = dict(scope["headers"])
    if scope["method"] != "GET" or b"text/html" not in headers.get(b"accept", b""):
        return False
    language, page = ADDRESSES.get(scope["path"].rstrip("/"), (get_preferred(scope["headers"]), ""))
    if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
        # a link on another site sends no cookie; repeat the request from this page
        again = escape(f"{get_root(language)}/{page}")
        page_again = f"<!doctype html><meta http-equiv=refresh content='0;url={again}'>"
        await _send_page(send, 200, page_again.encode(), "default-src 'none'")
    else:
        language = language if language != "en" else get_preferred(scope["headers"])
        await _send_redirect(send, _make_address(language, page))
    return True


def refuse_strangers(scope: Scope) -> None:
    """Raise Forbidden for a request from another site, which carries the browser's session, too.

    Over plain HTTP, browsers name the requesting site in the origin only.
    """
    if scope["method"] in ("GET", "HEAD"):
        return
    headers = dict(scope["headers"])
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is None and origin is not None:
        ours = {headers.get(b"host"), headers.get(b"x-forwarded-host")}
        site = b"none" if urlsplit(origin).netloc in ours else b"cross-site"
    if site not in (None, b"same-origin", b"none"):
        raise Forbidden("another site may not use this page")


# ---- answers


def _get_page(fields: dict[str, list[str]]) -> str:
    """Return the page to go on to; the chat for an unknown one."""
    wanted = fields.get("to", [""])[0]
    return wanted if wanted in PAGES else ""


def _make_address(language: str, page: str) -> str:
    return (
        f"{get_root(language)}/login{'?' if page else ''}{urlencode({'to': page}) if page else ''}"
    )


def _get_port(scope: Scope) -> int:
    return int((scope.get("server") or ("", 0))[1] or 0)


def _make_cookie(scope: Scope, token: str = "") -> tuple[bytes, bytes]:
    secure = scope.get("scheme") == "https"
    return b"set-cookie", sessions.cookie(_get_port(scope), token, secure=secure)


async def _send_redirect(send: Send, where: str, *headers: tuple[bytes, bytes]) -> None:
    head = [(b"location", where.encode()), (b"content-length", b"0"), *headers, *_PRIVATE]
    await send({"type": "http.response.start", "status": 303, "headers": head})
    await send({"type": "http.response.body", "body": b""})


async def _send_form(
    send: Send, say: Say, page: str, problem: str = "", error: ServekitError | None = None
) -> None:
    body = sign_in.render_form(say, page, problem)
    wait_s = getattr(error, "retry_after_s", None)
    more = [] if wait_s is None else [(b"retry-after", b"%d" % max(1, round(wait_s)))]
    await _send_page(send, error.status if error else 200, body, sign_in.POLICY, more)


async def _send_page(
    send: Send,
    status: int,
    body: bytes,
    policy: str,
    more: list[tuple[bytes, bytes]] | None = None,
) -> None:
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"content-security-policy", policy.encode()),
        *(more or ()),
        *_PRIVATE,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
