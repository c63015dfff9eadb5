"""Hand-over of listening sockets from an orphaned gateway to the next supervisor.

The gateway listens on a Unix socket of its own. A client gets the listening sockets, so that no
connection is refused between two supervisors, and sends `DRAIN` once its own gateways serve. If it
hangs up before, it has failed, and the gateway waits for another. The gateway keeps that connection
until it ends: EOF means that it has no requests left.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

#: The new gateways serve: accept no more connections, and exit when done.
DRAIN = b"d"
_MOST_SOCKETS = 4
_ANSWER_S = 2.0
#: Interval of attempts to listen where the folder is gone: the next supervisor makes it again.
_RETRY_S = 0.2


def heir_path(run_dir: Path, which: int | str) -> Path:
    """Return the path of the socket where that gateway waits for its heir."""
    return run_dir / f"heir-{which}.sock"


async def await_heir(path: Path, fds: Sequence[int], within_s: float) -> socket.socket | None:
    """Offer `fds` to heirs; return the connection to the first one that sends DRAIN, else None."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while True:
                try:
                    if (heir := await _hand_over_sockets(path, fds)) is not None:
                        return heir
                except OSError:
                    await asyncio.sleep(_RETRY_S)
    return None


async def _hand_over_sockets(path: Path, fds: Sequence[int]) -> socket.socket | None:
    loop = asyncio.get_running_loop()
    with _listen_at(path) as listener:
        heir, _ = await loop.sock_accept(listener)
    with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
        undo.enter_context(heir)
        heir.setblocking(True)  # a few descriptors always fit
        socket.send_fds(heir, [b"."], list(fds))
        heir.setblocking(False)
        if await loop.sock_recv(heir, 1) == DRAIN:
            undo.pop_all()
            return heir
    return None


def _listen_at(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(1)
    listener.setblocking(False)
    return listener


def inherit_sockets(paths: Iterable[Path]) -> list[tuple[socket.socket, list[socket.socket]]]:
    """Return the connection and the listening sockets of each gateway that waits for an heir."""
    found: list[tuple[socket.socket, list[socket.socket]]] = []
    for path in sorted(paths):
        elder = socket.socket(socket.AF_UNIX)
        elder.settimeout(_ANSWER_S)
        try:
            elder.connect(str(path))
            _, fds, _, _ = socket.recv_fds(elder, 1, _MOST_SOCKETS)
        except OSError:
            fds = []
        if not fds:  # the gateway has ended
            elder.close()
            continue
        listeners = [socket.socket(fileno=fd) for fd in fds]
        for listener in listeners:
            listener.setblocking(False)
        found.append((elder, listeners))
    return found
