"""The other ranks as processes: start, supervision and end.

Each rank is a fresh interpreter and a child of the worker, in the worker's process group, so that
both are killed together; the kernel also kills it when the worker dies. A rank's death ends the
worker at once: rank 0 can never complete the work in progress, and its waiting thread is in C code
that cannot be interrupted. So a separate thread watches a lifeline to each rank and reports its
end: to the engine, whose worker then exits; or, before there is an engine or if the worker does not
exit, as the last line of the process, which the thread then ends itself.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from servekit.system.procfs import name_signal
from servekit.system.python.python_command import module_command

EXIT_RANK_DIED = os.EX_SOFTWARE  # the value of `worker.EXIT_ENGINE_DIED`
#: Maximum time from the end of a rank's lifeline to its exit code, and from the order to end to
#: SIGKILL.
_GRACE_S = 2.0
#: Number and length of the last lines of a rank's output to report.
_LINES = 3
_LINE_CHARS = 300


@dataclass(slots=True)
class _Child:
    """A rank: `channel` for messages, `lifeline` to notice its death, `errors` for its output."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: socket.socket
    lifeline: socket.socket
    errors: IO[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))
    unfinished: bytes = b""

    def forward_output(self) -> bool:
        """Pass on the rank's output; return False at its end."""
        data = os.read(self.errors.fileno(), 65536)
        with contextlib.suppress(OSError):
            os.write(2, data)
        *lines, self.unfinished = (self.unfinished + data).split(b"\n")
        texts = (line.decode(errors="replace").strip() for line in lines)
        self.tail.extend(text[:_LINE_CHARS] for text in texts if text)
        return bool(data)


def end_process(reason: str) -> None:
    """Print the reason as the last line, and exit."""
    sys.stderr.flush()
    os.write(2, f"{reason}\n".encode())
    os._exit(EXIT_RANK_DIED)


class Children:
    """Ranks 1 to `size` - 1; `died` is called with a sentence, in the watching thread.

    `dying` is set as soon as a rank is gone, before the reason is known.
    """

    def __init__(self, size: int, died: Callable[[str], None] = end_process) -> None:
        self._size = size
        self.died = died
        self.dying = threading.Event()
        self._children: list[_Child] = []
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._failure: OSError | None = None
        self._store = os.memfd_create("servekit-ranks", os.MFD_CLOEXEC)
        # The kernel ends a child when the thread that started it ends, so this thread starts them.
        self._thread = threading.Thread(target=self._run_thread, name="ranks", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def store(self) -> str:
        """Return the path of the file to meet in, which every rank can open."""
        return f"/proc/self/fd/{self._store}"

    @property
    def channels(self) -> list[socket.socket]:
        return [child.channel for child in self._children]

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def await_end(self, within_s: float) -> bool:
        """Wait for the call of `close`; return False after a timeout."""
        return self._closing.wait(within_s)

    def close(self) -> None:
        """End all ranks, and return once they are reaped."""
        self._closing.set()
        for child in self._children:
            with contextlib.suppress(OSError):
                child.channel.shutdown(socket.SHUT_RDWR)
                child.lifeline.shutdown(socket.SHUT_RDWR)
        self._thread.join()  # takes up to _GRACE_S

    # ---- in the thread

    def _run_thread(self) -> None:
        try:
            self._children = [self._start_rank(rank) for rank in range(1, self._size)]
        except OSError as error:
            self._failure = error
        self._ready.set()
        dead = self._watch_ranks()
        if dead is not None and not self._closing.is_set():
            self.dying.set()
            self.died(self._explain_end(dead))
        self._end_all()

    def _start_rank(self, rank: int) -> _Child:
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline, its_end = socket.socketpair()
        reading, writing = os.pipe()
        with theirs, its_end:
            try:
                process = subprocess.Popen(
                    [
                        *module_command("servekit.engines.transformers.tensor_parallel.rank"),
                        *("--rank", str(rank), "--size", str(self._size)),
                        *("--channel-fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())),
                    ],
                    env={**os.environ, "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=writing,
                    stderr=writing,
                    pass_fds=(theirs.fileno(), its_end.fileno(), self._store),
                )
            finally:
                os.close(writing)
        return _Child(rank, process, channel, lifeline, os.fdopen(reading, "rb", buffering=0))

    def _watch_ranks(self) -> _Child | None:
        """Watch the ranks, and return the first one that is gone."""
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.lifeline, selectors.EVENT_READ, child)
                selector.register(child.errors, selectors.EVENT_READ, child)
            while selector.get_map():
                for key, _ in selector.select():
                    heard: _Child = key.data
                    if key.fileobj is heard.lifeline:
                        return heard
                    if not heard.forward_output():
                        selector.unregister(heard.errors)
        return None

    def _explain_end(self, child: _Child) -> str:
        try:
            code = child.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        self._drain_errors(child)
        end = f"rank {child.rank} of {self._size} (pid {child.process.pid}) {_in_words(code)}"
        said = " | ".join(child.tail)
        return f"{end}: {said}" if said else end

    def _drain_errors(self, child: _Child) -> None:
        os.set_blocking(child.errors.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while child.forward_output():
                pass

    def _end_all(self) -> None:
        deadline = time.monotonic() + (_GRACE_S if self._closing.is_set() else 0)
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            for end in (child.channel, child.lifeline, child.errors):
                end.close()
        os.close(self._store)


def _in_words(code: int | None) -> str:
    if code is None:
        return "has closed its lifeline"
    return f"exited with code {code}" if code >= 0 else f"was killed by {name_signal(-code)}"
