"""Causes of a core's death, reported by the core's process: vLLM's client does not know them.

vLLM logs the cause as an error, with the exception if there is one, before it reports that the core
is dead. A handler in the core's process sends that to a socket of the worker, whose name is derived
from `VllmConfig.instance_id`, which both processes know. If a vLLM release words its log
differently, only the detail is lost.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from typing import Any

from servekit.errors import LoadError
from servekit.system.procfs import name_signal

_MOST_BYTES = 4096
_EXIT_CODE = re.compile(r"exit code: (-?\d+|None)")
#: Time in which the exit code of a process that has just ended becomes available.
_ENDED_S = 0.5
#: Parts of the lines that vLLM logs when a core dies; other errors concern single requests.
_OF_DEATH = ("encountered a fatal error", "died unexpectedly", "failed to start")
#: Errors of an environment, which another start would meet again.
_OF_ENVIRONMENT = ("ModuleNotFoundError", "ImportError")


class Causes:
    """The worker's end of the socket. Created before the core is started."""

    def __init__(self, config: Any) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_socket_address(config))
        self._first = ""

    def first(self, patience_s: float) -> str:
        """Wait for the first error that the core reports, up to `patience_s`; "" if none comes."""
        if not self._first:
            self._socket.settimeout(patience_s)
            try:
                self._first = self._socket.recv(_MOST_BYTES).decode(errors="replace")
            except OSError:  # nothing was reported in time, or the socket is closed
                return ""
        return self._first

    def close(self) -> None:
        self._socket.close()


class Teller(logging.Handler):
    """The core's end of the socket: a handler of vLLM's log."""

    def __init__(self, config: Any) -> None:
        super().__init__(logging.ERROR)
        self._address = _socket_address(config)

    def emit(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        if not any(words in told for words in _OF_DEATH):
            return
        if record.exc_info and record.exc_info[1] is not None:
            told = in_words(record.exc_info[1])
        elif (found := _EXIT_CODE.search(told)) and found[1] == "None":
            told = f"exit code: {_code_of_a_child()}"  # vLLM asks before the kernel knows
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
                teller.setblocking(False)
                teller.sendto(told.encode()[:_MOST_BYTES], self._address)
        except OSError:  # nobody listens, or the socket's buffer is full
            pass


def report_errors(config: Any) -> None:
    """Make this process, a core's or a rank's, report its errors."""
    theirs = logging.getLogger("vllm")
    if not any(isinstance(handler, Teller) for handler in theirs.handlers):
        theirs.addHandler(Teller(config))


def _code_of_a_child() -> int | None:
    """Return the exit code of an ended child, without reaping it."""
    until = time.monotonic() + _ENDED_S
    while time.monotonic() < until:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # the child was reaped already
            return None
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        time.sleep(0.001)
    return None


def in_words(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    said = first_line(error)
    kind = type(error).__name__
    return said if kind in (said, "RuntimeError", "Exception") else f"{kind}: {said}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:500]


def of_exit(code: int | None) -> str:
    """Describe the end of a process: "was killed by SIGKILL", "ended with exit code 1"."""
    if code is None:
        return "has died"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {name_signal(-code)}"


def explain_start(told: str, error: BaseException) -> LoadError:
    """Return the error for a core that did not start, by its reported error, if there is one."""
    if not told:
        sentence = "vLLM's engine did not start; the lines before this say why"
        return LoadError(f"{sentence} ({first_line(error)}).", permanent=False)
    lasting = told.startswith(_OF_ENVIRONMENT)
    return LoadError(f"vLLM's engine did not start: {told}", permanent=lasting)


def describe_death(told: str, code: int | None) -> str:
    """Describe a core's death by its reported error and its exit code, None if unknown."""
    if code is not None and code < 0:
        return f"vLLM's engine core {of_exit(code)}."
    if not told:
        return f"vLLM's engine core {of_exit(code)}; its log says why."
    if found := _EXIT_CODE.search(
        told
    ):  # "Worker proc VllmWorker-0 died unexpectedly (exit code: …"
        return f"A process of vLLM's that runs the model {of_exit(_parse_code(found[1]))}."
    return f"vLLM's engine core has died: {told}"


def _parse_code(text: str) -> int | None:
    return None if text == "None" else int(text)


def _socket_address(config: Any) -> str:
    return f"\0servekit-vllm-{config.instance_id}"
