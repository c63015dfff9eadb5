"""The responses of /v1/responses that are kept, in an SQLite file that all gateways here share.

One thread writes, in the order of the calls, and one reads, so that no reader waits for a writer.
The newest are kept, up to `ResponseStorage.max_bytes` and for `days`. A file that is damaged, or of
another version, is put aside; on a full disk responses are not kept, and the log says so. Gateways
open the file, and put it aside, one at a time, and open it again where another is in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from servekit.errors import RequestError
from servekit.protocol.access import ResponseStorage

log: Any = structlog.get_logger("servekit.gateway")

_T = TypeVar("_T")
_VERSION = 3
#: The row of `total` is the size of all responses: a sum over them would take long.
_TABLES = (
    """CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, created REAL NOT NULL, bytes INTEGER NOT NULL,
    response BLOB NOT NULL, input BLOB NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS by_age ON responses (created, bytes)",
    "CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL)",
    "INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total)",
    """CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses
    BEGIN UPDATE total SET bytes = bytes + NEW.bytes; END""",
    """CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses
    BEGIN UPDATE total SET bytes = bytes - OLD.bytes; END""",
    # since version 2: those that are not done
    """CREATE TABLE IF NOT EXISTS background (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, created REAL NOT NULL, bytes INTEGER NOT NULL,
    response BLOB NOT NULL, input BLOB NOT NULL, body BLOB NOT NULL,
    owner TEXT NOT NULL, leased_until REAL NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS by_key ON background (key, created)",
    # since version 3: the streams of those in the background, as long as these are kept
    """CREATE TABLE IF NOT EXISTS streams (
    id TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, data BLOB NOT NULL,
    tokens BLOB NOT NULL, continuation BLOB NOT NULL, PRIMARY KEY (id, first))""",
    """CREATE TRIGGER IF NOT EXISTS forgotten AFTER DELETE ON responses
    BEGIN DELETE FROM streams WHERE id = OLD.id; END""",
    f"PRAGMA user_version = {_VERSION}",
)
_BUSY_S = 5.0
_DAY_S = 86400.0
#: What is removed at once to make room, as a share of the limit.
_ROOM = 0.05
#: How long a response may be on its way from another gateway into the file.
_LATE_S = 1.0
_LOOK_EVERY_S = 0.05
#: The most parts of a stream that are read at once.
_MOST_PARTS = 64
#: Responses that wait to be written; more are not kept.
_MOST_PENDING_BYTES = 64 * 2**20
#: How long the end of a gateway waits for them.
_GOODBYE_S = 2.0


class ResponsesUnavailable(RequestError):
    """Stored responses, files and batches cannot be read or changed now. Try again; the log has the
    reason."""

    status = 503
    code = "responses_unavailable"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its client got it, and the items that the model was asked with, as JSON.

    `status` is that of a response that is not done, which `response` was before; "" if it is done.
    """

    response: bytes
    input: bytes
    status: str = ""


class StreamPart(msgspec.Struct, frozen=True):
    """Events of a stream, numbered from `first` to `last`.

    `tokens` are the ids, of 4 bytes each, that were generated since the part before; a
    `continuation` comes with the first of them.
    """

    first: int
    last: int
    data: bytes
    tokens: bytes = b""
    continuation: bytes = b""


class StreamState(msgspec.Struct, frozen=True):
    """Parts of the stream of a response, in order; `done` if no more are to come."""

    parts: list[StreamPart]
    done: bool


