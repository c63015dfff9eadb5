"""A process that becomes vLLM's engine core, with the imports done before the core is wanted.

vLLM starts its core in a fresh interpreter, which imports again all that the worker has imported. A
host does so beside the worker's own imports; in a worker that was forked from a fork server, it is
forked as well, before the worker has threads. vLLM then starts the core in the host, by a
multiprocessing context whose processes are spawned ones in all but the interpreter. A second
process, or one that needs more of the worker than the host can get, is spawned.

    worker ── environment, two pipes ──▶ host     (one message with descriptors)
    worker ── pickled process, as multiprocessing spawns it ──▶ host, in the first pipe

Neither the host nor a fork server initialises CUDA, so that the core can.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import socket
import stat
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from multiprocessing import popen_spawn_posix, reduction, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import structlog

from servekit.system.python.python_command import module_command

log: Any = structlog.get_logger(__name__)

#: What the core imports.
LIBRARIES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor",
    "servekit.engines.vllm.core.scheduler",
    "servekit.engines.vllm.core.worker_extension",
)
#: The core forks the processes that run the model on several GPUs, or on the CPU; vLLM spawns them
#: all the same where it finds that CUDA is initialised.
_FORK_RANKS = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
#: The longest environment that Linux passes to a process by default is of this order.
_MOST_BYTES = 2**20


class Host(NamedTuple):
    """A host that waits for its core: a child of this process."""

    pid: int
    control: socket.socket


_host: Host | None = None


def import_core() -> None:
    """Import what the core needs."""
    for name in LIBRARIES:
        import_module(name)


def start_host() -> None:
    """Start a host in a fresh interpreter, unless this process has one."""
    global _host
    if _host is not None:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [*module_command(__name__), str(theirs.fileno())]
        pid = util.spawnv_passfds(os.fsencode(command[0]), command, [theirs.fileno()])
    _host = Host(pid, ours)


def fork_host() -> None:
    """Fork a host from this process, which has done the imports, and has no threads."""
    global _host
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        theirs.close()
        _host = Host(pid, ours)
        return
    try:
        _close_sockets(but=theirs.fileno())
        run_host(theirs)
    finally:
        os._exit(1)


def _close_sockets(but: int) -> None:
    """Close the sockets of the parent, whose peers would not see its end."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone
            if fd > 2 and fd != but and stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)


def run_host(control: socket.socket) -> NoReturn:
    """Wait for the core, and run it; end if the worker has ended first."""
    environment, pipes, _, _ = socket.recv_fds(control, _MOST_BYTES, 2)
    if not environment:
        os._exit(0)
    control.close()
    _take_environment({**json.loads(environment), **_FORK_RANKS})
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        sys.modules["torch"].set_num_threads(int(threads))  # it read the variable when imported
    code: int = spawn._main(pipes[0], os.dup(pipes[0]))
    atexit._run_exitfuncs()
    os._exit(code)  # the second pipe has been open until now, which shows that the core lives


def _take_environment(wanted: Mapping[str, str]) -> None:
    """Take the variables of the worker. Others stay where they are: the title lies before them."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted.items() - os.environ.items())


@contextlib.contextmanager
def core_in_host() -> Iterator[None]:
    """Let vLLM start its core in the host of this process, if there is one."""
    from vllm.v1.engine import utils

    plain = getattr(utils, "get_mp_context", None)
    if _host is None or plain is None or plain().get_start_method() != "spawn":
        yield
        return
    utils.get_mp_context = _HostContext
    try:
        yield
    finally:
        utils.get_mp_context = plain


class _HostPopen(popen_spawn_posix.Popen):
    """A process in the host; spawned if that is impossible."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        global _host
        host, _host = _host, None
        if host is None or not self._launch_in(host, process_obj):
            self._fds.clear()
            super()._launch(process_obj)  # type: ignore[misc]

    def _launch_in(self, host: Host, process: Any) -> bool:
        pickled = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), pickled)
            reduction.dump(process, pickled)
        finally:
            set_spawning_popen(None)
        reading, writing = os.pipe()
        sentinel, open_while_alive = os.pipe()
        try:
            with host.control:
                if self._fds:
                    raise OSError("the core needs descriptors of the worker")
                environment = json.dumps(dict(os.environ)).encode()
                socket.send_fds(host.control, [environment], [reading, open_while_alive])
            with open(writing, "wb", closefd=False) as pipe:
                pipe.write(pickled.getbuffer())
        except OSError as error:
            log.warning("core_host_failed", reason=str(error))
            for fd in (writing, sentinel):
                os.close(fd)
            os.waitpid(host.pid, 0)  # without its socket, it ends
            return False
        finally:
            os.close(reading)
            os.close(open_while_alive)
        self.pid, self.sentinel = host.pid, sentinel
        close_fds: Any = util.close_fds  # type: ignore[attr-defined]
        self.finalizer = util.Finalize(self, close_fds, (sentinel, writing))
        return True


class _HostProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _HostPopen(process_obj)


class _HostContext(SpawnContext):
    Process = _HostProcess


if __name__ == "__main__":
    import_core()
    run_host(socket.socket(fileno=int(sys.argv[1])))
