"""Runs responses with `background: true` through the gateway's own application.

Refusals that pass (429 and 503) are tried again for a day. Between two tries a response is put
back: those of a model that cannot serve would else keep all others waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from servekit.errors import ModelChanged
from servekit.gateway.api.openai.background_stream import KEPT, BackgroundStream
from servekit.gateway.api.openai.responses import STREAMED
from servekit.gateway.api.openai.responses_encoder import item_id
from servekit.gateway.auth.authorization import KeyRemoved
from servekit.gateway.http.asgi import ASGIApp
from servekit.gateway.http.internal_request import (
    InternalAnswer,
    post_internally,
    refuse_internally,
)
from servekit.gateway.routing.router import Router
from servekit.gateway.storage.background_store import (
    BackgroundResponse,
    BackgroundStore,
    HeldResponse,
)
from servekit.gateway.storage.leases import LEASE_S, LOOK_EVERY_S, LeaseRunner
from servekit.gateway.storage.response_store import StreamPart
from servekit.gateway.storage.store_file import ResponsesUnavailable

log: Any = structlog.get_logger("servekit.gateway")

Json = dict[str, Any]
_PATH = "/v1/responses"
#: How long a response may wait for its turn.
_EXPIRES_S = 86400.0
#: How often the new events of a stream are stored.
_WRITE_EVERY_S = 0.2
_UNKNOWN = {"code": "server_error", "message": "the stream was interrupted again and again"}


class BackgroundRunner(LeaseRunner[HeldResponse]):
    """Runs the responses that this gateway holds.

    `find` opens their store, once there is one. `app` answers a request of a caller (`ACTING`).
    """

    def __init__(self, router: Router, find: Callable[[], BackgroundStore], app: ASGIApp) -> None:
        super().__init__(router)
        self._find, self._app = find, app
        #: Streams whose model was replaced: their answers begin again.
        self._changed: set[str] = set()

    async def claim(self) -> list[HeldResponse] | None:
        if not self._router.access.rules.store_responses.max_bytes or self._router.draining:
            return None
        return await self._find().claim_responses()

    async def work(self, row: HeldResponse) -> None:
        if self._router.draining:
            return
        try:
            with self.delay_end():
                if (response := await self._find().read_response(row.id)) is None:
                    return
                await (self._stream if response.stream else self._answer)(response)
        except ResponsesUnavailable:  # the log has it
            await asyncio.sleep(LOOK_EVERY_S)
        except Exception:
            log.exception("background_interrupted", response=row.id)
            with contextlib.suppress(ResponsesUnavailable):  # others may go on meanwhile
                await self._find().put_back(row.id, LEASE_S)

    async def _answer(self, response: BackgroundResponse) -> None:
        """Run a response, and store how it ended; one that is refused for now is put back."""
        shown, asked = _read_request(response)
        answer = await self._post(response, asked)
        if answer.status == 200:
            answered: Json = msgspec.json.decode(answer.body)
            for place, item in enumerate(answered["output"]):
                item["id"] = item_id(response.id, item["type"], place)
            await self._save(response, answered | {name: shown[name] for name in KEPT})
        elif not await self._put_back(response, answer.pause_s):
            await self._save(response, shown | {"status": "failed", "error": _error_of(answer)})

    async def _post(
        self,
        response: BackgroundResponse,
        asked: bytes,
        on_body: Callable[[bytes], None] | None = None,
    ) -> InternalAnswer:
        """Run a request in the name of the response's key, unless that has no tokens left."""
        try:
            caller = self._router.access.act_for(response.key)
        except KeyRemoved as error:
            return refuse_internally(error)
        if caller is not None and (refused := caller.check_tokens()) is not None:
            return refuse_internally(refused)
        return await post_internally(self._app, _PATH, asked, on_body)

    async def _put_back(self, response: BackgroundResponse, pause_s: float | None) -> bool:
        """Put a response back that can go on after a pause, unless it is a day old.

        Returns whether it is put back.
        """
        if pause_s is None or time.time() + pause_s > response.created + _EXPIRES_S:
            return False
        await self._find().put_back(response.id, pause_s)
        return True

    async def _stream(self, response: BackgroundResponse) -> None:
        """Run a response whose events are stored as they come.

        If it cannot go on now, it is put back; what is stored is then the begin of the next run.
        """
        shown, asked = _read_request(response)
        exact = response.id not in self._changed
        stream = await asyncio.to_thread(BackgroundStream, shown, response.stream, exact)
        STREAMED.set(stream)
        ended = asyncio.Event()
        writing = asyncio.get_running_loop().create_task(self._write(response.id, stream, ended))
        try:
            answer = await self._post(response, asked, stream.add_events)
            ended.set()
            await writing
        finally:
            writing.cancel()
        pause_s: float | None = LOOK_EVERY_S
        error = stream.error
        if answer.status != 200:
            pause_s, error = answer.pause_s, _error_of(answer)
        if error is not None and error["code"] == ModelChanged.code:
            self._changed.add(response.id)  # perhaps the other model writes the same
        if stream.end is None:
            if await self._put_back(response, pause_s):
                return
            stream.fail(error or _UNKNOWN)
        self._changed.discard(response.id)
        await self._save(response, stream.end or shown, stream.take_part())

    async def _write(self, id: str, stream: BackgroundStream, ended: asyncio.Event) -> None:
        """Store the events of a stream, but for the last ones of a response that is done."""
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WRITE_EVERY_S):
                    await ended.wait()
            if stream.end is None and (part := stream.take_part()) is not None:
                await self._append(id, part)

    async def _append(self, id: str, part: StreamPart) -> None:
        while True:
            try:
                await self._find().append(id, part)
            except ResponsesUnavailable:
                await asyncio.sleep(LOOK_EVERY_S)  # the log has it
            else:
                return

    async def _save(
        self, response: BackgroundResponse, ended: Json, last: StreamPart | None = None
    ) -> None:
        """Store how a response ended, as soon as the disk takes it."""
        while True:
            try:
                rules = self._router.access.rules.store_responses
                await self._find().finish_response(response, ended, rules, last)
            except ResponsesUnavailable:
                await asyncio.sleep(LOOK_EVERY_S)  # the log has it
            else:
                return


def _read_request(response: BackgroundResponse) -> tuple[Json, bytes]:
    """Return a response before it ran, and the request to run it by."""
    body = msgspec.json.decode(response.body) | {"input": msgspec.Raw(response.input)}
    return msgspec.json.decode(response.shown), msgspec.json.encode(body)


def _error_of(answer: InternalAnswer) -> Json:
    error = msgspec.json.decode(answer.body)["error"]
    return {"code": error.get("code") or "server_error", "message": error["message"]}
