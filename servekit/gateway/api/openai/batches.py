"""OpenAI's /v1/batches: many requests in a file, answered when nothing else waits."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response as Reply
from msgspec import Meta, Struct, convert

from servekit.errors import RequestError
from servekit.gateway.api.fields import UnixTime, doc
from servekit.gateway.api.openai.files import (
    PAGE_PARAMETERS,
    ExpiresAfter,
    NotServed,
    add_files,
    owner,
    page,
    reply,
)
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.http.asgi import ASGIApp, read_body
from servekit.gateway.routing.router import Router
from servekit.gateway.storage.batch_runner import BatchRunner
from servekit.gateway.storage.batch_store import Batch, BatchStore

#: The paths that a batch may be for, where the gateway has them.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_BATCHES = 100
_MOST_BODY_BYTES = 64 * 1024
_Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    doc("Kept with it", max_length=16),
]


class BatchRequest(Struct):
    """A batch to run."""

    input_file_id: Annotated[
        str, doc("A file with a request in each line", "file-0f9c5bde0e7b35f4db8396fb")
    ]
    endpoint: Annotated[str, doc("The path of all its requests", ENDPOINTS[0])]
    completion_window: Annotated[
        str, doc("How long it may take: a number, and s, m, h or d", "24h")
    ]
    metadata: _Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class RequestCounts(Struct):
    """The numbers of requests."""

    total: Annotated[int, doc("All requests")]
    completed: Annotated[int, doc("Those that have an answer")]
    failed: Annotated[int, doc("Those that have an error")]


class BatchError(Struct):
    """Why the file is no list of requests."""

    code: Annotated[str, doc("The kind of the error", "empty_file")]
    message: Annotated[str, doc("A sentence that says what to do about it")]
    param: Annotated[str | None, doc("The parameter")]
    line: Annotated[int | None, doc("The line of the file, from 1")]


class BatchErrors(Struct):
    """What is wrong with the file."""

    object: Literal["list"]
    data: Annotated[list[BatchError], doc("The errors")]


class BatchObject(Struct):
    """A batch."""

    id: Annotated[str, doc("The id of the batch", "batch_0f9c5bde0e7b35f4db8396fb")]
    object: Literal["batch"]
    endpoint: Annotated[str, doc("The path of its requests", ENDPOINTS[0])]
    errors: Annotated[BatchErrors | None, doc("Why it failed")]
    input_file_id: Annotated[str, doc("The file of its requests")]
    completion_window: Annotated[str, doc("As requested", "24h")]
    status: Annotated[
        Literal[
            "validating", "failed", "in_progress", "finalizing", "completed", "expired",
            "cancelling", "cancelled",
        ],
        doc("The progress", "completed"),
    ]  # fmt: skip
    output_file_id: Annotated[str | None, doc("The file of the answers, at the end")]
    error_file_id: Annotated[str | None, doc("The file of the errors, at the end")]
    created_at: UnixTime
    expires_at: Annotated[int, doc("Unix time at which the completion window ends, s")]
    request_counts: Annotated[RequestCounts, doc("How many requests are done")]
    metadata: _Metadata | None
    in_progress_at: Annotated[int | None, doc("Unix time of this state, s")] = None
    finalizing_at: Annotated[int | None, doc("Unix time of this state, s")] = None
    completed_at: Annotated[int | None, doc("Unix time of this state, s")] = None
    failed_at: Annotated[int | None, doc("Unix time of this state, s")] = None
    expired_at: Annotated[int | None, doc("Unix time of this state, s")] = None
    cancelling_at: Annotated[int | None, doc("Unix time of this state, s")] = None
    cancelled_at: Annotated[int | None, doc("Unix time of this state, s")] = None


class BatchList(Struct):
    """A page of batches."""

    object: Literal["list"]
    data: Annotated[list[BatchObject], doc("The batches, the newest first")]
    first_id: Annotated[str | None, doc("The first id of the page")]
    last_id: Annotated[str | None, doc("The last id of the page")]
    has_more: Annotated[bool, doc("Whether there are further ones")]


class Batches:
    """The endpoints of files and batches, and what runs these. `folder` is where files are."""

    def __init__(
        self, router: Router, folder: Path | None, app: ASGIApp, max_body_bytes: int
    ) -> None:
        self._router, self._folder, self._app = router, folder, app
        self._max_body_bytes = max_body_bytes

    @cached_property
    def _store(self) -> BatchStore:
        assert self._folder is not None
        return BatchStore(self._folder)

    def _find_store(self) -> BatchStore:
        if self._folder is None or not self._router.access.rules.batches.max_bytes:
            raise NotServed("there are no files and no batches here; set server.batches")
        return self._store

    async def run_batches(self) -> None:
        """Run batches until cancelled."""
        if self._folder is not None:
            await BatchRunner(
                self._router, lambda: self._store, self._app, self._max_body_bytes
            ).run_held_rows()

    def close(self) -> None:
        """Let other gateways go on with the batches. Blocks: call it in a thread."""
        if "_store" in self.__dict__:
            self._store.close()

    def add_routes(self, app: FastAPI, served: Collection[str]) -> None:
        """Add the endpoints; `served` are the paths that the gateway answers itself."""
        endpoints = [path for path in ENDPOINTS if path in served]
        add_files(app, self._find_store, lambda: self._router.access.rules.batches)

        @app.post("/v1/batches", tags=["OpenAI"], summary="Run a batch",
                  openapi_extra={"requestBody": _BODY})  # fmt: skip
        async def create(request: Request) -> Reply:
            store = self._find_store()
            body = await read_body(request.scope, request.receive, _MOST_BODY_BYTES)
            asked = decode(BatchRequest, body)
            if asked.endpoint not in endpoints:
                known = ", ".join(endpoints)
                raise RequestError(f"endpoint: expected one of {known}", param="endpoint")
            window_s = _read_window(asked.completion_window)
            file = await store.find_file(asked.input_file_id, owner())
            if file.purpose != "batch":
                said = "input_file_id: the file is the output of a batch"
                raise RequestError(said, param="input_file_id")
            batch = _make_batch(asked, window_s)
            await store.add_batch(batch, self._router.access.rules.batches)
            return reply(_show(batch))

        @app.get("/v1/batches", tags=["OpenAI"], summary="The batches of the key",
                 openapi_extra={"parameters": PAGE_PARAMETERS})  # fmt: skip
        async def list_all(request: Request) -> Reply:
            found = [_show(one) for one in await self._find_store().list_batches(owner())]
            return reply(page(found, request, 20, _MOST_BATCHES))

        @app.get("/v1/batches/{id}", tags=["OpenAI"], summary="A batch")
        async def read(id: str) -> Reply:
            return reply(_show(await self._find_store().find_batch(id, owner())))

        @app.post("/v1/batches/{id}/cancel", tags=["OpenAI"], summary="Cancel a batch")
        async def cancel(id: str) -> Reply:
            return reply(_show(await self._find_store().cancel_batch(id, owner())))


_BODY = {"required": True, "content": {"application/json": {"schema": {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {"type": "string", "examples": ["24h"]},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "output_expires_after": {
            "type": "object",
            "required": ["anchor", "seconds"],
            "properties": {
                "anchor": {"enum": ["created_at"]},
                "seconds": {"type": "integer", "minimum": 3600, "maximum": 2592000},
            },
        },
    },
}}}}  # fmt: skip


def _read_window(text: str) -> float:
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text)
    if found is None or (window_s := int(found[1]) * _UNITS_S[found[2]]) > 30 * 86400:
        said = "completion_window: expected a time such as 24h, 30 days at most"
        raise RequestError(said, param="completion_window")
    return window_s


def _make_batch(asked: BatchRequest, window_s: float) -> Batch:
    record: dict[str, Any] = {
        "endpoint": asked.endpoint,
        "errors": None,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "output_file_id": None,
        "error_file_id": None,
        "metadata": asked.metadata,
    }
    if (after := asked.output_expires_after) is not None:
        record["output_expires_after_s"] = after.seconds
    id, now_s = f"batch_{secrets.token_hex(12)}", time.time()
    return Batch(id, owner(), now_s, now_s + window_s, "validating", record, 0, 0, 0, 0)


def _show(batch: Batch) -> BatchObject:
    counts = RequestCounts(batch.total, batch.completed, batch.failed)
    told = {
        "id": batch.id,
        "object": "batch",
        "status": batch.status,
        "created_at": int(batch.created),
        "expires_at": int(batch.expires),
        "request_counts": counts,
    }
    return convert(batch.record | told, BatchObject)
