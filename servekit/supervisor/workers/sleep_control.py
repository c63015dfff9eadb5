"""Sleep and wake-up of one worker.

While asleep, it claims the GPU memory that it still holds; to wake, it is admitted as a starting
worker is.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog

from servekit.protocol.residency import Asleep, Awake, Sleep, SleepFailed, Wake
from servekit.supervisor.process.task_utils import unless

if TYPE_CHECKING:
    from servekit.protocol.messages import FromWorker
    from servekit.supervisor.lifecycle.launcher import AnyChild
    from servekit.supervisor.workers.worker_process import WorkerProcess

log: Any = structlog.get_logger("servekit.supervisor")

Answer = Asleep | Awake | SleepFailed

_DIED = "its worker died"


class SleepControl:
    """The sleep control of one replica. Every order is answered: by its worker, or by its death."""

    def __init__(self, replica: WorkerProcess) -> None:
        self._replica = replica
        self._answer: asyncio.Future[Answer] | None = None
        #: Held during admission: if the worker dies while it wakes, its next life waits.
        self.entering = asyncio.Lock()

    async def sleep(self, told: Callable[[], Awaitable[None]]) -> str:
        """Put it to sleep once its requests are done; return why that failed, or "".

        `told` returns when the gateways know that it takes no more requests.
        """
        replica = self._replica
        child = replica.child
        replica.set("asleep")
        await told()
        limit_s = replica.model.timeout_s + replica.model.load_timeout_s
        answer = await self._send(Sleep(), limit_s, child)
        if not isinstance(answer, SleepFailed) and replica.child is child:
            await replica.vram.fell_asleep()
        if replica.child is not child:
            return _DIED  # and its next incarnation is awake
        if not isinstance(answer, SleepFailed):
            log.info("worker_asleep", child=replica.name, after_s=answer.took_s)
            return ""
        if replica.state == "asleep" and child is not None and not replica.ending:
            replica.set("ready", f"it could not be put to sleep: {answer.message}")
        return answer.message

    async def wake(self) -> str:
        """Wake it, and let it serve; return why that failed, or ""."""
        replica = self._replica
        child = replica.child
        if child is None:
            return f"worker {replica.name} is {replica.state}"
        async with self.entering:
            reason = await unless(child.exited, replica.vram.enter())
            if replica.child is not child:
                replica.vram.leave()  # it may have been admitted after its death
        if reason is None or replica.child is not child:
            return _DIED
        if reason:
            return reason
        try:
            answer = await self._send(Wake(), replica.model.load_timeout_s, child)
        finally:
            if replica.child is child:
                replica.vram.loaded()
        if isinstance(answer, SleepFailed):
            return answer.message
        log.info("worker_awake", child=replica.name, after_s=answer.took_s)
        return await replica.adapters.join(replica, {}, functools.partial(self._is_awake, child))

    def _is_awake(self, child: object) -> None:
        replica = self._replica
        if replica.child is child and replica.state == "asleep" and not replica.ending:
            replica.pardon()
            replica.set("ready")

    async def _send(
        self, order: Sleep | Wake, limit_s: float, child: AnyChild[FromWorker] | None
    ) -> Answer:
        """Return its answer; end a worker that takes longer than `limit_s`."""
        replica = self._replica
        if replica.child is not child:
            return SleepFailed(_DIED)
        if child is None or replica.state != "asleep" or replica.ending:
            return SleepFailed(f"worker {replica.name} is {replica.state}")
        what = "sleep" if isinstance(order, Sleep) else "wake"
        cause = f"stalled: it did not {what} within {limit_s:g} s"
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._answer = answer
        timer = loop.call_later(limit_s, replica.give_up, cause)
        try:
            child.send(order)
            return await answer
        finally:
            timer.cancel()
            self._answer = None

    def answered(self, message: Answer) -> None:
        """Take the worker's answer."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def died(self) -> None:
        """Answer the open order of a worker that has died."""
        self.answered(SleepFailed(_DIED))
