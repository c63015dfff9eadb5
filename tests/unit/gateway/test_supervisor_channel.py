"""The line of a gateway whose supervisor is on another machine, with the supervisor's own end."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from servekit.errors import WireError
from servekit.gateway.supervisor_channel import TcpChannel
from servekit.protocol.control.remote_gateway import AdminRequest, AdminResponse, FromRemoteGateway
from servekit.protocol.messages import (
    PROTOCOL,
    FromGateway,
    GetWhy,
    Hello,
    Refused,
    Serving,
    Topology,
    Traffic,
)
from servekit.protocol.residency import ModelDemand
from servekit.protocol.transport.address import tcp_address
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.connection import Connection, dial_address
from servekit.protocol.transport.credentials import Renew
from servekit.protocol.transport.remote_server import ListenOptions
from servekit.protocol.transport.tls import Authority
from servekit.supervisor.lifecycle.remote_process import RemoteChild, RemoteControl
from servekit.supervisor.process.child_process import Exit
from tests.unit.gateway.conftest import until

OURS = Authority.new("c")
OWN = OURS.issue("gateway", "gateway/n", is_dialled=True)
DEADLINE_S = 30.0


class Line:
    """A gateway's line that listens, and what it has heard."""

    def __init__(self, grace_s: float) -> None:
        self.remote = TcpChannel(
            ListenOptions("tcp://127.0.0.1:0", "127.0.0.1", OWN, None, grace_s)
        )
        self.heard: list[Any] = []
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    @property
    def address(self) -> str:
        return tcp_address("127.0.0.1", self.remote.port)


@asynccontextmanager
async def listening(grace_s: float = 60.0) -> AsyncIterator[Line]:
    line = Line(grace_s)
    await line.remote.open(line.heard.append, line.ended.set_result)
    try:
        yield line
    finally:
        await line.remote.close()
        assert line.remote._server is not None
        line.remote._server.close()


class Supervisor:
    """Its end, and what it has heard."""

    def __init__(self) -> None:
        self.heard: list[FromGateway | AdminRequest] = []
        self.again = 0
        self.child: RemoteChild[Any]

    @classmethod
    async def of(cls, line: Line) -> Supervisor:
        made = cls()
        made.child = RemoteChild(
            "gateway/n",
            line.address,
            CertificateHolder(OURS.issue("supervisor", "s")),
            FromRemoteGateway,
            made.heard.append,
            RemoteControl(made._kill, made._exited),
            role="gateway",
        )
        await made.child.attach()
        made.child.on_again = made._on_again
        return made

    def _on_again(self) -> None:
        self.again += 1

    async def _kill(self, cause: str) -> None:
        raise AssertionError(f"nobody is to be killed: {cause}")

    async def _exited(self) -> Exit:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


async def test_each_hears_the_other() -> None:
    async with listening() as line:
        supervisor = await Supervisor.of(line)
        assert (supervisor.child.state, supervisor.child.here) == ("empty", False)
        supervisor.child.send(Topology((), gateways=3))
        line.remote.send(Serving())
        await until(lambda: line.heard == [Topology((), gateways=3)])
        await until(lambda: supervisor.heard == [Serving()])
        supervisor.child.disconnect()


async def test_a_supervisor_that_comes_later_is_told_how_it_stands() -> None:
    use, traffic = ModelDemand("m", 1, 0, 0.0), Traffic(7, 1, {"m": 1})
    async with listening() as line:
        first = await Supervisor.of(line)
        for message in (ModelDemand("m", 0, 2, 0.0), Serving(), Traffic(6, 0, {}), use, traffic):
            line.remote.send(message)
        await until(lambda: len(first.heard) == 5)
        first.child.disconnect()
        await until(lambda: not line.remote.has_supervisor)
        second = await Supervisor.of(line)
        assert second.child.state == "ready"
        await until(lambda: second.heard == [Serving(), traffic, use])
        second.child.disconnect()


