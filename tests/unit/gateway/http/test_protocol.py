from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref

import pytest

from servekit.gateway.http.asgi import Receive, Scope, Send
from servekit.gateway.http.protocol import Http
from servekit.gateway.http.response import FastResponse
from servekit.gateway.server import serving
from tests.unit.gateway.conftest import until


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("only the hot route is asked")


@pytest.mark.parametrize("reset", [False, True])
async def test_a_connection_that_ends_leaves_nothing_for_the_collector(reset: bool) -> None:
    """Gateways freeze what they begin with, and collections are rare: cycles would pile up."""
    seen: list[weakref.ref[Http]] = []

    def answer(exchange: FastResponse) -> None:
        seen.append(weakref.ref(exchange.protocol))
        exchange.answer(b"{}")

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
    hot = {b"/hot": lambda exchange: exchange.answer(b"{}")}
    async with serving(nothing, listener, hot, 1000) as close_doors:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(ask)
        assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n{}")
        close_doors()
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
