"""Client of the process that talks to Ray (`servekit.ray.process`).

Every question is answered, or the process dies and all pending questions fail.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from servekit.config.sections.cluster import RayConfig
from servekit.protocol.control.ray_messages import (
    Answer,
    ClusterJoined,
    DriverAlive,
    Exited,
    FromCluster,
    JoinCluster,
    KeepPlaces,
    Lines,
    Measured,
    Node,
    NodeRequirements,
    Nodes,
    PlacementWaits,
    RequestFailed,
)
from servekit.protocol.messages import Ping
from servekit.supervisor.lifecycle.exit_history import StartReason
from servekit.supervisor.lifecycle.managed_process import ManagedProcess, SupervisorContext
from servekit.supervisor.process.child_process import Command

if TYPE_CHECKING:
    from servekit.ray.actors import RayActors

#: Interval of pings to the process, and the silence after which it is replaced.
_PING_EVERY_S = 5.0
SILENT_S = 30.0

log: Any = structlog.get_logger("servekit.supervisor")


class Unable(OSError):
    """A failed request; an OSError, like a failure of the system to start a process."""

    def __init__(self, message: str, pid: int = 0) -> None:
        super().__init__(0, message)
        self.message = message
        self.pid = pid


class Cluster(ManagedProcess[FromCluster]):
    """The process that talks to Ray; `joined` completes when it has joined the cluster or failed.

    `nodes` are the nodes at that time or, with `watch`, the current ones; `on_nodes` is called when
    they change.
    """

    incoming = FromCluster

    def __init__(
        self,
        host: SupervisorContext,
        settings: RayConfig,
        namespace: str,
        wants: tuple[NodeRequirements, ...],
        listener: RayActors,
        *,
        watch: bool = False,
    ) -> None:
        super().__init__("ray", host)
        self.starting.occasion = StartReason.from_supervisor_start()
        self.joined: asyncio.Future[tuple[Node, ...]] = self._loop.create_future()
        self.joined.add_done_callback(_retrieve_error)
        self.there = asyncio.Event()  # set while joined
        self.nodes: tuple[Node, ...] = ()
        self.own = ""  # Ray's id of our own node
        self.on_nodes: Callable[[], None] = lambda: None
        self._watch = watch
        self._settings = settings
        self._namespace = namespace
        self._wants = wants
        self._listener = listener
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._join_id = 0
        self._turn = 0  # our position in Ray's order of jobs
        self._since = time.time()
        self._pinged_at = self._heard_at = 0.0  # on the monotonic clock

    def command(self) -> Command:
        return Command(
            name=self.name,
            module="servekit.ray.process",
            args=(),
            env={**self.host.environ, "RAY_DEDUP_LOGS": "0"},
            log_path=self.host.run_dir.log_path("~ray"),
        )

    def send_greeting(self) -> None:
        assert self.child is not None
        self._join_id = next(self._ids)
        own = self._settings
        self.child.send(
            JoinCluster(
                self._join_id,
                own.address,
                self._namespace,
                own.grace_s,
                own.connect_s,
                self._wants,
                run_dir=str(self.host.run_dir.path),
                since=self._since,
                turn=self._turn,
                watch=self._watch,
            )
        )

    def receive(self, message: FromCluster) -> None:
        self._heard_at = time.monotonic()
        match message:
            case DriverAlive():
                pass
            case ClusterJoined(_, nodes, turn, own):
                self._turn = turn
                log.info("ray_joined", nodes=len(nodes))
                self.there.set()
                self.mark_ready()
                self.nodes, self.own = nodes, own
                if not self.joined.done():
                    self.joined.set_result(nodes)
                self.on_nodes()
            case Nodes(nodes):
                log.info("ray_nodes_changed", nodes=len(nodes))
                self.nodes = nodes
                self.on_nodes()
            case RequestFailed(id, reason) if id == self._join_id:
                if not self.joined.done():
                    self.joined.set_exception(Unable(reason))
                self.fail_boot(f"cannot join the Ray cluster: {reason}", permanent=False)
            case PlacementWaits(name, what):
                self._listener.waits(name, what)
            case Lines(name, lines):
                self._listener.lines(name, lines)
            case Measured():
                self._listener.measured(message)
            case Exited():
                self._listener.exited(message)
            case _:
                asked = self._asked.pop(message.id, None)
                if asked is not None and not asked.done():
                    asked.set_result(message)

    async def ask_driver(self, make: Callable[[int], msgspec.Struct]) -> Any:
        """Return the answer. Raises Unable if there is none, or it is RequestFailed."""
        await self.there.wait()
        if self.child is None:
            raise Unable("the process that speaks to Ray has died")
        id = next(self._ids)
        asked = self._asked[id] = self._loop.create_future()
        self.child.send(make(id))
        try:
            answer = await asked
        finally:
            self._asked.pop(id, None)
        if isinstance(answer, RequestFailed):
            raise Unable(answer.message, answer.pid)
        return answer

    def notify(self, message: msgspec.Struct) -> None:
        """Send a message; dropped if the process is not running."""
        if self.child is not None:
            self.child.send(message)

    def check_health(self) -> None:
        """Ping the process, and replace it if it does not answer: without it no worker starts."""
        super().check_health()
        self._listener.check()
        now = time.monotonic()
        if self.state != "ready" or self.child is None:
            return
        if self.silent_s > SILENT_S:
            self.kill_stalled(f"it did not answer for {SILENT_S:g} s, killed")
        elif not self.silent_s and now - self._pinged_at >= _PING_EVERY_S:
            self._pinged_at = now
            self.child.send(Ping(0))

    def forgive_suspension(self) -> None:
        """Restart the silence timer: the supervisor was suspended and could read no answer."""
        self._pinged_at = self._heard_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        owes = self.state == "ready" and self._heard_at < self._pinged_at
        return time.monotonic() - self._pinged_at if owes else 0.0

    def keep_places(self, names: tuple[str, ...]) -> None:
        self.notify(KeepPlaces(names))

    def forget_child(self) -> None:
        self.there.clear()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(Unable("the process that speaks to Ray has died"))
        if not self.joined.done():
            self.joined.set_exception(Unable(self.reason or "its client has died"))

    def _on_line(self, text: str) -> None:
        if text.startswith("{"):  # ours; Ray's own messages fill pages, and go to its log file only
            super()._on_line(text)

    def load(self) -> tuple[int, int]:
        """Count as useful work after 60 s, since this process serves no requests."""
        return int(self._ready_at is not None and time.monotonic() - self._ready_at > 60), 0


def _retrieve_error(future: asyncio.Future[Any]) -> None:
    """Retrieve the error, so that asyncio does not report it if no one waits for the future."""
    if not future.cancelled():
        future.exception()
