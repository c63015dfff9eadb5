"""Listening sockets of a gateway on this node, held by its actor across restarts.

So no client is refused between the death of a gateway and its restart: connections wait.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from servekit.system import sockets


class Sockets:
    """The open listening sockets."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], socket.socket] = {}

    def open(self, wanted: Sequence[tuple[str, int]]) -> list[int]:
        """Listen on exactly these hosts and ports; return the descriptors in their order.

        Raises StartError with a message, and then opens no new socket.
        """
        made: dict[tuple[str, int], socket.socket] = {}
        try:
            for host, port in wanted:
                if (host, port) not in self._open:
                    made[host, port] = sockets.bind_listener(host, port, setting="server.port")
        except BaseException:
            for sock in made.values():
                sock.close()
            raise
        self._open |= made
        for where in self._open.keys() - set(wanted):
            self._open.pop(where).close()
        return [self._open[host, port].fileno() for host, port in wanted]
