"""A worker to be: it has done all that takes long and touches no device, and forks when told to.

What it forks is a worker of its own right: a child of the supervisor (the process between them has
ended, and the supervisor is the reaper of its descendants), with its own session, output, control
channel and mark. Only the interpreter with what it has imported is inherited; it was started with
the environment that the worker needs, its pin among it.

CUDA does not survive a fork. Nothing here initialises it, and what has been forked looks before it
says that it is in order: if a library did after all, the supervisor starts a fresh interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import socket
import time
import warnings
from pathlib import Path

from servekit import engines, logging_config
from servekit.errors import LoadError
from servekit.protocol import fork_server
from servekit.protocol.fork_server import Fork, Forked, NotForked, Prepared
from servekit.protocol.messages import BootFailed, Load
from servekit.system.parent_death import CHILD_MARK, die_with, end_group

EXIT_NOT_PREPARED = 3
#: How long the supervisor may take to become the parent of what was forked.
_ADOPTED_S = 5.0
#: Has torch ask NVML, not CUDA, how many GPUs there are: asking CUDA would initialise it.
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class ForkedChild(Exception):
    """Raised in the forked process, up to where a worker begins: `name` and `control`."""

    def __init__(self, name: str, control: socket.socket) -> None:
        super().__init__(name)
        self.name = name
        self.control = control


def run(control: socket.socket, orders: socket.socket, supervisor: int) -> int:
    """Wait and fork until told to stop; returns the exit code. Raises Born in every worker."""
    message = fork_server.receive(control)
    if not isinstance(message, Load):
        return 0
    own_way = _ASK_NVML not in os.environ
    os.environ.setdefault(_ASK_NVML, "1")
    try:
        engines.prepare(message.spec)
    except LoadError as error:
        fork_server.send(control, BootFailed(error.message, error.permanent))
        return EXIT_NOT_PREPARED
    if own_way:
        del os.environ[_ASK_NVML]
    gc.collect()
    gc.freeze()  # a collection would write to every page that is shared
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    fork_server.send(control, Prepared())
    return _serve(control, orders, supervisor)


def _serve(control: socket.socket, orders: socket.socket, supervisor: int) -> int:
    while True:
        readable, _, _ = select.select([control, orders], [], [])
        if control in readable:
            if fork_server.receive(control) is None:
                end_group()  # the supervisor is gone
            return 0
        data, fds, _, _ = socket.recv_fds(orders, fork_server.MAX_ORDER_BYTES, 2)
        if not data:
            return 0
        _fork(fork_server.decode_order(data), fds, (control, orders), supervisor)
        for fd in fds:
            os.close(fd)


def _fork(order: Fork, fds: list[int], ours: tuple[socket.socket, ...], supervisor: int) -> None:
    """Fork twice, so that the worker is the supervisor's; the parent waits for the one between."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    between = os.getpid()
    if os.fork():
        os._exit(0)
    control, orders = ours
    try:
        born = _become(order, fds, between, supervisor)
    except Exception as error:  # whatever it is, a fresh interpreter does instead
        orders.send(fork_server.encode(NotForked(str(error)[:1000])))
        os._exit(1)
    orders.send(fork_server.encode(Forked(os.getpid())))
    control.close()
    orders.close()
    raise born


def _become(order: Fork, fds: list[int], between: int, supervisor: int) -> ForkedChild:
    """Be in every respect what a fresh worker is. Raises OSError, LoadError."""
    os.setsid()
    _await_adoption(between, supervisor)
    die_with(supervisor)
    _mark(order.mark)
    control_fd, output_fd = fds
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    logging_config.configure(order.name, json=True)
    engines.reborn()
    _rename(order.name)
    return ForkedChild(order.name, socket.socket(fileno=control_fd))


def _await_adoption(between: int, supervisor: int) -> None:
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)
    if os.getppid() != supervisor:
        raise LoadError(f"orphans are given to {os.getppid()}, not to {supervisor}")


def _rename(name: str) -> None:
    """Be shown by `ps` as a fresh worker would be, as far as there is room for it."""
    shown = Path("/proc/self/cmdline").read_bytes()
    words = shown.rstrip(b"\0").split(b"\0")
    if b"--name" not in words:
        return
    at = words.index(b"--name") + 1
    new = b"\0".join([*words[:at], name.encode()])
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45])
    if start and len(new) <= len(shown):
        ctypes.memmove(start, new.ljust(len(shown), b"\0"), len(shown))


def _mark(mark: str) -> None:
    """Write the worker's mark over the standby's, where /proc shows it. Raises LoadError.

    What a process began with stands in its memory, and /proc/PID/environ is a view of that.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    at = libc.getenv(CHILD_MARK.encode())
    if not at or len(os.environ.get(CHILD_MARK, "")) != len(mark):
        raise LoadError(
            f"{CHILD_MARK} is not in the environment as the supervisor had put it there"
        )
    ctypes.memmove(at, mark.encode(), len(mark))
    os.environ[CHILD_MARK] = mark  # what this process starts
    shown = Path("/proc/self/environ").read_bytes().split(b"\0")
    if f"{CHILD_MARK}={mark}".encode() not in shown:
        raise LoadError("this system does not show a process's environment as it is")
