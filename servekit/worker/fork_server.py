"""A fork server: does all slow preparation that touches no device, then forks workers on command.

A forked worker is a child of the supervisor: the intermediate process exits, and the supervisor is
the subreaper of its descendants. The worker has its own session, output, control channel and
process mark. It inherits only the interpreter and its imported modules. The fork server was started
with the environment that the worker needs, including CPU and GPU pinning.

CUDA does not survive a fork, so nothing here initialises it. The forked process checks this before
it reports success; if a library has initialised CUDA, the supervisor starts a fresh interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from servekit import engines, logging_config
from servekit.errors import LoadError
from servekit.protocol.control import fork_server
from servekit.protocol.control.fork_server import Fork, Forked, NotForked, Prepared
from servekit.protocol.messages import BootFailed, Load
from servekit.system.parent_death import CHILD_MARK, die_with, end_group

EXIT_NOT_PREPARED = 3
#: How long the supervisor may take to become the parent of a forked process.
_ADOPTED_S = 5.0
#: The preparation's priority, as `nice` counts it: a tenth of a busy core's time.
_PREPARATION_NICE = 10
#: Makes torch ask NVML for the number of GPUs; asking CUDA would initialise it.
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class ForkedWorker(NamedTuple):
    """The name and the control socket of the worker that this process has become by a fork."""

    name: str
    control: socket.socket


def run_fork_server(
    control: socket.socket, orders: socket.socket, supervisor: int
) -> int | ForkedWorker:
    """Wait and fork until told to stop; return the exit code.

    In each forked process it returns the worker that this process is to be.
    """
    message = fork_server.receive_message(control)
    if not isinstance(message, Load):
        return 0
    own_way = _ASK_NVML not in os.environ
    os.environ.setdefault(_ASK_NVML, "1")
    try:
        with ThreadPoolExecutor(1, initializer=_yield_cores) as thread:  # it ends before any fork
            thread.submit(engines.prepare_engine, message.spec).result()
    except LoadError as error:
        fork_server.send_message(control, BootFailed(error.message, error.permanent))
        return EXIT_NOT_PREPARED
    if own_way:
        del os.environ[_ASK_NVML]
    gc.collect()
    gc.freeze()  # garbage collection would write to every shared page
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    fork_server.send_message(control, Prepared())
    return _serve_orders(control, orders, supervisor)


def _yield_cores() -> None:
    """Let requests go before the preparation: on Linux, a thread has a priority of its own.

    Forked workers have that of the main thread, since a priority cannot be raised again.
    """
    this = os.PRIO_PROCESS, threading.get_native_id()
    os.setpriority(*this, max(os.getpriority(*this), _PREPARATION_NICE))


def _serve_orders(
    control: socket.socket, orders: socket.socket, supervisor: int
) -> int | ForkedWorker:
    while True:
        readable, _, _ = select.select([control, orders], [], [])
        if control in readable:
            if fork_server.receive_message(control) is None:
                end_group()  # the supervisor is gone
            return 0
        data, fds, _, _ = socket.recv_fds(orders, fork_server.MAX_ORDER_BYTES, 2)
        if not data:
            return 0
        order = fork_server.decode_order(data)
        if (forked := _fork_worker(order, fds, (control, orders), supervisor)) is not None:
            return forked
        for fd in fds:
            os.close(fd)


def _fork_worker(
    order: Fork,
    fds: list[int],
    ours: tuple[socket.socket, ...],
    supervisor: int,
) -> ForkedWorker | None:
    """Fork twice, so that the worker becomes a child of the supervisor.

    The parent waits for the intermediate process, and returns None.
    """
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return None
    between = os.getpid()
    if os.fork():
        os._exit(0)
    control, orders = ours
    try:
        forked = _become_worker(order, fds, between, supervisor)
    except Exception as error:  # on any failure the supervisor starts a fresh interpreter
        orders.send(fork_server.encode(NotForked(str(error)[:1000])))
        os._exit(1)
    orders.send(fork_server.encode(Forked(os.getpid())))
    control.close()
    orders.close()
    return forked


def _become_worker(order: Fork, fds: list[int], between: int, supervisor: int) -> ForkedWorker:
    """Turn the forked process into an equivalent of a fresh worker. Raises OSError, LoadError."""
    os.setsid()
    _await_adoption(between, supervisor)
    die_with(supervisor)
    _replace_mark(order.mark)
    control_fd, output_fd = fds
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    logging_config.configure(order.name, json=True)
    engines.take_over_fork()
    _rename_process(order.name)
    return ForkedWorker(order.name, socket.socket(fileno=control_fd))


def _await_adoption(between: int, supervisor: int) -> None:
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() == between and time.monotonic() < deadline:
        time.sleep(0.0005)
    if os.getppid() != supervisor:
        raise LoadError(f"orphans are given to {os.getppid()}, not to {supervisor}")


def _rename_process(name: str) -> None:
    """Make `ps` show the worker's name if the fork server's command line has room for it."""
    shown = Path("/proc/self/cmdline").read_bytes()
    words = shown.rstrip(b"\0").split(b"\0")
    if b"--name" not in words:
        return
    at = words.index(b"--name") + 1
    new = b"\0".join([*words[:at], name.encode()])
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45])
    if start and len(new) <= len(shown):
        ctypes.memmove(start, new.ljust(len(shown), b"\0"), len(shown))


def _replace_mark(mark: str) -> None:
    """Overwrite the fork server's mark with the worker's in /proc/PID/environ. Raises LoadError.

    /proc/PID/environ is a view of the memory in which the process received its initial environment.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    at = libc.getenv(CHILD_MARK.encode())
    if not at or len(os.environ.get(CHILD_MARK, "")) != len(mark):
        raise LoadError(
            f"{CHILD_MARK} is not in the environment as the supervisor had put it there"
        )
    ctypes.memmove(at, mark.encode(), len(mark))
    os.environ[CHILD_MARK] = mark  # inherited by child processes
    shown = Path("/proc/self/environ").read_bytes().split(b"\0")
    if f"{CHILD_MARK}={mark}".encode() not in shown:
        raise LoadError("this system does not show a process's environment as it is")
