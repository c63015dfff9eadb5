"""The blocking end of a control channel, against the framing that all others speak."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from servekit.errors import WireError
from servekit.protocol.control import fork_server
from servekit.protocol.control.fork_server import Fork, Forked, FromStandby, NotForked, Prepared
from servekit.protocol.messages import BootFailed, Stop
from servekit.protocol.transport.connection import MAX_FRAME_BYTES, Connection, adopt_socket


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_come_whole_and_one_by_one(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    fork_server.send_message(ours, Stop())
    fork_server.send_message(ours, Stop())
    ours.close()
    assert [fork_server.receive_message(theirs) for _ in range(3)] == [Stop(), Stop(), None]


def test_half_a_message_is_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(b"\0\0\0\x09half")
    ours.close()
    assert fork_server.receive_message(theirs) is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), WireError),
        (b"\0\0\0\x01\xc1", msgspec.MsgspecError),
    ],
)
def test_nonsense_is_refused(
    pair: tuple[socket.socket, socket.socket], data: bytes, error: type[Exception]
) -> None:
    ours, theirs = pair
    ours.sendall(data)
    with pytest.raises(error):
        fork_server.receive_message(theirs)


async def test_a_connection_understands_it(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    heard: list[FromStandby] = []
    connection: Connection[FromStandby] = Connection(FromStandby, heard.append, lambda error: None)
    fork_server.send_message(theirs, Prepared())
    fork_server.send_message(theirs, BootFailed("no", permanent=True))
    theirs.close()
    await adopt_socket(ours, lambda: connection)
    await connection.closed
    assert heard == [Prepared(), BootFailed("no", permanent=True)]


def test_orders_and_answers_fit_one_message() -> None:
    order = Fork("m" * 128 + "/999999", "f" * fork_server.MARK_CHARS)
    assert len(fork_server.encode(order)) <= fork_server.MAX_ORDER_BYTES
    assert fork_server.decode_order(fork_server.encode(order)) == order
    for answer in (Forked(4194304), NotForked("x" * 1000)):
        assert len(fork_server.encode(answer)) <= fork_server.MAX_ORDER_BYTES
        assert fork_server.decode_answer(fork_server.encode(answer)) == answer
