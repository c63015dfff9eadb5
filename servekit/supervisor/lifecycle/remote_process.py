"""Processes on other machines: one process with `ChildProcess`'s interface.

A `RayLauncher` starts the workers that are not the supervisor's own children. With
`launcher: local` there is none. Restarts, status and messages work the same either way.

    dialled ──▶ attached ── EOF ──▶ redialling ── attached again: nothing was lost
        ▲           │                  │
        └───────────┼──────────────────┘ silent for `node_lost_s`: lost
                    └─ exits, or is killed, as the launcher reports ──▶ `exited`

The connection is not the lifeline: without it, as after a network failure, the worker serves its
gateways on for a while. The launcher ends the process and knows how it has ended.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar

import msgspec
import structlog
from msgspec.structs import replace as changed

from servekit.errors import WireError
from servekit.protocol.adapters import AdapterSpec, SetAdapters
from servekit.protocol.control.startup_messages import GatewayConnected, PhaseReport
from servekit.protocol.messages import PROTOCOL, Hello, Ping, WorkerSpec
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.connection import LOST_S, Connection, dial_address
from servekit.protocol.transport.credentials import Role
from servekit.protocol.transport.resumable_channel import (
    FLEETING,
    Attach,
    Attached,
    ReplayBuffer,
    SupervisorReplaced,
)
from servekit.protocol.transport.tls import HUNG_UP, NotTrusted
from servekit.supervisor.process.child_process import GOODBYE_S, ChildProcess, Exit
from servekit.system.shared_memory import Segment

if TYPE_CHECKING:
    pass

log: Any = structlog.get_logger("servekit.supervisor")
Incoming = TypeVar("Incoming")

#: The silence after which a worker is lost, with its node.
NODE_LOST_S = 10.0
#: Between attempts to reach it again.
_REDIAL_S = 0.2
#: The longest wait for the answer to an attach.
_ATTACH_S = 5.0
#: How long the launcher may take to end a process, and then to report its exit.
_KILL_S = 10.0
_SAY_S = 2.0
#: The longest wait for a stack dump.
_DUMP_S = 2.0


@dataclass(frozen=True, slots=True)
class RemoteControl:
    """The launcher's operations on a process it has started on another node.

    `kill` ends it and all processes that it has started; `exited` returns its Exit once it has
    ended; `dump` has it write the stacks of all its threads and returns them. None of them need
    return while the node cannot be reached; errors that they raise are logged.
    """

    kill: Callable[[str], Awaitable[None]]
    exited: Callable[[], Awaitable[Exit]]
    dump: Callable[[], Awaitable[Sequence[str]]] | None = None


class RemoteChild(Generic[Incoming]):
    """A process reached over TCP, by `attach`; `exited` holds its Exit once it has ended.

    A connection is closed after `lost_s` without an answer. The process is lost after `node_lost_s`
    unless it is reached again by then.

    `state` and `spec` are those at the time of the attach: a worker that is "ready" is adopted, and
    sends its Ready again. `added` are the adapters that operators have added, as the worker knows.
    """

    forked = False
    here = False  # its PID is one of another machine

    def __init__(
        self,
        name: str,
        address: str,
        identity: CertificateHolder,
        incoming: Any,
        on_message: Callable[[Incoming], None],
        hands: RemoteControl,
        *,
        lost_s: float = LOST_S,
        node_lost_s: float = NODE_LOST_S,
        role: Role = "worker",
    ) -> None:
        self.name = name
        self.address = address
        self.pid = self.started = 0
        self.rss_bytes = 0  # as its node has reported
        self.state = "empty"
        self.spec: WorkerSpec | None = None
        self.added: tuple[AdapterSpec, ...] = ()
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._identity = identity
        self._incoming = incoming
        self._on_message = on_message
        self._hands = hands
        self._lost_s = lost_s
        self._node_lost_s = node_lost_s
        self._role: Role = role
        #: Called when a lost connection is restored, to send what the replay buffer does not keep.
        self.on_again: Callable[[], None] = lambda: None
        self._session = secrets.token_hex(8)
        self._kept = ReplayBuffer()
        self._had = 0
        self._heard_at = self._loop.time()
        self._asked_at = 0.0  # when the first Ping since `_heard_at` was sent
        self._ahead_s = 0.0  # the worker's monotonic clock minus ours
        self._cause = ""
        self._stacks: tuple[str, ...] = ()
        self._stopping = False
        self._connection: Connection[Any] | None = None
        self._attached = self._loop.create_future()
        self._up = False  # attached by the present connection
        self._last_effort: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self) -> Self:
        """Connect to the process and return self. Raises OSError if that fails."""
        await self._dial()
        self._begin(self._await_exit())
        return self

    # ---- the interface of ChildProcess

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, now or after reconnecting; dropped once the process is gone."""
        if self.exited.done():
            return
        self._kept.add(message)
        if isinstance(message, Ping) and self._asked_at <= self._heard_at:
            self._asked_at = self._loop.time()
        if self._connection is not None:
            self._connection.send(message)

    def remember(self, added: tuple[AdapterSpec, ...]) -> None:
        """Have the worker keep the adapters that operators added, for the next supervisor."""
        if added != self.added:
            self.added = added
            self.send(SetAdapters(added))

    def kill(self, cause: str) -> None:
        """Have the launcher kill it, with all that it has started; `cause` becomes the reason."""
        if not self.exited.done() and not self._cause:
            self._cause = cause
            self._begin(self._have_killed(cause))

    def note_segments(self) -> set[Segment]:
        """Return nothing: the launcher removes shared memory on its node."""
        return set()

    async def dump_and_kill(self, cause: str) -> None:
        """Have it write the stacks of all its threads, and end it."""
        if self._hands.dump is not None and not self.exited.done():
            try:
                async with asyncio.timeout(_DUMP_S):
                    self._stacks = tuple(await self._hands.dump())
            except Exception as error:
                log.warning("stack_dump_missing", child=self.name, error=repr(error))
        self.kill(cause)

    async def stop(self, ask: msgspec.Struct, grace_s: float) -> Exit:
        """Ask it to end, insist after `grace_s`, and return when it has ended."""
        self._stopping = True
        self.send(ask)
        await asyncio.wait((self.exited,), timeout=grace_s)
        if not self.exited.done():
            self.kill(f"did not stop within {grace_s:g} s, killed")
        return await asyncio.shield(self.exited)

    def disconnect(self) -> None:
        """Disconnect; it serves on for its grace time, and another supervisor may adopt it."""
        self._conclude(Exit(None, None, (), cause="left to itself"))

    # ---- exit

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the event loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)

    async def _await_exit(self) -> None:
        try:
            self._conclude(await self._hands.exited())
        except Exception as error:  # then the connection shows its end
            log.warning("exit_unknown", child=self.name, error=repr(error))

    async def _have_killed(self, cause: str) -> None:
        await self._end_there(cause)
        await asyncio.wait((self.exited,), timeout=_SAY_S)  # as the launcher reports
        self._conclude(Exit(None, None, (), cause=cause))

    async def _end_there(self, cause: str) -> None:
        try:
            async with asyncio.timeout(_KILL_S):
                await self._hands.kill(cause)
        except Exception as error:
            log.warning("kill_unconfirmed", child=self.name, error=repr(error))

    def _conclude(self, exit_: Exit) -> None:
        if self.exited.done():
            return
        self.exited.set_result(
            replace(exit_, cause=self._cause or exit_.cause, stacks=self._stacks or exit_.stacks)
        )
        if self._connection is not None:
            self._connection.abort()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    # ---- the connection

    async def _dial(self) -> None:
        """Attach, for the first time or again. Raises OSError."""
        self._attached = attached = self._loop.create_future()
        connection: Connection[Any] = await dial_address(
            self.address,
            lambda: Connection(Hello, self._on_hello, self._on_close),
            self._identity,
            lost_s=self._lost_s,
            role=self._role,
        )
        self._connection = connection
        connection.send(Hello(PROTOCOL, "supervisor", self._identity.member))
        connection.send(Attach(self._session, self._had))
        try:
            async with asyncio.timeout(_ATTACH_S):
                await attached
        except TimeoutError:
            connection.abort()
            raise TimeoutError(f"{self.address} has not identified itself") from None

    def _on_hello(self, hello: Hello) -> None:
        connection = self._connection
        assert connection is not None  # it answers what was sent on it
        if hello.protocol != PROTOCOL:
            raise WireError(
                f"{self._role} {hello.name} speaks protocol {hello.protocol} and this supervisor"
                f" {PROTOCOL}: install the same servekit on all machines"
            )
        connection.allow()
        connection.switch_protocol(
            self._incoming | Attached | SupervisorReplaced, self._handle_message, self._on_close
        )

    def _handle_message(self, message: Any) -> None:
        self._heard_at = self._loop.time()
        if self.exited.done():
            return
        match message:
            case Attached():
                self._on_attached(message)
            case SupervisorReplaced():
                self._conclude(Exit(None, None, (), cause="another supervisor has adopted it"))
            case _:
                self._had += not isinstance(message, FLEETING)
                self._on_message(self._by_our_clock(message))

    def _on_attached(self, told: Attached) -> None:
        missing = self._kept.after(told.have)
        if self.pid and (not told.resumed or missing is None):
            self._conclude(Exit(None, None, (), cause="it is another process now"))
            return
        self.added = self.added if self.pid else told.added
        self.pid, self.state, self.spec = told.pid, told.state, told.spec
        self._ahead_s = told.now_s - time.monotonic()
        for message in missing or ():
            assert self._connection is not None
            self._connection.send(message)
        self._up = True
        if not self._attached.done():
            self._attached.set_result(None)

    def _by_our_clock(self, message: Any) -> Any:
        """Convert a message's times from the other machine's monotonic clock to ours."""
        if isinstance(message, PhaseReport):
            phase, ahead_s = message.phase, self._ahead_s
            ended_s = None if phase.ended_s is None else phase.ended_s - ahead_s
            return PhaseReport(changed(phase, began_s=phase.began_s - ahead_s, ended_s=ended_s))
        if isinstance(message, GatewayConnected):
            return GatewayConnected(message.gateway, message.at_s - self._ahead_s)
        return message

    def _on_close(self, error: Exception | None) -> None:
        was_up, self._up, known = self._up, False, self._connection is not None
        self._connection = None
        if known and not self._attached.done():
            said = str(error) if error is not None else HUNG_UP
            self._attached.set_exception(NotTrusted(f"{self.address}: {said}"))
        if not was_up or self.exited.done():
            return
        if isinstance(error, WireError) and not isinstance(error, OSError):
            self.kill(f"broke the wire protocol: {error}")
        if self._asked_at <= self._heard_at:  # its kernel has answered until then
            self._heard_at = max(self._heard_at, self._loop.time() - self._lost_s)
        log.warning("control_channel_lost", child=self.name, error=str(error or "EOF"))
        self._begin(self._redial())

    async def _redial(self) -> None:
        """Dial until the process is reached, or is lost."""
        said = ""
        give_up_s = GOODBYE_S if self._stopping else self._node_lost_s
        while (left_s := self._heard_at + give_up_s - self._loop.time()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self._dial()
            except OSError as error:
                said = str(error) or said
                await asyncio.sleep(_REDIAL_S)
            else:
                log.info("control_channel_restored", child=self.name)
                self.on_again()
                return
        self._give_up(said)

    def _give_up(self, said: str) -> None:
        """Give up a process that is not reached; have it killed, because a replacement starts."""
        if self._stopping and not self._cause:
            self._conclude(Exit(0, None, ()))
            return
        silent_s = self._loop.time() - self._heard_at
        cause = f"node lost: no answer for {silent_s:.0f} s ({said})"
        self._cause = self._cause or cause
        self._last_effort = self._loop.create_task(self._end_there(cause))
        self._conclude(Exit(None, None, (), cause=cause))


#: A process that is managed: of this machine, or of another.
AnyChild: TypeAlias = ChildProcess[Incoming] | RemoteChild[Incoming]
