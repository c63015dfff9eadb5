"""The files that children's output is kept in (`supervisor.output`), read from their ends.

NAME.log, and what it was rotated to: NAME.log.1 (older), .2, .3. They may be rotated or removed
while they are read, may hold anything, and a line may have no end.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: A longer line is cut: it is to be looked at by a person.
LONGEST_BYTES = 8 * 2**10
_OLDER = 3
#: Of the end of one file: at least so much, for each line asked for so much, at most so much.
_LEAST_BYTES, _LINE_BYTES, _MOST_BYTES = 2**20, 2**11, 2**25
_PIECE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Line:
    at: str  # in ISO 8601, as far as it is known: of the last line that tells; sortable
    name: str  # of the process
    text: str


def files(folder: Path) -> dict[str, Path]:
    """The newest file of each process, by its name."""
    found = sorted((folder / "logs").glob("*.log"))
    return {process_of(path): path for path in found if path.is_file()}


def process_of(path: Path) -> str:
    """ "a~0.log" is of a/0; a name without "~" is a gateway's: "gateway-0.log"."""
    stem = path.name.removesuffix(".log")
    return stem.replace("~", "/") if "~" in stem else stem.replace("-", "/", 1)


def is_of(process: str, name: str) -> bool:
    """`name` is a process or a model; "" is all."""
    return name in ("", process, process.rpartition("/")[0])


def last(name: str, path: Path, most: int, most_bytes: int = _MOST_BYTES) -> list[Line]:
    """The last lines of one process, what was rotated away included; the newest last.

    At most `most_bytes` of each file are read.
    """
    texts: list[str] = []
    written = 0.0
    for number in range(_OLDER + 1):
        older = path.with_name(f"{path.name}.{number}") if number else path
        with contextlib.suppress(OSError):  # it has just been rotated, or there is none
            written = written or older.stat().st_mtime
            texts = [*_end(older, most - len(texts), most_bytes), *texts]
        if len(texts) >= most:
            break
    return _dated(name, texts[-most:] if most else [], written)


def _end(path: Path, most: int, most_bytes: int) -> list[str]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        wanted = min(size, max(_LEAST_BYTES, most * _LINE_BYTES), most_bytes)
        file.seek(size - wanted)
        lines = file.read(wanted).split(b"\n")
    if wanted < size and len(lines) > 1:
        del lines[0]  # a part of a line
    if not lines[-1]:
        lines.pop()
    return [_text(line) for line in lines[-most:]] if most > 0 else []


def _dated(name: str, texts: list[str], written: float) -> list[Line]:
    """Lines that tell no time have that of the line before, the first ones of the first after."""
    known = [stamp(text) for text in texts]
    at = next(filter(None, known), time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(written)))
    lines = []
    for text, own in zip(texts, known, strict=True):
        at = own or at
        lines.append(Line(at, name, text))
    return lines


def stamp(text: str) -> str:
    """The time that a line of our own logging tells."""
    if text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(text)
            told = said.get("timestamp", "")
            return told if isinstance(told, str) else ""
    return ""


def _text(line: bytes) -> str:
    cut = line[:LONGEST_BYTES].decode(errors="replace")
    more = len(line) - LONGEST_BYTES
    return f"{cut} … ({more} bytes more)" if more > 0 else cut


class Tail:
    """Follows one file by its name, through rotations."""

    def __init__(self, path: Path, *, from_start: bool) -> None:
        self._path = path
        self._fd: int | None = None
        self._rest = b""
        self._cut = False  # the rest of a line that was too long is passed over
        self._open()
        if self._fd is not None and not from_start:
            os.lseek(self._fd, 0, os.SEEK_END)

    def lines(self) -> Iterator[str]:
        """What has come since the last time; never more in memory than a piece and a line."""
        yield from self._read()
        if self._is_another():
            yield from self._read()  # what was written between our look and the rotation
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
        """There is a file by that name, and it is not the one that is open."""
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
                    yield _text(line)
                self._cut = False
            if len(rest) > LONGEST_BYTES:
                if not self._cut:
                    yield f"{_text(rest[:LONGEST_BYTES])} …"
                self._cut, rest = True, b""
            self._rest = rest