async def test_a_connection_that_breaks_loses_nothing_but_what_is_of_the_moment() -> None:
    async with listening() as line:
        supervisor = await Supervisor.of(line)
        supervisor.child.send(Topology(()))
        await until(lambda: line.heard)
        control = line.remote._control
        assert control is not None
        control.abort()
        line.remote.send(Traffic(1, 0, {}))
        await until(lambda: supervisor.again == 1)
        await until(lambda: supervisor.heard == [Traffic(1, 0, {})])
        assert line.heard == [Topology(())], "it is its own affair to send the newest again"
        supervisor.child.disconnect()


async def test_what_operators_ask_goes_to_the_supervisor_and_comes_back() -> None:
    async with listening() as line:
        supervisor = await Supervisor.of(line)
        asking = [
            asyncio.create_task(line.remote.put(GetWhy(name), DEADLINE_S)) for name in ("a", "b")
        ]
        await until(lambda: len(supervisor.heard) == 2)
        for asked in reversed(supervisor.heard):
            assert isinstance(asked, AdminRequest) and isinstance(asked.question, GetWhy)
            supervisor.child.send(AdminResponse(asked.id, Refused(asked.question.name)))
        assert await asyncio.gather(*asking) == [Refused("a"), Refused("b")]
        assert not line.heard, "they are nobody else's"
        with pytest.raises(TimeoutError):
            await line.remote.put(GetWhy("c"), 0.01)
        asking = [asyncio.create_task(line.remote.put(GetWhy("d"), DEADLINE_S))]
        await until(lambda: len(supervisor.heard) == 4)
        supervisor.child.disconnect()
        with pytest.raises(EOFError, match="closed the connection"):
            await asking[0]
        with pytest.raises(OSError, match="no supervisor"):
            await line.remote.put(GetWhy("e"), DEADLINE_S)


async def test_without_a_supervisor_it_ends_after_its_grace() -> None:
    async with listening(grace_s=0.05) as line:
        supervisor = await Supervisor.of(line)
        supervisor.child.disconnect()
        error = await asyncio.wait_for(line.ended, DEADLINE_S)
        assert str(error) == "no supervisor for 0.05 s"


async def test_its_certificate_is_renewed_and_shown_to_who_comes_next() -> None:
    fresh = OURS.issue("gateway", "gateway/n", is_dialled=True)
    async with listening() as line:
        supervisor = await Supervisor.of(line)
        supervisor.child.send(Renew(fresh))
        await until(lambda: line.remote.identity.credentials == fresh)
        assert not line.heard
        supervisor.child.disconnect()
        shown = asyncio.get_running_loop().create_future()

        class Looking(Connection[Any]):
            def connection_made(self, transport: Any) -> None:
                tls = transport.get_extra_info("ssl_object")
                shown.set_result(tls.getpeercert(binary_form=True))
                super().connection_made(transport)

        made: Connection[Any] = await dial_address(
            line.address,
            lambda: Looking(Hello, lambda _: None, lambda _: None),
            OURS.issue("supervisor", "s"),
            role="gateway",
        )
        assert await shown == ssl.PEM_cert_to_DER_cert(fresh.certificate.decode())
        made.close()


@pytest.mark.parametrize("role", ["gateway", "worker", "supervisor"])
async def test_nobody_but_a_supervisor_is_let_in(role: Any) -> None:
    closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    posing: Sequence[Any] = ("supervisor", "gateway") if role != "supervisor" else ("gateway",)
    async with listening() as line:
        for claim in posing:
            closed = asyncio.get_running_loop().create_future()
            made: Connection[Any] = await dial_address(
                line.address,
                lambda closed=closed: Connection(Hello, lambda _: None, closed.set_result),  # type: ignore[misc]
                OURS.issue(role, "someone"),
                role="gateway",
            )
            made.send(Hello(PROTOCOL, claim, "someone"))
            await asyncio.wait_for(closed, DEADLINE_S)
        assert not line.remote.has_supervisor
    with pytest.raises(WireError):
        line.remote.admit(made, Hello(PROTOCOL, "gateway", "g"))
