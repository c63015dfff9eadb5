"""Where a request that is suspected of killing workers is run alone: the turns that requests take.

A gateway marks a suspect with `Generate.alone_until`. Only the worker sees the requests of all
gateways, so it alone can keep them apart:

    the line is empty     what comes is started at once; nothing here costs it anything
    a suspect comes       it stands in line, and so does all that comes after it, of any gateway
    a suspect is first    it waits until all that runs is proven or done; then all gateways are told
                          `IsolationStarted`, and once its own has that, it is started
    it is proven or done  the next suspect follows in the same way; before anything else is started
                          the gateways are told `IsolationEnded`

So whichever way the worker dies, the gateways know whose death it was (`gateway.fate`). To know a
thing is to have it in one's socket: this process may be killed by the very next thing it does. A
gateway that does not read is waited for, but not for long where others stand in line: its suspect
goes to the end, and what it does not know costs its own requests a death that wasn't theirs, which
is not enough for quarantine.

What is held is not in the engine, and so has no part in the engine's progress.
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

#: How long a gateway may take to read what it is told, before the others go on without it.
HEARD_WITHIN_S = 1.0
#: How often it is looked whether a suspect's turn has come, where nothing says so.
_LOOK_EVERY_S = 0.02


class QueuedRequest(NamedTuple):
    """A request that has not been started."""

    peer: GatewayConnection
    request: Generate
    job_id: int


class IsolationQueue:
    """The line, and who is alone. All of it on the worker's event loop."""

    def __init__(self, runner: Runner) -> None:
        self.closed = False  # what comes now stands in line
        self._runner = runner
        self._line: dict[int, QueuedRequest] = {}  # by job id, in the order in which they came
        self._alone: QueuedRequest | None = None  # as the gateways were told
        self._changed = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None  # the loop itself keeps no reference

    def hold(self, held: QueuedRequest) -> None:
        """Have a request stand in line."""
        self._line[held.job_id] = held
        if not self.closed:
            self.closed = True
            self._serving = asyncio.get_running_loop().create_task(self._serve())
            self._serving.add_done_callback(self._served)

    def withdraw(self, job_id: int) -> None:
        """A request is cancelled, wherever it is."""
        self._line.pop(job_id, None)
        self.wake()

    def wake(self) -> None:
        """Something was proven, or has ended."""
        self._changed.set()

    def greet(self, peer: GatewayConnection) -> None:
        """A gateway has just connected: it has to know, too."""
        if self._alone is not None:
            peer.connection.send(self._word(peer))

    # ---- the turns

    async def _serve(self) -> None:
        """Until the line is empty, and the gateways know it."""
        while self._line or self._alone is not None:
            first = next(iter(self._line.values()), None)
            if first is not None and first.request.alone_until:
                await self._try(first)
            elif self._alone is not None:
                await self._tell(None)
            else:
                self._start_others()
        self.closed = False

    def _served(self, task: asyncio.Task[None]) -> None:
        """A worker that would hold its requests for ever is one to be replaced."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._runner.engine.fatal = error

    async def _try(self, suspect: QueuedRequest) -> None:
        """A suspect's turn, until nothing more has to be held for it."""
        await self._until(lambda: self._runner.settled or suspect.job_id not in self._line)
        if suspect.job_id not in self._line:
            return  # it was cancelled
        heard = await _heard(suspect.peer) and await self._tell(suspect)
        if self._line.pop(suspect.job_id, None) is None:
            return  # it was cancelled now
        if heard:
            self._runner.start(*suspect)
            await self._until(lambda: self._runner.cleared(suspect))
            return
        self._line[suspect.job_id] = suspect
        if self._alone is not None:
            await self._tell(None)

    def _start_others(self) -> None:
        """Start all up to the next suspect."""
        for held in list(self._line.values()):
            if held.request.alone_until:
                break
            del self._line[held.job_id]
            self._runner.start(*held)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK_EVERY_S)

    # ---- what the gateways are told

    async def _tell(self, alone: QueuedRequest | None) -> bool:
        """Tell all gateways who is alone; whether that one's own gateway has heard it."""
        self._alone = alone
        peers = [peer for peer in self._runner.peers if peer.greeted]
        for peer in peers:
            peer.flush()  # what was proven before is known before
            peer.connection.send(self._word(peer))
        heard = await asyncio.gather(*map(_heard, peers))
        return alone is None or (alone.peer, True) in zip(peers, heard, strict=True)

    def _word(self, peer: GatewayConnection) -> IsolationStarted | IsolationEnded:
        if self._alone is None:
            return IsolationEnded()
        return IsolationStarted(self._alone.request.id if self._alone.peer is peer else 0)


async def _heard(peer: GatewayConnection) -> bool:
    """Whether all that a gateway was told is in its socket."""
    try:
        async with asyncio.timeout(HEARD_WITHIN_S):
            return await peer.connection.drained()
    except TimeoutError:
        return False
