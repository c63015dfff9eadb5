from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref

import pytest

from servekit.gateway.gateway import serving
from servekit.gateway.http import Receive, Scope, Send
from servekit.gateway.protocol import Exchange, Http
from tests.unit.gateway.conftest import until


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("only the hot route is asked")


@pytest.mark.parametrize("reset", [False, True])
async def test_a_connection_that_ends_leaves_nothing_for_the_collector(reset: bool) -> None:
    """Gateways freeze what they begin with, and collections are rare: cycles would pile up."""
    seen: list[weakref.ref[Http]] = []

    def answer(exchange: Exchange) -> None:
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
