"""Logging, configured once per process: named loggers, one line per event, to stderr.

Children write JSON lines, which the supervisor shows with the child's name. On a terminal an event
is a line for people: the local time, the component, and the event's sentence
(`servekit.log_events`). Elsewhere it is its name and fields, or a JSON object. Records of libraries
(uvicorn, transformers), which use the standard library's `logging`, become events too.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, TextIO

import structlog

from servekit import log_events
from servekit.sanitize import strip_controls

_Line = MutableMapping[str, Any]

#: Columns for the component, and the least width in which sentences are wrapped beside it.
_COMPONENT_COLUMNS = 12
_LEAST_COLUMNS = 20
_COLOURS = {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
_DIM, _CYAN, _RESET = "\x1b[2m", "\x1b[36m", "\x1b[0m"
#: Size of a log file, and the number of older ones that are kept.
_FILE_BYTES, _FILES = 10 * 2**20, 3
#: Lines that wait for a reader who has stopped.
_MOST_WAITING = 1000
#: How long a process that ends waits for them to be read.
_LAST_S = 1.0
#: What a pipe that is writable surely takes at once, a page; see pipe(7). A character is encoded in
#: six bytes at most, as what cannot be encoded is escaped.
_PIECE_BYTES, _CHARACTER_BYTES = 4096, 6
#: Fields that a line for people shows elsewhere or not at all.
_APART = ("event", "timestamp", "level", "logger", "component", "child", "exception", "stack")


def _no_request() -> str:
    return ""


#: Returns the current request id for log lines, "" for none. A gateway sets its own function.
request_id: Callable[[], str] = _no_request
#: The name of this process.
_process = ""


def add_request(logger: Any, name: str, line: _Line) -> Any:
    """Add the id of the request that the line is about, if there is one."""
    if "request" not in line and (id := request_id()):
        line["request"] = id
    return line


def _with_component(logger: Any, name: str, line: _Line) -> Any:
    """Add the process that the line is about: a child, or this one."""
    line["component"] = line.get("child", _process)
    return line


def _with_process(logger: Any, name: str, line: _Line) -> Any:
    line["process"] = _process
    return line


def _of_library(logger: Any, name: str, line: _Line) -> Any:
    """Turn the message of a library into a field."""
    line["text"], line["event"] = line["event"], log_events.LIBRARY
    return line


def _as_message(logger: Any, name: str, line: _Line) -> Any:
    """Show the text of a child or a library instead of the event, and the component only once."""
    if line["event"] in (log_events.OUTPUT, log_events.LIBRARY):
        line["event"] = line.pop("text", "")
    del line["component"]
    return line


def _strip_values(logger: Any, name: str, line: _Line) -> Any:
    """Remove escape sequences: somebody's `tail` or `docker logs` shows the line on a terminal."""
    return {key: strip_controls(it) if isinstance(it, str) else it for key, it in line.items()}


_SHARED: tuple[structlog.typing.Processor, ...] = (
    add_request,
    structlog.stdlib.add_logger_name,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%fZ", utc=True),
    structlog.processors.StackInfoRenderer(),
    _with_component,
)


def configure(
    process: str, *, json: bool = False, level: str = "info", file: Path | None = None
) -> None:
    """Set up logging for this process, which has this name.

    With `file` the log goes there instead of to stderr, in files of a bounded size.
    """
    global _process
    _process = process
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_SHARED, _of_library],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *_renderers(json=json, terminal=file is None and sys.stderr.isatty()),
        ],
    )
    handler = PatientHandler(sys.stderr) if file is None else _open_file(file)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for library in ("httpx", "httpcore"):  # they log each request
        logging.getLogger(library).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def is_writable(fd: int, within_s: float | None = 0.0) -> bool:
    """Return whether a write of up to a page does not wait for whoever reads this descriptor.

    Wait for it for this long, None: for ever.
    """
    writing = select.poll()
    writing.register(fd, select.POLLOUT)
    return bool(writing.poll(None if within_s is None else max(0, int(1000 * within_s))))


class PatientHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr, and never waits for whoever reads it: the process has other work.

    A terminal that is paused (Ctrl-S), `| less` or a log shipper that hangs would stop the loop of
    a process in the middle of a log line. Lines wait until they are read, up to a limit.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._fd = sys.__stderr__.fileno() if sys.__stderr__ else 2
        self._waiting: deque[str] = deque()
        self._lost = 0
        self._waits = False  # a thread waits for the reader

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"{self.format(record)}\n"
            if len(self._waiting) >= _MOST_WAITING:
                self._lost += 1
                return
            if self._lost:
                text = f"[{self._lost} lines lost: nobody read the log]\n{text}"
                self._lost = 0
            self._waiting.append(text)
            self._write_waiting()
            if self._waiting and not self._waits:
                self._waits = True
                threading.Thread(target=self._await_reader, name="log", daemon=True).start()
        except Exception:
            self._waiting.clear()
            self.handleError(record)

    def close(self) -> None:
        """Give the reader a last second for what waits: the process ends."""
        until = time.monotonic() + _LAST_S
        self.acquire()
        try:
            while self._waiting and is_writable(self._fd, until - time.monotonic()):
                self._write_waiting()
        except (OSError, ValueError):
            self._waiting.clear()
        finally:
            self.release()
        super().close()

    def _write_waiting(self) -> None:
        while self._waiting and is_writable(self._fd):
            text = self._waiting.popleft()
            size = _PIECE_BYTES if text.isascii() else _PIECE_BYTES // _CHARACTER_BYTES
            self.stream.write(text[:size])
            self.stream.flush()
            if rest := text[size:]:
                self._waiting.appendleft(rest)

    def _await_reader(self) -> None:
        while self._waits:
            is_writable(self._fd, None)
            self.acquire()
            try:
                self._write_waiting()
            except (OSError, ValueError):  # the reader, or the stream, is gone
                self._waiting.clear()
            finally:
                self._waits = bool(self._waiting)
                self.release()


def _open_file(path: Path) -> logging.Handler:
    from logging.handlers import RotatingFileHandler

    return RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=_FILES, encoding="utf-8")


def _renderers(*, json: bool, terminal: bool) -> list[structlog.typing.Processor]:
    if json:
        exceptions = structlog.processors.format_exc_info
        return [_with_process, exceptions, structlog.processors.JSONRenderer()]
    if terminal:
        return [structlog.processors.format_exc_info, _TerminalRenderer()]
    plain = structlog.dev.plain_traceback  # by default rich's, with the values of all variables
    return [
        _as_message,
        _strip_values,
        structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0, exception_formatter=plain),
    ]


class _TerminalRenderer:
    """Formats an event for people, in colours unless NO_COLOR is set."""

    def __init__(self) -> None:
        self._in_colour = not os.environ.get("NO_COLOR")

    def __call__(self, logger: Any, name: str, line: _Line) -> str:
        level, component = line["level"], strip_controls(str(line["component"]))
        fields = {key: value for key, value in line.items() if key not in _APART}
        said = strip_controls(log_events.sentence(str(line["event"]), fields))
        if level in ("warning", "error", "critical"):
            said = f"{level}: {said}"
        at, component = time.strftime("%H:%M:%S"), f"{component:<{_COMPONENT_COLUMNS}}"
        shown = _wrapped(said, len(at) + len(component) + 2)
        for more in ("stack", "exception"):
            if more in line:
                shown += f"\n{strip_controls(str(line[more]))}"
        if not self._in_colour:
            return f"{at} {component} {shown}"
        colour = _COLOURS.get(level, "")
        return f"{_DIM}{at}{_RESET} {_CYAN}{component}{_RESET} {colour}{shown}{_RESET}"


def _wrapped(text: str, indent: int) -> str:
    """Wrap the lines that are too long for the terminal, with an indent where that leaves room."""
    room = _columns() - indent
    if room < _LEAST_COLUMNS:
        return text  # the terminal wraps
    lines = []
    for line in text.split("\n"):
        fits = len(line) <= room
        # words are not broken, so that paths and addresses can be copied
        lines += [line] if fits else textwrap.wrap(line, room, break_long_words=False)
    return f"\n{' ' * indent}".join(lines)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.__stderr__.fileno()).columns if sys.__stderr__ else 0
    except OSError:
        return 0
