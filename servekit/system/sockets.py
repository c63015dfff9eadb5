"""The public socket: bound before any process is started, inherited by every gateway."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from servekit.errors import StartError
from servekit.system import procfs

_BACKLOG = 2048
_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


def bind_listener(host: str, port: int, *, setting: str = "--port") -> socket.socket:
    """Return a listening socket on `host`:`port`; port 0 takes a free one.

    Raises StartError, which names `setting` as the place to configure another port.
    """
    family, address = _resolve_address(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise StartError(_explain_refusal(host, port, error, setting)) from error
    sock.setblocking(False)
    return sock


def close_listeners(listeners: Iterable[socket.socket]) -> None:
    """Close our own copies; processes that inherited the sockets keep theirs."""
    for sock in listeners:
        sock.close()


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """Return the base URL of a socket for clients on this machine."""
    scheme = "https" if tls else "http"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def holder_of(port: int) -> str:
    """Return the process that listens on a TCP port: "pid 42 (nginx -g …)"; "" if unknown."""
    inodes = set(_listening_inodes(port))
    if not inodes:
        return ""
    for process in procfs.all_processes():
        if any(link in inodes for link in _open_sockets(process.pid)):
            return f"pid {process.pid} ({procfs.command_line(process.pid)})"
    return ""


def _resolve_address(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StartError(f"cannot listen on host {host!r}: {reason}") from error
    family, _, _, _, address = found[0]
    return family, address


def _explain_refusal(host: str, port: int, error: OSError, setting: str) -> str:
    where = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        by = f" by {holder}" if holder else ""
        return f"{where} is already in use{by}; choose another with {setting} (0 takes a free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {where}: {host} is not an address of this machine"
    if error.errno == errno.EACCES:
        return f"cannot listen on {where}: ports below 1024 need privileges; choose another"
    return f"cannot listen on {where}: {error.strerror}"


def _listening_inodes(port: int) -> Iterator[str]:
    """Yield the /proc/PID/fd links of sockets that listen on `port`. Source: proc(5)."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (Path("/proc/net") / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            local_port = int(fields[1].rsplit(":", 1)[1], 16)
            if fields[3] == _LISTENING and local_port == port:
                yield f"socket:[{fields[9]}]"


def _open_sockets(pid: int) -> Iterator[str]:
    try:
        for fd in os.scandir(f"/proc/{pid}/fd"):
            try:
                yield os.readlink(fd.path)  # noqa: PTH115  (thousands of links)
            except OSError:
                continue
    except OSError:
        return
