"""OpenAI's /v1/files: what batches read, and what they write."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse
from fastapi.responses import Response as Reply
from msgspec import Struct
from starlette.requests import ClientDisconnect

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.fields import UnixTime, doc
from servekit.gateway.api.multipart import FormReader, find_boundary
from servekit.gateway.api.paging import query_parameters, read_limit
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.storage.batch_store import BatchStore, StoredFile, TooMuchStored, expiry
from servekit.gateway.storage.store_file import ResponsesUnavailable
from servekit.protocol.access import BatchRules

_MOST_FILES = 10_000
_MOST_FIELD_BYTES = 4096
#: The parser's own limit; RFC 2046 allows 70.
_MOST_BOUNDARY_BYTES = 256
#: What is parsed, and written to the disk, at once in a thread.
_WRITE_BYTES = 2**20
PAGE_PARAMETERS = query_parameters(
    ("limit", "The most entries", {"type": "integer", "minimum": 1}),
    ("after", "Only entries after the one of this id", {"type": "string"}),
)


class ExpiresAfter(Struct):
    """When a file is removed."""

    anchor: Annotated[Literal["created_at"], doc("The time that the seconds begin at")]
    seconds: Annotated[int, doc("How long the file is kept", ge=3600, le=2592000)]


class FileObject(Struct):
    """A file."""

    id: Annotated[str, doc("The id of the file", "file-0f9c5bde0e7b35f4db8396fb")]
    object: Literal["file"]
    bytes: Annotated[int, doc("Its size, in bytes")]
    created_at: UnixTime
    expires_at: Annotated[int, doc("Unix time at which it is removed, s")]
    filename: Annotated[str, doc("Its name", "requests.jsonl")]
    purpose: Annotated[Literal["batch", "batch_output"], doc("What it is for")]
    status: Literal["processed"]


class FileList(Struct):
    """A page of files."""

    object: Literal["list"]
    data: Annotated[list[FileObject], doc("The files, the newest first")]
    first_id: Annotated[str | None, doc("The first id of the page")]
    last_id: Annotated[str | None, doc("The last id of the page")]
    has_more: Annotated[bool, doc("Whether there are further ones")]


class RemovedFile(Struct):
    """A file that was deleted."""

    id: Annotated[str, doc("The id of the file", "file-0f9c5bde0e7b35f4db8396fb")]
    object: Literal["file"]
    deleted: Annotated[bool, doc("Always true")]


class NotServed(RequestError):
    """There are no files and no batches here. Set server.batches in the configuration file."""

    status = 404
    code = "not_found"


def owner() -> str:
    """Return the name of the current caller's key; "" without keys."""
    caller = ACTING.get()
    return "" if caller is None else caller.rule.name


def reply(body: Any) -> Reply:
    return Reply(msgspec.json.encode(body), media_type="application/json")


def page(entries: list[Any], request: Request, default: int, most: int) -> dict[str, Any]:
    """Return the entries that `after` and `limit` ask for. Raises RequestError."""
    query = request.query_params
    limit = read_limit(query, default, most)
    if (after := query.get("after")) is not None:
        at = next((n for n, one in enumerate(entries) if one.id == after), None)
        if at is None:
            raise RequestError(f"after: the list has no {after[:100]!r}", param="after")
        entries = entries[at + 1 :]
    found = entries[:limit]
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    more = len(found) < len(entries)
    return {
        "object": "list", "data": found, "first_id": first, "last_id": last, "has_more": more
    }  # fmt: skip


def add_files(
    app: FastAPI, find_store: Callable[[], BatchStore], rules: Callable[[], BatchRules]
) -> None:
    """Add the endpoints of files. `find_store` raises NotServed where there are none."""
    uploading: Counter[str] = Counter()  # bytes of files that are not recorded yet, by key

    @app.post("/v1/files", tags=["OpenAI"], summary="Upload a file for a batch",
              openapi_extra={"requestBody": _FORM})  # fmt: skip
    async def upload(request: Request) -> Reply:
        store = find_store()
        room = await store.check_room(owner(), rules())
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > room + _MOST_FIELD_BYTES:
            raise _no_room(room)
        return reply(_show(await _receive(request, store, room, rules(), uploading)))

    @app.get("/v1/files", tags=["OpenAI"], summary="The files of the key",
             openapi_extra={"parameters": PAGE_PARAMETERS})  # fmt: skip
    async def list_all(request: Request) -> Reply:
        found = await find_store().list_files(owner(), request.query_params.get("purpose"))
        if request.query_params.get("order") == "asc":
            found.reverse()
        return reply(page([_show(one) for one in found], request, _MOST_FILES, _MOST_FILES))

    @app.get("/v1/files/{id}", tags=["OpenAI"], summary="A file")
    async def read(id: str) -> Reply:
        return reply(_show(await find_store().find_file(id, owner())))

    @app.get("/v1/files/{id}/content", tags=["OpenAI"], summary="What is in a file")
    async def content(id: str) -> Reply:
        store = find_store()
        file = await store.find_file(id, owner())
        if not store.path(file.id).is_file():
            raise ResponsesUnavailable("the file is gone from the run directory; upload it again")
        return FileResponse(store.path(file.id), media_type="application/octet-stream")

    @app.delete("/v1/files/{id}", tags=["OpenAI"], summary="Delete a file")
    async def remove(id: str) -> Reply:
        store = find_store()
        await store.find_file(id, owner())
        await store.remove_file(id)
        return reply(RemovedFile(id, "file", True))


_FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"enum": ["batch"]},
                    "expires_after[anchor]": {"enum": ["created_at"]},
                    "expires_after[seconds]": {
                        "type": "integer",
                        "minimum": 3600,
                        "maximum": 2592000,
                    },
                },
            }
        }
    },
}


def _no_room(room: int) -> TooMuchStored:
    return TooMuchStored(
        f"file: the key's files may grow by {room} bytes only; delete some, or raise"
        " server.batches.max_bytes",
        param="file",
    )


def _show(file: StoredFile) -> FileObject:
    created, expires = int(file.created), int(file.expires)
    return FileObject(
        file.id, "file", file.bytes, created, expires, file.name,
        file.purpose, "processed",  # type: ignore[arg-type]
    )  # fmt: skip


async def _receive(
    request: Request, store: BatchStore, room: int, rules: BatchRules, uploading: Counter[str]
) -> StoredFile:
    """Write the file of a form to the disk as it arrives, and record it.

    All that a key is `uploading` has to fit: else many slow uploads fill the disk.
    """
    boundary = find_boundary(request.headers.get("content-type", "").encode("latin-1"))
    if not boundary or len(boundary) > _MOST_BOUNDARY_BYTES:
        raise Unsupported("send a form (multipart/form-data) with `file` and `purpose`")
    written: Path | None = None
    key, mine = owner(), -_MOST_FIELD_BYTES
    try:
        written = store.make_path()
        with written.open("wb") as out:
            form = FileForm(boundary, out, room)
            pending = bytearray()
            async for data in request.stream():
                grown, mine = max(0, mine), mine + len(data)
                uploading[key] += max(0, mine) - grown
                if uploading[key] > room:
                    raise _no_room(room)
                pending += data
                if len(pending) >= _WRITE_BYTES:
                    await asyncio.to_thread(form.take_piece, bytes(pending))
                    pending.clear()
            await asyncio.to_thread(form.finish, bytes(pending))
        now_s = time.time()
        id, expires = f"file-{secrets.token_hex(12)}", expiry(now_s, rules, form.expires_after_s)
        file = StoredFile(id, key, "batch", form.name, form.size_bytes, now_s, expires)
        await store.add_file(written, file, rules)
    except ClientDisconnect:
        raise RequestError("the upload was not complete") from None
    except OSError as error:
        said = os.strerror(error.errno or 0)
        raise ResponsesUnavailable(f"the file cannot be kept: {said}") from None
    finally:
        uploading[key] -= max(0, mine)
        if written is not None:
            written.unlink(missing_ok=True)
    return file


def _read_expires_after(fields: Mapping[str, bytes]) -> int | None:
    """Return the seconds that a form asks for, if it does. Raises RequestError."""
    asked = {name: value for name, value in fields.items() if name.startswith("expires_after")}
    if not asked:
        return None
    try:
        told = {name[len("expires_after[") : -1]: asked[name].decode() for name in asked}
        return msgspec.convert(told, ExpiresAfter, strict=False).seconds
    except (msgspec.ValidationError, UnicodeDecodeError):
        said = (
            "expires_after: expected expires_after[anchor], `created_at`, and"
            " expires_after[seconds], 3600 to 2592000"
        )
        raise RequestError(said, param="expires_after") from None


class FileForm(FormReader):
    """A form whose part `file` goes to `out`, up to `room` bytes."""

    def __init__(self, boundary: bytes, out: IO[bytes], room: int) -> None:
        super().__init__(boundary)
        self._out, self._room = out, room
        self.size_bytes, self.name = 0, ""
        self.expires_after_s: int | None = None
        self._fields: dict[str, bytes] = {}
        self._part = ""
        self._has_file = False

    def finish(self, data: bytes) -> None:
        """Read the last piece, and check that all is there. Raises RequestError and OSError."""
        super().finish(data)
        if not self._has_file:
            raise RequestError("file: the form has none", param="file")
        if (purpose := self._fields.get("purpose", b"")) != b"batch":
            shown = purpose.decode("utf-8", "replace")[:100]
            raise RequestError(f"purpose: expected `batch`, got {shown!r}", param="purpose")
        self.expires_after_s = _read_expires_after(self._fields)

    def begin_part(self, options: dict[bytes, bytes]) -> None:
        self._part = options.get(b"name", b"").decode("utf-8", "replace")
        if self._part != "file":
            return
        if self._has_file:
            raise RequestError("file: the form has several; upload each", param="file")
        self._has_file = True
        name = options.get(b"filename", b"file").replace(b"%22", b'"')  # as HTML has it
        self.name = name.decode("utf-8", "replace")[:255]

    def add_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == "file":
            self.size_bytes += end - start
            if self.size_bytes > self._room:
                raise _no_room(self._room)
            self._out.write(data[start:end])
            return
        held = self._fields.get(self._part, b"") + data[start:end]
        if len(held) > _MOST_FIELD_BYTES or len(self._fields) > 32:
            raise RequestError(f"{self._part[:64]}: this field of the form is too long")
        self._fields[self._part] = held
