"""Responses with `background: true` that are not done, in the file of stored responses.

A gateway runs one while it holds its lease (`leases`). The row of a response that is not done goes
in the transaction that stores the response: each is answered once, whatever dies.
"""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path
from typing import Any

import msgspec

from servekit.errors import RequestError
from servekit.gateway.storage.leases import LeasedStore, claim_rows
from servekit.gateway.storage.response_store import (
    StoredResponse,
    StreamPart,
    insert_part,
    insert_response,
    open_responses,
)
from servekit.gateway.storage.store_file import transaction
from servekit.protocol.access import ResponseStorage

Json = dict[str, Any]
#: The most responses of a key that are not done.
_MOST_OF_KEY = 1000
#: The most that a gateway runs at once.
_MOST_HELD = 64
#: The keys take turns.
_TURN = "row_number() OVER (PARTITION BY key ORDER BY created), created"


class TooManyInBackground(RequestError):
    """The key has too many responses with `background: true` that are not done, or they would hold
    more of server.store_responses.max_bytes than they leave free. Wait for some, or cancel some.
    """

    status = 429
    code = "too_many_in_background"


class NotInBackground(RequestError):
    """Only a response with `background: true` can be cancelled. End the others by closing the
    connection.
    """

    code = "not_in_background"


class BackgroundResponse(msgspec.Struct):
    """A response that is not done.

    `shown` is the response as its client gets it, `body` the request without its input, `stream`
    what is stored of its stream: at least one part if it has a stream.
    """

    id: str
    key: str
    created: float
    shown: bytes
    input: bytes
    body: bytes
    stream: list[StreamPart] = []


class HeldResponse(msgspec.Struct):
    """The id of a response that this gateway runs."""

    id: str


