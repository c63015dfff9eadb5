"""Clients that keep a server waiting, or send what is no HTTP: uvicorn itself, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import RequestError
from servekit.gateway.http.asgi import (
    EVENT_STREAM,
    Receive,
    Scope,
    Send,
    read_body,
    send_error,
    send_json,
)
from servekit.gateway.http.limits import Bodies, LimitedProtocol, Limits
from servekit.gateway.http.protocol import Http
from servekit.gateway.http.response import FastResponse
from servekit.gateway.server import serving
from servekit.sse import EventStream
from tests.integration.certificates import make as make_certificate
from tests.polling import WITHIN_S
from tests.unit.gateway.conftest import until

LIMITS = Limits(header_s=0.2, body_s=0.3, linger_s=0.5, unread_bytes=4 * 2**20, sweep_every_s=0.02)
MAX_BODY_BYTES = 1_000_000
HUGE_BYTES = 32 * 2**20
#: Between the words of a long stream.
LONG_STEP_S = 0.02


class Seen:
    """What one test sees of its server: a slow request has begun, a client has gone."""

    begun: asyncio.Event
    gone: asyncio.Event
    enough: asyncio.Event


async def count_bytes(scope: Scope, receive: Receive, send: Send) -> None:
    if (odd := ODD.get(scope["path"])) is not None:
        await odd(receive, send)
        return
    try:
        body = await read_body(scope, receive, MAX_BODY_BYTES)
    except RequestError as error:
        await send_error(send, error)
        return
    await send_json(send, b"%d" % len(body))


async def slow(receive: Receive, send: Send) -> None:
    body = (await receive())["body"]
    Seen.begun.set()
    if body == b"wait":
        assert (await receive())["type"] == "http.disconnect"
        Seen.gone.set()
        return
    await asyncio.sleep(0.05)
    await send_json(send, b"%d" % len(body))


async def stream(receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for word in (b"one ", b"two ", b"three "):
        await send({"type": "http.response.body", "body": word, "more_body": True})
    await send({"type": "http.response.body"})


async def quiet(receive: Receive, send: Send) -> None:
    """Say something, and then nothing until `Seen.enough`."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
    await send({"type": "http.response.body", "body": b"data: alive\n\n", "more_body": True})
    watching = asyncio.ensure_future(watch(receive))
    watching.add_done_callback(lambda _: Seen.gone.set())
    ending = asyncio.ensure_future(Seen.enough.wait())
    await asyncio.wait((watching, ending), return_when=asyncio.FIRST_COMPLETED)
    await send({"type": "http.response.body", "body": b"data: end\n\n"})
    for task in (watching, ending):
        task.cancel()


async def huge(receive: Receive, send: Send) -> None:
    await receive()
    await send_json(send, b"x" * HUGE_BYTES)
    await receive()
    Seen.gone.set()


async def huge_stream(receive: Receive, send: Send) -> None:
    watching = asyncio.ensure_future(watch(receive))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not watching.done():
        await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
    Seen.gone.set()


