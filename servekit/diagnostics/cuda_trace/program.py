"""Starts a program with the recorder in it, and watches its processes from outside meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from servekit.errors import ConfigError, StartError

INJECTED = Path(__file__).parent / "injected"
#: How often the open files of all its processes are looked at, from outside.
_LOOK_S = 0.05
_DEVICES = "/dev/nvidia"


@dataclass(slots=True)
class Trace:
    """What was recorded: each process's lines, and what was seen of its files from outside."""

    command: Sequence[str]
    returncode: int
    lines: dict[int, list[dict[str, Any]]]
    #: Of processes that have opened a GPU's device file: (its command line, those files).
    seen: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    #: With --import, all that happens happens at an import.
    only_imports: bool = False


def command_of(words: Sequence[str], module: str | None) -> list[str]:
    """What to start: words as they are, a script by our Python, or the import of a module.

    Raises ConfigError.
    """
    if module is not None:
        if words:
            raise ConfigError("give a command or --import MODULE, not both")
        if not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(f"{module!r} is no name of a module")
        return [sys.executable, "-c", f"import {module}"]
    if not words:
        raise ConfigError("what shall run? servekit trace-cuda -- python app.py")
    if words[0].endswith(".py"):
        return [sys.executable, *words]
    return list(words)


def environment(base: Mapping[str, str], directory: Path) -> dict[str, str]:
    """`base` with the recorder in every Python that it reaches."""
    path = [str(INJECTED), *filter(None, [base.get("PYTHONPATH", "")])]
    return {**base, "PYTHONPATH": os.pathsep.join(path), "SERVEKIT_TRACE_CUDA": str(directory)}


def run(
    command: Sequence[str],
    directory: Path,
    descendants: Callable[[int], Sequence[int]],
    *,
    stdout: int | None = None,
) -> Trace:
    """Run it to its end and gather what was recorded. Raises StartError.

    `descendants` gives the PIDs of all that a process has started. SIGTERM and SIGHUP are passed
    on; Ctrl-C reaches the program by itself.
    """
    env = environment(os.environ, directory)
    try:
        process = subprocess.Popen(command, env=env, stdout=stdout)
    except OSError as error:
        raise StartError(f"cannot start {command[0]}: {error.strerror}") from error
    seen: dict[int, tuple[str, list[str]]] = {}
    with _passed_on(process):
        while process.poll() is None:
            for pid in (process.pid, *descendants(process.pid)):
                _look(pid, seen)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
    return Trace(command, process.returncode, gathered(directory), seen)


def gathered(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """The lines of every process; a last one that was cut short is left out."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in directory.glob("*.jsonl"):
        lines = found.setdefault(int(path.stem), [])
        for text in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return dict(sorted(found.items(), key=_began_at))


def _began_at(item: tuple[int, list[dict[str, Any]]]) -> float:
    return float(item[1][0]["at"]) if item[1] else 0.0


def _look(pid: int, seen: dict[int, tuple[str, list[str]]]) -> None:
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
        if number != signal.SIGINT:  # a terminal gives that one to all
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
