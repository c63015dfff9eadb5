"""The client's address behind reverse proxies, on the fast path and over ASGI."""

from __future__ import annotations

import asyncio
import socket

import pytest

from servekit.gateway.auth.authorization import Access
from servekit.gateway.auth.middleware import AuthMiddleware
from servekit.gateway.http.request_context import ORIGIN
from servekit.gateway.http.response import FastResponse
from servekit.gateway.http.trusted_proxies import ForwardedAddress
from servekit.gateway.server import serving
from servekit.protocol.messages import AccessRules


@pytest.mark.parametrize(
    ("address", "forwarded", "client"),
    [
        ("10.0.0.1", ["203.0.113.7"], "203.0.113.7"),
        ("10.0.0.1", ["198.51.100.9, 203.0.113.7"], "203.0.113.7"),  # the first was made up
        ("10.0.0.1", ["198.51.100.9", "203.0.113.7, 10.0.0.2"], "203.0.113.7"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("192.0.2.5", ["203.0.113.7"], "192.0.2.5"),  # not a trusted proxy
    ],
)
def test_the_nearest_address_that_is_no_trusted_proxy(
    address: str, forwarded: list[str], client: str
) -> None:
    headers = [(b"host", b"x"), *((b"x-forwarded-for", one.encode()) for one in forwarded)]
    assert ForwardedAddress(("10.0.0.0/8",)).find_client(address, headers) == client


@pytest.mark.parametrize(
    ("trusted", "seen"), [(("127.0.0.1",), "203.0.113.7"), (("192.0.2.0/24",), "127.0.0.1")]
)
async def test_fast_requests_have_the_address_of_the_client(
    trusted: tuple[str, ...], seen: str
) -> None:
    """Sources whose requests kill workers are isolated by this address."""

    async def nothing(scope: object, receive: object, send: object) -> None:
        raise AssertionError("only the hot route is asked")

    def answer(exchange: FastResponse) -> None:
        origin = ORIGIN.get()
        assert origin is not None
        exchange.send_json(origin.address.encode())

    access = Access()
    gate = AuthMiddleware(access, {b"/hot": answer}, {})
    access.apply_rules(AccessRules(trusted_proxies=trusted))
    listener = socket.create_server(("127.0.0.1", 0))
    async with serving(nothing, listener, gate.exchanges, 1000):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        for _ in range(2):  # the second has a known head
            writer.write(
                b"POST /hot HTTP/1.1\r\nhost: x\r\nx-forwarded-for: 203.0.113.7\r\n"
                b"content-length: 2\r\n\r\n{}"
            )
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert (await reader.readexactly(size)).decode() == seen
        writer.close()
