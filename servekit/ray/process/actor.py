"""Ray actor that starts a worker or gateway on its node and reports on it.

The driver calls it in the actor's threads. When it has not been called for a while and no process
runs any more, it releases its place and exits: a supervisor that never returns leaves nothing in
the cluster.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any

import msgspec

from servekit.errors import StartError
from servekit.protocol.control.ray_messages import RemoteGpu, Running, Start
from servekit.protocol.messages import GpuStatus
from servekit.protocol.transport.credentials import Credentials
from servekit.ray.process.node_probe import as_remote, own_gpus
from servekit.supervisor.process.environment import THREADS
from servekit.system import procfs, sockets
from servekit.system.gpu.gpu_memory_audit import group_of, stray_memory
from servekit.system.gpu.gpus import Gpu, find_gpus, gpu_memory_by_pid, gpus_in_use

#: Output lines kept for a later supervisor.
_MOST_LINES = 2000
_LONGEST_LINE_BYTES = 64 * 2**10
#: Characters of lines in one answer: what it becomes has to fit into a message to the supervisor.
_MOST_CHARS = 2**20
#: Time until a process listens, which includes the imports for that.
_LISTENS_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.5
#: Time for Ray to release a place; the next driver in the cluster releases the remaining ones.
_GIVE_BACK_S = 20.0
#: Added to the worker's grace period, so that the worker exits first.
_LONGER_S = 5.0


class Sockets:
    """Listening sockets of a gateway on this node, held by its actor across restarts.

    So no client is refused between the death of a gateway and its restart: connections wait.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], socket.socket] = {}

    def open_sockets(self, wanted: Sequence[tuple[str, int]]) -> list[int]:
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


class ActorState(msgspec.Struct, frozen=True):
    """State of an actor, as the driver sees it."""

    node: str
    host: str
    gpus: tuple[RemoteGpu, ...]
    fault: str  # why it cannot be used: a sentence
    running: Running | None


class ActorEvents(msgspec.Struct, frozen=True):
    """Events since the driver last asked."""

    lines: tuple[str, ...]
    seen: int  # argument of the next poll
    pid: int = 0  # of a worker that has ended
    code: int | None = None  # its exit code; negative: a signal; None: none has ended
    out_of_memory: bool = False


class Figures(msgspec.Struct, frozen=True):
    """Resource use of the process and the GPUs on the node."""

    gpus: tuple[GpuStatus, ...]  # all GPUs of the node
    pid: int  # of the process; 0: none runs
    held: dict[str, int]  # bytes held by the process group, by UUID
    rss_bytes: int = 0  # resident memory


class Process:
    """A worker or gateway, from its start until its supervisor has reported its end."""

    def __init__(self, fingerprint: str, role: str) -> None:
        self.fingerprint, self.role = fingerprint, role
        self.pid = 0
        self.address = ""
        self.code: int | None = None
        self.out_of_memory = False
        self.warden: subprocess.Popen[bytes] | None = None

    def take(self, told: Mapping[str, Any]) -> None:
        """Apply a JSON report from the process or its supervisor."""
        self.pid = told.get("pid", self.pid)
        self.address = told.get("address", self.address)
        self.code = told.get("code", self.code)
        self.out_of_memory = told.get("out_of_memory", self.out_of_memory)


