"""The requests of batches, which run through the gateway's own application as a client's do.

A line waits until no other request waits for its model and a worker has a free slot; what then
comes from clients goes before it in every queue. Refusals that pass (429 and 503) are tried again
until the batch expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog

from servekit.errors import ModelNotFound
from servekit.gateway.api.openai.response import new_id
from servekit.gateway.auth.authorization import KeyRemoved
from servekit.gateway.http.asgi import ASGIApp
from servekit.gateway.http.internal_request import (
    InternalAnswer,
    post_internally,
    refuse_internally,
)
from servekit.gateway.http.request_context import BATCHED
from servekit.gateway.routing.router import Router
from servekit.gateway.storage.batch_store import MOST_HELD, Batch, BatchStore
from servekit.gateway.storage.leases import LEASE_S, LOOK_EVERY_S, LeaseRunner
from servekit.gateway.storage.store_file import ResponsesUnavailable
from servekit.protocol.access import BatchRules

log: Any = structlog.get_logger("servekit.gateway")

Json = dict[str, Any]
_SWEEP_EVERY_S = 60.0
#: How often a line looks whether its model is idle.
_IDLE_EVERY_S = 0.05
#: Time without a request of a batch after which others that wait are run in its place.
_STUCK_S = 60.0
_MOST_LINES = 50_000
_MOST_ID_CHARS = 512
_encode = msgspec.json.Encoder().encode


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str = ""
    stream: bool | None = None
    background: bool | None = None


class LineError(Exception):
    """A line that is no request; `custom_id` is its own, if it has one."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message, custom_id


