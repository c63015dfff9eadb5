"""The SQLite file of a gateway's thread: opened, damaged, replaced, full, and given up."""

from __future__ import annotations

import contextlib
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from servekit.gateway.storage import store_file
from servekit.gateway.storage.store_file import (
    ResponsesUnavailable,
    StoreFile,
    await_work,
    transaction,
)

VERSION = 2
TABLES = (
    "CREATE TABLE IF NOT EXISTS things (name TEXT)",
    "CREATE TABLE IF NOT EXISTS more (data BLOB)",
    f"PRAGMA user_version = {VERSION}",
)
Open = Callable[..., StoreFile]
RESERVE_BYTES = 2**20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def open_file(path: Path) -> Iterator[Open]:
    opened: list[StoreFile] = []

    def make(**fields: Any) -> StoreFile:
        known: dict[str, Any] = {"path": path, "tables": TABLES, "version": VERSION}
        opened.append(StoreFile(**(known | fields)))
        return opened[-1]

    yield make
    for one in opened:
        with contextlib.suppress(RuntimeError):  # a test has closed it
            one.close()


def run(file: StoreFile, statement: str, *values: Any) -> list[Any]:
    return file.submit(lambda sql: sql.execute(statement, values).fetchall()).result(30)


def add(file: StoreFile, name: str) -> None:
    run(file, "INSERT INTO things VALUES (?)", name)


def names(file: StoreFile) -> list[str]:
    return [name for (name,) in run(file, "SELECT name FROM things")]


