"""Which key it is: quickly for those that are known, at a bounded price for all others."""

from __future__ import annotations

import asyncio
import time

import pytest

from servekit.config import keys
from servekit.gateway.auth import key_verifier
from servekit.gateway.auth.key_verifier import Busy, Verifier
from servekit.gateway.http.request_context import ORIGIN, RequestContext
from servekit.protocol.messages import AccessRules, KeyRule
from tests.api_keys import new_key

SALT = b"s" * 32
KEY, HASH = new_key("alice")
CLEAR = b"from-the-environment"


def rules(*more: KeyRule) -> AccessRules:
    clear = KeyRule("ci", digest=keys.fast_digest(CLEAR, SALT))
    return AccessRules((KeyRule("alice", hash=HASH), clear, *more), salt=SALT)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys that scrypt was run for."""
    seen: list[bytes] = []
    matches = keys.Hash.matches

    def counted(self: keys.Hash, key: bytes) -> bool:
        seen.append(key)
        return matches(self, key)

    monkeypatch.setattr(keys.Hash, "matches", counted)
    return seen


@pytest.fixture
async def known() -> Verifier:
    found = Verifier()
    found.apply_rules(rules())
    return found


async def test_a_hashed_key_is_verified_once(known: Verifier, hashed: list[bytes]) -> None:
    assert known.find_verified(KEY.encode()) is None
    together = await asyncio.gather(*(known.verify(KEY.encode()) for _ in range(64)))
    assert together == ["alice"] * 64
    assert known.find_verified(KEY.encode()) == "alice"
    assert hashed == [KEY.encode()]


async def test_a_clear_key_needs_no_scrypt(known: Verifier, hashed: list[bytes]) -> None:
    assert await known.verify(CLEAR) == "ci"
    assert known.find_verified(CLEAR) == "ci"
    assert await known.verify(CLEAR + b"x") is None
    assert not hashed


async def test_what_cannot_be_a_key_costs_nothing(known: Verifier, hashed: list[bytes]) -> None:
    for wrong in (b"", b"x", b"sk-", b"sk-bob-abc", b"-" * 600, b"sk-alice-" + b"x" * 600, b"\xff"):
        assert await known.verify(wrong) is None
    assert not hashed


async def test_a_wrong_key_is_remembered(known: Verifier, hashed: list[bytes]) -> None:
    wrong = b"sk-alice-wrong"
    assert await known.verify(wrong) is None
    assert await known.verify(wrong) is None
    assert hashed == [wrong]


async def test_a_flood_of_wrong_keys_is_bounded(
    known: Verifier, hashed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_verifier, "MAX_WAITING", 4)
    assert await known.verify(KEY.encode()) == "alice"
    flood = [known.verify(b"sk-alice-%d" % i) for i in range(50)]
    began_cpu_s, began_s = time.process_time(), time.monotonic()
    answers = await asyncio.gather(*flood, return_exceptions=True)
    cpu_s, took_s = time.process_time() - began_cpu_s, time.monotonic() - began_s
    assert sum(isinstance(answer, Busy) for answer in answers) == 46
    assert answers.count(None) == 4
    assert len(hashed) == 5
    assert cpu_s < 0.5 * took_s  # a quarter, and some for a busy machine
    assert known.find_verified(KEY.encode()) == "alice"


@pytest.mark.parametrize("flood", ["10.0.0.9", "2001:db8::%x"])
async def test_a_flood_keeps_no_other_address_out(
    known: Verifier, hashed: list[bytes], monkeypatch: pytest.MonkeyPatch, flood: str
) -> None:
    """Not even for the first request of a key, as all are after the start of a gateway."""
    monkeypatch.setattr(key_verifier, "MAX_WAITING", 4)

    async def ask(address: str, key: bytes) -> str | None:
        ORIGIN.set(RequestContext({}, (address, 1)))
        return await known.verify(key)

    addresses = [flood % i if "%" in flood else flood for i in range(50)]
    tasks = [
        asyncio.create_task(ask(address, b"sk-alice-%d" % i)) for i, address in enumerate(addresses)
    ]
    await asyncio.sleep(0)  # they wait
    assert await asyncio.create_task(ask("10.0.0.1", KEY.encode())) == "alice"
    assert hashed.index(KEY.encode()) <= 2
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(answer, Busy) for answer in answers) == 47


async def test_memory_is_bounded(known: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_verifier, "MAX_WRONG", 2)
    monkeypatch.setattr(key_verifier, "PAUSE", 0.0)
    for i in range(4):
        assert await known.verify(b"sk-alice-%d" % i) is None
    assert len(known._wrong) == 2


async def test_other_rules_count_at_once(known: Verifier, hashed: list[bytes]) -> None:
    assert await known.verify(KEY.encode()) == "alice"
    other, line = new_key("bob")
    assert await known.verify(other.encode()) is None
    known.apply_rules(rules(KeyRule("bob", hash=line)))
    assert known.find_verified(KEY.encode()) == "alice"  # without another scrypt
    assert await known.verify(other.encode()) == "bob"
    known.apply_rules(AccessRules((KeyRule("alice", hash=line),), salt=SALT))
    assert known.find_verified(KEY.encode()) is None
    assert await known.verify(KEY.encode()) is None
    assert await known.verify(CLEAR) is None


async def test_rules_that_change_during_a_verification(known: Verifier) -> None:
    under_way = asyncio.create_task(known.verify(KEY.encode()))
    await asyncio.sleep(0)  # it has begun
    known.apply_rules(AccessRules((KeyRule("renamed", hash=HASH),), salt=SALT))
    assert await under_way == "renamed"
    under_way = asyncio.create_task(known.verify(b"sk-alice-late"))
    await asyncio.sleep(0)
    known.apply_rules(AccessRules((), salt=SALT))
    assert await under_way is None


async def test_a_caller_that_leaves_does_not_end_it_for_the_others(known: Verifier) -> None:
    leaving = asyncio.create_task(known.verify(KEY.encode()))
    staying = asyncio.create_task(known.verify(KEY.encode()))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == "alice"


async def test_a_key_that_is_being_replaced(known: Verifier) -> None:
    second, line = new_key("alice")
    known.apply_rules(rules(KeyRule("alice-new", hash=line)))
    assert await known.verify(second.encode()) == "alice-new"
    assert await known.verify(KEY.encode()) == "alice"
