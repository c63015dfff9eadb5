"""Sleep and wake-up of a worker: its device memory is released for a while and taken again.

The worker first refuses new requests, then finishes the running ones, and only then lets the engine
sleep, in a thread so that pings are still answered. After waking, it first generates a token along
the path of ordinary requests. Requests that arrive meanwhile are returned to their gateway, which
keeps them waiting.
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

#: Interval between checks whether the last request has ended.
_LOOK_EVERY_S = 0.02


class SleepControl:
    """Executor of the supervisor's sleep and wake commands; answers each command.

    `probe` generates a token; `broken` is called if the engine cannot do that after waking.
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

    def handle_order(self, order: Order) -> None:
        """Carry out a command; the supervisor sends the next one only after the answer."""
        self._working = asyncio.get_running_loop().create_task(self._carry_out(order))

    async def _carry_out(self, order: Order) -> None:
        began = time.monotonic()
        try:
            async with self._runner.engine_turn:  # no adapter is loaded meanwhile
                await (self._put_to_sleep() if isinstance(order, Sleep) else self._wake_engine())
        except ServekitError as error:
            self._send(SleepFailed(error.message))
        except Exception as error:
            log.exception("sleep_change_failed", order=repr(order))
            self._send(SleepFailed(f"{type(error).__name__}: {error}"))
        else:
            took_s = round(time.monotonic() - began, 3)
            self._send(Asleep(took_s) if isinstance(order, Sleep) else Awake(took_s))

    async def _put_to_sleep(self) -> None:
        runner = self._runner
        runner.asleep = True
        try:
            # A cancelled request may still be in the current step.
            while runner.busy or not runner.is_settled:  # noqa: ASYNC110 - requests end in many ways
                await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(runner.engine.sleep)
        except BaseException:
            runner.asleep = False  # it continues to serve
            raise
        log.info("engine_asleep")

    async def _wake_engine(self) -> None:
        await asyncio.to_thread(self._runner.engine.wake)
        self._runner.asleep = False
        try:
            await self._probe()
        except (LoadError, OSError) as error:
            self._broken(str(error))
            raise
        log.info("engine_awake")
