"""The port of a process whose supervisor is elsewhere: who may come, and who has the control.

Real sockets and real TLS.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from servekit.protocol.access import KeyBudgets, SpentBudget
from servekit.protocol.messages import PROTOCOL, Drain, Hello, Ping, Stop, ToGateway
from servekit.protocol.residency import KeepAlive
from servekit.protocol.transport import remote_server
from servekit.protocol.transport.address import tcp_address
from servekit.protocol.transport.connection import (
    FIRST_FRAME_BYTES,
    Connection,
    dial_address,
)
from servekit.protocol.transport.credentials import Renew, Role
from servekit.protocol.transport.remote_server import ListenOptions, PendingConnection, TcpServer
from servekit.protocol.transport.resumable_channel import Attach, Attached, SupervisorReplaced
from servekit.protocol.transport.tls import Authority
from tests.polling import poll_async

OURS = Authority.new("c")
OWN = OURS.issue("worker", "m/0")
SUPERVISOR = OURS.issue("supervisor", "s")
GREETING = Hello(PROTOCOL, "supervisor", "s")


def news(number: int) -> KeepAlive:
    return KeepAlive(f"m{number}", None)


class Port(TcpServer):
    """A process that tells a new supervisor one thing, and admits any peer."""

    role = "worker"
    incoming = ToGateway | Renew

    def __init__(self, post: ListenOptions) -> None:
        super().__init__(post)
        self.heard: list[Any] = []
        self.admitted: list[Hello] = []
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def replay_messages(self) -> list[Any]:
        return [news(0)]

    def attached(self, resumed: bool, had: int) -> Attached:
        return Attached(resumed, had, os.getpid(), time.monotonic(), "ready")

    def admit(self, connection: Connection[Any], hello: Hello) -> None:
        self.admitted.append(hello)


class Peer:
    """The other end of a connection to the port, and what it has heard."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        kinds = Hello | Attached | KeepAlive | SupervisorReplaced
        self.connection: Connection[Any] = Connection(kinds, self.heard.append, lambda error: None)

    @property
    def attached(self) -> list[tuple[bool, int]]:
        return [(one.resumed, one.have) for one in self.heard if isinstance(one, Attached)]

    @property
    def news(self) -> list[KeepAlive]:
        return [one for one in self.heard if isinstance(one, KeepAlive)]

    @property
    def replaced(self) -> bool:
        return SupervisorReplaced() in self.heard


@asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[Port]:
    port = Port(ListenOptions("tcp://127.0.0.1:0", "127.0.0.1", OWN, **options))
    await port.open(port.heard.append, port.ended.set_result)
    try:
        yield port
    finally:
        await port.close()
        assert port._server is not None
        port._server.close()


async def dial(port: Port, credentials: Any = SUPERVISOR, hello: Hello | None = GREETING) -> Peer:
    peer = Peer()
    address = tcp_address("127.0.0.1", port.port)
    await dial_address(address, lambda: peer.connection, credentials)
    if hello is not None:
        peer.connection.send(hello)
    return peer


async def attach(port: Port, session: str = "a", have: int = 0) -> Peer:
    peer = await dial(port)
    peer.connection.send(Attach(session, have))
    await poll_async("it is attached", lambda: peer.attached)
    return peer


async def hear(port: Port, *messages: Any) -> None:
    await poll_async("the port has heard it", lambda: port.heard[-len(messages) :] == [*messages])


# ---------------------------------------------------------------- the control channel


async def test_a_supervisor_is_greeted_and_told_how_it_stands() -> None:
    async with listening() as port:
        peer = await attach(port)
        greeting, attached, told = peer.heard
        assert greeting == Hello(PROTOCOL, "worker", "m/0")
        assert (attached.resumed, attached.have, attached.pid) == (False, 0, os.getpid())
        assert told == news(0)
        peer.connection.send(Drain())
        await hear(port, Drain())
        port.send(news(1))
        await poll_async("it is told", lambda: peer.news == [news(0), news(1)])


