"""The framed connection, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from servekit.errors import WireError
from servekit.protocol.messages import (
    Cancel,
    GatewayToWorker,
    Generate,
    Hello,
    SamplingParams,
)
from servekit.protocol.transport import connection as module
from servekit.protocol.transport.connection import (
    TOGETHER,
    Connection,
    adopt_socket,
    dial_address,
    listen_at,
)

DEADLINE_S = 60.0


class End:
    """One end of a connection that keeps all it is told."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.error: Exception | None = None
        self.connection: Connection[Any] = Connection(
            GatewayToWorker, self.messages.put_nowait, self._on_close
        )

    def _on_close(self, error: Exception | None) -> None:
        self.error = error

    async def next(self) -> Any:
        return await asyncio.wait_for(self.messages.get(), DEADLINE_S)

    async def closed(self) -> Exception | None:
        await asyncio.wait_for(self.connection.closed, DEADLINE_S)
        return self.error


async def pair() -> tuple[End, End]:
    left, right = socket.socketpair()
    ends = End(), End()
    await adopt_socket(left, lambda: ends[0].connection)
    await adopt_socket(right, lambda: ends[1].connection)
    return ends


async def raw() -> tuple[End, socket.socket]:
    left, right = socket.socketpair()
    end = End()
    await adopt_socket(left, lambda: end.connection)
    right.setblocking(False)
    return end, right


async def test_messages_arrive_whole_and_in_order() -> None:
    left, right = await pair()
    sent = [Hello(1, "gateway", "g"), Generate(1, SamplingParams(), prompt="x" * 1_000_000)]
    sent += [Cancel(n) for n in range(1000)]
    for message in sent:
        left.connection.send(message)
    assert [await right.next() for _ in sent] == sent
    left.connection.close()
    assert await right.closed() is None


async def test_frames_may_be_cut_anywhere() -> None:
    end, peer = await raw()
    body = msgspec.msgpack.encode(Cancel(7))
    frame = len(body).to_bytes(4, "big") + body
    loop = asyncio.get_running_loop()
    for byte in frame * 3:
        await loop.sock_sendall(peer, bytes([byte]))
        await asyncio.sleep(0)
    assert [await end.next() for _ in range(3)] == [Cancel(7)] * 3
    end.connection.abort()
    peer.close()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xff\xff\xff", "over the limit"),
        (b"\x00\x00\x00\x02\x91\xc0", "not a message"),
        (b"\x00\x00\x00\x01\xc1", "not a message"),
        (b"GET / HTTP/1.1\r\n\r\n", "over the limit"),
    ],
)
async def test_what_is_not_the_protocol_ends_the_connection(data: bytes, said: str) -> None:
    end, peer = await raw()
    await asyncio.get_running_loop().sock_sendall(peer, data)
    error = await end.closed()
    assert isinstance(error, WireError)
    assert said in str(error)
    peer.close()


async def test_nothing_is_delivered_after_an_error() -> None:
    end, peer = await raw()
    good = msgspec.msgpack.encode(Cancel(1))
    frame = len(good).to_bytes(4, "big") + good
    await asyncio.get_running_loop().sock_sendall(peer, b"\x00\x00\x00\x01\xc1" + frame)
    assert isinstance(await end.closed(), WireError)
    assert end.messages.empty()
    peer.close()


async def test_a_handler_that_raises_ends_its_connection_only() -> None:
    left, right = socket.socketpair()
    closed: list[Exception | None] = []

    def explode(message: object) -> None:
        raise WireError(f"unexpected {message}")

    await adopt_socket(left, lambda: Connection(GatewayToWorker, explode, closed.append))
    other = End()
    await adopt_socket(right, lambda: other.connection)
    other.connection.send(Cancel(1))
    await other.closed()
    assert len(closed) == 1
    assert isinstance(closed[0], WireError)


async def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 2**20)
    end, peer = await raw()
    for n in range(64):
        end.connection.send(Generate(n, SamplingParams(), prompt="x" * 100_000))
        await asyncio.sleep(0)
    error = await end.closed()
    assert isinstance(error, WireError)
    assert "does not read" in str(error)
    peer.close()


