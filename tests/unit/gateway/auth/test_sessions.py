"""Who has signed in on the page: what is believed, and what is not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from servekit.config.keys import is_name
from servekit.gateway.auth import sessions
from servekit.protocol.messages import AccessRules, KeyRule

ALICE = KeyRule("alice.b-c", hash="sk-alice-$scrypt$…")
BOB = KeyRule("bob", digest=b"d" * 32)
RULES = AccessRules(keys=(ALICE, BOB), sessions=b"s" * 32)
NOW_S = 1_800_000_000.0


@pytest.mark.parametrize("rule", [ALICE, BOB])
def test_a_session_names_its_key_until_it_ends(rule: KeyRule) -> None:
    token = sessions.issue(rule, RULES, NOW_S)
    assert sessions.name_in(token, RULES, NOW_S) == rule.name
    assert sessions.name_in(token, RULES, NOW_S + sessions.LIFE_S - 1) == rule.name
    assert sessions.name_in(token, RULES, NOW_S + sessions.LIFE_S) is None


@pytest.mark.parametrize(
    "rules",
    [
        AccessRules(keys=(BOB,), sessions=b"s" * 32),  # the key is revoked
        AccessRules(keys=(replace(ALICE, hash="another"),), sessions=b"s" * 32),
        AccessRules(keys=(replace(ALICE, digest=b"x"),), sessions=b"s" * 32),
        AccessRules(keys=(ALICE,), sessions=b"t" * 32),
        AccessRules(keys=(ALICE,)),  # nobody signs in there
        AccessRules(sessions=b"s" * 32),
    ],
)
def test_other_rules_end_it(rules: AccessRules) -> None:
    assert sessions.name_in(sessions.issue(ALICE, RULES, NOW_S), rules, NOW_S) is None


def test_other_rights_do_not() -> None:
    rules = AccessRules(keys=(replace(ALICE, admin=True, models=("a",)),), sessions=b"s" * 32)
    assert sessions.name_in(sessions.issue(ALICE, RULES, NOW_S), rules, NOW_S) == ALICE.name


def test_the_owners_session_holds_with_keys_and_without_while_the_rules_allow_it() -> None:
    token = sessions.issue(sessions.OWNER, RULES, NOW_S)
    assert sessions.name_in(token, RULES, NOW_S) is None
    for rules in (replace(RULES, browser_link=True), replace(RULES, keys=(), browser_link=True)):
        assert sessions.name_in(token, rules, NOW_S) == sessions.OWNER.name
        assert sessions.name_in(token, rules, NOW_S + sessions.LIFE_S) is None
        assert sessions.name_in(token, replace(rules, sessions=b"t" * 32), NOW_S) is None
        assert sessions.name_in(token, replace(rules, sessions=b""), NOW_S) is None


def test_no_key_of_a_file_has_the_owners_name() -> None:
    assert not is_name(sessions.OWNER.name)


def forged() -> list[str]:
    until, proof, name = sessions.issue(ALICE, RULES, NOW_S).split(".", 2)
    return [
        "", ".", "..", "...", "x.y.z", f"{until}.{proof}.bob", f"{until}..{name}",
        f"{int(until) + 1}.{proof}.{name}", f"{until}.{proof[:-1]}.{name}",
        f"-1.{proof}.{name}", f"{'9' * 5000}.{proof}.{name}", f"٣.{proof}.{name}",
        f"{until}.é.{name}",
    ]  # fmt: skip


@pytest.mark.parametrize("token", forged())
def test_what_nobody_issued(token: str) -> None:
    assert sessions.name_in(token, RULES, NOW_S) is None


def test_the_cookie_goes_to_the_page_alone() -> None:
    said = sessions.cookie(8000, "a.b.c", secure=True).decode()
    assert said.startswith("servekit-session-8000=a.b.c; Path=/ui; ")
    assert said.endswith("HttpOnly; SameSite=Strict; Secure")
    assert "Max-Age=0;" in sessions.cookie(8000, "", secure=False).decode()


def test_it_is_found_among_others() -> None:
    headers = [(b"host", b"x"), (b"cookie", b"a=1; servekit-session-80=t=; servekit-session-8=u")]
    assert sessions.token_in(headers, 8) == "u"
    assert sessions.token_in(headers, 80) == "t="
    assert sessions.token_in(headers, 8000) == ""
