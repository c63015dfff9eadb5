from __future__ import annotations

import asyncio
import gc
import random
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from servekit.gateway.http import limits
from servekit.gateway.http.asgi import Receive, Scope, Send, send_json
from servekit.gateway.http.limits import Limits
from servekit.gateway.http.protocol import SLICE_BYTES, Head, Http
from servekit.gateway.http.response import FastResponse
from servekit.gateway.server import serving
from tests.unit.gateway.conftest import until
from tests.unit.gateway.serving import served


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("only the hot route is asked")


@pytest.mark.parametrize("reset", [False, True])
async def test_a_connection_that_ends_leaves_nothing_for_the_collector(reset: bool) -> None:
    """Gateways freeze what they begin with, and collections are rare: cycles would pile up."""
    seen: list[weakref.ref[Http]] = []

    def answer(exchange: FastResponse) -> None:
        seen.append(weakref.ref(exchange.protocol))
        exchange.send_json(b"{}")

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    gc.collect()
    gc.disable()
    try:
        async with serving(nothing, listener, {b"/hot": answer}, 1000):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            await reader.readuntil(b"\r\n\r\n{}")
            if reset:  # as Linux does with what is closed without lingering
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
            writer.close()
            await until(lambda: seen and seen[0]() is None, "the protocol is gone")
    finally:
        gc.enable()


async def test_who_is_connected_leaves_with_the_next_answer_once_the_doors_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway that another has taken over from refuses nobody, and keeps nobody."""
    monkeypatch.setattr(Http, "leaving", False)
    ask = b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    listener = socket.create_server(("127.0.0.1", 0))
    taken_over = listener.dup()  # as the next gateway has it
    hot = {b"/hot": lambda exchange: exchange.send_json(b"{}")}
    async with serving(nothing, listener, hot, 1000) as doors:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(ask)
        assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n{}")
        doors.close()
        _, late_writer = await asyncio.open_connection(*taken_over.getsockname())
        late_writer.write(ask)
        writer.write(ask)
        assert b"connection: close" in await reader.readuntil(b"\r\n\r\n{}")
        assert await reader.read() == b""
        with taken_over:
            other, _ = await asyncio.to_thread(taken_over.accept)  # not answered here
            assert other.getpeername() == late_writer.get_extra_info("sockname")
            other.close()
        writer.close()
        late_writer.close()


@pytest.mark.parametrize("ends", [False, True])
async def test_few_requests_are_parsed_behind_one_that_takes_long(ends: bool) -> None:
    """A client may send any number of them, and each takes a lot of memory."""
    first: list[FastResponse] = []
    bodies: list[bytes] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        bodies.append((await receive())["body"])  # uvicorn would read more now
        await send_json(send, b"{}")

    listener = socket.create_server(("127.0.0.1", 0))
    async with serving(answer, listener, {b"/hot": first.append}, 1000):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        await until(lambda: first, "it is asked")
        count = 2**19 // 50
        for at in range(count):
            writer.write(b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n%05d" % at)
        if ends:
            writer.write_eof()
        protocol = first[0].protocol
        await until(lambda: protocol._held, "more has come than is parsed")
        most = 2 * SLICE_BYTES // 50
        assert len(protocol.pipeline) < most
        first[0].send_json(b"{}")
        for _ in range(count + 1):
            await reader.readuntil(b"\r\n\r\n{}")
            assert len(protocol.pipeline) < most and len(protocol._held) < 2**19
        assert bodies == [b"%05d" % at for at in range(count)]
        writer.close()


LIMITS = Limits(sweep_every_s=0.05)


async def test_the_doors_are_used_while_a_client_reads_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = b'"%b"' % (b"x" * 2**25)  # more than the kernel takes
    hot = {b"/hot": lambda exchange: exchange.send_json(answer)}
    listener = socket.create_server(("127.0.0.1", 0))
    async with serving(nothing, listener, hot, 1000, LIMITS) as doors:
        for reads in (True, False):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert not doors.are_used()
            writer.write(b"POST /hot HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            await until(doors.are_used, "an answer is unsent")
            if reads:
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                assert await reader.readexactly(len(answer)) == answer
            else:
                monkeypatch.setattr(limits, "READS_WITHIN_S", 0.2)
            await until(lambda: not doors.are_used(), f"it is sent, or not read: {reads}")
            writer.close()


LINES = (b"host: x", b"authorization: Bearer abc", b"content-type: application/json")
MOST_BYTES = 5000


def ask(body: bytes, *lines: bytes, path: bytes = b"/hot") -> bytes:
    length = b"Content-Length: %d" % len(body)
    return b"\r\n".join([b"POST %b HTTP/1.1" % path, *LINES, length, *lines, b"", body])


def test_a_head_is_that_of_one_whole_request() -> None:
    head = Head.parse(ask(b"{}"))
    assert head is not None
    assert head.body_of(ask(b"{}")) == b"{}"
    assert head.body_of(ask(b"x" * 1000)) == b"x" * 1000
    assert head.body_of(ask(b"")) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        ask(b"{}")[:-1],
        ask(b"{}") + b"x",
        ask(b"{}") + ask(b"{}"),
        ask(b"{}", path=b"/cold"),
        ask(b"{}", b"expect: 100-continue"),
        ask(b"{}").replace(b"abc", b"abd"),
        ask(b"{}").replace(b": 2", b": 2 "),
        ask(b"{}").replace(b": 2", b": +2"),
        ask(b"{}").replace(b": 2", b": \xd9\xa2"),
        ask(b"{}").replace(b": 2", b": 2, 2"),
        ask(b"{}").replace(b": 2", b":"),
        ask(b"{}")[:40],
    ],
)
def test_another_head_or_another_length_is_left_to_the_parser(data: bytes) -> None:
    head = Head.parse(ask(b"{}"))
    assert head is not None and head.body_of(data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST /hot HTTP/1.1\r\nhost: x\r\n",
        ask(b"{}")[:-1],
        ask(b"{}") + ask(b"{}"),
        ask(b"{}", b"content-length: 2"),
        ask(b"{}", b"x: " + b"y" * 8192),
        b"POST /hot HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_there_is_no_head_to_know_the_next_by(data: bytes) -> None:
    assert Head.parse(data) is None


Talk = Callable[[list[bytes]], Awaitable[bytes]]
parsed: list[tuple[bytes, bytes, bytes]] = []


def answer(exchange: FastResponse) -> None:
    seen = exchange.path, exchange.headers.get(b"authorization", b""), bytes(exchange.body)
    parsed.append(seen)
    exchange.send_json(msgspec.json.encode([part.decode() for part in seen]))


async def cold(scope: Scope, receive: Receive, send: Send) -> None:
    """What is off the short way: chunked bodies, to be closed, other paths."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    held = dict(scope["headers"]).get(b"authorization", b"")
    said = msgspec.json.encode([scope["path"], held.decode(), body.decode()])
    head = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": said})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    parsed.clear()
    async with served(cold, {b"/hot": answer}, MOST_BYTES, LIMITS) as port:
        yield port


