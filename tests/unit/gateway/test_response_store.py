"""The file of stored responses: whose they are, how many are kept, and what damages it."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from servekit.gateway import response_store
from servekit.gateway.response_store import ResponseStore, StoredResponse
from servekit.protocol.access import ResponseStorage

RULES = ResponseStorage(2**20, 30.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def store(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ResponseStore]:
    monkeypatch.setattr(response_store, "_LATE_S", 0.2)
    made = ResponseStore(path)
    yield made
    made.close()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def size_of(path: Path) -> int:
    return path.stat().st_size


def overwrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def is_put_aside(path: Path) -> bool:
    return path.with_name(f"{path.name}.broken").exists()


async def test_it_is_found_at_once_by_its_key_alone(store: ResponseStore, path: Path) -> None:
    store.save("resp_1", "ada", b'{"a":1}', b"[]", RULES)
    assert await store.find("resp_1", "ada") == StoredResponse(b'{"a":1}', b"[]")
    assert await store.find("resp_1", "bob") is None
    assert not await store.remove("resp_1", "bob")
    assert await store.find("resp_2", "ada") is None
    assert await store.remove("resp_1", "ada") and not await store.remove("resp_1", "ada")
    assert await store.find("resp_1", "ada") is None
    assert mode_of(path) == 0o600


async def test_another_gateway_finds_it_also_if_it_comes_late(
    store: ResponseStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "_LATE_S", 30.0)
    other = ResponseStore(path)
    search = asyncio.ensure_future(other.find("resp_1", ""))
    done, _ = await asyncio.wait([search], timeout=0.2)
    assert not done
    store.save("resp_1", "", b"{}", b"[]", RULES)
    assert await search == StoredResponse(b"{}", b"[]")
    other.close()


async def test_the_newest_are_kept_within_the_limit(store: ResponseStore, path: Path) -> None:
    drawn = random.Random(7)
    for number in range(60):  # of 40 kB each, which do not shrink
        store.save(f"resp_{number}", "", drawn.randbytes(40_000), b"[]", RULES)
    assert await store.find("resp_59", "") is not None
    with closing(sqlite3.connect(path)) as file:
        held = [row[0] for row in file.execute("SELECT id FROM responses ORDER BY created")]
        [(total,)] = file.execute("SELECT sum(bytes) FROM responses")
    assert held == [f"resp_{number}" for number in range(60 - len(held), 60)]
    assert 2**20 * 0.9 < total <= 2**20 and size_of(path) < 2**20 * 1.1
    store.save("resp_huge", "", drawn.randbytes(2**21), b"[]", RULES)
    assert await store.find("resp_huge", "") is None
    assert await store.find("resp_59", "") is not None


async def test_the_old_ones_go(store: ResponseStore, path: Path) -> None:
    store.save("resp_old", "", b"{}", b"[]", RULES)
    assert await store.find("resp_old", "") is not None
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE responses SET created = created - 86400 * 31")
    store.save("resp_new", "", b"{}", b"[]", RULES)
    assert await store.find("resp_old", "") is None
    assert await store.find("resp_new", "") is not None


@pytest.mark.parametrize("damage", ["no database", "another table", "removed"])
async def test_a_damaged_file_is_put_aside(store: ResponseStore, path: Path, damage: str) -> None:
    if damage == "no database":
        overwrite(path, b"no database" * 1000)
    elif damage == "another table":
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("CREATE TABLE responses (id TEXT)")
    else:
        store.save("resp_0", "", b"{}", b"[]", RULES)
        assert await store.find("resp_0", "") is not None
        remove(path)
    store.save("resp_1", "", b"{}", b"[]", RULES)
    assert await store.find("resp_0", "") is None
    store.save("resp_2", "", b"{}", b"[]", RULES)
    assert await store.find("resp_2", "") is not None
    assert is_put_aside(path) == (damage != "removed")


async def test_a_slow_disk_costs_responses_and_no_memory(
    store: ResponseStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "_MOST_PENDING_BYTES", 1000)
    assert await store.find("resp_0", "") is None  # the file is there
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # nobody else can write
        for number in range(1, 4):
            store.save(f"resp_{number}", "", bytes(800), b"[]", RULES)
        other.execute("COMMIT")
    found = [await store.find(f"resp_{number}", "") is not None for number in range(1, 4)]
    assert found == [True, True, False]
    store.save("resp_4", "", bytes(800), b"[]", RULES)
    assert await store.find("resp_4", "") is not None


async def test_where_no_file_can_be_nothing_is_kept_and_nobody_waits_for_it(tmp_path: Path) -> None:
    for path in (None, tmp_path / "missing" / "responses.db"):
        store = ResponseStore(path)
        store.save("resp_1", "", b"{}", b"[]", RULES)
        assert await store.find("resp_1", "") is None
        store.close()
