"""Who is slowed down, who is a stranger, and who is led to the form. A browser has its own test."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from servekit.config.keys import fast_digest
from servekit.errors import Forbidden
from servekit.gateway.api.admin.endpoints import Supervisor
from servekit.gateway.auth.authorization import Access
from servekit.gateway.http.asgi import Receive, Scope, Send
from servekit.gateway.ui import login
from servekit.protocol.browser_link import make_token
from servekit.protocol.messages import (
    Accepted,
    AccessRules,
    FromSupervisor,
    KeyRule,
    RedeemLink,
    Refused,
    ToSupervisor,
)
from servekit.supervisor.admin.browser_links import BrowserLinks

KEY, SALT = "secret-of-alice", b"s" * 32
RULE = KeyRule("alice", digest=fast_digest(KEY.encode(), SALT))
RULES = AccessRules(keys=(RULE,), salt=SALT, sessions=b"t" * 32)


def test_wrong_keys_take_longer_and_longer() -> None:
    patience, now_s = login.Patience(), 1000.0
    assert patience.wait_s("a", now_s) == 0.0
    assert patience.wait_s("a", now_s) == 1.0  # at once: not even looked at
    assert patience.wait_s("b", now_s) == 0.0  # others are not held up
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 16.0):
        now_s += pause_s
        assert patience.wait_s("a", now_s) == 0.0
        assert patience.wait_s("a", now_s + 0.5) > 0.0
    patience.forgive("a")
    assert patience.wait_s("a", now_s) == 0.0
    assert patience.wait_s("a", now_s + 700) == 0.0
    assert patience.wait_s("a", now_s + 700) == 1.0  # what was long ago is forgotten


def test_of_few_addresses_is_known() -> None:
    patience = login.Patience()
    for number in range(2 * patience.ADDRESSES):
        patience.wait_s(str(number), 0.0)
    assert patience.wait_s("0", 0.0) == 0.0
    assert patience.wait_s(str(2 * patience.ADDRESSES - 1), 0.0) == 1.0


def asked(method: str = "POST", path: str = "/ui/login", **headers: str) -> dict[str, Any]:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return {"method": method, "path": path, "headers": list(named.items()), "server": ("x", 80)}


OURS = {"host": "here:8000", "origin": "http://here:8000"}


@pytest.mark.parametrize(
    "headers",
    [{}, OURS, {"sec_fetch_site": "same-origin"}, {"sec_fetch_site": "none"},
     {"host": "inner", "x_forwarded_host": "here:8000", "origin": "https://here:8000"},
     {"host": "rewritten", "origin": "https://here", "sec_fetch_site": "same-origin"}],
)  # fmt: skip
def test_our_own_page_may(headers: dict[str, str]) -> None:
    login.refuse_strangers(asked(**headers))


@pytest.mark.parametrize(
    "headers",
    [{"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}, OURS | {"origin": "null"},
     OURS | {"origin": "http://here:9000"}, OURS | {"origin": "http://evil.example"},
     OURS | {"sec_fetch_site": "cross-site"}],
)  # fmt: skip
def test_another_site_may_not(headers: dict[str, str]) -> None:
    with pytest.raises(Forbidden, match="another site"):
        login.refuse_strangers(asked(**headers))
    login.refuse_strangers(asked("GET", **headers))  # it cannot read what comes


def test_a_session_is_put_where_keys_are() -> None:
    scope = asked(cookie="servekit-session-80=abc")
    login.find_session(scope)
    assert (b"authorization", b"Session abc") in scope["headers"]
    scope = asked(cookie="servekit-session-80=abc", authorization="Basic xyz")
    login.find_session(scope)
    assert dict(scope["headers"])[b"authorization"] == b"Basic xyz"


def make_client(rules: AccessRules, links: BrowserLinks | None = None) -> httpx.AsyncClient:
    """Return a client of the sign-in; a supervisor that has made `links` stands behind it."""
    access = Access()
    access.apply_rules(rules)

    async def supervise(question: ToSupervisor, _: float) -> FromSupervisor:
        assert isinstance(question, RedeemLink)
        if links is None:
            raise EOFError("the supervisor closed the connection")
        return Accepted() if links.redeem(question.token) else Refused("used")

    answer = login.Login(access, Supervisor(supervise, access))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in login.PATHS or login.carries_link(scope):
            await answer(scope, receive, send)
        else:
            assert await login.redirect_to_login(scope, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here")


@pytest.fixture
def client() -> httpx.AsyncClient:
    return make_client(RULES)


async def test_who_has_a_key_is_let_in_and_out(client: httpx.AsyncClient) -> None:
    assert (await client.get("/ui/session")).json() == {"key": None}
    answer = await client.post("/ui/login", data={"key": f" {KEY}\n", "to": "compare"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/compare")
    assert KEY not in str(answer.headers)
    client.cookies.clear()  # httpx goes by the port of the address, of which there is none
    cookie = answer.headers["set-cookie"].partition(";")[0]
    session = {"cookie": cookie}
    assert (await client.get("/ui/session", headers=session)).json() == {"key": "alice"}
    again = await client.get("/ui/login?to=compare", headers=session)
    assert again.headers["location"] == "/ui/compare"
    out = await client.post("/ui/logout", headers=session)
    assert (out.headers["location"], "Max-Age=0" in out.headers["set-cookie"]) == (
        "/ui/login",
        True,
    )


@pytest.mark.parametrize("key", ["", "wrong", "x" * 600, "é€", KEY[:-1]])
async def test_a_wrong_key_is_a_sentence_and_the_next_try_waits(
    client: httpx.AsyncClient, key: str
) -> None:
    first = await client.post("/ui/zh/login", data={"key": key, "to": "<x>"})
    assert first.status_code == 401
    assert "此密钥无效" in first.text
    assert "<x>" not in first.text
    for tried in (key, KEY):
        answer = await client.post("/ui/login", data={"key": tried})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "Try again in 1 s" in answer.text
        assert "set-cookie" not in answer.headers


async def test_a_form_of_any_size_is_not_read(client: httpx.AsyncClient) -> None:
    answer = await client.post("/ui/login", data={"key": "x" * 10_000})
    assert answer.status_code == 413


HTML = {"accept": "text/html,*/*"}


@pytest.mark.parametrize(
    ("path", "headers", "where"),
    [
        ("/ui/", {}, "/ui/login"),
        ("/ui", {}, "/ui/login"),
        ("/ui/dashboard", {}, "/ui/login?to=dashboard"),
        ("/ui/dashboard", {"accept-language": "zh-CN"}, "/ui/zh/login?to=dashboard"),
        ("/ui/zh/compare", {}, "/ui/zh/login?to=compare"),
        ("/ui/no//evil.example", {}, "/ui/login"),
    ],
)
async def test_a_person_is_led_to_the_form(
    client: httpx.AsyncClient, path: str, headers: dict[str, str], where: str
) -> None:
    answer = await client.get(path, headers=HTML | headers)
    assert (answer.status_code, answer.headers["location"]) == (303, where)


async def test_who_comes_by_another_sites_link_comes_again_with_the_cookie(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.get("/ui/compare", headers=HTML | {"sec-fetch-site": "cross-site"})
    assert "0;url=/ui/compare" in answer.text


async def test_the_form_speaks_the_visitors_language(client: httpx.AsyncClient) -> None:
    led = await client.get("/ui/login?to=compare", headers={"accept-language": "zh"})
    assert led.headers["location"] == "/ui/zh/login?to=compare"
    chosen = await client.get("/ui/zh/login?lang=en&to=compare")
    assert chosen.headers["location"] == "/ui/login?to=compare"
    assert chosen.headers["set-cookie"].startswith("servekit-lang=en")


# ---- one-time links

LINKED = replace(RULES, browser_link=True)


@pytest.mark.parametrize("rules", [LINKED, replace(LINKED, keys=())])
async def test_a_link_makes_one_browser_the_owner(rules: AccessRules) -> None:
    links = BrowserLinks(rules.sessions)
    client, token = make_client(rules, links), links.create()
    with capture_logs() as said:
        answer = await client.get(f"/ui/operate?token={token}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/operate")
    assert token not in str(said) + str(answer.headers)
    assert answer.headers["referrer-policy"] == "same-origin"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly; SameSite=Strict" in cookie
    owner = {"cookie": cookie.partition(";")[0]}
    client.cookies.clear()
    assert (await client.get("/ui/session", headers=owner)).json() == {"key": "@owner"}
    again = await client.get(f"/ui?token={token}", headers=owner)  # this browser has it already
    assert (again.status_code, again.headers["location"]) == (303, "/ui/")
    stranger = await client.get(f"/ui?token={token}")
    assert (stranger.status_code, "set-cookie" in stranger.headers) == (403, False)
    assert "has been used or has expired" in stranger.text
    assert ('type="password"' in stranger.text) is bool(rules.keys)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_link_that_another_site_shows_asks_for_the_page_once_more(site: str) -> None:
    """The browser would not send the new cookie with a redirect of that request."""
    links = BrowserLinks(LINKED.sessions)
    headers = {"sec-fetch-site": site}
    answer = await make_client(LINKED, links).get(f"/ui?token={links.create()}", headers=headers)
    assert answer.status_code == 200
    assert "http-equiv=refresh content='0;url=/ui/'" in answer.text
    assert "servekit-session" in answer.headers["set-cookie"]


@pytest.mark.parametrize("token", ["x", "x" * 32, "é", "of another instance"])
async def test_the_supervisor_is_not_asked_about_what_it_has_not_made(token: str) -> None:
    """Nobody stands behind this client: a question would be answered by 503."""
    token = make_token(b"u" * 32) if " " in token else token
    answer = await make_client(LINKED).get("/ui/zh", params={"token": token, "to": "<x>"})
    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)
    assert "此链接已被使用或已过期" in answer.text
    assert "<x>" not in answer.text


async def test_a_link_without_a_supervisor_says_so() -> None:
    answer = await make_client(LINKED).get(f"/ui?token={make_token(LINKED.sessions)}")
    assert (answer.status_code, "set-cookie" in answer.headers) == (503, False)
    assert "the supervisor closed the connection" in answer.text


async def test_a_link_opens_nothing_where_the_rules_want_none() -> None:
    links = BrowserLinks(RULES.sessions)
    answer = await make_client(RULES, links).get(f"/ui?token={links.create()}")
    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)