class BatchRunner(LeaseRunner[Batch]):
    """Runs the batches that this gateway holds.

    `find` opens their store, once there is one. `app` answers a request of a caller (`ACTING`).
    """

    def __init__(
        self, router: Router, find: Callable[[], BatchStore], app: ASGIApp, max_body_bytes: int
    ) -> None:
        super().__init__(router)
        self._find, self._app = find, app
        self._max_body_bytes = max_body_bytes
        self._running = 0
        self._freed = asyncio.Event()
        self._cancelling: dict[str, asyncio.Event] = {}
        self._asking: Counter[str] = Counter()  # requests that run, by batch
        self._moved_s: dict[str, float] = {}  # time of the last result, by batch
        self._swept_s = 0.0

    @property
    def _store(self) -> BatchStore:
        return self._find()

    @property
    def _rules(self) -> BatchRules:
        return self._router.access.rules.batches

    async def claim(self) -> list[Batch] | None:
        if not self._rules.max_bytes or self._router.draining:
            return None
        if time.monotonic() - self._swept_s > _SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            await self._store.sweep(self._rules)
        held = await self._store.claim_batches()
        for batch in held:
            if batch.status == "cancelling" and batch.id in self._cancelling:
                self._cancelling[batch.id].set()
        if len(held) < MOST_HELD:
            return held
        stuck = [batch for batch in held if self._is_stuck(batch)]
        for batch in stuck:
            await self._store.put_back(batch.id, LEASE_S)
        return [batch for batch in held if batch not in stuck]

    def _is_stuck(self, batch: Batch) -> bool:
        """Return whether a batch waits for its model, or for the tokens of its key."""
        now_s = time.monotonic()
        moved_s = self._moved_s.get(batch.id, now_s)
        return not self._asking[batch.id] and now_s - moved_s > _STUCK_S

    async def work(self, batch: Batch) -> None:
        self._cancelling[batch.id] = asyncio.Event()
        self._moved_s[batch.id] = time.monotonic()
        try:
            await self._run_batch(batch)
        except asyncio.CancelledError:
            raise
        except (ResponsesUnavailable, OSError, ExceptionGroup) as error:
            if not isinstance(error, ResponsesUnavailable):
                first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                log.warning("batch_interrupted", batch=batch.id, reason=repr(first))
            await asyncio.sleep(LOOK_EVERY_S)
        finally:
            del self._cancelling[batch.id], self._moved_s[batch.id], self._asking[batch.id]

    async def _run_batch(self, batch: Batch) -> None:
        path, most = self._store.path(batch.record["input_file_id"]), self._max_body_bytes
        if batch.status == "validating":
            total, errors = await asyncio.to_thread(validate_file, path, most)
            if not await self._store.begin(batch, total, errors):
                return
        status, errors = "cancelled", []
        if batch.status != "cancelling":
            if await asyncio.to_thread(path.exists):
                status = await self._run_until(batch, path)
            else:
                said = "the file is gone from the server's disk; upload it again"
                status, errors = "failed", [_file_error("invalid_file", said)]
        await self._store.finish_batch(batch.id, status, self._rules, errors)

    async def _run_until(self, batch: Batch, path: Path) -> str:
        """Run the lines, until the batch is cancelled or expires; return how it ended."""
        loop = asyncio.get_running_loop()
        lines = loop.create_task(self._run_lines(batch, path))
        cancelled = loop.create_task(self._cancelling[batch.id].wait())
        try:
            left_s = max(0.0, batch.expires - time.time())
            await asyncio.wait(
                (lines, cancelled), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ended = lines.done()
            for task in (lines, cancelled):
                task.cancel()
            await asyncio.gather(lines, cancelled, return_exceptions=True)
        if ended:
            lines.result()
            return "completed"
        if cancelled.done() and not cancelled.cancelled():
            return "cancelled"
        error = "batch_expired", "the completion window ended before this request was executed"
        async for number, line in self._lines_left(batch, path):
            custom_id = line.custom_id
            await self._refuse(batch, number, LineError(*error, custom_id))
        return "expired"

    async def _run_lines(self, batch: Batch, path: Path) -> None:
        BATCHED.set(True)  # in this task, and those that it starts
        room = asyncio.Semaphore(max(1, self._rules.concurrent))

        async def run_line(number: int, line: _Line) -> None:
            try:
                await self._run_line(batch, number, line)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            async for number, line in self._lines_left(batch, path):
                if isinstance(line, LineError):
                    await self._refuse(batch, number, line)
                    continue
                await room.acquire()
                group.create_task(run_line(number, line))

    async def _lines_left(
        self, batch: Batch, path: Path
    ) -> AsyncIterator[tuple[int, _Line | LineError]]:
        """Yield the lines without a result, with their numbers."""
        done = await self._store.done_lines(batch.id)
        seen: set[str] = set()
        lines = read_lines(path, self._max_body_bytes)
        while (chunk := await asyncio.to_thread(_take, lines)) is not None:
            for number, text in chunk:
                line: _Line | LineError
                try:
                    line = parse_line(text, batch.record["endpoint"])
                    if line.custom_id in seen:
                        raise LineError(
                            "duplicate_custom_id",
                            "custom_id: an earlier line has the same",
                            line.custom_id,
                        )
                    seen.add(line.custom_id)
                except LineError as error:
                    line = error
                if number not in done:
                    yield number, line

    async def _refuse(self, batch: Batch, number: int, error: LineError) -> None:
        result = _result(error.custom_id, None, {"code": error.code, "message": error.message})
        await self._save(batch, number, False, result)

    async def _save(self, batch: Batch, number: int, good: bool, result: bytes) -> None:
        """Keep the result of a line, as soon as the disk takes it."""
        while True:
            try:
                size = await self._store.save_result(batch.id, number, good=good, result=result)
            except ResponsesUnavailable:
                await asyncio.sleep(LOOK_EVERY_S)  # the log has it
            else:
                batch.bytes = max(batch.bytes, size)
                self._moved_s[batch.id] = time.monotonic()
                return

    async def _run_line(self, batch: Batch, number: int, line: _Line) -> None:
        """Run a line, and keep its result."""
        if batch.bytes > self._rules.max_bytes:
            said = "the results of the batch exceed server.batches.max_bytes"
            await self._refuse(batch, number, LineError("storage_full", said, line.custom_id))
            return
        model = msgspec.json.decode(line.body, type=_Body).model
        while True:
            await self._wait_until_idle(model)
            self._asking[batch.id] += 1
            try:
                with self.delay_end():
                    answer = await self._post(batch, line)
                    if (pause_s := answer.pause_s) is None:
                        await self._keep_answer(batch, number, line, answer)
                        return
            finally:
                self._asking[batch.id] -= 1
                self._running -= 1
                self._freed.set()
            await asyncio.sleep(pause_s)

    async def _post(self, batch: Batch, line: _Line) -> InternalAnswer:
        """Send a line in the name of the batch's key, if that may send another request."""
        try:
            caller = self._router.access.act_for(batch.key)
        except KeyRemoved as error:
            return refuse_internally(error)
        if caller is not None and (refused := caller.charge_request()) is not None:
            return refuse_internally(refused)
        return await post_internally(self._app, line.url, bytes(line.body))

    async def _keep_answer(
        self, batch: Batch, number: int, line: _Line, answer: InternalAnswer
    ) -> None:
        response = {
            "status_code": answer.status,
            "request_id": answer.headers.get(b"x-request-id", b"").decode("latin-1"),
            "body": _as_line(answer.body),
        }
        good = answer.status == 200
        await self._save(batch, number, good, _result(line.custom_id, response, None))

    async def _wait_until_idle(self, model: str) -> None:
        """Wait until the model has nothing better to do, and take a place among those that run."""
        while self._running >= self._rules.concurrent or not self._is_idle(model):
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_EVERY_S):
                    await self._freed.wait()
        self._running += 1

    def _is_idle(self, model: str) -> bool:
        if self._router.draining:
            return False
        try:
            route = self._router.find(model).base
        except ModelNotFound:
            return True  # it is refused at once
        if route.status.left_out:
            return False
        if route.ready:
            return not route.waiting and route.has_room
        residence = route.status.residence
        loads = residence is not None and residence.tier != "resident"
        return loads and not route.is_permanently_down and not route.waiting


