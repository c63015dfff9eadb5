"""Responses that are not done: leases, turns of the keys, limits, and each answer once."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from servekit.gateway import background_store, leases
from servekit.gateway.background_store import (
    BackgroundResponse,
    BackgroundStore,
    TooManyInBackground,
)
from servekit.gateway.response_store import ResponseStore, StoredResponse
from servekit.protocol.access import ResponseStorage

RULES = ResponseStorage(2**20, 30.0)
Make = Callable[[], BackgroundStore]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def make_store(path: Path) -> Iterator[Make]:
    made: list[BackgroundStore] = []

    def make() -> BackgroundStore:
        made.append(BackgroundStore(path))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def responses(path: Path) -> Iterator[ResponseStore]:
    store = ResponseStore(path)
    yield store
    store.close()


def response(
    id: str, key: str = "", created: float = 0.0, input: bytes = b"[]"
) -> BackgroundResponse:
    return BackgroundResponse(id, key, created, b'{"id":"%b"}' % id.encode(), input, b'{"a":1}')


async def test_one_gateway_answers_once(
    make_store: Make, responses: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_store(), make_store()
    asked = response("r1", "ada")
    await one.add(asked, RULES)
    found = await responses.find("r1", "ada", RULES)
    assert found == StoredResponse(asked.shown, asked.input, "queued")
    assert [held.id for held in await one.claim()] == ["r1"]
    assert not await other.claim()
    assert (await one.read("r1"), await other.read("r1")) == (asked, None)
    found = await responses.find("r1", "ada", RULES)
    assert found is not None
    assert found.status == "in_progress"

    monkeypatch.setattr(leases, "LEASE_S", -1.0)  # the first gateway is silent
    assert [held.id for held in await other.claim()] == ["r1"]
    await one.finish(asked, {"id": "late"}, RULES)
    await other.finish(asked, {"id": "good"}, RULES)
    await other.finish(asked, {"id": "again"}, RULES)
    found = await responses.find("r1", "ada", RULES)
    assert found == StoredResponse(b'{"id":"good"}', b"[]")
    assert not await one.claim()


async def test_a_cancelled_or_removed_one_is_not_answered(
    make_store: Make, responses: ResponseStore
) -> None:
    store = make_store()
    for id in ("r1", "r2"):
        await store.add(response(id, "ada"), RULES)
    await store.claim()
    await store.cancel("r1", "bob", RULES)
    assert [held.id for held in await store.claim()] == ["r1", "r2"]
    await store.cancel("r1", "ada", RULES)
    assert await responses.remove("r2", "ada")
    for id in ("r1", "r2"):
        await store.finish(response(id, "ada"), {"id": "late"}, RULES)
    found = await responses.find("r1", "ada", RULES)
    assert found is not None
    assert json.loads(found.response) == {"id": "r1", "status": "cancelled"}
    assert not await responses.remove("r2", "ada")


async def test_the_keys_take_turns(make_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_store, "_MOST_HELD", 3)
    store = make_store()
    for at in range(4):
        await store.add(response(f"ada{at}", "ada", at), RULES)
    await store.add(response("bob0", "bob", 9.0), RULES)
    assert {held.id for held in await store.claim()} == {"ada0", "bob0", "ada1"}


async def test_they_are_bounded(
    make_store: Make, responses: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_store, "_MOST_OF_KEY", 2)
    store = make_store()
    await store.add(response("r1"), RULES)
    await store.add(response("r2"), RULES)
    with pytest.raises(TooManyInBackground, match="2 responses"):
        await store.add(response("r3"), RULES)
    await store.add(response("r3", "bob"), RULES)
    with pytest.raises(TooManyInBackground, match="wait for some"):
        await store.add(response("r4", "bob"), ResponseStorage(100, 30.0))

    await store.claim()
    noise, small = random.Random(1).randbytes(2000).hex(), ResponseStorage(1000, 30.0)
    await store.finish(response("r1"), {"id": "r1", "output": [noise]}, small)
    found = await responses.find("r1", "", RULES)
    assert found is not None
    assert json.loads(found.response)["error"]["code"] == "storage_full"


async def test_a_file_of_the_version_before_keeps_its_responses(
    path: Path, make_store: Make, responses: ResponseStore
) -> None:
    responses.save("old", "", b"{}", lambda: b"[]", 2, RULES)
    assert await responses.find("old", "", RULES)
    with closing(sqlite3.connect(path)) as file:
        file.executescript("DROP TABLE background; PRAGMA user_version = 1")
    await make_store().add(response("r1"), RULES)
    assert await responses.find("old", "", RULES)
