"""The responses of /v1/responses that are kept, in an SQLite file that all gateways here share.

One thread writes, in the order of the calls, and one reads, so that no reader waits for a writer.
They are kept for `days`, up to `ResponseStorage.max_bytes`, of which each key has its fair share.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec

from servekit.gateway.storage.store_file import StoreFile, await_work, transaction
from servekit.protocol.access import ResponseStorage

_VERSION = 4
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
    # since version 4: what each key holds
    "CREATE INDEX IF NOT EXISTS by_holder ON responses (key, created, bytes)",
    f"PRAGMA user_version = {_VERSION}",
)
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

        def note_written() -> None:
            self._pending_bytes -= size_bytes
            self._writing.pop(id, None)
            written.exception()  # the log has it

        def on_written(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(note_written)

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
            found = await await_work(self._reader.submit(lambda file: _find(file, id, key, since)))
            if found is not None or time.monotonic() > until_s:
                return found
            await asyncio.sleep(_LOOK_EVERY_S)

    async def read_stream(self, id: str, key: str, after: int) -> StreamState | None:
        """Return parts of a stream with events after the one of this number.

        None if the response has no stream, or is not the key's. Raises ResponsesUnavailable.
        """
        return await await_work(
            self._reader.submit(lambda file: _read_stream(file, id, key, after))
        )

    async def remove_response(self, id: str, key: str) -> bool:
        """Remove a response of the key. Returns whether there was one.

        Raises ResponsesUnavailable.
        """
        return await await_work(
            self._writer.submit(lambda file: _remove(file, id, key), may_use_reserve=True)
        )

    def close(self) -> None:
        """Write what is pending, if the disk takes it within two seconds."""
        self._reader.close()
        self._writer.close()


def open_responses(path: Path) -> StoreFile:
    """Return a connection to the file of stored responses."""
    return StoreFile(path, _TABLES, _VERSION)


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
    _make_room(file, key, size_bytes, rules.max_bytes)
    values = id, key, now_s, size_bytes, response, asked
    file.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", values)
    return True


def _make_room(file: sqlite3.Connection, key: str, size_bytes: int, max_bytes: int) -> None:
    """Remove responses until one of `size_bytes` fits, and some more.

    They are the oldest of the keys that hold more than their fair share. The one that comes fits
    also if it is more than that by itself.
    """
    [(held_bytes,)] = file.execute("SELECT bytes FROM total")
    if held_bytes + size_bytes <= max_bytes:
        return
    held = dict(file.execute("SELECT key, sum(bytes) FROM responses GROUP BY key"))
    held[key] = held.get(key, 0) + size_bytes
    room = int(max_bytes * (1 - _ROOM))
    share = _find_share(held.values(), room)
    if share < size_bytes:
        _remove_oldest(file, key, held.pop(key))
        share = _find_share(held.values(), room - size_bytes)
    for holder, holds in held.items():
        _remove_oldest(file, holder, holds - share)


def _find_share(held: Iterable[int], room: int) -> float:
    """Return the most that each may hold so that all fit: what some do not need is the others'."""
    few_first = sorted(held)
    for at, one in enumerate(few_first):
        share = room / (len(few_first) - at)
        if one > share:
            return share
        room -= one
    return math.inf


def _remove_oldest(file: sqlite3.Connection, key: str, excess: float) -> None:
    """Remove the oldest responses of a key that hold as much, in bytes."""
    if excess <= 0:
        return
    query = "SELECT created, bytes FROM responses WHERE key = ? ORDER BY created"
    for created, freed in file.execute(query, (key,)):
        excess -= freed
        if excess <= 0:
            file.execute("DELETE FROM responses WHERE key = ? AND created <= ?", (key, created))
            return
    file.execute("DELETE FROM responses WHERE key = ?", (key,))


def _find(file: sqlite3.Connection, id: str, key: str, since: float) -> StoredResponse | None:
    query = (
        "SELECT response, input, '' FROM responses WHERE id = ?1 AND key = ?2 AND created >= ?3"
        " UNION ALL SELECT response, input,"
        " CASE owner WHEN '' THEN 'queued' ELSE 'in_progress' END"
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
