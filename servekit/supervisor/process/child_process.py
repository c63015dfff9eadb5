"""A child process, from spawn to reap.

A child is a fresh interpreter with an explicit environment, its own session and process group, one
end of a socketpair (control channel and lifeline in one), and one pipe for its output.

    spawn ──▶ running ── exits, or is told to ──▶ its group is killed ──▶ reaped ──▶ `exited`

Its exit is seen through a pidfd where the kernel has them. The group is killed before the leader is
reaped: until then no other process can get its PID, which names the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import msgspec
import structlog

from servekit.protocol.control.fork_server import MARK_CHARS
from servekit.protocol.messages import PROTOCOL
from servekit.protocol.transport.connection import Connection, adopt_socket
from servekit.supervisor.process.log_capture import OnLine, Output, RotatingFile
from servekit.system import cgroup, procfs, shared_memory, subreaper
from servekit.system.gpu.gpu_memory_audit import group_of
from servekit.system.orphan_cleanup import kill_marked
from servekit.system.parent_death import CHILD_MARK
from servekit.system.python import python_command
from servekit.system.python.installation import PROTOCOL_VARIABLE
from servekit.system.shared_memory import Segment
from servekit.system.subreaper import Forked, Process

log: Any = structlog.get_logger("servekit.supervisor")
Incoming = TypeVar("Incoming")

#: From SIGTERM to SIGKILL.
TERM_GRACE_S = 2.0
#: From closing its control channel to SIGKILL: the child should be about to exit.
GOODBYE_S = 5.0
#: The longest wait, after the exit, for the last lines in the pipe.
_LAST_LINES_S = 0.5
#: The longest wait for a child's stack dump. A stopped process writes none.
_DUMP_S = 0.5
#: The most searches for processes that left the group; the search ends when none is found.
_ESCAPED_LOOKS = 100
#: Appended to a kill's reason if the kernel's out-of-memory counter has risen.
_BY_KERNEL = ", probably by the kernel: out of memory"
#: The errors where no file is left to read /proc with, and no thread to read it in.
_SHORTAGES = (OSError, RuntimeError)
#: The poll interval where there are no pidfds.
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Command:
    """The command that starts a child: `python -m MODULE ARGS --control-fd N --parent-pid P`.

    `python` is the interpreter of another environment; "" for our own.
    """

    name: str
    module: str
    args: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    log_path: Path
    pass_fds: tuple[int, ...] = ()
    python: str = ""
    #: Forks the child from a fork server with the environment `env`; arguments: mark, control
    #: channel and output descriptor. Returns None where no fork server is available.
    forked: Callable[[str, int, int], Awaitable[Forked | None]] | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a child. Exactly one of `code` and `signal` is set."""

    code: int | None
    signal: int | None
    tail: tuple[str, ...]  # its last lines
    out_of_memory: bool = False  # the kernel killed a process for memory in the child's lifetime
    cause: str = ""  # why we killed it, if we did
    stacks: tuple[str, ...] = ()  # of all its threads, if it wrote them

    def __str__(self) -> str:
        return self.explain()

    def of_engine(self, cause: str) -> Exit:
        """Return this exit with the engine's earlier death, `cause`, as its reason.

        Our own reason for killing the child ranks first.
        """
        killed = "SIGKILL" in cause  # a process below the worker was killed
        if killed and self.out_of_memory:
            cause = cause.rstrip(".") + _BY_KERNEL
        return replace(self, cause=self.cause or cause, out_of_memory=killed and self.out_of_memory)

    def explain(self, when: str = "") -> str:
        """Return the reason, with `when` after it: "exit code 1 before it was ready: No module"."""
        if self.cause:
            return self.cause
        if self.signal is not None:
            oom = _BY_KERNEL if self.out_of_memory else ""
            return f"killed by {procfs.name_signal(self.signal)}{when}{oom}"
        # Our own log lines are JSON; the last plain text before an exit is its reason.
        plain = (line.strip() for line in reversed(self.tail) if not line.startswith("{"))
        last = next((line for line in plain if line), "")
        return f"exit code {self.code}{when}" + (f": {last}" if last and self.code else "")


