"""The output of a child: split into lines, written to its log file, passed on to the log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

log: Any = structlog.get_logger("servekit.supervisor")

OnLine = Callable[[str], None]

_LONGEST_LINE_BYTES = 64 * 2**10
#: Enough for fifty threads in deep calls.
_MOST_STACK_LINES = 2000
#: The format of faulthandler's output; source: CPython Python/traceback.c.
_STACK_BEGINS = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")
_STACK_GOES_ON = re.compile(r"  (File |<|\.\.\.|Garbage-collecting)")
#: A pause of this length ends a stack dump that has begun.
_DUMP_PAUSE_S = 0.05


class RotatingFile:
    """An append-only log with a bounded size: NAME.log, then NAME.log.1 (older) and so on.

    It never raises: a full disk must not affect the service. A line is written whole or lost whole.
    The loss is reported in our own log when it begins, and in the file once there is room again.
    """

    def __init__(self, path: Path, max_bytes: int = 10 * 2**20, keep: int = 3) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._fd: int | None = None
        self._lost = 0  # lines in a row
        self._reason = ""  # why the last of them was lost

    def append_line(self, line: bytes) -> None:
        """Append a line, its newline included."""
        try:
            self._append(self._gap() + line)
        except OSError as error:
            self._count_lost(error.strerror or repr(error))
        else:
            self._go_on()

    def close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # NFS and quotas may report an error only now
                os.close(self._fd)
        self._fd = None

    def _append(self, data: bytes) -> None:
        fd = self._with_room(len(data))
        rest = data
        try:
            while rest:  # unbuffered: lines before a crash of ours are in the file
                rest = rest[os.write(fd, rest) :]
        except OSError:
            if len(rest) < len(data):
                os.ftruncate(fd, os.fstat(fd).st_size - (len(data) - len(rest)))
            raise

    def _with_room(self, size_bytes: int) -> int:
        """Return the file to write to; open a new one if this one is full, or was removed."""
        found = os.fstat(self._fd) if self._fd is not None else None
        if found is None or not found.st_nlink:
            self.close()
            return self._open()
        return self._rotate() if found.st_size + size_bytes > self._max_bytes else self._open()

    def _open(self) -> int:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
        return self._fd

    def _rotate(self) -> int:
        self.close()
        for number in range(self._keep, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        return self._open()

    def _numbered(self, number: int) -> Path:
        return self._path if number == 0 else self._path.with_name(f"{self._path.name}.{number}")

    # ---- lost lines

    def _gap(self) -> bytes:
        return f"[{self._lost} lines lost: {self._reason}]\n".encode() if self._lost else b""

    def _count_lost(self, reason: str) -> None:
        if not self._lost:
            log.warning("log_file_unwritable", file=str(self._path), reason=reason)
        self._lost, self._reason = self._lost + 1, reason

    def _go_on(self) -> None:
        if self._lost:
            log.info("log_file_recovered", file=str(self._path), lost_lines=self._lost)
        self._lost = 0


class Output(asyncio.Protocol):
    """The reading end of a child's stdout and stderr, which share a pipe so that order is kept."""

    def __init__(self, file: RotatingFile, on_line: OnLine, tail: int = 40) -> None:
        self._file = file
        self._on_line = on_line
        self._rest = bytearray()
        self.tail: deque[str] = deque(maxlen=tail)
        self.stacks: deque[str] = deque(maxlen=_MOST_STACK_LINES)
        self._in_stack = False
        self._lines = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        for line in lines:
            self._take(bytes(line))
        if len(rest) > _LONGEST_LINE_BYTES:
            self._take(bytes(rest))
            rest = bytearray()
        self._rest = rest

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._take(bytes(self._rest))
        self._file.close()
        if not self.ended.done():
            self.ended.set_result(None)

    def _take(self, line: bytes) -> None:
        # A progress bar rewrites its line with \r; keep what it showed last.
        shown = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
        self._file.append_line(shown + b"\n")
        text = shown.decode(errors="replace")
        if text.strip():
            self._lines += 1
            self._keep_stacks(text)
            self._on_line(text)

    def _keep_stacks(self, text: str) -> None:
        """Keep stacks apart: a dump of many threads must not push out the lines before it."""
        begins = _STACK_BEGINS.match(text) is not None
        self._in_stack = begins or (self._in_stack and _STACK_GOES_ON.match(text) is not None)
        (self.stacks if self._in_stack else self.tail).append(text)

    async def dumped(self, within_s: float) -> None:
        """Wait for the stacks that the child was just told to write; drop older stacks."""
        self.stacks.clear()
        deadline = asyncio.get_running_loop().time() + within_s
        seen = -1
        while asyncio.get_running_loop().time() < deadline and not self.ended.done():
            if self.stacks and seen == self._lines:
                return
            seen = self._lines
            await asyncio.sleep(_DUMP_PAUSE_S)