class ResponseStore:
    """The responses in the file at `path`."""

    def __init__(self, path: Path) -> None:
        self._writer, self._reader = open_responses(path), open_responses(path)
        self._writing: dict[str, Future[None]] = {}  # by the ids of their responses
        self._pending_bytes = 0

    def save(
        self,
        id: str,
        key: str,
        response: bytes,
        asked: Callable[[], bytes],
        size_bytes: int,
        rules: ResponseStorage,
    ) -> None:
        """Keep a response for the key of this name, and remove those that `rules` do not allow.

        `asked` makes the JSON of the items that the model was asked with, in the thread;
        `size_bytes` is about what both take until then.
        """
        if self._pending_bytes > _MOST_PENDING_BYTES:
            self._writer.warn("the disk takes too long")
            return
        self._pending_bytes += size_bytes
        written = self._writer.submit(
            lambda file: _save(file, id, key, StoredResponse(response, asked()), rules)
        )
        self._writing[id] = written
        loop = asyncio.get_running_loop()

        def forget() -> None:
            self._pending_bytes -= size_bytes
            self._writing.pop(id, None)
            written.exception()  # the log has it

        def on_written(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(forget)

        written.add_done_callback(on_written)

    async def find(self, id: str, key: str, rules: ResponseStorage) -> StoredResponse | None:
        """Return a response of the key; None if it is not kept, or belongs to another key.

        Raises ResponsesUnavailable.
        """
        if (written := self._writing.get(id)) is not None:
            with contextlib.suppress(sqlite3.Error, OSError):
                await asyncio.shield(asyncio.wrap_future(written))
        until_s = time.monotonic() + _LATE_S
        since = time.time() - rules.days * _DAY_S
        while True:
            found = await answer(self._reader.submit(lambda file: _find(file, id, key, since)))
            if found is not None or time.monotonic() > until_s:
                return found
            await asyncio.sleep(_LOOK_EVERY_S)

    async def read_stream(self, id: str, key: str, after: int) -> StreamState | None:
        """Return parts of a stream with events after the one of this number.

        None if the response has no stream, or is not the key's. Raises ResponsesUnavailable.
        """
        return await answer(self._reader.submit(lambda file: _read_stream(file, id, key, after)))

    async def remove_response(self, id: str, key: str) -> bool:
        """Remove a response of the key. Returns whether there was one.

        Raises ResponsesUnavailable.
        """
        return await answer(self._writer.submit(lambda file: _remove(file, id, key)))

    def close(self) -> None:
        """Write what is pending, if the disk takes it within two seconds."""
        self._reader.close()
        self._writer.close()


def open_responses(path: Path) -> StoreFile:
    """Return a connection to the file of stored responses."""
    return StoreFile(path, _TABLES, _VERSION)


async def answer(work: Future[_T]) -> _T:
    """Return what the thread of a file returns. Raises ResponsesUnavailable."""
    try:
        return await asyncio.wrap_future(work)
    except (sqlite3.Error, OSError) as error:
        raise ResponsesUnavailable(f"what is stored cannot be reached now: {error}") from None


class StoreFile:
    """A connection to the SQLite file at `path`, in a thread of its own.

    `tables` are the statements that make a new file, or bring one of an earlier version up to
    `version`, its `user_version`. What is in `folder` is nothing without the file.
    """

    def __init__(
        self, path: Path, tables: Sequence[str], version: int, folder: Path | None = None
    ) -> None:
        self._path, self._folder = path, folder
        self._tables, self._version = tables, version
        self._file: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None  # of the file that is open, or was
        self._thread = ThreadPoolExecutor(1, "responses")
        self._failing = False

    def submit(self, work: Callable[[sqlite3.Connection], _T]) -> Future[_T]:
        """Run `work` in the thread; its future raises sqlite3.Error and OSError."""
        return self._thread.submit(self._run, work)

    def close(self) -> None:
        """Run what is submitted, for two seconds at most, and close the file."""
        closed = self._thread.submit(self._close)
        futures.wait([closed], _GOODBYE_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def warn(self, reason: str) -> None:
        """Log that the file cannot be written, unless that was the last that was known."""
        if not self._failing:
            log.warning("responses_unwritable", file=str(self._path), reason=reason)
        self._failing = True

    # ---- in the thread

    def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            if self._file is None or _identify(self._path) != self._identity:
                self._close()
                with _locked(self._path):
                    self._file = self._open()
            done = work(self._file)
        except (sqlite3.Error, OSError) as error:
            self.warn(str(error))
            self._close()
            if _is_damage(error):
                with contextlib.suppress(OSError), _locked(self._path):
                    self._put_aside()
            raise
        self._failing = False
        return done

    def _open(self) -> sqlite3.Connection:
        self._path.touch(mode=0o600)
        self._identity = _identify(self._path)
        file = sqlite3.connect(
            self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            [(version,)] = file.execute("PRAGMA user_version")
            [(tables,)] = file.execute("SELECT count(*) FROM sqlite_schema")
            if tables and not 0 < version <= self._version:
                raise sqlite3.DatabaseError(f"it is of another version: {version}")
            if not tables:
                file.execute("PRAGMA auto_vacuum = FULL")
                file.execute("PRAGMA journal_mode = WAL")  # no wait for the disk at each response
            file.execute("PRAGMA synchronous = NORMAL")
            if version < self._version:
                with transaction(file):
                    for statement in self._tables:
                        file.execute(statement)
        except sqlite3.Error:
            file.close()
            raise
        return file

    def _put_aside(self) -> None:
        """Rename the damaged file and its folder, unless another gateway has done so."""
        if _identify(self._path) != self._identity:
            return
        if self._folder is not None and self._folder.exists():
            aside = self._folder.with_name(f"{self._folder.name}.broken")
            shutil.rmtree(aside, ignore_errors=True)
            self._folder.replace(aside)
        for end in ("-wal", "-shm"):
            self._path.with_name(self._path.name + end).unlink(missing_ok=True)
        self._path.replace(self._path.with_name(f"{self._path.name}.broken"))

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(sqlite3.Error):
                file.close()


def _identify(path: Path) -> tuple[int, int] | None:
    """Return which file stands at `path`; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the gateways that open the file, or put it aside."""
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_damage(error: Exception) -> bool:
    """Return whether SQLite cannot read the file: its subclasses are of other faults."""
    return type(error) is sqlite3.DatabaseError


@contextlib.contextmanager
def transaction(file: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Write all that is within, or nothing; after "BEGIN" it is read as of one moment."""
    file.execute(begin)
    try:
        yield
        file.execute("COMMIT")
    except BaseException:
        if file.in_transaction:
            file.execute("ROLLBACK")
        raise


def _save(
    file: sqlite3.Connection, id: str, key: str, stored: StoredResponse, rules: ResponseStorage
) -> None:
    with transaction(file):
        insert_response(file, id, key, stored, rules)


def insert_response(
    file: sqlite3.Connection, id: str, key: str, stored: StoredResponse, rules: ResponseStorage
) -> bool:
    """Store a response in a transaction, unless it is too large. Returns whether it was not."""
    response, asked = zlib.compress(stored.response, 1), zlib.compress(stored.input, 1)
    size_bytes = len(response) + len(asked) + _size_stream(file, id)
    if size_bytes > rules.max_bytes:
        return False
    now_s = time.time()
    file.execute("DELETE FROM responses WHERE created < ?", (now_s - rules.days * _DAY_S,))
    _make_room(file, size_bytes, rules.max_bytes)
    values = id, key, now_s, size_bytes, response, asked
    file.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", values)
    return True


def _make_room(file: sqlite3.Connection, size_bytes: int, max_bytes: int) -> None:
    """Remove the oldest responses until `size_bytes` fit, and some more."""
    [(held,)] = file.execute("SELECT bytes FROM total")
    if held + size_bytes <= max_bytes:
        return
    excess = held + size_bytes - int(max_bytes * (1 - _ROOM))
    for created, freed in file.execute("SELECT created, bytes FROM responses ORDER BY created"):
        excess -= freed
        if excess <= 0:
            file.execute("DELETE FROM responses WHERE created <= ?", (created,))
            return
    file.execute("DELETE FROM responses")


def _find(file: sqlite3.Connection, id: str, key: str, since: float) -> StoredResponse | None:
    query = (
        "SELECT response, input, '' FROM responses WHERE id = ?1 AND key = ?2 AND created >= ?3"
        " UNION ALL SELECT response, input, iif(owner = '', 'queued', 'in_progress')"
        " FROM background WHERE id = ?1 AND key = ?2"
    )
    if (row := file.execute(query, (id, key, since)).fetchone()) is None:
        return None
    response, asked, status = row
    return StoredResponse(zlib.decompress(response), zlib.decompress(asked), status)


def _read_stream(file: sqlite3.Connection, id: str, key: str, after: int) -> StreamState | None:
    with transaction(file, "BEGIN"):  # the state and the parts are of one moment
        stands = "SELECT 1 FROM background WHERE id = ? AND key = ?"
        runs = file.execute(stands, (id, key)).fetchone() is not None
        kept = "SELECT 1 FROM responses WHERE id = ? AND key = ?"
        if not runs and file.execute(kept, (id, key)).fetchone() is None:
            return None
        if file.execute("SELECT 1 FROM streams WHERE id = ?", (id,)).fetchone() is None:
            return None
        query = (
            "SELECT first, last, data FROM streams WHERE id = ? AND last > ?"
            f" ORDER BY first LIMIT {_MOST_PARTS}"
        )
        rows = file.execute(query, (id, after)).fetchall()
    parts = [StreamPart(first, last, zlib.decompress(data)) for first, last, data in rows]
    return StreamState(parts, not runs and len(parts) < _MOST_PARTS)


def insert_part(file: sqlite3.Connection, id: str, part: StreamPart) -> int:
    """Store a part of a stream in a transaction. Returns its size in bytes."""
    packed = [zlib.compress(blob, 1) for blob in (part.data, part.tokens)]
    values = id, part.first, part.last, *packed, part.continuation
    # again the same, where the disk did not say that it had taken it
    file.execute("INSERT OR REPLACE INTO streams VALUES (?, ?, ?, ?, ?, ?)", values)
    return sum(map(len, packed)) + len(part.continuation)


def _size_stream(file: sqlite3.Connection, id: str) -> int:
    """Return the bytes of a stream; 0 if there is none."""
    query = (
        "SELECT ifnull(sum(length(data) + length(tokens) + length(continuation)), 0)"
        " FROM streams WHERE id = ?"
    )
    [(size_bytes,)] = file.execute(query, (id,))
    return int(size_bytes)


def _remove(file: sqlite3.Connection, id: str, key: str) -> bool:
    found = 0
    with transaction(file):
        for table in ("responses", "background"):
            query = f"DELETE FROM {table} WHERE id = ? AND key = ?"
            found += file.execute(query, (id, key)).rowcount
        if found:
            file.execute("DELETE FROM streams WHERE id = ?", (id,))
    return found > 0
