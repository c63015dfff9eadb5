"""A worker that gives its device's memory back for a while, and takes it again.

It first takes no more requests, then finishes those that run, and only then has the engine sleep,
in a thread: pings are answered meanwhile. Awake it first brings a token back along the path that
requests take. What reaches it between is returned to its gateway, which keeps it waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from servekit.errors import LoadError, ServekitError
from servekit.protocol.residency import Asleep, Awake, Sleep, SleepFailed, Wake
from servekit.worker.runner import Runner

log: Any = structlog.get_logger("servekit.worker")

Order = Sleep | Wake
Answer = Asleep | Awake | SleepFailed

#: Between looks whether the last request is done.
_LOOK_EVERY_S = 0.02


class SleepControl:
    """Carries out what the supervisor orders, and answers each order.

    `probe` brings a token back; an engine that has been woken and cannot do that is `broken`.
    """

    def __init__(
        self,
        runner: Runner,
        send: Callable[[Answer], None],
        probe: Callable[[], Awaitable[None]],
        broken: Callable[[str], None],
    ) -> None:
        self._runner = runner
        self._send = send
        self._probe = probe
        self._broken = broken
        self._working: asyncio.Task[None] | None = None

    def take(self, order: Order) -> None:
        """An order of the supervisor, who gives the next one when this is answered."""
        self._working = asyncio.get_running_loop().create_task(self._carry_out(order))

    async def _carry_out(self, order: Order) -> None:
        began = time.monotonic()
        try:
            async with self._runner.engine_turn:  # no adapter is loaded meanwhile
                await (self._sleep() if isinstance(order, Sleep) else self._wake())
        except ServekitError as error:
            self._send(SleepFailed(error.message))
        except Exception as error:
            log.exception("neither slept nor woke", order=repr(order))
            self._send(SleepFailed(f"{type(error).__name__}: {error}"))
        else:
            took_s = round(time.monotonic() - began, 3)
            self._send(Asleep(took_s) if isinstance(order, Sleep) else Awake(took_s))

    async def _sleep(self) -> None:
        runner = self._runner
        runner.asleep = True
        try:
            # one that was cancelled may be in the step that runs
            while runner.busy or not runner.settled:  # noqa: ASYNC110 - requests end in many ways
                await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(runner.engine.sleep)
        except BaseException:
            runner.asleep = False  # it goes on awake
            raise
        log.info("asleep")

    async def _wake(self) -> None:
        await asyncio.to_thread(self._runner.engine.wake)
        self._runner.asleep = False
        try:
            await self._probe()
        except (LoadError, OSError) as error:
            self._broken(str(error))
            raise
        log.info("awake")
