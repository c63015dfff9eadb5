"""Client of the process that reads NVML (`nvml_process`).

The process is started at the first question, and again after it died or did not answer in time.
After a failure the client answers None for a while, so that no caller is held up.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import structlog

from servekit.system import subreaper
from servekit.system.python import python_command

log: Any = structlog.get_logger("servekit.supervisor")

Question = Literal["gpus", "free", "memory", "use", "details"]

#: One of these exists if there is a driver: on Linux, or on Linux within Windows.
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/proc/driver/nvidia"))
#: The first answer waits for the driver to open every GPU: seconds each without persistence mode.
_FIRST_S = 60.0
_ANSWER_S = 5.0
#: Pause after a driver that did not answer.
_REST_S = 60.0


class Driver:
    """Client that asks one question at a time, from any thread, and blocks until its deadline.

    `command` is the process to start; our PID is appended.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        *,
        first_s: float = _FIRST_S,
        answer_s: float = _ANSWER_S,
        rest_s: float = _REST_S,
    ) -> None:
        self._command = command or python_command.module_command("servekit.system.gpu.nvml_process")
        self._first_s, self._answer_s, self._rest_s = first_s, answer_s, rest_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._rests_until = 0.0

    def query(self, question: Question) -> Any:
        """Return the answer; None if there is none."""
        with self._lock:
            if time.monotonic() < self._rests_until:
                return None
            try:
                return self._query_once(question)
            except (OSError, ValueError) as error:
                log.warning("gpu_driver_unresponsive", reason=str(error) or repr(error))
                self._rests_until = time.monotonic() + self._rest_s
                self._end()
                return None

    def close(self) -> None:
        """End the process; the next question starts another one."""
        with self._lock:
            self._end()

    def _query_once(self, question: Question) -> Any:
        patience_s = self._answer_s
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()
            patience_s = self._first_s
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{question}\n".encode())
        return json.loads(_read_line(process.stdout.fileno(), time.monotonic() + patience_s))

    def _start(self) -> None:
        self._process = subreaper.start_process(
            [*self._command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        # SIGKILL is delayed during a driver call: do not wait long for the process to be reaped.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
        subreaper.forget_process(process)


def _read_line(fd: int, deadline: float) -> bytes:
    """Return one line from a pipe. Raises TimeoutError, or OSError if the pipe ends before."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("NVML has not answered in time")
            if not (more := os.read(fd, 65536)):
                raise OSError("the process that reads NVML has ended")
            line += more
    return line


def is_present() -> bool:
    """Return whether this machine has a GPU driver."""
    return any(path.exists() for path in _DEVICES)


#: The client of this process.
driver = Driver()