class BackgroundStore(LeasedStore):
    """The responses that are not done, in the file of stored responses at `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__(open_responses(path), "background")

    async def add(self, response: BackgroundResponse, rules: ResponseStorage) -> None:
        """Add a response that is to run. Raises TooManyInBackground."""

        def insert_row(file: sqlite3.Connection) -> None:
            parts = response.shown, response.input, response.body
            packed = [zlib.compress(part, 1) for part in parts]
            size_bytes = sum(map(len, packed))
            with transaction(file):
                size_bytes += sum(insert_part(file, response.id, one) for one in response.stream)
                _check_share(file, response.key, size_bytes, rules.max_bytes)
                query = "INSERT INTO background VALUES (?, ?, ?, ?, ?, ?, ?, '', 0)"
                values = response.id, response.key, response.created, size_bytes
                file.execute(query, (*values, *packed))

        await self._run(insert_row)

    async def claim_responses(self) -> list[HeldResponse]:
        """Renew the leases of this gateway, take what nobody runs, and return all held."""

        def claim_held(file: sqlite3.Connection) -> list[HeldResponse]:
            if file.execute("SELECT 1 FROM background LIMIT 1").fetchone() is None:
                return []
            claim_rows(file, "background", "1", _TURN, self._owner, _MOST_HELD)
            rows = file.execute("SELECT id FROM background WHERE owner = ?", (self._owner,))
            return [HeldResponse(id) for (id,) in rows]

        return await self._run(claim_held)

    async def read_response(self, id: str) -> BackgroundResponse | None:
        """Return a response that this gateway holds; None if it holds it no longer."""

        def select_row(file: sqlite3.Connection) -> BackgroundResponse | None:
            columns = "key, created, response, input, body"
            query = f"SELECT {columns} FROM background WHERE id = ? AND owner = ?"
            if (row := file.execute(query, (id, self._owner)).fetchone()) is None:
                return None
            key, created, *packed = row
            stream = _read_parts(file, id)
            shown, asked, body = map(zlib.decompress, packed)
            return BackgroundResponse(id, key, created, shown, asked, body, stream)

        return await self._run(select_row)

    async def append(self, id: str, part: StreamPart) -> bool:
        """Add to the stream of a response. Returns False if this gateway holds it no longer."""

        def append(file: sqlite3.Connection) -> bool:
            with transaction(file):
                query = "SELECT 1 FROM background WHERE id = ? AND owner = ?"
                if file.execute(query, (id, self._owner)).fetchone() is None:
                    return False
                size_bytes = insert_part(file, id, part)
                query = "UPDATE background SET bytes = bytes + ? WHERE id = ?"
                file.execute(query, (size_bytes, id))
                return True

        return await self._run(append)

    async def finish_response(
        self,
        done: BackgroundResponse,
        response: Json,
        rules: ResponseStorage,
        last: StreamPart | None = None,
    ) -> None:
        """Store how a response, and its stream, ended, while this gateway holds it."""
        stored = StoredResponse(_encode(response), done.input)

        def remove_row(file: sqlite3.Connection) -> None:
            with transaction(file):
                query = "DELETE FROM background WHERE id = ? AND owner = ?"
                if file.execute(query, (done.id, self._owner)).rowcount:
                    if last is not None:
                        insert_part(file, done.id, last)
                    _store(file, done.id, done.key, stored, rules)

        await self._run(remove_row)

    async def cancel(self, id: str, key: str, rules: ResponseStorage) -> None:
        """Store a response of the key as cancelled, unless it is done."""

        def mark_cancelled(file: sqlite3.Connection) -> None:
            with transaction(file):
                query = "SELECT response, input FROM background WHERE id = ? AND key = ?"
                for row in file.execute(query, (id, key)).fetchall():
                    file.execute("DELETE FROM background WHERE id = ?", (id,))
                    shown, asked = map(zlib.decompress, row)
                    cancelled = msgspec.json.decode(shown) | {"status": "cancelled"}
                    _end_stream(file, id, "response_cancelled", "the response was cancelled")
                    _store(file, id, key, StoredResponse(_encode(cancelled), asked), rules)

        await self._run(mark_cancelled, may_use_reserve=True)


_encode = msgspec.json.Encoder().encode


def _store(
    file: sqlite3.Connection, id: str, key: str, stored: StoredResponse, rules: ResponseStorage
) -> None:
    """Store a response; one that is too large is stored as one that failed."""
    if insert_response(file, id, key, stored, rules):
        return
    # of a stream that is too large only the client's own copy is left
    file.execute("DELETE FROM streams WHERE id = ?", (id,))
    error = {
        "code": "storage_full",
        "message": "the response is over server.store_responses.max_bytes",
    }
    failed: Json = {"status": "failed", "error": error, "output": [], "usage": None}
    response = _encode(msgspec.json.decode(stored.response) | failed)
    insert_response(file, id, key, StoredResponse(response, b"[]"), rules)


def _check_share(file: sqlite3.Connection, key: str, size_bytes: int, max_bytes: int) -> None:
    """Raise TooManyInBackground if a key may not hold so much more.

    Its responses may hold as much as all keys leave free: one key has half of the room, and each
    that comes later half of the rest. This is the dynamic threshold of shared buffers (Choudhury
    and Hahne, 1998), which needs no number of keys.
    """
    query = "SELECT count(*), ifnull(sum(bytes), 0) FROM background WHERE key = ?"
    [(count, held)] = file.execute(query, (key,))
    [(of_all,)] = file.execute("SELECT ifnull(sum(bytes), 0) FROM background")
    said = ""
    if count >= _MOST_OF_KEY:
        said = f"{count} responses of the key are not done, and {_MOST_OF_KEY} may wait"
    elif held + size_bytes > max(0, max_bytes - of_all - size_bytes):
        said = (
            f"the responses of the key that are not done hold {held} bytes, and this one has"
            f" {size_bytes}; together they may hold as much as they leave free, and"
            f" {max(0, max_bytes - of_all)} bytes of server.store_responses.max_bytes are free"
        )
    if said:
        raise TooManyInBackground(
            f"background: {said}; wait for some, or cancel some",
            param="background",
            retry_after_s=10.0,
        )


def _read_parts(file: sqlite3.Connection, id: str) -> list[StreamPart]:
    query = (
        "SELECT first, last, data, tokens, continuation FROM streams WHERE id = ? ORDER BY first"
    )
    return [
        StreamPart(first, last, zlib.decompress(data), zlib.decompress(tokens), continuation)
        for first, last, data, tokens, continuation in file.execute(query, (id,))
    ]


def _end_stream(file: sqlite3.Connection, id: str, code: str, message: str) -> None:
    """Add an error as the last event of a stream, if there is one."""
    [(last,)] = file.execute("SELECT max(last) FROM streams WHERE id = ?", (id,))
    if last is not None:
        event = {"type": "error", "sequence_number": last + 1, "code": code, "message": message}
        data = b"event: error\ndata: %b\n\n" % _encode(event | {"param": None})
        insert_part(file, id, StreamPart(last + 1, last + 1, data))
