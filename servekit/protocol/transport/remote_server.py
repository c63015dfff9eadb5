"""The TCP server of a process whose supervisor is on another machine: one port for all peers.

A peer sends Hello, and its certificate has to confirm it. A supervisor takes the control channel;
subclasses admit other peers.

    no supervisor ── Hello, Attach ──▶ attached ── EOF, or no answer ──▶ no supervisor
         │                                └── another one attaches: the first is told, and closed
         └── after `grace_s` (at the start at least FIRST_S): the end

The supervisor's connection is thus not a lifeline: the process serves without it for a while. The
supervisor may reconnect, or a new one may attach and gets the whole state. The supervisor also
renews the process's certificate (`certificate_holder`).
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
from servekit.protocol.transport.address import tcp_address
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.connection import LOST_S, Connection, listen_at
from servekit.protocol.transport.credentials import Credentials, Renew, Role
from servekit.protocol.transport.resumable_channel import (
    FLEETING,
    Attach,
    Attached,
    ReplayBuffer,
    SupervisorReplaced,
)

log: Any = structlog.get_logger("servekit.protocol")

#: How long a process serves without a supervisor.
GRACE_S = 60.0
#: Minimum wait for the first supervisor, which first has to learn the address.
FIRST_S = 30.0
#: Maximum time from a connection's first packet to its Hello; the handshake has less.
_HELLO_S = 10.0
#: Maximum time for the last messages to reach the supervisor.
_CLOSE_S = 1.0

OnMessage = Callable[[Any], None]
OnEnd = Callable[[Exception | None], None]


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Addresses and credentials of a remote process, from its command line."""

    listen: str  # tcp://HOST:PORT, port 0 for a free one
    advertise: str  # the host by which peers reach it
    credentials: Credentials
    report_fd: int | None = None  # gets its address, as a line of JSON
    grace_s: float = GRACE_S
    lost_s: float = LOST_S


class TcpServer(ABC):
    """The port of one process, and its control channel. Used on its event loop only."""

    role: ClassVar[Role]
    incoming: ClassVar[Any]  # the union of messages from a supervisor

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
    def replay_messages(self) -> list[Any]:
        """Return the messages that bring a new supervisor up to date."""

    @abstractmethod
    def attached(self, resumed: bool, had: int) -> Attached:
        """Return the answer to a supervisor that attaches."""

    @abstractmethod
    def admit(self, connection: Connection[Any], hello: Hello) -> None:
        """Accept a peer other than a supervisor. Raises WireError if it is not allowed."""

    # ---- its life

    async def open(self, on_message: OnMessage, on_end: OnEnd) -> None:
        """Listen, and wait for a supervisor. Raises OSError, ValueError, StartError."""
        post = self._post
        self._on_message, self._on_end = on_message, on_end
        self._server = await listen_at(
            post.listen,
            lambda: PendingConnection(self).connection,
            self.identity,
            lost_s=post.lost_s,
        )
        address = tcp_address(post.advertise, self.port)
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
        """Send all buffered data, and close."""
        if self._grace is not None:
            self._grace.cancel()
        control = self._control
        if control is not None:
            control.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(control.closed), _CLOSE_S)

    # ---- the supervisor

    @property
    def has_supervisor(self) -> bool:
        """Return whether a supervisor is attached."""
        return self._control is not None

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to the supervisor, now or when it is back."""
        self._kept.add(message)
        if self._control is not None:
            self._control.send(message)

    def attach(self, connection: Connection[Any], attach: Attach) -> None:
        """Give a supervisor the control channel, in place of any other."""
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
        log.info("supervisor_attached", resumed=resumed)
        for message in (self.attached(resumed, self._had), *missing):
            connection.send(message)

    def _begin_session(self, session: str) -> list[Any]:
        self._session, self._had, self._kept = session, 0, ReplayBuffer()
        told = self.replay_messages()
        self._kept.extend(told)
        return told

    def handle_message(self, connection: Connection[Any], message: Any) -> None:
        """Handle a message of a supervisor; those of a superseded one are ignored."""
        if connection is self._control:
            self._had += not isinstance(message, FLEETING)
            if isinstance(message, Renew):
                self.identity.renew(message.credentials)
            else:
                self.on_control_message(message)

    def on_control_message(self, message: Any) -> None:
        """Handle a message of the attached supervisor."""
        self._on_message(message)

    def detached(self, connection: Connection[Any], error: Exception | None) -> None:
        """Handle the end of a supervisor's connection."""
        if connection is self._control:
            self._control = None
            log.warning("supervisor_lost", error=str(error or "EOF"))
            self._wait_for_supervisor(self._post.grace_s)

    def _wait_for_supervisor(self, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._grace = loop.call_later(within_s, self._abandoned, within_s)

    def _abandoned(self, after_s: float) -> None:
        self._on_end(TimeoutError(f"no supervisor for {after_s:g} s"))


class PendingConnection:
    """A connection to the port whose peer is not known yet."""

    def __init__(self, port: TcpServer) -> None:
        self._port = port
        self.connection: Connection[Any] = Connection(Hello, self._on_hello, self._on_close)
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(_HELLO_S, self._on_silence)

    def _on_silence(self) -> None:
        if self.connection.peer is not None:  # else the handshake has failed
            log.warning("connection_timed_out", peer=str(self.connection.peer))
            self.connection.abort()

    def _on_hello(self, hello: Hello) -> None:
        self._late.cancel()
        self._check(hello)
        if hello.role == "supervisor":
            self.connection.switch_protocol(Attach, self._on_attach, self._on_close)
            self.connection.send(Hello(PROTOCOL, self._port.role, self._port.member))
            return
        self.connection.allow()
        self._port.admit(self.connection, hello)

    def _check(self, hello: Hello) -> None:
        """Check that the peer's certificate confirms its Hello; raise WireError otherwise."""
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
        connection.switch_protocol(
            port.incoming,
            lambda message: port.handle_message(connection, message),
            lambda error: port.detached(connection, error),
        )
        port.attach(connection, attach)

    def _on_close(self, error: Exception | None) -> None:
        self._late.cancel()
        if isinstance(error, WireError):
            peer = self.connection.peer
            log.warning("connection_refused", peer=str(peer), reason=str(error))
