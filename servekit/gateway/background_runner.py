"""Runs responses with `background: true` through the gateway's own application.

Refusals that pass (429 and 503) are tried again for a day.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.background_store import BackgroundResponse, BackgroundStore, HeldResponse
from servekit.gateway.http.asgi import ASGIApp
from servekit.gateway.http.internal_request import InternalAnswer, post_internally
from servekit.gateway.leases import LOOK_EVERY_S, LeaseRunner
from servekit.gateway.response_store import ResponsesUnavailable
from servekit.gateway.routing.router import Router

log: Any = structlog.get_logger("servekit.gateway")

Json = dict[str, Any]
_PATH = "/v1/responses"
#: How long a response may wait for its turn.
_EXPIRES_S = 86400.0
#: The fields that the response had before it ran.
_KEPT = ("id", "created_at", "background", "previous_response_id", "store")


class BackgroundRunner(LeaseRunner[HeldResponse]):
    """Runs the responses that this gateway holds.

    `find` opens their store, once there is one. `app` answers a request of a caller (`ACTING`).
    """

    def __init__(self, router: Router, find: Callable[[], BackgroundStore], app: ASGIApp) -> None:
        super().__init__()
        self._router, self._find, self._app = router, find, app

    async def claim(self) -> list[HeldResponse] | None:
        if not self._router.access.rules.store_responses.max_bytes or self._router.draining:
            return None
        return await self._find().claim()

    async def work(self, row: HeldResponse) -> None:
        try:
            if (response := await self._find().read(row.id)) is not None:
                ended = await self._answer(response)
                await self._save(response, ended)
        except ResponsesUnavailable:  # the log has it
            await asyncio.sleep(LOOK_EVERY_S)
        except Exception:
            log.exception("background_interrupted", response=row.id)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _answer(self, response: BackgroundResponse) -> Json:
        """Return the response as it ended."""
        shown: Json = msgspec.json.decode(response.shown)
        body = msgspec.json.decode(response.body) | {"input": msgspec.Raw(response.input)}
        asked = msgspec.json.encode(body)
        while True:
            ACTING.set(self._router.access.callers.get(response.key))
            answer = await post_internally(self._app, _PATH, asked)
            if answer.status == 200:
                answered: Json = msgspec.json.decode(answer.body)
                return answered | {name: shown[name] for name in _KEPT}
            pause_s = answer.pause_s
            if pause_s is None or time.time() + pause_s > response.created + _EXPIRES_S:
                return shown | {"status": "failed", "error": _error_of(answer)}
            await asyncio.sleep(pause_s)

    async def _save(self, response: BackgroundResponse, ended: Json) -> None:
        """Store how a response ended, as soon as the disk takes it."""
        while True:
            try:
                rules = self._router.access.rules.store_responses
                await self._find().finish(response, ended, rules)
            except ResponsesUnavailable:
                await asyncio.sleep(LOOK_EVERY_S)  # the log has it
            else:
                return


def _error_of(answer: InternalAnswer) -> Json:
    error = msgspec.json.decode(answer.body)["error"]
    return {"code": error.get("code") or "server_error", "message": error["message"]}