class ChildProcess(Generic[Incoming]):
    """A running child, created by `spawn`; `exited` holds its Exit once it is reaped."""

    here = True  # its PID is one of this machine

    def __init__(self, command: Command, process: Process, output: Output, mark: str) -> None:
        self.name = command.name
        self.pid = process.pid
        found = procfs.read_process(process.pid)
        self.started = found.started if found else 0
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._mark = mark
        self._output = output
        self._connection: Connection[Incoming] | None = None
        self._cause = ""
        self._segments: set[Segment] = set()
        self._oom_kills = cgroup.count_oom_kills()
        self.forked = isinstance(process, Forked)
        self._concluding: asyncio.Task[None] | None = None
        self._watch()

    @property
    def rss_bytes(self) -> int:
        """The resident memory of the child and its process group, in bytes; 0 once it is gone.

        The group counts because an engine may run in processes of its own.
        """
        return procfs.rss_bytes(self.pid, group_of(self.pid) - {self.pid})

    @classmethod
    async def spawn(
        cls,
        command: Command,
        incoming: Any,
        on_message: Callable[[Incoming], None],
        on_line: OnLine,
    ) -> ChildProcess[Incoming]:
        """Start the child. Raises OSError when the system refuses (no memory, no files left)."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as undo:
            control, control_of_child = socket.socketpair()
            undo.callback(control.close)
            theirs.callback(control_of_child.close)
            reading, writing = os.pipe()
            pipe = undo.enter_context(os.fdopen(reading, "rb", buffering=0))
            theirs.callback(os.close, writing)
            mark = secrets.token_hex(MARK_CHARS // 2)
            process = await _start_process(command, control_of_child.fileno(), writing, mark)
            undo.callback(_kill_process, process)
            output = Output(RotatingFile(command.log_path), on_line)
            child = cls(command, process, output, mark)
            await child._read_output(pipe, control, incoming, on_message)
            undo.pop_all()
        return child

    async def _read_output(
        self,
        pipe: IO[bytes],
        control: socket.socket,
        incoming: Any,
        on_message: Callable[[Incoming], None],
    ) -> None:
        await self._loop.connect_read_pipe(lambda: self._output, pipe)
        connection: Connection[Incoming] = Connection(incoming, on_message, self._on_close)
        self._connection = connection
        await adopt_socket(control, lambda: connection)

    def send(self, message: msgspec.Struct) -> None:
        """Send the child a message; dropped once the child is gone."""
        if self._connection is not None:
            self._connection.send(message)

    def kill(self, cause: str) -> None:
        """Send SIGKILL to the whole group now; `cause` becomes the reason of its exit."""
        if not self.exited.done():
            self._cause = self._cause or cause
            with contextlib.suppress(OSError):  # no files left to read /proc with
                self.note_segments()
            self._signal_group(signal.SIGKILL)

    def note_segments(self) -> set[Segment]:
        """Return the shared memory that the group has mapped so far, for removal at its end."""
        self._segments |= shared_memory.mapped_segments(group_of(self.pid))
        return self._segments

    async def dump_and_kill(self, cause: str) -> None:
        """Have the child dump its threads' stacks, also while one holds the GIL; kill its group."""
        self._cause = self._cause or cause  # set first: the signal may end the child
        found = procfs.read_process(self.pid)
        if found is not None and found.state not in "TtZX" and not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR2)
            await self._output.dumped(_DUMP_S)
        self.kill(cause)

    async def stop(self, ask: msgspec.Struct, grace_s: float) -> Exit:
        """Ask the child to end, insist after `grace_s`, and return when it is reaped."""
        self.send(ask)
        if not await self._exits_within(grace_s):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            if not await self._exits_within(TERM_GRACE_S):
                self.kill(f"did not stop within {grace_s + TERM_GRACE_S:g} s, killed")
        return await asyncio.shield(self.exited)

    async def _exits_within(self, time_s: float) -> bool:
        done, _ = await asyncio.wait((self.exited,), timeout=time_s)
        return bool(done)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process.returncode is not None:
            return  # reaped: its PID, which names the group, may belong to another process
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    # ---- exit

    def _on_close(self, error: Exception | None) -> None:
        """Handle the closed control channel: the child is dead, ending, or broke the protocol."""
        if error is not None and not isinstance(error, OSError):
            self.kill(f"broke the wire protocol: {error}")
        elif not self.exited.done():
            self._loop.call_later(
                GOODBYE_S, self.kill, "closed its control channel, but did not exit"
            )

    def _watch(self) -> None:
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:  # gVisor and the seccomp profiles of older containers have none
            self._poll_exit()
        else:
            self._loop.add_reader(pidfd, self._on_pidfd, pidfd)

    def _on_pidfd(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._on_exit()

    def _poll_exit(self) -> None:
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            self._loop.call_later(_LOOK_EVERY_S, self._poll_exit)
        else:
            self._on_exit()

    def _on_exit(self) -> None:
        self._signal_group(signal.SIGKILL)
        with contextlib.suppress(OSError):  # no files left to read /proc with; see `_end_escaped`
            subreaper.kill_strays(CHILD_MARK)
        code = self._process.wait()
        subreaper.forget_process(self._process)
        self._concluding = self._loop.create_task(self._conclude(code))  # the loop's is weak

    async def _end_escaped(self) -> None:
        """Kill the processes it started in other groups: they must not keep a GPU's memory."""
        for _ in range(_ESCAPED_LOOKS):
            with contextlib.suppress(*_SHORTAGES):  # look again
                killed = await asyncio.to_thread(kill_marked, CHILD_MARK, self._mark)
                if not killed + subreaper.kill_strays(CHILD_MARK):
                    return
            await asyncio.sleep(0.01)

    async def _clear_shared_memory(self) -> None:
        segments = self._segments | shared_memory.named_after({self.pid})
        if segments and (
            removed := await asyncio.to_thread(shared_memory.remove_segments, segments)
        ):
            log.info("shared_memory_removed", child=self.name, segments=removed)

    async def _conclude(self, code: int) -> None:
        await self._end_escaped()
        with contextlib.suppress(*_SHORTAGES):  # the guard clears it at the end
            await self._clear_shared_memory()
        # Another process may hold the pipe open, so the wait for its end is bounded.
        await asyncio.wait((self._output.ended,), timeout=_LAST_LINES_S)
        if self._connection is not None:
            self._connection.abort()
        # A worker exits by itself (os.EX_SOFTWARE) after the kernel killed a process below it.
        killed = code in (-signal.SIGKILL, os.EX_SOFTWARE)
        exit_ = Exit(
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            tail=tuple(self._output.tail),
            out_of_memory=killed and cgroup.count_oom_kills() > self._oom_kills,
            cause=self._cause,
            stacks=tuple(self._output.stacks),
        )
        if not self.exited.done():
            self.exited.set_result(exit_)


async def _start_process(command: Command, control_fd: int, output_fd: int, mark: str) -> Process:
    if command.forked is not None:
        forked = await command.forked(mark, control_fd, output_fd)
        if forked is not None:
            return forked
    return _start_interpreter(command, control_fd, output_fd, mark)


def _start_interpreter(
    command: Command, control_fd: int, output_fd: int, mark: str
) -> subprocess.Popen[bytes]:
    # No preexec_fn: it would run Python between fork and exec. The child sets its own
    # PR_SET_PDEATHSIG, and checks `--parent-pid` to see whether that came too late.
    return subreaper.start_process(
        [
            *python_command.module_command(command.module, command.python),
            *command.args,
            *("--control-fd", str(control_fd), "--parent-pid", str(os.getpid())),
        ],
        env={**command.env, CHILD_MARK: mark, PROTOCOL_VARIABLE: str(PROTOCOL)},
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        pass_fds=(control_fd, *command.pass_fds),
        start_new_session=True,
    )


def _kill_process(process: Process) -> None:
    process.kill()
    process.wait()
    subreaper.forget_process(process)
