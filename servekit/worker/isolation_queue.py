"""Queue that runs a request suspected of killing workers in isolation.

A gateway marks a suspect with `Generate.alone_until`. Only the worker sees the requests of all
gateways, so only the worker can separate them:

    queue empty           requests start at once, at no cost
    suspect arrives       it is queued, and so is every later request of any gateway
    suspect is first      it waits until all running requests are proven or done; then all gateways
                          are sent `IsolationStarted`, and the suspect starts once its own gateway
                          has the message
    suspect proven, done  the next suspect follows in the same way; before any other request starts,
                          the gateways are sent `IsolationEnded`

So whenever the worker dies, the gateways can attribute the death to a request
(`gateway.routing.failures.retry_policy`). A message counts as delivered when it is in the gateway's
socket, because the worker may be killed by its very next action. A gateway that does not read is
waited for only briefly while other requests are queued: its suspect goes to the end of the queue. A
gateway that missed the message may count a death against its own requests by mistake, which is not
enough for quarantine.

Queued requests are not in the engine, so they do not count in the engine's progress.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from servekit.protocol.messages import Generate, IsolationEnded, IsolationStarted

if TYPE_CHECKING:
    from servekit.worker.gateway_connection import GatewayConnection
    from servekit.worker.runner import Runner

#: How long a gateway may take to read the message before the others continue without it.
HEARD_WITHIN_S = 1.0
#: How often a suspect's turn is polled, when no event signals it.
_LOOK_EVERY_S = 0.02


class QueuedRequest(NamedTuple):
    """A request that has not been started."""

    peer: GatewayConnection
    request: Generate
    job_id: int


class IsolationQueue:
    """The queue and the request that runs alone. Used only on the worker's event loop."""

    def __init__(self, runner: Runner) -> None:
        self.closed = False  # new requests are queued
        self._runner = runner
        self._queue: dict[int, QueuedRequest] = {}  # by job id, in order of arrival
        self._alone: QueuedRequest | None = None  # as last sent to the gateways
        self._changed = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None  # the loop's reference is weak

    def enqueue(self, held: QueuedRequest) -> None:
        """Queue a request."""
        self._queue[held.job_id] = held
        if not self.closed:
            self.closed = True
            self._serving = asyncio.get_running_loop().create_task(self._serve_queue())
            self._serving.add_done_callback(self._on_served)

    def withdraw(self, job_id: int) -> None:
        """Remove a cancelled request, whether it is queued or running."""
        self._queue.pop(job_id, None)
        self.wake()

    def wake(self) -> None:
        """Signal that a request was proven or has ended."""
        self._changed.set()

    def send_state(self, peer: GatewayConnection) -> None:
        """Inform a gateway that has just connected of the request that runs alone."""
        if self._alone is not None:
            peer.connection.send(self._isolation_message(peer))

    # ---- the turns

    async def _serve_queue(self) -> None:
        """Serve until the queue is empty and the gateways know that isolation has ended."""
        while self._queue or self._alone is not None:
            first = next(iter(self._queue.values()), None)
            if first is not None and first.request.alone_until:
                await self._try_suspect(first)
            elif self._alone is not None:
                await self._tell_gateways(None)
            else:
                self._start_others()
        self.closed = False

    def _on_served(self, task: asyncio.Task[None]) -> None:
        """Fail the engine if the queue's task failed, so that the worker is replaced."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._runner.engine.fatal = error

    async def _try_suspect(self, suspect: QueuedRequest) -> None:
        """Run a suspect, and return when no other request has to wait for it any more."""
        await self._wait_until(lambda: self._runner.is_settled or suspect.job_id not in self._queue)
        if suspect.job_id not in self._queue:
            return  # cancelled while it waited
        heard = await _has_heard(suspect.peer) and await self._tell_gateways(suspect)
        if self._queue.pop(suspect.job_id, None) is None:
            return  # cancelled while the gateways were told
        if heard:
            self._runner.start(*suspect)
            await self._wait_until(lambda: self._runner.cleared(suspect))
            return
        self._queue[suspect.job_id] = suspect
        if self._alone is not None:
            await self._tell_gateways(None)

    def _start_others(self) -> None:
        """Start all queued requests up to the next suspect."""
        for held in list(self._queue.values()):
            if held.request.alone_until:
                break
            del self._queue[held.job_id]
            self._runner.start(*held)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._changed.wait()

    # ---- messages to the gateways

    async def _tell_gateways(self, alone: QueuedRequest | None) -> bool:
        """Tell all gateways which request runs alone; return whether its own gateway knows."""
        self._alone = alone
        peers = [peer for peer in self._runner.peers if peer.greeted]
        for peer in peers:
            peer.flush()  # results that prove a request must arrive before the message
            peer.connection.send(self._isolation_message(peer))
        heard = await asyncio.gather(*map(_has_heard, peers))
        return alone is None or (alone.peer, True) in zip(peers, heard, strict=True)

    def _isolation_message(self, peer: GatewayConnection) -> IsolationStarted | IsolationEnded:
        if self._alone is None:
            return IsolationEnded()
        return IsolationStarted(self._alone.request.id if self._alone.peer is peer else 0)


async def _has_heard(peer: GatewayConnection) -> bool:
    """Return whether all messages to a gateway are in its socket."""
    try:
        async with asyncio.timeout(HEARD_WITHIN_S):
            return await peer.connection.drained()
    except TimeoutError:
        return False