async def long(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    word = b"one "
    while not Seen.enough.is_set():
        await send({"type": "http.response.body", "body": word, "more_body": True})
        await asyncio.sleep(LONG_STEP_S)
        word = b"more "
    await send({"type": "http.response.body", "body": b"end"})


async def watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


ODD = {
    "/ui/slow": slow,
    "/ui/quiet": quiet,
    "/quiet": quiet,
    "/slow": slow,
    "/stream": stream,
    "/long": long,
    "/huge": huge,
    "/huge_stream": huge_stream,
}


def count_hot(exchange: FastResponse) -> None:
    exchange.send_json(b"%d" % len(exchange.body))


def slow_hot(exchange: FastResponse) -> None:
    Seen.begun.set()
    if exchange.body == b"wait":
        exchange.on_gone = Seen.gone.set
    else:
        length = len(exchange.body)
        asyncio.get_running_loop().call_later(0.05, lambda: exchange.send_json(b"%d" % length))


def quiet_hot(exchange: FastResponse) -> None:
    exchange.begin_stream(EVENT_STREAM)
    exchange.write(b"data: alive\n\n")
    exchange.on_gone = Seen.gone.set
    ending = asyncio.ensure_future(Seen.enough.wait())
    ending.add_done_callback(lambda _: exchange.write(b"data: end\n\n", last=True))


def long_hot(exchange: FastResponse, word: bytes = b"one ") -> None:
    if Seen.enough.is_set():
        exchange.write(b"end", last=True)
        return
    if not exchange.response_started:
        exchange.begin_stream(EVENT_STREAM)
    exchange.write(word)
    asyncio.get_running_loop().call_later(LONG_STEP_S, long_hot, exchange, b"more ")


Connect = Any


@pytest.fixture
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    connect.port = port  # type: ignore[attr-defined]
    Seen.begun, Seen.gone, Seen.enough = (asyncio.Event() for _ in range(3))
    hot = {b"/hot": count_hot, b"/slow_hot": slow_hot, b"/long_hot": long_hot}
    hot[b"/quiet_hot"] = quiet_hot
    async with serving(
        *(count_bytes, listener, hot, MAX_BODY_BYTES, getattr(request, "param", LIMITS)),
        envelopes={"/own": lambda error: (error.status, b"own " + error.code.encode())},
    ):
        yield connect
        for writer in writers:
            writer.close()


async def to_the_end(connect: Connect, *pieces: bytes) -> bytes:
    """All that the server sends until it closes."""
    reader, writer = await connect()
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    try:
        return bytes(await asyncio.wait_for(reader.read(), WITHIN_S))
    finally:
        writer.close()


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


@pytest.mark.parametrize("path", [b"/own", b"/own?beta=true"])
async def test_a_refusal_has_the_format_of_its_path(connect: Connect, path: bytes) -> None:
    answer = await to_the_end(connect, HEAD % path + b"content-length: 9\r\n\r\nabc")
    assert answer.endswith(b"\r\n\r\nown request_timeout")


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


@pytest.mark.parametrize("url", [b"http://a:999999/", b"http://:x/", b"/\xff"])
@pytest.mark.parametrize("before", [b"", b"GET /asgi HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_a_url_that_is_none_is_400(connect: Connect, before: bytes, url: bytes) -> None:
    reader, writer = await connect()
    if before:
        writer.write(before)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n0"), WITHIN_S)
    writer.write(HEAD % url + b"content-length: 9\r\n\r\nab")
    assert code_of(await asyncio.wait_for(reader.read(), WITHIN_S)) == (400, "invalid_http")


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


# ---------------------------------------------------------------- Host, chunks, and old clients


@PATHS
@pytest.mark.parametrize(
    "hosts", [b"", b"host: x\r\nhost: x\r\n", b"Host: x\r\nx: y\r\nhost: y\r\n"]
)
async def test_a_host_that_is_not_said_once_is_400(
    connect: Connect, path: bytes, hosts: bytes
) -> None:
    asks = b"POST %b HTTP/1.1\r\n%bcontent-length: 2\r\n\r\nab" % (path, hosts)
    assert code_of(await to_the_end(connect, asks)) == (400, "invalid_http")


AMBIGUOUS = {
    "doubled length": b"content-length: 2\r\ncontent-length: 2\r\n\r\nab",
    "two lengths": b"content-length: 2\r\ncontent-length: 3\r\n\r\nab",
    "a list of lengths": b"content-length: 2, 2\r\n\r\nab",
    "a signed length": b"content-length: +2\r\n\r\nab",
    "length and chunks": b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n0\r\n\r\n",
    "chunks not last": b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "a folded line": b"content-length:\r\n 2\r\n\r\nab",
    "a blank before the colon": b"content-length : 2\r\n\r\nab",
}


@PATHS
@pytest.mark.parametrize("rest", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_a_request_that_proxies_may_read_in_another_way_is_400(
    connect: Connect, path: bytes, rest: bytes
) -> None:
    hidden = HEAD % b"/hidden" + b"content-length: 0\r\n\r\n"
    got = await to_the_end(connect, HEAD % path + rest + hidden)
    assert code_of(got) == (400, "invalid_http")


@PATHS
async def test_chunk_extensions_have_an_end(connect: Connect, path: bytes) -> None:
    begun = HEAD % path + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n1;"
    reader, writer = await connect()
    writer.write(begun + b"x" * 400_000)
    got = await asyncio.wait_for(reader.readuntil(b"}}"), WITHIN_S)
    assert code_of(got) == (400, "invalid_http")
    assert await flood(writer, b"x" * 16_384) < 8 * 2**20


@PATHS
async def test_a_body_in_single_bytes_is_taken(connect: Connect, path: bytes) -> None:
    """Nearly all of it is what stands around the chunks."""
    chunks = b"1\r\nx\r\n" * 60_000
    asks = HEAD % path + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    got = await to_the_end(connect, asks, *pieces(chunks), b"0\r\n\r\n")
    assert got.endswith(b"\r\n\r\n60000")


def pieces(data: bytes, size: int = 10_000) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


async def flood(writer: asyncio.StreamWriter, piece: bytes) -> int:
    """Send a piece again and again until the server takes no more; how much it took, bytes."""
    sent = 0
    try:
        while sent < 512 * 2**20:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), WITHIN_S)
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


@PATHS
@pytest.mark.parametrize(
    "rest", [b"content-length: 99999999999\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"]
)
async def test_the_rest_of_a_body_that_is_too_large_has_an_end(
    connect: Connect, path: bytes, rest: bytes
) -> None:
    reader, writer = await connect()
    chunk = b"x" * 65_536
    piece = b"%x\r\n%b\r\n" % (len(chunk), chunk) if b"chunked" in rest else chunk
    writer.write(HEAD % path + rest + 17 * piece)
    assert b" 413 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), WITHIN_S)
    sent = await flood(writer, piece)
    assert sent <= LIMITS.unread_bytes + MAX_BODY_BYTES + 16 * 2**20


async def test_http_1_0_is_answered_without_chunks(connect: Connect) -> None:
    got = await to_the_end(connect, b"GET /stream HTTP/1.0\r\n\r\n")
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body == b"one two three "


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("path", [b"/hot", b"/asgi", b"/slow", b"/slow_hot", b"/ui/slow"])
async def test_a_client_that_only_sends_no_more_is_answered(
    connect: Connect, path: bytes, version: bytes
) -> None:
    reader, writer = await connect()
    asks = b"POST %b HTTP/%b\r\nhost: x\r\ncontent-length: 2\r\n\r\nab" % (path, version)
    writer.write(asks)
    writer.write_eof()
    got = await asyncio.wait_for(reader.read(), WITHIN_S)  # and then it ends
    assert got.endswith(b"\r\n\r\n2")
    interim, *_ = got.split(b"HTTP/1.1 200 OK")
    assert interim in (b"", b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize("stray", [b"\r\n", b"GET /hot HT", b"\r\n\r\nPOST /hot HTTP/1.1\r\nhost"])
@pytest.mark.parametrize("path", [b"/long", b"/long_hot"])
async def test_stray_bytes_neither_hold_nor_end_a_stream(
    connect: Connect, path: bytes, stray: bytes
) -> None:
    """They are half a request that has no deadline before the answer is whole."""
    reader, writer = await connect()
    writer.write(HEAD % path + b"content-length: 2\r\n\r\nab")
    await asyncio.wait_for(reader.readuntil(b"one "), WITHIN_S)
    writer.write(stray)
    await writer.drain()
    began_s = asyncio.get_running_loop().time()
    for _ in range(3 * round(LIMITS.header_s / LONG_STEP_S)):
        await asyncio.wait_for(reader.readuntil(b"more "), WITHIN_S)
    assert asyncio.get_running_loop().time() - began_s > 2 * LIMITS.header_s
    Seen.enough.set()
    rest = await asyncio.wait_for(reader.read(), WITHIN_S)  # and now that header is late
    assert b"end" in rest


async def test_pipelined_requests_are_answered_after_the_end(connect: Connect) -> None:
    reader, writer = await connect()
    for path in (b"/slow", b"/hot", b"/asgi"):
        writer.write(HEAD % path + b"content-length: 2\r\n\r\nab")
    writer.write_eof()
    got = await asyncio.wait_for(reader.read(), WITHIN_S)
    assert got.count(b"\r\n\r\n2") == 3


@pytest.mark.parametrize("path", [b"/hot", b"/asgi", b"/slow", b"/slow_hot"])
async def test_a_whole_request_is_answered_whatever_follows_it(
    connect: Connect, path: bytes
) -> None:
    """As of a client that counts characters where its body has more bytes."""
    asks = HEAD % path + b"content-length: 2\r\n\r\nab"
    for count in (1, 2):
        got = await to_the_end(connect, asks * count + b'junk"}')
        assert got.count(b"\r\n\r\n2") == count


@pytest.mark.parametrize("path", [b"/long", b"/long_hot"])
async def test_bytes_that_are_no_request_do_not_cut_a_stream(connect: Connect, path: bytes) -> None:
    reader, writer = await connect()
    writer.write(HEAD % path + b"content-length: 2\r\n\r\nab" + b'junk"}')
    for _ in range(3 * round(LIMITS.linger_s / LONG_STEP_S)):
        await asyncio.wait_for(reader.readuntil(b"more "), WITHIN_S)
    Seen.enough.set()
    assert b"end" in await asyncio.wait_for(reader.read(), WITHIN_S)  # and then it is closed


QUIET = [(b"/ui/quiet", b"1.1"), (b"/quiet", b"1.0"), (b"/quiet", b"1.1"), (b"/quiet_hot", b"1.1")]


@pytest.mark.parametrize(("path", "version"), QUIET)
async def test_a_client_that_has_left_a_silent_stream_is_noticed_within_a_second(
    connect: Connect, path: bytes, version: bytes
) -> None:
    reader, writer = await connect()
    writer.write(b"POST %b HTTP/%b\r\nhost: x\r\ncontent-length: 2\r\n\r\nab" % (path, version))
    await asyncio.wait_for(reader.readuntil(b"alive\n\n"), WITHIN_S)
    writer.close()
    async with asyncio.timeout(1.0):
        await Seen.gone.wait()


@pytest.mark.parametrize(("path", "version"), QUIET)
async def test_a_client_that_only_sends_no_more_gets_the_whole_of_a_silent_stream(
    connect: Connect, path: bytes, version: bytes
) -> None:
    """By Python's own client, beside raw HTTP/1.0, whose body is all until the end."""

    def read(sock: socket.socket) -> list[bytes]:
        answer = HTTPResponse(sock, method="POST")
        answer.begin()
        first = answer.read1(100)
        sock.shutdown(socket.SHUT_WR)
        said.set()
        return EventStream().read_events(first + answer.read())

    said = threading.Event()
    with socket.create_connection(("127.0.0.1", connect.port), WITHIN_S) as sock:
        head = b"POST %b HTTP/%b\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"
        sock.sendall(head % (path, version))
        reading = asyncio.create_task(asyncio.to_thread(read, sock))
        await until(said.is_set)
        await asyncio.sleep(3 * LIMITS.sweep_every_s)  # it is looked for
        assert not Seen.gone.is_set()
        Seen.enough.set()
        assert await reading == [b"alive", b"end"]


@pytest.mark.parametrize("path", [b"/slow", b"/slow_hot", b"/ui/slow"])
async def test_a_client_that_has_left_is_noticed(connect: Connect, path: bytes) -> None:
    """On the wire it is as one that only sends no more."""
    _, writer = await connect()
    writer.write(HEAD % path + b"content-length: 4\r\n\r\nwait")
    await writer.drain()
    await asyncio.wait_for(Seen.begun.wait(), WITHIN_S)
    writer.close()
    await asyncio.wait_for(Seen.gone.wait(), WITHIN_S)


async def test_half_a_request_is_not_waited_for_after_the_end(connect: Connect) -> None:
    for half in (b"POST /hot HT", HEAD % b"/hot" + b"content-length: 4\r\n\r\nab"):
        reader, writer = await connect()
        writer.write(half)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 0.15) == b""


# ---------------------------------------------------------------- bodies that are half sent


HALF = b"content-length: 200000\r\n\r\n" + b"x" * 100_000


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> Bodies:
    """Room for ten halves of a body."""
    bodies = Bodies()
    bodies.limit_bytes = 1_050_000
    monkeypatch.setattr(LimitedProtocol, "bodies", bodies)
    return bodies


async def half_sent(
    connect: Connect, bodies: Bodies, path: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that stops in the middle of its body, once all that it sent is counted."""
    before_bytes = bodies.size_bytes
    reader, writer = await connect()
    writer.write(HEAD % path + HALF)
    await until(lambda: bodies.size_bytes == before_bytes + 100_000, "it is there")
    return reader, writer


@PATHS
async def test_half_sent_bodies_keep_nobody_out(
    connect: Connect, bodies: Bodies, path: bytes
) -> None:
    halves = [await half_sent(connect, bodies, path) for _ in range(10)]
    assert bodies.size_bytes == 1_000_000
    assert await answers(connect, HEAD % path + b"content-length: 2\r\n\r\nab") == [2]
    small = await connect()
    small[1].write(HEAD % path + b"content-length: 4\r\n\r\nab")
    await until(lambda: bodies.size_bytes == 1_000_002, "half a small one has come")
    assert await answers(connect, HEAD % path + HALF + b"x" * 100_000) == [200_000]
    small[1].write(b"cd")
    assert (await asyncio.wait_for(small[0].readuntil(b"\r\n\r\n4"), WITHIN_S))[9:12] == b"200"
    said = [await asyncio.wait_for(reader.read(), WITHIN_S) for reader, _ in halves]
    codes = [code_of(got) for got in said]
    refused = codes.count((503, "too_many_bodies"))
    assert 1 <= refused <= 2
    assert codes.count((408, "request_timeout")) == 10 - refused
    assert sum(b"\r\nretry-after: 1\r\n" in got for got in said) == refused
    assert (bodies.size_bytes, bodies.senders) == (0, set())


@PATHS
@pytest.mark.parametrize("ending", ["whole", "leaves", "refused"])
async def test_what_a_body_held_is_given_back(
    connect: Connect, bodies: Bodies, path: bytes, ending: str
) -> None:
    reader, writer = await half_sent(connect, bodies, path)
    assert bodies.size_bytes == 100_000
    if ending == "whole":
        writer.write(b"x" * 100_000)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n200000"), WITHIN_S)
    elif ending == "leaves":
        writer.close()
    await until(lambda: not (bodies.size_bytes or bodies.senders), "nothing is held")


@PATHS
async def test_what_comes_after_the_answer_holds_nothing(
    connect: Connect, bodies: Bodies, path: bytes
) -> None:
    reader, writer = await connect()
    chunk = b"x" * 100_000
    writer.write(HEAD % path + b"transfer-encoding: chunked\r\n\r\n")
    for _ in range(20):
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    assert b" 413 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), WITHIN_S)
    await until(lambda: not (bodies.size_bytes or bodies.senders), "nothing is held")


# ---------------------------------------------------------------- clients that do not read


@pytest.mark.parametrize("path", [b"/huge", b"/huge_stream"])
@pytest.mark.parametrize("last", [b"", b"connection: close\r\n"])
async def test_a_client_that_does_not_read_is_ended(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, path: bytes, last: bytes
) -> None:
    monkeypatch.setattr(Http, "write_timeout_s", 0.3)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", connect.port))
        await loop.sock_sendall(client, b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (path, last))
        await asyncio.wait_for(Seen.gone.wait(), WITHIN_S)


async def test_a_client_that_reads_slowly_gets_all(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Http, "write_timeout_s", 0.3)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", connect.port))
        await loop.sock_sendall(
            client, b"GET /huge HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        came, began_s = 0, loop.time()
        while piece := await asyncio.wait_for(loop.sock_recv(client, 131_072), WITHIN_S):
            came += len(piece)
            if loop.time() - began_s < 1.5:
                await asyncio.wait([asyncio.ensure_future(Seen.gone.wait())], timeout=0.02)
        assert came > HUGE_BYTES


@pytest.mark.parametrize("connect", [replace(LIMITS, most_connections=3)], indirect=True)
async def test_with_too_many_connected_only_what_is_vital_is_answered(connect: Connect) -> None:
    asks = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n"
    _, busy = await connect()
    busy.write(HEAD % b"/slow" + b"content-length: 4\r\n\r\nwait")
    await asyncio.wait_for(Seen.begun.wait(), WITHIN_S)
    idle = [await connect() for _ in range(2)]
    for reader, writer in idle:
        writer.write(asks % b"/asgi")
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n0"), WITHIN_S)
    reader, writer = await connect()
    writer.write(asks % b"/health")
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n0"), WITHIN_S)
    for path in (b"/asgi", b"/hot"):
        refused = await to_the_end(connect, HEAD % path + b"content-length: 2\r\n\r\nab")
        assert code_of(refused) == (503, "too_many_connections")
        assert b"\r\nretry-after: 1\r\n" in refused
    for reader, _ in idle:  # they make room
        assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
    got = b""
    async with asyncio.timeout(WITHIN_S):  # those that were refused linger
        while b" 200 OK" not in got:
            with contextlib.suppress(ConnectionError):  # it was idle for a sweep
                got = await to_the_end(connect, HEAD % b"/asgi" + b"connection: close\r\n\r\n")
    assert not Seen.gone.is_set()


@pytest.mark.parametrize(
    "connect",
    [replace(LIMITS, most_connections=1, most_spares=2, header_s=WITHIN_S)],
    indirect=True,
)
async def test_the_oldest_connection_too_many_makes_room_for_the_next(connect: Connect) -> None:
    _, busy = await connect()
    busy.write(HEAD % b"/slow" + b"content-length: 4\r\n\r\nwait")
    await asyncio.wait_for(Seen.begun.wait(), WITHIN_S)
    halves = [await connect() for _ in range(3)]  # none of them is idle
    for _, writer in halves:
        writer.write(b"GET /livez HTTP/1.1\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(halves[0][0].read(), WITHIN_S) == b""
    for reader, writer in halves[1:]:
        writer.write(b"host: x\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n0"), WITHIN_S)
    assert not Seen.gone.is_set()


@pytest.mark.parametrize(
    "connect",
    [replace(LIMITS, most_connections=1, sweep_every_s=WITHIN_S)],  # which would close what rests
    indirect=True,
)
async def test_a_connection_opened_in_a_crowd_serves_all_after_it(connect: Connect) -> None:
    _, first = await connect()
    reader, writer = await connect()
    writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n0"), WITHIN_S)
    [spare] = LimitedProtocol.spares
    first.close()
    await until(lambda: len(spare.connections) == 1, "the first has left")
    writer.write(HEAD % b"/asgi" + b"content-length: 2\r\n\r\nab")
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n2"), WITHIN_S)
    assert not LimitedProtocol.spares


async def test_a_client_that_begins_no_tls_is_closed(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*make_certificate(tmp_path))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    async with serving(count_bytes, listener, limits=LIMITS, tls=context):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
        writer.close()