async def test_who_is_known_may_send_long_messages() -> None:
    """Until then a stranger could fill the memory."""
    long = KeyBudgets(tuple(SpentBudget(f"{n:099}", "daily", 1, 2.0) for n in range(4000)))
    assert len(msgspec.msgpack.encode(long)) > FIRST_FRAME_BYTES
    async with listening() as port:
        peer = await attach(port)
        peer.connection.send(long)
        await hear(port, long)


async def test_after_a_break_only_what_is_missing_is_told() -> None:
    async with listening() as port:
        first = await attach(port)
        for message in (Drain(), Ping(1), Stop()):  # a Ping is of the moment, and not counted
            first.connection.send(message)
        await hear(port, Stop())
        port.send(news(1))
        first.connection.abort()
        await poll_async("it is missed", lambda: not port.has_supervisor)
        port.send(news(2))
        second = await attach(port, have=2)
        assert second.attached == [(True, 2)]
        await poll_async("it is told", lambda: second.news == [news(2)])
        assert not second.replaced


async def test_a_session_of_which_too_much_is_lost_begins_again() -> None:
    async with listening() as port:
        await attach(port)
        second = await attach(port, have=5)
        assert second.attached == [(False, 0)]
        await poll_async("it is told how it stands", lambda: second.news == [news(0)])


async def test_another_supervisor_takes_the_place_of_the_first_which_is_told() -> None:
    async with listening() as port:
        first = await attach(port, "a")
        first.connection.send(Drain())
        await hear(port, Drain())
        second = await attach(port, "b")
        assert second.attached == [(False, 0)], "what it had from the first does not count"
        async with asyncio.timeout(30):
            await first.connection.closed
        assert first.replaced
        assert port.has_supervisor
        second.connection.send(Stop())
        await hear(port, Stop())


async def test_the_same_supervisor_on_a_new_connection_is_not_told_that_it_was_replaced() -> None:
    async with listening() as port:
        first = await attach(port, "a")
        await attach(port, "a", have=1)
        async with asyncio.timeout(30):
            await first.connection.closed
        assert not first.replaced


async def test_what_a_replaced_supervisor_still_says_is_passed_over() -> None:
    async with listening() as port:
        first: Connection[Any] = Connection(Hello, lambda message: None, lambda error: None)
        second: Connection[Any] = Connection(Hello, lambda message: None, lambda error: None)
        port.attach(first, Attach("a"))
        port.attach(second, Attach("b"))
        port.handle_message(first, Drain())
        port.detached(first, None)
        port.handle_message(second, Stop())
        assert port.heard == [Stop()]
        assert port.has_supervisor
        port.detached(second, None)  # it was connected to nothing


async def test_a_new_certificate_is_no_message_for_the_process() -> None:
    fresh = OURS.issue("worker", "m/0")
    async with listening() as port:
        peer = await attach(port)
        peer.connection.send(Renew(fresh))
        await poll_async("it is taken", lambda: port.identity.credentials == fresh)
        assert port.heard == []
        peer.connection.abort()
        await poll_async("it is missed", lambda: not port.has_supervisor)
        assert (await attach(port, have=1)).attached == [(True, 1)], "it is counted"


# ---------------------------------------------------------------- without a supervisor


