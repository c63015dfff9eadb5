"""The line of a worker whose supervisor is on another machine: one TCP port for all who may come.

Who comes says Hello, and its certificate has to bear that out: gateways bring requests, a
supervisor takes the control channel, and the worker comes itself, to see whether it can be reached.

    no supervisor ── Hello, Attach ──▶ attached ── EOF, or no answer ──▶ no supervisor
         │                                └── another one attaches: the first is told, and let go
         └── `grace_s` later: the end

So the supervisor's connection is not the lifeline. Without it the worker serves on for a while; the
supervisor may come back, or a new one may, which is told anew all that it has to know.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from servekit.errors import StartError, WireError
from servekit.wire.adapters import Remember
from servekit.wire.address import host_and_port, is_tcp, tcp
from servekit.wire.connection import LOST_S, Connection, Factory, dial, listen
from servekit.wire.credentials import Credentials, Renew, read
from servekit.wire.identity import Identity
from servekit.wire.messages import (
    PROTOCOL,
    FromWorker,
    Hello,
    Load,
    ToWorker,
    WorkerSpec,
)
from servekit.wire.remote import FLEETING, Attach, Attached, Kept, Superseded
from servekit.worker.line import OnEnd, OnMessage
from servekit.worker.peer import Peer
from servekit.worker.summary import Summary

if TYPE_CHECKING:
    from servekit.worker.runner import Runner

log: Any = structlog.get_logger("servekit.worker")

#: Without a supervisor a worker serves for so long.
GRACE_S = 60.0
#: From the first packet of a connection to its first message; the handshake has less.
_HELLO_S = 10.0
#: For the last words to reach the supervisor.
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Post:
    """Where a remote worker is to be, as it is told on its command line."""

    listen: str  # tcp://HOST:PORT, port 0 for a free one
    advertise: str  # the host by which the others reach it
    credentials: Credentials
    report_fd: int | None = None  # where its address is written to, as a line of JSON
    grace_s: float = GRACE_S
    lost_s: float = LOST_S


def posted(args: argparse.Namespace) -> Remote:
    """As the command line says. Raises StartError, OSError for what is not there to be read."""
    if not is_tcp(args.listen):
        raise StartError(f"{args.listen!r} is not of the form tcp://HOST:PORT")
    grace_s = GRACE_S if args.grace_s is None else args.grace_s
    lost_s = LOST_S if args.lost_s is None else args.lost_s
    credentials = read(args.credentials_fd)
    return Remote(Post(args.listen, args.advertise, credentials, args.report_fd, grace_s, lost_s))


class Remote:
    """The line of a worker whose supervisor is elsewhere. All of it on the worker's event loop."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self.identity = Identity(post.credentials)
        self._server: asyncio.Server | None = None
        self._runner: Runner | None = None
        self._control: Connection[Any] | None = None
        self._session = ""
        self._kept = Kept()
        self._had = 0  # messages of the supervisor, in this session
        self._summary = Summary()
        self._spec: WorkerSpec | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._on_message: OnMessage = lambda message: None
        self._on_end: OnEnd = lambda error: None

    async def open(self, on_message: OnMessage, on_end: OnEnd) -> None:
        post = self._post
        self._on_message, self._on_end = on_message, on_end
        self._server = await listen(
            post.listen, lambda: Visitor(self).connection, self.identity, lost_s=post.lost_s
        )
        address = tcp(post.advertise, self._port)
        log.info("listening", address=address)
        if post.report_fd is not None:
            with os.fdopen(post.report_fd, "w") as report:
                report.write(json.dumps({"address": address}) + "\n")
        self._wait_for_supervisor()

    @property
    def _port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def serve(self, spec: WorkerSpec, runner: Runner) -> None:
        self._runner = runner

    async def dial(self, factory: Factory) -> Connection[object]:
        host, _ = host_and_port(self._post.listen)
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return await dial(tcp(here, self._port), factory, self.identity)

    async def close(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        control = self._control
        if control is not None:
            control.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(control.closed), _CLOSE_S)

    # ---- the supervisor

    def send(self, message: FromWorker) -> None:
        self._summary.note(message)
        self._kept.add(message)
        if self._control is not None:
            self._control.send(message)

    def attach(self, connection: Connection[Any], attach: Attach) -> None:
        """A supervisor takes the control channel, from whoever has it."""
        before, self._control = self._control, connection
        if before is not None and attach.session != self._session:
            before.send(Superseded())
        if before is not None:
            before.close()
        if self._grace is not None:
            self._grace.cancel()
        missing = self._kept.after(attach.have) if attach.session == self._session else None
        resumed = missing is not None
        if missing is None:
            missing = self._begin_session(attach.session)
        log.info("supervisor attached", resumed=resumed)
        state, now_s = self._summary.state(loading=self._spec is not None), time.monotonic()
        told = (state, self._spec, self._summary.added)
        had = Attached(resumed, self._had, os.getpid(), now_s, *told)
        for message in (had, *missing):
            connection.send(message)

    def _begin_session(self, session: str) -> list[Any]:
        self._session, self._had, self._kept = session, 0, Kept()
        told = self._summary.told()
        self._kept.extend(told)
        return told

    def heard(self, connection: Connection[Any], message: ToWorker) -> None:
        """A message of the supervisor that has the control channel."""
        if connection is not self._control:
            return  # it has been superseded
        self._had += not isinstance(message, FLEETING)
        match message:
            case Renew(credentials):
                self.identity.renew(credentials)
                return
            case Remember(added):
                self._summary.added = added
                return
            case Load() if self._spec is not None:
                return  # whoever adopts a worker looks at what it has, in Attached
            case Load(spec):
                self._spec = spec
        self._on_message(message)

    def detached(self, connection: Connection[Any], error: Exception | None) -> None:
        """A supervisor's connection is closed."""
        if connection is self._control:
            self._control = None
            log.warning("the supervisor is gone", error=str(error or "EOF"))
            self._wait_for_supervisor()

    def _wait_for_supervisor(self) -> None:
        loop = asyncio.get_running_loop()
        self._grace = loop.call_later(self._post.grace_s, self._abandoned)

    def _abandoned(self) -> None:
        self._on_end(TimeoutError(f"no supervisor for {self._post.grace_s:g} s"))

    # ---- the others

    def admit(self, connection: Connection[Any], hello: Hello) -> None:
        """A gateway, or the worker's own probe. Raises WireError before the model is loaded."""
        if self._runner is None:
            raise WireError("the model is not loaded yet")
        peer = Peer(self._runner, connection)
        self._runner.peers.add(peer)
        peer.meet(hello)


