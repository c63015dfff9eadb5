"""The life of one supervised process across its deaths. One task runs it, and only it acts.

starting ──▶ loading ──▶ ready ──▶ draining ──▶ stopped
    ▲           │          │           ▲
    └─ backoff ◀┴──────────┘           └─ `end`, from any state
            failed   (restart.py says when)
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import structlog

from servekit.supervisor import procfs
from servekit.supervisor.child import GOODBYE_S, Child, Command, Exit
from servekit.supervisor.restart import Decision, RestartPolicy
from servekit.supervisor.run_dir import RunDir
from servekit.wire.messages import BootFailed, Stop, WorkerState

log: Any = structlog.get_logger("servekit.supervisor")
Incoming = TypeVar("Incoming")

#: From "stop now" to SIGKILL.
_NOW_S = 1.0


class Host(Protocol):
    """What a life needs of its supervisor."""

    run_dir: RunDir
    mark: str
    environ: Mapping[str, str]

    def changed(self) -> None:
        """Something that others may see is different now."""

    def children_changed(self) -> None:
        """A process was started, or reaped."""

    def line(self, name: str, text: str) -> None:
        """A child wrote a line."""


@dataclass(frozen=True, slots=True)
class _Ending:
    ask: msgspec.Struct
    grace_s: float


class Life(ABC, Generic[Incoming]):
    """Starts a child, listens to it, and starts it again by policy, until told to end."""

    incoming: ClassVar[Any]  # the union of messages it may send

    def __init__(self, name: str, host: Host, policy: RestartPolicy | None = None) -> None:
        self.name = name
        self.host = host
        self.state: WorkerState = "starting"
        self.reason = ""
        self.restarts = 0
        self.rss_bytes = 0
        self.child: Child[Incoming] | None = None
        self._policy = policy or RestartPolicy(random.random)
        self._boot_failed: BootFailed | None = None
        self._came_up = False
        self._ending: asyncio.Future[_Ending] = asyncio.get_running_loop().create_future()

    # ---- what differs

    @abstractmethod
    def command(self) -> Command:
        """How the next incarnation is started."""

    @abstractmethod
    def greet(self) -> None:
        """Send the first messages to a child that was just started."""

    @abstractmethod
    def receive(self, message: Incoming) -> None:
        """Take one message from the child."""

    def buried(self) -> None:
        """The child is reaped: forget what was known of it."""

    # ---- its life

    async def run(self) -> None:
        """Live until `end` was called and the last child is reaped."""
        while not self._ending.done():
            exit_ = await self._live_once()
            if self._ending.done():
                break
            await self._pause(self._judge(exit_))
            if not self._ending.done():
                self.restarts += 1
        self.set("stopped", self.reason)

    def end(self, ask: msgspec.Struct, grace_s: float) -> None:
        """Have the child asked to end, and killed if it has not within `grace_s`."""
        if not self._ending.done():
            self._ending.set_result(_Ending(ask, grace_s))

    def end_now(self) -> None:
        """Do not wait for it any longer."""
        self.end(Stop(), _NOW_S)
        if self.child is not None:
            self.child.send(Stop())
            loop = asyncio.get_running_loop()
            loop.call_later(_NOW_S, self.child.kill, "told to stop at once, killed")

    def fail(self, message: str, *, permanent: bool) -> None:
        """Treat the running child as one that could not boot."""
        self._boot_failed = BootFailed(message, permanent)
        if self.child is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(GOODBYE_S, self.child.kill, message)

    def came_up(self) -> None:
        """The child serves."""
        self._came_up = True
        self._policy.came_up(time.monotonic())
        self.set("ready", self.reason)

    def set(self, state: WorkerState, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self.host.changed()

    def measure(self) -> None:
        """Read its memory."""
        self.rss_bytes = procfs.rss_bytes(self.pid) if self.child is not None else 0

    @property
    def pid(self) -> int:
        return self.child.pid if self.child is not None else 0

    async def _live_once(self) -> Exit:
        self._boot_failed, self._came_up = None, False
        self.set("starting", self.reason)
        try:
            self.child = child = await Child[Incoming].spawn(
                self.command(), self.incoming, self.receive, self._on_line
            )
        except OSError as error:
            return Exit(None, None, (), cause=f"cannot be started: {error.strerror}")
        log.info("started", child=self.name, pid=child.pid)
        self.host.children_changed()
        self.greet()
        try:
            return await self._until_exit(child)
        finally:
            self.child, self.rss_bytes = None, 0
            self.buried()
            self.host.children_changed()

    async def _until_exit(self, child: Child[Incoming]) -> Exit:
        await asyncio.wait((child.exited, self._ending), return_when=asyncio.FIRST_COMPLETED)
        if child.exited.done():
            return child.exited.result()
        ending = self._ending.result()
        self.set("draining", self.reason)
        return await child.stop(ending.ask, ending.grace_s)

    def _judge(self, exit_: Exit) -> Decision:
        now = time.monotonic()
        if self._came_up and self._boot_failed is None:
            return self._tell("died", str(exit_), self._policy.crashed(now))
        unsaid = BootFailed(exit_.explain(" before it was ready"), permanent=False)
        said = self._boot_failed or unsaid
        decision = self._policy.boot_failed(permanent=said.permanent)
        return self._tell("cannot start", said.message, decision)

    def _tell(self, event: str, reason: str, decision: Decision) -> Decision:
        self.reason = reason
        again = "not" if decision.after_s is None else f"{decision.after_s:.2f} s"
        log.error(event, child=self.name, reason=reason, again_in=again)
        return decision

    async def _pause(self, decision: Decision) -> None:
        self.set(decision.state, self.reason)
        await asyncio.wait((self._ending,), timeout=decision.after_s)

    def _on_line(self, text: str) -> None:
        self.host.line(self.name, text)
