"""Connections to one server: those at rest are used again, and as many opened as it takes."""

from __future__ import annotations

import asyncio
import ssl

from servekit.bench.client.client_protocol import Target
from servekit.bench.client.connection import Connection

#: A server that takes longer to accept counts as not reached.
CONNECT_S = 10.0


class Unreachable(Exception):
    """No connection; says why."""


class Dialer:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._host = target.host  # its address, once one has answered
        self._tls = tls_context(target)
        self._resting: list[Connection] = []

    def resting(self) -> Connection | None:
        """A connection that is open and has nothing to do."""
        while self._resting:
            connection = self._resting.pop()
            if not connection.closed:
                return connection
        return None

    def rest(self, connection: Connection) -> None:
        """Its answer is whole, or it was closed while it rested."""
        if not connection.closed:
            self._resting.append(connection)

    async def open(self, within_s: float = CONNECT_S) -> Connection:
        """A new one; raises Unreachable."""
        name = self._target.host if self._tls is not None else None
        made = asyncio.get_running_loop().create_connection(
            lambda: Connection(self.rest),
            self._host,
            self._target.port,
            ssl=self._tls,
            server_hostname=name,
        )
        try:
            transport, connection = await asyncio.wait_for(made, within_s)
        except TimeoutError:
            raise Unreachable(f"it does not accept within {within_s:g} s") from None
        except OSError as error:  # ssl's among them
            raise Unreachable(str(error)) from None
        peer = transport.get_extra_info("peername")
        self._host = peer[0] if peer else self._host
        return connection

    async def open_ahead(self, count: int) -> None:
        """Have so many rest; those that cannot be opened are left for the requests to tell of."""
        made = await asyncio.gather(
            *(self.open() for _ in range(count - len(self._resting))), return_exceptions=True
        )
        for connection in made:
            if isinstance(connection, Connection):
                self.rest(connection)

    def close(self) -> None:
        for connection in self._resting:
            connection.abort()


def tls_context(target: Target) -> ssl.SSLContext | None:
    """Verified by the system's authorities, or by the one that is named. Raises OSError."""
    if not target.tls:
        return None
    context = ssl.create_default_context(cafile=target.ca)
    if target.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
