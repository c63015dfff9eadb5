"""Reader of the log files of child processes (`supervisor.output`), from their ends.

NAME.log is rotated to NAME.log.1 (newest), .2 and .3. The files may be rotated or removed while
they are read, may hold arbitrary bytes, and may contain lines without end.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Longer lines are truncated: the reader is a person.
LONGEST_BYTES = 8 * 2**10
_OLDER = 3
#: Bytes to read from the end of one file: the minimum, the amount per line, the maximum.
_LEAST_BYTES, _LINE_BYTES, _MOST_BYTES = 2**20, 2**11, 2**25
_PIECE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class LogLine:
    at: str  # ISO 8601, sortable: its own time, or that of the last line that has one
    name: str  # of the process
    text: str


def find_log_files(folder: Path) -> dict[str, Path]:
    """Return the current log file of each process, by process name."""
    found = sorted((folder / "logs").glob("*.log"))
    return {process_of(path): path for path in found if path.is_file()}


def process_of(path: Path) -> str:
    """Return the process name for a log file: "a~0.log" is a/0, "gateway-0.log" is gateway/0."""
    stem = path.name.removesuffix(".log")
    return stem.replace("~", "/") if "~" in stem else stem.replace("-", "/", 1)


def is_of(process: str, name: str) -> bool:
    """Return whether `name` is the process or its model; "" matches all processes."""
    return name in ("", process, process.rpartition("/")[0])


def last_lines(name: str, path: Path, most: int, most_bytes: int = _MOST_BYTES) -> list[LogLine]:
    """Return the last `most` lines of one process in order, including rotated files.

    At most `most_bytes` of each file are read.
    """
    texts: list[str] = []
    written = 0.0
    for number in range(_OLDER + 1):
        older = path.with_name(f"{path.name}.{number}") if number else path
        with contextlib.suppress(OSError):  # just rotated, or absent
            written = written or older.stat().st_mtime
            texts = [*_read_end(older, most - len(texts), most_bytes), *texts]
        if len(texts) >= most:
            break
    return _date_lines(name, texts[-most:] if most else [], written)


def _read_end(path: Path, most: int, most_bytes: int) -> list[str]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        wanted = min(size, max(_LEAST_BYTES, most * _LINE_BYTES), most_bytes)
        file.seek(size - wanted)
        lines = file.read(wanted).split(b"\n")
    if wanted < size and len(lines) > 1:
        del lines[0]  # an incomplete line
    if not lines[-1]:
        lines.pop()
    return [_decode_line(line) for line in lines[-most:]] if most > 0 else []


def _date_lines(name: str, texts: list[str], written: float) -> list[LogLine]:
    """Date the lines. A line without a time gets that of the line before, or of the first after."""
    known = [timestamp_of(text) for text in texts]
    at = next(filter(None, known), time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(written)))
    lines = []
    for text, own in zip(texts, known, strict=True):
        at = own or at
        lines.append(LogLine(at, name, text))
    return lines


def timestamp_of(text: str) -> str:
    """Return the timestamp of a line of servekit's own JSON logging, or ""."""
    if text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(text)
            told = said.get("timestamp", "")
            return told if isinstance(told, str) else ""
    return ""


def _decode_line(line: bytes) -> str:
    cut = line[:LONGEST_BYTES].decode(errors="replace")
    more = len(line) - LONGEST_BYTES
    return f"{cut} … ({more} bytes more)" if more > 0 else cut


class Tail:
    """A reader that follows one file by its name, through rotations."""

    def __init__(self, path: Path, *, from_start: bool) -> None:
        self._path = path
        self._fd: int | None = None
        self._rest = b""
        self._cut = False  # skip the rest of an overlong line
        self._open()
        if self._fd is not None and not from_start:
            os.lseek(self._fd, 0, os.SEEK_END)

    def lines(self) -> Iterator[str]:
        """Yield the lines written since the last call; buffers at most one block and one line."""
        yield from self._read()
        if self._is_another():
            yield from self._read()  # written between the read above and the rotation
            self.close()
            self._open()
            yield from self._read()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def _is_another(self) -> bool:
        """Return whether another file than the open one has the name now."""
        try:
            there = self._path.stat()
        except OSError:
            return False
        return self._fd is None or not os.path.samestat(there, os.fstat(self._fd))

    def _read(self) -> Iterator[str]:
        while self._fd is not None and (piece := os.read(self._fd, _PIECE_BYTES)):
            *lines, rest = (self._rest + piece).split(b"\n")
            for line in lines:
                if not self._cut:
                    yield _decode_line(line)
                self._cut = False
            if len(rest) > LONGEST_BYTES:
                if not self._cut:
                    yield f"{_decode_line(rest[:LONGEST_BYTES])} …"
                self._cut, rest = True, b""
            self._rest = rest
