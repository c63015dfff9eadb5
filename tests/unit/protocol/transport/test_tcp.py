"""A lost peer is noticed on both sides of a connection: what the kernel was told of it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from servekit.errors import StartError
from servekit.protocol.messages import Hello, ModelInfo
from servekit.protocol.transport.connection import FIRST_FRAME_BYTES, Connection, dial_address
from servekit.protocol.transport.tcp import dial_member, listen_on_port
from servekit.protocol.transport.tls import NotTrusted
from tests.polling import poll_async
from tests.unit.protocol.transport.test_connection import DEADLINE_S, End
from tests.unit.protocol.transport.test_tls import GATEWAY, WORKER, listening

LOST_S = 20.0


def settings(sock: Any) -> list[int]:
    tcp = socket.IPPROTO_TCP
    return [
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        sock.getsockopt(tcp, socket.TCP_KEEPIDLE),
        sock.getsockopt(tcp, socket.TCP_KEEPINTVL),
        sock.getsockopt(tcp, socket.TCP_KEEPCNT),
        sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT),
    ]


def socket_of(connection: Connection[Any]) -> Any:
    assert connection._transport is not None
    return connection._transport.get_extra_info("socket")


@pytest.mark.parametrize(("lost_s", "between_s"), [(LOST_S, 5), (1.0, 1)])
async def test_silence_is_probed_on_both_sides(lost_s: float, between_s: int) -> None:
    async with listening(lost_s=lost_s) as listener:
        client = End()
        connection = await dial_address(
            listener.address, lambda: client.connection, GATEWAY, lost_s=lost_s
        )
        server = await listener.next()
        wanted = [1, between_s, between_s, 4, round(1000 * lost_s)]
        assert settings(socket_of(connection)) == wanted
        await poll_async("the handshake", lambda: server.connection._transport)
        assert settings(socket_of(server.connection)) == wanted, "inherited"
        connection.close()


async def test_a_member_may_describe_its_model_at_length() -> None:
    """The first frame of a worker is longer than that of a stranger may be."""
    async with listening() as listener:
        client = End()
        await dial_address(listener.address, lambda: client.connection, GATEWAY)
        server = await listener.next()
        await asyncio.sleep(0)
        info = ModelInfo(1, 1, True, "x" * FIRST_FRAME_BYTES, "none", "cpu")
        async with asyncio.timeout(DEADLINE_S):
            while server.connection.peer is None:  # noqa: ASYNC110 - the handshake has no event
                await asyncio.sleep(0.002)
        hello = Hello(1, "worker", "m/0", info)
        server.connection.send(hello)
        assert await client.next() == hello
        client.connection.close()


async def test_a_member_in_another_role_is_not_talked_to() -> None:
    async with listening() as listener:
        client = End()
        with pytest.raises(NotTrusted, match="is not a gateway of this cluster"):
            await dial_member(
                listener.address, lambda: client.connection, GATEWAY, LOST_S, "gateway"
            )
        await client.closed()


async def test_nobody_comes_to_a_network_without_a_certificate() -> None:
    with pytest.raises(NotTrusted, match="has no certificate"):
        await dial_member("tcp://127.0.0.1:9", lambda: End().connection, None, LOST_S, "worker")
    with pytest.raises(StartError, match="has no certificate"):
        await listen_on_port("tcp://127.0.0.1:0", lambda: End().connection, None, LOST_S)


async def test_a_free_port_is_found() -> None:
    server = await listen_on_port("tcp://127.0.0.1:0", lambda: End().connection, WORKER, LOST_S)
    assert server.sockets[0].getsockname()[1] > 0
    server.close()
