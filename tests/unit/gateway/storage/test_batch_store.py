"""Files and batches on the disk: leases, results once, and what is removed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.gateway.storage import leases
from servekit.gateway.storage.batch_store import (
    Batch,
    BatchStore,
    FileNotFound,
    StoredFile,
    TooManyStored,
    TooMuchStored,
    expiry,
)
from servekit.gateway.storage.store_file import ResponsesUnavailable
from servekit.protocol.access import BatchRules

RULES = BatchRules(max_bytes=100, max_files=3, max_batches=1, days=1.0, concurrent=2)


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[[], BatchStore]]:
    made: list[BatchStore] = []

    def make() -> BatchStore:
        made.append(BatchStore(tmp_path / "files"))
        return made[-1]

    yield make
    for store in made:
        store.close()


async def add_file(store: BatchStore, id: str, content: bytes, key: str = "") -> None:
    path, now_s = store.make_path(), time.time()
    path.write_bytes(content)
    file = StoredFile(id, key, "batch", "in", len(content), now_s, now_s + 60)
    await store.add_file(path, file, RULES)


def batch(id: str = "batch_1", status: str = "validating") -> Batch:
    record = {"input_file_id": "file-1"}
    return Batch(id, "", time.time(), time.time() + 60, status, record, 0, 0, 0, 0)


async def run_to_its_last_line(store: BatchStore) -> None:
    await store.add_batch(batch(), RULES)
    await store.claim_batches()
    await store.begin(batch(), 1, [])
    await store.save_result("batch_1", 1, good=True, result=b"first")


async def test_the_newest_batches_of_a_key_are_kept_and_those_that_run(
    make_store: Callable[[], BatchStore],
) -> None:
    store, rules = make_store(), replace(RULES, max_batches=2)
    await store.add_batch(batch("runs"), rules)
    for number in range(5):
        await store.add_batch(batch(f"batch_{number}", "cancelled"), rules)
        await store.add_batch(replace(batch(f"other_{number}", "failed"), key="b"), rules)
    kept = ["batch_4", "batch_3", "batch_2", "runs"]
    assert [one.id for one in await store.list_batches("")] == kept
    assert len(await store.list_batches("b")) == RULES.max_files


async def test_one_gateway_runs_a_batch_and_keeps_each_result_once(
    make_store: Callable[[], BatchStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_store(), make_store()
    await one.add_batch(batch(), RULES)
    with pytest.raises(TooManyStored, match="max_batches"):
        await one.add_batch(batch("batch_2"), RULES)
    assert [held.id for held in await one.claim_batches()] == ["batch_1"]
    assert not await other.claim_batches()
    assert not await other.begin(batch(), 2, [])
    assert await one.begin(batch(), 2, [])
    for _ in range(2):
        await one.save_result("batch_1", 1, good=True, result=b"first")
    await other.save_result("batch_1", 2, good=True, result=b"stray")

    monkeypatch.setattr(leases, "LEASE_S", -1.0)  # the first gateway is silent
    assert [held.id for held in await other.claim_batches()] == ["batch_1"]
    await one.save_result("batch_1", 2, good=True, result=b"late")
    await one.finish_batch("batch_1", "completed", RULES)
    assert await other.done_lines("batch_1") == {1}
    await other.save_result("batch_1", 2, good=False, result=b"second")
    await other.finish_batch("batch_1", "completed", RULES)
    done = await one.find_batch("batch_1", "")
    assert (done.status, done.total, done.completed, done.failed) == ("completed", 2, 1, 1)
    assert one.path(done.record["output_file_id"]).read_bytes() == b"first\n"
    assert one.path(done.record["error_file_id"]).read_bytes() == b"second\n"
    assert not await other.claim_batches()


async def test_the_files_of_a_key_are_bounded(make_store: Callable[[], BatchStore]) -> None:
    store = make_store()
    await add_file(store, "file-1", b"x" * 60)
    assert await store.check_room("", RULES) == 40
    with pytest.raises(TooMuchStored, match="max_bytes"):
        await add_file(store, "file-2", b"x" * 41)
    await add_file(store, "file-3", b"x", key="other")
    with pytest.raises(FileNotFound):
        await store.find_file("file-3", "")
    await add_file(store, "file-4", b"x")
    await add_file(store, "file-5", b"x")
    with pytest.raises(TooManyStored, match="max_files"):
        await store.check_room("", RULES)


async def test_what_is_old_or_loose_goes_and_what_is_read_stays(
    make_store: Callable[[], BatchStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    await add_file(store, "file-1", b"x")
    await add_file(store, "file-2", b"x")
    await store.add_batch(batch(), RULES)
    await store.remove_file("file-1")
    assert store.path("file-1").exists()  # the batch reads it
    loose = store.make_path()
    for path in (loose, store.path("file-1"), store.path("file-2")):
        os.utime(path, (0, 0))
    await store.sweep(RULES)
    assert not loose.exists()
    assert store.path("file-1").exists()
    assert store.path("file-2").exists()
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 120)
    await store.sweep(RULES)
    assert not store.path("file-2").exists()
    assert not await store.list_files("", None)


@pytest.mark.parametrize(("after_s", "expected"), [(None, 86400), (3600, 3600), (10**6, 86400)])
def test_a_file_is_kept_as_long_as_asked_and_no_longer_than_the_rules_say(
    after_s: float | None, expected: float
) -> None:
    assert expiry(0.0, RULES, after_s) == expected


async def test_a_damaged_file_is_put_aside_with_all_that_it_tells_of(
    make_store: Callable[[], BatchStore], tmp_path: Path
) -> None:
    before = BatchStore(tmp_path / "files")
    await add_file(before, "file-1", b"x")
    before.close()
    (tmp_path / "batches.db").write_bytes(b"no database" * 1000)
    store, other = make_store(), make_store()
    for one in (store, other):
        with contextlib.suppress(ResponsesUnavailable):
            await one.list_files("", None)
    await add_file(store, "file-2", b"y")
    await other.sweep(RULES)
    assert [file.id for file in await other.list_files("", None)] == ["file-2"]
    assert (tmp_path / "files.broken" / "file-1").read_bytes() == b"x"
    assert (tmp_path / "batches.db.broken").exists()


async def test_a_lease_is_renewed_while_a_large_output_is_written(
    make_store: Callable[[], BatchStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways would else take the batch from each other, and write it again, for ever."""
    one, other = make_store(), make_store()
    await run_to_its_last_line(one)
    writes, may_end = threading.Event(), threading.Event()

    def sync_slowly(_: int) -> None:
        writes.set()
        assert may_end.wait(60)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    finishing = asyncio.create_task(one.finish_batch("batch_1", "completed", RULES))
    await asyncio.to_thread(writes.wait, 60)
    try:
        async with asyncio.timeout(30):
            assert [held.id for held in await one.claim_batches()] == ["batch_1"]
    finally:
        may_end.set()
    await finishing
    assert not await other.claim_batches()
    done = await one.find_batch("batch_1", "")
    assert one.path(done.record["output_file_id"]).read_bytes() == b"first\n"


async def test_what_was_written_for_a_batch_of_another_gateway_is_removed(
    make_store: Callable[[], BatchStore], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = make_store(), make_store()
    await run_to_its_last_line(one)
    sync, synced = os.fsync, threading.Event()

    def lose_lease(file: int) -> None:
        with sqlite3.connect(tmp_path / "batches.db") as db:
            db.execute("UPDATE batches SET owner = 'another'")
        sync(file)
        synced.set()

    monkeypatch.setattr(os, "fsync", lose_lease)
    await one.finish_batch("batch_1", "completed", RULES)
    assert synced.is_set()
    assert (await other.find_batch("batch_1", "")).status == "in_progress"
    assert not list((tmp_path / "files").iterdir())
