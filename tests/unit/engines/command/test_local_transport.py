"""HTTP to a server on this machine, by a transport of our own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from servekit.engines.command.local_transport import LocalTransport
from tests.unit.engines.remote.liar import DONE, Liar, chunk, delta, head, lying, status, stream


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    timeout = httpx.Timeout(None, connect=5.0)
    async with httpx.AsyncClient(
        base_url=url, transport=LocalTransport(), timeout=timeout
    ) as found:
        yield found


@contextlib.asynccontextmanager
async def saying(*pieces: bytes, closes: bool = True) -> AsyncIterator[str]:
    """A server that sends these bytes for each request, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if not closes:
                await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def ask(asks: httpx.AsyncClient, liar: Liar) -> str:
    liar.answers += [stream(delta("a"), delta("b"), DONE)]
    answer = await asks.post("/chat/completions", json={"x": 1})
    assert (answer.status_code, liar.asked[-1].body) == (200, {"x": 1})
    return answer.text


async def test_one_connection_serves_one_answer_after_the_other() -> None:
    async with lying() as liar, client(liar.url) as asks:
        assert "a" in await ask(asks, liar)
        liar.answers += [status(503, "no")]
        assert (await asks.post("/chat/completions", json={})).status_code == 503
        assert "b" in await ask(asks, liar)
        assert liar.connections == 1


async def test_answers_at_the_same_time_have_connections_of_their_own() -> None:
    async with lying() as liar, client(liar.url) as asks:
        hold = asyncio.Event()
        liar.answers += [stream(delta("a"), hold=hold)] * 3
        asked = [asyncio.ensure_future(asks.post("/x", json={})) for _ in range(3)]
        await liar.until(lambda: liar.open == 3)
        hold.set()
        assert [(await one).status_code for one in asked] == [200] * 3
        assert liar.connections == 3


async def test_who_leaves_early_ends_the_connection() -> None:
    async with lying() as liar, client(liar.url) as asks:
        liar.answers += [stream(delta("a"), hold=asyncio.Event())]
        async with asks.stream("POST", "/x", json={}) as answer:
            assert b"a" in await anext(answer.aiter_raw())
        await liar.until(lambda: liar.gone == 1)


async def test_a_cancelled_request_ends_the_connection() -> None:
    async with lying() as liar, client(liar.url) as asks:
        liar.answers += [stream(hold=asyncio.Event())]
        asked = asyncio.ensure_future(asks.post("/x", json={}))
        await liar.until(lambda: liar.open == 1)
        asked.cancel()
        await liar.until(lambda: liar.gone == 1)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ((head(content_length="5"), b"Hel", b"lo"), "Hello"),
        ((head(transfer_encoding="chunked"), chunk(b"Hello"), b"0\r\n\r\n"), "Hello"),
        ((head(connection="close"), b"Hello"), "Hello"),  # to the end of the connection
        ((head(103), head(content_length="5"), b"Hello"), "Hello"),
        ((b"".join([head(content_length="5"), b"Hello"]),), "Hello"),
    ],
)
async def test_bodies_of_any_form(pieces: tuple[bytes, ...], text: str) -> None:
    async with saying(*pieces) as url, client(url) as asks:
        for _ in range(2):  # the server has hung up meanwhile
            assert (await asks.get("/x")).text == text
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((), httpx.ReadError),
        ((b"nonsense\r\n\r\n",), httpx.RemoteProtocolError),
        ((head(content_length="9"), b"Hel"), httpx.ReadError),
        ((head(transfer_encoding="chunked"), chunk(b"Hel")), httpx.ReadError),
        ((head(transfer_encoding="chunked"), b"zz\r\n"), httpx.RemoteProtocolError),
    ],
)
async def test_what_breaks_is_an_error(
    pieces: tuple[bytes, ...], error: type[httpx.TransportError]
) -> None:
    async with saying(*pieces) as url, client(url) as asks:
        with pytest.raises(error):
            await asks.get("/x")


async def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with client(f"http://127.0.0.1:{taken.getsockname()[1]}") as asks:
            with pytest.raises(httpx.ConnectError):
                await asks.get("/x")


async def test_a_body_is_not_read_far_ahead() -> None:
    size = 64 * 2**20
    pieces = [head(content_length=str(size)), *[bytes(2**20)] * (size // 2**20)]
    async with saying(*pieces) as url, client(url) as asks, asks.stream("GET", "/x") as answer:
        raw = answer.aiter_raw()
        first = await anext(raw)
        for _ in range(50):
            await asyncio.sleep(0)
        second = await anext(raw)
        assert len(second) < 4 * 2**20
        read = len(first) + len(second)
        async for piece in raw:
            read += len(piece)
        assert read == size


async def test_a_connection_whose_answer_was_not_read_is_not_used_again() -> None:
    """Its reading may be stopped: the next answer would not arrive."""
    size = 4 * 2**20
    long = head(content_length=str(size)) + bytes(size)
    async with saying(long, closes=False) as url, client(url) as asks:
        for _ in range(2):
            async with asyncio.timeout(20), asks.stream("GET", "/x") as answer:
                assert answer.status_code == 200