async def test_a_message_over_the_limit_is_refused_and_the_next_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 2**20)
    left, right = await pair()
    with pytest.raises(WireError, match="a frame of 2000"):
        left.connection.send(Generate(1, SamplingParams(), prompt="x" * 2_000_000))
    left.connection.send(Cancel(7))
    assert await right.next() == Cancel(7)
    left.connection.close()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_sender_knows_when_much_is_unread_and_when_it_is_read(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def crowding() -> None:
        end, peer = await raw()
        writable = asyncio.Event()
        end.connection.on_writable = writable.set
        sent = 0
        while not end.connection.crowded:  # all in one turn of the loop
            assert sent < 2 * module.CROWDED_BYTES
            end.connection.send(Generate(1, SamplingParams(), prompt="x" * 2**20))
            sent += 2**20
        size = 0
        while size < sent:
            size += len(await asyncio.get_running_loop().sock_recv(peer, 2**20))
        await asyncio.wait_for(writable.wait(), DEADLINE_S)
        assert not end.connection.crowded
        end.connection.abort()
        peer.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(crowding())


async def test_the_death_of_the_peer_is_seen_and_sends_become_nothing() -> None:
    left, right = await pair()
    right.connection.abort()
    await left.closed()
    left.connection.send(Cancel(1))
    left.connection.close()


class Noted:
    """A transport, and how many messages each write had."""

    def __init__(self, transport: Any, writes: list[int]) -> None:
        self._transport, self._writes = transport, writes

    def write(self, data: bytes) -> None:
        self._writes.append(data.count(b"Cancel"))
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def watched() -> tuple[End, socket.socket, list[int]]:
    """As `raw`, and how many messages each write of the end has."""
    left, peer = await raw()
    transport: Any = left.connection._transport
    writes: list[int] = []
    noted: Any = Noted(transport, writes)
    left.connection._transport = noted
    return left, peer, writes


async def test_what_is_sent_in_one_turn_leaves_in_eights_and_the_rest_at_its_end() -> None:
    left, peer, writes = await watched()
    for n in range(2 * TOGETHER + 3):
        left.connection.send(Cancel(n))
    assert writes == [TOGETHER, TOGETHER], "the peer is at it while the others come"
    data = b""
    while data.count(b"Cancel") < 2 * TOGETHER + 3:
        data += await asyncio.get_running_loop().sock_recv(peer, 65536)
    assert writes == [TOGETHER, TOGETHER, 3]
    left.connection.abort()
    peer.close()


async def test_what_is_gathered_in_a_turn_leaves_with_what_is_sent_in_it() -> None:
    left, peer, writes = await watched()
    gathered = [7]

    def on_turn() -> None:
        while gathered:
            left.connection.send(Cancel(gathered.pop()))

    left.connection.on_turn = on_turn
    left.connection.gather()
    left.connection.gather()
    left.connection.send(Cancel(1))
    await asyncio.sleep(0)
    assert writes == [2], "one write, in the very next turn"
    gathered.append(8)
    left.connection.gather()
    await asyncio.sleep(0)
    assert writes == [2, 1]
    left.connection.abort()
    peer.close()


async def test_what_was_sent_leaves_though_gathering_fails() -> None:
    left, right = await pair()

    def on_turn() -> None:
        left.connection.on_turn = None
        raise ValueError("no")

    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    left.connection.on_turn = on_turn
    left.connection.send(Cancel(1))
    assert await right.next() == Cancel(1)
    left.connection.send(Cancel(2))
    assert await right.next() == Cancel(2)
    assert isinstance(told[0]["exception"], ValueError)
    left.connection.abort()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_drained_is_when_the_kernel_has_all_of_it(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def draining() -> None:
        end, peer = await raw()
        end.connection.send(Cancel(1))
        assert await end.connection.drained(), "it fits in"
        peer.recv(65536)
        end.connection.send(Generate(1, SamplingParams(), prompt="x" * 1_000_000))
        waits = [asyncio.ensure_future(end.connection.drained()) for _ in range(2)]
        assert not (await asyncio.wait(waits, timeout=0.05))[0], "it does not, and nobody reads"
        waits.pop().cancel()  # as a deadline does
        size = 0
        while size < 1_000_000:
            size += len(await asyncio.get_running_loop().sock_recv(peer, 65536))
        assert await asyncio.wait_for(waits[0], DEADLINE_S)
        end.connection.send(Generate(2, SamplingParams(), prompt="x" * 1_000_000))
        wait = asyncio.ensure_future(end.connection.drained())
        await asyncio.sleep(0)
        peer.close()
        assert not await asyncio.wait_for(wait, DEADLINE_S)
        assert not await end.connection.drained()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(draining())


async def test_a_listener_is_for_this_user_only(tmp_path: Path) -> None:
    server_end = End()
    server = await listen_at(tmp_path / "s.sock", lambda: server_end.connection)
    assert (tmp_path / "s.sock").stat().st_mode & 0o777 == 0o600
    client = End()
    connection = await dial_address(tmp_path / "s.sock", lambda: client.connection)
    connection.send(Cancel(3))
    assert await server_end.next() == Cancel(3)
    connection.close()
    await server_end.closed()
    server.close()


async def test_dialling_nobody_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        await dial_address(tmp_path / "none.sock", lambda: End().connection)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("unread", [False, True])
def test_what_a_dead_peer_has_sent_is_read_though_it_is_written_to(
    make_loop: Callable[[], asyncio.AbstractEventLoop], unread: bool
) -> None:
    """The write fails with EPIPE, or ECONNRESET where the peer left something unread."""

    async def dying() -> None:
        end, peer = await raw()
        if unread:
            end.connection.send(Hello(1, "gateway", "g"))
            end.connection._flush()
        body = msgspec.msgpack.encode(Cancel(7))
        peer.sendall((len(body).to_bytes(4, "big") + body) * 100)
        peer.close()
        end.connection.send(Cancel(1))
        end.connection._flush()  # before the loop has looked at the socket
        assert isinstance(await end.closed(), OSError)
        assert end.messages.qsize() == 100

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(dying())
