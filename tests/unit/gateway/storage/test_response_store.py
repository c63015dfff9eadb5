"""The file of stored responses: whose they are, how many are kept, and what damages it."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from servekit.gateway.storage import response_store, store_file
from servekit.gateway.storage.response_store import ResponseStore, StoredResponse
from servekit.gateway.storage.store_file import ResponsesUnavailable
from servekit.protocol.access import ResponseStorage

RULES = ResponseStorage(2**20, 30.0)
#: A gateway that stores so many responses, and finds its own.
GATEWAY = """
import asyncio, sys
from pathlib import Path
from servekit.gateway.storage.response_store import ResponseStore
from servekit.protocol.access import ResponseStorage

async def main(path, name):
    rules, store = ResponseStorage(2**20, 30.0), ResponseStore(Path(path))
    sys.stdin.readline()
    for number in range(3):
        store.save(f"{name}_{number}", "", b"{}", lambda: b"[]", 2, rules)
    assert all([await store.find(f"{name}_{number}", "", rules) for number in range(3)])
    store.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def make_store(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], ResponseStore]]:
    monkeypatch.setattr(response_store, "_LATE_S", 0.2)
    made: list[ResponseStore] = []

    def make() -> ResponseStore:
        made.append(ResponseStore(path))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: Callable[[], ResponseStore]) -> ResponseStore:
    return make_store()


def save(store: ResponseStore, id: str, key: str = "", response: bytes = b"{}") -> None:
    store.save(id, key, response, lambda: b"[]", len(response) + 2, RULES)


async def is_kept(store: ResponseStore, id: str, key: str = "") -> bool:
    return await store.find(id, key, RULES) is not None


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
    save(store, "resp_1", "ada", b'{"a":1}')
    assert await store.find("resp_1", "ada", RULES) == StoredResponse(b'{"a":1}', b"[]")
    assert not await is_kept(store, "resp_1", "bob")
    assert not await store.remove_response("resp_1", "bob")
    assert not await is_kept(store, "resp_2", "ada")
    assert await store.remove_response("resp_1", "ada") and not await store.remove_response(
        "resp_1", "ada"
    )
    assert not await is_kept(store, "resp_1", "ada")
    assert mode_of(path) == 0o600


