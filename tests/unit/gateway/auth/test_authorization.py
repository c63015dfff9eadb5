"""Where a request's key is looked for, and who may administer."""

from __future__ import annotations

import base64

import pytest

from servekit.config.keys import fast_digest
from servekit.errors import Forbidden, InvalidKey
from servekit.gateway.auth.authorization import ACTING, Access, key_of
from servekit.gateway.auth.middleware import AuthMiddleware
from servekit.gateway.http.response import FastResponse
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import AccessRules, KeyRule, SamplingParams

SALT = b"s" * 32


def basic(text: str) -> bytes:
    return b"Basic " + base64.b64encode(text.encode())


@pytest.mark.parametrize(
    ("headers", "browser", "key"),
    [
        ([(b"authorization", b"Bearer abc")], False, b"abc"),
        ([(b"authorization", b"  bEARER   abc ")], False, b"abc"),
        ([(b"x-api-key", b" abc ")], False, b"abc"),
        ([(b"api-key", b"abc"), (b"host", b"x")], False, b"abc"),
        ([(b"x-api-key", b"other"), (b"authorization", b"Bearer abc")], False, b"abc"),
        ([(b"authorization", basic("me:abc")), (b"x-api-key", b"xyz")], False, b"xyz"),
        ([(b"authorization", basic("me:a:b"))], True, b"a:b"),
        ([(b"authorization", b"Bearer abc")], True, b"abc"),
    ],
)
def test_where_a_key_is(headers: list[tuple[bytes, bytes]], browser: bool, key: bytes) -> None:
    assert key_of(headers, browser=browser) == key


@pytest.mark.parametrize(
    "value", [b"", b"abc", b"Bearer", b"Bearer  ", b"Basic", basic("me:abc"), b"Digest abc"]
)
def test_where_none_is(value: bytes) -> None:
    with pytest.raises(InvalidKey, match="an API key is needed"):
        key_of([(b"authorization", value)])


@pytest.mark.parametrize("value", [b"Basic !!!", b"Basic", basic("no colon"), basic("me:")])
def test_a_password_that_holds_no_key(value: bytes) -> None:
    with pytest.raises(InvalidKey):
        key_of([(b"authorization", value)], browser=True)


async def test_who_may_administer() -> None:
    access = Access()
    with pytest.raises(Forbidden, match="admin: true"):
        access.require_admin()  # without keys: nobody, over HTTP
    rules = [
        KeyRule(name, digest=fast_digest(name.encode(), SALT), admin=name == "root")
        for name in ("root", "user")
    ]
    access.apply_rules(AccessRules(tuple(rules), salt=SALT))
    ACTING.set(await access.verify(b"user"))
    with pytest.raises(Forbidden):
        access.require_admin()
    ACTING.set(await access.verify(b"root"))
    access.require_admin()


@pytest.mark.parametrize("by_key", [True, False])
async def test_whose_prefixes_a_call_may_share(by_key: bool) -> None:
    access = Access()
    rules = [KeyRule(name, digest=fast_digest(name.encode(), SALT)) for name in ("alice", "bob")]
    access.apply_rules(AccessRules(tuple(rules), salt=SALT, prefixes_by_key=by_key))
    salts = []
    for name in ("alice", "bob", "alice"):
        call = InflightRequest("m", SamplingParams(), prompt="Hello")
        ACTING.set(await access.verify(name.encode()))
        access.admit_call(call, "m")
        salts.append(call.request(1).cache_salt)
    assert salts == (["alice", "bob", "alice"] if by_key else ["", "", ""])


async def test_without_rules_nothing_stands_in_the_way() -> None:
    def handler(exchange: FastResponse) -> None:
        raise AssertionError

    access = Access()
    gate = AuthMiddleware(access, {b"/x": handler}, {})
    assert (gate.open, gate.exchanges[b"/x"]) == (True, handler)
    rule = KeyRule("a", digest=fast_digest(b"a", SALT))
    access.apply_rules(AccessRules((rule,), salt=SALT))
    assert not gate.open
    assert gate.exchanges[b"/x"] is not handler
    access.apply_rules(AccessRules())
    assert (gate.open, gate.exchanges[b"/x"]) == (True, handler)
    access.apply_rules(AccessRules(cors=("*",)))
    assert not gate.open
