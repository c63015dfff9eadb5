"""How a gateway that has outlived its supervisor hands its sockets to the next one.

It listens on a Unix socket of its own. Whoever connects is given the listening sockets, so that no
connection is refused from one supervisor to the next, and says `DRAIN` once its own gateways
serve. One that hangs up before has failed, and another is waited for. The gateway keeps that
connection until it ends: its EOF says that it has nothing left to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

#: "Ours serve now: take no more, and end when you are done."
DRAIN = b"d"
_MOST_SOCKETS = 4
_ANSWER_S = 2.0


def heir_path(run_dir: Path, which: int | str) -> Path:
    """Where that gateway waits for its heir."""
    return run_dir / f"heir-{which}.sock"


async def await_heir(path: Path, fds: Sequence[int], within_s: float) -> socket.socket | None:
    """Hand `fds` to whoever comes; the connection to one that says that its own gateways serve."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while (heir := await _bequeath(path, fds)) is None:
                pass
            return heir
    return None


async def _bequeath(path: Path, fds: Sequence[int]) -> socket.socket | None:
    loop = asyncio.get_running_loop()
    with _listen(path) as listener:
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


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(1)
    listener.setblocking(False)
    return listener


def inherit(paths: Iterable[Path]) -> list[tuple[socket.socket, list[socket.socket]]]:
    """Of each gateway that waits for us: the connection to it, and its listening sockets."""
    found: list[tuple[socket.socket, list[socket.socket]]] = []
    for path in sorted(paths):
        elder = socket.socket(socket.AF_UNIX)
        elder.settimeout(_ANSWER_S)
        try:
            elder.connect(str(path))
            _, fds, _, _ = socket.recv_fds(elder, 1, _MOST_SOCKETS)
        except OSError:  # it has ended
            elder.close()
            continue
        listeners = [socket.socket(fileno=fd) for fd in fds]
        for listener in listeners:
            listener.setblocking(False)
        found.append((elder, listeners))
    return found