class Visitor:
    """A connection to the port, until it is known whose it is."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._name = remote.identity.member
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
            self.connection.send(Hello(PROTOCOL, "worker", self._name))
            return
        self.connection.allow()
        self._remote.admit(self.connection, hello)

    def _check(self, hello: Hello) -> None:
        """Raises WireError with a sentence."""
        peer = self.connection.peer
        if hello.protocol != PROTOCOL:
            raise WireError(
                f"{hello.name} speaks protocol {hello.protocol} and this worker {PROTOCOL}: install"
                " the same servekit on all machines"
            )
        own = hello.role == "probe" and peer is not None and peer.name == self._name
        role = "worker" if own else hello.role
        if peer is None or peer.role != role or (role == "worker" and not own):
            raise WireError(f"it says that it is a {hello.role}, and its certificate says {peer}")

    def _on_attach(self, attach: Attach) -> None:
        connection, remote = self.connection, self._remote
        connection.allow()
        hear: Callable[[ToWorker], None] = lambda message: remote.heard(connection, message)  # noqa: E731
        connection.become(ToWorker, hear, lambda error: remote.detached(connection, error))
        remote.attach(connection, attach)

    def _on_close(self, error: Exception | None) -> None:
        self._late.cancel()
        if isinstance(error, WireError):
            peer = self.connection.peer
            log.warning("a connection was refused", peer=str(peer), reason=str(error))
