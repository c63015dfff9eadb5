"""What passes the middleware before all endpoints, on the way of ASGI and on the fast one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.config.keys import fast_digest
from servekit.errors import Forbidden, InvalidKey, RequestError
from servekit.gateway.auth import sessions
from servekit.gateway.auth.authorization import ACTING, Access
from servekit.gateway.auth.middleware import AuthMiddleware
from servekit.gateway.http.response import FastResponse
from servekit.protocol.messages import AccessRules, KeyRule
from tests.polling import poll_async

SALT = b"s" * 32
KEY = KeyRule("me", digest=fast_digest(b"abc", SALT))
OURS = [(b"authorization", b"Bearer abc")]
THEIRS = [(b"authorization", b"Bearer xyz")]


class Scene:
    """The middleware, and whom it let through."""

    def __init__(self, *keys: KeyRule, **rules: Any) -> None:
        self.access = Access()
        self.passed: list[str] = []
        self.sent: list[dict[str, Any]] = []
        handlers = {b"/v1/chat/completions": self.handle}
        envelopes = {"/v1/messages": lambda error: (error.status, b"anthropic")}
        self.middleware = AuthMiddleware(self.access, handlers, cast(Any, envelopes))
        self.access.apply_rules(AccessRules(keys=keys, salt=SALT, **rules))

    def _note(self) -> None:
        caller = ACTING.get(None)
        self.passed.append("" if caller is None else caller.rule.name)

    def handle(self, exchange: FastResponse) -> None:
        self._note()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self._note()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})

    async def ask(
        self, path: str, headers: Any = (), method: str = "POST", query: bytes = b""
    ) -> tuple[int, dict[bytes, bytes]]:
        """Ask by ASGI; return the status and the headers."""

        async def send(message: Any) -> None:
            self.sent.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "path": path,
            "method": method,
            "headers": list(headers),
        }
        scope |= {"query_string": query, "root_path": "", "scheme": "http", "client": None}
        self.asked = scope
        await self.middleware(cast(Any, scope), cast(Any, None), send, cast(Any, self.app))
        start = next(one for one in self.sent if one["type"] == "http.response.start")
        return start["status"], dict(start["headers"])

    def fast(self, headers: Any = (), *, again: Any = None, **fields: Any) -> Any:
        """Ask on the fast way, on the connection of the exchange `again`; return the exchange."""
        protocol = SimpleNamespace(headers=list(headers), holder=None)
        if again is not None:
            protocol = again.protocol
        exchange = SimpleNamespace(
            protocol=protocol, headers=dict(headers), extra=(),
            disconnected=False, failed=None, origin=SimpleNamespace(address="10.0.0.9"), **fields,
        )  # fmt: skip
        exchange.send_error = lambda error: setattr(exchange, "failed", error)
        exchange.begin_with = lambda begin: begin(exchange)
        self.middleware.exchanges[b"/v1/chat/completions"](cast(Any, exchange))
        return exchange


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("path", ["/v1/models", "/no/such/path", "/metrics", "/livez/x"])
async def test_every_path_needs_a_key(path: str) -> None:
    for headers, status in ((), 401), (THEIRS, 401), (OURS, 200):
        scene = Scene(KEY)
        found, sent = await scene.ask(path, headers, "GET")
        assert found == status
        assert scene.passed == (["me"] if status == 200 else [])
        assert (b"www-authenticate" in sent) is (status == 401)


@pytest.mark.parametrize(
    "path", ["/", "/livez", "/readyz", "/health", "/openapi.json", "/static-offline-docs/a.js"]
)
async def test_open_paths_need_none(path: str) -> None:
    scene = Scene(KEY)
    assert (await scene.ask(path, (), "GET"))[0] == 200
    assert scene.passed == [""]


@pytest.mark.parametrize(("headers", "name"), [(OURS, "me"), (THEIRS, ""), ((), "")])
async def test_readyz_knows_who_has_a_key(headers: Any, name: str) -> None:
    scene = Scene(KEY)
    assert (await scene.ask("/readyz", headers, "GET"))[0] == 200
    assert scene.passed == [name]


async def test_metrics_are_open_where_the_file_says_so() -> None:
    assert (await Scene(KEY, open_metrics=True).ask("/metrics", (), "GET"))[0] == 200


async def test_a_refusal_has_the_form_of_its_api() -> None:
    scene = Scene(KEY)
    await scene.ask("/v1/messages")
    assert scene.sent[-1]["body"] == b"anthropic"
    scene = Scene(KEY)
    await scene.ask("/v1/models")
    assert b'"invalid_api_key"' in scene.sent[-1]["body"]


@pytest.mark.parametrize(("method", "second"), [("POST", 429), ("GET", 200)])
async def test_posts_are_charged_and_told_what_is_left(method: str, second: int) -> None:
    limited = KeyRule("me", digest=KEY.digest, requests_per_minute=1)
    scene = Scene(limited)
    status, headers = await scene.ask("/v1/embeddings", OURS, method)
    assert status == 200
    assert headers[b"x-own"] == b"1"
    told = b"x-ratelimit-remaining-requests"
    assert headers.get(told) == (b"0" if method == "POST" else None)
    scene.sent.clear()
    assert (await scene.ask("/v1/embeddings", OURS, method))[0] == second


# ---------------------------------------------------------------- calls of pages

SPEECH = "/ui/v1/audio/transcriptions"


def session(scene: Scene, rule: KeyRule) -> tuple[bytes, bytes]:
    token = sessions.issue(rule, scene.access.rules, time.time())
    return b"cookie", f"{sessions.cookie_name(0)}={token}".encode()


async def test_calls_of_pages_are_charged_to_the_session() -> None:
    limited = KeyRule("me", digest=KEY.digest, requests_per_minute=1)
    scene = Scene(limited, sessions=b"t" * 32)
    cookie = session(scene, limited)
    assert (await scene.ask("/ui/gradio_api/run", [cookie]))[0] == 200  # of no model
    scene.sent.clear()
    status, headers = await scene.ask(SPEECH, [cookie])
    assert (status, headers[b"x-ratelimit-remaining-requests"]) == (200, b"0")
    scene.sent.clear()
    assert (await scene.ask(SPEECH, [cookie]))[0] == 429
    assert scene.passed == ["me", "me"]


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        (SPEECH, (b"sec-fetch-site", b"cross-site"), 403),
        (SPEECH, (b"sec-fetch-site", b"same-origin"), 200),
        ("/v1/audio/transcriptions", (b"sec-fetch-site", b"same-origin"), 401),
    ],
)
async def test_a_session_is_valid_for_calls_of_our_pages_alone(
    path: str, more: tuple[bytes, bytes], status: int
) -> None:
    scene = Scene(KEY, sessions=b"t" * 32)
    assert (await scene.ask(path, [session(scene, KEY), more]))[0] == status


# ---------------------------------------------------------------- the owner's browser

LINK = {"query": b"token=abc"}


async def test_a_link_is_let_through_to_the_sign_in_and_nothing_else_is() -> None:
    for path in ("/ui", "/ui/", "/ui/operate", "/ui/zh/dashboard"):
        scene = Scene(KEY, browser_link=True)
        assert (await scene.ask(path, (), "GET", **LINK))[0] == 200
        assert scene.passed == [""]
    for path, method, query in (
        ("/ui/", "GET", b"tokens=1"),
        ("/ui/", "POST", b"token=abc"),
        ("/ui/", "HEAD", b"token=abc"),
        ("/ui/gradio_api/queue/join", "GET", b"token=abc"),
        ("/v1/models", "GET", b"token=abc"),
    ):
        scene = Scene(KEY, browser_link=True)
        assert (await scene.ask(path, (), method, query=query))[0] == 401
        assert scene.passed == []


async def test_a_link_by_a_foreign_name_is_refused() -> None:
    scene = Scene(hosts=("localhost",), browser_link=True)
    assert (await scene.ask("/ui", [(b"host", b"evil.example")], "GET", **LINK))[0] == 403


@pytest.mark.parametrize("keys", [(), (KEY,)])
async def test_the_owners_cookie_is_for_the_pages_and_for_requests_of_its_own_site(
    keys: tuple[KeyRule, ...],
) -> None:
    scene = Scene(*keys, browser_link=True, sessions=b"t" * 32)
    assert not scene.middleware.open
    token = sessions.issue(sessions.OWNER, scene.access.rules, time.time())
    cookie = (b"cookie", b"servekit-session-0=" + token.encode())
    page = "/ui/gradio_api/queue/join"
    assert (await scene.ask(page, [cookie]))[0] == 200
    assert scene.passed == ["@owner" if keys else ""]
    assert dict(scene.asked["headers"])[b"authorization"] == b"Session " + token.encode()
    for site in (b"cross-site", b"same-site"):  # another port of this host is the same site
        scene.sent.clear()
        assert (await scene.ask(page, [cookie, (b"sec-fetch-site", site)]))[0] == 403
    scene.sent.clear()
    await scene.ask("/v1/models", [cookie], "GET")
    assert b"authorization" not in dict(scene.asked["headers"])


# ---------------------------------------------------------------- the fast way


def test_without_rules_the_handlers_are_the_endpoints_own() -> None:
    scene = Scene()
    assert scene.middleware.open
    assert scene.middleware.exchanges == {b"/v1/chat/completions": scene.handle}


@pytest.mark.parametrize(
    "rules", [{"cors": ("*",)}, {"hosts": ("a.example",)}, {"trusted_proxies": ("10.0.0.0/8",)}]
)
def test_any_rule_is_looked_at(rules: dict[str, Any]) -> None:
    scene = Scene(**rules)
    assert not scene.middleware.open
    assert scene.middleware.exchanges[b"/v1/chat/completions"] != scene.handle
    scene.access.apply_rules(AccessRules())
    assert scene.middleware.exchanges[b"/v1/chat/completions"] == scene.handle


async def test_a_key_is_verified_once_and_known_then() -> None:
    scene = Scene(KEY)
    scene.fast(OURS)
    await poll_async("it is verified", lambda: scene.passed)
    scene.fast(OURS)
    assert scene.passed == ["me", "me"], "the second time at once"
    assert ACTING.get(None) is None


async def test_a_key_taken_away_is_refused_on_a_connection_that_it_has_used() -> None:
    scene = Scene(KEY)
    scene.fast(OURS)
    await poll_async("it is verified", lambda: scene.passed)
    known = scene.fast(OURS)
    scene.fast((), again=known)  # nothing is read again while the head is the same
    assert scene.passed == ["me"] * 3
    scene.access.apply_rules(AccessRules(keys=(KeyRule("other", digest=b"x"),), salt=SALT))
    refused = scene.fast(OURS, again=known)
    await poll_async("it is refused", lambda: refused.failed)
    assert isinstance(refused.failed, InvalidKey) and scene.passed == ["me"] * 3


async def test_a_wrong_key_or_none_goes_no_further() -> None:
    scene = Scene(KEY)
    exchange = scene.fast(THEIRS)
    await poll_async("it is verified", lambda: exchange.failed)
    assert isinstance(exchange.failed, InvalidKey)
    with pytest.raises(InvalidKey):
        scene.fast(())
    assert scene.passed == []


async def test_who_left_while_the_key_was_verified_is_not_answered() -> None:
    scene = Scene(KEY)
    exchange = scene.fast(OURS)
    exchange.disconnected = True
    await poll_async("it is verified", lambda: not scene.middleware._tasks)
    assert scene.passed == [] and exchange.failed is None


async def test_requests_are_charged_before_they_are_handled() -> None:
    scene = Scene(KeyRule("me", digest=KEY.digest, requests_per_minute=1))
    first = scene.fast(OURS)
    await poll_async("it is handled", lambda: scene.passed)
    assert (b"x-ratelimit-remaining-requests", b"0") in first.extra
    with pytest.raises(RequestError) as caught:
        scene.fast(OURS)
    assert caught.value.status == 429
    assert scene.passed == ["me"]


# ---------------------------------------------------------------- web pages, proxies


def test_a_foreign_host_is_refused_on_both_ways() -> None:
    scene = Scene(hosts=("a.example",))
    scene.fast([(b"host", b"a.example")])
    with pytest.raises(Forbidden):
        scene.fast([(b"host", b"evil.example")])
    assert scene.passed == [""]


async def test_a_foreign_host_is_refused_except_at_open_paths() -> None:
    for path, status in ("/v1/models", 403), ("/livez", 200):
        scene = Scene(hosts=("a.example",))
        assert (await scene.ask(path, [(b"host", b"evil.example")], "GET"))[0] == status


@pytest.mark.parametrize(
    ("allowed", "origin", "told"),
    [
        (("*",), b"https://a", b"*"),
        (("*",), b"", None),
        (("https://a",), b"https://a", b"https://a"),
        (("https://a",), b"https://b", None),
        ((), b"https://a", None),
    ],
)
async def test_only_allowed_origins_may_read(
    allowed: tuple[str, ...], origin: bytes, told: bytes | None
) -> None:
    scene = Scene(cors=allowed)
    asked = [(b"origin", origin)] if origin else []
    _, headers = await scene.ask("/v1/models", asked, "GET")
    assert headers.get(b"access-control-allow-origin") == told
    if "*" not in allowed:
        assert (headers.get(b"vary") == b"Origin") is bool(allowed), "caches keep them apart"
    if allowed:
        extra = dict(scene.fast(asked).extra)
        assert extra.get(b"access-control-allow-origin") == told


async def test_a_preflight_needs_no_key_and_reaches_no_endpoint() -> None:
    scene = Scene(KEY, cors=("https://a",))
    asked = [(b"origin", b"https://a"), (b"access-control-request-method", b"POST")]
    status, headers = await scene.ask("/v1/models", asked, "OPTIONS")
    assert (status, scene.passed) == (204, [])
    assert b"POST" in headers[b"access-control-allow-methods"]
    assert b"authorization" in headers[b"access-control-allow-headers"]
    scene.sent.clear()
    assert (await scene.ask("/v1/models", asked[:1], "OPTIONS"))[0] == 401, "no preflight"


def test_the_address_behind_a_trusted_proxy_counts() -> None:
    scene = Scene(trusted_proxies=("10.0.0.0/8",))
    exchange = scene.fast([(b"x-forwarded-for", b"203.0.113.7")])
    assert exchange.origin.address == "203.0.113.7"