def _result(custom_id: str | None, response: Json | None, error: Json | None) -> bytes:
    id = new_id("batch_req_")
    return _encode({"id": id, "custom_id": custom_id, "response": response, "error": error})


def _as_line(body: bytes) -> msgspec.Raw | str:
    """Return JSON on one line, any other body as text: forwarded requests may have either."""
    text = body.decode(errors="replace")
    try:
        return msgspec.Raw(msgspec.json.format(text, indent=-1))
    except (msgspec.DecodeError, RecursionError):
        return text


def read_lines(path: Path, most_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines that are not blank, numbered from 1; None for one that is too long."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(most_bytes + 1):
            number += 1
            if len(line) > most_bytes and not line.endswith(b"\n"):
                while (rest := file.readline(most_bytes)) and not rest.endswith(b"\n"):
                    pass
                yield number, None
            elif text := line.removeprefix(BOM_UTF8 if number == 1 else b"").strip():
                yield number, text


def _take(lines: Iterator[tuple[int, bytes | None]]) -> list[tuple[int, bytes | None]] | None:
    """Return the next lines, some of them or one that is long; None at the end."""
    found: list[tuple[int, bytes | None]] = []
    size_bytes = 0
    for number, text in lines:
        found.append((number, text))
        size_bytes += len(text or b"")
        if size_bytes > 2**18 or len(found) >= 64:
            break
    return found or None


def validate_file(path: Path, most_bytes: int) -> tuple[int, list[Json]]:
    """Return the number of lines, and why the file is no list of requests."""
    total = objects = 0
    try:
        for _, text in read_lines(path, most_bytes):
            total += 1
            if not objects and (text is None or _is_object(text)):
                objects += 1
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        return 0, [_file_error("invalid_file", f"the file cannot be read: {reason}")]
    if not total:
        return 0, [_file_error("empty_file", "the file has no lines; write one request in each")]
    if not objects:
        said = "no line of the file is a JSON object; write one request in each line (JSONL)"
        return 0, [_file_error("invalid_json_line", said, 1)]
    if total > _MOST_LINES:
        said = f"the file has {total} requests, over the limit of {_MOST_LINES}; send several files"
        return 0, [_file_error("too_many_requests", said)]
    return total, []


def _file_error(code: str, message: str, line: int | None = None) -> Json:
    return {"code": code, "message": message, "param": "input_file_id", "line": line}


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def parse_line(text: bytes | None, endpoint: str) -> _Line:
    """Return the request of a line. Raises LineError."""
    if text is None:
        raise LineError("body_too_large", "the line is over server.max_body_bytes")
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise LineError("invalid_line", f"the line is no request: {error}", _id_of(text)) from None
    if not 0 < len(line.custom_id) <= _MOST_ID_CHARS:
        said = f"custom_id: expected 1 to {_MOST_ID_CHARS} characters"
        raise LineError("invalid_custom_id", said, line.custom_id[:_MOST_ID_CHARS])
    if line.method != "POST":
        raise LineError("invalid_method", "method: expected POST", line.custom_id)
    if line.url != endpoint:
        said = f"url: the batch is for {endpoint}, and not for {line.url[:100]!r}"
        raise LineError("mismatched_endpoint", said, line.custom_id)
    try:
        body = msgspec.json.decode(line.body, type=_Body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise LineError("invalid_body", f"body: {error}", line.custom_id) from None
    for name in ("stream", "background"):
        if getattr(body, name):
            said = f"{name}: a batch has whole answers; leave it out"
            raise LineError("unsupported_parameter", said, line.custom_id)
    return line


def _id_of(text: bytes) -> str | None:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    id = found.get("custom_id") if isinstance(found, dict) else None
    return id[:_MOST_ID_CHARS] if isinstance(id, str) else None
