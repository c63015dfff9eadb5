"""Where a gateway on this node listens: held by its actor, and inherited by each incarnation.

So nobody is refused between one that has died and the next: who comes meanwhile waits.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from servekit.system import sockets


class Sockets:
    """Sockets that listen."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], socket.socket] = {}

    def open(self, wanted: Sequence[tuple[str, int]]) -> list[int]:
        """Listen on these hosts and ports, and on no others; the descriptors, in their order.

        Raises StartError with a sentence, and then on none that was not open before.
        """
        made: dict[tuple[str, int], socket.socket] = {}
        try:
            for host, port in wanted:
                if (host, port) not in self._open:
                    made[host, port] = sockets.bind(host, port, setting="server.port")
        except BaseException:
            for sock in made.values():
                sock.close()
            raise
        self._open |= made
        for where in self._open.keys() - set(wanted):
            self._open.pop(where).close()
        return [self._open[host, port].fileno() for host, port in wanted]