async def told(reader: asyncio.StreamReader) -> list[str]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    body: list[str] = msgspec.json.decode(await reader.readexactly(length))
    return body


def variations(rng: random.Random) -> tuple[bytes, list[str]]:
    """A request, and what its answer has to say."""
    body = bytes(rng.choices(b"abc {}\r\n", k=rng.choice([0, 1, 9, 10, 99, 100, 3000])))
    path, key = rng.choice([b"/hot"] * 6 + [b"/cold"]), rng.choice([b"abc"] * 6 + [b"d"])
    request = ask(body, path=path).replace(b"Bearer abc", b"Bearer " + key)
    if rng.random() < 0.1:
        request = request.replace(b"Content-Length: %d" % len(body), b"transfer-encoding: chunked")
        end = request.index(b"\r\n\r\n") + 4
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        request = request[:end] + chunk + b"0\r\n\r\n"
    return request, [path.decode(), f"Bearer {key.decode()}", body.decode()]


@pytest.mark.parametrize("seed", range(6))
async def test_each_of_many_requests_has_its_own_answer(port: int, seed: int) -> None:
    """Whole, in pieces, several at once: whatever of it is known from the one before."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(40):
        some = [variations(rng) for _ in range(rng.choice([1, 1, 1, 1, 3]))]
        data = b"".join(request for request, _ in some)
        cuts = sorted(rng.sample(range(len(data)), rng.choice([0, 0, 0, 1, 3])))
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            writer.write(data[begin:end])
            await asyncio.sleep(0)  # they may come apart
        for _, wanted in some:
            assert await asyncio.wait_for(told(reader), 30) == wanted
    writer.close()


async def test_a_body_over_the_limit_is_refused_also_where_the_head_is_known(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ask(b"x"))
    assert (await told(reader))[2] == "x"
    writer.write(ask(b"x" * (MOST_BYTES + 1)))
    assert b" 413 " in await reader.readline()
    assert len(parsed) == 1
    writer.close()


async def test_an_idle_connection_is_closed_in_the_end() -> None:
    async with served(cold, {b"/hot": answer}, MOST_BYTES, LIMITS, keep_alive_s=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(ask(b"x"))
            assert (await told(reader))[2] == "x"
        closed = asyncio.ensure_future(reader.read())
        await until(closed.done, "it is closed")
        assert closed.result() == b""
        writer.close()
