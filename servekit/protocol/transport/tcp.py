"""Connections between machines: TCP under mutual TLS, with detection of lost peers.

The death of a process is noticed at once, by EOF, as on a Unix socket. A machine that loses its
power or network says nothing: the kernel probes it after a period of silence, and the connection
ends when it has not answered for `lost_s`, whether data was sent or not. A busy peer is not taken
for lost: its kernel answers the probes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, Any, Literal

from servekit.errors import StartError
from servekit.protocol.transport import tls
from servekit.protocol.transport.address import host_and_port
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.credentials import Credentials, Role

if TYPE_CHECKING:
    from servekit.protocol.transport.connection import Connection, Factory

#: Maximum time from the first packet to a connection that both sides have verified.
DIAL_S = 5.0
#: Maximum length of a worker's Hello, which describes its model.
_HELLO_BYTES = 2**20
#: Maximum wait for the peer to confirm a TLS shutdown.
_GOODBYE_S = 1.0


async def dial_member(
    address: str,
    factory: Factory,
    credentials: Credentials | CertificateHolder | None,
    lost_s: float,
    role: Role,
) -> Connection[Any]:
    """Connect to a member in that role.

    Raises OSError, with a sentence where it is not the system's own.
    """
    host, port = host_and_port(address)
    loop = asyncio.get_running_loop()
    try:
        context = _tls_context(credentials, address, "client")
        async with asyncio.timeout(DIAL_S):
            transport, connection = await loop.create_connection(
                factory, host, port, ssl=context, ssl_shutdown_timeout=_GOODBYE_S
            )
    except TimeoutError:
        raise TimeoutError(f"{address} has not answered within {DIAL_S:g} s") from None
    except ssl.SSLError as error:
        raise tls.NotTrusted(f"{address}: {tls.explain_failure(error)}") from None
    except StartError as error:
        raise tls.NotTrusted(error.message) from None
    if connection.peer is None or connection.peer.role != role:
        connection.abort()
        raise tls.NotTrusted(f"{address} is not a {role} of this cluster")
    _watch_socket(transport.get_extra_info("socket"), lost_s)
    connection.allow(_HELLO_BYTES)
    return connection


async def listen_on_port(
    address: str,
    factory: Factory,
    credentials: Credentials | CertificateHolder | None,
    lost_s: float,
) -> asyncio.Server:
    """Listen on a port; 0 is a free one. Raises OSError, ValueError, StartError."""
    host, port = host_and_port(address)
    context = _tls_context(credentials, address, "server")
    server = await asyncio.get_running_loop().create_server(
        factory,
        host,
        port,
        ssl=context,
        ssl_handshake_timeout=DIAL_S,
        ssl_shutdown_timeout=_GOODBYE_S,
    )
    for sock in server.sockets:
        _watch_socket(sock, lost_s)  # accepted sockets inherit it
    return server


def _tls_context(
    shown: Credentials | CertificateHolder | None, address: str, side: Literal["client", "server"]
) -> ssl.SSLContext:
    """Return the TLS context. Raises StartError for missing credentials, or invalid ones."""
    if shown is None:
        raise StartError(f"{address} is on a network, and this process has no certificate for it")
    return (
        shown.context(side)
        if isinstance(shown, CertificateHolder)
        else tls.tls_context(shown, side)
    )


def _watch_socket(sock: Any, lost_s: float) -> None:
    """Close the connection when its peer has not answered for so long. Source: tcp(7)."""
    between_s = max(1, round(lost_s / 4))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * lost_s))
