"""The responses of /v1/responses that are kept, in an SQLite file that all gateways here share.

A thread of its own reads and writes, in the order of the calls, so a response can be found as soon
as its end is sent. The newest are kept, up to `ResponseStorage.max_bytes` and for `days`. A file
that is damaged is put aside; on a full disk responses are not kept, and the log says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from servekit.protocol.access import ResponseStorage

log: Any = structlog.get_logger("servekit.gateway")

_T = TypeVar("_T")
_VERSION = 1
_TABLE = """CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, created REAL NOT NULL, bytes INTEGER NOT NULL,
    response BLOB NOT NULL, input BLOB NOT NULL)"""
_INDEX = "CREATE INDEX IF NOT EXISTS by_age ON responses (created, bytes)"
_BUSY_S = 5.0
_DAY_S = 86400.0
#: What is removed at once to make room, as a share of the limit.
_ROOM = 0.05
#: How long a response may be on its way from another gateway into the file.
_LATE_S = 1.0
#: Responses that wait to be written; more are not kept.
_MOST_PENDING_BYTES = 64 * 2**20
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its client got it, and the items that the model was asked with, as JSON."""

    response: bytes
    input: bytes


class ResponseStore:
    """The responses in the file at `path`; without a path none is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "responses")
        self._failing = False
        self._pending_bytes = 0
        self._lock = threading.Lock()  # of `_pending_bytes`

    def save(
        self, id: str, key: str, response: bytes, asked: bytes, rules: ResponseStorage
    ) -> None:
        """Keep a response for the key of this name, and remove those that `rules` do not allow."""
        size_bytes = len(response) + len(asked)
        if self._pending_bytes > _MOST_PENDING_BYTES:
            self._warn("the disk takes too long")
            return
        self._add_pending(size_bytes)
        stored = StoredResponse(response, asked)
        written = self._submit(lambda file: _save(file, id, key, stored, rules))
        written.add_done_callback(lambda _: self._add_pending(-size_bytes))

    def _add_pending(self, size_bytes: int) -> None:
        with self._lock:
            self._pending_bytes += size_bytes

    async def find(self, id: str, key: str) -> StoredResponse | None:
        """Return a response of the key; None if it is not kept, or belongs to another key."""
        until_s = time.monotonic() + _LATE_S
        while True:
            found = await self._ask(lambda file: _find(file, id, key))
            if found is not None or time.monotonic() > until_s:
                return found
            await asyncio.sleep(_LOOK_EVERY_S)

    async def remove(self, id: str, key: str) -> bool:
        """Remove a response of the key. Returns whether there was one."""
        return bool(await self._ask(lambda file: _remove(file, id, key)))

    def close(self) -> None:
        """Write what is pending, and close the file."""
        self._thread.submit(self._close)
        self._thread.shutdown()

    async def _ask(self, work: Callable[[sqlite3.Connection], _T]) -> _T | None:
        return await asyncio.wrap_future(self._submit(work))

    # ---- in the thread

    def _submit(self, work: Callable[[sqlite3.Connection], _T]) -> Future[_T | None]:
        return self._thread.submit(self._run, work)

    def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T | None:
        if self._path is None:
            return None
        try:
            if self._file is None or not self._path.exists():
                self._close()
                self._file = _open(self._path)
            done = work(self._file)
        except (sqlite3.Error, OSError) as error:
            self._fail(self._path, error)
            return None
        self._failing = False
        return done

    def _fail(self, path: Path, error: Exception) -> None:
        self._warn(str(error))
        self._close()
        damaged = isinstance(error, sqlite3.DatabaseError)
        if damaged and not isinstance(error, sqlite3.OperationalError):
            _remove_journal(path)
            with contextlib.suppress(OSError):
                path.replace(path.with_name(f"{path.name}.broken"))

    def _warn(self, reason: str) -> None:
        if not self._failing:
            log.warning("responses_unwritable", file=str(self._path), reason=reason)
        self._failing = True

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(sqlite3.Error):
                file.close()


def _remove_journal(path: Path) -> None:
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)


def _open(path: Path) -> sqlite3.Connection:
    if not path.exists():
        _remove_journal(path)  # of a file that somebody has removed
    path.touch(mode=0o600)
    file = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        [(version,)] = file.execute("PRAGMA user_version")
        [(tables,)] = file.execute("SELECT count(*) FROM sqlite_schema")
        if tables and version != _VERSION:
            raise sqlite3.DatabaseError(f"it is of another version: {version}")
        for statement in (
            "PRAGMA auto_vacuum = FULL",
            "PRAGMA journal_mode = WAL",  # no wait for the disk at each response
            "PRAGMA synchronous = NORMAL",
            "BEGIN IMMEDIATE",
            _TABLE,
            _INDEX,
            f"PRAGMA user_version = {_VERSION}",
            "COMMIT",
        ):
            file.execute(statement)
    except sqlite3.Error:
        file.close()
        raise
    return file


def _save(
    file: sqlite3.Connection, id: str, key: str, stored: StoredResponse, rules: ResponseStorage
) -> None:
    response, asked = zlib.compress(stored.response, 1), zlib.compress(stored.input, 1)
    size_bytes = len(response) + len(asked)
    if size_bytes > rules.max_bytes:
        return
    now_s = time.time()
    file.execute("BEGIN IMMEDIATE")
    try:
        file.execute("DELETE FROM responses WHERE created < ?", (now_s - rules.days * _DAY_S,))
        _make_room(file, size_bytes, rules.max_bytes)
        file.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)",
            (id, key, now_s, size_bytes, response, asked),
        )
        file.execute("COMMIT")
    except sqlite3.Error:
        if file.in_transaction:
            file.execute("ROLLBACK")
        raise


def _make_room(file: sqlite3.Connection, size_bytes: int, max_bytes: int) -> None:
    """Remove the oldest responses until `size_bytes` fit, and some more."""
    [(held,)] = file.execute("SELECT coalesce(sum(bytes), 0) FROM responses")
    if held + size_bytes <= max_bytes:
        return
    excess = held + size_bytes - int(max_bytes * (1 - _ROOM))
    for created, freed in file.execute("SELECT created, bytes FROM responses ORDER BY created"):
        excess -= freed
        if excess <= 0:
            file.execute("DELETE FROM responses WHERE created <= ?", (created,))
            return
    file.execute("DELETE FROM responses")


def _find(file: sqlite3.Connection, id: str, key: str) -> StoredResponse | None:
    query = "SELECT response, input FROM responses WHERE id = ? AND key = ?"
    row = file.execute(query, (id, key)).fetchone()
    return None if row is None else StoredResponse(*map(zlib.decompress, row))


def _remove(file: sqlite3.Connection, id: str, key: str) -> bool:
    query = "DELETE FROM responses WHERE id = ? AND key = ?"
    return file.execute(query, (id, key)).rowcount > 0