async def test_the_first_supervisor_is_waited_for_longer_than_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has to learn the address first."""
    monkeypatch.setattr(remote_server, "FIRST_S", 0.02)
    async with listening(grace_s=0.0) as port, asyncio.timeout(30):
        assert str(await port.ended) == "no supervisor for 0.02 s"
    async with listening(grace_s=0.03) as port, asyncio.timeout(30):
        assert str(await port.ended) == "no supervisor for 0.03 s"


async def test_who_is_attached_is_not_waited_for() -> None:
    async with listening(grace_s=0.02) as port:
        assert port._grace is not None and not port._grace.cancelled()
        peer = await attach(port)
        assert port._grace.cancelled()
        peer.connection.abort()
        async with asyncio.timeout(30):
            assert str(await port.ended) == "no supervisor for 0.02 s"


async def test_nobody_is_waited_for_after_the_end() -> None:
    async with listening() as port:
        await port.close()
        assert port._grace is not None and port._grace.cancelled()


async def test_the_last_messages_reach_the_supervisor() -> None:
    async with listening() as port:
        peer = await attach(port)
        for number in range(1, 200):
            port.send(news(number))
        await port.close()
        async with asyncio.timeout(30):
            await peer.connection.closed
        assert peer.news == [news(number) for number in range(200)]


async def test_the_end_does_not_wait_for_a_supervisor_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_server, "_CLOSE_S", 0.01)
    async with listening() as port:
        peer = await attach(port)
        assert peer.connection._transport is not None
        peer.connection._transport.pause_reading()
        for _ in range(40):
            port.send(KeepAlive("m" * 2**18, None))
        async with asyncio.timeout(10):
            await port.close()
        peer.connection.abort()


# ---------------------------------------------------------------- who may come


async def test_the_address_is_reported_where_it_was_asked_for(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    async with listening(report_fd=write_fd) as port:
        with os.fdopen(read_fd) as report:
            told = json.loads(report.read())  # to its end: it is closed
        assert told == {"address": tcp_address("127.0.0.1", port.port)}


@pytest.mark.parametrize(
    ("role", "member", "hello"),
    [
        ("gateway", "gateway/0", Hello(PROTOCOL, "gateway", "gateway/0")),
        # the process itself, which looks whether its port can be reached
        ("worker", "m/0", Hello(PROTOCOL, "probe", "m/0")),
    ],
)
async def test_other_peers_are_for_the_process_to_admit(
    role: Role, member: str, hello: Hello
) -> None:
    async with listening() as port:
        await dial(port, OURS.issue(role, member, is_dialled=role == "worker"), hello)
        await poll_async("it is let in", lambda: port.admitted == [hello])
        assert not port.has_supervisor


@pytest.mark.parametrize(
    ("role", "member", "hello", "said"),
    [
        (
            "supervisor",
            "s",
            Hello(PROTOCOL + 1, "supervisor", "s"),
            f"s speaks protocol {PROTOCOL + 1} and this worker {PROTOCOL}: install the same",
        ),
        ("gateway", "g", GREETING, "it says that it is a supervisor, and its certificate says"),
        ("supervisor", "s", Hello(PROTOCOL, "gateway", "g"), "it says that it is a gateway"),
        ("worker", "m/1", Hello(PROTOCOL, "worker", "m/1"), "it says that it is a worker"),
        ("worker", "m/0", Hello(PROTOCOL, "worker", "m/0"), "it says that it is a worker"),
        ("worker", "m/1", Hello(PROTOCOL, "probe", "m/1"), "it says that it is a probe"),
        ("gateway", "m/0", Hello(PROTOCOL, "probe", "m/0"), "it says that it is a probe"),
    ],
)
async def test_a_peer_whose_certificate_says_something_else_is_refused(
    role: Role, member: str, hello: Hello, said: str
) -> None:
    with capture_logs() as logs:
        async with listening() as port, asyncio.timeout(30):
            peer = await dial(port, OURS.issue(role, member, is_dialled=role == "worker"), hello)
            await peer.connection.closed
            await poll_async("the log has it", lambda: len(logs) > 1)
        assert not port.admitted and not port.has_supervisor
    refused = [one for one in logs if one["event"] == "connection_refused"]
    assert [one["reason"].startswith(said) for one in refused] == [True]


async def test_a_peer_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_server, "_HELLO_S", 0.05)
    with capture_logs() as logs:
        async with listening() as port, asyncio.timeout(30):
            peer = await dial(port, hello=None)
            await peer.connection.closed
    assert [one["event"] for one in logs].count("connection_timed_out") == 1


async def test_a_peer_that_has_said_who_it_is_may_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[PendingConnection] = []

    class Noted(PendingConnection):
        def __init__(self, port: TcpServer) -> None:
            super().__init__(port)
            made.append(self)

    monkeypatch.setattr(remote_server, "PendingConnection", Noted)
    async with listening() as port:
        await attach(port)
        assert [one._late.cancelled() for one in made] == [True]