async def test_another_gateway_finds_it_also_if_it_comes_late(
    make_store: Callable[[], ResponseStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "_LATE_S", 30.0)
    search = asyncio.ensure_future(make_store().find("resp_1", "", RULES))
    done, _ = await asyncio.wait([search], timeout=0.2)
    assert not done
    save(make_store(), "resp_1")
    assert await search == StoredResponse(b"{}", b"[]")


def test_gateways_that_begin_together_share_one_file(path: Path) -> None:
    for attempt in range(4):
        file = path.with_name(f"{attempt}.db")
        gateways = [
            subprocess.Popen(
                [sys.executable, "-c", GATEWAY, str(file), name], stdin=subprocess.PIPE
            )
            for name in ("a", "b", "c")
        ]
        try:
            for one in gateways:
                assert one.stdin is not None
                one.stdin.write(b"\n")
                one.stdin.close()
            assert [one.wait(60) for one in gateways] == [0, 0, 0]
        finally:
            for one in gateways:
                one.kill()
                one.wait()
        with closing(sqlite3.connect(file)) as opened:
            assert opened.execute("SELECT count(*) FROM responses").fetchone() == (9,)
        assert not is_put_aside(file)


async def test_the_newest_are_kept_within_the_limit(store: ResponseStore, path: Path) -> None:
    drawn = random.Random(7)
    for number in range(60):  # of 40 kB each, which do not shrink
        save(store, f"resp_{number}", response=drawn.randbytes(40_000))
    assert await is_kept(store, "resp_59")
    with closing(sqlite3.connect(path)) as file:
        held = [row[0] for row in file.execute("SELECT id FROM responses ORDER BY created")]
        [(total,)] = file.execute("SELECT sum(bytes) FROM responses")
        assert file.execute("SELECT bytes FROM total").fetchone() == (total,)
    assert held == [f"resp_{number}" for number in range(60 - len(held), 60)]
    assert 2**20 * 0.9 < total <= 2**20 and size_of(path) < 2**20 * 1.1
    save(store, "resp_huge", response=drawn.randbytes(2**21))
    assert not await is_kept(store, "resp_huge")
    assert await is_kept(store, "resp_59")


async def test_a_key_keeps_its_own_beside_one_that_stores_many(
    store: ResponseStore, path: Path
) -> None:
    drawn = random.Random(7)
    for number in range(5):  # of 40 kB each, of a megabyte
        save(store, f"bob_{number}", "bob", drawn.randbytes(40_000))
    for number in range(60):
        save(store, f"ada_{number}", "ada", drawn.randbytes(40_000))
    assert all([await is_kept(store, f"bob_{number}", "bob") for number in range(5)])
    assert await is_kept(store, "ada_59", "ada") and not await is_kept(store, "ada_30", "ada")
    for number in range(5, 60):  # half is the share of each
        save(store, f"bob_{number}", "bob", drawn.randbytes(40_000))
    kept = [await is_kept(store, f"ada_{number}", "ada") for number in range(48, 60)]
    assert all(kept)
    assert await is_kept(store, "bob_59", "bob") and not await is_kept(store, "bob_40", "bob")
    for number, size_bytes in enumerate((900_000, 1_030_000)):  # more than a share
        save(store, f"eve_{number}", "eve", drawn.randbytes(size_bytes))
        assert await is_kept(store, f"eve_{number}", "eve")
        with closing(sqlite3.connect(path)) as file:
            [(total,)] = file.execute("SELECT sum(bytes) FROM responses")
        assert size_bytes < total <= RULES.max_bytes
    assert not await is_kept(store, "eve_0", "eve")


async def test_the_old_ones_go(store: ResponseStore, path: Path) -> None:
    save(store, "resp_old")
    assert await is_kept(store, "resp_old")
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE responses SET created = created - 86400 * 31")
    assert not await is_kept(store, "resp_old")  # also before it is removed
    save(store, "resp_new")
    assert await is_kept(store, "resp_new")
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT id FROM responses").fetchall() == [("resp_new",)]


@pytest.mark.parametrize("damage", ["no database", "another table", "removed"])
async def test_gateways_leave_a_damaged_file_together(
    make_store: Callable[[], ResponseStore], path: Path, damage: str
) -> None:
    one, other = make_store(), make_store()
    if damage == "another table":
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("CREATE TABLE responses (id TEXT)")
    elif damage == "no database":
        overwrite(path, b"no database" * 1000)
    else:
        save(one, "resp_0")
        assert await is_kept(one, "resp_0") and await is_kept(other, "resp_0")
        remove(path)
    for store, id in ((one, "resp_1"), (other, "resp_2"), (one, "resp_3"), (other, "resp_4")):
        save(store, id)
        try:
            await is_kept(store, id)
        except ResponsesUnavailable:
            assert damage != "removed"
    for store in (one, other):
        assert await is_kept(store, "resp_3") and await is_kept(store, "resp_4")
        assert not await is_kept(store, "resp_0")
    assert is_put_aside(path) == (damage != "removed")


async def test_a_slow_disk_costs_responses_and_no_memory(
    store: ResponseStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "_MOST_PENDING_BYTES", 1000)
    save(store, "resp_0")
    assert await is_kept(store, "resp_0")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # nobody else can write
        for number in range(1, 4):
            save(store, f"resp_{number}", response=bytes(800))
        assert await is_kept(store, "resp_0")  # a reader does not wait for a writer
        other.execute("COMMIT")
    found = [await is_kept(store, f"resp_{number}") for number in range(1, 4)]
    assert found == [True, True, False]
    save(store, "resp_4", response=bytes(800))
    assert await is_kept(store, "resp_4")


async def test_what_cannot_be_done_now_is_no_answer(
    make_store: Callable[[], ResponseStore], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "_BUSY_S", 0.1)
    store = make_store()
    save(store, "resp_0")
    assert await is_kept(store, "resp_0")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ResponsesUnavailable, match="locked"):
            await store.remove_response("resp_0", "")
        other.execute("COMMIT")
    assert await store.remove_response("resp_0", "")


async def test_where_no_file_can_be_it_says_so(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "missing" / "responses.db")
    save(store, "resp_1")
    with pytest.raises(ResponsesUnavailable, match="No such file"):
        await is_kept(store, "resp_1")
    store.close()
