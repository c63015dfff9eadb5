"""Sign-in on the pages: /ui/login, /ui/logout, the redirects to them, and one-time links.

Any gateway answers these itself, before Gradio is loaded. A key is exchanged for a session cookie
(`auth.sessions`), which is valid for the pages only, and which browsers do not send for other
sites. Wrong keys slow their address down: API keys have 190 random bits, but a file may contain a
weaker one. A link that `servekit link` has printed is exchanged for the owner's session.
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
from servekit.gateway.api.admin.endpoints import ANSWER_S, NotNow, Supervisor
from servekit.gateway.api.audio.endpoints import TRANSCRIPTIONS, TRANSLATIONS
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
from servekit.gateway.ui.pages.language import (
    COOKIE,
    NAMES,
    PAGES,
    PATH,
    Say,
    get_preferred,
    get_root,
)
from servekit.protocol.browser_link import is_genuine
from servekit.protocol.messages import Accepted, KeyRule, RedeemLink

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
#: Endpoints of the API that the scripts of pages ask, by where they do: a session is valid there.
CALLS = {f"{PATH}{path}": path for path in (TRANSCRIPTIONS, TRANSLATIONS)}
#: The parameter of a one-time link.
LINK = "token"
MAX_BODY_BYTES = 4096
#: The answers are private, and the browser's Back must not show them.
_PRIVATE = [
    (b"cache-control", b"no-store"),
    (b"vary", b"Cookie, Accept-Language"),
    # not no-referrer: over plain HTTP the form would be of the origin "null", and be refused
    (b"referrer-policy", b"same-origin"),
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
    """The ASGI application behind `PATHS` and links: form, sign-in, sign-out, the session's key."""

    def __init__(self, access: Access, supervisor: Supervisor) -> None:
        self._access = access
        self._supervisor = supervisor
        self._patience = Patience()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        try:
            if carries_link(scope):
                await self._open_link(scope, send)
            elif path == SESSION:
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
        query = _get_query(scope)
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
        address = _get_client(scope)
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
        return self._issue_session(caller.rule, address)

    def _issue_session(self, rule: KeyRule, address: str) -> str:
        log.info("sign_in_succeeded", key=rule.name, address=address)
        return sessions.issue(rule, self._access.rules, time.time())

    async def _open_link(self, scope: Scope, send: Send) -> None:
        """Exchange the token of a link for the owner's session, and show the page without it."""
        language, page = ADDRESSES[scope["path"].rstrip("/")]
        where = f"{get_root(language)}/{page}"
        if self._name(scope) == sessions.OWNER.name:  # this browser has opened it before
            return await _send_onward(scope, send, where)
        say = Say(language if language != "en" else get_preferred(scope["headers"]))
        try:
            valid = await self._redeem(_get_query(scope)[LINK][0])
        except ServekitError as error:
            return await _send_page(
                send, error.status, sign_in.render_notice(say, page, error.message), sign_in.POLICY
            )
        if not valid:
            form = sign_in.render_form if self._access.closed else sign_in.render_notice
            body = form(say, page, say("login.link_over"))
            return await _send_page(send, Forbidden.status, body, sign_in.POLICY)
        session = self._issue_session(sessions.OWNER, _get_client(scope))
        return await _send_onward(scope, send, where, _make_cookie(scope, session))

    async def _redeem(self, token: str) -> bool:
        """Return whether the token was valid until now. Raises what `answer_to` raises."""
        rules = self._access.rules
        if not rules.browser_link or not is_genuine(token, rules.sessions):
            return False
        try:
            await self._supervisor.answer_to(RedeemLink(token), Accepted, ANSWER_S)
        except NotNow:
            return False
        return True

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


def carries_link(scope: Scope) -> bool:
    """Return whether a request opens a one-time link, which `Login` answers."""
    if scope["method"] != "GET" or scope["path"].rstrip("/") not in ADDRESSES:
        return False
    return LINK in _get_query(scope)


def find_session(scope: Scope) -> bool:
    """Copy the session cookie of a request to its authorization header, unless that has a key.

    Returns whether it was copied.
    """
    headers = scope["headers"]
    if any(name == b"authorization" for name, _ in headers):
        return False
    token = sessions.token_in(headers, _get_port(scope))
    if token:
        session = sessions.SCHEME + token.encode("latin-1")
        scope["headers"] = [*headers, (b"authorization", session)]
    return bool(token)


async def redirect_to_login(scope: Scope, send: Send) -> bool:
    """Redirect a browser to the form; return False for requests that do not ask for a page."""
    headers = dict(scope["headers"])
    if scope["method"] != "GET" or b"text/html" not in headers.get(b"accept", b""):
        return False
    language, page = ADDRESSES.get(scope["path"].rstrip("/"), (get_preferred(scope["headers"]), ""))
    if _comes_from_elsewhere(scope):
        await _send_onward(scope, send, f"{get_root(language)}/{page}")
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


def _get_client(scope: Scope) -> str:
    return str((scope.get("client") or ("",))[0])


def _get_query(scope: Scope) -> dict[str, list[str]]:
    return parse_qs(scope["query_string"].decode("latin-1"))


def _comes_from_elsewhere(scope: Scope) -> bool:
    """Return whether a link on another site led here: the browser sends no cookie then."""
    return dict(scope["headers"]).get(b"sec-fetch-site") in (b"cross-site", b"same-site")


async def _send_onward(scope: Scope, send: Send, where: str, *headers: tuple[bytes, bytes]) -> None:
    """Lead the browser to one of our pages, to which it sends its cookie."""
    if not _comes_from_elsewhere(scope):
        return await _send_redirect(send, where, *headers)
    # the page itself asks for the next one, so that the request comes from here
    body = f"<!doctype html><meta http-equiv=refresh content='0;url={escape(where)}'>".encode()
    return await _send_page(send, 200, body, "default-src 'none'", [*headers])


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
