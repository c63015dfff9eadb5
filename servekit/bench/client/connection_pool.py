"""A pool of connections to one server: idle ones are reused, others opened as needed."""

from __future__ import annotations

import asyncio
import ssl

from servekit.bench.client.client_protocol import Target
from servekit.bench.client.connection import Connection
from servekit.system.rlimits import is_shortage

#: Timeout of a connection attempt.
CONNECT_S = 10.0


class Unreachable(Exception):
    """The connection could not be opened; the message says why."""


class Dialer:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._host = target.host  # the resolved address after the first connection
        self._tls = tls_context(target)
        self._resting: list[Connection] = []

    def take_idle(self) -> Connection | None:
        """Return an idle open connection, or None."""
        while self._resting:
            connection = self._resting.pop()
            if not connection.closed:
                return connection
        return None

    def put_idle(self, connection: Connection) -> None:
        """Put a connection back after its answer, unless it is closed."""
        if not connection.closed:
            self._resting.append(connection)

    async def open_connection(self, within_s: float = CONNECT_S) -> Connection:
        """Open a new connection; raises Unreachable."""
        name = self._target.host if self._tls is not None else None
        made = asyncio.get_running_loop().create_connection(
            lambda: Connection(self.put_idle),
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
            if is_shortage(error):
                raise Unreachable(
                    f"the load generator, not the server, is out of files ({error.strerror}): "
                    "ulimit -Hn 65536, or more --processes"
                ) from None
            raise Unreachable(str(error)) from None
        peer = transport.get_extra_info("peername")
        self._host = peer[0] if peer else self._host
        return connection

    async def open_ahead(self, count: int) -> None:
        """Open connections until `count` are idle; failures are left for the requests to report."""
        made = await asyncio.gather(
            *(self.open_connection() for _ in range(count - len(self._resting))),
            return_exceptions=True,
        )
        for connection in made:
            if isinstance(connection, Connection):
                self.put_idle(connection)

    def close(self) -> None:
        for connection in self._resting:
            connection.abort()


def tls_context(target: Target) -> ssl.SSLContext | None:
    """Return a context that trusts the system's authorities, or the given one. Raises OSError."""
    if not target.tls:
        return None
    context = ssl.create_default_context(cafile=target.ca)
    if target.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
