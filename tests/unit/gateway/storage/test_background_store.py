"""Responses that are not done: leases, turns of the keys, limits, and each answer once."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from servekit.gateway.storage import background_store, leases
from servekit.gateway.storage.background_store import (
    BackgroundResponse,
    BackgroundStore,
    TooManyInBackground,
)
from servekit.gateway.storage.response_store import ResponseStore, StoredResponse, StreamPart
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
    assert [held.id for held in await one.claim_responses()] == ["r1"]
    assert not await other.claim_responses()
    assert (await one.read_response("r1"), await other.read_response("r1")) == (asked, None)
    found = await responses.find("r1", "ada", RULES)
    assert found is not None
    assert found.status == "in_progress"

    monkeypatch.setattr(leases, "LEASE_S", -1.0)  # the first gateway is silent
    assert [held.id for held in await other.claim_responses()] == ["r1"]
    await one.finish_response(asked, {"id": "late"}, RULES)
    await other.finish_response(asked, {"id": "good"}, RULES)
    await other.finish_response(asked, {"id": "again"}, RULES)
    found = await responses.find("r1", "ada", RULES)
    assert found == StoredResponse(b'{"id":"good"}', b"[]")
    assert not await one.claim_responses()


async def test_a_cancelled_or_removed_one_is_not_answered(
    make_store: Make, responses: ResponseStore
) -> None:
    store = make_store()
    for id in ("r1", "r2"):
        await store.add(response(id, "ada"), RULES)
    await store.claim_responses()
    await store.cancel("r1", "bob", RULES)
    assert [held.id for held in await store.claim_responses()] == ["r1", "r2"]
    await store.cancel("r1", "ada", RULES)
    assert await responses.remove_response("r2", "ada")
    for id in ("r1", "r2"):
        await store.finish_response(response(id, "ada"), {"id": "late"}, RULES)
    found = await responses.find("r1", "ada", RULES)
    assert found is not None
    assert json.loads(found.response) == {"id": "r1", "status": "cancelled"}
    assert not await responses.remove_response("r2", "ada")


async def test_the_keys_take_turns(make_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_store, "_MOST_HELD", 3)
    store = make_store()
    for at in range(4):
        await store.add(response(f"ada{at}", "ada", at), RULES)
    await store.add(response("bob0", "bob", 9.0), RULES)
    assert {held.id for held in await store.claim_responses()} == {"ada0", "bob0", "ada1"}


async def test_one_that_is_put_back_waits_for_its_pause_and_for_all_others(
    make_store: Make, responses: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_store, "_MOST_HELD", 1)
    one, other = make_store(), make_store()
    for at in range(3):
        await one.add(response(f"r{at}", "ada", at), RULES)

    async def claim(store: BackgroundStore) -> list[str]:
        return [held.id for held in await store.claim_responses()]

    assert await claim(one) == ["r0"]
    await other.put_back("r0", 30.0)
    assert await claim(one) == ["r0"], "it was not the other's"
    await one.put_back("r0", 30.0)
    found = await responses.find("r0", "ada", RULES)
    assert found is not None
    assert found.status == "in_progress"
    assert (await claim(one), await claim(other)) == (["r1"], ["r2"])
    third = make_store()
    assert not await claim(third)
    await one.put_back("r1", -1.0)
    await other.put_back("r2", -2.0)
    assert await claim(third) == ["r2"], "it has waited longest"
    monkeypatch.setattr(leases, "LEASE_S", -3.0)
    await third.put_back("r2", 30.0)
    assert await claim(one) == ["r2"], "a pause lasts as long as a lease at most"


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

    await store.claim_responses()
    noise, small = random.Random(1).randbytes(2000).hex(), ResponseStorage(1000, 30.0)
    await store.finish_response(response("r1"), {"id": "r1", "output": [noise]}, small)
    found = await responses.find("r1", "", RULES)
    assert found is not None
    assert json.loads(found.response)["error"]["code"] == "storage_full"


async def test_a_key_holds_as_much_as_it_leaves_free(make_store: Make) -> None:
    store, noise = make_store(), random.Random(1)

    async def fill(key: str, rules: ResponseStorage) -> int:
        """Add responses of 10 kB until one is refused; return how many were taken."""
        for at in range(100):
            try:
                one = response(f"{key}{at}", key, input=noise.randbytes(10_000))
                await store.add(one, rules)
            except TooManyInBackground as error:
                assert error.status == 429
                assert "they may hold as much as they leave free" in error.message
                return at
        raise AssertionError("none was refused")

    rules = ResponseStorage(165_000, 30.0)
    assert [await fill(key, rules) for key in ("ada", "bob", "cid", "dan", "eve")] == [
        8,
        4,
        2,
        1,
        0,
    ]
    await store.cancel("ada0", "ada", rules)
    await store.add(response("late", "eve", input=noise.randbytes(10_000)), rules)


async def test_streams_are_kept_with_their_responses(
    make_store: Make, responses: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = make_store(), make_store()
    parts = [StreamPart(at, at, b"event %d\n\n" % at, b"four" * at, b"c") for at in range(70)]
    asked = response("r1", "ada")
    asked.stream = parts[:1]
    await store.add(asked, RULES)
    await store.add(response("r2", "ada"), RULES)
    assert not await store.append("r1", parts[1])  # it is not held yet
    await store.claim_responses()
    for part in parts[1:69]:
        for _ in range(2):  # the second time as if the first were not known
            assert await store.append("r1", part)
    found = await store.read_response("r1")
    assert found is not None
    assert found.stream == parts[:69]

    assert await responses.read_stream("r1", "bob", -1) is None
    assert await responses.read_stream("r2", "ada", -1) is None
    first = await responses.read_stream("r1", "ada", 1)
    assert first is not None
    assert [part.first for part in first.parts] == list(range(2, 66))
    assert not first.done
    rest = await responses.read_stream("r1", "ada", 65)
    assert rest is not None
    assert ([part.first for part in rest.parts], rest.done) == ([66, 67, 68], False)

    monkeypatch.setattr(leases, "LEASE_S", -1.0)  # the first gateway is silent
    await other.claim_responses()
    assert not await store.append("r1", parts[69])
    await store.finish_response(asked, {"id": "late"}, RULES, parts[69])
    await other.finish_response(asked, {"id": "good"}, RULES, parts[69])
    done = await responses.read_stream("r1", "ada", 67)
    assert done is not None
    assert ([part.first for part in done.parts], done.done) == ([68, 69], True)
    assert await responses.remove_response("r1", "ada")
    assert await responses.read_stream("r1", "ada", -1) is None


async def test_a_stream_takes_room_and_goes_with_its_response(
    path: Path, make_store: Make, responses: ResponseStore
) -> None:
    store, rules = make_store(), ResponseStorage(100_000, 30.0)
    noise = random.Random(1)

    async def add(id: str) -> None:
        asked = response(id)
        asked.stream = [StreamPart(0, 0, b"begin\n\n")]
        await store.add(asked, rules)
        await store.claim_responses()
        await store.append(id, StreamPart(1, 1, noise.randbytes(40_000)))
        await store.finish_response(asked, {"id": id}, rules, StreamPart(2, 2, b"end\n\n"))

    for id in ("r1", "r2", "r3"):
        await add(id)
    assert await responses.read_stream("r1", "", -1) is None
    assert await responses.read_stream("r3", "", -1) is not None
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT DISTINCT id FROM streams").fetchall() == [("r2",), ("r3",)]
        [(total,)] = file.execute("SELECT bytes FROM total")
        assert 80_000 < total < 81_000

    await store.add(response("big"), ResponseStorage(100_000, 30.0))
    await store.claim_responses()
    await store.append("big", StreamPart(0, 0, noise.randbytes(120_000)))
    await store.finish_response(response("big"), {"id": "big"}, rules)
    found = await responses.find("big", "", rules)
    assert found is not None
    assert json.loads(found.response)["error"]["code"] == "storage_full"
    assert await responses.read_stream("big", "", -1) is None


async def test_a_cancelled_stream_ends_with_an_error(
    make_store: Make, responses: ResponseStore
) -> None:
    store, asked = make_store(), response("r1")
    asked.stream = [StreamPart(0, 1, b"a\n\nb\n\n")]
    await store.add(asked, RULES)
    await store.cancel("r1", "", RULES)
    found = await responses.read_stream("r1", "", 1)
    assert found is not None
    assert found.done
    [end] = found.parts
    assert (end.first, end.last) == (2, 2)
    told = json.loads(end.data.removeprefix(b"event: error\ndata: "))
    assert told == {
        "type": "error",
        "sequence_number": 2,
        "code": "response_cancelled",
        "message": "the response was cancelled",
        "param": None,
    }


async def test_a_file_of_the_version_before_keeps_its_responses(
    path: Path, make_store: Make, responses: ResponseStore
) -> None:
    responses.save("old", "", b"{}", lambda: b"[]", 2, RULES)
    assert await responses.find("old", "", RULES)
    with closing(sqlite3.connect(path)) as file:
        file.executescript(
            "DROP TABLE background; DROP TRIGGER forgotten; DROP TABLE streams;"
            "PRAGMA user_version = 1"
        )
    await make_store().add(response("r1"), RULES)
    assert await responses.find("old", "", RULES)