class ProcessActor:
    """Actor of one place. `gpus` is the number that was requested from Ray."""

    def __init__(self, gpus: int, grace_s: float) -> None:
        self._wanted = gpus
        self._grace_s = grace_s
        self._gpus: tuple[Gpu, ...] = own_gpus() if gpus else ()
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._count = 0  # lines so far
        self._passed_on = 0  # of them, by drivers to their supervisor
        self._process: Process | None = None
        self._asked_at = time.monotonic()
        self._sockets = Sockets()
        threading.Thread(target=self._leave_when_alone, daemon=True).start()

    # ---- calls by the driver

    def inspect(self) -> bytes:
        """Return the node and what runs here: an encoded ActorState."""
        import ray

        self._asked()
        node = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()
        state = ActorState(node, host, as_remote(self._gpus), self._fault(), self._running())
        return msgspec.msgpack.encode(state)

    def start(self, encoded: bytes) -> tuple[int, str, str]:
        """Start a process: return its PID and address, or why it failed."""
        self._asked()
        order = msgspec.msgpack.decode(encoded, type=Start)
        self.kill_process()
        try:
            listening = self._sockets.open_sockets(order.listen)
        except StartError as error:
            return 0, "", error.message
        process = Process(order.fingerprint, order.role)
        with self._changed:
            self._process = process
        self._spawn(process, order, listening)
        with self._changed:
            self._changed.wait_for(
                lambda: process.address or process.code is not None, _LISTENS_WITHIN_S
            )
        self._asked()
        if process.address or process.code is not None:
            return process.pid, process.address, ""
        self.kill_process()
        return 0, "", f"it did not listen within {_LISTENS_WITHIN_S:g} s"

    def poll(self, seen: int, wait_s: float, ended: int = -1) -> bytes:
        """Return new ActorEvents as soon as there are any, or after `wait_s`.

        `seen` is the number of lines that the driver has passed on; -1: none of this driver, which
        goes on where the one before it ended. `ended` is the PID of the last process whose end the
        driver knows: an end that is told to a driver that dies is told to the next one.
        """
        self._asked()
        with self._changed:
            self._passed_on = seen = self._passed_on if seen < 0 else seen
            process = self._process
            if process is not None and process.code is not None and process.pid == ended:
                self._process = process = None
            self._changed.wait_for(lambda: self._count > seen or _has_ended(process), wait_s)
            if self._count > seen and not _has_ended(process):
                self._changed.wait(0.05)  # lines come in batches
            lines, seen = self._take_lines(seen)
            news = ActorEvents(lines, seen)
            if process is not None and _has_ended(process) and seen == self._count:
                news = ActorEvents(lines, seen, process.pid, process.code, process.out_of_memory)
        self._asked()
        return msgspec.msgpack.encode(news)

    def _take_lines(self, seen: int) -> tuple[tuple[str, ...], int]:
        """Return the next lines after the first `seen`, and how many have been seen then."""
        fresh = min(self._count - seen, len(self._lines))
        lines, chars = list[str](), 0
        for line in itertools.islice(self._lines, len(self._lines) - max(0, fresh), None):
            if lines and chars + len(line) > _MOST_CHARS:
                break
            lines.append(line)
            chars += len(line)
        return tuple(lines), self._count - max(0, fresh) + len(lines)

    def signal(self, number: int, group: bool) -> None:
        """Send a signal to the process, or to its group."""
        process = self._process
        if process is not None and process.pid and process.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(process.pid, number)

    def strays(self) -> str:
        """Return a message about GPU memory that the worker holds on other GPUs; "" if none."""
        process = self._process
        if process is None:
            return ""
        own = {gpu.uuid for gpu in self._gpus}
        return stray_memory(group_of(process.pid), own, gpu_memory_by_pid(), find_gpus())

    def measure(self) -> bytes:
        """Return the current resource use: encoded Figures."""
        self._asked()
        process = self._process
        pid = process.pid if process is not None and process.code is None else 0
        # gateways use no GPU, so the node's driver is not queried for them
        is_worker = process is not None and process.role == "worker"
        gpus = gpus_in_use() if self._wanted or is_worker else ()
        holdings = gpu_memory_by_pid() if gpus and pid else {}
        held: dict[str, int] = {}
        for one in group_of(pid) if holdings else ():
            for uuid, size in holdings.get(one, {}).items():
                held[uuid] = held.get(uuid, 0) + size
        rss_bytes = procfs.rss_bytes(pid, group_of(pid) - {pid}) if pid else 0
        return msgspec.msgpack.encode(Figures(gpus, pid, held, rss_bytes))

    def kill_process(self) -> None:
        """Kill the process, and return when nothing of it is left."""
        process = self._process
        if process is not None and process.warden is not None:
            assert process.warden.stdin is not None
            process.warden.stdin.close()
            process.warden.wait()

    # ---- the process

    def _spawn(self, process: Process, order: Start, listening: Sequence[int]) -> None:
        credentials = Credentials.from_bytes(order.credentials).hand_over()
        reports, report = os.pipe()
        reading, writing = os.pipe()
        args = [*order.args, "--credentials-fd", str(credentials), "--report-fd", str(report)]
        for fd in listening:
            args += ["--listen-fd", str(fd)]
        mark = secrets.token_hex(16)
        # -P: the actor's working directory must not shadow our modules
        command = [sys.executable, "-P", "-m", "servekit.ray.process.actor_supervisor"]
        try:
            process.warden = subprocess.Popen(
                [*command, order.role, mark, str(report), *args],
                env=self._environment(order),
                stdin=subprocess.PIPE,
                stdout=writing,
                stderr=writing,
                pass_fds=(credentials, report, *listening),
                start_new_session=True,
            )
        finally:
            for fd in (credentials, report, writing):
                os.close(fd)
        for work, fd in ((self._store_output, reading), (self._apply_reports, reports)):
            opened = os.fdopen(fd, "rb")
            threading.Thread(target=work, args=(process, opened), daemon=True).start()

    def _environment(self, order: Start) -> dict[str, str]:
        """Return the node's environment without Ray's variables, with ours and the GPU pin."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own = {name: value for name, value in own.items() if name not in THREADS}
        if not order.env.keys() & {*THREADS}:
            own |= _own_threads()
        by_index = order.pin == "index"
        pin = ",".join(str(gpu.index) if by_index else gpu.uuid for gpu in self._gpus)
        return {**own, **order.env, "CUDA_VISIBLE_DEVICES": pin}

    def _store_output(self, process: Process, output: IO[bytes]) -> None:
        """Store the output of the process by lines."""
        with output:
            while line := output.readline(_LONGEST_LINE_BYTES):
                text = line.decode(errors="replace").rstrip("\r\n").rsplit("\r", 1)[-1]
                with self._changed:
                    self._lines.append(text)
                    self._count += 1
                    self._changed.notify_all()

    def _apply_reports(self, process: Process, reports: IO[bytes]) -> None:
        """Apply reports of the process and its supervisor, until both have exited."""
        with reports:
            for line in reports:
                told = json.loads(line)
                if "code" not in told:
                    self._take(process, told)
                    continue
                break
            else:
                told = {"code": -signal.SIGKILL}  # nothing was left to report it
        assert process.warden is not None
        process.warden.wait()
        self._take(process, told)

    def _take(self, process: Process, told: Mapping[str, Any]) -> None:
        with self._changed:
            process.take(told)
            self._changed.notify_all()

    # ---- own state

    def _running(self) -> Running | None:
        process = self._process
        if process is None or not process.address or process.code is not None:
            return None
        return Running(process.pid, process.address, process.fingerprint)

    def _fault(self) -> str:
        if len(self._gpus) == self._wanted:
            return ""
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return (
            f"Ray has given {self._wanted} GPUs there (CUDA_VISIBLE_DEVICES={given!r}), and NVML"
            f" finds {len(self._gpus)} of them"
        )

    def _asked(self) -> None:
        self._asked_at = time.monotonic()

    def _leave_when_alone(self) -> None:
        limit_s = self._grace_s + _LONGER_S
        while time.monotonic() - self._asked_at < limit_s or self._running() is not None:
            time.sleep(_LOOK_EVERY_S)
        self.kill_process()
        _release_actor()


def _has_ended(process: Process | None) -> bool:
    return process is not None and process.code is not None


def _own_threads() -> dict[str, str]:
    """Return the node's own thread settings: Ray sets a thread for each CPU of its actors.

    They come from our parent, the raylet, since our own initial environment was overwritten by the
    process title.
    """
    told = {name: procfs.read_variable(os.getppid(), name) for name in THREADS}
    return {name: value for name, value in told.items() if value is not None}


def _release_actor() -> None:
    """Remove this actor's placement group, which ends the actor, too.

    Without its head Ray does not answer, nor fail for a long time, so exit after a timeout.
    """
    giving = threading.Thread(target=_remove_group, daemon=True)
    giving.start()
    giving.join(_GIVE_BACK_S)
    os._exit(0)


def _remove_group() -> None:
    import ray

    with contextlib.suppress(Exception):  # if the cluster is gone, so is the group
        group = ray.util.get_current_placement_group()
        if group is not None:
            ray.util.remove_placement_group(group)
            time.sleep(_LONGER_S)
