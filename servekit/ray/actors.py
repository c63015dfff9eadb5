"""The Ray actors of workers and gateways: their places, output and end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import structlog

from servekit.protocol.control.ray_messages import (
    Exited,
    GetStrayMemory,
    Measured,
    PlaceWorker,
    ReleasePlace,
    Running,
    Signal,
    Start,
    Started,
    StrayMemory,
    WorkerPlaced,
)
from servekit.protocol.transport.credentials import Renew, Role
from servekit.ray.certificates import Certificates
from servekit.ray.client import Cluster, Unable
from servekit.supervisor.lifecycle.remote_process import RemoteChild, RemoteControl
from servekit.supervisor.process.child_process import Exit
from servekit.supervisor.process.log_capture import Output, RotatingFile
from servekit.supervisor.scheduling.memory_requests import device
from servekit.supervisor.workers import gpu_memory
from servekit.supervisor.workers.gpu_memory import RemoteGpus
from servekit.system.gpu.gpus import Slot

log: Any = structlog.get_logger("servekit.supervisor")

#: How long a process may take to write its stacks, and these to arrive here.
_DUMP_S = 3.0
#: How long the release of a place may take.
VACATE_S = 15.0


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Arguments and environment of a process that starts in an actor, on the actor's host.

    `fingerprint` covers everything that defines the process: a running process with another
    fingerprint is not taken over.
    """

    args: tuple[str, ...]
    env: dict[str, str]  # overrides the node's own
    fingerprint: str
    log_path: Path
    role: Literal["worker", "gateway"] = "worker"
    pin: Literal["uuid", "index"] = "uuid"
    listen: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class _Place:
    """State of one process's place."""

    wait: Callable[[str], None]  # receives what the process waits for; "" when nothing
    measure: Callable[[RemoteGpus], None]  # receives its GPU information
    host: str = ""
    gpus: Slot = ()
    running: Running | None = None
    output: Output | None = None
    role: Role = "worker"
    child: RemoteChild[Any] | None = None
    ended: dict[int, asyncio.Future[Exited]] = field(default_factory=dict)  # by PID


