"""The process that speaks to Ray (`servekit.ray.process`), as the supervisor sees it.

What is asked of it is answered, or the process dies, and then all that was asked has failed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import structlog

from servekit.config.cluster import RayConfig
from servekit.protocol.ray_messages import (
    Answer,
    Exited,
    FromCluster,
    Join,
    Joined,
    Keep,
    Lines,
    Measured,
    Node,
    Nodes,
    Sorry,
    Waits,
    Want,
)
from servekit.supervisor.lifecycle.managed_process import ManagedProcess, SupervisorContext
from servekit.supervisor.lifecycle.startup_timing import StartReason
from servekit.supervisor.process.child_process import Command

log: Any = structlog.get_logger("servekit.supervisor")


class Unable(OSError):
    """What was asked for cannot be; an OSError, as when the system does not start a process."""

    def __init__(self, message: str, pid: int = 0) -> None:
        super().__init__(0, message)
        self.message = message
        self.pid = pid


class Listener(Protocol):
    """What hears of workers."""

    def waits(self, name: str, what: str) -> None: ...
    def lines(self, name: str, lines: tuple[str, ...]) -> None: ...
    def measured(self, message: Measured) -> None: ...
    def exited(self, message: Exited) -> None: ...
    def look(self) -> None: ...


class Cluster(ManagedProcess[FromCluster]):
    """Runs the process; `joined` is done once it has joined the cluster, or cannot.

    `nodes` are those of the cluster when it joined or, where it is to `watch`, now: `on_nodes` is
    called when they have changed.
    """

    incoming = FromCluster

    def __init__(
        self,
        host: SupervisorContext,
        settings: RayConfig,
        namespace: str,
        wants: tuple[Want, ...],
        listener: Listener,
        *,
        watch: bool = False,
    ) -> None:
        super().__init__("ray", host)
        self.starting.occasion = StartReason.up()
        self.joined: asyncio.Future[tuple[Node, ...]] = self._loop.create_future()
        self.joined.add_done_callback(_seen)
        self.there = asyncio.Event()  # it is joined now
        self.nodes: tuple[Node, ...] = ()
        self.own = ""  # Ray's id of the node that we are on
        self.on_nodes: Callable[[], None] = lambda: None
        self._watch = watch
        self._settings = settings
        self._namespace = namespace
        self._wants = wants
        self._listener = listener
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._join_id = 0
        self._turn = 0  # in which we came, by Ray's count
        self._since = time.time()

    def command(self) -> Command:
        return Command(
            name=self.name,
            module="servekit.ray.process",
            args=(),
            env={**self.host.environ, "RAY_DEDUP_LOGS": "0"},
            log_path=self.host.run_dir.log_path("~ray"),
        )

    def greet(self) -> None:
        assert self.child is not None
        self._join_id = next(self._ids)
        own = self._settings
        self.child.send(
            Join(
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
        match message:
            case Joined(_, nodes, turn, own):
                self._turn = turn
                log.info("joined the Ray cluster", nodes=len(nodes))
                self.there.set()
                self.came_up()
                self.nodes, self.own = nodes, own
                if not self.joined.done():
                    self.joined.set_result(nodes)
                self.on_nodes()
            case Nodes(nodes):
                log.info("the nodes of the Ray cluster have changed", nodes=len(nodes))
                self.nodes = nodes
                self.on_nodes()
            case Sorry(id, reason) if id == self._join_id:
                if not self.joined.done():
                    self.joined.set_exception(Unable(reason))
                self.fail(f"cannot join the Ray cluster: {reason}", permanent=False)
            case Waits(name, what):
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

    async def ask(self, make: Callable[[int], msgspec.Struct]) -> Any:
        """The answer. Raises Unable where there is none, or it is Sorry."""
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
        if isinstance(answer, Sorry):
            raise Unable(answer.message, answer.pid)
        return answer

    def tell(self, message: msgspec.Struct) -> None:
        """Dropped where nobody is there to hear it."""
        if self.child is not None:
            self.child.send(message)

    def look(self) -> None:
        super().look()
        self._listener.look()

    def keep(self, names: tuple[str, ...]) -> None:
        self.tell(Keep(names))

    def buried(self) -> None:
        self.there.clear()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(Unable("the process that speaks to Ray has died"))
        if not self.joined.done():
            self.joined.set_exception(Unable(self.reason or "its client has died"))

    def _on_line(self, text: str) -> None:
        if text.startswith("{"):  # ours; what Ray has to say of itself fills pages, in its log file
            super()._on_line(text)

    def load(self) -> tuple[int, int]:
        """It is of use as long as it lives."""
        return int(self._ready_at is not None and time.monotonic() - self._ready_at > 60), 0


def _seen(future: asyncio.Future[Any]) -> None:
    """Whoever waits for it may have gone: then nobody is to be told of its error."""
    if not future.cancelled():
        future.exception()
