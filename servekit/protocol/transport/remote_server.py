"""A process whose supervisor is on another machine: one TCP port for all who may come to it.

Who comes says Hello, and its certificate has to bear that out. A supervisor takes the control
channel; who else may come is the process's own affair.

    no supervisor ── Hello, Attach ──▶ attached ── EOF, or no answer ──▶ no supervisor
         │                                └── another one attaches: the first is told, and let go
         └── `grace_s` later, FIRST_S at the start if that is longer: the end

So the supervisor's connection is not the lifeline. Without it the process serves on for a while;
the supervisor may come back, or a new one may, which is told anew all that it has to know. What the
process is to show to all of them is renewed by way of it, too (`identity`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import structlog

from servekit.errors import WireError
from servekit.protocol.messages import PROTOCOL, Hello
from servekit.protocol.transport.address import tcp
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.connection import LOST_S, Connection, listen
from servekit.protocol.transport.credentials import Credentials, Renew, Role
from servekit.protocol.transport.resumable_channel import (
    FLEETING,
    Attach,
    Attached,
    ReplayBuffer,
    SupervisorReplaced,
)

log: Any = structlog.get_logger("servekit.protocol")

#: Without a supervisor a process serves for so long.
GRACE_S = 60.0
#: And at least for so long it waits for the first one, which comes once it has heard where to.
FIRST_S = 30.0
#: From the first packet of a connection to its first message; the handshake has less.
_HELLO_S = 10.0
#: For the last words to reach the supervisor.
_CLOSE_S = 1.0

OnMessage = Callable[[Any], None]
OnEnd = Callable[[Exception | None], None]


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where a remote process is to be, as it is told on its command line."""

    listen: str  # tcp://HOST:PORT, port 0 for a free one
    advertise: str  # the host by which the others reach it
    credentials: Credentials
    report_fd: int | None = None  # where its address is written to, as a line of JSON
    grace_s: float = GRACE_S
    lost_s: float = LOST_S


