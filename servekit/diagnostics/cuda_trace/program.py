"""Start of a program with the recorder in it, and observation of its processes from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from servekit.errors import ConfigError, StartError
from servekit.system import procfs

INJECTED = Path(__file__).parent / "injected"
#: Interval of looking at the open files of all its processes.
_LOOK_S = 0.05
_DEVICES = "/dev/nvidia"


@dataclass(slots=True)
class Trace:
    """The recorded lines of each process, and the device files seen from outside."""

    command: Sequence[str]
    returncode: int
    lines: dict[int, list[dict[str, Any]]]
    #: By PID, for processes that have opened a GPU's device file: command line, those files.
    seen: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    #: With --import, every event is caused by an import.
    only_imports: bool = False


def command_of(words: Sequence[str], module: str | None) -> list[str]:
    """Return the command: the words, a script run by this Python, or the import of a module.

    Raises ConfigError.
    """
    if module is not None:
        if words:
            raise ConfigError("give a command or --import MODULE, not both")
        if not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(f"{module!r} is not the name of a module")
        return [sys.executable, "-c", f"import {module}"]
    if not words:
        raise ConfigError("no command to run: servekit trace-cuda -- python app.py")
    if words[0].endswith(".py"):
        return [sys.executable, *words]
    return list(words)


def traced_environment(base: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return `base`, extended so that every Python started with it runs the recorder."""
    path = [str(INJECTED), *filter(None, [base.get("PYTHONPATH", "")])]
    return {**base, "PYTHONPATH": os.pathsep.join(path), "SERVEKIT_TRACE_CUDA": str(directory)}


def run_traced(command: Sequence[str], directory: Path, *, stdout: int | None = None) -> Trace:
    """Run the program to its end and collect the records. Raises StartError.

    SIGTERM and SIGHUP are forwarded; Ctrl-C reaches the program by itself.
    """
    env = traced_environment(os.environ, directory)
    try:
        process = subprocess.Popen(command, env=env, stdout=stdout)
    except OSError as error:
        raise StartError(f"cannot start {command[0]}: {error.strerror}") from error
    seen: dict[int, tuple[str, list[str]]] = {}
    with _passed_on(process):
        while process.poll() is None:
            below = procfs.find_descendants(process.pid)
            for pid in (process.pid, *(one.pid for one in below)):
                _look_at_process(pid, seen)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
    return Trace(command, process.returncode, gather_records(directory), seen)


def gather_records(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of every process, without truncated last lines."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in directory.glob("*.jsonl"):
        lines = found.setdefault(int(path.stem), [])
        for text in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return dict(sorted(found.items(), key=_began_at))


def _began_at(item: tuple[int, list[dict[str, Any]]]) -> float:
    return float(item[1][0]["at"]) if item[1] else 0.0


def _look_at_process(pid: int, seen: dict[int, tuple[str, list[str]]]) -> None:
    held = set()
    try:
        for fd in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(fd.path))  # noqa: PTH115  (many of them, often)
        command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
    except OSError:
        return
    if devices := {path for path in held if path.startswith(_DEVICES)}:
        before = seen.get(pid, ("", []))[1]
        seen[pid] = command.decode(errors="replace"), sorted({*before, *devices})


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def pass_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:  # the terminal sends it to all processes
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