class RayActors:
    """All actors of an instance, by the name of their process, and the certificates of these.

    Set `cluster` before use.
    """

    cluster: Cluster

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        self._places: dict[str, _Place] = {}

    async def enter(
        self,
        name: str,
        wait: Callable[[str], None],
        make_request: Callable[[int], PlaceWorker],
        measure: Callable[[RemoteGpus], None] = lambda told: None,
    ) -> str:
        """Wait for the place of `make_request`, given an id; return why there is none, or ""."""
        known = self._places.get(name)
        place = self._places[name] = known or _Place(wait, measure)
        place.wait, place.measure, place.host, place.gpus = wait, measure, "", ()
        measure(RemoteGpus())
        try:
            found: WorkerPlaced = await self.cluster.ask_driver(make_request)
        except Unable as error:
            return error.message
        finally:
            wait("")
        place.gpus = gpu_memory.make_slot(found.gpus, found.host)
        place.host, place.running = found.host, found.running
        measure(RemoteGpus(place.gpus, place.gpus))
        return ""

    async def start_process(
        self,
        name: str,
        order: StartOrder,
        incoming: Any,
        on_message: Callable[[Any], None],
        on_line: Callable[[str], None],
    ) -> RemoteChild[Any]:
        """Start a process in its place, or take over the one that runs there. Raises OSError."""
        place = self._places[name]
        place.output = output = Output(RotatingFile(order.log_path), on_line)
        place.role = order.role
        if place.running is not None:
            self._certificates.forget_certificate(order.role, name)  # its certificate is unknown
        running = place.running or await self._start(name, order, place)
        place.running = None
        ended = self._end_of(place, running.pid)
        child: RemoteChild[Any] = RemoteChild(
            name,
            running.address,
            self._certificates.own,
            incoming,
            on_message,
            RemoteControl(
                kill=lambda cause: self._kill(name),
                exited=lambda: _make_exit(ended, output),
                dump=lambda: self._dump(name, output),
            ),
            role=order.role,
        )
        place.child = await child.attach()
        return child

    async def _start(self, name: str, order: StartOrder, place: _Place) -> Running:
        assert place.output is not None
        secret = self._certificates.issue(order.role, name, is_dialled=True).to_bytes()
        what = order.args, order.env, secret, order.fingerprint, order.pin, order.role, order.listen
        try:
            started: Started = await self.cluster.ask_driver(lambda id: Start(id, name, *what))
        except Unable as error:
            tail = [line for line in place.output.tail if not line.startswith("{")]
            last = f": {tail[-1].strip()}" if tail else ""
            raise Unable(f"{error.message}{last}") from None
        return Running(started.pid, started.address, order.fingerprint)

    async def strays(self, name: str) -> str:
        """Return a message about GPU memory that it holds elsewhere; "" if none or unknown."""
        try:
            async with asyncio.timeout(VACATE_S):
                found: StrayMemory = await self.cluster.ask_driver(
                    lambda id: GetStrayMemory(id, name)
                )
        except (Unable, TimeoutError):
            return ""
        return found.stray

    async def release_place(self, name: str) -> None:
        """Release the place of a process."""
        if self._places.pop(name, None) is None:
            return
        try:
            async with asyncio.timeout(VACATE_S):
                await self.cluster.ask_driver(lambda id: ReleasePlace(id, name))
        except (Unable, TimeoutError) as error:
            log.warning("placement_not_released", worker=name, reason=str(error))

    def host(self, name: str) -> str:
        """Return the address of the node of a process; "" if it has no place."""
        place = self._places.get(name)
        return "" if place is None else place.host

    def describe_place(self, name: str) -> str:
        """Return the node and device of a process in words; "" if it has no place."""
        place = self._places.get(name)
        if place is None or not place.host:
            return ""
        return device(place.gpus) if place.gpus else f"cpu on {place.host}"

    def check(self) -> None:
        """Renew certificates that are due, including the supervisor's own; call this often."""
        self._certificates.renew_due()
        for name, place in self._places.items():
            child = place.child
            if child is None or child.exited.done():
                continue
            due = self._certificates.due(place.role, name, is_dialled=True)
            if due is not None:
                child.send(Renew(due))

    # ---- messages from the cluster

    def waits(self, name: str, what: str) -> None:
        if (place := self._places.get(name)) is not None:
            place.wait(what)

    def lines(self, name: str, lines: tuple[str, ...]) -> None:
        place = self._places.get(name)
        if place is not None and place.output is not None:
            place.output.data_received("".join(f"{line}\n" for line in lines).encode())

    def measured(self, message: Measured) -> None:
        place = self._places.get(message.name)
        if place is not None and place.host:
            place.measure(gpu_memory.read_measurements(place.gpus, place.host, message))
            if place.child is not None and place.child.pid == message.pid:
                place.child.rss_bytes = message.rss_bytes

    def exited(self, message: Exited) -> None:
        """Resolve the end of a process; PID 0 means any process in that place."""
        place = self._places.get(message.name)
        if place is None:
            return
        pids = [message.pid] if message.pid else list(place.ended)
        for pid in pids:
            ended = self._end_of(place, pid)
            if not ended.done():
                ended.set_result(message)

    def _end_of(self, place: _Place, pid: int) -> asyncio.Future[Exited]:
        if pid not in place.ended:
            # those that are awaited stay: the end of a process before may come late
            place.ended = {known: end for known, end in place.ended.items() if not end.done()}
            place.ended[pid] = asyncio.get_running_loop().create_future()
        return place.ended[pid]

    # ---- control of a process

    async def _kill(self, name: str) -> None:
        self.cluster.notify(Signal(name, signal.SIGKILL, group=True))

    async def _dump(self, name: str, output: Output) -> Sequence[str]:
        self.cluster.notify(Signal(name, signal.SIGUSR2))
        await output.dumped(_DUMP_S)
        return tuple(output.stacks)


async def _make_exit(ended: asyncio.Future[Exited], output: Output) -> Exit:
    told = await asyncio.shield(ended)
    return Exit(
        code=told.code,
        signal=told.signal,
        tail=tuple(output.tail),
        out_of_memory=told.out_of_memory,
        cause=told.cause,
        stacks=tuple(output.stacks),
    )