def beside(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


# ---------------------------------------------------------------- a file that is sound


def test_a_new_file_has_its_tables_and_is_for_this_user_only(open_file: Open, path: Path) -> None:
    file = open_file()
    add(file, "a")
    assert names(file) == ["a"]
    assert run(file, "PRAGMA user_version") == [(VERSION,)]
    for one in (path, beside(path, ".lock"), beside(path, ".reserve")):
        assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert beside(path, ".reserve").stat().st_size == RESERVE_BYTES


def test_nothing_is_opened_before_it_is_used(open_file: Open, path: Path) -> None:
    open_file()
    assert not path.exists()


def test_writing_waits_neither_for_the_disk_nor_for_readers(open_file: Open) -> None:
    """And what is deleted is given back to the disk."""
    file = open_file()
    assert run(file, "PRAGMA journal_mode") == [("wal",)]
    assert run(file, "PRAGMA synchronous") == [(1,)]  # NORMAL
    assert run(file, "PRAGMA auto_vacuum") == [(1,)]  # FULL


def test_two_gateways_share_one_file(open_file: Open) -> None:
    one, other = open_file(), open_file()
    add(one, "a")
    add(other, "b")
    assert names(one) == names(other) == ["a", "b"]


def test_a_file_of_an_earlier_version_is_brought_up_to_this_one(
    open_file: Open, path: Path
) -> None:
    with closing(sqlite3.connect(path)) as earlier, earlier:
        earlier.execute("CREATE TABLE things (name TEXT)")
        earlier.execute("INSERT INTO things VALUES ('old')")
        earlier.execute("PRAGMA user_version = 1")
    file = open_file()
    assert names(file) == ["old"]
    run(file, "INSERT INTO more VALUES ('x')")
    assert run(file, "PRAGMA user_version") == [(VERSION,)]


def test_tables_that_cannot_be_made_leave_nothing_half_made(open_file: Open, path: Path) -> None:
    file = open_file(tables=(*TABLES, "CREATE TABLE things (again TEXT)"))
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        add(file, "a")
    with closing(sqlite3.connect(path)) as made:
        assert made.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        assert made.execute("PRAGMA user_version").fetchone() == (0,)


def test_work_that_fails_leaves_the_file_for_the_next(open_file: Open, path: Path) -> None:
    file = open_file()
    add(file, "a")
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        run(file, "SELECT * FROM nowhere")
    assert names(file) == ["a"]
    assert not beside(path, ".broken").exists()


# ---------------------------------------------------------------- a file that is not


@pytest.mark.parametrize("version", [VERSION + 1, -1, 0])
def test_a_file_of_another_version_is_put_aside(open_file: Open, path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE theirs (name TEXT)")
        other.execute(f"PRAGMA user_version = {version}")
    file = open_file()
    with pytest.raises(sqlite3.DatabaseError, match=f"it is of another version: {version}"):
        add(file, "a")
    add(file, "b")
    assert names(file) == ["b"]
    with closing(sqlite3.connect(beside(path, ".broken"))) as aside:
        assert aside.execute("SELECT * FROM theirs").fetchall() == []


def test_a_damaged_file_is_put_aside_with_its_folder_and_without_its_log(
    open_file: Open, path: Path, tmp_path: Path
) -> None:
    folder, before = tmp_path / "files", tmp_path / "files.broken"
    for one, text in ((folder, "new"), (before, "old")):
        one.mkdir()
        (one / "file").write_text(text)
    path.write_bytes(b"no database" * 1000)
    for end in ("-wal", "-shm"):
        beside(path, end).write_bytes(b"of it")
    file = open_file(folder=folder)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        add(file, "a")
    assert beside(path, ".broken").read_bytes().startswith(b"no database")
    assert not beside(path, "-wal").exists() and not beside(path, "-shm").exists()
    assert not folder.exists() and (before / "file").read_text() == "new"
    add(file, "b")
    assert names(file) == ["b"]


def test_the_log_of_a_damaged_file_does_not_become_that_of_the_next(
    open_file: Open, path: Path
) -> None:
    """It is there as long as another gateway has the file open."""
    file, other = open_file(), open_file()
    add(file, "a")
    add(other, "b")

    def fail(_: sqlite3.Connection) -> None:
        raise sqlite3.DatabaseError("malformed")

    assert beside(path, "-wal").exists() and beside(path, "-shm").exists()
    with pytest.raises(sqlite3.DatabaseError):
        file.submit(fail).result(30)
    assert beside(path, ".broken").exists()
    assert not beside(path, "-wal").exists() and not beside(path, "-shm").exists()
    assert names(file) == names(other) == []


def test_a_file_that_another_gateway_has_replaced_meanwhile_is_not_put_aside(
    open_file: Open, path: Path
) -> None:
    file, other = open_file(), open_file()
    add(file, "a")

    def fail(_: sqlite3.Connection) -> None:
        path.unlink()
        add(other, "theirs")
        raise sqlite3.DatabaseError("malformed")

    with pytest.raises(sqlite3.DatabaseError, match="malformed"):
        file.submit(fail).result(30)
    assert names(file) == ["theirs"]
    assert not beside(path, ".broken").exists()


def test_a_file_that_is_removed_or_replaced_is_opened_again(
    open_file: Open, path: Path, tmp_path: Path
) -> None:
    file = open_file()
    add(file, "a")
    for end in ("", "-wal", "-shm"):
        beside(path, end).unlink(missing_ok=True)
    assert names(file) == []
    other = tmp_path / "other.db"
    made = open_file(path=other)
    add(made, "other")
    made.close()
    for end in ("-wal", "-shm"):
        beside(path, end).unlink(missing_ok=True)
    other.replace(path)
    assert names(file) == ["other"]


# ---------------------------------------------------------------- a full disk


def fill_and_empty(file: StoreFile, may_use_reserve: bool) -> list[Any]:
    """Delete what is large; the first try finds the disk full. Return the modes it was done in."""
    run(file, "INSERT INTO more VALUES (zeroblob(?))", 3 * 2**20)
    tries: list[Any] = []

    def delete(sql: sqlite3.Connection) -> list[Any]:
        tries.append(sql.execute("PRAGMA auto_vacuum").fetchone()[0])
        if len(tries) == 1:
            raise sqlite3.OperationalError("database or disk is full")
        sql.execute("DELETE FROM more")
        return tries

    return file.submit(delete, may_use_reserve=may_use_reserve).result(30)


def test_work_that_frees_room_may_use_the_reserve(open_file: Open, path: Path) -> None:
    file = open_file()
    add(file, "a")
    assert fill_and_empty(file, may_use_reserve=True) == [1, 2]  # in small steps, the second time
    assert path.stat().st_size < 2**20, "the disk has its room back"
    assert beside(path, ".reserve").stat().st_size == RESERVE_BYTES
    assert names(file) == ["a"]
    assert run(file, "PRAGMA auto_vacuum") == [(1,)]


def test_the_reserve_is_there_again_after_work_that_fails_with_it(
    open_file: Open, path: Path
) -> None:
    file, seen = open_file(), list[bool]()

    def fail(_: sqlite3.Connection) -> None:
        seen.append(beside(path, ".reserve").exists())
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(sqlite3.OperationalError):
        file.submit(fail, may_use_reserve=True).result(30)
    assert seen == [True, False]
    assert beside(path, ".reserve").stat().st_size == RESERVE_BYTES


def test_other_work_leaves_the_reserve_alone(open_file: Open) -> None:
    file = open_file()
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        fill_and_empty(file, may_use_reserve=False)


def test_a_fault_of_our_own_does_not_use_the_reserve(open_file: Open) -> None:
    tries: list[None] = []

    def fail(_: sqlite3.Connection) -> None:
        tries.append(None)
        raise sqlite3.IntegrityError("twice")

    with pytest.raises(sqlite3.IntegrityError):
        open_file().submit(fail, may_use_reserve=True).result(30)
    assert len(tries) == 1


def test_without_room_for_the_reserve_it_goes_on_without(
    open_file: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "_RESERVE_BYTES", 2**62)
    file = open_file()
    add(file, "a")
    assert names(file) == ["a"]
    assert not beside(path, ".reserve").exists()


def test_the_log_says_once_that_the_file_cannot_be_written(open_file: Open, path: Path) -> None:
    file = open_file()

    def fail() -> None:
        with pytest.raises(sqlite3.OperationalError):
            run(file, "SELECT * FROM nowhere")

    with capture_logs() as logs:
        fail()
        fail()
        assert names(file) == []
        fail()
    told = [(one["event"], one["file"], one["reason"]) for one in logs]
    assert told == [("responses_unwritable", str(path), "no such table: nowhere")] * 2


# ---------------------------------------------------------------- its end


def test_at_the_end_what_was_submitted_is_written(open_file: Open, path: Path) -> None:
    file = open_file()
    add(file, "a")
    waits = threading.Event()
    file.submit(lambda _: waits.wait(30))
    file.submit(lambda sql: sql.execute("INSERT INTO things VALUES ('b')"))
    waits.set()
    file.close()
    with closing(sqlite3.connect(path)) as found:
        assert found.execute("SELECT name FROM things").fetchall() == [("a",), ("b",)]
    assert not beside(path, "-wal").exists(), "it is closed"


def test_the_end_does_not_wait_for_ever(open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "_GOODBYE_S", 0.01)
    file = open_file()
    hangs = threading.Event()
    file.submit(lambda _: hangs.wait(30))
    later = file.submit(lambda _: None)
    file.close()
    assert not hangs.is_set()
    hangs.set()
    with pytest.raises(CancelledError):
        later.result(30)


# ---------------------------------------------------------------- what its users need


@pytest.mark.parametrize("error", [sqlite3.OperationalError("locked"), OSError("no such device")])
async def test_work_that_fails_is_unavailable_with_the_reason(
    open_file: Open, error: Exception
) -> None:
    def fail(_: sqlite3.Connection) -> None:
        raise error

    with pytest.raises(ResponsesUnavailable) as refused:
        await await_work(open_file().submit(fail))
    assert refused.value.message == f"what is stored cannot be reached now: {error}"
    assert refused.value.status == 503
    assert await await_work(open_file().submit(lambda _: 3)) == 3


async def test_a_fault_of_our_own_is_not_taken_for_one_of_the_disk(open_file: Open) -> None:
    def fail(_: sqlite3.Connection) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await await_work(open_file().submit(fail))


def test_a_transaction_is_all_or_nothing(open_file: Open) -> None:
    file = open_file()

    def write(sql: sqlite3.Connection) -> None:
        with transaction(sql):
            sql.execute("INSERT INTO things VALUES ('kept')")
        with pytest.raises(ZeroDivisionError), transaction(sql):
            sql.execute("INSERT INTO things VALUES ('lost')")
            raise ZeroDivisionError
        assert not sql.in_transaction

    file.submit(write).result(30)
    assert names(file) == ["kept"]


def test_a_transaction_that_reads_sees_one_moment(open_file: Open) -> None:
    file, other = open_file(), open_file()
    add(file, "a")

    def read(sql: sqlite3.Connection) -> list[int]:
        count = "SELECT count(*) FROM things"
        with transaction(sql, "BEGIN"):
            before = sql.execute(count).fetchone()[0]
            add(other, "b")
            return [before, sql.execute(count).fetchone()[0]]

    assert file.submit(read).result(30) == [1, 1]
    assert names(file) == ["a", "b"]
