"""Process information from /proc; every answer may be stale by the time it is used.

Source: proc(5), /proc/PID/stat and /proc/PID/statm.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    """An entry of the process table. `started`, in ticks since boot, tells reused PIDs apart."""

    pid: int
    state: str
    parent: int
    group: int
    started: int


def read_process(pid: int) -> Process | None:
    """Return the process with that PID, even if it is a zombie; None if there is none."""
    try:
        text = _read_small(f"/proc/{pid}/stat").decode(errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses, which may itself contain parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return Process(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[19]))


def _read_small(path: str) -> bytes:
    """Return a file of up to a page with the fewest system calls. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _PAGE_BYTES)
    finally:
        os.close(fd)


def all_processes() -> Iterator[Process]:
    """Yield all processes except zombies."""
    for process in map(read_process, all_pids()):
        if process is not None and process.state not in "ZX":
            yield process


def find_descendants(pid: int, processes: Iterable[Process] | None = None) -> list[Process]:
    """Return all living descendants of a process, among `processes` if these were read already."""
    of: dict[int, list[Process]] = {}
    for process in all_processes() if processes is None else processes:
        of.setdefault(process.parent, []).append(process)
    found, parents = list[Process](), [pid]
    while parents:
        children = of.pop(parents.pop(), [])
        found += children
        parents += [child.pid for child in children]
    return found


def all_pids() -> list[int]:
    """Return the PIDs of all processes, zombies included."""
    return [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdecimal()]


def is_alive(pid: int, started: int) -> bool:
    """Return whether this very process still runs; another one with its PID does not count."""
    process = read_process(pid)
    return process is not None and process.started == started and process.state not in "ZX"


def name_signal(number: int) -> str:
    """Return the name of a signal: "SIGKILL", or "signal 99" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def age_s() -> float:
    """Return the age of this process in seconds, to a clock tick; 0 if unknown."""
    own = read_process(os.getpid())
    if own is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - own.started / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int, others: Collection[int] = ()) -> int:
    """Return the resident memory of a process, 0 if it is gone, and of `others` that belong to it.

    For `others`, memory that may be shared with the process does not count: files and shared
    memory.
    """
    resident, _ = _resident_memory(pid)
    return resident + sum(own - shared for own, shared in map(_resident_memory, others))


def _resident_memory(pid: int) -> tuple[int, int]:
    """Return resident bytes, and how many may be shared. Source: proc(5), /proc/PID/statm."""
    try:
        _, resident, shared, *_ = (_PROC / str(pid) / "statm").read_text().split()
    except (OSError, ValueError):
        return 0, 0
    return int(resident) * _PAGE_BYTES, int(shared) * _PAGE_BYTES


def command_line(pid: int, longest: int = 80) -> str:
    """Return the command line, shortened for messages; "" if it is gone or not readable."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    text = " ".join(word.decode(errors="replace") for word in words)
    if len(text) > longest:  # the program's name matters more than its folder
        program = words[0].decode(errors="replace")
        text = text.removeprefix(program[: program.rfind("/") + 1])
    return text if len(text) <= longest else text[: longest - 1] + "…"


def find_marked(mark: str) -> Iterator[Process]:
    """Yield other living processes whose initial environment has `mark` (NAME=VALUE).

    Only those that we may read: our own user's.
    """
    wanted = mark.encode()
    for process in all_processes():
        if process.pid != os.getpid() and wanted in _read_environ(process.pid):
            yield process


def find_limited(realtime_us: int) -> Iterator[Process]:
    """Yield other living processes with that soft limit on real-time CPU time.

    Source: proc(5), /proc/PID/limits; getrlimit(2), RLIMIT_RTTIME.
    """
    for process in all_processes():
        if process.pid != os.getpid() and _realtime_limit(process.pid) == b"%d" % realtime_us:
            yield process


def _realtime_limit(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/limits", "rb", buffering=0) as file:  # noqa: PTH123
            _, found, rest = file.read().partition(b"Max realtime timeout")
    except OSError:
        return b""
    return rest.split(maxsplit=1)[0] if found else b""


def is_ours(pid: int) -> bool:
    """Return whether the process runs as our user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()  # noqa: PTH116
    except OSError:
        return False


def has_variable(pid: int, name: str) -> bool:
    """Return whether the process started with that environment variable."""
    start = f"{name}=".encode()
    return any(entry.startswith(start) for entry in _read_environ(pid))


def read_variable(pid: int, name: str) -> str | None:
    """Return the initial value of an environment variable; None if unset or not readable."""
    start = f"{name}=".encode()
    found = [entry for entry in _read_environ(pid) if entry.startswith(start)]
    return found[0].removeprefix(start).decode(errors="replace") if found else None


def _read_environ(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return file.read().split(b"\0")
    except OSError:
        return []