class TcpServer(ABC):
    """The port of one process, and its line to the supervisor. All of it on its event loop."""

    role: ClassVar[Role]
    incoming: ClassVar[Any]  # the union of messages that a supervisor tells it

    def __init__(self, post: ListenOptions) -> None:
        self._post = post
        self.identity = CertificateHolder(post.credentials)
        self._server: asyncio.Server | None = None
        self._control: Connection[Any] | None = None
        self._session = ""
        self._kept = ReplayBuffer()
        self._had = 0  # messages of the supervisor, in this session
        self._grace: asyncio.TimerHandle | None = None
        self._on_message: OnMessage = lambda message: None
        self._on_end: OnEnd = lambda error: None

    # ---- what differs

    @abstractmethod
    def told(self) -> list[Any]:
        """What a supervisor is told that has heard nothing of it."""

    @abstractmethod
    def attached(self, resumed: bool, had: int) -> Attached:
        """The answer to a supervisor that attaches."""

    @abstractmethod
    def admit(self, connection: Connection[Any], hello: Hello) -> None:
        """Somebody else comes. Raises WireError where it may not."""

    # ---- its life

    async def open(self, on_message: OnMessage, on_end: OnEnd) -> None:
        """Listen, and wait for a supervisor. Raises OSError, ValueError, StartError."""
        post = self._post
        self._on_message, self._on_end = on_message, on_end
        self._server = await listen(
            post.listen,
            lambda: PendingConnection(self).connection,
            self.identity,
            lost_s=post.lost_s,
        )
        address = tcp(post.advertise, self.port)
        log.info("listening", address=address)
        if post.report_fd is not None:
            with os.fdopen(post.report_fd, "w") as report:
                report.write(json.dumps({"address": address}) + "\n")
        self._wait_for_supervisor(max(post.grace_s, FIRST_S))

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def member(self) -> str:
        return self.identity.member

    async def close(self) -> None:
        """Send what is left, and close."""
        if self._grace is not None:
            self._grace.cancel()
        control = self._control
        if control is not None:
            control.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(control.closed), _CLOSE_S)

    # ---- the supervisor

    @property
    def heard(self) -> bool:
        """There is a supervisor now, as far as is known."""
        return self._control is not None

    def send(self, message: msgspec.Struct) -> None:
        """Tell the supervisor, now or when it comes back."""
        self._kept.add(message)
        if self._control is not None:
            self._control.send(message)

    def attach(self, connection: Connection[Any], attach: Attach) -> None:
        """A supervisor takes the control channel, from whoever has it."""
        before, self._control = self._control, connection
        if before is not None and attach.session != self._session:
            before.send(SupervisorReplaced())
        if before is not None:
            before.close()
        if self._grace is not None:
            self._grace.cancel()
        missing = self._kept.after(attach.have) if attach.session == self._session else None
        resumed = missing is not None
        if missing is None:
            missing = self._begin_session(attach.session)
        log.info("supervisor attached", resumed=resumed)
        for message in (self.attached(resumed, self._had), *missing):
            connection.send(message)

    def _begin_session(self, session: str) -> list[Any]:
        self._session, self._had, self._kept = session, 0, ReplayBuffer()
        told = self.told()
        self._kept.extend(told)
        return told

    def take(self, connection: Connection[Any], message: Any) -> None:
        """A message of a supervisor; one that has been superseded is not heard."""
        if connection is self._control:
            self._had += not isinstance(message, FLEETING)
            if isinstance(message, Renew):
                self.identity.renew(message.credentials)
            else:
                self.hear(message)

    def hear(self, message: Any) -> None:
        """A message of the supervisor that has the control channel."""
        self._on_message(message)

    def detached(self, connection: Connection[Any], error: Exception | None) -> None:
        """A supervisor's connection is closed."""
        if connection is self._control:
            self._control = None
            log.warning("the supervisor is gone", error=str(error or "EOF"))
            self._wait_for_supervisor(self._post.grace_s)

    def _wait_for_supervisor(self, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._grace = loop.call_later(within_s, self._abandoned, within_s)

    def _abandoned(self, after_s: float) -> None:
        self._on_end(TimeoutError(f"no supervisor for {after_s:g} s"))


class PendingConnection:
    """A connection to the port, until it is known whose it is."""

    def __init__(self, port: TcpServer) -> None:
        self._port = port
        self.connection: Connection[Any] = Connection(Hello, self._on_hello, self._on_close)
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(_HELLO_S, self._on_silence)

    def _on_silence(self) -> None:
        if self.connection.peer is not None:  # else the handshake has failed
            log.warning("a connection said nothing and was closed", peer=str(self.connection.peer))
            self.connection.abort()

    def _on_hello(self, hello: Hello) -> None:
        self._late.cancel()
        self._check(hello)
        if hello.role == "supervisor":
            self.connection.become(Attach, self._on_attach, self._on_close)
            self.connection.send(Hello(PROTOCOL, self._port.role, self._port.member))
            return
        self.connection.allow()
        self._port.admit(self.connection, hello)

    def _check(self, hello: Hello) -> None:
        """Raises WireError with a sentence."""
        peer, port = self.connection.peer, self._port
        if hello.protocol != PROTOCOL:
            raise WireError(
                f"{hello.name} speaks protocol {hello.protocol} and this {port.role} {PROTOCOL}:"
                " install the same servekit on all machines"
            )
        own = hello.role == "probe" and peer is not None and peer.name == port.member
        role = "worker" if own else hello.role
        if peer is None or peer.role != role or (role == "worker" and not own):
            raise WireError(f"it says that it is a {hello.role}, and its certificate says {peer}")

    def _on_attach(self, attach: Attach) -> None:
        connection, port = self.connection, self._port
        connection.allow()
        connection.become(
            port.incoming,
            lambda message: port.take(connection, message),
            lambda error: port.detached(connection, error),
        )
        port.attach(connection, attach)

    def _on_close(self, error: Exception | None) -> None:
        self._late.cancel()
        if isinstance(error, WireError):
            peer = self.connection.peer
            log.warning("a connection was refused", peer=str(peer), reason=str(error))
