"""Clients that keep a server waiting, or send what is no HTTP: uvicorn itself, on a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from servekit.gateway.exchange import Exchange
from servekit.gateway.gateway import serving
from servekit.gateway.http import Receive, Scope, Send, read_body, send_json
from servekit.gateway.limits import Limits

WITHIN_S = 5.0
LIMITS = Limits(header_s=0.2, body_s=0.3, linger_s=0.2, sweep_every_s=0.02)
MAX_BODY_BYTES = 1_000_000


async def count_bytes(scope: Scope, receive: Receive, send: Send) -> None:
    body = await read_body(scope, receive, MAX_BODY_BYTES)
    await send_json(send, b"%d" % len(body))


def count_hot(exchange: Exchange) -> None:
    exchange.answer(b"%d" % len(exchange.body))


Connect = Callable[[], Any]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    hot = {b"/hot": count_hot}
    async with serving(count_bytes, listener, hot, MAX_BODY_BYTES, LIMITS):
        yield connect
        for writer in writers:
            writer.close()


async def to_the_end(connect: Connect, *pieces: bytes) -> bytes:
    """All that the server sends until it closes."""
    reader, writer = await connect()
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    return bytes(await asyncio.wait_for(reader.read(), WITHIN_S))


def code_of(answer: bytes) -> tuple[int, str]:
    """Status and code; asserts that this is one whole answer, with OpenAI's envelope."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head and b"content-type: application/json" in head
    assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split(b" ")[1]), error["code"]


HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\n"
PATHS = pytest.mark.parametrize("path", [b"/hot", b"/asgi"])


@pytest.mark.parametrize("begun", [b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\nx: y", b"\r\n"])
async def test_a_header_that_does_not_end_is_408(connect: Connect, begun: bytes) -> None:
    assert code_of(await to_the_end(connect, begun)) == (408, "request_timeout")


async def test_a_client_that_sends_nothing_is_closed(connect: Connect) -> None:
    assert await to_the_end(connect) == b""


async def test_bytes_that_drip_do_not_prolong_a_header(connect: Connect) -> None:
    reader, writer = await connect()
    answer = asyncio.ensure_future(reader.read())
    writer.write(b"GET / HTTP/1.1\r\nx: ")
    while not answer.done():
        writer.write(b"y")
        await asyncio.wait([answer], timeout=0.05)
    assert code_of(answer.result()) == (408, "request_timeout")


@PATHS
@pytest.mark.parametrize(
    "begun", [b"content-length: 9\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"]
)
async def test_a_body_that_does_not_come_is_408(
    connect: Connect, path: bytes, begun: bytes
) -> None:
    assert code_of(await to_the_end(connect, HEAD % path + begun)) == (408, "request_timeout")


@PATHS
async def test_a_body_in_pieces_is_waited_for(connect: Connect, path: bytes) -> None:
    reader, writer = await connect()
    writer.write(HEAD % path + b"content-length: 4\r\n\r\n")
    answer = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n4"))
    for _ in range(4):
        assert not answer.done()
        await asyncio.wait([answer], timeout=0.05)
        writer.write(b"x")
    assert (await asyncio.wait_for(answer, WITHIN_S)).startswith(b"HTTP/1.1 200 OK")


@PATHS
async def test_the_next_request_has_a_deadline_of_its_own(connect: Connect, path: bytes) -> None:
    whole = HEAD % path + b"content-length: 2\r\n\r\nab"
    reader, writer = await connect()
    for _ in range(2):
        writer.write(whole)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n2"), WITHIN_S)
    writer.write(b"POST")
    got = await asyncio.wait_for(reader.read(), WITHIN_S)
    assert code_of(got) == (408, "request_timeout")


@PATHS
@pytest.mark.parametrize(
    "line", [b"x: " + b"y" * 1000 + b"\r\n", b"a: b\r\n", b"y" * 4096], ids=["long", "short", "one"]
)
async def test_a_header_over_the_limit_is_431(connect: Connect, path: bytes, line: bytes) -> None:
    many = line * (4 * LIMITS.header_bytes // len(line))
    flood = [many[at : at + 10_000] for at in range(0, len(many), 10_000)]
    got = await to_the_end(connect, HEAD % path, *flood)
    assert code_of(got) == (431, "header_too_large")
    got = await to_the_end(connect, HEAD % path + many)
    assert code_of(got) == (431, "header_too_large")


@PATHS
async def test_trailers_are_a_header_too(connect: Connect, path: bytes) -> None:
    begun = HEAD % path + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    got = await to_the_end(connect, begun, b"a: b\r\n" * LIMITS.header_bytes)
    assert code_of(got) == (431, "header_too_large")


@PATHS
async def test_bodies_and_pipelines_do_not_count(connect: Connect, path: bytes) -> None:
    size = 4 * LIMITS.header_bytes
    large = HEAD % path + b"content-length: %d\r\n\r\n" % size + b"x" * size
    chunk = b"%x\r\n%b\r\n" % (1000, b"x" * 1000)
    chunked = HEAD % path + b"transfer-encoding: chunked\r\n\r\n" + chunk * 300 + b"0\r\n\r\n"
    assert await answers(connect, large + chunked + large) == [size, 300_000, size]
    small = HEAD % path + b"content-length: 2\r\n\r\nab"
    assert await answers(connect, small * 3000) == [2] * 3000


async def answers(connect: Connect, requests: bytes) -> list[int]:
    """What each of some pipelined requests was answered."""
    reader, writer = await connect()
    writer.write(requests)
    found = []
    for _ in range(requests.count(b"HTTP/1.1")):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        assert head.startswith(b"HTTP/1.1 200 OK")
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        found.append(int(await reader.readexactly(length)))
    return found


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01", b"nonsense\r\n\r\n"])
async def test_no_http_is_400_in_the_envelope(connect: Connect, garbage: bytes) -> None:
    assert code_of(await to_the_end(connect, garbage)) == (400, "invalid_http")


@PATHS
async def test_a_broken_body_is_400_in_the_envelope(connect: Connect, path: bytes) -> None:
    got = await to_the_end(connect, HEAD % path + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
    assert code_of(got) == (400, "invalid_http")


@pytest.mark.parametrize("path", [b"/hot", b"/other"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_drips_is_refused_in_the_end(
    connect: Connect, path: bytes, chunked: bool
) -> None:
    reader, writer = await connect()
    length = b"transfer-encoding: chunked" if chunked else b"content-length: 100000"
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % (path, length))
    reading = asyncio.ensure_future(reader.read())
    began = asyncio.get_running_loop().time()
    while not reading.done():
        assert asyncio.get_running_loop().time() - began < WITHIN_S
        writer.write(b"1\r\nx\r\n" if chunked else b"x")
        await asyncio.wait([reading], timeout=LIMITS.body_s / 6)
    assert code_of(reading.result()) == (408, "request_timeout")
    assert b"too slowly" in reading.result()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_long_body_at_a_fair_rate_is_taken(connect: Connect, chunked: bool) -> None:
    reader, writer = await connect()
    pieces, size = 20, 2048
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (pieces * size)
    writer.write(b"POST /hot HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % length)
    reading = asyncio.ensure_future(reader.readuntil(b"%d" % (pieces * size)))
    for _ in range(pieces):
        piece = bytes(size)
        writer.write(b"%x\r\n%b\r\n" % (size, piece) if chunked else piece)
        await asyncio.wait([reading], timeout=LIMITS.body_s / 6)
    writer.write(b"0\r\n\r\n" if chunked else b"")
    assert b"200 OK" in await asyncio.wait_for(reading, WITHIN_S)
